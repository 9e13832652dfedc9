"""Faults that are injected into a correct subject: see `measure.py`."""
