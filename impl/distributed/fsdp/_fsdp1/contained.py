"""Calls of a module inside a unit that bypass the unit, and reads of its parameters without any call.

The forward of such a module unshards the unit like the unit's own. A read gets sharded parameters, and a note says so.
"""

from __future__ import annotations

import traceback
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from impl._names import describe_names
from impl.distributed.fsdp._engine.phase import BACKWARDS, Phase
from impl.distributed.fsdp._engine.unit import Unit
from impl.distributed.fsdp._fsdp1.wrapper import Wrapper
from impl.distributed.fsdp._layout.flat import FlatParamGroup
from impl.distributed.fsdp._params.managed import clean_name


def watch_contained(unit: Unit[FlatParamGroup], prepare: Callable[[], object]) -> None:
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
    contained_forward = _ContainedForward(unit, prepare)
    # These must be the first hooks, because those of weight_norm and others read parameters.
    for module in modules:
        module.register_forward_pre_hook(contained_forward.before, prepend=True, with_kwargs=True)


class _ContainedForward:
    def __init__(self, unit: Unit[FlatParamGroup], prepare: Callable[[], object]) -> None:
        self._unit = weakref.ref(unit)
        self._prepare = weakref.WeakMethod(prepare)

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            # Dynamo compiles the unit's own forward, and would guard a read of its phase.
            return None
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

        def after(module: nn.Module, args: object, output: object) -> Any:
            del module, args
            handle.remove()
            return unit.after_forward(output)

        handle = module.register_forward_hook(after, always_call=True)
        return inputs


def note_sharded_reads(outer: Wrapper, inner: Iterable[Wrapper], error: BaseException) -> None:
    """Add a note to the error of a forward in which a function was called with sharded parameters.

    Args:
        outer: wrapper whose forward raised.
        inner: wrappers inside it.
    """
    if not isinstance(error, RuntimeError) or hasattr(error, "__notes__"):
        return
    # A forward of the inner wrapper shows other tensors, so a parameter itself is always a shard.
    handles = [handle for wrapper in inner for handle in wrapper._unit.param_groups]
    sharded = {id(param) for handle in handles for param in handle.parameters}
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    read = {id(value) for frame in frames for value in frame.f_locals.values()} & sharded
    names = [clean_name(name) for name, param in outer.named_parameters() if id(param) in read]
    if names:
        error.add_note(
            f"a function was called with {describe_names(names)}, sharded over the ranks, because the forward of the "
            "module that has them did not run. Wrap the module that reads them instead"
        )
