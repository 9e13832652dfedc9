"""Parameters that tensor parallelism has made DTensors: units shard their local tensors, and show DTensors again."""

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

from impl.distributed.fsdp._params.whole_mesh import DataDims


@dataclass(frozen=True)
class ParallelForm:
    """How a parameter is laid out over the ranks of tensor parallelism; a unit shards each rank's local tensor."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size  # of all of it
    stride: tuple[int, ...]
    data: DataDims | None = None  # if data parallelism is over dimensions of the same mesh

    def dtensor(self, local: Tensor) -> Any:
        """A DTensor over a local tensor, whose memory it shares."""
        meta = TensorMeta(self.shape, self.stride, local.dtype)
        return made_dtensor(local, DTensorSpec(self.mesh, self.placements, tensor_meta=meta))

    def local_part(self, whole: Tensor) -> Tensor:
        """The part of this rank of a gradient, or of what is loaded, which are DTensors over the same mesh.

        Sums over the dimensions of data parallelism are left to the unit.
        Collectives: of one that is laid out in another way, as sums that are still to be taken, what takes them.
        """
        dtensor = cast("DTensor", whole)
        placements = self.placements
        if self.data is not None:
            placements = self.data.reduced(dtensor.placements, placements)
        if dtensor.placements != placements:
            dtensor = dtensor.redistribute(self.mesh, placements)
        local = dtensor._local_tensor
        return local.wait() if isinstance(local, AsyncCollectiveTensor) else local

    @property
    def sharding_groups(self) -> tuple[dist.ProcessGroup, ...]:
        """The ranks that each have another part of it, by the dimensions of the mesh."""
        places = enumerate(self.placements)
        return tuple(self.mesh.get_group(dim) for dim, one in places if not one.is_replicate())

    def parts_of(self, dim: int) -> int:
        """Into how many a dimension is cut."""
        places = enumerate(self.placements)
        return prod(self.mesh.size(place) for place, one in places if getattr(one, "dim", None) == dim)

    @property
    def cuts_rows(self) -> bool:
        """Whether tensor parallelism cuts the dimension that state dicts cut, too."""
        return any(getattr(one, "dim", None) == 0 for one in self.placements)


def form_of(parameter: Tensor) -> ParallelForm | None:
    """None of a plain one."""
    if not isinstance(parameter, DTensor):
        return None
    return ParallelForm(
        parameter.device_mesh, tuple(parameter.placements), parameter.shape, parameter.stride()
    )


def local_of(tensor: Any) -> Any:
    """The local tensor of a DTensor; anything else is itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def local_parameter(parameter: nn.Parameter) -> nn.Parameter:
    """What a unit shards of a parameter: itself, or one over a DTensor's local tensor."""
    if not isinstance(parameter, DTensor):
        return parameter
    return nn.Parameter(local_of(parameter).detach(), parameter.requires_grad)


def made_dtensor(local: Tensor, spec: DTensorSpec) -> Any:
    """As `DTensor.from_local` makes it, which is differentiable and takes ten times as long."""
    make: Any = (
        DTensor.__new__
    )  # its `__init__` does nothing, behind a wrapper that takes longer than all the rest
    return make(DTensor, local, spec, requires_grad=False)


def refuse_unfit(named: Iterable[tuple[str, nn.Parameter]], mesh: DeviceMesh | None) -> None:
    """
    Raises:
        NotImplementedError: a parameter is a DTensor, but not over a mesh that was cut out of the same one as `mesh`.
    """
    for name, parameter in named:
        form = form_of(parameter)
        if form is not None and (mesh is None or not lies_beside(form.mesh, mesh)):
            raise NotImplementedError(
                f"{name} is a DTensor, sharded already as {form.placements} over {form.mesh}, and cannot be sharded by "
                f"FullyShardedDataParallel over {mesh or 'a process group'} once more; pass device_mesh=mesh['dp'] of "
                "the mesh of which mesh['tp'] is the other part, or leave the parameter to ignored_states"
            )


def lies_beside(parallel: DeviceMesh, mesh: DeviceMesh) -> bool:
    """Whether both were cut out of one mesh, by names of dimensions that they do not share."""
    names, others = parallel.mesh_dim_names or (), mesh.mesh_dim_names or ()
    return (
        whole_mesh_of(parallel) == whole_mesh_of(mesh) and bool(names and others) and not {*names} & {*others}
    )


def mesh_beside(parallel: DeviceMesh, mesh: DeviceMesh) -> DeviceMesh:
    """The dimensions of `mesh`, and behind them those of `parallel`.

    Raises:
        RuntimeError: they were not cut out of one mesh, or share ranks.
    """
    try:
        return DeviceMesh._concatenate([mesh, parallel])
    except RuntimeError as error:
        error.add_note(
            f"a parameter is a DTensor over {parallel}, beside which {mesh} cannot shard it; cut both out of one mesh "
            "with named dimensions, as mesh['tp'] and mesh['dp']"
        )
        raise


def whole_mesh_of(mesh: DeviceMesh) -> DeviceMesh:
    """The one that it was cut out of; itself, if that does not know its dimensions by these names."""
    whole = mesh._get_root_mesh()
    return whole if {*(mesh.mesh_dim_names or ())} <= {*(whole.mesh_dim_names or ())} else mesh
