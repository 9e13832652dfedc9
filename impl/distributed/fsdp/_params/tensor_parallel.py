"""Parameters that tensor parallelism turned into DTensors. Units shard the local tensors and expose DTensors again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from impl.distributed.fsdp._params.autograd import share_hooks
from impl.distributed.fsdp._params.data_dims import DataDims


@dataclass(frozen=True)
class ParallelLayout:
    """Layout of a parameter over the ranks of tensor parallelism. A unit shards each rank's local tensor."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size  # shape of the global tensor
    stride: tuple[int, ...]
    data_dims: DataDims | None = None  # data parallelism over dimensions of the same mesh

    def dtensor(self, local: Tensor) -> Any:
        """Return a DTensor that shares the memory of `local`."""
        meta = TensorMeta(self.shape, self.stride, local.dtype)
        return new_dtensor(local, DTensorSpec(self.mesh, self.placements, tensor_meta=meta))

    def local_part(self, tensor: Tensor) -> Tensor:
        """Return this rank's local tensor of a DTensor over the same mesh: a gradient or a loaded value.

        Sums over the dimensions of data parallelism are left to the unit.
        Collectives: those of a redistribution if `tensor` has other placements, for example pending sums.
        """
        dtensor = cast("DTensor", tensor)
        placements = self.placements
        if self.data_dims is not None:
            placements = self.data_dims.reduced(dtensor.placements, placements)
        if dtensor.placements != placements:
            dtensor = dtensor.redistribute(self.mesh, placements)
        local = dtensor._local_tensor
        return local.wait() if isinstance(local, AsyncCollectiveTensor) else local

    @property
    def sharding_groups(self) -> tuple[dist.ProcessGroup, ...]:
        """Groups whose ranks each have another part of the parameter, by dimension of the mesh."""
        places = enumerate(self.placements)
        return tuple(self.mesh.get_group(dim) for dim, placement in places if not placement.is_replicate())

    def num_shards_of(self, dim: int) -> int:
        """Return the number of shards that a dimension is split into."""
        places = enumerate(self.placements)
        return prod(
            self.mesh.size(place) for place, placement in places if getattr(placement, "dim", None) == dim
        )

    @property
    def shards_rows(self) -> bool:
        """Whether tensor parallelism shards dimension 0, like state dicts."""
        return any(getattr(placement, "dim", None) == 0 for placement in self.placements)


def parallel_layout(parameter: Tensor) -> ParallelLayout | None:
    """Return how tensor parallelism laid out `parameter`, or None for a plain tensor."""
    if not isinstance(parameter, DTensor):
        return None
    return ParallelLayout(
        parameter.device_mesh, tuple(parameter.placements), parameter.shape, parameter.stride()
    )


def local_of(tensor: object) -> Any:
    """Return the local tensor of a DTensor, or any other value unchanged."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def local_parameter(parameter: nn.Parameter) -> nn.Parameter:
    """Return a parameter over the local tensor of a DTensor, or a plain parameter unchanged."""
    if not isinstance(parameter, DTensor):
        return parameter
    local = nn.Parameter(local_of(parameter).detach(), parameter.requires_grad)
    share_hooks(parameter, local)
    return local


def new_dtensor(local: Tensor, spec: DTensorSpec) -> Any:
    """Return a DTensor over `local`. `DTensor.from_local` is differentiable and takes ten times as long."""
    # `__init__` of DTensor does nothing, but its wrapper takes longer than all the rest.
    make: Any = DTensor.__new__
    return make(DTensor, local, spec, requires_grad=False)


def check_mesh_of_dtensors(named: Iterable[tuple[str, nn.Parameter]], mesh: DeviceMesh | None) -> None:
    """Check that each DTensor is over a mesh with the same root mesh as `mesh`.

    Raises:
        NotImplementedError: a parameter is a DTensor over another mesh.
    """
    for name, parameter in named:
        layout = parallel_layout(parameter)
        if layout is not None and (mesh is None or not is_in_same_root(layout.mesh, mesh)):
            raise NotImplementedError(
                f"{name} is a DTensor, sharded already as {layout.placements} over {layout.mesh}, and cannot be "
                f"sharded by FullyShardedDataParallel over {mesh or 'a process group'} again; "
                "pass device_mesh=mesh['dp'] of the mesh with mesh['tp'], or pass the parameter in ignored_states"
            )


def is_in_same_root(parallel: DeviceMesh, mesh: DeviceMesh) -> bool:
    """Return whether both meshes are parts of one mesh, and have different dimension names."""
    names, others = parallel.mesh_dim_names or (), mesh.mesh_dim_names or ()
    return (
        root_mesh_of(parallel) == root_mesh_of(mesh) and bool(names and others) and not {*names} & {*others}
    )


def combine_meshes(parallel: DeviceMesh, mesh: DeviceMesh) -> DeviceMesh:
    """Return a mesh with the dimensions of `mesh`, followed by those of `parallel`.

    Raises:
        RuntimeError: they are not parts of one mesh, or share ranks.
    """
    try:
        return DeviceMesh._concatenate([mesh, parallel])
    except RuntimeError as error:
        error.add_note(
            f"a parameter is a DTensor over {parallel}, beside which {mesh} cannot shard it; cut both out of one mesh "
            "with named dimensions, as mesh['tp'] and mesh['dp']"
        )
        raise


def root_mesh_of(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh that `mesh` is a part of, or `mesh` itself if the root has other dimension names."""
    root = mesh._get_root_mesh()
    return root if {*(mesh.mesh_dim_names or ())} <= {*(root.mesh_dim_names or ())} else mesh
