"""torchtitan's clipping, as it is."""
