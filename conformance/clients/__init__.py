"""Libraries that people train with, over torch and over what takes its place: tiny models, the same losses and states.

A rank is either torch's or the subject's for life, since a library binds torch's names when it is imported. So the
modules that import such a library may be imported on ranks alone, by name.
"""
