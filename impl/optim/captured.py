"""`capture`: optimizer steps without the work that is the same in every step.

The optimizer stays the same object and keeps torch's `step`, so that hooks, closures, schedulers, the profiler and a
scaler's attributes work as before. Only `_init_group` is replaced, which `step` calls for each group. It returns cached
lists (`impl.optim._list_cache`). For a group with a fused implementation it does the update itself, by one operator or
on an accelerator by a graph (`impl.optim._graphed_update`), and leaves `step` nothing to do.
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
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from impl._after_dynamo import import_after_dynamo
from impl.kernels import dynamo_disable, is_profiled, span
from impl.optim._fused_operators import rule_for, step_bucket
from impl.optim._graphed_update import Backoff, GraphedUpdate
from impl.optim._implementation import Implementation, choose, implementation_of
from impl.optim._list_cache import GroupLists, ListCache, plain_init_group, reason_not_cacheable
from impl.optim._local_lists import has_local_update, local_lists
from impl.optim._optimizers import check_is_optimizer

# After lists have changed in _RESTLESS consecutive steps, caching does not pay: the next _PAUSE steps are eager.
_RESTLESS, _PAUSE = 4, 16
# Lists of a group that are kept for other sets of parameters with a gradient, which may come again.
_SPARES = 3

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)


@dataclass(frozen=True)
class GraphExplanation:
    """Whether a step is replayed from graphs, and the reason."""

    replayed: bool  # whether the last step was replayed completely
    reason: str  # the reason against it, or for the last capture
    captures: int = 0  # number of graphs captured since graphs were requested

    def __str__(self) -> str:
        if not self.replayed:
            return f"no graph: {self.reason}"
        times = f"{self.captures} capture{'' if self.captures == 1 else 's'}"
        return f"replayed from a graph: {times}, the last one because {self.reason}"


@dataclass(frozen=True)
class Explanation:
    """The implementation of an optimizer's step, and the reason for it."""

    captured: bool
    # "fused", "foreach" or "single". A plain optimizer with this implementation gives bit-identical results.
    implementation: str
    reason: str  # the reason against capturing, or for the last build of lists
    builds: int = 0  # number of times that a group's lists were built
    graph: GraphExplanation | None = None  # graphs, if they were requested
    # Whether Dynamo, which keeps lists of its own, traced the last step.
    compiled: bool = False

    def __str__(self) -> str:
        if self.compiled:
            return f"compiled, {self.implementation}: {self.reason}"
        if not self.captured:
            return f"eager, {self.implementation}: {self.reason}"
        times = f"{self.builds} build{'' if self.builds == 1 else 's'} of lists"
        graph = "" if self.graph is None else f"; {self.graph}"
        return f"captured, {self.implementation}: {times}, the last one because {self.reason}{graph}"


class _GroupUpdate(NamedTuple):
    """The update of a group."""

    steps: list[Callable[..., None]] | None  # a function for each bucket; None: torch's own
    graphed: list[GraphedUpdate]  # updates that use graphs
    is_sharded: bool = False  # whether the local tensors of DTensors are updated


class _Capture:
    """Replacement of an optimizer's `_init_group`. It holds the optimizer weakly, so that it does not keep it alive."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.list_cache = ListCache(optimizer)
        self.wants_graphs = False
        self.pause = 0  # number of further steps that are eager
        self._pausing = False
        self.compiled = False  # whether Dynamo traced the last step
        # By the indices of a group and of a bucket in it, because loading a state replaces the groups.
        self._backoffs: defaultdict[tuple[int | None, int], Backoff] = defaultdict(Backoff)

    def __reduce__(self) -> tuple[Any, ...]:
        """Support optimizers that copy or pickle their whole `__dict__`: the new one is captured, with empty caches."""
        return type(self), (self._optimizer(),), {"wants_graphs": self.wants_graphs}

    @dynamo_disable
    def __call__(self, group: dict[str, Any], *lists: list[object]) -> Any:
        optimizer = self._optimizer()
        assert optimizer is not None
        self.compiled = TracingContext.try_get() is not None
        if self.compiled or ((self.pause or self._pausing) and self._pauses(optimizer, group)):
            return plain_init_group(optimizer)(group, *lists)
        if is_profiled():
            with span("impl.optim.capture", type(optimizer).__name__):
                return self._captured(optimizer, group, lists)
        return self._captured(optimizer, group, lists)

    def _captured(self, optimizer: Optimizer, group: dict[str, Any], lists: tuple[list[object], ...]) -> Any:
        # A graph needs counters that stay where they are.
        self.list_cache.most_spares = 0 if self.wants_graphs else _SPARES
        group_lists = self.list_cache.group(group)
        if group_lists.consecutive_changes >= _RESTLESS:
            self.pause = _PAUSE
        try:
            self._run(optimizer, group_lists, lists)
        finally:
            group_lists.release_gradients()
        return group_lists.returned

    def _pauses(self, optimizer: Optimizer, group: dict[str, Any]) -> bool:
        if group is optimizer.param_groups[0]:
            self._pausing = self.pause > 0
            if self._pausing:
                self.pause -= 1
                self.list_cache.forget(f"none were cached in the {_PAUSE} steps before")
        return self._pausing

    def _run(self, optimizer: Optimizer, group_lists: GroupLists, lists: tuple[list[object], ...]) -> None:
        if group_lists.attached is None:
            group_lists.attached = self._choose(optimizer, group_lists)
        steps = group_lists.attached.steps
        updated = group_lists.lists
        if group_lists.attached.is_sharded and (updated := local_lists(group_lists)) is not None:
            # torch's steps increment the counters of the DTensors.
            increment_version(group_lists.params)
        if steps is None or updated is None:
            for tensors, cached in zip(lists, updated or group_lists.lists, strict=True):
                tensors.extend(cached)
            return
        grad_scale, found_inf = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
        for bucket, step in zip(group_lists.buckets, steps, strict=True):
            if group_lists.guards_have_held and group_lists.may_pack:
                bucket.counters.pack()
            step(group_lists.group, grad_scale, found_inf)

    def _choose(self, optimizer: Optimizer, group_lists: GroupLists) -> _GroupUpdate:
        is_sharded = has_local_update(optimizer, group_lists)
        lists = (local_lists(group_lists) if is_sharded else None) or group_lists.lists
        rule = rule_for(optimizer, group_lists.group, lists)
        if rule is None:
            # `SGD.step` stores new momenta from the lists, so they must be DTensors.
            return _GroupUpdate(None, [], is_sharded and not group_lists.group.get("momentum"))
        if self.wants_graphs and not is_sharded:
            places = {id(group): place for place, group in enumerate(optimizer.param_groups)}
            place = places.get(id(group_lists.group))
            graphed = [
                GraphedUpdate(rule, bucket, optimizer, self._backoffs[place, number])
                for number, bucket in enumerate(group_lists.buckets)
            ]
            return _GroupUpdate([update.step for update in graphed], graphed)
        return _GroupUpdate(
            [
                functools.partial(step_bucket, rule, bucket, is_sharded=is_sharded)
                for bucket in group_lists.buckets
            ],
            [],
            is_sharded,
        )

    def want_graphs(self, wants: bool) -> None:
        if wants != self.wants_graphs:
            self.wants_graphs = wants
            self._backoffs.clear()
            self.list_cache.forget("graphs were asked for" if wants else "graphs are not wanted any more")

    def graphed(self) -> list[GraphedUpdate] | None:
        """Return the updates of all buckets that use graphs, or None if a group can use none."""
        updates = [
            group_lists.attached for group_lists in self.list_cache.kept() if group_lists.attached is not None
        ]
        if any(update.steps is None or update.is_sharded for update in updates):
            return None
        return [graphed for update in updates for graphed in update.graphed]


class _Eager(NamedTuple):
    """Record of an optimizer that `capture` left eager."""

    reason: str
    wants_graphs: bool


_EAGER: weakref.WeakKeyDictionary[Optimizer, _Eager] = weakref.WeakKeyDictionary()
_NOT_CAPTURED = GraphExplanation(False, "the whole step is eager")
_COMPILED = "Dynamo traced its last step and keeps lists of its own; an eager step is captured again"


def capture(
    optimizer: AnyOptimizer, *, implementation: Implementation | None = None, graph: bool | None = None
) -> AnyOptimizer:
    """Cache the tensor lists that an optimizer's `step` builds, so that later steps only check for changes.

    Results are bit-identical to those of the same optimizer without `capture`. With `graph=True` on an accelerator they
    are those of an optimizer with float32 tensors on the device as learning rates. Every step checks which gradients
    are None, types, dtypes, layouts, the state and the groups. After a change the lists are built again, which takes
    microseconds for each parameter. Lists for the last four sets of parameters with a gradient are kept. Learning rates
    and other numbers of the groups may change freely.

    Adam, AdamW, Adagrad, and SGD without momentum update the local tensors of DTensors. With these optimizers DTensors
    may be on several meshes. They may also be beside plain tensors, which torch's foreach and fused steps refuse.

    Args:
        optimizer: any optimizer. Those of `torch.optim` that build lists are captured. Others stay as they are, with a
            warning; `explain` has the reason.
        implementation: "fused", "foreach" or "single": switch to this implementation, as if built with it.
        graph: on an accelerator, replay fused updates from a graph while parameters, gradients and states keep their
            addresses. Call `zero_grad(set_to_none=False)` so that gradients do. Other steps are eager, and `explain`
            has the reason. Needs CUDA, or torch's generic graphs (2.13). A changed learning rate is read as float32.
            After a change of any other number at least one step is eager. No effect on the CPU. None keeps the current
            setting, at first False.
    Returns:
        The same optimizer. A copied or unpickled one is a plain optimizer: capture it again. (With a subclass whose
            `__getstate__` returns all attributes it is captured.)
    Raises:
        TypeError: the argument is not an optimizer.
        ValueError: the optimizer does not have the implementation.
        RuntimeError, ValueError: raised by its class if built with the implementation.
    Sync: none beyond the optimizer's own. Collectives: none.

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
    check_is_optimizer(optimizer)
    if implementation is not None:
        choose(optimizer, implementation)
    if not is_captured(optimizer):
        previous = _EAGER.pop(optimizer, None)
        if graph is None and previous is not None:
            graph = previous.wants_graphs
        if (reason := _reason_not_to_capture(optimizer)) is not None:
            _EAGER[optimizer] = _Eager(reason, bool(graph))
            if previous is None or previous.reason != reason:
                # stacklevel: the caller of capture.
                warnings.warn(f"nothing is captured, and the step stays as it is: {reason}", stacklevel=2)
            return optimizer
        optimizer.__dict__["_init_group"] = _Capture(optimizer)
    if graph is not None:
        _capture_of(optimizer).want_graphs(graph)
    return optimizer


def _reason_not_to_capture(optimizer: Optimizer) -> str | None:
    if "_init_group" in vars(optimizer):
        return "its _init_group was replaced by other code"
    return reason_not_cacheable(optimizer)


def release(optimizer: AnyOptimizer) -> AnyOptimizer:
    """Undo `capture`. An optimizer that is not captured is left as it is."""
    check_is_optimizer(optimizer)
    if is_captured(optimizer):
        del optimizer.__dict__["_init_group"]
    _EAGER.pop(optimizer, None)
    return optimizer


def is_captured(optimizer: Optimizer) -> bool:
    return isinstance(vars(optimizer).get("_init_group"), _Capture)


def _capture_of(optimizer: Optimizer) -> _Capture:
    return vars(optimizer)["_init_group"]


def explain(optimizer: Optimizer) -> Explanation:
    """Return how an optimizer's last step was done, and the reason. `print` shows it in one line.

    Steps that Dynamo has compiled are not seen. The result is that of the last other step.
    """
    check_is_optimizer(optimizer)
    implementation = implementation_of(optimizer)
    if not is_captured(optimizer):
        eager = _EAGER.get(optimizer, _Eager("capture was not called", wants_graphs=False))
        graph = _NOT_CAPTURED if eager.wants_graphs else None
        return Explanation(False, implementation, eager.reason, graph=graph)
    captured = _capture_of(optimizer)
    list_cache = captured.list_cache
    graph = _explain_graph(captured, implementation) if captured.wants_graphs else None
    if captured.compiled:
        return Explanation(False, implementation, _COMPILED, list_cache.builds, graph, compiled=True)
    if captured.pause:
        reason = f"its lists changed {_RESTLESS} times in succession, the last time because {list_cache.build_reason}"
        reason += f"; it is tried again after {captured.pause} steps"
        return Explanation(False, implementation, reason, list_cache.builds, graph)
    if any(update.reads_settings for update in captured.graphed() or ()):
        implementation += ", lr a float32 on the device"
    return Explanation(True, implementation, list_cache.build_reason, list_cache.builds, graph)


def _explain_graph(captured: _Capture, implementation: str) -> GraphExplanation:
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
        return GraphExplanation(False, "a group's tensors or numbers are not plain")
    if not graphed:
        if captured.list_cache.kept():
            return GraphExplanation(False, "no parameter had a gradient")
        return GraphExplanation(False, "there was no step since graphs were asked for")
    captures = sum(update.captures for update in graphed)
    reported = next((update for update in graphed if not update.replayed), graphed[0])
    return GraphExplanation(reported.replayed, reported.reason, captures)


import_after_dynamo("impl.dynamo.captured")
