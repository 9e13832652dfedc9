"""Process groups that parameters are sharded over, and norms and flags combined over their ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Parameter
from torch.utils.weak import WeakIdKeyDictionary

from impl import kernels
from impl.kernels import PLAIN_TYPES, TensorList, to_device
from impl.optim._mesh_placements import MeshPlacements, mesh_placements

_local_tensor = attrgetter("_local_tensor")

_registered: Any = WeakIdKeyDictionary()

# Functions that return the sharded parameter of a parameter that modules list while it is unsharded, or None.
_finders: list[Callable[[Tensor], Tensor | None]] = []


class Sharding(NamedTuple):
    """The ranks that hold different elements of a tensor. All other ranks repeat theirs."""

    # Groups of the dimensions of a mesh along which the tensor is sharded.
    groups: tuple[dist.ProcessGroup, ...] = ()
    # Set if some ranks of the other tensors are not in the tensor's mesh. They hold nothing of it.
    mesh: DeviceMesh | None = None


UNSHARDED = Sharding()


class _Registered(NamedTuple):
    """Arguments of `register_sharding`."""

    sharding: tuple[dist.ProcessGroup, ...] | None
    members: tuple[dist.ProcessGroup, ...]


def register_sharding(
    parameter: Tensor,
    groups: tuple[dist.ProcessGroup, ...] | None,
    members: tuple[dist.ProcessGroup, ...],
) -> None:
    """Record that `parameter` is one rank's shard of a parameter that is sharded over these groups.

    Args:
        parameter: no DTensor.
        groups: None: it is the shard of several parameters, which are sharded over different groups.
        members: all groups whose ranks hold its shards, or repeat them.
    """
    _registered[parameter] = _Registered(groups, members)


def register_sharded_parameters(find: Callable[[Tensor], Tensor | None]) -> None:
    """Register a function that `gradients_of` asks for the sharded parameter of a parameter without a gradient.

    While a unit is unsharded, its modules list unsharded parameters. The gradients stay with the sharded ones.
    """
    if find not in _finders:
        _finders.append(find)


def gradients_of(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients of the parameters, or else of the sharded parameters that they stand for."""
    grads = [grad for parameter in parameters if (grad := parameter.grad) is not None]
    if len(grads) == len(parameters) or not _finders or torch.compiler.is_compiling():
        return grads
    owners = [_with_gradient(parameter) for parameter in parameters]
    return [grad for owner in owners if (grad := owner.grad) is not None]


def _with_gradient(parameter: Tensor) -> Tensor:
    if parameter.grad is not None or not parameter.requires_grad:
        return parameter
    candidates = (find(parameter) for find in _finders)
    return next((sharded for sharded in candidates if sharded is not None), parameter)


def is_distributed(tensor: Tensor) -> bool:
    """Return whether `tensor` is a DTensor, without importing `torch.distributed.tensor`, which takes half a second."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "_local_tensor")


def local_part(tensor: Tensor) -> Tensor:
    """Return the local tensor of a DTensor, or `tensor`, as a plain tensor at the same address."""
    local: Any = tensor
    if is_distributed(tensor):
        return local._local_tensor
    return local.data if type(tensor) not in PLAIN_TYPES and isinstance(tensor, Parameter) else tensor


def local_parts(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return `local_part` of each tensor."""
    try:
        # This needs no Python loop if all are DTensors.
        return list(map(_local_tensor, tensors))
    except AttributeError:
        return list(map(local_part, tensors))


def redistribute_like(tensor: Tensor, param: Tensor) -> Tensor:
    """Return `tensor` with the placements of `param` if both are DTensors, else `tensor` itself.

    Collectives: those of `DTensor.redistribute` if the placements differ.
    """
    dtensor: Any = tensor
    placements: Any = getattr(param, "placements", None)
    if not is_distributed(tensor) or placements in (None, dtensor.placements):
        return tensor
    return dtensor.redistribute(placements=placements)


def shardings_of(tensors: Sequence[Tensor], specs: MeshPlacements | None = None) -> list[Sharding]:
    """Return how each tensor is sharded, or an empty list if none is.

    Args:
        specs: result of `mesh_placements(tensors)`, if the caller has it.

    Raises:
        NotImplementedError: a DTensor is partial; or a tensor is the shard of several parameters, which are sharded
            over different groups.
        ValueError: the meshes of DTensors have different ranks, which are not all ranks of the default group.
    """
    if not _registered and PLAIN_TYPES.issuperset(map(type, tensors)):
        return []
    specs = specs or mesh_placements(tensors)
    representatives = specs.representatives()
    narrow = _narrow_meshes([mesh for mesh, _ in representatives if mesh is not None])
    by_kind = [
        UNSHARDED if mesh is None else _dtensor_sharding(mesh, placements, narrow)
        for mesh, placements in representatives
    ]
    shardings = by_kind * len(tensors) if len(by_kind) == 1 else [by_kind[kind] for kind in specs.kinds]
    if _registered:
        shardings = [
            _registered_sharding(tensor) if mesh is None else sharding
            for tensor, mesh, sharding in zip(tensors, specs.meshes, shardings, strict=True)
        ]
    return shardings if any(sharding is not UNSHARDED for sharding in shardings) else []


def _registered_sharding(tensor: Tensor) -> Sharding:
    registered: _Registered | None = _registered.get(tensor) if _registered else None
    if registered is None:
        return UNSHARDED
    groups = registered.sharding
    if groups is None:
        raise NotImplementedError(
            "a flat parameter has elements of parameters with and without tensor parallelism; wrap the module with "
            "use_orig_params=True, or call unscale_, clip_grad_norm_, step and update instead"
        )
    return Sharding(groups) if groups else UNSHARDED


def _dtensor_sharding(
    mesh: DeviceMesh, placements: tuple[Any, ...], narrow: Iterable[DeviceMesh]
) -> Sharding:
    if any(placement.is_partial() for placement in placements):
        raise NotImplementedError("a DTensor with partial sums is no parameter that can be stepped")
    is_member = mesh.get_coordinate() is not None
    groups = tuple(
        mesh.get_group(dim)
        for dim, placement in enumerate(placements)
        if is_member and not placement.is_replicate() and mesh.size(dim) > 1
    )
    is_narrow = mesh in narrow
    return Sharding(groups, mesh if is_narrow else None) if groups or is_narrow else UNSHARDED


def _narrow_meshes(meshes: Iterable[DeviceMesh]) -> list[DeviceMesh]:
    """Return the meshes that lack ranks of other meshes."""
    meshes = list(dict.fromkeys(meshes))
    if len(meshes) < 2:
        return []
    # Each rank of a root mesh has its own slice, such as mesh["tp"], and the others repeat its elements.
    ranks = {mesh: frozenset(mesh._get_root_mesh().mesh.flatten().tolist()) for mesh in meshes}
    everyone = frozenset().union(*ranks.values())
    narrow = [mesh for mesh in meshes if ranks[mesh] != everyone]
    if narrow and len(everyone) != dist.get_world_size():
        raise ValueError(
            f"the DTensors are on meshes of different ranks, {sorted(everyone)} in all, which are not the "
            f"{dist.get_world_size()} ranks of the default group; call the function for each mesh"
        )
    return narrow


def member_groups(params: Iterable[Tensor]) -> list[dist.ProcessGroup | None]:
    """Return groups over which every rank reaches all ranks that hold a part of these parameters, if used in turn.

    None is the default group. The list is empty if the parameters are plain tensors. Ranks that share a group have the
    same order of groups.

    Raises:
        ValueError: the meshes of DTensors have different ranks, which are not all ranks of the default group.
    """
    groups: dict[dist.ProcessGroup | None, None] = {}
    meshes: dict[DeviceMesh, None] = {}
    for param in params:
        if is_distributed(param):
            dtensor: Any = param
            meshes[dtensor.device_mesh] = None
        elif param in _registered:
            groups |= dict.fromkeys(_registered[param].members)
    if _narrow_meshes(meshes):
        return [None]
    for mesh in meshes:
        if mesh.get_coordinate() is not None:
            groups |= {mesh.get_group(dim): None for dim in range(mesh.ndim) if mesh.size(dim) > 1}
    return [*groups]


def combine_norms(
    norms: Mapping[Sharding, Tensor], order: float, flag: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return the norm of all tensors, with each element counted once, and the largest `flag`. Both equal on every rank.

    Args:
        norms: f64 norms of this rank's elements, by sharding: 0-dim, or vectors of norms that are combined element by
            element, all of one length. All ranks have the same order of shardings.
        flag: f64, 0-dim, or None if there is nothing to combine.
    Returns:
        f64, of the shape of the norms; and 0-dim.
    Collectives: one all-gather of a few numbers for each group. One more over the default group if some ranks are not
        in a mesh.
    """
    joint = dict(norms)
    flags = [] if flag is None else [flag]
    for group in dict.fromkeys(group for sharding in norms for group in sharding.groups):
        shardings = [sharding for sharding in norms if group in sharding.groups]
        columns = _gather([*(joint[sharding] for sharding in shardings), *flags], group)
        joint.update(
            {sharding: _norm_of(column, order) for sharding, column in zip(shardings, columns, strict=False)}
        )
        flags = [column.amax() for column in columns[len(shardings) :]]
    narrow = list(dict.fromkeys(sharding.mesh for sharding in norms if sharding.mesh is not None))
    if narrow:
        by_mesh = [
            _joint([joint.pop(sharding) for sharding in norms if sharding.mesh == mesh], order)
            for mesh in narrow
        ]
        columns = _gather([*by_mesh, *flags], None)
        for column, mesh in zip(columns, narrow, strict=False):
            # All members of a mesh know its norm.
            joint[Sharding(mesh=mesh)] = column[int(mesh.mesh.flatten()[0])]
        flags = [column.amax() for column in columns[len(narrow) :]]
    return _joint([*joint.values()], order), flags[0] if flags else None


def _joint(norms: Sequence[Tensor], order: float) -> Tensor:
    return norms[0] if len(norms) == 1 else _norm_of(torch.stack([*norms]), order)


def _norm_of(norms: Tensor, order: float) -> Tensor:
    """Return the norm of numbers, or of rows of numbers, element by element."""
    # Norms of order 0 are counts, so add them.
    if norms.dim() > 1:
        return torch.linalg.vector_norm(norms, order or 1.0, dim=0)
    return kernels.total_norm(TensorList([norms.contiguous()]), order or 1.0)


def _gather(tensors: Sequence[Tensor], among: dist.ProcessGroup | None) -> list[Tensor]:
    """Return the tensors of all ranks, in one all-gather. Their first dimension is that of the ranks."""
    rows = all_gather_numbers(torch.cat([tensor.reshape(-1) for tensor in tensors]), among)
    columns = rows.split([tensor.numel() for tensor in tensors], dim=1)
    return [column.reshape(-1, *tensor.shape) for column, tensor in zip(columns, tensors, strict=True)]


@dataclass(frozen=True)
class Norms:
    """Norms of one order of this rank's gradients, by sharding. The first sharding is that over no group.

    They are 0-dim, or vectors of one length that are combined element by element.
    """

    order: float
    by_sharding: Mapping[Sharding, Tensor]
    dtype: torch.dtype = torch.float32  # dtype of the joint norm

    @property
    def replicated(self) -> Tensor:
        """Norm of the gradients that each rank holds all of."""
        return self.by_sharding[UNSHARDED]

    @property
    def are_sharded(self) -> bool:
        return len(self.by_sharding) > 1

    def joint(self, flag: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return the norm of all gradients, and the largest f64 `flag` of all ranks that share gradients.

        Vectors stay f64.

        Collectives: those of `combine_norms`.
        """
        norms = {sharding: norm.to(torch.float64) for sharding, norm in self.by_sharding.items()}
        norm, flag = combine_norms(norms, self.order, flag)
        return (norm if norm.dim() else norm.to(self.dtype)), flag

    def gathered(self, among: dist.ProcessGroup | None, flag: Tensor) -> tuple[Norms, Tensor]:
        """Combine the norms of shards over one group. Return all norms, and the largest `flag` of all ranks, as f64.

        Raises:
            RuntimeError: a rank that holds shards is not in `among`.
        Collectives: one all-gather in `among`, of one number and the norms of each sharding over one group.
        """
        ranks = {
            sharding: [_ranks_in(among, group) for group in sharding.groups] for sharding in self.by_sharding
        }
        shardings = [
            sharding for sharding in self.by_sharding if len(sharding.groups) == 1 and not sharding.mesh
        ]
        numbers = [flag, *(self.by_sharding[sharding] for sharding in shardings)]
        flags, *norms_of_ranks = _gather([number.to(torch.float64) for number in numbers], among)
        norms = dict(self.by_sharding)
        full = [norms[UNSHARDED].to(torch.float64)]
        for sharding, group_norms in zip(shardings, norms_of_ranks, strict=True):
            del norms[sharding]
            [group_ranks] = ranks[sharding]
            # Indexing with a list of ranks would synchronise with the device.
            norm_of_ranks = group_norms.unbind()
            full.append(_joint([norm_of_ranks[rank] for rank in group_ranks], self.order))
        norms[UNSHARDED] = _joint(full, self.order)
        return replace(self, by_sharding=norms), flags.amax()


def all_gather_numbers(numbers: Tensor, among: dist.ProcessGroup | None) -> Tensor:
    """Return every rank's `numbers`, one row for each rank. They are sent from a device that the group supports."""
    local = to_device(numbers, _collective_device(among, numbers.device))
    gathered = local.new_empty((dist.get_world_size(among), len(local)))
    dist.all_gather([*gathered.unbind()], local, group=among)
    return to_device(gathered, numbers.device)


def all_reduce_max_(number: Tensor, group: dist.ProcessGroup) -> None:
    """Set `number` to the largest one of all ranks of the group. It is sent from a device that the group supports."""
    sent = to_device(number, _collective_device(group, number.device))
    dist.all_reduce(sent, op=dist.ReduceOp.MAX, group=group)
    if sent is not number:
        number.copy_(sent)


def _collective_device(among: dist.ProcessGroup | None, device: torch.device) -> torch.device:
    group = dist.group.WORLD if among is None else among
    # Not every group has this attribute.
    types = [supported.type for supported in getattr(group, "_device_types", ())]
    return torch.device(types[0]) if types and device.type == "cpu" and "cpu" not in types else device


def _ranks_in(among: dist.ProcessGroup | None, group: dist.ProcessGroup) -> list[int]:
    """Return the ranks of `group` as numbered in `among`, which is the default group if None."""
    among = dist.group.WORLD if among is None else among
    assert among is not None
    if group is among:
        return [*range(group.size())]
    try:
        numbers = {rank: number for number, rank in enumerate(dist.get_process_group_ranks(among))}
        return [numbers[rank] for rank in dist.get_process_group_ranks(group)]
    except KeyError as error:
        [missing] = error.args
        who = f"rank {missing}" if isinstance(missing, int) else "a rank of a group that torch does not know"
        raise RuntimeError(
            f"{who} holds a shard of a parameter, and is not in the process group that decides on the step; give the "
            "ShardedGradScaler a process_group of all ranks that hold shards"
        ) from None
