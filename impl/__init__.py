"""PyTorch's mixed-precision and sharded-training stack, written afresh; modules lie at torch's own paths."""
