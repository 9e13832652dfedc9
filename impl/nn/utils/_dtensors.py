"""Gradients of which some are DTensors: their local tensors, and the joint norm of all ranks.

`torch.distributed.tensor` takes half a second to import, so it is not imported here. If a DTensor exists, it has been.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from impl import kernels
from impl.kernels import PLAIN_TYPES, TensorList, dtypes_of, to_device
from impl.kernels.norm import result_dtype
from impl.optim._list_cache import same
from impl.optim._mesh_placements import MeshPlacements, mesh_placements
from impl.optim._shards import (
    UNSHARDED,
    Sharding,
    combine_norms,
    is_distributed,
    local_part,
    local_parts,
    shardings_of,
)

_ADDED = ("sum", "avg")  # reductions of partial DTensors that scaling commutes with


@dataclass(frozen=True)
class ShardedTensors:
    """DTensors over one mesh or several, and plain tensors, which are equal on every rank."""

    tensors: Sequence[Any]
    specs: MeshPlacements
    local: TensorList  # local tensors, perhaps on several devices
    # Mesh of all tensors. None if there are several, or plain tensors.
    mesh: DeviceMesh | None
    has_partial: bool

    @property
    def has_empty(self) -> bool:
        """Whether a tensor is empty on every rank. A local tensor may be empty on this rank only."""
        return not all(prod(tensor.shape) for tensor in self.tensors)

    def total_norm(self, norm_type: float) -> Tensor:
        """Return the p-norm of all tensors as one vector, for a positive p, equal on every rank.

        It is a replicated DTensor if all tensors are DTensors over one mesh, else a plain tensor.
        Collectives: those of `combine_norms`. Partial DTensors are reduced first.
        """
        if self.has_partial:
            tensors = [_without_partial(tensor) for tensor in self.tensors]
            shardings = shardings_of(tensors)
        else:
            tensors, shardings = self.tensors, shardings_of(self.tensors, self.specs)
        shardings = shardings or [UNSHARDED] * len(tensors)
        if (
            same(shardings, repeat(shardings[0]))
            and not self.has_partial
            and all(map(Tensor.numel, self.local.representatives))
        ):
            batches = {shardings[0]: self.local}
        else:
            lists: dict[Sharding, list[Tensor]] = {}
            for sharding, tensor in zip(shardings, tensors, strict=True):
                batch = lists.setdefault(sharding, [])
                if (local := local_part(tensor)).numel():
                    batch.append(local)
            batches = {sharding: TensorList(batch) for sharding, batch in lists.items()}
        norms = {sharding: self._norm(batch, norm_type) for sharding, batch in batches.items()}
        joint, _ = combine_norms(norms, norm_type)
        norm = joint.to(result_dtype(dtypes_of(self.local.representatives)))
        return norm if self.mesh is None else _replicated(norm, self.mesh)

    def _norm(self, tensors: TensorList, norm_type: float) -> Tensor:
        """Return the norm of local tensors in f64, because ranks with different dtypes exchange it."""
        device = self.local.tensors[0].device
        batches = tensors.by_device().values()
        norms = [kernels.total_norm(batch, norm_type).to(torch.float64) for batch in batches]
        if not norms:
            return torch.zeros((), dtype=torch.float64, device=device)
        if len(norms) == 1:
            return norms[0]
        return kernels.total_norm(TensorList([to_device(norm, device) for norm in norms]), norm_type)

    def increment_versions(self) -> None:
        """Increment the DTensors' version counters, because autograd does not see writes to their local tensors."""
        dtensors = self.tensors if self.mesh is not None else filter(is_distributed, self.tensors)
        torch.autograd.graph.increment_version([*dtensors])


def sharded_tensors(tensors: Sequence[Any]) -> ShardedTensors | None:
    """Return the tensors, or None unless all are plain or DTensors that can be scaled rank by rank."""
    dtensor_type = _module().DTensor
    if not {dtensor_type, *PLAIN_TYPES} >= {*map(type, tensors)}:
        return None
    specs = mesh_placements(tensors)
    representatives = specs.representatives()
    # Meshes compare by value, which takes longer than their identity.
    by_id = {id(mesh): mesh for mesh, _ in representatives if mesh is not None}
    meshes = list(dict.fromkeys(by_id.values()))
    is_uniform = len(meshes) == 1 and all(mesh is not None for mesh, _ in representatives)
    # Most lists have no partial placement, so look at one placement of each type first.
    partial: list[Any] = []
    if any(placement.is_partial() for _, placements in representatives for placement in placements):
        every = chain.from_iterable(placements or () for placements in specs.placements)
        partial = [placement for placement in every if placement.is_partial()]
    if all(mesh.get_coordinate() is None for mesh in meshes) or (is_uniform and partial):
        return None
    if any(placement.reduce_op not in _ADDED for placement in partial):
        return None
    local = TensorList(local_parts(tensors))
    return ShardedTensors(tensors, specs, local, meshes[0] if is_uniform else None, bool(partial))


def local_value(value: Tensor) -> Tensor | None:
    """Return the local value of a plain tensor or of a DTensor, or None for any other.

    Collectives: those that replicate a DTensor that is not, like torch's infinity norm.
    """
    if not is_distributed(value):
        return value if type(value) is Tensor else None
    dtensor: Any = value
    if not all(placement.is_replicate() for placement in dtensor.placements):
        dtensor = dtensor.redistribute(placements=[_module().Replicate()] * dtensor.device_mesh.ndim)
    local: Any = dtensor._local_tensor
    return local if type(local) is Tensor else local.wait()  # AsyncCollectiveTensor


def _without_partial(tensor: Any) -> Any:
    """Return a DTensor whose partial sums are reduced, or any other tensor itself."""
    if not is_distributed(tensor) or not any(placement.is_partial() for placement in tensor.placements):
        return tensor
    return tensor.redistribute(
        placements=[
            _module().Replicate() if placement.is_partial() else placement for placement in tensor.placements
        ]
    )


def _replicated(value: Tensor, mesh: DeviceMesh) -> Any:
    """Return a replicated DTensor of a norm that is equal on every rank."""
    from impl.nn.utils._dtensor_norm import DTensorNorm  # noqa: PLC0415  slow to import

    module = _module()
    meta = module._dtensor_spec.TensorMeta(value.shape, value.stride(), value.dtype)
    spec = module._dtensor_spec.DTensorSpec(mesh, (module.Replicate(),) * mesh.ndim, tensor_meta=meta)
    # `DTensor.from_local` would do the same, but is differentiable and takes ten times as long.
    norm: Any = DTensorNorm
    return norm(value, spec, requires_grad=False)


def _module() -> Any:
    """Return `torch.distributed.tensor`, which has been imported if a DTensor exists."""
    package: Any = dist
    return package.tensor
