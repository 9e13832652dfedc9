"""`impl.amp.autocast` inside `torch.compile` and strict `torch.export`.

Dynamo looks every object it meets up in two tables, by type and by identity. `introduce` adds a class of ours to
both, so that a region becomes the same two graph nodes as torch's.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import AttrSource
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.ctx_manager import AutocastModeVariable, ContextWrappingVariable
from torch._dynamo.variables.user_defined import UserDefinedClassVariable

# As a module: it may be reloaded, and then has other classes.
from impl.amp import autocast_mode as amp
from impl.amp._tracing import introduce_by

# What a region is to Dynamo: the arguments of the graph node that enters it, in this order.
_FIELDS = ("device", "fast_dtype", "_enabled", "_cache_enabled")


def introduce(cls: type[amp.autocast]) -> None:
    """Make `cls` known to Dynamo.

    A subclass with an `__enter__` or `__exit__` of its own is left to be traced as any class.
    """
    if (cls.__enter__, cls.__exit__) != (amp.autocast.__enter__, amp.autocast.__exit__):
        return
    # Dynamo's cached functions return the tables themselves. There is one by type for each setting of
    # `torch._dynamo.config.trace_numpy`, and it keeps `cls`, hence its id, alive.
    for trace_numpy in (False, True):
        VariableBuilder._type_dispatch_impl(trace_numpy)[cls] = _wrap_instance
    VariableBuilder._id_dispatch()[id(cls)] = _wrap_class


def _wrap_class(builder: VariableBuilder, cls: type[amp.autocast]) -> VariableTracker:
    guards = builder.install_guards(GuardBuilder.CLASS_MATCH)
    return AutocastClassVariable(cls, source=builder.source, **(guards or {}))


def _wrap_instance(builder: VariableBuilder, instance: amp.autocast) -> VariableTracker:
    """Guarded by what it holds: the same object with another dtype recompiles, an equal object does not."""
    builder.install_guards(GuardBuilder.TYPE_MATCH)
    for field in _FIELDS:
        install_guard(AttrSource(builder.source, field).make_guard(GuardBuilder.CONSTANT_MATCH))
    return AutocastVariable(_values(instance), source=builder.source)


def _values(instance: amp.autocast) -> list[Any]:
    return [getattr(instance, field) for field in _FIELDS]


class AutocastClassVariable(UserDefinedClassVariable):
    """The class itself: calling it makes a region, all else is as Dynamo does for any class."""

    def call_function(
        self, tx: Any, args: Sequence[VariableTracker], kwargs: Mapping[str, VariableTracker]
    ) -> VariableTracker:
        given = [arg.as_python_constant() for arg in args]
        named = {name: arg.as_python_constant() for name, arg in kwargs.items()}
        cls = cast("type[amp.autocast]", self.value)
        if cls is not amp.autocast:
            return AutocastVariable(_values(cls(*given, **named)))
        # Left as given: what None stands for is decided where the graph runs, as with torch's class.
        bound = inspect.signature(amp.autocast).bind(*given, **named)
        bound.apply_defaults()
        return AutocastVariable(list(bound.arguments.values()))


class AutocastVariable(ContextWrappingVariable):
    """One instance; each entry opens a region of Dynamo's own kind, so that it may be nested in itself."""

    def __init__(self, target_values: Sequence[Any], **kwargs: Any) -> None:
        super().__init__(target_values=target_values, **kwargs)
        self._open: list[AutocastModeVariable] = []

    def enter(self, tx: Any) -> VariableTracker:
        region = AutocastModeVariable(self.target_values)
        region.enter(tx)
        self._open.append(region)
        return self

    def exit(self, tx: Any, *args: VariableTracker) -> VariableTracker:
        return self._open.pop().exit(tx, *args)

    def call_function(
        self, tx: Any, args: Sequence[VariableTracker], kwargs: Mapping[str, VariableTracker]
    ) -> VariableTracker:
        return VariableTracker.build(tx, amp.autocast_decorator).call_function(
            tx, [self, *args], dict(kwargs)
        )

    # Where the graph breaks inside a region, the code between the graphs builds and enters what these name.
    def module_name(self) -> str:
        return "impl.amp.autocast_mode"

    def fn_name(self) -> str:
        return "autocast"

    def python_type(self) -> type:
        return amp.autocast


introduce_by(introduce)
