"""Parameters of a unit: which ones it manages, how they are registered, and the protocols of a group."""
