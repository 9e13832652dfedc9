"""Mirrors `torch.nn`."""
