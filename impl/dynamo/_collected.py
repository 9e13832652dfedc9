"""Arguments and results of an optimizer's `_init_group`, as Dynamo's trackers and as real values."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._dynamo.decorators import mark_static_address
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import GlobalWeakRefSource, Source
from torch._dynamo.utils import GLOBAL_KEY_PREFIX
from torch._dynamo.variables.base import ValueMutationNew, VariableTracker
from torch._dynamo.variables.lists import ListVariable, TupleVariable
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase


class NotConcrete(Exception):
    """Raised for an argument that traced code computes, and that has no value yet."""


class Arguments:
    """Real arguments for an untraced `_init_group`: groups by Dynamo's source, constants, and new lists to fill."""

    def __init__(
        self,
        groups: Mapping[Source, dict[str, Any]],
        args: Sequence[VariableTracker],
        kwargs: Mapping[str, VariableTracker],
    ) -> None:
        self._group_by_source = groups
        self._lists: dict[int, tuple[ListVariable, list[Any]]] = {}
        self.groups: list[dict[str, Any]] = []  # groups among the arguments
        self.args = [self._real(arg) for arg in args]
        self.kwargs = {name: self._real(arg) for name, arg in kwargs.items()}

    @property
    def lists(self) -> list[tuple[ListVariable, list[Any]]]:
        """Each list once, as a tracker and as the filled list."""
        return list(self._lists.values())

    def _real(self, arg: VariableTracker) -> Any:
        arg = arg.realize()
        if isinstance(arg, ListVariable):
            if arg.items:  # possibly tensors of the graph, or more in every call
                raise NotConcrete
            return self._lists.setdefault(id(arg), (arg, []))[1]
        if arg.source is not None and arg.source in self._group_by_source:
            self.groups.append(self._group_by_source[arg.source])
            return self.groups[-1]
        if arg.is_python_constant():
            return arg.as_python_constant()
        raise NotConcrete


class CollectedTrackers:
    """Trackers of collected values.

    Args:
        sources: the source of each tensor, by the tensor's id.
        inputs: ids of the tensors that are inputs of the graph. The graph holds all others as attributes.
    """

    def __init__(
        self, tx: InstructionTranslatorBase, sources: Mapping[int, Source], inputs: frozenset[int]
    ) -> None:
        self._tx, self._sources, self._inputs = tx, sources, inputs
        self.held = {key for key in sources if key not in inputs}

    def tracker(self, value: Any) -> VariableTracker:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if type(value) is list:
            return ListVariable([self.tracker(item) for item in value], mutation_type=ValueMutationNew())
        if type(value) is tuple:
            return TupleVariable([self.tracker(item) for item in value])
        return VariableTracker.build(self._tx, value)

    def _tensor(self, tensor: torch.Tensor) -> VariableTracker:
        if id(tensor) not in self._inputs:
            mark_static_address(tensor, guard=True)
        source = self._sources.get(id(tensor))
        if source is None:  # a tensor of the optimizer that is not in its state
            name = self._tx.store_global_weakref_by_id(GLOBAL_KEY_PREFIX, tensor)
            source = GlobalWeakRefSource(name)
            self.held.add(id(tensor))
        tracker = VariableTracker.build(self._tx, tensor, source)
        if id(tensor) not in self._inputs and type(tensor) in (torch.Tensor, torch.nn.Parameter):
            # Dynamo guards the identity of attributes only, and does not notice another dtype, shape or device.
            install_guard(source.make_guard(GuardBuilder.TENSOR_MATCH))
        return tracker


def has_numbers(*values: Any) -> bool:
    """Return whether the values contain a number other than a bool, which a graph would hold as a constant."""
    return any(
        isinstance(leaf, (int, float, complex)) and not isinstance(leaf, bool) for leaf in tree_leaves(values)
    )


def release_with(optimizer: torch.optim.Optimizer, tx: InstructionTranslatorBase, held: set[int]) -> None:
    """Make the graph that is being traced drop the tensors with these ids once the optimizer is freed."""
    context = tx.output.tracing_context

    def when_traced(module: torch.fx.GraphModule) -> None:
        names = [name for name, tensor in _tensors_of(module) if id(tensor) in held]
        weakref.finalize(optimizer, _release, weakref.ref(module), names, context)

    tx.output.add_graph_finalizer(when_traced)


def _tensors_of(module: torch.fx.GraphModule) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_buffers()
    yield from module.named_parameters()


def _release(module_ref: weakref.ref[torch.fx.GraphModule], names: list[str], context: Any) -> None:
    module = module_ref()
    if module is not None:
        for name in names:
            module._buffers.pop(name, None)
            module._parameters.pop(name, None)
    # Backends keep references too, with which they call the graph.
    for params in (context.params_flat, context.params_flat_unwrap_subclasses):
        if params:
            params.clear()
