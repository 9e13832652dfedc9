"""Triton kernels and their launchers, in separate modules because Triton is optional and slow to import.

The reference of each kernel in plain torch is the `_…_by_torch` function of the module with the same name one folder
up.
"""
