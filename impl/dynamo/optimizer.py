"""`OptimizerVariable`: an optimizer inside `torch.compile`.

An optimizer's `_init_group` only creates states and collects lists, but tracing it would take most of the compile time.
So it runs once, untraced, while the step around it is traced, and the trace gets the lists. Guards hold as long as
`_init_group` would collect the same lists.
"""

import contextlib
import weakref
from collections.abc import Generator, Iterable, Iterator
from typing import Any, NoReturn, cast

import torch
from torch._dynamo.decorators import mark_static_address
from torch._dynamo.exc import UnspecializeRestartAnalysis, unimplemented
from torch._dynamo.guards import GuardBuilder, install_guard, make_dupe_guard
from torch._dynamo.source import (
    AttrSource,
    ConstDictKeySource,
    DictGetItemSource,
    GetItemSource,
    GradSource,
    OptimizerSource,
    Source,
)
from torch._dynamo.symbolic_convert import InstructionTranslator, InstructionTranslatorBase
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.functions import SkipFunctionVariable
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.misc import GetAttrVariable
from torch._dynamo.variables.user_defined import UserDefinedObjectVariable
from torch.utils._pytree import tree_leaves

from impl.dynamo._collected import Arguments, CollectedTrackers, NotConcrete, has_numbers, release_with

# Device types on which torch.optim supports step counts on the device, which avoid breaks in CUDA graphs.
_CAPTURABLE_ON = frozenset({"cuda", "xpu"})
# Scalars that torch.optim keeps on the CPU unless a group is capturable. A loaded state may contain them.
_SCALARS = frozenset({"step", "mu_product"})
# Name of Dynamo's method that resolves an attribute. torch 2.14 renamed it.
_RESOLVE = "tp_getattro_impl" if hasattr(UserDefinedObjectVariable, "tp_getattro_impl") else "var_getattr"

# Optimizers, by id, whose closures changed parameters or state in a trace of the step. Each further trace calls the
# closure between two graphs. A break at `_init_group` instead, which steps call in a loop, would make Dynamo skip the
# step's frame. Its functions would be compiled without `capturable`, and torch cannot trace multi-tensor code so.
_with_changing_closures: weakref.WeakValueDictionary[int, torch.optim.Optimizer] = (
    weakref.WeakValueDictionary()
)


class OptimizerVariable(UserDefinedObjectVariable):
    """Tracker of an optimizer in traced code.

    Source: torch._dynamo.variables.optimizer.OptimizerVariable 2.13; differences: the rows of
    `conformance/deviations.toml` whose names begin with `optimizer_variable`.
    """

    value: torch.optim.Optimizer

    def __init__(self, value: torch.optim.Optimizer, source: Source | None = None, **kwargs: Any) -> None:
        # Dynamo does not guard that two sources share an object if one of them is an `OptimizerSource`.
        plain_source = source.base if isinstance(source, OptimizerSource) else source
        super().__init__(value, source=plain_source, **kwargs)
        # Track side effects, or attributes that a step sets on its optimizer would be lost.
        effects = InstructionTranslator.current_tx().output.side_effects
        if value not in effects:
            effects.track_object_existing(value, self)

    def tp_getattro_impl(self, tx: InstructionTranslatorBase, name: str) -> VariableTracker:
        if id(self.value) in _with_changing_closures:
            _skip_closure(tx)
        if name == "_init_group" and hasattr(self.value, name):
            # Dynamo would inline a tracker of the method itself. Calls of this tracker go to `call_method`.
            method = type(getattr(self.value, name))
            return GetAttrVariable(self, name, py_type=method, source=self._source_of(name))
        if name == "param_groups":
            for parameter in self._parameters():
                mark_static_address(parameter, guard=True)
            self._trace_as_capturable(tx)
        return getattr(super(), _RESOLVE)(tx, name)

    var_getattr = tp_getattro_impl  # torch 2.13 and older

    def call_method(
        self,
        tx: InstructionTranslatorBase,
        name: str,
        args: list[VariableTracker],
        kwargs: dict[str, VariableTracker],
    ) -> VariableTracker:
        if name == "_init_group" and hasattr(self.value, name):
            with contextlib.suppress(NotConcrete):
                arguments = Arguments(self._groups_by_source(tx), args, kwargs)
                return self._collect(tx, arguments)
        return super().call_method(tx, name, args, kwargs)

    def _collect(self, tx: InstructionTranslatorBase, arguments: Arguments) -> VariableTracker:
        """Run `_init_group` untraced, and add the collected lists to the trace."""
        self._break_on_pending_changes(tx, arguments.groups)
        _move_scalars(self.value)
        try:
            with _capturable(self.value.param_groups):
                returned = cast("Any", self.value)._init_group(*arguments.args, **arguments.kwargs)
        except Exception as error:
            # Break the graph, so that it is called again outside of a graph and raises the error there.
            _break(tx, f"it raised {type(error).__name__}: {error}")
        for tensor in _state_tensors(self.value):
            mark_static_address(tensor, guard=True)
        collected = CollectedTrackers(tx, self._guarded(tx), frozenset(map(id, self._graph_inputs())))
        if has_numbers(returned, *(items for _, items in arguments.lists)):
            self._guard_numbers(tx)
        for tracker, items in arguments.lists:
            tx.output.side_effects.mutation(tracker)
            tracker.items.extend(map(collected.tracker, items))
        result = collected.tracker(returned)
        # Compiled code of a freed optimizer must not serve another one, nor keep tensors alive.
        tx.store_global_weakref_by_id(f"__optimizer_{id(self.value)}", self.value)
        release_with(self.value, tx, collected.held)
        return result

    def _source_of(self, name: str) -> Source:
        assert self.source is not None, "Dynamo has a name for each optimizer that it meets"
        return AttrSource(self.source, name)

    def _parameters(self) -> Iterator[torch.Tensor]:
        return (parameter for group in self.value.param_groups for parameter in group["params"])

    def _graph_inputs(self) -> Iterator[torch.Tensor]:
        """Yield all gradients, and tensors among the options of groups, such as a learning rate."""
        for group in self.value.param_groups:
            yield from (parameter.grad for parameter in group["params"] if parameter.grad is not None)
            options = tree_leaves([value for name, value in group.items() if name != "params"])
            yield from (option for option in options if isinstance(option, torch.Tensor))

    def _groups(self, tx: InstructionTranslatorBase) -> list[Any]:
        """Return the trackers of the groups, with guards on all their contents."""
        groups = VariableTracker.build(tx, self.value.param_groups, self._source_of("param_groups"))
        return LazyVariableTracker.realize_all(groups).items

    def _groups_by_source(self, tx: InstructionTranslatorBase) -> dict[Source, Any]:
        pairs = zip(self._groups(tx), self.value.param_groups, strict=True)
        return {tracker.source: group for tracker, group in pairs}

    def _trace_as_capturable(self, tx: InstructionTranslatorBase) -> None:
        """Set `capturable` in the trace only, where a step count is a tensor of the graph on any device.

        If the trace changes a group, Dynamo writes all its options. A tracker with a source is written as it was.
        """
        for tracker in self._groups(tx):
            for key in tracker.items:
                if key.vt.as_python_constant() == "capturable":
                    source = DictGetItemSource(tracker.source, "capturable")
                    tracker.items[key] = ConstantVariable.create(True, source=source)

    def _break_on_pending_changes(
        self, tx: InstructionTranslatorBase, groups: Iterable[dict[str, Any]]
    ) -> None:
        """Break the graph if traced code has changed values that `_init_group` would read before they are real."""
        state, effects = self.value.state, tx.output.side_effects
        watched: list[Any] = [state]
        for group in groups:
            parameters = group["params"]
            watched += [parameters, *parameters, *(state[param] for param in parameters if param in state)]
        changed = [effects[value] for value in watched if value in effects]
        if any(_is_changed(effects, tracker) for tracker in changed):
            if id(self.value) not in _with_changing_closures and _unskipped_closure(tx) is not None:
                _with_changing_closures[id(self.value)] = self.value
                raise UnspecializeRestartAnalysis(restart_reason="a closure changes parameters or state")
            _break(tx, "traced code has changed parameters or state that it reads")

    def _guarded(self, tx: InstructionTranslatorBase) -> dict[int, Source]:
        """Guard all inputs of `_init_group`. Return the sources of their tensors by id."""
        sources: dict[int, Source] = {}

        def add_source(tensor: torch.Tensor, source: Source) -> None:
            first = sources.setdefault(id(tensor), source)
            is_shared = make_dupe_guard(source, first)
            if is_shared is not None:
                install_guard(source.make_guard(is_shared))

        for group, tracker in zip(self.value.param_groups, self._groups(tx), strict=True):
            items = {key.vt.as_python_constant(): item for key, item in tracker.items.items()}
            for name, value in group.items():
                if isinstance(value, torch.Tensor):
                    add_source(value, items[name].source)
            for parameter, item in zip(group["params"], items["params"].items, strict=True):
                add_source(parameter, item.source)
                gradient = GradSource(item.source, "grad")
                if parameter.grad is None:
                    install_guard(gradient.make_guard(GuardBuilder.CONSTANT_MATCH))
                else:
                    add_source(parameter.grad, gradient)
        for value, source in self._state_items(tx):
            if isinstance(value, torch.Tensor):
                add_source(value, source)
            elif value is None or isinstance(value, (bool, str)):
                install_guard(source.make_guard(GuardBuilder.CONSTANT_MATCH))
        return sources

    def _state_items(self, tx: InstructionTranslatorBase) -> Iterator[tuple[Any, Source]]:
        """Yield each value of each parameter's state, also in containers, with guards on keys and lengths."""
        state = self.value.state
        source = self._source_of("state")
        _guard_keys(tx, state, source)
        for index, entry in enumerate(state.values()):
            entry_source = DictGetItemSource(source, ConstDictKeySource(source, index))
            _guard_keys(tx, entry, entry_source)
            for position, value in enumerate(entry.values()):
                value_source = DictGetItemSource(entry_source, ConstDictKeySource(entry_source, position))
                yield from _values_in(tx, value, value_source)

    def _guard_numbers(self, tx: InstructionTranslatorBase) -> None:
        """Guard the numbers of groups and states, because a collected number is a constant of the graph."""
        for group, tracker in zip(self.value.param_groups, self._groups(tx), strict=True):
            for name, value in group.items():
                if has_numbers(value):
                    source = DictGetItemSource(tracker.source, name)
                    install_guard(source.make_guard(GuardBuilder.EQUALS_MATCH))
        for value, source in self._state_items(tx):
            if has_numbers(value):
                install_guard(source.make_guard(GuardBuilder.EQUALS_MATCH))


def may_be_capturable(device_types: Iterable[str]) -> bool:
    """Return whether a group with parameters on these devices may keep its step counts there."""
    types = frozenset(device_types)
    return bool(types) and types <= _CAPTURABLE_ON


def belongs_with_parameter(name: str, at: str, parameter_at: str) -> bool:
    """Return whether the state tensor `name` on device type `at` must move to its parameter's device."""
    return name in _SCALARS and at == "cpu" and parameter_at != "cpu"


@contextlib.contextmanager
def _capturable(groups: Iterable[dict[str, Any]]) -> Generator[None]:
    """Context manager that sets `capturable` where it is safe, so that step counts are created on the device."""
    changed = [
        group
        for group in groups
        if group.get("capturable") is False
        and may_be_capturable(parameter.device.type for parameter in group["params"])
    ]
    for group in changed:
        group["capturable"] = True
    try:
        yield
    finally:
        for group in changed:
            group["capturable"] = False


def _move_scalars(optimizer: torch.optim.Optimizer) -> None:
    for parameter, entry in optimizer.state.items():
        for name, value in entry.items():
            if isinstance(value, torch.Tensor) and belongs_with_parameter(
                name, value.device.type, parameter.device.type
            ):
                entry[name] = value.to(parameter.device)


def _state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    leaves = tree_leaves(list(optimizer.state.values()))
    return (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))


def _is_changed(effects: Any, tracker: VariableTracker) -> bool:
    if effects.has_pending_mutation(tracker):
        return True
    return tracker.mutation_type is not None and effects.is_modified(tracker)


def _unskipped_closure(tx: InstructionTranslatorBase) -> VariableTracker | None:
    """Return the tracker of the argument `closure` of a step that is traced as a frame of its own, if it has one."""
    code = tx.f_code
    if tx is not tx.output.root_tx or tx.one_graph or "closure" not in code.co_varnames[: code.co_argcount]:
        return None
    closure = tx.symbolic_locals.get("closure")
    return closure if isinstance(closure, LazyVariableTracker) else None


def _skip_closure(tx: InstructionTranslatorBase) -> None:
    """Break the graph at calls of the step's closure, unless the trace has used the closure already."""
    closure: Any = _unskipped_closure(tx)
    if closure is None or closure.is_realized():
        return
    function, source = closure.original_value(), closure.original_source()
    if function is not None:
        install_guard(source.make_guard(GuardBuilder.TYPE_MATCH))
        reason = "it changes parameters or state of the optimizer that it is passed to"
        tx.symbolic_locals["closure"] = SkipFunctionVariable(function, reason=reason, source=source)


def _guard_keys(tx: InstructionTranslatorBase, mapping: Any, source: Source) -> None:
    VariableTracker.build(tx, mapping, source).realize()
    tx.output.guard_on_key_order.add(source)


def _values_in(tx: InstructionTranslatorBase, value: Any, source: Source) -> Iterator[tuple[Any, Source]]:
    """Yield the values in nested containers that hold tensors, with guards on the containers."""
    if type(value) in (list, tuple) and _has_tensors(value):
        VariableTracker.build(tx, value, source).realize()
        for index, item in enumerate(value):
            yield from _values_in(tx, item, GetItemSource(source, index))
    elif type(value) is dict and _has_tensors(value):
        _guard_keys(tx, value, source)
        for index, item in enumerate(value.values()):
            yield from _values_in(tx, item, DictGetItemSource(source, ConstDictKeySource(source, index)))
    else:
        yield value, source


def _has_tensors(container: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(container))


def _break(tx: InstructionTranslatorBase, reason: str) -> NoReturn:
    unimplemented(
        gb_type="optimizer: _init_group cannot run while its step is traced",
        context=str(tx.f_code.co_qualname),
        explanation=f"An optimizer's _init_group runs once, outside of the graph, but {reason}.",
        hints=[],
    )
