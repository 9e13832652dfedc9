"""Mirrors torch's `fully_shard`: parameters become DTensors, one by one, on the engine of sharded units."""

from __future__ import annotations

import contextlib
import functools
import types
import warnings
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload

import torch
from torch import Tensor, nn
from torch.distributed._composable.contract import REGISTRY_KEY, RegistryItem
from torch.distributed.device_mesh import DeviceMesh

from impl.distributed.fsdp._engine.phase import FORWARDS
from impl.distributed.fsdp._engine.streams import DeviceEvent
from impl.distributed.fsdp._engine.unit import Unit
from impl.distributed.fsdp._fully_shard.cures import add_cure
from impl.distributed.fsdp._fully_shard.finalization import finalize, set_manual_finalization
from impl.distributed.fsdp._fully_shard.group_settings import (
    check_all_sharded,
    check_bool,
    check_max_input_buffers,
    check_no_custom_comm,
    check_same_mesh,
    use_separate_scatter_groups,
)
from impl.distributed.fsdp._fully_shard.init import (
    check_mesh,
    check_module,
    check_not_sharded,
    check_reshard_after_forward,
    group_by_mesh,
    managed_params,
    managed_submodules,
    mesh_of_all,
    move_to_device,
    outermost_modules,
    param_group_of,
    split_already_sharded,
    with_data_dims,
)
from impl.distributed.fsdp._fully_shard.module_state import ModuleState, owner_of, state_of
from impl.distributed.fsdp._fully_shard.reduction_handle import GradientReductionHandle
from impl.distributed.fsdp._layout.per_param import DTensorGroup
from impl.distributed.fsdp._params.config import UnitOptions
from impl.distributed.fsdp._params.data_dims import data_dims_of
from impl.distributed.fsdp._params.managed import mark_modules
from impl.distributed.fsdp._params.policies import (
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
)
from impl.kernels import dynamo_disable

# Every FSDPModule is also a module at run time, because the class of a sharded module inherits from both.
_BaseForTypeCheckers = nn.Module if TYPE_CHECKING else object
_classes: dict[type, type] = {}  # class of a sharded module by its original class


@overload
def fully_shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: DataParallelMeshDims | None = ...,
) -> FSDPModule: ...
@overload
def fully_shard(
    module: Sequence[nn.Module],
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: DataParallelMeshDims | None = ...,
) -> list[FSDPModule]: ...
def fully_shard(  # noqa: PLR0913  torch's eight arguments
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008  frozen
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008  as torch has it; nothing writes to it
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
) -> Any:
    """Shard the parameters of a module, or of several modules as one group, over ranks, in place.

    `fully_shard.state(module)` returns the state of a sharded module, or None. Modules that an earlier call has sharded
    keep their group, so shard inner modules first. A parameter or module that two calls share belongs to the earlier
    call, with its mesh. Forwards, backwards and `unshard` of either call gather it. The modules get a new class derived
    from their own class and `FSDPModule`, and their parameters become DTensors.

    Args:
        module: a module, or a list of modules that are gathered together.
        mesh: one dimension to shard over, or two: to replicate and to shard over; by default all ranks.
        reshard_after_forward: whether parameters are freed between forward and backward; None: True except for the
            root. A number: reshard to that many ranks, which gather again for the backward.
        shard_placement_fn: returns the dimension to shard a parameter in, as a `Shard`; None: the first. torch's
            `ShardPlacementResult` also names a mesh. Parameters over other ranks are gathered separately.
        mp_policy: dtypes. `param_dtype_override_fn` or a PerParamPrecisionPolicy sets them per parameter.
        offload_policy: a CPUOffloadPolicy keeps parameters, gradients and optimizer states on the CPU.
        ignored_params: parameters that are not sharded.
        dp_mesh_dims: names the dimensions of `mesh` to shard over and to replicate over. Then all parameters must be
            DTensors on `mesh` that are replicated over these dimensions.

    Returns:
        `module`.
    Raises:
        ValueError: an argument or parameter does not fit, such as a container without a forward or a scalar parameter;
            or an earlier call has sharded a module around `module`.
        RuntimeError: a parameter is a DTensor over a mesh that does not share a root with `mesh`. In forward and
            backward: ranks run or shard modules differently, have other gradients, or are lost. The error names them.
        NotImplementedError: a combination that `docs/coverage.md` lists.
    Sync: none. Collectives: none, except those that create a mesh; in forward and backward of each unit an all-gather,
        and a reduce-scatter of the gradients; with replicas an all-reduce.
    Source: torch.distributed.fsdp.fully_shard 2.13; differences: a parameter with an all-gather extension is
        resharded to all ranks, whatever number is passed; meshes of the same ranks are equal; torch refuses a
        parameter or module that two calls share, and trained parameters of several dtypes or without elements.

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
    data_dims = None if dp_mesh_dims is None else data_dims_of(mesh, dp_mesh_dims)
    mesh = mesh if data_dims is None else data_dims.mesh
    # Check before anything is moved.
    check_reshard_after_forward(reshard_after_forward, mesh.size(mesh.ndim - 1), data_dims)
    modules = [module] if isinstance(module, nn.Module) else outermost_modules(module)
    for outermost in modules:
        check_not_sharded(outermost)
    device = torch.device(mesh.device_type)
    if device.type != "cpu":
        device = torch.device(device.type, torch.accelerator.current_device_index())
    ignored = ignored_params or set()
    submodules = managed_submodules(modules, ignored)
    managed, shared = split_already_sharded(modules, managed_params(modules, submodules, ignored), mp_policy)
    if data_dims is not None:
        managed = with_data_dims(managed, data_dims)
    move_to_device(managed, submodules, device)
    param_groups = [
        param_group_of(placements, reshard_after_forward, data_dims, device, mp_policy, offload_policy)
        for placements in group_by_mesh(managed, shard_placement_fn, mesh, data_dims, mp_policy)
    ]
    unit: Unit[DTensorGroup] = Unit(modules[0], param_groups, UnitOptions())
    state = ModuleState(modules, unit, mp_policy, device)
    for param, sharded_param in shared:
        owner_of(sharded_param).share_with(sharded_param, param.info.locations, state)
    mark_modules(submodules)
    for outermost in modules:
        outermost.__class__ = _class_for(type(outermost))
        # torch's `replicate` reads this registry.
        vars(outermost).setdefault(REGISTRY_KEY, {})[fully_shard.__name__] = RegistryItem()
    return module


fully_shard.state = state_of  # pyright: ignore[reportFunctionMemberAccess]  torch's pipeline stages call it


def _class_for(cls: type) -> type:
    if cls not in _classes:
        attributes: dict[str, Any] = {"__deepcopy__": _refuse_copy}
        if hasattr(cls, "no_sync"):
            attributes["no_sync"] = cls.no_sync  # torch's FSDPModule has none that would hide it
        _classes[cls] = type(f"FSDP{cls.__name__}", (FSDPModule, cls), attributes)
    return _classes[cls]


def _refuse_copy(*_: object, **__: object) -> NoReturn:
    error = AssertionError("FSDP does not support deepcopy. Please use state dict for serialization.")
    error.add_note(
        "Copy the model before fully_shard, also for torch.optim.swa_utils.AveragedModel, and shard the copy in the "
        "same way; or shard another model and load this one's state_dict() into it."
    )
    raise error


class UnshardHandle:
    """Handle that `FSDPModule.unshard(async_op=True)` returns.

    Source: torch.distributed.fsdp.UnshardHandle 2.13; differences: none.

    >>> UnshardHandle().wait()
    """

    def wait(self) -> None:
        """Register the unsharded parameters in the modules, once the current stream may read them."""


class _PendingUnshard(UnshardHandle):
    def __init__(self, state: ModuleState) -> None:
        self._state: ModuleState | None = state

    def wait(self) -> None:
        state, self._state = self._state, None
        for gathered_state in () if state is None else (state, *state.param_owners):
            gathered_state.register_unsharded()


class FSDPModule(_BaseForTypeCheckers):
    """Base class that fully_shard adds to the class of a module.

    Methods that end with `recurse` act on all sharded modules below too, unless it is False.

    Source: torch.distributed.fsdp.FSDPModule 2.13; differences: collectives always reduce by sums, whatever
        `set_force_sum_reduction_for_comms` says; on a device two buffers of gradients are in flight, whatever
        `set_reduce_scatter_max_input_buffers` allows.

    >>> issubclass(FSDPModule, nn.Module)
    False
    """

    # torch's name for the index of the module's own class in the method resolution order.
    _orig_cls_mro_index = 2

    def __new__(cls, *args: object, **kwargs: object) -> Any:
        """Build an instance of the unsharded class, so that slicing a sharded `nn.Sequential` works."""
        own = cls.__mro__[cls._orig_cls_mro_index]
        make: Any = own.__new__
        module = make(own, *args, **kwargs) if make is not object.__new__ else make(own)
        module.__init__(*args, **kwargs)
        return module

    def reshard(self) -> None:
        """Free the parameters that `unshard` gathers, unless others compute with them. Collectives: none."""
        state = self._get_fsdp_state()
        if state.unit.phase not in FORWARDS:
            state.reshard_on_request()
        elif not state.unit.keeps_after_forward(awaits_backward=True):
            state.unit.reshard(after_forward=True)

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Set whether the memory of unsharded parameters is kept when they are resharded, so that its addresses stay.

        CUDA graphs need constant addresses. torch has this method since 2.15.
        """
        for group in _param_groups_of(self, recurse):
            group.options.keeps_storage = keep

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather the parameters of this module, and of the earlier calls whose parameters it shares.

        Parameters that this method gathers stay unsharded after an evaluation. Call `reshard` before you write to
        `parameter.data`, or to DTensors by `torch._foreach` operators, because such writes cannot be detected. For the
        same reason an evaluation reshards all other units.

        Sync: over gloo the host waits, also with `async_op`, until all ranks have reached the gather, unless it also
            followed the collective before it in an earlier step; torch's call returns at once.
        Collectives: an all-gather of each call's parameters, unless they are unsharded.

        Args:
            async_op: return a handle. The modules get the parameters when it is waited for, or in the next forward.
        """
        state = self._get_fsdp_state()
        state.gather_on_request()
        handle = _PendingUnshard(state)
        if async_op:
            return handle
        handle.wait()
        return None

    def reset_iter_state(self) -> None:
        """Drop gradients that are not reduced yet, after a forward or backward that raised.

        Handles of `finalize_backward` become invalid. From torch 2.15 on, `.grad` is set to None too.

        Raises:
            RuntimeError: this is not the root.
        """
        self._get_fsdp_state().reset()

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Set whether the current stream waits for the reductions at the end of the next backward."""
        self._get_fsdp_state().settings.is_last_backward = is_last_backward

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Set whether backwards of this root end when `finalize_backward` is called.

        Until then, units whose backward has not ended by itself stay unsharded and keep their gradients, and a step of
        an optimizer raises RuntimeError. `set_is_last_backward` has no effect. Torch has this method from 2.15 on.

        Raises:
            RuntimeError: this is not the root, or the mode changes during a backward, or between backwards and their
                finalization.
        """
        set_manual_finalization(self._get_fsdp_state(), enabled)

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
        handle = finalize(self._get_fsdp_state())
        if async_op:
            return handle
        handle.wait()
        return None

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Set whether backwards reduce gradients, or accumulate them unreduced."""
        for group in _param_groups_of(self, recurse):
            group.syncs = requires_gradient_sync
            group.reduction.defers_all_reduce = not requires_gradient_sync

    @contextlib.contextmanager
    def no_sync(self) -> Generator[None]:
        """Accumulate the unreduced gradients of backwards inside, like `set_requires_gradient_sync(False)`.

        The first backward after the context reduces them. Until then each rank keeps unsharded gradients. The earlier
        settings are restored, even if they were changed inside. A `no_sync` of the module's own class is kept. In
        torch only FullyShardedDataParallel has this method.
        """
        groups = _param_groups_of(self, recurse=True)
        settings = [(group.syncs, group.reduction.defers_all_reduce) for group in groups]
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            for group, (syncs, defers_all_reduce) in zip(groups, settings, strict=True):
                group.syncs, group.reduction.defers_all_reduce = syncs, defers_all_reduce

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Set whether replicas all-reduce their scattered gradients, or accumulate them."""
        for group in _param_groups_of(self, recurse):
            group.reduction.defers_all_reduce = not requires_all_reduce

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Set whether parameters are freed between forward and backward.

        Raises:
            ValueError: the argument is not a bool.
            AssertionError: parameters are not sharded at all, by dp_mesh_dims.
        """
        check_bool(reshard_after_forward)
        groups = _param_groups_of(self, recurse)
        check_all_sharded("set_reshard_after_forward()", self, groups)
        for group in groups:
            group.options.reshards_after_forward = reshard_after_forward

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Set whether parameters are freed after backward."""
        for group in _param_groups_of(self, recurse):
            group.options.reshards_after_backward = reshard_after_backward

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Gather the parameters of `modules` in each forward of this module.

        Raises:
            ValueError: a module is not sharded.
        """
        self._get_fsdp_state().unit.prefetches_in_forward = _units_of(modules)

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Gather the parameters of `modules` in each backward of this module, instead of the default prefetch.

        Raises:
            ValueError: a module is not sharded.
        """
        self._get_fsdp_state().unit.prefetches_in_backward = _units_of(modules)

    def set_custom_all_gather(self, comm: object) -> None:
        """Gather with `comm(output_tensor=, input_tensor=, group=, async_op=)`, in memory of `comm.allocate`.

        Raises:
            ValueError: this module's parameters are on several meshes.
        """
        groups = self._get_fsdp_state().param_groups
        check_same_mesh("set_custom_all_gather", "custom comm", groups)
        for group in groups:
            group.options.custom_all_gather = comm

    def set_custom_reduce_scatter(self, comm: object) -> None:
        """Reduce with `comm(output_tensor=, input_tensor=, group=, op=)`, in memory of `comm.allocate`.

        Raises:
            ValueError: this module's parameters are on several meshes.
        """
        groups = self._get_fsdp_state().param_groups
        check_same_mesh("set_custom_reduce_scatter", "custom comm", groups)
        for group in groups:
            group.reduction.custom_reduce_scatter = comm

    def set_all_reduce_hook(self, hook: Callable[[Tensor], None], *, stream: object = None) -> None:
        """Call `hook` with each reduced shard: the average in float32 and bfloat16, else a sum that is partly divided.

        Args:
            stream: only for models without replicas. The hook runs on the stream that reduces gradients.
        Raises:
            ValueError: a stream is passed and there are replicas; this module's parameters are on several meshes.
        """
        groups = self._get_fsdp_state().param_groups
        check_same_mesh("set_all_reduce_hook", "hook", groups)
        for group in groups:
            group.reduction.all_reduce_hook = hook
            if stream is not None and group.params[0].replicates:
                raise ValueError("stream cannot be set when using native HSDP")

    def set_post_optim_event(self, event: DeviceEvent) -> None:
        """Make the gathers of the next forward wait only for `event`, which was recorded after an optimizer's step.

        Without an event they wait for all work on the current stream before that forward.
        """
        self._get_fsdp_state().settings.post_optim_event = event

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Set the divide factor. Deprecated: use `set_gradient_divide_factor`."""
        warnings.warn("Use `set_gradient_divide_factor` instead", DeprecationWarning, stacklevel=2)
        self.set_gradient_divide_factor(factor)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Set the factor that sums of gradients are divided by, instead of the number of ranks."""
        for group in self._get_fsdp_state().param_groups:
            group.reduction.divide_factor = factor

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Set whether a hook of `set_all_reduce_hook` gets sums. Collectives always reduce by sums."""
        for group in self._get_fsdp_state().param_groups:
            group.reduction.forces_sums = enable

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Set whether parameters without a gradient are reduced as zeros, so that ranks may use different ones.

        The backward raises ValueError if a parameter has `grad_dtype=None` and the policy no `reduce_dtype`.
        """
        for group in _param_groups_of(self, recurse):
            group.options.reduces_unused = reduce_scatter_unused_params

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Check the number of gradient buffers in flight. On a device it is always two.

        Raises:
            TypeError: the argument is not an int.
            ValueError: the argument is less than 1.
        """
        del recurse
        check_max_input_buffers(max_input_buffers)

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Set whether gradients are reduced in a separate process group.

        Collectives: creates the group; all its ranks must call this.

        Raises:
            AssertionError: parameters are not sharded at all, by dp_mesh_dims.
        """
        use_separate_scatter_groups(self, _param_groups_of(self, recurse), enable)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Set whether this module's parameters are gathered for its backward."""
        self._get_fsdp_state().unit.unshards_in_backward = unshard_in_backward

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Accept the hint to communicate in memory of the process group.

        Raises:
            AssertionError: this module has user-defined communication.
        """
        del enable
        check_no_custom_comm("set_allocate_memory_from_process_group()", self._get_fsdp_state().param_groups)

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Refuse symmetric memory, which gathers do not use.

        Raises:
            RuntimeError: always, with torch's text for a backend without it.
        """
        raise RuntimeError(f"SymmetricMemory does not find allocation backend {backend}")

    def _get_fsdp_state(self) -> ModuleState:
        """Return the module's state, under the name that torch and other libraries call."""
        state = state_of(self)
        assert state is not None, f"No FSDP state found on {self}"
        return state

    def _call_impl(self, *args: object, **kwargs: object) -> Any:
        """Call the module. After an interrupt its forward hooks are not called, so the forward is ended here."""
        call_impl = super()._call_impl
        if torch.compiler.is_compiling():  # Dynamo does not trace a `try`
            return call_impl(*args, **kwargs)
        try:
            return call_impl(*args, **kwargs)
        except BaseException as error:
            self._get_fsdp_state().unit.abandon_forward()
            add_cure(self, error)
            raise

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clear the gradients, also of sharded parameters whose module is unsharded at the moment.

        First end a failed backward, which has left unsharded parameters in the modules.
        """
        root = self._get_fsdp_state().unit.root_or_none
        if root is not None:
            root.handle_failed_backward()
        super().zero_grad(*args, **kwargs)
        unsharded = [group for group in _param_groups_of(self, recurse=True) if group.uses_unsharded_views]
        params = [param.sharded for group in unsharded for param in group.params]
        nn.ParameterList(params).zero_grad(*args, **kwargs)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Move or cast the shards."""
        self.reshard()
        states = (self._get_fsdp_state(), *self._get_fsdp_state().param_owners)
        groups = [group for state in states for group in state.param_groups]
        with contextlib.ExitStack() as stack:
            for param in (param for group in groups for param in group.params):
                stack.enter_context(param.keeping_grad_dtype())
            for group in groups:
                if group.unsharded_params is not None:
                    stack.enter_context(group.unsharded_params.following_moves())
            result = super()._apply(*args, **kwargs)
            for group in groups:
                group.write_back_changes()
                group.masters.record_casts()
                group.pin()
        return result


def _param_groups_of(module: nn.Module, recurse: bool) -> list[DTensorGroup]:
    states = [state_of(child) for child in (module.modules() if recurse else [module])]
    return [group for state in states if state is not None for group in state.param_groups]


def _units_of(modules: Sequence[Any]) -> list[Unit[DTensorGroup]]:
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(f"Expects FSDPModule but got {type(module)}: {module}")
    return [module._get_fsdp_state().unit for module in modules]


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Make another method of a sharded module unshard and reshard like `forward`.

    Args:
        module: any module. If it is not sharded, nothing is done.
        method_name: name of the method.
    Raises:
        ValueError: the module has no method of that name.
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
        state = self._get_fsdp_state()
        args, kwargs = state.before_forward(self, args, kwargs)
        try:
            output = original(*args, **kwargs)
        except BaseException:
            state.unit.abandon_forward()
            raise
        return state.after_forward(self, args, output)

    setattr(module, method_name, types.MethodType(method, module))


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Make several roots gather and reduce on the same streams. Call before their first forward.

    The roots then reuse each other's memory of gradients, so compute them on one stream of the user.

    Args:
        modules: the roots.
    Raises:
        ValueError: a module is not sharded.
    Source: torch.distributed.fsdp.share_comm_ctx 2.13; differences: none.

    >>> share_comm_ctx([])
    """
    roots: list[Any] = modules
    for module in roots:
        if not isinstance(module, FSDPModule):
            raise ValueError(f"Expects list of FSDPModules but got {module}")
    for module in modules[1:]:
        module._get_fsdp_state().comm = modules[0]._get_fsdp_state().comm
