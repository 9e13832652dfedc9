"""Libraries that people train with, over torch and over what takes its place: tiny models, the same losses and states.

A rank is either torch's or the subject's for life, since a library binds torch's names when it is imported. So the
modules called `*_cases` and what they import may be imported on ranks alone, by name.
"""
