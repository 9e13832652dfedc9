"""Trainings of tiny models with other libraries, over torch and over the subject, with the same losses and states.

A rank runs over torch or over the subject permanently, because a library binds torch's names when it is imported. So
modules that import such a library are imported only on ranks, by name.
"""
