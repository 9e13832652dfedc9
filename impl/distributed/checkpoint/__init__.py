"""Mirrors `torch.distributed.checkpoint`: of its helpers, those that gather."""
