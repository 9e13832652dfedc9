"""What fully_shard keeps of the modules of one call: their unit, and the hooks that run it."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from impl.distributed.fsdp._engine.phase import BACKWARDS, FORWARDS, Phase
from impl.distributed.fsdp._engine.root import Root, StepSettings
from impl.distributed.fsdp._engine.streams import Streams
from impl.distributed.fsdp._engine.unit import Unit
from impl.distributed.fsdp._fully_shard.finalization import PendingReduction, check_settings, check_waited
from impl.distributed.fsdp._layout.per_param import DTensorGroup
from impl.distributed.fsdp._layout.sharded_param import ShardedParam
from impl.distributed.fsdp._params.nested import cast_floats, map_tensors, tensors_in
from impl.distributed.fsdp._params.param_registration import ParamLocation
from impl.distributed.fsdp._params.policies import MixedPrecisionPolicy
from impl.kernels import dynamo_disable

_STATE = "_tandem_fsdp_state"  # where a module keeps it


@dataclass
class CommContext:
    """Streams that roots may share, and the one finalization that they may have to wait for."""

    streams: Streams | None = None
    reduction: PendingReduction | None = None


@dataclass(frozen=True)
class _StatesToReduce:
    """What torch's pipeline stages reduce by themselves: nothing, since ours reduces at the end of the backward."""

    all_states: tuple[()] = ()


class ModuleState:
    """One unit, of one module or of several that are gathered together; found on each of them."""

    _state_ctx = _StatesToReduce()  # torch's name

    def __init__(
        self,
        modules: Sequence[nn.Module],
        unit: Unit[DTensorGroup],
        policy: MixedPrecisionPolicy,
        device: torch.device,
    ) -> None:
        self.modules: tuple[nn.Module, ...] = tuple(modules)
        self.unit = unit
        self.policy = policy
        self.device = device
        self.comm = CommContext()
        self.is_root: bool | None = None  # None until the first forward of the root
        self.lenders: list[ModuleState] = []  # of the unit's
        self.has_root = False  # one of its own, until the first forward
        self.settings = StepSettings()  # the root's, from the first forward on
        self._yet_to_run: set[nn.Module] = set()  # of several, in this forward
        # Only the root's state has one, after its first forward.
        self.own_root: Root | None = None
        self._inner: Sequence[ModuleState] = ()  # of the root
        for module in modules:
            vars(module)[_STATE] = self
            module.register_forward_pre_hook(self.before_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(self.after_forward)
        params = [param for group in unit.param_groups for param in group.params]
        for param in params:
            param.unit_state = weakref.ref(self)
        self._watch({place.module for param in params for place in param.info.locations})

    def _watch(self, owners: Iterable[nn.Module]) -> None:
        """Modules that have the unit's parameters show the shards where they are saved or loaded."""
        for owner in owners:
            owner.register_state_dict_pre_hook(self._before_save)
            owner.register_load_state_dict_pre_hook(self._before_load)

    def lend(self, param: ShardedParam, locations: tuple[ParamLocation, ...], borrower: ModuleState) -> None:
        """Have the modules of another unit, which had the same parameter, see it too."""
        self.reshard()
        self.group_of(param).register_at(param, locations)
        self._watch({place.module for place in locations})
        borrower.unit.borrow_from(self.unit)
        if self not in borrower.lenders:
            borrower.lenders.append(self)

    def group_of(self, param: ShardedParam) -> DTensorGroup:
        return next(group for group in self.groups if param in group.params)

    @property
    def outermost(self) -> nn.Module:
        return self.modules[0]

    @property
    def groups(self) -> list[DTensorGroup]:
        return self.unit.param_groups

    def _before_save(self, *_: Any, **__: Any) -> None:
        self.reshard()

    def _before_load(
        self, owner: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any
    ) -> None:
        self.reshard()
        assigned = metadata.get("assign_to_params_buffers", False)
        for group in self.groups:
            group.record_load(owner, state_dict, prefix, assigned=assigned)

    def reshard(self) -> None:
        """The modules see the shards. What was gathered ahead and does not show yet stays for who will use it."""
        unit = self.unit
        if unit.is_unsharded:
            if any(group.is_shown for group in self.groups):
                unit.reshard()
            else:
                unit.wait_for_gather()
            unit.root.let_host_write()
        for group in self.groups:
            group.discard_post_forward_shards()

    def reshard_by_hand(self) -> None:
        """With what it has borrowed, as far as nothing computes with that."""
        for state in (self, *self.lenders):
            if state is self or (state.unit.phase is Phase.IDLE and not state.unit.is_lent()):
                state.reshard()

    def gather_ahead(self) -> None:
        """With what it borrows."""
        for state in (self, *self.lenders):
            state.ensure_shared()
            state.unit.gather_ahead()
            options = [group.options for group in state.groups]
            state.unit.is_kept_by_user = all(option.reshards_after_forward is False for option in options)

    def show_unsharded(self) -> None:
        """The modules see what a user has had gathered."""
        if self.unit.is_unsharded:
            self.unit.unshard()
            self.unit.root.let_host_write()

    # the root

    def ensure_shared(self) -> None:
        """Something to unshard by, before the first forward has told which unit is outermost."""
        if not self.has_root:
            self._check_groups()
            self.has_root = True
            Root(self.unit, [self.unit], self.device, False, self.settings)

    def find_root(self) -> None:
        """The module whose forward comes first is outermost.

        Raises:
            RuntimeError: it is one of several of its unit, a forward inside of it has come before, or backwards are to
                be finalized by a module inside of it.
            ValueError: a parameter is one of a unit's elsewhere.
        """
        if self.is_root is not None:
            return
        if len(self.modules) > 1:
            raise RuntimeError(f"FSDP requires a single root module but got {self.modules}")
        inner = [state_of(module) for module in self.outermost.modules() if module not in self.modules]
        check_settings([state.settings for state in inner if state is not None])
        found: dict[ModuleState, str] = {}
        for name, module in self.outermost.named_modules():
            state = state_of(module)
            if state is None or state in found:
                continue
            if state is not self and state.is_root is not None:
                raise RuntimeError(
                    f"FSDP state has already been lazily initialized for {name}\n"
                    "FSDP requires running forward through the root module first"
                )
            found[state] = name
        names = {id(p): name for name, p in self.outermost.named_parameters()}
        for state, name in found.items():
            state.unit.name = name or state.unit.name
            for group in state.groups:
                _name_parameters(group, names)
        units = [state.unit for state in found]
        for unit in units:
            _refuse_lenders_elsewhere(unit, units)
        for state in found:
            state._check_groups()
        earlier = [state.unit.root.streams for state in found if state.has_root]
        for state in found:  # none of them has a root until nothing is refused any more
            state.is_root = state is self
            state.has_root = True
            state.settings = self.settings
            state.comm = self.comm
        self.own_root = root = Root(self.unit, units, self.device, False, self.settings)
        if self.comm.streams is None:
            self.comm.streams = root.streams
        root.use_streams(self.comm.streams)
        root.gather_behind(earlier)
        self._inner = [state for state in found if state is not self]

    def _check_groups(self) -> None:
        for group in self.groups:
            group.write_back_changes()
            group.pin()
            group.check_device(self.device)
            group.check_dtypes()
        self.unit.register_params()

    # hooks

    @dynamo_disable
    def before_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Unshard, once for all of the unit's modules, and cast the inputs."""
        check_waited(self.comm)
        unit = self.unit
        if unit.phase in BACKWARDS:  # recomputed for it
            args, kwargs = self._cast_inputs(args, kwargs)
            return unit.before_forward(args, kwargs)
        self.find_root()
        if len(self.modules) > 1:
            if self._yet_to_run:
                return self._cast_inputs(args, kwargs)
            # Behind the root's forward it is called for itself, as for a loss that is computed in chunks.
            self._yet_to_run = set(self.modules) if unit.root.is_in_forward() else {module}
        if self.device.type != "cpu" and unit.root.is_root(unit) and unit.phase not in FORWARDS:
            args, kwargs = (map_tensors(each, self._moved) for each in (args, kwargs))
        args, kwargs = self._cast_inputs(args, kwargs)
        return unit.before_forward(args, kwargs)

    @dynamo_disable
    def after_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Reshard, once the last of the unit's modules has run, and cast the outputs."""
        if len(self.modules) > 1 and self.unit.phase not in BACKWARDS:
            if module not in self._yet_to_run:
                return self._cast_outputs(output)
            self._yet_to_run.remove(module)
            if self._yet_to_run:
                return self._cast_outputs(output)
        output = self._end_forward(output)
        if self.own_root is not None and self.unit.phase not in BACKWARDS:
            for state in reversed(self._inner):
                if state._yet_to_run:  # some of its modules do not run in this forward
                    state._yet_to_run.clear()
                    output = state._cast_outputs(state._end_forward(output))
        return self._cast_outputs(output)

    def abandon_forward(self) -> None:
        """The forward raised: as if it had not been called."""
        self._yet_to_run.clear()
        self.unit.abandon_forward()

    def _end_forward(self, output: Any) -> Any:
        if torch.is_grad_enabled() and self.unit.phase not in BACKWARDS:
            self._warn_of_views(output)
        return self.unit.after_forward(output)

    def _warn_of_views(self, output: Any) -> None:
        names = ", ".join(type(module).__name__ for module in self.modules)
        for tensor in tensors_in(output):
            if tensor.requires_grad and tensor._base is not None:
                warnings.warn(
                    f"FSDP2-wrapped module ({names}) returned a view tensor. "
                    "An in-place op on this view (e.g., `x += y`) will silently "
                    "drop the pre-backward hook and skip the all-gather, which "
                    "can cause backward to fail or produce wrong gradients. "
                    "Use out-of-place ops (`out = out + y`, not `out += y`) or "
                    "`.clone()` the output before any in-place op.",
                    UserWarning,
                    stacklevel=2,
                )

    def _moved(self, tensor: Tensor) -> Tensor:
        return tensor if tensor.device == self.device else tensor.to(self.device)

    def _cast_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        dtype = self.policy.param_dtype
        if dtype is None or not self.policy.cast_forward_inputs:
            return args, kwargs
        return cast_floats(args, dtype), cast_floats(kwargs, dtype)

    def _cast_outputs(self, output: Any) -> Any:
        dtype = self.policy.output_dtype
        return output if dtype is None else cast_floats(output, dtype)

    # what a user calls

    def reset(self) -> None:
        """
        Raises:
            RuntimeError: it is not the root's, or another root's finalization was not waited for.
        """
        if self.is_root is False:
            raise RuntimeError("reset_iter_state must be called on the root FSDP module")
        if self.comm.reduction is not None and self.comm.reduction.root is not self.own_root:
            raise RuntimeError(
                "reset_iter_state cannot reset a gradient reduction owned by another FSDP root sharing the "
                "communication context"
            )
        self.comm.reduction = None
        if self.own_root is None:
            return
        for state in (self, *self._inner):
            state._yet_to_run.clear()
            state.unit.abandon_forward()
            state.unit.abandon_backward()
            state.reshard()
            for group in state.groups:
                group.gradients.forget()
        self.own_root.reset()

    def _root_post_backward_final_callback(self) -> None:
        """Torch's name: its pipeline stages have the root reduce what their microbatches have added up."""
        if self.own_root is not None:
            self.own_root.end_backward()


def state_of(module: nn.Module) -> ModuleState | None:
    """What the call that has sharded a module keeps of it; None if none has.

    >>> state_of(nn.Linear(2, 2))
    """
    return module.__dict__.get(_STATE)


def lender_of(param: ShardedParam) -> ModuleState:
    found = None if param.unit_state is None else param.unit_state()
    assert found is not None
    return found


def _name_parameters(group: DTensorGroup, names: dict[int, str]) -> None:
    for param in group.params:
        param.name = names.get(id(param.sharded), param.name)
    group.names = [param.name for param in group.params]


def _refuse_lenders_elsewhere(unit: Unit[DTensorGroup], units: Sequence[Unit[Any]]) -> None:
    for lender in unit.lenders:
        if lender not in units:
            raise ValueError(
                f"{unit.name} has parameters that {lender.name} has sharded, which is in another model; use "
                "fully_shard([module_a, module_b]) to place them in the same FSDP group, or shard a module that "
                "contains both"
            )
