"""Fused update of a bucket, replayed from a graph while nothing changes that the graph holds as a constant.

A graph holds addresses and numbers as constants. Learning rate, `grad_scale` and `found_inf` are read from its
settings, tensors that are filled before each replay (the learning rate only if it has changed). Everything else is
compared in every step: addresses, shapes and strides of parameters, gradients and states; the group's other values;
whether there are `grad_scale` and `found_inf`; and the stream, to which the settings' memory belongs. torch's fused
operators only read the learning rate from a tensor, so another beta or weight decay needs another graph.

A step after a change runs the same operators eagerly, which is also the warm-up for a capture. The graph is captured if
nothing has changed since then, and replayed at once, because a capture runs nothing. So addresses that change in every
step, like those of gradients set to None, cost comparisons but no captures. If a graph is dropped before it was worth
its capture, the next one waits for twice as many steps without a change. That number outlives the bucket's lists.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._dynamo.guards import TensorGuards
from torch.optim import Optimizer

from impl.kernels import Rule, copy_into_, is_capturing, tensor_guards
from impl.optim._fused_operators import step_bucket
from impl.optim._graphs import Graph, capture_graph, graphs_for
from impl.optim._list_cache import Bucket

_WORTHWHILE_REPLAYS = 8  # fewest replays that pay for a capture
# Dtypes that compute in float32, in which the device reads the learning rate.
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class ReplayConditions(NamedTuple):
    """Conditions for replaying a bucket's update from a graph in this step."""

    device: str
    has_graphs: bool  # whether the device supports graphs
    dtype: torch.dtype
    is_on_one_device: bool  # whether every tensor is on that device
    is_inference: bool
    is_watched: bool  # whether a TorchDispatchMode is active
    is_capturing: bool  # whether the user captures the whole step


def reason_for_eager(conditions: ReplayConditions) -> str | None:
    """Return the first reason against a replay, or None."""
    if not conditions.has_graphs:
        return f"its parameters are on {conditions.device}, for which this torch has no graphs"
    if conditions.dtype not in _DTYPES:
        return f"a graph reads the learning rate in float32, too coarse for parameters of {conditions.dtype}"
    if not conditions.is_on_one_device:
        return f"a state or gradient of its parameters is not on {conditions.device}"
    if conditions.is_inference:
        return "inference mode is on"
    if conditions.is_watched:
        return "a TorchDispatchMode is active, which would not see what a graph does"
    if conditions.is_capturing:
        return "the user is capturing the step in another graph"
    return None


class GraphedSettings:
    """Tensors that a graph reads in each replay."""

    def __init__(self, device: torch.device, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
        self.lr = torch.empty((), dtype=torch.float32, device=device)
        self.grad_scale = None if grad_scale is None else torch.empty_like(grad_scale, device=device)
        self.found_inf = None if found_inf is None else torch.empty_like(found_inf, device=device)
        self._lr: float | None = None

    def fill(self, lr: float, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
        """Fill the tensors in the current stream. Sync: none."""
        if lr != self._lr:
            self.lr.fill_(lr)
            self._lr = lr
        for setting, value in ((self.grad_scale, grad_scale), (self.found_inf, found_inf)):
            if setting is not None and value is not None:
                copy_into_(setting, value)


@dataclass
class Backoff:
    """Schedule of a bucket's captures, which depends on the use of earlier graphs. It outlives the bucket's lists."""

    patience: int = 1  # number of steps without a change before a capture
    captures: int = 0
    replays: int | None = None  # replays of the current graph

    def has_captured(self) -> None:
        self.captures += 1
        self.replays = 0

    def has_replayed(self) -> None:
        assert self.replays is not None
        self.replays += 1

    def has_changed(self) -> None:
        if self.replays is not None:
            self.patience = 1 if self.replays >= _WORTHWHILE_REPLAYS else 2 * self.patience
            self.replays = None


class _GraphConstants(NamedTuple):
    """Constants of a graph, except shapes and strides."""

    values: dict[str, object]
    scaling: tuple[object, object]  # types, shapes and dtypes of `grad_scale` and `found_inf`
    stream: object
    pointers: list[int]


class GraphedUpdate:
    """Update of one bucket, by a graph if possible."""

    def __init__(self, rule: type[Rule], bucket: Bucket, optimizer: Optimizer, backoff: Backoff) -> None:
        self._rule, self._bucket, self._backoff = rule, bucket, backoff
        self._setting_names = [name for name in optimizer.defaults if name != "lr"]
        self._graphs = graphs_for(bucket.device)
        self._is_on_one_device = all(tensor.device == bucket.device for tensor in bucket.tensors())
        self._constants: _GraphConstants | None = None
        self._settings: GraphedSettings | None = None
        self._guards: TensorGuards | None = None  # set together with the graph
        self._graph: Graph | None = None
        self._unchanged_steps = 0  # number of steps since the last change
        self._change = ""  # description of the last change
        self._reason_for_eager: str | None = None

    def step(self, group: dict[str, Any], grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
        self._reason_for_eager = reason_for_eager(self._conditions())
        if self._reason_for_eager is not None:
            step_bucket(self._rule, self._bucket, group, grad_scale, found_inf)
            return
        # Before a capture, because packing changes the counters' addresses.
        self._bucket.counters.pack()
        settings = self._follow_changes(group, grad_scale, found_inf)
        settings.fill(group["lr"], grad_scale, found_inf)
        if self._graph is None and self._unchanged_steps >= self._backoff.patience:
            self._capture(group, settings)
        if self._graph is None:
            self._run_operators(group, settings)
        else:
            self._graph.replay()
            self._backoff.has_replayed()
        self._unchanged_steps += 1

    @property
    def reads_settings(self) -> bool:
        """Whether the last step read its learning rate from the settings."""
        return self._reason_for_eager is None

    @property
    def replayed(self) -> bool:
        return self._reason_for_eager is None and self._graph is not None

    @property
    def captures(self) -> int:
        return self._backoff.captures

    @property
    def reason(self) -> str:
        """Reason why the last step was not a replay, or why the replayed graph was captured."""
        if self._reason_for_eager is not None or self._graph is not None:
            return self._reason_for_eager or self._change
        left = self._backoff.patience + 1 - self._unchanged_steps
        more = "the next step brings" if left == 1 else f"{left} more steps bring"
        return f"{self._change}; a graph is captured when {more} no change"

    def _conditions(self) -> ReplayConditions:
        return ReplayConditions(
            device=self._bucket.device.type,
            has_graphs=self._graphs is not None,
            dtype=self._bucket.dtype,
            is_on_one_device=self._is_on_one_device,
            is_inference=torch.is_inference_mode_enabled(),
            is_watched=torch._C._len_torch_dispatch_stack() > 0,
            is_capturing=is_capturing(self._bucket.device),
        )

    def _follow_changes(
        self, group: dict[str, Any], grad_scale: Tensor | None, found_inf: Tensor | None
    ) -> GraphedSettings:
        """Drop the graph if one of its constants has changed. Return the settings for it, or for the next graph."""
        assert self._graphs is not None
        constants = _GraphConstants(
            {name: _frozen(group.get(name)) for name in self._setting_names},
            (_type_shape_dtype(grad_scale), _type_shape_dtype(found_inf)),
            self._graphs.current_stream(),
            [*map(Tensor.data_ptr, self._bucket.tensors())],
        )
        change = self._first_change(constants)
        if change is None:
            assert self._settings is not None
            return self._settings
        self._backoff.has_changed()
        self._graph = self._guards = None
        self._unchanged_steps = 0
        self._change = change
        previous, self._constants = self._constants, constants
        if previous is None or (previous.scaling, previous.stream) != (constants.scaling, constants.stream):
            self._settings = GraphedSettings(self._bucket.device, grad_scale, found_inf)
        assert self._settings is not None
        return self._settings

    def _first_change(self, constants: _GraphConstants) -> str | None:
        previous = self._constants
        if previous is None:
            return "its lists are new"
        if constants.values != previous.values:
            names = [name for name in self._setting_names if constants.values[name] != previous.values[name]]
            return f"the group's {', '.join(names)} changed"
        if constants.scaling != previous.scaling:
            return "grad_scale or found_inf has another type, shape or dtype"
        if constants.stream != previous.stream:
            return "the current stream is another one"
        if constants.pointers != previous.pointers:
            return f"{self._first_moved(previous.pointers, constants.pointers)} has other memory"
        if self._guards is not None and not self._guards.check(*self._bucket.tensors()):
            return self._failed_guard(self._guards)
        return None

    def _failed_guard(self, guards: TensorGuards) -> str:
        names = self._bucket.tensor_names()
        return str(guards.check_verbose(*self._bucket.tensors(), tensor_check_names=names)).splitlines()[0]

    def _first_moved(self, before: list[int], after: list[int]) -> str:
        moved = next(index for index, (old, new) in enumerate(zip(before, after, strict=True)) if old != new)
        return self._bucket.tensor_names()[moved]

    def _capture(self, group: dict[str, Any], settings: GraphedSettings) -> None:
        assert self._graphs is not None
        self._guards = tensor_guards([*self._bucket.tensors()])
        self._graph = capture_graph(self._graphs, lambda: self._run_operators(group, settings))
        self._backoff.has_captured()

    def _run_operators(self, group: dict[str, Any], settings: GraphedSettings) -> None:
        on_device = {**group, "lr": settings.lr}
        step_bucket(self._rule, self._bucket, on_device, settings.grad_scale, settings.found_inf)


def _frozen(value: object) -> object:
    """Return an immutable copy of a list, such as betas, or the value itself."""
    return tuple(value) if isinstance(value, list) else value


def _type_shape_dtype(value: Tensor | None) -> object:
    return None if value is None else (type(value), value.shape, value.dtype)
