"""Gradients that are DTensors over one mesh: their local tensors, and the joint norm of all ranks.

`torch.distributed.tensor` takes half a second to import, so it is not imported here. If a DTensor exists, it has been.
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
from impl.optim._shards import all_gather_numbers, is_distributed

_IS_SHARDED = {"Replicate": False, "Shard": True, "_StridedShard": True}  # class names of placements
# For each dimension of a mesh, whether its ranks hold different shards.
_Sharding = tuple[bool, ...]


@dataclass(frozen=True)
class ShardedTensors:
    """DTensors over one mesh, none of them partial, with their local tensors."""

    mesh: DeviceMesh
    dtensors: Sequence[Any]
    local_tensors: list[Tensor]
    shardings: Sequence[_Sharding]

    @property
    def has_empty(self) -> bool:
        """Whether a DTensor is empty on every rank. A local tensor may be empty on this rank only."""
        return not all(prod(dtensor.shape) for dtensor in self.dtensors)

    def joint_norm(self, norm_type: float) -> Tensor:
        """Return the p-norm of all DTensors as one vector, for a positive p: a plain tensor, equal on every rank.

        Collectives: one all-gather for each sharded dimension of the mesh.
        """
        norms = {sharding: self._norm(local, norm_type) for sharding, local in self._by_sharding().items()}
        for dim in range(self.mesh.ndim):
            shardings = [sharding for sharding in norms if sharding[dim]]
            if shardings:
                local_norms = torch.stack([norms[sharding] for sharding in shardings])
                norms_of_ranks = all_gather_numbers(local_norms, self.mesh.get_group(dim))
                for sharding, column in zip(shardings, norms_of_ranks.unbind(1), strict=True):
                    norms[sharding] = kernels.total_norm([column.contiguous()], norm_type)
        partial_norms = [*norms.values()]
        joint = partial_norms[0] if len(partial_norms) == 1 else kernels.total_norm(partial_norms, norm_type)
        return joint.to(result_dtype(dtypes_of(self.local_tensors)))

    def _by_sharding(self) -> dict[_Sharding, list[Tensor]]:
        """Return the non-empty local tensors of each sharding, in the same order on every rank."""
        batches: dict[_Sharding, list[Tensor]] = {sharding: [] for sharding in self.shardings}
        if len(batches) == 1 and all(map(Tensor.numel, self.local_tensors)):
            return {self.shardings[0]: self.local_tensors}
        for sharding, tensor in zip(self.shardings, self.local_tensors, strict=True):
            if tensor.numel():
                batches[sharding].append(tensor)
        return batches

    def _norm(self, tensors: list[Tensor], norm_type: float) -> Tensor:
        """Return the norm in f64, because ranks with different dtypes exchange it."""
        if not tensors:
            return torch.zeros((), dtype=torch.float64, device=self.local_tensors[0].device)
        return kernels.total_norm(tensors, norm_type).to(torch.float64)

    def replicated(self, value: Tensor) -> Any:
        """Return a replicated DTensor of a tensor that is equal on every rank."""
        module = _module()
        meta = module._dtensor_spec.TensorMeta(value.shape, value.stride(), value.dtype)
        placements = (module.Replicate(),) * self.mesh.ndim
        spec = module._dtensor_spec.DTensorSpec(self.mesh, placements, tensor_meta=meta)
        # `DTensor.from_local` would do the same, but is differentiable and takes ten times as long.
        return module.DTensor(value, spec, requires_grad=False)

    def local_value(self, value: Tensor) -> Tensor | None:
        """Return the local value of a plain tensor or of a DTensor over the same mesh, or None for any other.

        Collectives: those that replicate a DTensor that is not, like torch's infinity norm.
        """
        if not is_distributed(value):
            return value if type(value) is Tensor else None
        dtensor: Any = value
        if dtensor.device_mesh != self.mesh:
            return None
        if not all(placement.is_replicate() for placement in dtensor.placements):
            dtensor = dtensor.redistribute(placements=[_module().Replicate()] * self.mesh.ndim)
        local: Any = dtensor._local_tensor
        return local if type(local) is Tensor else local.wait()  # AsyncCollectiveTensor

    def increment_versions(self) -> None:
        """Increment the DTensors' version counters, because autograd does not see writes to their local tensors."""
        torch.autograd.graph.increment_version(self.dtensors)


def sharded_tensors(tensors: Sequence[Any]) -> ShardedTensors | None:
    """Return the DTensors, or None unless all are over one mesh that includes this rank and none is partial."""
    if {*map(type, tensors)} != {_module().DTensor}:
        return None
    mesh: DeviceMesh = tensors[0].device_mesh
    sharding_of: dict[tuple[type, ...], _Sharding] = {}
    shardings: list[_Sharding] = []
    for tensor in tensors:
        spec = tensor._spec
        types = tuple(map(type, spec.placements))
        if spec.mesh is not mesh and spec.mesh != mesh:
            return None
        if types not in sharding_of:
            names = [placement_type.__name__ for placement_type in types]
            if not _IS_SHARDED.keys() >= {*names}:
                return None
            sharding_of[types] = tuple(
                _IS_SHARDED[name] and mesh.size(dim) > 1 for dim, name in enumerate(names)
            )
        shardings.append(sharding_of[types])
    if mesh.get_coordinate() is None:
        return None
    return ShardedTensors(mesh, tensors, [tensor._local_tensor for tensor in tensors], shardings)


def _module() -> Any:
    """Return `torch.distributed.tensor`, which has been imported if a DTensor exists."""
    package: Any = dist
    return package.tensor
