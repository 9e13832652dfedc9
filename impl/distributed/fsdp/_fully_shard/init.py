"""What fully_shard checks, and finds out, when it is called: the mesh and its groups, the modules, their parameters."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from impl.distributed.fsdp._comm.groups import Groups
from impl.distributed.fsdp._fully_shard.module_state import lender_of, state_of
from impl.distributed.fsdp._layout.grad_dtypes import FOLLOWS_PARAM, accumulation_dtype, has_grad_dtype
from impl.distributed.fsdp._layout.sharded_param import ShardedParam, sharded_param_of
from impl.distributed.fsdp._params.param_registration import ManagedParam, ParamInfo, ParamLocation
from impl.distributed.fsdp._params.policies import (
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    ParamPrecision,
    precision_by,
)
from impl.distributed.fsdp._params.tensor_parallel import local_parameter, parallel_layout
from impl.distributed.fsdp._params.whole_mesh import DataDims

# By the group that shards, which ends with them.
_backward_meshes: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Any, DeviceMesh]] = (
    weakref.WeakKeyDictionary()
)


def check_module(module: Any) -> None:
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward:
        raise ValueError(f"fully_shard does not support containers that do not implement forward: {module}")


def mesh_of_all() -> DeviceMesh:
    if not dist.is_initialized():
        dist.init_process_group()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return init_device_mesh(accelerator.type if accelerator else "cpu", (dist.get_world_size(),))


def check_mesh(mesh: DeviceMesh, dims: DataParallelMeshDims | None) -> None:
    if dims is not None:
        if mesh.mesh_dim_names is None:
            raise ValueError("mesh must have mesh_dim_names when dp_mesh_dims is provided")
        for name in (*dims.shard_names, *dims.replicate_names):
            if name not in mesh.mesh_dim_names:
                raise ValueError(
                    f"Mesh dim name '{name}' not found in mesh.mesh_dim_names {mesh.mesh_dim_names}"
                )
        return
    if mesh.ndim not in (1, 2):
        raise ValueError(f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}")
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise AssertionError("Please init the 2D mesh for HSDP with mesh_dim_names specified")


def groups_of(mesh: DeviceMesh, backward_mesh: DeviceMesh | None, data: DataDims | None) -> Groups:
    shard = mesh.get_group(mesh.ndim - 1)
    if data is not None and not data.shard:
        return Groups(None, shard if shard.size() > 1 else None)
    replicate = mesh.get_group(0) if mesh.ndim == 2 else None
    return Groups(
        shard if shard.size() > 1 else None,
        replicate if replicate is not None and replicate.size() > 1 else None,
        None if backward_mesh is None else backward_mesh.get_group(1),
    )


def checked_reshard(asked: Any, world: int, data: DataDims | None) -> bool | int | None:
    """A number only if it is neither one rank nor all."""
    if data is not None and not data.shard:
        return False  # nothing is freed of what is only copied
    if data is not None and type(asked) is int:
        raise NotImplementedError(
            "reshard_after_forward as int is not yet supported with SPMD mesh (dp_mesh_dims)"
        )
    if asked is None or isinstance(asked, bool):
        return asked
    if not isinstance(asked, int):
        raise ValueError(
            "reshard_after_forward should be a bool or an int representing the "
            f"group size to reshard to, not {asked}"
        )
    if asked < 1 or asked > world or world % asked:
        raise ValueError(
            f"If passing reshard_after_forward as an int, it should be a factor of {world}, not {asked}"
        )
    return asked if asked not in (1, world) else asked == world


def backward_mesh_of(mesh: DeviceMesh, reshards: bool | int | None) -> DeviceMesh | None:
    """Of as many ranks in its second dimension as a module reshards to behind a forward; None if that is a bool.

    Collectives: makes its groups, once for each group that parameters are sharded over.
    """
    if type(reshards) is not int:
        return None
    ranks = mesh.mesh.view(-1, reshards)
    made = _backward_meshes.setdefault(mesh.get_group(mesh.ndim - 1), {})
    key = tuple(map(tuple, ranks.tolist()))
    if key not in made:
        made[key] = DeviceMesh(mesh.device_type, ranks)
    return made[key]


def outermost(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Those that lie in no other of them."""
    inner = [set(one.modules()) - {one} for one in modules]
    return [one for one in dict.fromkeys(modules) if not any(one in below for below in inner)]


def refuse_twice(module: nn.Module) -> None:
    if state_of(module) is not None:
        raise AssertionError(
            "Each distinct composable distributed API can only be applied to a module once. fully_shard has already "
            f"been applied to the following module:\n{module}"
        )


def managed_modules(roots: Sequence[nn.Module], ignored: set[nn.Parameter]) -> list[nn.Module]:
    """All below that no earlier call has, the inner ones first; without those of which everything is ignored."""
    found: dict[nn.Module, None] = {}

    def visit(module: nn.Module) -> None:
        if module in found or (module not in roots and state_of(module) is not None):
            return
        for child in module.children():
            visit(child)
        found[module] = None

    for root in roots:
        visit(root)
    return [one for one in found if not (ignored and _is_ignored(one, ignored))]


def _is_ignored(module: nn.Module, ignored: set[nn.Parameter]) -> bool:
    has_own = any(True for _ in module.buffers()) or any(p not in ignored for p in module.parameters())
    return not has_own


def managed_params(
    roots: Sequence[nn.Module], modules: Sequence[nn.Module], ignored: set[nn.Parameter]
) -> list[ManagedParam]:
    """In the order of the modules, each with all places that have it; those that a class's own `named_parameters`
    leaves out stay as they are, where they are the module's own.

    Raises:
        ValueError: one has no dimensions.
        AssertionError: `named_parameters` gives what no module has.
    """
    places: dict[nn.Parameter, list[ParamLocation]] = {}
    for module in modules:
        shown = _shown_by(module, roots)
        for attribute, parameter in module._parameters.items():
            if parameter is None or parameter in ignored or parameter not in shown:
                continue
            if not parameter.shape:
                raise ValueError(
                    "fully_shard doesn't support scalar parameters. "
                    f"Change {attribute} to a 1D tensor with numel equal to 1."
                )
            places.setdefault(parameter, []).append(ParamLocation(module, attribute))
    # Not by what a root shows, which may be less than what the modules below it do.
    names = {p: name for root in reversed(roots) for name, p in nn.Module.named_parameters(root)}
    return [
        ManagedParam(ParamInfo(names[p], tuple(where), parallel_layout(p)), local_parameter(p), p)
        for p, where in places.items()
    ]


def _shown_by(module: nn.Module, roots: Sequence[nn.Module]) -> set[nn.Parameter]:
    shown = {p for _, p in module.named_parameters(recurse=False)}
    if type(module).named_parameters is not nn.Module.named_parameters:
        there = {p for root in roots for _, p in nn.Module.named_parameters(root)}
        if not shown <= there:
            raise AssertionError(f"Some parameters are not in the module tree of {tuple(roots)}")
    return shown


def borrowed_apart(
    managed: Iterable[ManagedParam], policy: MixedPrecisionPolicy
) -> tuple[list[ManagedParam], list[tuple[ManagedParam, ShardedParam]]]:
    """Those to shard, and those that an earlier call has sharded in other modules, with what it has made of them.

    Raises:
        ValueError: `policy` would have one of these in other dtypes.
    """
    own: list[ManagedParam] = []
    borrowed: list[tuple[ManagedParam, ShardedParam]] = []
    for one in managed:
        param = sharded_param_of(one.original)
        if param is None:
            own.append(one)
        else:
            _refuse_other_dtypes(one, param, policy)
            borrowed.append((one, param))
    return own, borrowed


def _refuse_other_dtypes(one: ManagedParam, param: ShardedParam, policy: MixedPrecisionPolicy) -> None:
    group = lender_of(param).group_of(param)
    has, own = group.precision_of(group.params.index(param)), one.original.dtype
    asked = precision_by(policy, one.info.name, one.original)
    computes = asked.param_dtype or own
    stepped = asked.master_dtype or own
    reduces = accumulation_dtype(one.original, asked, computes) or computes
    if asked.reduce_dtype is None and FOLLOWS_PARAM and not has_grad_dtype(one.original):
        reduces = stepped
    asked = ParamPrecision(computes, reduces, stepped)
    if one.original.is_floating_point() and asked != has:
        raise ValueError(
            f"{one.info.name} was sharded by an earlier call, as {param.name}: to compute in {has.param_dtype}, reduce "
            f"in {has.reduce_dtype} and step in {has.master_dtype}, but the mp_policy of this one says "
            f"{asked.param_dtype}, {asked.reduce_dtype} and {asked.master_dtype}; give both calls the same dtypes"
        )


def on_whole_mesh(managed: Sequence[ManagedParam], data: DataDims) -> list[ManagedParam]:
    """The parameters, which know of the dimensions of their mesh that are those of data parallelism.

    Raises:
        ValueError: a parameter is plain, or lies otherwise than as copies over these dimensions.
    """
    found: list[ManagedParam] = []
    for one in managed:
        form = one.info.parallel
        if form is None:
            raise ValueError(
                "When dp_mesh_dims is provided, all parameters must be DTensors on the full SPMD mesh (e.g. via "
                f"distribute_module). Got plain tensor for parameter '{one.info.locations[0].attribute}'."
            )
        data.check_placements(form.mesh, form.placements)
        found.append(replace(one, info=replace(one.info, parallel=replace(form, data=data))))
    return found


def move_to_device(
    managed: Iterable[ManagedParam], modules: Iterable[nn.Module], device: torch.device
) -> None:
    buffers = (buffer for module in modules for buffer in module.buffers(recurse=False))
    for tensor in (*(one.parameter for one in managed), *buffers):
        if tensor.device in (device, torch.device("meta")):
            continue
        if is_traceable_wrapper_subclass(tensor):  # what it wraps moves too
            with torch.no_grad():
                moved = tensor.to(device)
            is_parameter = isinstance(tensor, nn.Parameter)
            torch.utils.swap_tensors(
                tensor, nn.Parameter(moved, tensor.requires_grad) if is_parameter else moved
            )
        else:
            tensor.data = tensor.data.to(device)


class Placed(NamedTuple):
    """A parameter, the mesh that it is cut over, the dimension by which it is, and its dtypes."""

    managed: ManagedParam
    mesh: DeviceMesh
    dim: int
    precision: ParamPrecision

    @property
    def stepped_dtype(self) -> torch.dtype:
        return self.precision.master_dtype or self.managed.parameter.dtype


def by_groups(
    managed: Sequence[ManagedParam],
    shard_placement_fn: Callable[[nn.Parameter], Any] | None,
    mesh: DeviceMesh,
    data: DataDims | None,
    policy: MixedPrecisionPolicy,
) -> list[list[Placed]]:
    """The parameters by the groups of ranks that they are sharded and replicated over, `mesh`'s unless they have own,
    and by the dtypes to gather, to reduce and to step them in.

    Raises:
        ValueError: one is placed by something else than a Shard, or where nothing is sharded.
        NotImplementedError: a mesh of its own has dimensions for something else, or is beside dp_mesh_dims.
    """
    if shard_placement_fn is not None and data is not None and not data.shard:
        raise ValueError(
            "Per-param mesh via shard_placement_fn is not supported with DDPMeshInfo; it requires FSDPMeshInfo (or "
            "subclass)"
        )
    found: dict[Any, list[Placed]] = {}
    for one in managed:
        placement: Any = None if shard_placement_fn is None else shard_placement_fn(one.original)
        own = mesh
        if hasattr(placement, "mesh_info"):  # torch's ShardPlacementResult
            if data is not None:
                raise NotImplementedError(
                    f"{one.info.name} has a mesh of its own, beside dp_mesh_dims; leave one out"
                )
            own, placement = _mesh_of(placement.mesh_info), placement.placement
        if placement is not None and not isinstance(placement, Shard):
            raise ValueError(f"Invalid shard_placement_fn result: {placement}")
        dim = 0 if placement is None else placement.dim
        precision = precision_by(policy, one.info.name, one.original)
        key = (*own.get_all_groups(), precision)
        found.setdefault(key, []).append(Placed(one, own, dim, precision))
    return [same for placed in found.values() for same in _by_dtype(placed)]


def _by_dtype(placed: list[Placed]) -> list[list[Placed]]:
    """Those that may be trained by their dtypes; integers travel with any."""
    dtypes = [one.stepped_dtype for one in placed]
    trainable = [dtype for dtype in dtypes if dtype.is_floating_point or dtype.is_complex]
    if len({*trainable}) < 2:
        return [placed]
    found: dict[torch.dtype, list[Placed]] = {dtype: [] for dtype in trainable}
    for one, dtype in zip(placed, dtypes, strict=True):
        found.get(dtype, found[trainable[0]]).append(one)
    return list(found.values())


def _mesh_of(mesh_info: Any) -> DeviceMesh:
    mesh: DeviceMesh = mesh_info.mesh
    dims = (mesh_info.replicate_mesh_dim, mesh_info.shard_mesh_dim)
    if (mesh.ndim, *dims) not in ((1, None, 0), (2, 0, 1)):
        raise NotImplementedError(
            f"shard_placement_fn gave a mesh of {mesh.ndim} dimensions, to replicate and to shard over {dims}; give "
            "one of one dimension to shard over, or of two: to replicate over the first and to shard over the second"
        )
    return mesh
