"""Triton kernels and their launchers; apart from their wrappers because Triton is optional and slow to import.

The reference of each kernel in plain torch is the `_…_by_torch` function of the module of the same name one folder up.
"""
