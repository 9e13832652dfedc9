"""`capture`: the step of an optimizer, without the work that is the same in every step.

The optimizer stays the object that it is, and its `step` stays torch's: hooks, closures, schedulers, the profiler and a
scaler's attributes are served by the code that always served them. What is replaced is `_init_group`, which `step`
calls for each group. It gives the lists that are kept (`impl.optim._list_cache`), or, for a group whose implementation
is fused, does the update by one operator, or on an accelerator by a graph (`impl.optim._graphed_update`), and leaves
`step` nothing to do.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from torch._guards import TracingContext
from torch.optim import Optimizer

from impl._after_dynamo import import_after_dynamo
from impl.kernels import dynamo_disable, is_profiled, span
from impl.optim._fused_operators import rule_for, step_bucket
from impl.optim._graphed_update import Backoff, GraphedUpdate
from impl.optim._implementation import Implementation, choose, implementation_of
from impl.optim._list_cache import GroupLists, ListCache, cannot_cache_lists, plain_init_group
from impl.optim._refusals import refuse_other_types

# Lists that have changed in so many steps in succession are not worth it: so many steps are eager then.
_RESTLESS, _PAUSE = 4, 16

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)


@dataclass(frozen=True)
class GraphExplanation:
    """Whether a step is replayed from graphs, and why so."""

    replayed: bool  # the whole of the last step was
    reason: str  # why it was not, or why a graph was last captured
    captures: int = 0  # how often a graph was captured since graphs were asked for

    def __str__(self) -> str:
        if not self.replayed:
            return f"no graph: {self.reason}"
        times = f"{self.captures} capture{'' if self.captures == 1 else 's'}"
        return f"replayed from a graph: {times}, the last one because {self.reason}"


@dataclass(frozen=True)
class Explanation:
    """How an optimizer's step is done, and why so."""

    captured: bool
    implementation: (
        str  # "fused", "foreach" or "single": built with it, a plain optimizer gives the same bits
    )
    reason: str  # why it is not captured, or why its lists were last built
    builds: int = 0  # how often the lists of a group were built
    graph: GraphExplanation | None = None  # None where none was asked for
    compiled: bool = False  # Dynamo was the last to ask for lists, and keeps its own

    def __str__(self) -> str:
        if self.compiled:
            return f"compiled, {self.implementation}: {self.reason}"
        if not self.captured:
            return f"eager, {self.implementation}: {self.reason}"
        times = f"{self.builds} build{'' if self.builds == 1 else 's'} of lists"
        graph = "" if self.graph is None else f"; {self.graph}"
        return f"captured, {self.implementation}: {times}, the last one because {self.reason}{graph}"


class _Chosen(NamedTuple):
    """How a group is updated."""

    steps: list[Callable[..., None]] | None  # a bucket each; None where torch's own function does it
    graphed: list[GraphedUpdate]  # of these, where graphs were asked for


class _Capture:
    """Stands in an optimizer's place of `_init_group`; holds it weakly, so that it goes when its last user goes."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.list_cache = ListCache(optimizer)
        self.wants_graphs = False
        self.pause = 0  # for how many more steps no lists are kept
        self._pausing = False
        self.compiled = False  # Dynamo was the last to ask for lists
        # By the places of a group and of a bucket in it; a load puts other groups in these places.
        self._backoffs: defaultdict[tuple[int | None, int], Backoff] = defaultdict(Backoff)

    def __reduce__(self) -> tuple[Any, ...]:
        """For optimizers that copy or pickle their whole `__dict__`: what they make is captured, and begins anew."""
        return type(self), (self._optimizer(),), {"wants_graphs": self.wants_graphs}

    @dynamo_disable
    def __call__(self, group: dict[str, Any], *lists: list[Any]) -> Any:
        optimizer = self._optimizer()
        assert optimizer is not None
        self.compiled = TracingContext.try_get() is not None
        if self.compiled or ((self.pause or self._pausing) and self._pauses(optimizer, group)):
            return plain_init_group(optimizer)(group, *lists)
        if is_profiled():
            with span("impl.optim.capture", type(optimizer).__name__):
                return self._captured(optimizer, group, lists)
        return self._captured(optimizer, group, lists)

    def _captured(self, optimizer: Optimizer, group: dict[str, Any], lists: tuple[list[Any], ...]) -> Any:
        group_lists = self.list_cache.group(group)
        if group_lists.changes_in_a_row >= _RESTLESS:
            self.pause = _PAUSE
        try:
            self._run(optimizer, group_lists, lists)
        finally:
            group_lists.let_go_of_gradients()
        return group_lists.returned

    def _pauses(self, optimizer: Optimizer, group: dict[str, Any]) -> bool:
        if group is optimizer.param_groups[0]:
            self._pausing = self.pause > 0
            if self._pausing:
                self.pause -= 1
                self.list_cache.forget(f"none were kept in the {_PAUSE} steps before")
        return self._pausing

    def _run(self, optimizer: Optimizer, group_lists: GroupLists, lists: tuple[list[Any], ...]) -> None:
        if group_lists.attached is None:
            group_lists.attached = self._chosen(optimizer, group_lists)
        steps = group_lists.attached.steps
        if steps is None:
            for expected, kept in zip(lists, group_lists.lists, strict=True):
                expected.extend(kept)
            return
        grad_scale, found_inf = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
        for bucket, step in zip(group_lists.buckets, steps, strict=True):
            if group_lists.replays:
                bucket.counters.join()
            step(group_lists.group, grad_scale, found_inf)

    def _chosen(self, optimizer: Optimizer, group_lists: GroupLists) -> _Chosen:
        rule = rule_for(optimizer, group_lists)
        if rule is None:
            return _Chosen(None, [])
        if self.wants_graphs:
            places = {id(group): place for place, group in enumerate(optimizer.param_groups)}
            place = places.get(id(group_lists.group))
            graphed = [
                GraphedUpdate(rule, bucket, optimizer, self._backoffs[place, number])
                for number, bucket in enumerate(group_lists.buckets)
            ]
            return _Chosen([each.step for each in graphed], graphed)
        return _Chosen([functools.partial(step_bucket, rule, bucket) for bucket in group_lists.buckets], [])

    def want_graphs(self, wants: bool) -> None:
        if wants != self.wants_graphs:
            self.wants_graphs = wants
            self._backoffs.clear()
            self.list_cache.forget("graphs were asked for" if wants else "graphs are not wanted any more")

    def graphed(self) -> list[GraphedUpdate] | None:
        """The updates that graphs were asked for, a bucket each; None if torch's own function does one."""
        chosen = [
            group_lists.attached for group_lists in self.list_cache.kept() if group_lists.attached is not None
        ]
        if any(each.steps is None for each in chosen):
            return None
        return [graphed for each in chosen for graphed in each.graphed]


class _Eager(NamedTuple):
    """What is known of an optimizer that `capture` was asked for and that stays eager."""

    reason: str
    wants_graphs: bool


_EAGER: weakref.WeakKeyDictionary[Optimizer, _Eager] = weakref.WeakKeyDictionary()
_NOT_CAPTURED = GraphExplanation(False, "the whole step is eager")
_COMPILED = "Dynamo was the last to trace it, and keeps lists of its own; an eager step is captured again"


def capture(
    optimizer: AnyOptimizer, *, implementation: Implementation | None = None, graph: bool | None = None
) -> AnyOptimizer:
    """Have an optimizer's `step` keep the lists that it would build anew each time, and do no more than has changed.

    Results are those of the same optimizer without it, to the bit; with `graph=True` on an accelerator, those of one
    whose learning rates are float32 tensors there. What it depends on is looked at in every step: a
    gradient that is None or not, types, dtypes, layouts, the state, the groups; if something has changed, the lists
    are built again, in microseconds a parameter. Learning rates and other numbers of the groups are read in every
    step, and may change freely.

    Args:
        optimizer: any optimizer. Those of `torch.optim` that build lists are captured; the others stay as they are, and
            a warning says why, as does `explain`.
        implementation: "fused", "foreach" or "single", in the place of the one that it was built with: everything is
            then as in an optimizer built so.
        graph: on CUDA, or another accelerator that has torch's generic graphs (2.13), replay a fused update from a
            graph, once parameters, gradients and states have stayed where they lie; so let gradients be kept, by
            `zero_grad(set_to_none=False)`. Where they move, steps are eager, and `explain` says what moved. Learning
            rates may change freely; the device reads them in float32, as it does those that are tensors. After a
            change of another number, of a beta or a weight decay too, a step or more are eager. On the CPU it changes
            nothing. It has not run on a GPU yet. None leaves it as it is: off, at first.
    Returns:
        The same optimizer. A copy of it, or what a pickle of it gives, is a plain optimizer; capture it again. (One of
            a subclass whose `__getstate__` gives all attributes is captured.)
    Raises:
        TypeError: it is no optimizer.
        ValueError: the optimizer has no such implementation.
        RuntimeError, ValueError: what its class raises when it is built with that implementation.
    Sync: none that the optimizer itself has not. Collectives: none.

    >>> import torch
    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = capture(torch.optim.AdamW(model.parameters()), implementation="fused")
    >>> for _ in range(3):
    ...     optimizer.zero_grad()
    ...     model(torch.ones(2, 4)).sum().backward()
    ...     optimizer.step()
    >>> print(explain(optimizer))
    captured, fused: 1 build of lists, the last one because it is the first step
    """
    refuse_other_types(optimizer)
    if implementation is not None:
        choose(optimizer, implementation)
    if not is_captured(optimizer):
        before = _EAGER.pop(optimizer, None)
        if graph is None and before is not None:
            graph = before.wants_graphs
        if (why := _why_not(optimizer)) is not None:
            _EAGER[optimizer] = _Eager(why, bool(graph))
            if before is None or before.reason != why:
                # stacklevel: the caller of capture.
                warnings.warn(f"nothing is captured, and the step stays as it is: {why}", stacklevel=2)
            return optimizer
        optimizer.__dict__["_init_group"] = _Capture(optimizer)
    if graph is not None:
        _capture_of(optimizer).want_graphs(graph)
    return optimizer


def _why_not(optimizer: Optimizer) -> str | None:
    if "_init_group" in vars(optimizer):
        return "somebody else has replaced its _init_group"
    return cannot_cache_lists(optimizer)


def release(optimizer: AnyOptimizer) -> AnyOptimizer:
    """Undo `capture`: the optimizer builds its lists anew in every step again. One not captured is left as it is."""
    refuse_other_types(optimizer)
    if is_captured(optimizer):
        del optimizer.__dict__["_init_group"]
    _EAGER.pop(optimizer, None)
    return optimizer


def is_captured(optimizer: Optimizer) -> bool:
    return isinstance(vars(optimizer).get("_init_group"), _Capture)


def _capture_of(optimizer: Optimizer) -> _Capture:
    return vars(optimizer)["_init_group"]


def explain(optimizer: Optimizer) -> Explanation:
    """How the step of an optimizer is done, and why so; printed, it is one line.

    Of the last step that asked for lists: what Dynamo has compiled asks for none, and runs unseen beside eager steps.
    """
    refuse_other_types(optimizer)
    implementation = implementation_of(optimizer)
    if not is_captured(optimizer):
        eager = _EAGER.get(optimizer, _Eager("capture was not called", wants_graphs=False))
        graph = _NOT_CAPTURED if eager.wants_graphs else None
        return Explanation(False, implementation, eager.reason, graph=graph)
    captured = _capture_of(optimizer)
    list_cache = captured.list_cache
    graph = _explained_graph(captured, implementation) if captured.wants_graphs else None
    if captured.compiled:
        return Explanation(False, implementation, _COMPILED, list_cache.builds, graph, compiled=True)
    if captured.pause:
        why = f"its lists changed {_RESTLESS} times in succession, the last time because {list_cache.because}"
        why += f"; it is tried again after {captured.pause} steps"
        return Explanation(False, implementation, why, list_cache.builds, graph)
    if any(each.reads_settings for each in captured.graphed() or ()):
        implementation += ", lr a float32 on the device"
    return Explanation(True, implementation, list_cache.because, list_cache.builds, graph)


def _explained_graph(captured: _Capture, implementation: str) -> GraphExplanation:
    graphed = captured.graphed()
    if captured.compiled:
        return GraphExplanation(False, "the whole step is compiled")
    if captured.pause:
        return _NOT_CAPTURED
    if implementation != "fused":
        return GraphExplanation(
            False, f"graphs are of fused updates, and its implementation is {implementation}"
        )
    if graphed is None:
        return GraphExplanation(
            False, "torch's own function updates a group: its tensors or numbers are not plain"
        )
    if not graphed:
        if captured.list_cache.kept():
            return GraphExplanation(False, "no parameter had a gradient")
        return GraphExplanation(False, "there was no step since graphs were asked for")
    captures = sum(each.captures for each in graphed)
    reported = next((each for each in graphed if not each.replayed), graphed[0])
    return GraphExplanation(reported.replayed, reported.reason, captures)


import_after_dynamo("impl.dynamo.captured")
