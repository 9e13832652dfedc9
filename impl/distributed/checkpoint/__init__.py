"""Mirrors the helpers of `torch.distributed.checkpoint` that gather states."""
