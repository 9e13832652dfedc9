"""Gradients that are DTensors over one mesh: each rank's parts of them, and what the ranks make of their norms.

What defines DTensors takes half a second to import, and is there where there are some: it is not imported here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from impl import kernels
from impl.kernels import dtypes_of
from impl.kernels.norm import result_dtype
from impl.optim._shards import exchanged, is_distributed

_CUTS = {"Replicate": False, "Shard": True, "_StridedShard": True}  # by the class of a placement
_Cut = tuple[bool, ...]  # for each dimension of a mesh, whether its ranks have different parts


@dataclass(frozen=True)
class ShardedTensors:
    """
    Args:
        dtensors: none of which has sums to take.
        parts: their local tensors.
        cuts: how each is cut.
    """

    mesh: DeviceMesh
    dtensors: Sequence[Any]
    parts: list[Tensor]
    cuts: Sequence[_Cut]

    @property
    def has_empty(self) -> bool:
        """Whether one has no elements on any rank; that it has none on this one says nothing."""
        return not all(prod(dtensor.shape) for dtensor in self.dtensors)

    def joint_norm(self, norm_type: float) -> Tensor:
        """The p-norm of all as one vector, for a positive p; a plain tensor, the same on every rank.

        Collectives: one all-gather for each dimension of the mesh that cuts any.
        """
        norms = {cut: self._norm(parts, norm_type) for cut, parts in self._by_cut().items()}
        for dim in range(self.mesh.ndim):
            cuts = [cut for cut in norms if cut[dim]]
            if cuts:
                everyones = exchanged(torch.stack([norms[cut] for cut in cuts]), self.mesh.get_group(dim))
                for cut, column in zip(cuts, everyones.unbind(1), strict=True):
                    norms[cut] = kernels.total_norm([column.contiguous()], norm_type)
        found = [*norms.values()]
        joint = found[0] if len(found) == 1 else kernels.total_norm(found, norm_type)
        return joint.to(result_dtype(dtypes_of(self.parts)))

    def _by_cut(self) -> dict[_Cut, list[Tensor]]:
        """The parts that have elements, in an order that is the same on every rank."""
        found: dict[_Cut, list[Tensor]] = {cut: [] for cut in self.cuts}
        if len(found) == 1 and all(map(Tensor.numel, self.parts)):
            return {self.cuts[0]: self.parts}
        for cut, part in zip(self.cuts, self.parts, strict=True):
            if part.numel():
                found[cut].append(part)
        return found

    def _norm(self, parts: list[Tensor], norm_type: float) -> Tensor:
        """In f64, whatever this rank's dtypes are: the ranks exchange it."""
        if not parts:
            return torch.zeros((), dtype=torch.float64, device=self.parts[0].device)
        return kernels.total_norm(parts, norm_type).to(torch.float64)

    def replicated(self, value: Tensor) -> Any:
        """A DTensor of a tensor that is the same on every rank."""
        made_of = _module()
        meta = made_of._dtensor_spec.TensorMeta(value.shape, value.stride(), value.dtype)
        placements = (made_of.Replicate(),) * self.mesh.ndim
        spec = made_of._dtensor_spec.DTensorSpec(self.mesh, placements, tensor_meta=meta)
        # As `DTensor.from_local` makes it, which is differentiable and takes ten times as long.
        return made_of.DTensor(value, spec, requires_grad=False)

    def part_of(self, value: Tensor) -> Tensor | None:
        """What every rank has of a DTensor over the same mesh, or of a plain tensor; None of any other.

        Collectives: of one that is not replicated, as the norm that torch hands out for infinity, what makes it so.
        """
        if not is_distributed(value):
            return value if type(value) is Tensor else None
        dtensor: Any = value
        if dtensor.device_mesh != self.mesh:
            return None
        if not all(placement.is_replicate() for placement in dtensor.placements):
            dtensor = dtensor.redistribute(placements=[_module().Replicate()] * self.mesh.ndim)
        local: Any = dtensor._local_tensor
        return local if type(local) is Tensor else local.wait()  # on its way, from a collective

    def note_written(self) -> None:
        """The parts were written to, and with them the DTensors, of which autograd keeps count by themselves."""
        torch.autograd.graph.increment_version(self.dtensors)


def sharded_tensors(tensors: Sequence[Any]) -> ShardedTensors | None:
    """None if they are not all DTensors over one mesh that this rank is in, or one has sums to take."""
    if {*map(type, tensors)} != {_module().DTensor}:
        return None
    mesh: DeviceMesh = tensors[0].device_mesh
    known: dict[tuple[type, ...], _Cut] = {}
    cuts: list[_Cut] = []
    for tensor in tensors:
        spec = tensor._spec
        kinds = tuple(map(type, spec.placements))
        if spec.mesh is not mesh and spec.mesh != mesh:
            return None
        if kinds not in known:
            names = [kind.__name__ for kind in kinds]
            if not _CUTS.keys() >= {*names}:
                return None
            known[kinds] = tuple(_CUTS[name] and mesh.size(dim) > 1 for dim, name in enumerate(names))
        cuts.append(known[kinds])
    if mesh.get_coordinate() is None:
        return None
    return ShardedTensors(mesh, tensors, [tensor._local_tensor for tensor in tensors], cuts)


def _module() -> Any:
    """torch.distributed.tensor, where there are DTensors."""
    package: Any = dist  # which says nothing of what others import of it
    return package.tensor
