"""What goes into an optimizer's `_init_group` and comes out of it: trackers, and the values that they track."""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._dynamo.decorators import mark_static_address
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import GlobalWeakRefSource, Source
from torch._dynamo.utils import GLOBAL_KEY_PREFIX
from torch._dynamo.variables.base import ValueMutationNew, VariableTracker
from torch._dynamo.variables.lists import ListVariable, TupleVariable
from torch.utils._pytree import tree_leaves


class NotReal(Exception):
    """An argument that traced code computes, and that has no value yet."""


class Arguments:
    """The real arguments of a call: constants, the groups themselves, and an empty list for each empty list."""

    def __init__(
        self,
        groups: Mapping[Source, dict[str, Any]],
        args: Sequence[VariableTracker],
        kwargs: Mapping[str, VariableTracker],
    ) -> None:
        self._groups = groups
        self._lists: dict[int, tuple[ListVariable, list[Any]]] = {}
        self.groups: list[dict[str, Any]] = []
        self.args = [self._real(arg) for arg in args]
        self.kwargs = {name: self._real(arg) for name, arg in kwargs.items()}

    @property
    def lists(self) -> list[tuple[ListVariable, list[Any]]]:
        """Each list once, as a tracker and as it was filled."""
        return list(self._lists.values())

    def _real(self, arg: VariableTracker) -> Any:
        arg = arg.realize()
        if isinstance(arg, ListVariable):
            if arg.items:  # what is in it may be a tensor of the graph, or grow with every call
                raise NotReal
            return self._lists.setdefault(id(arg), (arg, []))[1]
        if arg.source is not None and arg.source in self._groups:
            self.groups.append(self._groups[arg.source])
            return self.groups[-1]
        if arg.is_python_constant():
            return arg.as_python_constant()
        raise NotReal


class Collected:
    """Makes trackers of what was collected; `sources` says by id where Dynamo finds a tensor again."""

    def __init__(self, tx: Any, sources: Mapping[int, Source], gradients: frozenset[int]) -> None:
        self._tx, self._sources, self._gradients = tx, sources, gradients
        # Those that a graph holds as its own, and not as its inputs.
        self.held = {key for key in sources if key not in gradients}

    def tracker(self, value: Any) -> VariableTracker:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if type(value) is list:
            return ListVariable([self.tracker(item) for item in value], mutation_type=ValueMutationNew())
        if type(value) is tuple:
            return TupleVariable([self.tracker(item) for item in value])
        return VariableTracker.build(self._tx, value)

    def _tensor(self, tensor: torch.Tensor) -> VariableTracker:
        if id(tensor) not in self._gradients:
            mark_static_address(tensor, guard=True)
        source = self._sources.get(id(tensor))
        if source is None:  # the optimizer's own, kept somewhere else than in its state
            name = self._tx.store_global_weakref_by_id(GLOBAL_KEY_PREFIX, tensor)
            source = GlobalWeakRefSource(name)
            self.held.add(id(tensor))
        tracker = VariableTracker.build(self._tx, tensor, source)
        if type(tensor) in (torch.Tensor, torch.nn.Parameter):
            # Identity alone would let a graph of another dtype, shape or device write to it.
            install_guard(source.make_guard(GuardBuilder.TENSOR_MATCH))
        return tracker


def has_numbers(*values: Any) -> bool:
    """Whether a number is in there, which a graph would hold as a constant; truth values are none."""
    return any(
        isinstance(leaf, (int, float, complex)) and not isinstance(leaf, bool) for leaf in tree_leaves(values)
    )


def release_with(optimizer: torch.optim.Optimizer, tx: Any, held: set[int]) -> None:
    """Once the optimizer is gone, have the graph that is being traced let go of the tensors with these ids."""
    context = tx.output.tracing_context

    def when_traced(module: torch.fx.GraphModule) -> None:
        names = [name for name, tensor in _tensors_of(module) if id(tensor) in held]
        weakref.finalize(optimizer, _release, weakref.ref(module), names, context)

    tx.output.add_graph_finalizer(when_traced)


def _tensors_of(module: torch.fx.GraphModule) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_buffers()
    yield from module.named_parameters()


def _release(module_ref: "weakref.ref[torch.fx.GraphModule]", names: list[str], context: Any) -> None:
    module = module_ref()
    if module is not None:
        for name in names:
            module._buffers.pop(name, None)
            module._parameters.pop(name, None)
    # Copies that the backends below Dynamo keep to call the graph with.
    for kept in (context.params_flat, context.params_flat_unwrap_subclasses):
        if kept:
            kept.clear()
