"""Detection of ranks that issue different collectives, have ended or are stopped. Start at `collective_order`."""
