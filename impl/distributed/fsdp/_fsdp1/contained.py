"""Calling a module inside a unit without the unit: its forward unshards the unit, as the unit's own would."""

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
    """Have each module that keeps a parameter of the unit begin a forward of it where none is going on.

    Args:
        prepare: a method, held weakly, that is called before; it finds the root.
    """
    modules = {
        location.module: None
        for handle in unit.param_groups
        for one in handle.param_infos
        for location in one.locations
    }
    entry = _Entry(unit, prepare)
    # First of all hooks, as those of weight_norm and the like read parameters.
    return [one.register_forward_pre_hook(entry.before, prepend=True, with_kwargs=True) for one in modules]


class _Entry:
    def __init__(self, unit: Unit[FlatParamGroup], prepare: Callable[[], object]) -> None:
        self._unit = weakref.ref(unit)
        self._prepare = weakref.WeakMethod(prepare)

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return (
                None  # the unit's own forward is what is compiled, and a look at its phase would be guarded
            )
        unit = self._unit()
        if unit is not None and unit.phase in BACKWARDS:
            unit.root.handle_failed_backward()
        prepare = self._prepare()
        if unit is None or prepare is None or unit.phase is not Phase.IDLE:
            return None
        prepare()
        try:
            given = unit.before_forward(args, kwargs)
        except BaseException:
            unit.abandon_forward()
            raise

        def after(module: nn.Module, args: Any, output: Any) -> Any:
            del module, args
            handle.remove()
            return unit.after_forward(output)

        handle = module.register_forward_hook(after, always_call=True)
        return given
