"""Bugs planted in amp_autocast_mode."""
