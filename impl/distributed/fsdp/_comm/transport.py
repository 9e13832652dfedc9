"""Interface of transports, which exchange elements between ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

# Takes what issues a collective and its arguments, the group first. Issues it and waits for it.
Complete = Callable[..., Any]


def issue_and_wait(issue: Callable[..., dist.Work], *arguments: object) -> None:
    issue(*arguments).wait()


class OwnFault(RuntimeError):
    """Raised for a known error of our own exchange, as opposed to a failed collective."""


class Transport(Protocol):
    """Transport of one process group. All ranks must call the same method with the same number of elements."""

    def all_gather(self, output: Tensor, shard: Tensor, complete: Complete) -> None:
        """Fill `output` with every rank's `shard`, concatenated in rank order."""

    def all_gather_rows(self, outputs: Sequence[Tensor], complete: Complete) -> None:
        """Fill each tensor [W, n] of `outputs` with every rank's row. This rank's rows must already be in place."""

    def reduce_scatter(self, shard: Tensor, buffer: Tensor, complete: Complete) -> None:
        """Fill `shard` with this rank's shard of the sum of all buffers. `buffer` may be overwritten."""
