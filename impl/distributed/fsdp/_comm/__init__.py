"""Collectives: process groups, transports that carry elements, and `desync`, which finds ranks that differ."""
