"""A process group whose collectives return at once and move nothing, to run one rank without its peers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

WORLD_SIZE = 8


@contextmanager
def fake_group(world_size: int = WORLD_SIZE, rank: int = 0) -> Iterator[None]:
    """Context manager that makes this process one rank of a fake default group."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415  registers the backend

    hook = sys.excepthook  # replaced by init_process_group
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook
