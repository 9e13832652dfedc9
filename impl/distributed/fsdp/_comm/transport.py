"""What a way to exchange elements has to do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

# Takes what issues a collective and its arguments, the group first. Issues it and waits for it.
Complete = Callable[..., Any]


def issue_and_wait(issue: Callable[..., dist.Work], *arguments: Any) -> None:
    issue(*arguments).wait()


class OwnFault(RuntimeError):
    """What went wrong is known here, and is no matter of collectives that fail."""


class Transport(Protocol):
    """Of one process group. All of its ranks call the same method, with as many elements."""

    def all_gather(self, output: Tensor, mine: Tensor, complete: Complete) -> None:
        """Fill `output` with every rank's `mine`, one behind the other."""

    def all_gather_rows(self, outputs: Sequence[Tensor], complete: Complete) -> None:
        """Fill each of several [W, n] of one dtype with every rank's row; this rank's is there."""

    def reduce_scatter(self, shard: Tensor, buffer: Tensor, complete: Complete) -> None:
        """Fill `shard` with the sum of this rank's part of every rank's `buffer`, which may be overwritten."""
