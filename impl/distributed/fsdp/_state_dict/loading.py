"""Load of a state dict into the units of a module: all of it on every rank, or nothing on any rank.

While `nn.Module.load_state_dict` walks through the modules, they contain stand-ins. A stand-in has a parameter's shape
and keeps the value that is copied into it. During the walk no shard is written and no collective is issued. Then the
ranks agree whether all of them succeeded. Only then the values are written. Buffers, and parameters that no unit
manages, are written during the walk, and restored if it fails.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from impl.distributed.fsdp._engine.unit import Unit
from impl.distributed.fsdp._fsdp1.wrapper import Wrapper
from impl.distributed.fsdp._layout.flat import FlatParamGroup
from impl.distributed.fsdp._params.managed import is_managed
from impl.distributed.fsdp._state_dict.consensus import first_problem_on_any_rank
from impl.distributed.fsdp._state_dict.saving import StateDictSaving
from impl.distributed.fsdp._state_dict.unit_loading import UnitLoading, is_seen_by_first_rank
from impl.distributed.fsdp.api import (
    FullStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)


class StateDictWrapper(Wrapper):
    """Wrapper with the settings of its state dicts, and the save or load that is under way."""

    _state_dict_settings: StateDictSettings
    _saving: StateDictSaving | None = None
    _loading: StateDictLoading | None = None

    @property
    def _effective_settings(self) -> StateDictSettings:
        """Settings of this unit's state dicts, which are always those of FULL_STATE_DICT without sharding."""
        settings = self._state_dict_settings
        if self.sharding_strategy is not ShardingStrategy.NO_SHARD:
            return settings
        full = StateDictType.FULL_STATE_DICT
        return StateDictSettings(full, FullStateDictConfig(), settings.optim_state_dict_config)


class StateDictLoading:
    """Call of `load_state_dict` for the units at and below a wrapper.

    Args:
        wrappers: the units' wrappers, the outermost first.
        errors: errors that nn.Module will raise, if an outer module was called.
    """

    def __init__(self, wrappers: Sequence[StateDictWrapper], errors: list[str] | None = None) -> None:
        self.wrappers = list(wrappers)
        self.errors = errors
        self._errors_before = 0 if errors is None else len(errors)
        self._units: dict[Wrapper, UnitLoading] = {}
        self._plain = PlainStates(wrappers[0], [wrapper._unit for wrapper in wrappers])

    def begin(self) -> None:
        for wrapper in self.wrappers:
            wrapper._loading = self

    def is_walked_from(self, wrapper: Wrapper) -> bool:
        """Return whether the walk came to this wrapper, the outermost one, from an outer module."""
        return self.errors is not None and wrapper is self.wrappers[0]

    def enter(
        self,
        wrapper: Wrapper,
        kind: StateDictType,
        config: StateDictConfig,
        state_dict: dict[str, Any],
        prefix: str,
    ) -> list[str]:
        """Register stand-ins in a unit's modules. Return the problems of its keys as text.

        Raises:
            AssertionError: a required key is missing or has a value of another type.
        """
        unit = self._units[wrapper] = UnitLoading(wrapper, kind, config)
        return unit.begin(state_dict, prefix)

    def leave(self, wrapper: Wrapper) -> None:
        """Register what the unit's modules had before."""
        self._units[wrapper].end()

    def finish(self, problem: str) -> str:
        """Write the values if no rank has a problem, else restore what was written.

        Return the first problem of any rank.

        Collectives: all-reduces over the units' groups, and those of writing. None if the first rank may load alone.
        """
        self._end()
        problem = problem or "\n\t".join(
            problem_text for unit in self._units.values() for problem_text in unit.problems_of_sources()
        )
        sources = [source for wrapper in self.wrappers for source in self._sources_of(wrapper)]
        try:
            verdict = problem
            if not self._first_rank_may_load_alone():
                verdict = first_problem_on_any_rank(self.wrappers, problem, sources)
        except BaseException:
            self._plain.restore()
            raise
        if verdict:
            self._plain.restore()
        else:
            for unit in self._units.values():
                unit.write()
        return verdict

    def finish_for_outer_module(self) -> None:
        """Finish like `finish`, but leave it to nn.Module to raise the problem.

        Missing and unexpected keys do not count, because they may be allowed.
        """
        assert self.errors is not None
        own_errors = self.errors[self._errors_before :]
        verdict = self.finish("\n\t".join(own_errors))
        if verdict and not own_errors:
            self.errors.append(verdict)

    def _first_rank_may_load_alone(self) -> bool:
        """Return whether the first rank alone has all unsharded parameters, so that it needs no other rank."""
        wrappers = [wrapper for wrapper in self.wrappers if wrapper._unit.param_groups]
        return bool(wrappers) and all(
            is_seen_by_first_rank(wrapper)
            and wrapper._effective_settings.state_dict_type is StateDictType.FULL_STATE_DICT
            for wrapper in wrappers
        )

    def _end(self) -> None:
        for unit in self._units.values():
            unit.end()
        for wrapper in self.wrappers:
            wrapper._loading = None

    def _sources_of(self, wrapper: Wrapper) -> list[tuple[str, str]]:
        """Return (key, source) of each parameter, which decide what the ranks send to each other."""
        loading = self._units.get(wrapper)
        return [
            (
                f"{slot.name} of {wrapper._unit.name}",
                loading.source_of(handle, index) if loading else "nothing",
            )
            for handle in wrapper._unit.param_groups
            for index, slot in enumerate(handle.layout.slots)
        ]

    def abandon(self) -> None:
        """Restore everything without a collective."""
        self._end()
        self._plain.restore()


class PlainStates:
    """Journal of buffers, parameters that no unit manages, and extra states, which nn.Module itself loads."""

    def __init__(self, root: nn.Module, units: Sequence[Unit[FlatParamGroup]]) -> None:
        summoned = {
            tensor
            for unit in units
            for handle in unit.param_groups
            for _, tensor in handle.registration.registered()
        }
        self._tensors: list[tuple[dict[str, Any], str, Tensor, Tensor, int]] = []
        self._extras: list[tuple[nn.Module, Any]] = []
        for module in root.modules():
            for registry in (module._parameters, module._buffers):
                for name, tensor in registry.items():
                    if tensor is not None and not is_managed(tensor) and tensor not in summoned:
                        entry = (registry, name, tensor, tensor.detach().clone(), tensor._version)
                        self._tensors.append(entry)
            if _has_extra_state(module):
                self._extras.append((module, copy.deepcopy(module.get_extra_state())))

    @torch.no_grad()
    def restore(self) -> None:
        for registry, name, tensor, before, version in self._tensors:
            registry[name] = tensor
            if tensor._version != version:
                tensor.copy_(before)
        for module, extra in self._extras:
            module.set_extra_state(extra)


def _has_extra_state(module: nn.Module) -> bool:
    kind = type(module)
    return (
        kind.get_extra_state is not nn.Module.get_extra_state
        and kind.set_extra_state is not nn.Module.set_extra_state
    )
