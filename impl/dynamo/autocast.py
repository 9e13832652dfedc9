"""`impl.amp.autocast` inside `torch.compile` and strict `torch.export`.

Dynamo looks up every object in two tables, by type and by identity. `introduce` adds our classes to both, so that a
region becomes the same two graph nodes as torch's.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import AttrSource
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.ctx_manager import AutocastModeVariable, ContextWrappingVariable
from torch._dynamo.variables.user_defined import UserDefinedClassVariable

# Imported as a module, because a reload replaces its classes.
from impl.amp import autocast_mode as amp
from impl.amp._tracing import introduce_by

if TYPE_CHECKING:
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase

# Attributes that become the arguments of the graph node that enters a region, in this order.
_FIELDS = ("device", "fast_dtype", "_enabled", "_cache_enabled")


def introduce(cls: type[amp.autocast]) -> None:
    """Register `cls` with Dynamo.

    A subclass that overrides `__enter__` or `__exit__` is not registered, and traced like any class.
    """
    if (cls.__enter__, cls.__exit__) != (amp.autocast.__enter__, amp.autocast.__exit__):
        return
    # Dynamo's cached functions return the tables themselves. There is one table by type for each setting of
    # `torch._dynamo.config.trace_numpy`. It keeps `cls` alive, so that its id stays valid.
    for trace_numpy in (False, True):
        VariableBuilder._type_dispatch_impl(trace_numpy)[cls] = _wrap_instance
    VariableBuilder._id_dispatch()[id(cls)] = _wrap_class


def _wrap_class(builder: VariableBuilder, cls: type[amp.autocast]) -> VariableTracker:
    guards = builder.install_guards(GuardBuilder.CLASS_MATCH)
    return AutocastClassVariable(cls, source=builder.source, **(guards or {}))


def _wrap_instance(builder: VariableBuilder, instance: amp.autocast) -> VariableTracker:
    """Wrap an instance with guards on its fields: another dtype recompiles, an equal instance does not."""
    builder.install_guards(GuardBuilder.TYPE_MATCH)
    for field in _FIELDS:
        install_guard(AttrSource(builder.source, field).make_guard(GuardBuilder.CONSTANT_MATCH))
    return AutocastVariable(_values(instance), source=builder.source)


def _values(instance: amp.autocast) -> list[Any]:
    return [getattr(instance, field) for field in _FIELDS]


class AutocastClassVariable(UserDefinedClassVariable):
    """Tracker of the class. Calling it creates a region. Everything else is Dynamo's default."""

    def call_function(
        self,
        tx: InstructionTranslatorBase,
        args: Sequence[VariableTracker],
        kwargs: Mapping[str, VariableTracker],
    ) -> VariableTracker:
        positional = [arg.as_python_constant() for arg in args]
        named = {name: arg.as_python_constant() for name, arg in kwargs.items()}
        cls = cast("type[amp.autocast]", self.value)
        if cls is not amp.autocast:
            return AutocastVariable(_values(cls(*positional, **named)))
        # A None is not replaced here, because its value is decided when the graph runs, like with torch's class.
        bound = inspect.signature(amp.autocast).bind(*positional, **named)
        bound.apply_defaults()
        return AutocastVariable(list(bound.arguments.values()))


class AutocastVariable(ContextWrappingVariable):
    """Tracker of an instance. Each entry opens a new region of Dynamo's, so that it may be nested in itself."""

    def __init__(self, target_values: Sequence[Any], **kwargs: Any) -> None:
        super().__init__(target_values=target_values, **kwargs)
        self._open: list[AutocastModeVariable] = []

    def enter(self, tx: InstructionTranslatorBase) -> VariableTracker:
        region = AutocastModeVariable(self.target_values)
        region.enter(tx)
        self._open.append(region)
        return self

    def exit(self, tx: InstructionTranslatorBase, *args: VariableTracker) -> VariableTracker:
        return self._open.pop().exit(tx, *args)

    def call_function(
        self,
        tx: InstructionTranslatorBase,
        args: Sequence[VariableTracker],
        kwargs: Mapping[str, VariableTracker],
    ) -> VariableTracker:
        return VariableTracker.build(tx, amp.autocast_decorator).call_function(
            tx, [self, *args], dict(kwargs)
        )

    # After a graph break inside a region, the code between the graphs imports the class by these names.
    def module_name(self) -> str:
        return "impl.amp.autocast_mode"

    def fn_name(self) -> str:
        return "autocast"

    def python_type(self) -> type:
        return amp.autocast


introduce_by(introduce)
