"""Finds ranks that part: that issue different collectives, have ended, or are stopped; begin at `collective_order`."""
