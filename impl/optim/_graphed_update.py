"""One bucket's fused update, replayed from a graph once what the graph would fix has stayed the same.

A graph fixes addresses and numbers. The learning rate, `grad_scale` and `found_inf` it reads from memory of its own,
its settings, which are filled before each replay; the learning rate only when it has changed. Everything else that it
fixes is compared in every step: where parameters, gradients and states lie, their shapes and strides, the group's other
values, which of `grad_scale` and `found_inf` there are, and the stream, which the settings' memory belongs to. torch's
fused operators take no number but the learning rate from the device's memory, so another beta or weight decay needs
another graph.

A step in which something has changed runs the same operators eagerly: that is the warm-up of what may be captured next.
The graph is captured when nothing has changed since, and replayed at once, since a capture runs nothing. So memory
that is never the same twice, as that of gradients set to None may be, costs comparisons and no captures. A graph that
was dropped before it was worth its capture doubles the number of steps without a change that the next one waits for,
also where it was dropped with the bucket's lists, as when a gradient comes and goes: that number outlives them.
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
from impl.optim._graphs import Graph, captured, graphs_for
from impl.optim._list_cache import Bucket

_WORTH = 8  # replays, of which each saves most of a step's launches
# The device reads a learning rate in float32, in which these compute.
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Facts(NamedTuple):
    """What decides whether a bucket's update may be replayed from a graph in this step."""

    device: str
    has_graphs: bool  # the device
    dtype: torch.dtype
    is_together: bool  # every tensor lies on that device
    is_inference: bool
    is_watched: bool  # a TorchDispatchMode is active
    is_capturing: bool  # by somebody else, who captures the whole step


def why_eager(facts: Facts) -> str | None:
    """Why it may not be, by the first of the reasons; None if it may."""
    if not facts.has_graphs:
        return f"its parameters are on {facts.device}, for which this torch has no graphs"
    if facts.dtype not in _DTYPES:
        return f"a graph reads the learning rate in float32, too coarse for parameters of {facts.dtype}"
    if not facts.is_together:
        return f"some of what belongs to its parameters is not on {facts.device}"
    if facts.is_inference:
        return "inference mode is on"
    if facts.is_watched:
        return "a TorchDispatchMode is active, which would not see what a graph does"
    if facts.is_capturing:
        return "the step is being captured in a graph of somebody else"
    return None


class GraphedSettings:
    """What a graph reads anew in each replay."""

    def __init__(self, device: torch.device, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
        self.lr = torch.empty((), dtype=torch.float32, device=device)
        self.grad_scale = None if grad_scale is None else torch.empty_like(grad_scale, device=device)
        self.found_inf = None if found_inf is None else torch.empty_like(found_inf, device=device)
        self._lr: float | None = None

    def fill(self, lr: float, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
        """In the current stream, without waiting for the device."""
        if lr != self._lr:
            self.lr.fill_(lr)
            self._lr = lr
        for mine, given in ((self.grad_scale, grad_scale), (self.found_inf, found_inf)):
            if mine is not None and given is not None:
                copy_into_(mine, given)


@dataclass
class Backoff:
    """When a bucket's next graph is captured, by what came of those before. It outlives the bucket's lists."""

    patience: int = 1  # for how many steps nothing may have changed before
    captures: int = 0
    replays: int | None = None  # of the graph that there is

    def has_captured(self) -> None:
        self.captures += 1
        self.replays = 0

    def has_replayed(self) -> None:
        assert self.replays is not None
        self.replays += 1

    def has_changed(self) -> None:
        if self.replays is not None:
            self.patience = 1 if self.replays >= _WORTH else 2 * self.patience
            self.replays = None


class _Fixed(NamedTuple):
    """What a graph fixes, but for shapes and strides."""

    values: dict[str, Any]
    scaling: tuple[Any, Any]
    stream: Any
    pointers: list[int]


class GraphedUpdate:
    """The update of one bucket."""

    def __init__(self, rule: type[Rule], bucket: Bucket, optimizer: Optimizer, backoff: Backoff) -> None:
        self._rule, self._bucket, self._backoff = rule, bucket, backoff
        self._names = [name for name in optimizer.defaults if name != "lr"]
        self._graphs = graphs_for(bucket.device)
        self._is_together = all(tensor.device == bucket.device for tensor in bucket.tensors())
        self._fixed: _Fixed | None = None
        self._settings: GraphedSettings | None = None
        self._guards: TensorGuards | None = None  # with the graph
        self._graph: Graph | None = None
        self._held = 0  # for how many steps nothing has changed
        self._change = ""  # the last one
        self._why_eager: str | None = None

    def step(self, group: dict[str, Any], grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
        self._why_eager = why_eager(self._facts())
        if self._why_eager is not None:
            step_bucket(self._rule, self._bucket, group, grad_scale, found_inf)
            return
        self._bucket.counters.join()  # now, since they lie elsewhere then, for which a graph would be captured anew
        settings = self._settings_for(group, grad_scale, found_inf)
        settings.fill(group["lr"], grad_scale, found_inf)
        if self._graph is None and self._held >= self._backoff.patience:
            self._capture(group, settings)
        if self._graph is None:
            self._work(group, settings)
        else:
            self._graph.replay()
            self._backoff.has_replayed()
        self._held += 1

    @property
    def reads_settings(self) -> bool:
        """Whether the last step took its learning rate from the settings."""
        return self._why_eager is None

    @property
    def replayed(self) -> bool:
        return self._why_eager is None and self._graph is not None

    @property
    def captures(self) -> int:
        return self._backoff.captures

    @property
    def reason(self) -> str:
        """Why the last step was no replay; of a replay, why its graph was captured."""
        if self._why_eager is not None or self._graph is not None:
            return self._why_eager or self._change
        left = self._backoff.patience + 1 - self._held
        more = "the next step brings" if left == 1 else f"{left} more steps bring"
        return f"{self._change}; a graph is captured when {more} no change"

    def _facts(self) -> Facts:
        return Facts(
            device=self._bucket.device.type,
            has_graphs=self._graphs is not None,
            dtype=self._bucket.dtype,
            is_together=self._is_together,
            is_inference=torch.is_inference_mode_enabled(),
            is_watched=torch._C._len_torch_dispatch_stack() > 0,
            is_capturing=is_capturing(self._bucket.device),
        )

    def _settings_for(
        self, group: dict[str, Any], grad_scale: Tensor | None, found_inf: Tensor | None
    ) -> GraphedSettings:
        """The settings; new ones, and no graph, if what a graph fixes has changed."""
        assert self._graphs is not None
        fixed = _Fixed(
            {name: _frozen(group.get(name)) for name in self._names},
            (_kind_of(grad_scale), _kind_of(found_inf)),
            self._graphs.current_stream(),
            [*map(Tensor.data_ptr, self._bucket.tensors())],
        )
        change = self._change_to(fixed)
        if change is None:
            assert self._settings is not None
            return self._settings
        self._backoff.has_changed()
        self._graph = self._guards = None
        self._held = 0
        self._change = change
        before, self._fixed = self._fixed, fixed
        if before is None or (before.scaling, before.stream) != (fixed.scaling, fixed.stream):
            self._settings = GraphedSettings(self._bucket.device, grad_scale, found_inf)
        assert self._settings is not None
        return self._settings

    def _change_to(self, fixed: _Fixed) -> str | None:
        before = self._fixed
        if before is None:
            return "its lists are new"
        if fixed.values != before.values:
            names = [name for name in self._names if fixed.values[name] != before.values[name]]
            return f"the group's {', '.join(names)} changed"
        if fixed.scaling != before.scaling:
            return "grad_scale or found_inf is of another kind"
        if fixed.stream != before.stream:
            return "the current stream is another one"
        if fixed.pointers != before.pointers:
            return f"{self._first_moved(before.pointers, fixed.pointers)} has other memory"
        if self._guards is not None and not self._guards.check(*self._bucket.tensors()):
            return self._objection(self._guards)
        return None

    def _objection(self, guards: TensorGuards) -> str:
        names = self._bucket.tensor_names()
        return str(guards.check_verbose(*self._bucket.tensors(), tensor_check_names=names)).splitlines()[0]

    def _first_moved(self, before: list[int], after: list[int]) -> str:
        moved = next(place for place, (old, new) in enumerate(zip(before, after, strict=True)) if old != new)
        return self._bucket.tensor_names()[moved]

    def _capture(self, group: dict[str, Any], settings: GraphedSettings) -> None:
        assert self._graphs is not None
        self._guards = tensor_guards([*self._bucket.tensors()], with_shapes=True, with_strides=True)
        self._graph = captured(self._graphs, lambda: self._work(group, settings))
        self._backoff.has_captured()

    def _work(self, group: dict[str, Any], settings: GraphedSettings) -> None:
        on_device = {**group, "lr": settings.lr}
        step_bucket(self._rule, self._bucket, on_device, settings.grad_scale, settings.found_inf)


def _frozen(value: Any) -> Any:
    """What cannot be changed in place, as a list of betas can."""
    return tuple(value) if isinstance(value, list) else value


def _kind_of(value: Tensor | None) -> Any:
    return None if value is None else (type(value), value.shape, value.dtype)
