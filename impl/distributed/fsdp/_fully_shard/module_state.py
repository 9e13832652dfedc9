"""State of the modules of one fully_shard call: their unit, and the hooks that run it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from impl._names import describe_names
from impl.distributed.fsdp._engine.interfaces import StepSettings
from impl.distributed.fsdp._engine.phase import BACKWARDS, FORWARDS, Phase
from impl.distributed.fsdp._engine.root import Root
from impl.distributed.fsdp._engine.unit import Unit
from impl.distributed.fsdp._fully_shard.reduction_handle import CommContext
from impl.distributed.fsdp._layout.per_param import DTensorGroup
from impl.distributed.fsdp._layout.sharded_param import ShardedParam
from impl.distributed.fsdp._params.nested import (
    Inputs,
    alias_leaves,
    cast_floats,
    cast_inputs,
    move_inputs,
    tensors_in,
)
from impl.distributed.fsdp._params.param_registration import ParamLocation
from impl.distributed.fsdp._params.policies import MixedPrecisionPolicy
from impl.distributed.fsdp._params.user_warnings import warn_user
from impl.kernels import dynamo_disable

_STATE = "_tandem_fsdp_state"  # attribute of a module
MIXED_TENSORS = "mixed torch.Tensor and DTensor"  # text in errors of DTensors
ONLY_ROOT_FINALIZES = "set_manual_backward_finalization must be called on the root FSDP module"
_LOAD_UNSHARDED = (
    "The state dict has unsharded tensors for sharded parameters. Load them by "
    "torch.distributed.checkpoint.state_dict.set_model_state_dict(model, state_dict, "
    "options=StateDictOptions(full_state_dict=True)), with broadcast_from_rank0=True if only rank 0 has them."
)
_WAS_UNSHARDED = (
    " The model was unsharded when the load began. First call reshard() of each of its sharded modules."
)


@dataclass(frozen=True)
class _StatesToReduce:
    """States that torch's pipeline stages reduce themselves: none, because ours reduce at the end of the backward."""

    all_states: tuple[()] = ()


class ModuleState:
    """State of one unit of one or several modules that are gathered together. Each of the modules has a reference."""

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
        self.param_owners: list[ModuleState] = []  # states of `unit.param_owners`
        self.settings = StepSettings()  # the root's, from the first forward on
        self._pending_modules: set[nn.Module] = set()  # modules left in a forward, for units of several
        # Only the root's state has one, after its first forward.
        self.own_root: Root | None = None
        # The states of the model, from the first forward on.
        self._state_refs: Sequence[weakref.ref[ModuleState]] = ()
        # Prefix and error texts of the last load of each module with parameters of the unit.
        self._loads: dict[nn.Module, tuple[str, list[str]]] = {}
        # Error texts of the last load that found the unit unsharded.
        self._errors_of_unsharded: list[str] | None = None
        for module in modules:
            vars(module)[_STATE] = self
            module.register_forward_pre_hook(self.before_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(self.after_forward)
        params = [param for group in unit.param_groups for param in group.params]
        for param in params:
            param.unit_state = weakref.ref(self)
        self._hook_state_dicts({place.module for param in params for place in param.info.locations})

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleState:
        """Return this state. A copy of a plain module inside a unit has the hooks of the module, which refer to it."""
        return self

    def share_with(
        self, param: ShardedParam, locations: tuple[ParamLocation, ...], sharer: ModuleState
    ) -> None:
        """Share a parameter with the modules of another unit, which had the same parameter.

        Locations in a module that is part of both units are registered already.
        """
        locations = tuple(place for place in locations if place not in param.info.locations)
        self.reshard()
        self.group_of(param).register_at(param, locations)
        self._hook_state_dicts({place.module for place in locations})
        sharer.unit.share_params_of(self.unit)
        if self not in sharer.param_owners:
            sharer.param_owners.append(self)

    def group_of(self, param: ShardedParam) -> DTensorGroup:
        return next(group for group in self.param_groups if param in group.params)

    @property
    def is_root(self) -> bool | None:
        """Whether this is the root's state. None until the first forward of the root."""
        return self.own_root is not None if self._state_refs else None

    @property
    def _states(self) -> list[ModuleState]:
        """States of the model, the root's first. A part of it that the user keeps does not keep the rest alive."""
        return [state for ref in self._state_refs if (state := ref()) is not None]

    @property
    def param_groups(self) -> Sequence[DTensorGroup]:
        return self.unit.param_groups

    # Root

    def ensure_root(self) -> None:
        """Create a root for this unit only, if the first forward has not shown yet which unit is outermost."""
        if self.unit.root_or_none is None:
            self._check_groups()
            Root(self.unit, [self.unit], self.device, False, self.settings)

    def find_root(self) -> None:
        """Create the root, because the module whose forward comes first is the outermost one.

        Raises:
            RuntimeError: the outermost module is one of several of its unit, an inner module has run a forward before,
                or an inner module finalizes backwards.
            ValueError: a parameter belongs to a unit of another model.
        """
        if self.is_root is not None:
            return
        if len(self.modules) != 1:
            raise RuntimeError(f"FSDP requires a single root module but got {self.modules}")
        (outermost,) = self.modules
        module_names = {module: name for name, module in outermost.named_modules()}
        states: dict[ModuleState, str] = {}
        for module, name in module_names.items():
            if (state := state_of(module)) is not None:
                states.setdefault(state, name)
        self._check_inner({state: name for state, name in states.items() if state is not self})
        names = {id(p): name for name, p in outermost.named_parameters()}
        for state, name in states.items():
            state.unit.name = name or state.unit.name
            for group in state.param_groups:
                _name_parameters(group, names, module_names)
        units = [state.unit for state in states]
        for unit in units:
            _check_owners_in_model(unit, units)
        for state in states:
            state._check_groups()
        earlier = [state.unit.root.streams for state in states if state.unit.root_or_none is not None]
        state_refs = [weakref.ref(state) for state in states]
        # No state has a root until nothing can raise any more.
        for state in states:
            state.settings = self.settings
            state.comm = self.comm
            state._state_refs = state_refs
        self.own_root = root = Root(self.unit, units, self.device, False, self.settings)
        if self.comm.streams is None:
            self.comm.streams = root.streams
        root.use_streams(self.comm.streams)
        root.wait_for_earlier_gathers(earlier)

    @staticmethod
    def _check_inner(states: Mapping[ModuleState, str]) -> None:
        if any(state.settings.is_finalized_by_user for state in states):
            raise RuntimeError(ONLY_ROOT_FINALIZES)
        for state, name in states.items():
            if state.is_root is not None:
                raise RuntimeError(
                    f"FSDP state has already been lazily initialized for {name}\n"
                    "FSDP requires running forward through the root module first"
                )

    def _check_groups(self) -> None:
        for group in self.param_groups:
            group.write_back_changes()
            group.pin()
            group.check_device(self.device)
            group.check_dtypes()
        self.unit.register_params()

    # Forward

    @dynamo_disable
    def before_forward(
        self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> Inputs:
        """Unshard once for all of the unit's modules, and cast the inputs."""
        self.comm.check_waited()
        unit = self.unit
        if unit.root_or_none is not None:
            unit.root_or_none.handle_failed_backward()
        self.find_root()
        if self.device.type != "cpu" and unit.root.is_root(unit) and unit.phase not in FORWARDS:
            args, kwargs = move_inputs(args, kwargs, self.device)
        if unit.phase in BACKWARDS:  # recomputed for backward
            args, kwargs = self._cast_inputs(args, kwargs)
            return unit.before_forward(args, kwargs)
        if len(self.modules) > 1:
            if unit.phase in FORWARDS:
                return self._cast_inputs(args, kwargs)
            # After the root's forward a module may be called on its own, for example for a loss that is computed in
            # chunks.
            self._pending_modules = set(self.modules) if unit.root.is_in_forward() else {module}
        args, kwargs = self._cast_inputs(args, kwargs)
        # Zeros are reduced as soon as all inputs have their gradients.
        if torch.is_grad_enabled() and any(group.options.reduces_unused for group in self.param_groups):
            args, kwargs = alias_leaves(args, kwargs)
        return unit.before_forward(args, kwargs)

    @dynamo_disable
    def after_forward(self, module: nn.Module, args: object, output: object) -> Any:
        """Reshard after the last of the unit's modules, and cast the outputs."""
        unit = self.unit
        if len(self.modules) > 1 and unit.phase not in BACKWARDS:
            self._pending_modules.discard(module)
            if self._pending_modules or unit.phase not in FORWARDS:
                return self._cast_outputs(output)
        is_outermost = unit.root.is_outermost_forward(unit)
        output = self._end_forward(output)
        if is_outermost and unit.phase not in FORWARDS:
            for state in reversed(self._states):
                if state.unit.phase in FORWARDS:  # not all modules run in this forward
                    output = state._cast_outputs(state._end_forward(output))
        return self._cast_outputs(output)

    def _end_forward(self, output: object) -> Any:
        if torch.is_grad_enabled() and self.unit.phase not in BACKWARDS:
            self._warn_of_views(output)
        return self.unit.after_forward(output)

    def _warn_of_views(self, output: object) -> None:
        names = ", ".join(type(module).__name__ for module in self.modules)
        for tensor in tensors_in(output):
            if tensor.requires_grad and tensor._base is not None:
                warn_user(
                    f"FSDP2-wrapped module ({names}) returned a view tensor. "
                    "An in-place op on this view (e.g., `x += y`) will silently "
                    "drop the pre-backward hook and skip the all-gather, which "
                    "can cause backward to fail or produce wrong gradients. "
                    "Use out-of-place ops (`out = out + y`, not `out += y`) or "
                    "`.clone()` the output before any in-place op."
                )

    def _cast_inputs(self, args: tuple[object, ...], kwargs: dict[str, object]) -> Inputs:
        return cast_inputs(args, kwargs, self.policy.param_dtype if self.policy.cast_forward_inputs else None)

    def _cast_outputs(self, output: object) -> Any:
        dtype = self.policy.output_dtype
        return output if dtype is None else cast_floats(output, dtype)

    # State dicts

    def _hook_state_dicts(self, modules: Iterable[nn.Module]) -> None:
        """Register hooks so that modules with the unit's parameters have the shards when they are saved or loaded."""
        for module in modules:
            module.register_state_dict_pre_hook(self._before_save)
            module.register_load_state_dict_pre_hook(self._before_load)
            module.register_load_state_dict_post_hook(self._after_load)

    def _before_save(self, *_: object, **__: object) -> None:
        self.reshard()
        for group in self.param_groups:
            # The state dict has other local tensors of the same memory, whose versions do not count for the shards.
            group.shard_casts.forget()

    def _before_load(
        self,
        module: nn.Module,
        state_dict: dict[str, Any],
        prefix: str,
        metadata: dict[str, Any],
        _strict: bool,
        _missing_keys: list[str],
        _unexpected_keys: list[str],
        errors: list[str],
    ) -> None:
        if any(group.uses_unsharded_views for group in self.param_groups):
            self._errors_of_unsharded = errors
        self.reshard()
        self._loads[module] = prefix, errors
        assigned = metadata.get("assign_to_params_buffers", False)
        for group in self.param_groups:
            group.masters.record_load(module, state_dict, prefix, assigned=assigned)

    def _after_load(self, module: nn.Module, _: object) -> None:
        """Name the unsharded tensors that a load has assigned, and the cure. Keep the sharded parameters."""
        # A module whose own `_load_from_state_dict` does not call torch's has run no hook before.
        prefix, errors = self._loads.pop(module, ("", []))
        attributes = [name for group in self.param_groups for name in group.restore_sharded(module)]
        if attributes:
            names = describe_names([prefix + attribute for attribute in attributes])
            errors.append(f"{names}: sharded in the model, but unsharded in the state dict to assign.")
        is_named = any(text.startswith(_LOAD_UNSHARDED) for text in errors)
        if not is_named and (attributes or any(MIXED_TENSORS in text for text in errors)):
            was_unsharded = errors is self._errors_of_unsharded
            errors.insert(0, _LOAD_UNSHARDED + (_WAS_UNSHARDED if was_unsharded else ""))

    # Calls of the user

    def reshard(self) -> None:
        """Register the shards in the modules. Keep gathered parameters that were not used yet."""
        unit = self.unit
        if unit.is_unsharded:
            if any(group.uses_unsharded_views for group in self.param_groups):
                unit.reshard()
            else:
                unit.wait_for_gather()
            unit.root.wait_for_pinned_reads()
        for group in self.param_groups:
            group.discard_post_forward_shards()

    def reshard_on_request(self) -> None:
        """Reshard this unit and every idle unit whose parameters it shares."""
        for state in (self, *self.param_owners):
            if state is self or (state.unit.phase is Phase.IDLE and not state.unit.is_used_by_sharers()):
                state.reshard()

    def gather_on_request(self) -> None:
        """All-gather this unit and the units whose parameters it shares."""
        for state in (self, *self.param_owners):
            state.ensure_root()
            state.unit.gather_on_request()

    def register_unsharded(self) -> None:
        """Register the parameters that the user requested to gather."""
        if self.unit.is_unsharded:
            self.unit.unshard()
            self.unit.root.wait_for_pinned_reads()

    def reset(self) -> None:
        """End a failed step and drop its gradients.

        Raises:
            RuntimeError: the state is not the root's, or another root's finalization was not waited for.
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
        for state in self._states:
            state.unit.abandon_forward()
            state.unit.abandon_backward()
            state.reshard()
            for group in state.param_groups:
                group.gradients.forget()
        self.own_root.reset()

    def _root_post_backward_final_callback(self) -> None:
        """Reduce the accumulated gradients of microbatches. torch's pipeline stages call this name on the root."""
        if self.own_root is not None:
            self.own_root.end_backward()


def state_of(module: nn.Module) -> ModuleState | None:
    """Return the state of a module that fully_shard has sharded, or None.

    >>> state_of(nn.Linear(2, 2))
    """
    return module.__dict__.get(_STATE)


def owner_of(param: ShardedParam) -> ModuleState:
    state = None if param.unit_state is None else param.unit_state()
    assert state is not None
    return state


def _name_parameters(
    group: DTensorGroup, names: Mapping[int, str], module_names: Mapping[nn.Module, str]
) -> None:
    for param in group.params:
        param.name = names.get(id(param.sharded), param.name)
        locations = tuple(place.in_model(module_names) for place in param.info.locations)
        param.info = replace(param.info, locations=locations)
    group.names = [param.name for param in group.params]


def _check_owners_in_model(unit: Unit[DTensorGroup], units: Sequence[Unit[Any]]) -> None:
    for owner in unit.param_owners:
        if owner not in units:
            raise ValueError(
                f"{unit.name} uses parameters of {owner.name}, which is part of another model; use "
                "fully_shard([module_a, module_b]) to place them in the same FSDP group, or shard a module that "
                "contains both"
            )
