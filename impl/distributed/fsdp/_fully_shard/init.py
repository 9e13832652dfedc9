"""Checks and preparation of a fully_shard call: the mesh and its groups, the modules, and their parameters."""

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
from impl.distributed.fsdp._fully_shard.module_state import owner_of, state_of
from impl.distributed.fsdp._layout.grad_dtypes import FOLLOWS_PARAM, accumulation_dtype, has_grad_dtype
from impl.distributed.fsdp._layout.group_options import GroupOptions
from impl.distributed.fsdp._layout.per_param import DTensorGroup
from impl.distributed.fsdp._layout.sharded_param import (
    ShardedParam,
    params_by_sharded_tensor,
    sharded_param_of,
)
from impl.distributed.fsdp._params.data_dims import DataDims
from impl.distributed.fsdp._params.param_registration import ManagedParam, ParamInfo, ParamLocation
from impl.distributed.fsdp._params.policies import (
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ParamPrecision,
    offloads,
    precision_by,
    resolve_policy,
)
from impl.distributed.fsdp._params.tensor_parallel import local_parameter, parallel_layout

# Keyed by the process group that shards, and dropped with it.
_post_forward_meshes: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Any, DeviceMesh]] = (
    weakref.WeakKeyDictionary()
)


def check_module(module: object) -> None:
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


def groups_from_mesh(
    mesh: DeviceMesh, post_forward_mesh: DeviceMesh | None, data_dims: DataDims | None
) -> Groups:
    shard = mesh.get_group(mesh.ndim - 1)
    if data_dims is not None and not data_dims.shard:
        return Groups(None, shard if shard.size() > 1 else None)
    replicate = mesh.get_group(0) if mesh.ndim == 2 else None
    return Groups(
        shard if shard.size() > 1 else None,
        replicate if replicate is not None and replicate.size() > 1 else None,
        None if post_forward_mesh is None else post_forward_mesh.get_group(1),
    )


def check_reshard_after_forward(value: object, world: int, data_dims: DataDims | None) -> bool | int | None:
    """Return `reshard_after_forward`, as a number only if it is neither one rank nor all ranks."""
    if data_dims is not None and not data_dims.shard:
        return False  # replicated parameters are never freed
    if data_dims is not None and type(value) is int:
        raise NotImplementedError(
            "reshard_after_forward as int is not yet supported with SPMD mesh (dp_mesh_dims)"
        )
    if value is None or isinstance(value, bool):
        return value
    if not isinstance(value, int):
        raise ValueError(
            "reshard_after_forward should be a bool or an int representing the "
            f"group size to reshard to, not {value}"
        )
    if value < 1 or value > world or world % value:
        raise ValueError(
            f"If passing reshard_after_forward as an int, it should be a factor of {world}, not {value}"
        )
    return value if value not in (1, world) else value == world


def post_forward_mesh_of(mesh: DeviceMesh, reshards: bool | int | None) -> DeviceMesh | None:
    """Return a mesh whose second dimension has the ranks that a module reshards to after forward, or None for a bool.

    Collectives: creates its groups, once for each group that parameters are sharded over.
    """
    if type(reshards) is not int:
        return None
    ranks = mesh.mesh.view(-1, reshards)
    meshes = _post_forward_meshes.setdefault(mesh.get_group(mesh.ndim - 1), {})
    key = tuple(map(tuple, ranks.tolist()))
    if key not in meshes:
        meshes[key] = DeviceMesh(mesh.device_type, ranks)
    return meshes[key]


def outermost_modules(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the modules that are not inside another one of `modules`."""
    inner = [set(module.modules()) - {module} for module in modules]
    return [module for module in dict.fromkeys(modules) if not any(module in below for below in inner)]


def check_not_sharded(module: nn.Module) -> None:
    if state_of(module) is not None:
        raise AssertionError(
            "Each distinct composable distributed API can only be applied to a module once. fully_shard has already "
            f"been applied to the following module:\n{module}"
        )


def managed_submodules(modules: Sequence[nn.Module], ignored: set[nn.Parameter]) -> list[nn.Module]:
    """Return all modules at and below `modules` that no earlier call has sharded, inner ones first.

    Modules in which everything is ignored are left out.
    """
    managed: dict[nn.Module, None] = {}

    def visit(module: nn.Module) -> None:
        if module in managed or (module not in modules and state_of(module) is not None):
            return
        for child in module.children():
            visit(child)
        managed[module] = None

    for outermost in modules:
        visit(outermost)
    return [module for module in managed if not (ignored and _is_ignored(module, ignored))]


def _is_ignored(module: nn.Module, ignored: set[nn.Parameter]) -> bool:
    has_own = any(True for _ in module.buffers()) or any(p not in ignored for p in module.parameters())
    return not has_own


def managed_params(
    modules: Sequence[nn.Module], submodules: Sequence[nn.Module], ignored: set[nn.Parameter]
) -> list[ManagedParam]:
    """Return the parameters in the order of the submodules, each with all places that have it.

    A module's own parameters that its class's `named_parameters` omits are left unchanged.

    Raises:
        ValueError: a parameter has no dimensions.
        AssertionError: `named_parameters` returns a parameter that no module has.
    """
    places: dict[nn.Parameter, list[ParamLocation]] = {}
    for module in submodules:
        own_params = _params_of(module, modules)
        for attribute, parameter in module._parameters.items():
            if parameter is None or parameter in ignored or parameter not in own_params:
                continue
            if not parameter.shape:
                raise ValueError(
                    "fully_shard doesn't support scalar parameters. "
                    f"Change {attribute} to a 1D tensor with numel equal to 1."
                )
            places.setdefault(parameter, []).append(ParamLocation(module, attribute))
    # Names come from nn.Module, because a module's own `named_parameters` may omit some parameters below it.
    names = {p: name for outer in reversed(modules) for name, p in nn.Module.named_parameters(outer)}
    return [
        ManagedParam(ParamInfo(names[p], tuple(where), parallel_layout(p)), local_parameter(p), p)
        for p, where in places.items()
    ]


def _params_of(module: nn.Module, modules: Sequence[nn.Module]) -> set[nn.Parameter]:
    own_params = {p for _, p in module.named_parameters(recurse=False)}
    if type(module).named_parameters is not nn.Module.named_parameters:
        in_tree = {p for outer in modules for _, p in nn.Module.named_parameters(outer)}
        if not own_params <= in_tree:
            raise AssertionError(f"Some parameters are not in the module tree of {tuple(modules)}")
    return own_params


def split_already_sharded(
    modules: Sequence[nn.Module], managed: Iterable[ManagedParam], policy: MixedPrecisionPolicy
) -> tuple[list[ManagedParam], list[tuple[ManagedParam, ShardedParam]]]:
    """Split the parameters of `modules` into those to shard now and those that an earlier call has sharded.

    A module that both calls contain already has the sharded parameter.

    Raises:
        ValueError: one of `modules` is inside a module of the earlier call, or `policy` requests other dtypes than it.
    """
    own: list[ManagedParam] = []
    shared: list[tuple[ManagedParam, ShardedParam]] = []
    params_by_tensor = params_by_sharded_tensor()
    for managed_param in managed:
        original = managed_param.original
        param = sharded_param_of(original) or params_by_tensor.get(original)
        if param is None:
            own.append(managed_param)
        else:
            _check_not_inside(modules, managed_param, param)
            # The original dtype of a sharded tensor is unknown, but an equal policy gives the same dtypes.
            if original is not param.sharded or owner_of(param).policy != policy:
                _check_same_dtypes(managed_param, param, policy)
            shared.append((managed_param, param))
    return own, shared


def _check_not_inside(modules: Sequence[nn.Module], managed_param: ManagedParam, param: ShardedParam) -> None:
    """Raise if one of `modules` is inside a module of the call that has sharded `param`."""
    for outer in owner_of(param).modules:
        inner = next((module for module in outer.modules() if module in modules), None)
        if inner is not None:
            raise ValueError(
                f"fully_shard got a {type(inner).__name__} that is inside a {type(outer).__name__}, which an earlier "
                f"call has sharded with its parameter {managed_param.info.name}; shard inner modules first"
            )


def _check_same_dtypes(
    managed_param: ManagedParam, param: ShardedParam, policy: MixedPrecisionPolicy
) -> None:
    group = owner_of(param).group_of(param)
    earlier, own = group.precision_of(group.params.index(param)), managed_param.original.dtype
    precision = precision_by(policy, managed_param.info.name, managed_param.original)
    computes = precision.param_dtype or own
    stepped = precision.master_dtype or own
    reduces = accumulation_dtype(managed_param.original, precision, computes) or computes
    if precision.reduce_dtype is None and FOLLOWS_PARAM and not has_grad_dtype(managed_param.original):
        reduces = stepped
    precision = ParamPrecision(computes, reduces, stepped)
    if managed_param.original.is_floating_point() and precision != earlier:
        raise ValueError(
            f"{managed_param.info.name} was sharded by an earlier call, as {param.name}: to compute in "
            f"{earlier.param_dtype}, reduce in {earlier.reduce_dtype} and step in {earlier.master_dtype}, but the "
            f"mp_policy of this call says {precision.param_dtype}, {precision.reduce_dtype} and "
            f"{precision.master_dtype}; pass the same dtypes to both calls"
        )


def with_data_dims(managed: Sequence[ManagedParam], data_dims: DataDims) -> list[ManagedParam]:
    """Return the parameters with the data-parallel dimensions of their mesh.

    Raises:
        ValueError: a parameter is not a DTensor, or is not replicated over these dimensions.
    """
    params: list[ManagedParam] = []
    for param in managed:
        layout = param.info.parallel
        if layout is None:
            raise ValueError(
                "When dp_mesh_dims is provided, all parameters must be DTensors on the full SPMD mesh (e.g. via "
                f"distribute_module). Got plain tensor for parameter '{param.info.locations[0].attribute}'."
            )
        data_dims.check_placements(layout.mesh, layout.placements)
        params.append(replace(param, info=replace(param.info, parallel=replace(layout, data_dims=data_dims))))
    return params


def move_to_device(
    managed: Iterable[ManagedParam], modules: Iterable[nn.Module], device: torch.device
) -> None:
    buffers = (buffer for module in modules for buffer in module.buffers(recurse=False))
    for tensor in (*(param.parameter for param in managed), *buffers):
        if tensor.device in (device, torch.device("meta")):
            continue
        if is_traceable_wrapper_subclass(tensor):  # moves the wrapped tensor too
            with torch.no_grad():
                moved = tensor.to(device)
            is_parameter = isinstance(tensor, nn.Parameter)
            torch.utils.swap_tensors(
                tensor, nn.Parameter(moved, tensor.requires_grad) if is_parameter else moved
            )
        else:
            tensor.data = tensor.data.to(device)


class ParamPlacement(NamedTuple):
    """A parameter with the mesh and dimension that it is sharded over, and its dtypes."""

    managed: ManagedParam
    mesh: DeviceMesh
    dim: int
    precision: ParamPrecision

    @property
    def stepped_dtype(self) -> torch.dtype:
        return self.precision.master_dtype or self.managed.parameter.dtype


def group_by_mesh(
    managed: Sequence[ManagedParam],
    shard_placement_fn: Callable[[nn.Parameter], Any] | None,
    mesh: DeviceMesh,
    data_dims: DataDims | None,
    policy: MixedPrecisionPolicy,
) -> list[list[ParamPlacement]]:
    """Group the parameters by the ranks that they are sharded and replicated over, and by their dtypes.

    The ranks are those of `mesh`, unless a parameter has its own mesh. The dtypes are those to gather, reduce and step
    in.

    Raises:
        ValueError: a placement is not a Shard, or nothing is sharded.
        NotImplementedError: a parameter's own mesh has other dimensions, or dp_mesh_dims was passed too.
    """
    if shard_placement_fn is not None and data_dims is not None and not data_dims.shard:
        raise ValueError(
            "Per-param mesh via shard_placement_fn is not supported with DDPMeshInfo; it requires FSDPMeshInfo (or "
            "subclass)"
        )
    groups: dict[Any, list[ParamPlacement]] = {}
    for param in managed:
        placement: Any = None if shard_placement_fn is None else shard_placement_fn(param.original)
        own = mesh
        if hasattr(placement, "mesh_info"):  # torch's ShardPlacementResult
            if data_dims is not None:
                raise NotImplementedError(
                    f"{param.info.name} has its own mesh, and dp_mesh_dims was passed; remove one of them"
                )
            own, placement = _mesh_of(placement.mesh_info), placement.placement
        if placement is not None and not isinstance(placement, Shard):
            raise ValueError(f"Invalid shard_placement_fn result: {placement}")
        dim = 0 if placement is None else placement.dim
        precision = precision_by(policy, param.info.name, param.original)
        key = (*own.get_all_groups(), precision)
        groups.setdefault(key, []).append(ParamPlacement(param, own, dim, precision))
    return [group for placements in groups.values() for group in _by_dtype(placements)]


def param_group_of(  # noqa: PLR0913  the arguments of fully_shard
    placements: Sequence[ParamPlacement],
    reshard_after_forward: bool | int | None,
    data_dims: DataDims | None,
    device: torch.device,
    mp_policy: MixedPrecisionPolicy,
    offload_policy: OffloadPolicy,
) -> DTensorGroup:
    """Shard the parameters, which have one mesh and the same dtypes, as one group.

    Collectives: those of `post_forward_mesh_of`.
    """
    mesh, precision = placements[0].mesh, placements[0].precision
    reshards = check_reshard_after_forward(reshard_after_forward, mesh.size(mesh.ndim - 1), data_dims)
    post_forward_mesh = post_forward_mesh_of(mesh, reshards)
    groups = groups_from_mesh(mesh, post_forward_mesh, data_dims)
    rank, world, is_offloaded = groups.shard_rank, groups.shard_size, offloads(offload_policy)
    params = [
        ShardedParam(param.managed, mesh, param.dim, rank, world, param.stepped_dtype, offloads=is_offloaded)
        for param in placements
    ]
    options = GroupOptions(precision, reshards, policy=resolve_policy(mp_policy, precision))
    return DTensorGroup(params, groups, options, device, offload_policy, post_forward_mesh)


def _by_dtype(placements: list[ParamPlacement]) -> list[list[ParamPlacement]]:
    """Split parameters by the dtype that they are trained in. Integers can be in any group."""
    dtypes = [placement.stepped_dtype for placement in placements]
    trainable = [dtype for dtype in dtypes if dtype.is_floating_point or dtype.is_complex]
    if len({*trainable}) < 2:
        return [placements]
    by_dtype: dict[torch.dtype, list[ParamPlacement]] = {dtype: [] for dtype in trainable}
    for placement, dtype in zip(placements, dtypes, strict=True):
        by_dtype.get(dtype, by_dtype[trainable[0]]).append(placement)
    return list(by_dtype.values())


def _mesh_of(mesh_info: Any) -> DeviceMesh:
    mesh: DeviceMesh = mesh_info.mesh
    dims = (mesh_info.replicate_mesh_dim, mesh_info.shard_mesh_dim)
    if (mesh.ndim, *dims) not in ((1, None, 0), (2, 0, 1)):
        raise NotImplementedError(
            f"shard_placement_fn gave a mesh of {mesh.ndim} dimensions, to replicate and to shard over {dims}; give "
            "one of one dimension to shard over, or of two: to replicate over the first and to shard over the second"
        )
    return mesh
