"""Mirrors `torch.distributed`."""
