"""`FullyShardedDataParallel`: the public class. The engine (`_engine/unit.py`, `_engine/root.py`) does the work."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from impl.distributed.fsdp._comm.groups import (
    HYBRID,
    choose_process_groups,
    effective_strategy,
    groups_from_strategy,
)
from impl.distributed.fsdp._engine.phase import FORWARDS, SUMMONED, Phase, TrainingState, not_idle
from impl.distributed.fsdp._engine.root import Root
from impl.distributed.fsdp._engine.unit import Unit
from impl.distributed.fsdp._fsdp1.buffers import Buffers
from impl.distributed.fsdp._fsdp1.clip import joint_norm, scale_grads
from impl.distributed.fsdp._fsdp1.contained import note_sharded_reads, watch_contained
from impl.distributed.fsdp._fsdp1.private_names import PrivateNames
from impl.distributed.fsdp._fsdp1.summon import FullParamsOptions, check, summoned
from impl.distributed.fsdp._fsdp1.wrapper import root_over
from impl.distributed.fsdp._layout.flat import FlatParamGroup, flat_param_groups
from impl.distributed.fsdp._params.config import Config, ProcessGroups
from impl.distributed.fsdp._params.managed import (
    check_dtensors,
    check_hooks,
    clean_name,
    ignored_by,
    managed_params_of,
    mark_managed,
    parallel_groups_of,
)
from impl.distributed.fsdp._params.module_init import (
    broadcast_states,
    device_type_for,
    materialize_and_move,
    materialized,
)
from impl.distributed.fsdp._state_dict.methods import StateDicts
from impl.distributed.fsdp._state_dict.optim import OptimStateDicts
from impl.distributed.fsdp._state_dict.optim_keys import OptimStateKeyType
from impl.distributed.fsdp.api import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from impl.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy, auto_wrap
from impl.kernels import span
from impl.nn.utils.clip_grad import check_finite, clip_grad_norm_

__all__ = ["FullyShardedDataParallel", "OptimStateKeyType"]

_PREFIX = "_fsdp_wrapped_module."


class FullyShardedDataParallel(PrivateNames, StateDicts, OptimStateDicts):
    """Shard a module's parameters, gradients and optimizer states over the ranks of a process group.

    Each wrapped module is a unit. Its parameters are gathered before it computes, in forward and in backward, and
    resharded afterwards. Each rank keeps the averaged gradients of its own shard, which the optimizer steps. Wrap inner
    modules first, or choose them by `auto_wrap_policy`. Create the optimizer afterwards. Every rank must build the same
    module, and run its units in the same order. Inner modules may also be called directly.

    If a unit took part in a backward, its unused parameters get zeros, like in torch. So momentum and weight decay
    still change them. Make them a unit of their own, freeze them before wrapping, or use `fully_shard`, which gives
    them no gradient. Gradient hooks that parameters had before get this rank's gradient, or with `use_orig_params` its
    piece of the average.

    Outside forward and backward, `parameters()` are this rank's shards, 1-D. Use `summon_full_params` to read or write
    unsharded parameters.

    Args:
        module: the module to wrap. Parameters may have several dtypes, and some may be frozen; none may be 0-dim.
        process_group: the ranks to shard over, by default all. Hybrid strategies take two: to shard, and to replicate.
        sharding_strategy: FULL_SHARD, the default, unshards parameters while the unit computes; SHARD_GRAD_OP from a
            forward with gradients to the end of backward; NO_SHARD always. HYBRID_SHARD and _HYBRID_SHARD_ZERO2 are
            the first two, sharded within one group and averaged over another.
        cpu_offload: keep parameters and gradients on the CPU, where the optimizer steps them. If units compute on an
            accelerator, both are in pinned memory, and the host waits for copies of them at the end of a forward, of a
            backward and of `summon_full_params`.
        auto_wrap_policy: chooses the inner modules that become units; see `impl.distributed.fsdp.wrap`. A parameter
            that several of them share belongs to a unit around them.
        backward_prefetch: gather the next unit before this one's gradients are computed, or after; None: when needed.
        mixed_precision: dtypes to compute, reduce and keep buffers in. Parameters and `.grad` keep their own.
        ignored_modules: modules whose parameters and buffers are not managed.
        param_init_fn: called with each module on the meta device, to create its own parameters. By default
            `reset_parameters` creates them.
        device_id: the compute device. By default the module's device; for a module on the CPU the accelerator, if
            there is one.
        sync_module_states: copy parameters and buffers of the group's first rank to all ranks.
        forward_prefetch: gather the next unit before this one computes, in the order of the previous iteration.
        limit_all_gathers: let the host wait instead of gathering more than two units.
        use_orig_params: `parameters()` are the module's own, as views of this rank's shard. Otherwise they are one
            `FlatParameter` per unit. A running forward gets unsharded parameters, also a flat one, from `parameters()`.
        ignored_states: parameters or modules that are not managed.
        device_mesh: replaces `process_group`: one dimension, or two, to replicate and to shard over; the slice
            `mesh["dp"]` if `parallelize_module` has made DTensors over another one. Then state dicts have DTensors.

    Raises:
        ValueError: arguments exclude each other; a parameter is 0-dim or integer, or a unit elsewhere has sharded it.
        RuntimeError: parameters are on several devices, or have hooks after accumulation without `use_orig_params`.
        NotImplementedError: a parameter is a DTensor over a mesh that does not share a root with `device_mesh`.
    Collectives: in the constructor, broadcasts if `sync_module_states`, and new groups for a hybrid strategy without
        any. In forward and backward of each unit an all-gather, and a reduce-scatter of the gradients; SHARD_GRAD_OP
        and the outermost unit gather once for both. Hybrid strategies add an all-reduce of each rank's shard; NO_SHARD
        only has an all-reduce.
    Source: torch.distributed.fsdp.FullyShardedDataParallel 2.13; differences: what torch's docstring lists as limits
        works, for gradients of gradients only with respect to inputs; changing parameters in place during forward
        raises, and so does reading a resharded one; no accelerator is needed.

    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    >>> model = FullyShardedDataParallel(nn.Linear(2, 1, bias=False), sharding_strategy=ShardingStrategy.NO_SHARD)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    >>> model(torch.ones(1, 2)).sum().backward()
    >>> [p.grad for p in model.parameters()]
    [tensor([1., 1.])]
    >>> optimizer.step()
    >>> dist.destroy_process_group()
    """

    def __init__(  # noqa: PLR0913, PLR0917  torch's sixteen arguments
        self,
        module: nn.Module,
        process_group: ProcessGroups = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: Callable[..., Any] | ModuleWrapPolicy | CustomPolicy | None = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        device_mesh: DeviceMesh | None = None,
        *,
        _left_to_ancestor: frozenset[nn.Parameter] = frozenset(),
    ) -> None:
        super().__init__()
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            warnings.warn(
                f"FSDP will not all-gather parameters for containers that do not implement forward: {module}",
                stacklevel=2,
            )
        config = Config(
            process_group=process_group,
            sharding_strategy=sharding_strategy,
            cpu_offload=cpu_offload,
            backward_prefetch=backward_prefetch,
            mixed_precision=mixed_precision,
            param_init_fn=param_init_fn,
            device_id=device_id,
            sync_module_states=sync_module_states,
            forward_prefetch=forward_prefetch,
            limit_all_gathers=limit_all_gathers,
            use_orig_params=use_orig_params,
            device_mesh=device_mesh,
        )
        self._ignored = ignored_by(module, ignored_modules, ignored_states, FullyShardedDataParallel)
        named_params = list(module.named_parameters())
        check_dtensors(named_params, self._ignored, device_mesh)
        if not use_orig_params:
            check_hooks(named_params, self._ignored)
        device_type = device_type_for(module, self._ignored, device_id)
        groups = choose_process_groups(
            process_group, sharding_strategy, auto_wrap_policy is not None, device_mesh, device_type
        )
        if auto_wrap_policy is not None:
            inner_groups = groups if sharding_strategy in HYBRID and device_mesh is None else process_group
            auto_wrap(
                module,
                auto_wrap_policy,
                ignored_modules=set(self._ignored.modules),
                ignored_params=set(self._ignored.parameters),
                wrapper_cls=FullyShardedDataParallel,
                wrapper_kwargs=config.arguments
                | {"process_group": inner_groups, "ignored_states": self._ignored.parameters},
            )
        self.process_group, _ = groups
        self.rank = self.process_group.rank()
        self.world_size = self.process_group.size()
        self.sharding_strategy = effective_strategy(sharding_strategy, self.world_size)
        self.mixed_precision = config.precision
        self.cpu_offload = cpu_offload or CPUOffload()
        self.backward_prefetch = backward_prefetch
        self.forward_prefetch = forward_prefetch
        self.limit_all_gathers = limit_all_gathers
        self._use_orig_params = use_orig_params
        self._device_mesh = device_mesh
        self._use_full_prec_in_eval = config.full_precision_in_eval
        self.compute_device = materialize_and_move(
            module, self._ignored, device_id, device_type, param_init_fn, self.rank, FullyShardedDataParallel
        )
        managed = managed_params_of(module, self._ignored, materialized(_left_to_ancestor))
        self._groups = groups_from_strategy(self.sharding_strategy, *groups, parallel_groups_of(managed))
        if sync_module_states:
            outer_first = [group for group in reversed(groups) if group is not None]
            broadcast_states(module, managed, outer_first)
        param_groups = flat_param_groups(managed, self._groups, config, self.compute_device)
        self._unit = Unit(module, param_groups, config.unit_options)
        self._buffer_dtypes = {clean_name(name): buffer.dtype for name, buffer in module.named_buffers()}
        self._begin_state_dicts()
        mark_managed(module, self._ignored, managed)
        self._fsdp_wrapped_module = module
        for name, handle in self._named_handles():
            handle.registration.set_flat_param_place(self.module, name)
        self._root = None
        self._buffer_casts: Buffers | None = None  # buffers of the root, on the outermost wrapper
        self._outer: weakref.ref[FullyShardedDataParallel] | None = None
        self._claim_inner()
        watch_contained(self._unit, self._find_root)

    @property
    def module(self) -> nn.Module:
        """The wrapped module, also inside a wrapper for activation checkpointing."""
        inner = self._fsdp_wrapped_module
        return getattr(inner, "_checkpoint_wrapped_module", inner)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapped module that this class does not have."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "_fsdp_wrapped_module":
                raise
            return getattr(self._fsdp_wrapped_module, name)

    def __getitem__(self, key: int) -> Any:
        """Index the wrapped module, which may be a Sequential."""
        inner: Any = self._fsdp_wrapped_module
        return inner[key]

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise TypeError(
            f"{type(self.module).__name__} cannot be copied, since its parameters are sharded over a group of ranks; "
            "copy it before it is wrapped, or wrap another one and load this one's state_dict() into it"
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module's forward with its parameters unsharded."""
        unit = self._unit
        root = self._root or self._find_root()
        if root.is_root(unit) and unit.phase not in FORWARDS:
            assert self._buffer_casts is not None
            self._buffer_casts.begin_forward()
            args, kwargs = self._inputs_of_root(args, kwargs)
        try:
            args, kwargs = unit.before_forward(args, kwargs)
            with span("FullyShardedDataParallel.forward", unit.name):
                output = self._fsdp_wrapped_module(*args, **kwargs)
        except BaseException as error:
            unit.abandon_forward()
            note_sharded_reads(self, self.fsdp_modules(self)[1:], error)
            raise
        return unit.after_forward(output)

    def check_is_root(self) -> bool:
        """Return whether no other FullyShardedDataParallel is around this one.

        Source: torch's 2.13; differences: for an inner one it is False also before the outer one has run.
        """
        return self._find_root().is_root(self._unit)

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FullyShardedDataParallel]:
        """Return all FullyShardedDataParallel at and below `module`, or only the outermost ones with `root_only`."""
        wrappers = [child for child in module.modules() if isinstance(child, FullyShardedDataParallel)]
        return [wrapper for wrapper in wrappers if wrapper.check_is_root()] if root_only else wrappers

    def apply(self, fn: Callable[[nn.Module], None]) -> FullyShardedDataParallel:
        """Apply `fn` to every submodule and to self, with unsharded parameters. Changes to parameters are kept.

        Raises:
            ValueError: called during a forward or backward, or inside `summon_full_params`.
        Collectives: an all-gather of each unit; all ranks must call it.
        """
        self._check_idle()
        with self._summoned(FullParamsOptions()):
            return super().apply(fn)

    @staticmethod
    @contextlib.contextmanager
    def summon_full_params(  # noqa: PLR0913  torch's six arguments
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> Generator[None]:
        """Context manager in which parameters are unsharded and have the names from before wrapping.

        A forward inside computes with these parameters. In mixed precision each unit that has computed keeps a
        low-precision copy until the end.

        Args:
            module: any module; every FullyShardedDataParallel at and below it is summoned.
            recurse: False summons only `module`.
            writeback: keep writes to this rank's shard. NO_SHARD always keeps them.
            rank0_only: unshard on the group's first rank only. The others have their shards.
            offload_to_cpu: unshard to the CPU.
            with_grads: unshard gradients too. Requires `use_orig_params`.

        Raises:
            NotImplementedError: `writeback` with `rank0_only`; `with_grads` without `use_orig_params` or with
                `offload_to_cpu`; `offload_to_cpu` without sharding.
            AssertionError: called during a forward or backward, or inside another summoning.
        Collectives: an all-gather of each unit; with gradients an all-reduce and another one. All ranks must enter.
        """
        options = FullParamsOptions(writeback, rank0_only, offload_to_cpu, with_grads)
        with contextlib.ExitStack() as stack:
            for wrapper in FullyShardedDataParallel.fsdp_modules(module):
                if recurse or wrapper is module:
                    stack.enter_context(wrapper._summoned(options))
            yield

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Return named buffers, inside `summon_full_params` with the names from before wrapping."""
        return self._without_prefix(super().named_buffers(*args, **kwargs))

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Return named parameters, inside `summon_full_params` with the names from before wrapping.

        First end a failed backward, which has left unsharded parameters in the modules.
        """
        self._end_failed_backward()
        return cast(
            "Iterator[tuple[str, nn.Parameter]]",
            self._without_prefix(super().named_parameters(*args, **kwargs)),
        )

    @contextlib.contextmanager
    def no_sync(self) -> Generator[None]:
        """Context manager in which backwards do not average gradients. The next backward averages all of them together.

        Inside, `.grad` is this rank's own gradient of the unsharded parameters, which needs memory.

        Raises:
            RuntimeError: this is not the outermost FullyShardedDataParallel.
        """
        root = self._find_root()
        if not root.is_root(self._unit):
            raise RuntimeError(
                "`no_sync()` on inner FSDP instances is not supported. Please call `no_sync()` on root FSDP module."
            )
        self._check_idle()
        param_groups = [group for unit in root.units for group in unit.param_groups]
        synced = [group.syncs for group in param_groups]
        for group in param_groups:
            group.syncs = False
        try:
            yield
        finally:
            for group, before in zip(param_groups, synced, strict=True):
                group.syncs = before

    @torch.no_grad()
    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        *,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """Scale the gradients of all parameters in place so that their joint norm is at most `max_norm`.

        Args:
            max_norm: same unit as the gradients.
            norm_type: the order of the norm, which may be inf.
            error_if_nonfinite: raise, on every rank and before anything is changed, if the norm is inf or nan.
            foreach: as in `impl.nn.utils.clip_grad_norm_`.

        Returns:
            The norm before clipping, 0-dim, in the dtype that the gradients promote to.

        Raises:
            RuntimeError: this is not the outermost wrapper; or `error_if_nonfinite` is set and the norm is not finite.
        Sync: none, unless `error_if_nonfinite` or offloading.
        Collectives: one all-gather of one number per rank for each group that parameters are sharded over; all ranks
            must call this.
        Source: torch's 2.13; differences: the last two arguments; the norm neither overflows nor underflows, and is
            taken over the groups that each unit is sharded over. torch uses the root's groups for all units.
        """
        root = self._find_root()
        if not root.is_root(self._unit):
            raise RuntimeError("`clip_grad_norm_()` should only be called on the root FSDP instance")
        self._check_idle()
        if all(
            wrapper._groups.shard is None and not wrapper._groups.parallel
            for wrapper in self.fsdp_modules(self)
        ):
            return clip_grad_norm_(self.parameters(), max_norm, norm_type, error_if_nonfinite, foreach)
        managed = {p for unit in root.units for group in unit.param_groups for p in group.stepped}
        other_params = [p for p in self.parameters() if p not in managed]
        other_grads = [p.grad for p in other_params if p.grad is not None]
        units = cast("list[Unit[FlatParamGroup]]", root.units)
        norm = joint_norm(units, other_grads, float(norm_type), self.compute_device)
        if error_if_nonfinite:
            check_finite(norm, float(norm_type))
        if self.cpu_offload.offload_params:
            norm = norm.cpu()
        with_grads = [p for p in (*managed, *other_params) if p.grad is not None]
        if not with_grads:
            warnings.warn(
                f"Called FSDP.clip_grad_norm_() on rank {self.rank} with no gradients -- returning the total norm in "
                f"the default dtype {torch.float32}",
                stacklevel=2,
            )
        return norm.to(scale_grads(with_grads, float(max_norm), norm, foreach))

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Average gradients by `hook` instead of the default. Call once, on the outermost wrapper.

        Args:
            state: passed to the hook.
            hook: `hook(state, gradient, output)`: the unsharded gradient of a flat parameter, 1-D, and the memory for
                this rank's shard of the average; with NO_SHARD `hook(state, gradient)`, which averages in place.

        Raises:
            AssertionError: this is not the outermost wrapper, there is a hook already, or a strategy is hybrid.
            ValueError: `hook` is not callable.
        """
        if not self.check_is_root():
            raise AssertionError("register_comm_hook can only be called on a root instance.")
        inner = self.fsdp_modules(self)
        for wrapper in inner:
            if wrapper.sharding_strategy in HYBRID:
                raise AssertionError(
                    f"Communication hook is not supported for hybrid strategies: {wrapper.sharding_strategy}"
                )
            if any(group.reduction.comm_hook is not None for group in wrapper._unit.param_groups):
                raise AssertionError("A communication hook is already registered")
            if not callable(hook):
                raise ValueError(f"The communication hook must be callable but got {hook}")
        for group in (group for wrapper in inner for group in wrapper._unit.param_groups):
            group.reduction.comm_hook, group.reduction.comm_hook_state = hook, state

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FullyShardedDataParallel:
        """Move or cast the shards. The parameters follow."""
        unit = self._unit
        self._end_failed_backward()
        if unit.phase is not Phase.IDLE:
            raise RuntimeError(f"the parameters cannot be moved or cast in the middle of {unit.phase.value}")
        unit.reshard()
        with contextlib.ExitStack() as stack:
            for group in unit.param_groups:
                stack.enter_context(group.gradients.on_flat_param())
                stack.enter_context(group.changing_flat_param(fn))
            super()._apply(fn, recurse)
        unit.register_params()
        for wrapper in self.fsdp_modules(self._outermost()):
            wrapper._root = None
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients. First end a failed backward, which has left unsharded parameters in the modules."""
        self._end_failed_backward()
        super().zero_grad(set_to_none)

    # Tandem's own

    def _end_failed_backward(self) -> None:
        if self._root is not None:
            self._root.handle_failed_backward()

    def _check_idle(self) -> None:
        if self.training_state is not TrainingState.IDLE:
            raise ValueError(not_idle(self.training_state))

    def _claim_inner(self) -> None:
        for wrapper in self.fsdp_modules(self):
            if wrapper is not self:
                wrapper._root = None
                if wrapper._outer is None or wrapper._outer() is None:
                    wrapper._outer = weakref.ref(self)

    def _outermost(self) -> FullyShardedDataParallel:
        outer = self._outer() if self._outer is not None else None
        return self if outer is None else outer._outermost()

    def _find_root(self) -> Root:
        if self._root is None:
            outermost = self._outermost()
            wrappers = self.fsdp_modules(outermost)
            root = root_over(wrappers, outermost.compute_device)
            outermost._buffer_casts = Buffers(wrappers, outermost.compute_device)
            for wrapper in wrappers:
                wrapper._root = root
        assert self._root is not None
        return self._root

    @contextlib.contextmanager
    def _summoned(self, options: FullParamsOptions) -> Generator[None]:
        check(options, self._use_orig_params, self._groups.shard is not None or not self._unit.param_groups)
        self._find_root().handle_failed_backward()
        with summoned(self._unit, options, self.rank == 0):
            yield

    def _without_prefix(self, named: Iterator[tuple[str, object]]) -> Iterator[tuple[str, Any]]:
        if self._unit.phase not in SUMMONED:
            return named
        return ((name.replace(_PREFIX, ""), value) for name, value in named)
