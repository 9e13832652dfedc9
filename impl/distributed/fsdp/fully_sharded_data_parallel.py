"""`FullyShardedDataParallel`: the surface. What it does stands in `_unit.py`, `_root.py` and what they are made of."""

from __future__ import annotations

import contextlib
import os
import warnings
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from impl.distributed.fsdp._clip import joint_norm, scale
from impl.distributed.fsdp._contained import watch_contained
from impl.distributed.fsdp._flat_layout import aligned_elements, layout_of
from impl.distributed.fsdp._flat_param import Flat, FlatParameter, Owned, dense_stride
from impl.distributed.fsdp._groups import HYBRID, Groups, frees_after_forward, groups_for
from impl.distributed.fsdp._managed import clean_name, ignored_by, mark_managed, owned_by
from impl.distributed.fsdp._nested import replaced
from impl.distributed.fsdp._placement import broadcast_states, device_type_for, place
from impl.distributed.fsdp._root import Root
from impl.distributed.fsdp._summon import Summoning, check, summoned
from impl.distributed.fsdp._unit import Phase, Plan, Unit, cast_floats
from impl.distributed.fsdp.api import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from impl.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy, auto_wrap
from impl.nn.utils.clip_grad import clip_grad_norm_

__all__ = ["FullyShardedDataParallel"]

_FLAT_PARAM = "_flat_param"
_PREFIX = "_fsdp_wrapped_module."
_FULL_PRECISION_IN_EVAL = "FSDP_USE_FULL_PREC_IN_EVAL"
_ProcessGroups = dist.ProcessGroup | tuple[dist.ProcessGroup, dist.ProcessGroup] | None


class FullyShardedDataParallel(nn.Module):
    def __init__(  # noqa: PLR0913, PLR0917  torch's sixteen
        self,
        module: nn.Module,
        process_group: _ProcessGroups = None,
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
        self._ignored = ignored_by(module, ignored_modules, ignored_states, FullyShardedDataParallel)
        device_type = device_type_for(module, self._ignored, device_id)
        groups = groups_for(
            process_group, sharding_strategy, auto_wrap_policy is not None, device_mesh, device_type
        )
        if auto_wrap_policy is not None:
            in_groups = groups if sharding_strategy in HYBRID and device_mesh is None else process_group
            auto_wrap(
                module,
                auto_wrap_policy,
                ignored_modules=set(self._ignored.modules),
                ignored_params=set(self._ignored.parameters),
                wrapper_cls=FullyShardedDataParallel,
                wrapper_kwargs={
                    "process_group": in_groups,
                    "sharding_strategy": sharding_strategy,
                    "cpu_offload": cpu_offload,
                    "backward_prefetch": backward_prefetch,
                    "mixed_precision": mixed_precision,
                    "param_init_fn": param_init_fn,
                    "device_id": device_id,
                    "sync_module_states": sync_module_states,
                    "forward_prefetch": forward_prefetch,
                    "limit_all_gathers": limit_all_gathers,
                    "use_orig_params": use_orig_params,
                    "ignored_states": self._ignored.parameters,
                    "device_mesh": device_mesh,
                },
            )
        self.process_group, self._inter_node_pg = groups
        self.rank = self.process_group.rank()
        self.world_size = self.process_group.size()
        self.sharding_strategy = _effective(sharding_strategy, self.world_size)
        self.mixed_precision = mixed_precision or MixedPrecision()
        self.cpu_offload = cpu_offload or CPUOffload()
        self.backward_prefetch = backward_prefetch
        self.forward_prefetch = forward_prefetch
        self.limit_all_gathers = limit_all_gathers
        self._use_orig_params = use_orig_params
        self._use_full_prec_in_eval = os.environ.get(_FULL_PRECISION_IN_EVAL, "") == "1"
        self.compute_device = place(
            module,
            self._ignored,
            device_id,
            device_type,
            param_init_fn,
            self.rank,
            FullyShardedDataParallel,
        )
        owned = owned_by(module, self._ignored, _left_to_ancestor)
        self._groups = self._own_groups()
        if sync_module_states:
            outward_in = (
                (self._inter_node_pg, self.process_group) if self._inter_node_pg else (self.process_group,)
            )
            broadcast_states(module, [one.parameter for one in owned], outward_in)
        self._buffer_dtypes = {clean_name(name): buffer.dtype for name, buffer in module.named_buffers()}
        self._unit = Unit(module, self._flats(owned), self._groups, self._plan())
        mark_managed(owned)
        self._fsdp_wrapped_module = module
        for index, flat in enumerate(self._unit.flats):
            flat.register_as(self.module, f"{_FLAT_PARAM}_{index}" if index else _FLAT_PARAM)
        self._root: Root | None = None
        self._outer: weakref.ref[FullyShardedDataParallel] | None = None
        self._claim_inner()
        me = weakref.ref(self)
        self._entries = watch_contained(self._unit, lambda: _rooted(me()))

    @property
    def module(self) -> nn.Module:
        """The wrapped module, inside an activation checkpoint's wrapper too."""
        inner = self._fsdp_wrapped_module
        return getattr(inner, "_checkpoint_wrapped_module", inner)

    def __getattr__(self, name: str) -> Any:
        """What is not found here is looked for in the wrapped module."""
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

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module's forward with its parameters whole."""
        unit = self._unit
        root = self._root or self._find_root()
        if root.is_root(unit) and unit.phase is Phase.IDLE:
            args, kwargs = self._begin_iteration(root, args, kwargs)
        args, kwargs = unit.before_forward(args, kwargs)
        try:
            output = self._fsdp_wrapped_module(*args, **kwargs)
        except BaseException:
            unit.abandon_forward()
            raise
        unit.after_forward(output)
        return output

    def check_is_root(self) -> bool:
        """Whether no other FullyShardedDataParallel is around this one."""
        return self._find_root().is_root(self._unit)

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FullyShardedDataParallel]:
        """All FullyShardedDataParallel below and at `module`; the outermost ones alone with `root_only`."""
        found = [one for one in module.modules() if isinstance(one, FullyShardedDataParallel)]
        return [one for one in found if one.check_is_root()] if root_only else found

    def apply(self, fn: Callable[[nn.Module], None]) -> FullyShardedDataParallel:
        """Apply `fn` to every submodule and self, each with whole parameters; what it writes is kept."""
        if self._unit.phase is not Phase.IDLE:
            raise ValueError(f"expected to be in states idle but current state is {self._unit.phase.value}")
        with self._summoned(
            Summoning(writeback=True, rank0_only=False, offload_to_cpu=False, with_grads=False)
        ):
            return super().apply(fn)

    @staticmethod
    @contextlib.contextmanager
    def summon_full_params(  # noqa: PLR0913  torch's six
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> Generator[None]:
        """Inside, parameters are whole: to be read, and with `writeback` to be written."""
        wanted = Summoning(writeback, rank0_only, offload_to_cpu, with_grads)
        if recurse:
            found = FullyShardedDataParallel.fsdp_modules(module)
        else:
            found = [module] if isinstance(module, FullyShardedDataParallel) else []
        with contextlib.ExitStack() as stack:
            for one in found:
                stack.enter_context(one._summoned(wanted))
            yield

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """As of any module; inside `summon_full_params` under the names they had before wrapping."""
        return self._cleaned(super().named_buffers(*args, **kwargs))

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As of any module; inside `summon_full_params` under the names they had before wrapping."""
        return cast(
            "Iterator[tuple[str, nn.Parameter]]", self._cleaned(super().named_parameters(*args, **kwargs))
        )

    @contextlib.contextmanager
    def no_sync(self) -> Generator[None]:
        """Backwards inside do not average gradients; the first one after it averages all that came together."""
        root = self._find_root()
        if not root.is_root(self._unit):
            raise RuntimeError(
                "`no_sync()` on inner FSDP instances is not supported. Please call `no_sync()` on root FSDP module."
            )
        synced, root.syncs = root.syncs, False
        try:
            yield
        finally:
            root.syncs = synced

    @torch.no_grad()
    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        *,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """Scale the gradients of all parameters in place so that their joint norm is at most `max_norm`."""
        root = self._find_root()
        if not root.is_root(self._unit):
            raise RuntimeError("`clip_grad_norm_()` should only be called on the root FSDP instance")
        if all(unit.groups.shard is None for unit in root.units):
            return clip_grad_norm_(self.parameters(), max_norm, norm_type, error_if_nonfinite, foreach)
        max_norm, norm_type = float(max_norm), float(norm_type)
        managed = {p for unit in root.units for flat in unit.flats for p in flat.stepped}
        others = [p for p in self.parameters() if p not in managed]
        loose = [p.grad for p in others if p.grad is not None]
        norm = joint_norm(root.units, loose, norm_type, self.compute_device)
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(
                f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be "
                "clipped. To disable this error and scale the gradients by the non-finite norm anyway, set "
                "`error_if_nonfinite=False`"
            )
        if self.cpu_offload.offload_params:
            norm = norm.cpu()
        with_grads = [p for p in (*managed, *others) if p.grad is not None]
        if not with_grads:
            warnings.warn(
                f"Called FSDP.clip_grad_norm_() on rank {self.rank} with no gradients -- returning the total norm in "
                f"the default dtype {torch.float32}",
                stacklevel=2,
            )
        return norm.to(scale(with_grads, max_norm, norm, foreach))

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Have `hook` average gradients in place of the default."""
        if not self.check_is_root():
            raise AssertionError("register_comm_hook can only be called on a root instance.")
        inner = self.fsdp_modules(self)
        for one in inner:
            if one.sharding_strategy in HYBRID:
                raise AssertionError(
                    f"Communication hook is not supported for hybrid strategies: {one.sharding_strategy}"
                )
            if one._unit.reduction.hook is not None:
                raise AssertionError("A communication hook is already registered")
            if not callable(hook):
                raise ValueError(f"The communication hook must be callable but got {hook}")
        for one in inner:
            one._unit.reduction.hook = hook
            one._unit.reduction.hook_state = state

    # Names that are private in torch and used elsewhere.

    @property
    def _is_root(self) -> bool | None:
        return None if self._root is None else self._root.is_root(self._unit)

    @property
    def _handle(self) -> Flat | None:
        return self._unit.flats[0] if self._unit.flats else None

    @property
    def _has_params(self) -> bool:
        return bool(self._unit.flats)

    @property
    def _flat_param(self) -> FlatParameter | None:
        return self._unit.flats[0].flat_param if self._unit.flats else None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FullyShardedDataParallel:
        """Move or cast: on the shards, which the parameters follow."""
        unit = self._unit
        if unit.phase is not Phase.IDLE:
            raise RuntimeError(f"the parameters cannot be moved or cast in the middle of {unit.phase.value}")
        unit.release()
        with contextlib.ExitStack() as stack:
            for flat, gradients in zip(unit.flats, unit.gradients, strict=True):
                stack.enter_context(gradients.on_flat_param())
                stack.enter_context(flat.being_changed())
            super()._apply(fn, recurse)
        self.compute_device = next(
            (flat.device for flat in unit.flats if not flat.offloads), self.compute_device
        )
        for one in self.fsdp_modules(self._outermost()):
            one._root = None
        return self

    # Ours

    def _own_groups(self) -> Groups:
        group = self.process_group if self.process_group.size() > 1 else None
        between = self._inter_node_pg
        if between is not None:
            return Groups(group, between if between.size() > 1 else None)
        if self.sharding_strategy is ShardingStrategy.NO_SHARD:
            return Groups(None, group)
        return Groups(group, None)

    def _plan(self) -> Plan:
        return Plan(
            frees_after_forward=frees_after_forward(self.sharding_strategy),
            mixed_precision=self.mixed_precision,
            backward_prefetch=self.backward_prefetch,
            forward_prefetch=self.forward_prefetch,
            full_precision_in_eval=self._use_full_prec_in_eval,
        )

    def _flats(self, owned: list[Owned]) -> list[Flat]:
        """One for each dtype, and what is frozen apart: nothing is kept ready for gradients it never has."""
        kinds: dict[tuple[torch.dtype, bool], list[Owned]] = {}
        for one in owned:
            kinds.setdefault((one.parameter.dtype, one.parameter.requires_grad), []).append(one)
        mixed = self.mixed_precision
        flats: list[Flat] = []
        for (dtype, _), same in kinds.items():
            alignment = (
                aligned_elements((mixed.param_dtype or dtype).itemsize) if self._use_orig_params else 1
            )
            shapes = [(one.name, one.parameter.shape, dense_stride(one.parameter)) for one in same]
            flats.append(
                Flat(
                    same,
                    layout_of(shapes, self._groups.shard_size, alignment),
                    self._groups.shard_rank,
                    compute_dtype=mixed.param_dtype,
                    reduce_dtype=mixed.reduce_dtype,
                    device=self.compute_device,
                    offloads=self.cpu_offload.offload_params,
                    use_orig_params=self._use_orig_params,
                )
            )
        return flats

    def _claim_inner(self) -> None:
        for one in self.fsdp_modules(self):
            if one is not self:
                one._root = None
                if one._outer is None or one._outer() is None:
                    one._outer = weakref.ref(self)

    def _outermost(self) -> FullyShardedDataParallel:
        outer = self._outer() if self._outer is not None else None
        return self if outer is None else outer._outermost()

    def _find_root(self) -> Root:
        if self._root is None:
            outermost = self._outermost()
            found = self.fsdp_modules(outermost)
            _check_alike(found)
            for one in found:
                one._check_device()
            root = Root(
                outermost._unit,
                [one._unit for one in found],
                outermost.compute_device,
                self.limit_all_gathers,
            )
            names = {one: clean_name(f"{name}.").rstrip(".") for name, one in outermost.named_modules()}
            for one in found:
                one._root = root
                one._unit.name = names[one] or type(one.module).__name__
            outermost._cast_buffers(found)
        assert self._root is not None
        return self._root

    def _check_device(self) -> None:
        for flat in self._unit.flats:
            device = flat.flat_param.device
            if not flat.offloads and device != self.compute_device:
                raise RuntimeError(
                    f"An FSDP-managed module unexpectedly has parameters on {device}. Make sure to move the module to "
                    f"{self.compute_device} before training."
                )
            if flat.offloads and device.type != "cpu":
                raise RuntimeError(
                    "An FSDP-managed module with parameter CPU offloading enabled has parameters on "
                    f"{device}. Make sure to not move the module from CPU when offloading parameters."
                )

    def _cast_buffers(self, found: list[FullyShardedDataParallel]) -> None:
        """Each buffer as the innermost wrapper around it wants it."""
        seen: set[Tensor] = set()
        for one in reversed(found):
            dtype = one.mixed_precision.buffer_dtype
            for name, buffer in one.named_buffers():
                if buffer in seen:
                    continue
                seen.add(buffer)
                if clean_name(name) not in one._ignored.buffer_names:
                    casts = dtype is not None and buffer.is_floating_point()
                    buffer.data = buffer.to(self.compute_device, dtype if casts else None)

    def _begin_iteration(
        self, root: Root, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        root.begin_iteration()
        device = self.compute_device

        def moved(tensor: Tensor) -> Tensor:
            return tensor if tensor.device == device else tensor.to(device)

        args, kwargs = replaced(args, moved), replaced(kwargs, moved)
        mixed = self.mixed_precision
        casts = mixed.cast_root_forward_inputs and (self.module.training or not self._use_full_prec_in_eval)
        if mixed.param_dtype is not None and casts:
            args, kwargs = cast_floats(args, mixed.param_dtype), cast_floats(kwargs, mixed.param_dtype)
        return args, kwargs

    @contextlib.contextmanager
    def _summoned(self, wanted: Summoning) -> Generator[None]:
        check(wanted, self._use_orig_params, self._groups.shard is not None or not self._unit.flats)
        self._find_root()
        with summoned(self._unit, wanted, self.rank == 0):
            yield

    def _cleaned(self, named: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        if self._unit.phase is not Phase.SUMMONED:
            return named
        return ((name.replace(_PREFIX, ""), value) for name, value in named)


def _rooted(wrapper: FullyShardedDataParallel | None) -> None:
    if wrapper is not None:
        wrapper._find_root()


def _effective(strategy: ShardingStrategy | None, world_size: int) -> ShardingStrategy:
    if world_size == 1:
        if strategy is not ShardingStrategy.NO_SHARD:
            warnings.warn(
                f"FSDP is switching to use `NO_SHARD` instead of {strategy or ShardingStrategy.FULL_SHARD} since the "
                "world size is 1.",
                stacklevel=3,
            )
        return ShardingStrategy.NO_SHARD
    if strategy is ShardingStrategy.NO_SHARD:
        warnings.warn(
            "The `NO_SHARD` sharding strategy is deprecated. If having issues, please use `DistributedDataParallel` "
            "instead.",
            FutureWarning,
            stacklevel=3,
        )
    return strategy or ShardingStrategy.FULL_SHARD


def _check_alike(wrappers: list[FullyShardedDataParallel]) -> None:
    for name in ("_use_orig_params", "limit_all_gathers", "_use_full_prec_in_eval"):
        values = {getattr(one, name) for one in wrappers}
        if len(values) != 1:
            raise ValueError(f"Expects one homogeneous value for {name} but got {values}")
