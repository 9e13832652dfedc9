"""Calls of a module inside a unit that bypass the unit. The module's forward unshards the unit like the unit's own."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from impl.distributed.fsdp._engine.phase import BACKWARDS, Phase
from impl.distributed.fsdp._engine.unit import Unit
from impl.distributed.fsdp._layout.flat import FlatParamGroup


def watch_contained(unit: Unit[FlatParamGroup], prepare: Callable[[], object]) -> list[RemovableHandle]:
    """Register hooks so that each module with a parameter of the unit starts the unit's forward, if none is running.

    Args:
        prepare: a method that finds the root. Called before the unit's forward, and referenced weakly.
    """
    modules = {
        location.module: None
        for handle in unit.param_groups
        for info in handle.param_infos
        for location in info.locations
    }
    entry = _Entry(unit, prepare)
    # These must be the first hooks, because those of weight_norm and others read parameters.
    return [
        module.register_forward_pre_hook(entry.before, prepend=True, with_kwargs=True) for module in modules
    ]


class _Entry:
    def __init__(self, unit: Unit[FlatParamGroup], prepare: Callable[[], object]) -> None:
        self._unit = weakref.ref(unit)
        self._prepare = weakref.WeakMethod(prepare)

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return (
                # Dynamo compiles the unit's own forward, and would guard a read of its phase.
                None
            )
        unit = self._unit()
        if unit is not None and unit.phase in BACKWARDS:
            unit.root.handle_failed_backward()
        prepare = self._prepare()
        if unit is None or prepare is None or unit.phase is not Phase.IDLE:
            return None
        prepare()
        try:
            inputs = unit.before_forward(args, kwargs)
        except BaseException:
            unit.abandon_forward()
            raise

        def after(module: nn.Module, args: Any, output: Any) -> Any:
            del module, args
            handle.remove()
            return unit.after_forward(output)

        handle = module.register_forward_hook(after, always_call=True)
        return inputs
