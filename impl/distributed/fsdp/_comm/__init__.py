"""Communication: process groups, collectives, transports, and `desync`, which finds ranks that diverge."""
