"""Cases that ranks run: each rank does its part and returns what it saw; whatever is asserted, the parent asserts.

A library travels as its spec, a gradient as its whole value and its placement.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from conformance.judge.library import load_library
from conformance.judge.outcome import Outcome, observe
from conformance.ranks import Rank


def load(rank: Rank, *, library: str) -> None:
    """Import a library, so that no deadline counts it."""
    load_library(library)


def all_reduce(rank: Rank, *, values: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """What this rank has after the reduction; rank i brings `values[i]`."""
    mine = values[rank.rank].to(rank.device, copy=True)
    dist.all_reduce(mine, op=getattr(dist.ReduceOp, op))
    return mine.cpu()


@dataclass(frozen=True)
class PlacedGradient:
    """A gradient by its whole value.

    `shard_dim` says how it lies on a mesh of one dimension, None being a copy on every rank; `placements` how on
    another one.
    """

    value: torch.Tensor
    shard_dim: int | None
    is_dtensor: bool = True
    placements: tuple[Placement, ...] = ()

    def on(self, mesh: DeviceMesh) -> torch.Tensor:
        value = self.value.to(mesh.device_type)
        if not self.is_dtensor:
            return value.clone()
        placements = self.placements or (Replicate() if self.shard_dim is None else Shard(self.shard_dim),)
        if not {*map(type, placements)} <= {Replicate, Shard}:
            # What nothing is distributed as: a rows' part of each rank, or sums to take.
            part = (
                value
                if any(one.is_partial() for one in placements)
                else value.chunk(mesh.size())[mesh.get_rank()]
            )
            return DTensor.from_local(
                part.clone(), mesh, placements, run_check=False, shape=value.shape, stride=value.stride()
            )
        # Every rank has the whole value, so nothing need be sent.
        return distribute_tensor(value.clone(), mesh, placements, src_data_rank=None)


def clip(
    rank: Rank,
    *,
    library: str,
    function: str,
    gradients: Sequence[PlacedGradient],
    arguments: Mapping[str, Any],
    mesh_shape: tuple[int, ...] = (),
) -> Outcome:
    """Call one of `nn.utils`' clipping functions on parameters that lie on a mesh of all ranks.

    The outcome's value is what came back, made whole; what is watched are this rank's parts of the gradients.
    """
    sizes = mesh_shape or (rank.world_size,)
    mesh = rank.mesh(*sizes, names=tuple("abc"[: len(sizes)]))
    placed = [gradient.on(mesh) for gradient in gradients]
    parts = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in placed]
    called = load_library(library).find(f"nn.utils.{function}")
    takes = placed if function == "get_total_norm" else [_parameter(grad) for grad in placed]
    return observe(lambda: _unsharded(called(takes, **arguments)), watch=parts)


def _parameter(grad: torch.Tensor) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.zeros_like(grad))
    parameter.grad = grad
    return parameter


def _unsharded(result: Any) -> Any:
    if isinstance(result, DTensor):
        return {"mesh": tuple(result.device_mesh.shape), "dtype": result.dtype, "whole": result.full_tensor()}
    return result
