"""torchtitan's clipping, unchanged."""
