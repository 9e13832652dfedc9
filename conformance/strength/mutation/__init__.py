"""Small random changes of torch's own source, or of impl's: see `measure.py`."""
