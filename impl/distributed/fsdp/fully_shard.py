"""Mirrors torch's `fully_shard`: parameters that are DTensors, one by one, over the engine of the sharded units."""

from __future__ import annotations

import contextlib
import functools
import types
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Literal, NoReturn, cast, overload

import torch
from torch import Tensor, nn
from torch.distributed._composable.contract import REGISTRY_KEY, RegistryItem
from torch.distributed.device_mesh import DeviceMesh

from impl.distributed.fsdp._engine.phase import FORWARDS
from impl.distributed.fsdp._engine.unit import Unit
from impl.distributed.fsdp._fully_shard.cures import add_cure, add_names_of_whole, check_loaded_params
from impl.distributed.fsdp._fully_shard.finalization import (
    GradientReductionHandle,
    finalize,
    set_manual_finalization,
)
from impl.distributed.fsdp._fully_shard.group_settings import (
    refuse_buffers,
    refuse_copies,
    refuse_meshes,
    refuse_others_than_bools,
    refuse_own,
    scatter_apart,
)
from impl.distributed.fsdp._fully_shard.init import (
    backward_mesh_of,
    borrowed_apart,
    by_groups,
    check_mesh,
    check_module,
    checked_reshard,
    groups_of,
    managed_modules,
    managed_params,
    mesh_of_all,
    move_to_device,
    on_whole_mesh,
    outermost,
    refuse_twice,
)
from impl.distributed.fsdp._fully_shard.module_state import ModuleState, lender_of, state_of
from impl.distributed.fsdp._fully_shard.stale_optimizers import note_sharding
from impl.distributed.fsdp._layout.group_options import GroupOptions
from impl.distributed.fsdp._layout.per_param import DTensorGroup
from impl.distributed.fsdp._layout.sharded_param import ShardedParam
from impl.distributed.fsdp._params.config import Config
from impl.distributed.fsdp._params.managed import mark_modules
from impl.distributed.fsdp._params.policies import (
    MixedPrecisionPolicy,
    OffloadPolicy,
    offloads,
    resolve_policy,
)
from impl.distributed.fsdp._params.whole_mesh import data_dims_of
from impl.kernels import dynamo_disable

_classes: dict[type, type] = {}  # a sharded module's, by its own


def fully_shard(  # noqa: PLR0913  torch's eight
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: Any = MixedPrecisionPolicy(),  # noqa: B008  frozen
    offload_policy: Any = OffloadPolicy(),  # noqa: B008  as torch has it; nothing writes to it
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
) -> Any:
    """Shard the parameters of a module, or of several as one group, over ranks, in place.

    What the call keeps of a module, `fully_shard.state(module)` gives; None of one that it has not taken over.
    Those that an earlier call has taken over below it stay with that one, so inner modules come first. So does a
    parameter that modules of both have, with the mesh of the earlier call; forwards, backwards and `unshard` of either
    gather it. The modules get a class of their own beside `FSDPModule`, and their parameters become DTensors.

    Args:
        module: one, or a list of them that are gathered together.
        mesh: of one dimension to shard over, or two: to replicate and to shard over; by default all ranks.
        reshard_after_forward: whether parameters are freed between forward and backward; None: but for the root's. A
            number: each rank keeps what as many ranks gather again for the backward.
        shard_placement_fn: the dimension by which a parameter is sharded, as a `Shard`; None: the first. torch's
            `ShardPlacementResult` names a mesh too; parameters over other ranks are gathered apart.
        mp_policy: dtypes. `param_dtype_override_fn` or a PerParamPrecisionPolicy sets them per parameter.
        offload_policy: a CPUOffloadPolicy keeps parameters, gradients and optimizer states on the CPU.
        ignored_params: parameters that stay as they are, each rank's own.
        dp_mesh_dims: `mesh` is one that all parameters are DTensors on, as copies over the dimensions that this names:
            those to shard over, and those to replicate over.

    Returns:
        `module`.
    Raises:
        ValueError: a container without a forward, a scalar parameter, a mesh or a number that does not fit; a parameter
            that is no DTensor on a mesh with dp_mesh_dims, or not a copy over these; one of an earlier call that
            `mp_policy` gives other dtypes.
        RuntimeError: a parameter is a DTensor, but not over a slice beside `mesh` of the same mesh. In forward and
            backward: ranks run or shard modules otherwise, have other gradients, or are lost; it names these.
        NotImplementedError: a parameter is not contiguous; uneven columns; a number of ranks with dp_mesh_dims; a mesh
            of a parameter's own with dp_mesh_dims, or with other dimensions than `mesh` may have.
    Sync: none. Collectives: none, but those that make a mesh; in forward and backward of each unit an all-gather, and
        a reduce-scatter of the gradients; with replicas an all-reduce.
    Source: torch.distributed.fsdp.fully_shard 2.13; differences: what says itself how it is gathered is resharded to
        all ranks, whatever number is given; meshes of the same ranks are one, whichever object says so; torch refuses
        a parameter that modules of two calls have, and trained ones of several dtypes in one call or without elements.

    >>> import torch.distributed as dist
    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    >>> model = fully_shard(nn.Linear(2, 1, bias=False), mesh=init_device_mesh("cpu", (1,)))
    >>> model(torch.ones(1, 2)).sum().backward()
    >>> model.weight.grad.full_tensor()
    tensor([[1., 1.]])
    >>> dist.destroy_process_group()
    """
    check_module(module)
    mesh = mesh if mesh is not None else mesh_of_all()
    check_mesh(mesh, dp_mesh_dims)
    data = None if dp_mesh_dims is None else data_dims_of(mesh, dp_mesh_dims)
    mesh = mesh if data is None else data.mesh
    checked_reshard(reshard_after_forward, mesh.size(mesh.ndim - 1), data)  # before anything is moved
    modules = [module] if isinstance(module, nn.Module) else outermost(module)
    for one in modules:
        refuse_twice(one)
    device = torch.device(mesh.device_type)
    if device.type != "cpu":
        device = torch.device(device.type, torch.accelerator.current_device_index())
    ignored = ignored_params or set()
    owners = managed_modules(modules, ignored)
    managed, borrowed = borrowed_apart(managed_params(modules, owners, ignored), mp_policy)
    if data is not None:
        managed = on_whole_mesh(managed, data)
    move_to_device(managed, owners, device)
    param_groups: list[DTensorGroup] = []
    for placed in by_groups(managed, shard_placement_fn, mesh, data, mp_policy):
        own = placed[0].mesh
        reshards = checked_reshard(reshard_after_forward, own.size(own.ndim - 1), data)
        backward_mesh = backward_mesh_of(own, reshards)
        groups = groups_of(own, backward_mesh, data)
        rank, world = groups.shard_rank, groups.shard_size
        params = [
            ShardedParam(
                one.managed, own, one.dim, rank, world, one.stepped_dtype, offloads=offloads(offload_policy)
            )
            for one in placed
        ]
        precision = placed[0].precision
        options = GroupOptions(precision, reshards, policy=resolve_policy(mp_policy, precision))
        param_groups.append(DTensorGroup(params, groups, options, device, offload_policy, backward_mesh))
    unit: Unit[DTensorGroup] = Unit(modules[0], param_groups, Config())
    state = ModuleState(modules, unit, mp_policy, device)
    for one, param in borrowed:
        lender_of(param).lend(param, one.info.locations, state)
    mark_modules(owners)
    note_sharding()
    for one in modules:
        one.__class__ = _class_for(type(one))
        # torch's `replicate` looks there
        vars(one).setdefault(REGISTRY_KEY, {})[fully_shard.__name__] = RegistryItem()
    return module


fully_shard.state = state_of  # pyright: ignore[reportFunctionMemberAccess]  by which torch's pipeline stages find it


def _class_for(cls: type) -> type:
    if cls not in _classes:
        _classes[cls] = type(f"FSDP{cls.__name__}", (FSDPModule, cls), {"__deepcopy__": _refuse_copy})
    return _classes[cls]


def _refuse_copy(*_: Any, **__: Any) -> NoReturn:
    error = AssertionError("FSDP does not support deepcopy. Please use state dict for serialization.")
    error.add_note(
        "Copy the model before fully_shard, also for torch.optim.swa_utils.AveragedModel, and shard the copy in the "
        "same way; or shard another model and load this one's state_dict() into it."
    )
    raise error


class UnshardHandle:
    """What `FSDPModule.unshard(async_op=True)` returns.

    Source: torch.distributed.fsdp.UnshardHandle 2.13; differences: none.

    >>> UnshardHandle().wait()
    """

    def wait(self) -> None:
        """Have the modules show the unsharded parameters, when the current stream may read them."""


class _Pending(UnshardHandle):
    def __init__(self, state: ModuleState) -> None:
        self._state: ModuleState | None = state

    def wait(self) -> None:
        state, self._state = self._state, None
        for one in () if state is None else (state, *state.lenders):
            one.show_unsharded()


class FSDPModule:
    """The class of a module that fully_shard has been applied to, beside its own.

    Methods that end with `recurse` act on all sharded modules below too, unless it is False.

    Source: torch.distributed.fsdp.FSDPModule 2.13; differences: collectives reduce by sums alone, whatever
        `set_force_sum_reduction_for_comms` says; two buffers of gradients are in flight, on a
        device, whatever `set_reduce_scatter_max_input_buffers` allows.

    >>> issubclass(FSDPModule, nn.Module)
    False
    """

    _orig_cls_mro_index = 2  # torch's name: where the module's own class stands in the order of classes

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Of its own class, as containers make the like of themselves when they are sliced."""
        own = cls.__mro__[cls._orig_cls_mro_index]
        make: Any = own.__new__
        made = make(own, *args, **kwargs) if make is not object.__new__ else make(own)
        made.__init__(*args, **kwargs)
        return made

    def reshard(self) -> None:
        """Free what `unshard` gathers, unless others compute with it; modules show the shards. Collectives: none."""
        state = self._state
        if not state.has_root or state.unit.phase not in FORWARDS:
            state.reshard_by_hand()
        elif not self._keeps():
            state.unit.reshard(after_forward=True)

    def _keeps(self) -> bool:
        unit = self._state.unit
        return all(group.keeps_after_forward(unit.root.is_root(unit), True) for group in unit.param_groups)

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Keep the memory of unsharded parameters when they are resharded, so that its addresses stay the same.

        CUDA graphs need that. Torch has this method from 2.15 on.
        """
        for group in self._groups(recurse):
            group.options.keeps_storage = keep

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather the parameters of this module, and of the earlier calls that it has some from.

        Evaluations without gradients gather a unit again, because a write to `parameter.data` or by `torch._foreach`
        operators to DTensors cannot be noticed. They do not if it stays unsharded (`reshard_after_forward=False`) and
        was gathered by this method. Call `reshard` before such a write then.

        Sync: over gloo the host waits, also with `async_op`, until all ranks have come to a gather that has not come
            behind the one before it so far; torch's call returns at once.
        Collectives: an all-gather of each call's, unless they are there.

        Args:
            async_op: return a handle; what is gathered shows when it is waited for, or in the next forward.
        """
        state = self._state
        state.gather_ahead()
        handle = _Pending(state)
        if async_op:
            return handle
        handle.wait()
        return None

    def reset_iter_state(self) -> None:
        """Drop gradients that are not reduced yet, after a forward or backward that raised.

        Handles of `finalize_backward` are invalid then. From torch 2.15 on, `.grad` is set to None too.

        Raises:
            RuntimeError: this is not the root.
        """
        self._state.reset()

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the current stream waits for the reductions at the end of the next backward."""
        self._state.settings.is_last_backward = is_last_backward

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Set whether backwards of this root end when `finalize_backward` is called.

        Until then, units whose backward has not ended by itself stay unsharded and keep their gradients, and a step of
        an optimizer raises RuntimeError. `set_is_last_backward` has no effect. Torch has this method from 2.15 on.

        Raises:
            RuntimeError: this is not the root, or the mode changes during a backward, or between backwards and their
                finalization.
        """
        set_manual_finalization(self._state, enabled)

    @overload
    def finalize_backward(self, *, async_op: Literal[False] = False) -> None: ...
    @overload
    def finalize_backward(self, *, async_op: Literal[True]) -> GradientReductionHandle: ...
    @overload
    def finalize_backward(self, *, async_op: bool) -> GradientReductionHandle | None: ...

    @dynamo_disable
    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Reduce and publish the gradients that backwards left, and reshard, after all backwards of a step.

        To reduce only once for several backwards, turn `set_requires_gradient_sync` off for them, and on before this
        call. A backward that raised does not count. Nothing happens before the first forward. All ranks must call it.
        Torch has this method from 2.15 on; there, a backward that raised has to be reset first, and a handle may not
        be pending beside a backward of a root that shares its streams (`share_comm_ctx`).

        Args:
            async_op: return a handle, on which `wait` has to be called before the next forward, step or finalization.
                Otherwise the current stream waits for the gradients.

        Raises:
            RuntimeError: this is not the root, `set_manual_backward_finalization(True)` was not called, a backward is
                running, the previous handle was not waited for, or `set_requires_all_reduce(False)` is set.
        Sync: none, except with CPU offload and over gloo. Collectives: a reduce-scatter of every unit with gradients
            that were not reduced in their backward. With replicas an all-reduce.
        """
        handle = finalize(self._state)
        if async_op:
            return handle
        handle.wait()
        return None

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backwards reduce gradients, or add them up unreduced."""
        for group in self._groups(recurse):
            group.syncs = requires_gradient_sync
            group.reduction.defers_all_reduce = not requires_gradient_sync

    @contextlib.contextmanager
    def no_sync(self) -> Generator[None]:
        """Context manager in which backwards add up gradients unreduced, like `set_requires_gradient_sync(False)`.

        The first backward after it reduces them. Torch has this method of FullyShardedDataParallel alone.
        """
        groups = self._groups(recurse=True)
        settings = [(group.syncs, group.reduction.defers_all_reduce) for group in groups]
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            for group, (syncs, defers_all_reduce) in zip(groups, settings, strict=True):
                group.syncs, group.reduction.defers_all_reduce = syncs, defers_all_reduce

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether replicas reduce over each other what they have scattered, or add it up."""
        for group in self._groups(recurse):
            group.reduction.defers_all_reduce = not requires_all_reduce

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether parameters are freed between forward and backward.

        Raises:
            ValueError: it is no bool.
            AssertionError: parameters are not sharded at all, by dp_mesh_dims.
        """
        refuse_others_than_bools(reshard_after_forward)
        groups = self._groups(recurse)
        refuse_copies("set_reshard_after_forward()", cast("nn.Module", self), groups)
        for group in groups:
            group.options.reshards_after_forward = reshard_after_forward

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether parameters are freed after backward."""
        for group in self._groups(recurse):
            group.options.reshards_after_backward = reshard_after_backward

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Gather those of `modules` in each forward of this one.

        Raises:
            ValueError: one is not sharded.
        """
        self._state.unit.prefetches_in_forward = _units_of(modules)

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Gather those of `modules` in each backward of this one, instead of the one whose forward came before.

        Raises:
            ValueError: one is not sharded.
        """
        self._state.unit.prefetches_in_backward = _units_of(modules)

    def set_custom_all_gather(self, comm: Any) -> None:
        """Gather by `comm(output_tensor=, input_tensor=, group=, async_op=)`, in memory of `comm.allocate`.

        Raises:
            ValueError: this module's parameters lie over several meshes.
        """
        refuse_meshes("set_custom_all_gather", "custom comm", self._state.groups)
        for group in self._state.groups:
            group.options.all_gather = comm

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Reduce by `comm(output_tensor=, input_tensor=, group=, op=)`, in memory of `comm.allocate`.

        Raises:
            ValueError: this module's parameters lie over several meshes.
        """
        refuse_meshes("set_custom_reduce_scatter", "custom comm", self._state.groups)
        for group in self._state.groups:
            group.reduction.comm = comm

    def set_all_reduce_hook(self, hook: Callable[[Tensor], None], *, stream: Any = None) -> None:
        """Call `hook` with each reduced shard: the average in float32 and bfloat16, else not divided as a whole yet.

        Args:
            stream: for models without replicas; the hook runs where gradients are reduced.
        Raises:
            ValueError: a stream is given and there are replicas; this module's parameters lie over several meshes.
        """
        refuse_meshes("set_all_reduce_hook", "hook", self._state.groups)
        for group in self._state.groups:
            group.reduction.on_reduced = hook
            if stream is not None and group.params[0].replicates:
                raise ValueError("stream cannot be set when using native HSDP")

    def set_post_optim_event(self, event: Any) -> None:
        """Have the gathers of the next forward wait for `event` alone, which was recorded behind an optimizer's step.

        Without one they wait for whatever the current stream has been given before that forward.
        """
        self._state.settings.post_optim_event = event

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """`set_gradient_divide_factor`, as it was called before."""
        warnings.warn("Use `set_gradient_divide_factor` instead", DeprecationWarning, stacklevel=2)
        self.set_gradient_divide_factor(factor)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide sums of gradients by `factor`, rather than by the number of ranks."""
        for group in self._state.groups:
            group.reduction.divide_factor = factor

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Collectives always reduce by sums; with `enable` these are what a hook of `set_all_reduce_hook` is given."""
        for group in self._state.groups:
            group.reduction.sums_alone = enable

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Set whether parameters without a gradient are reduced as zeros, so that ranks may use different ones.

        The backward raises ValueError if a parameter has `grad_dtype=None` and the policy no `reduce_dtype`.
        """
        for group in self._groups(recurse):
            group.options.reduces_unused = reduce_scatter_unused_params

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """How many buffers of gradients may be in flight; two are, on a device, whatever is set.

        Raises:
            TypeError: it is no int.
            ValueError: it is less than 1.
        """
        del recurse
        refuse_buffers(max_input_buffers)

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Reduce gradients in a process group of their own. Collectives: makes it; all its ranks must call this.

        Raises:
            AssertionError: parameters are not sharded at all, by dp_mesh_dims.
        """
        scatter_apart(cast("nn.Module", self), self._groups(recurse), enable)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Whether this module's parameters are gathered for its backward."""
        self._state.unit.unshards_in_backward = unshard_in_backward

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Memory of the process group for what travels: taken for a hint.

        Raises:
            AssertionError: this module has communication of the user's own.
        """
        del enable
        refuse_own("set_allocate_memory_from_process_group()", self._state.groups)

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Refuse symmetric memory, which gathers do not use.

        Raises:
            RuntimeError: always, with torch's text for a backend without it.
        """
        raise RuntimeError(f"SymmetricMemory does not find allocation backend {backend}")

    def _groups(self, recurse: bool) -> list[DTensorGroup]:
        module = cast("nn.Module", self)
        states = [state_of(one) for one in (module.modules() if recurse else [module])]
        return [group for state in states if state is not None for group in state.groups]

    @property
    def _state(self) -> ModuleState:
        found = state_of(cast("nn.Module", self))
        assert found is not None, f"No FSDP state found on {self}"
        return found

    def _get_fsdp_state(self) -> ModuleState:
        """Torch's name, which others call."""
        return self._state

    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        """As of any module; hooks that are called always are not where a user has interrupted it."""
        call_impl: Any = super()._call_impl  # pyright: ignore[reportAttributeAccessIssue]  the module's own class
        if torch.compiler.is_compiling():  # which would not trace a `try`
            return call_impl(*args, **kwargs)
        try:
            return call_impl(*args, **kwargs)
        except BaseException as error:
            self._state.abandon_forward()
            add_cure(cast("nn.Module", self), error)
            raise

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load DTensors. For whole tensors the error names the function that shards them.

        Raises:
            RuntimeError: torch's. A note names whole tensors.
            TypeError: whole tensors were to be assigned. The parameters stay as they were.
        """
        load: Any = super().load_state_dict  # pyright: ignore[reportAttributeAccessIssue]  the module's own class
        module = cast("nn.Module", self)
        try:
            result = load(state_dict, *args, **kwargs)
        except RuntimeError as error:
            add_names_of_whole(module, state_dict, error)
            raise
        check_loaded_params(module, self._groups(recurse=True))
        return result

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """As of any module; in the midst of a backward that raised it would clear what is not stepped."""
        if self._state.has_root:
            self._state.unit.root.handle_failed_backward()
        super().zero_grad(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]  the module's own class

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Move or cast the shards."""
        self.reshard()
        made = super()._apply(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]  the module's own class
        for state in (self._state, *self._state.lenders):
            for group in state.groups:
                group.write_back_changes()
                group.record_casts()
                group.pin()
        return made


def _units_of(modules: Sequence[Any]) -> list[Unit[DTensorGroup]]:
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(f"Expects FSDPModule but got {type(module)}: {module}")
    return [module._state.unit for module in modules]


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Have another method of a sharded module unshard and reshard as `forward` does.

    Args:
        module: nothing happens if it is not sharded.
        method_name: of a method that it has.
    Raises:
        ValueError: it has none of that name.
    Source: torch.distributed.fsdp.register_fsdp_forward_method 2.13; differences: none.

    >>> register_fsdp_forward_method(nn.Linear(1, 1), "forward")
    """
    if not isinstance(module, FSDPModule):
        return
    if not hasattr(module, method_name):
        raise ValueError(f"{type(module)} does not have a method {method_name}")
    original = getattr(module, method_name)

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        state = self._state
        args, kwargs = state.before_forward(self, args, kwargs)
        try:
            output = original(*args, **kwargs)
        except BaseException:
            state.abandon_forward()
            raise
        return state.after_forward(self, args, output)

    setattr(module, method_name, types.MethodType(method, module))


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Have several roots gather and reduce on the same streams; to be called before their first forward.

    Args:
        modules: the roots.
    Raises:
        ValueError: one is not sharded.
    Source: torch.distributed.fsdp.share_comm_ctx 2.13; differences: none.

    >>> share_comm_ctx([])
    """
    given: list[Any] = modules
    for module in given:
        if not isinstance(module, FSDPModule):
            raise ValueError(f"Expects list of FSDPModules but got {module}")
    for module in modules[1:]:
        module._state.comm = modules[0]._state.comm
