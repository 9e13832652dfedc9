"""Sequences of calls on a model sharded by `fully_shard`, and what a rank observes after each call."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from conformance.distributed.fsdp.scenes.fully_shard_training import (
    Sharding,
    held,
    registered,
    reshard_all,
    sharded,
    units_of,
)
from conformance.distributed.fsdp.scenes.module_trees import ModuleTree, loss_of
from conformance.distributed.fsdp.scenes.module_trees import call as call_model
from conformance.distributed.fsdp.scenes.scene import FOUR_UNITS, tried
from conformance.judge.library import Library, load_library
from conformance.judge.outcome import Outcome, observe
from conformance.ranks import Rank

UNITS = 4
ROOT = UNITS


@dataclass(frozen=True)
class UnitCall:
    """A call of a unit's method or of a function in `_OF_THE_SCENE`.

    `name` is the method or the key in `_OF_THE_SCENE`. Units are numbered in the order in which they run, and the last
    number is the root.
    """

    name: str
    unit: int = ROOT
    arguments: Any = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.name}[{self.unit}]{self.arguments or ''}"


def play(
    rank: Rank, *, library: str, sharding: Sharding, calls: Sequence[UnitCall], tree: ModuleTree = FOUR_UNITS
) -> Outcome:
    """Run the calls. Return what the rank observed after each call, and what it holds at the end.

    The ranks wait for each other before every call, and before every unit computes.
    """
    loaded, model = load_library(library), tree.build()

    def run() -> dict[str, Any]:
        scene = CallScene(rank, loaded, sharded(rank, loaded, model, sharding), tree)
        observed = [scene.make(call) for call in calls]
        if scene.is_evaluated:
            reshard_all(model)
        return {"seen": observed, "held": held(model)}

    return observe(run)


class CallScene:
    """A sharded model, and the state that calls leave for later calls."""

    def __init__(self, rank: Rank, library: Library, model: Any, tree: ModuleTree) -> None:
        self.rank, self.library, self.model, self.tree = rank, library, model, tree
        self.units = [*reversed(units_of(model, "leaves")), model]
        # foreach is torch's default on an accelerator.
        self.optimizer = torch.optim.SGD(model.parameters(), 0.05, 0.5, foreach=True)
        inner = {id(p): number for number, unit in enumerate(self.units[:ROOT]) for p in unit.parameters()}
        self.unit_of = {id(p): inner.get(id(p), ROOT) for p in model.parameters()}
        self.unsynchronised: set[int] = set()  # units with gradient synchronisation switched off
        # Units whose gradients may be unreduced.
        self.waiting: set[int] = set()
        self.losses: list[torch.Tensor] = []
        self.handles: list[Any] = []
        self.reported: list[Any] = []
        self.event: Callable[[], Any] = lambda: None
        self._forwards = 0
        # Deviation fully_shard.written_after_evaluation: units may stay unsharded after an evaluation.
        self.is_evaluated = False
        for unit in self.units:
            unit.register_forward_pre_hook(_meet)
            unit.register_forward_hook(_meet_in_backward)

    def make(self, call: UnitCall) -> Any:
        dist.barrier()
        self.reported.clear()
        result = tried(lambda: self._made(call))
        self.is_evaluated = call.name == "look" or (self.is_evaluated and call.name != "forward")
        return {
            "call": str(call),
            "made": result,
            "reported": sorted(self.reported, key=str),  # the order of gathers and reductions may vary
            "keeps the event": self.event() is not None,
            # After a failed call, it is undefined which parameters are registered, until the state is reset.
            "registered": {} if call.name in _FAILING or self.is_evaluated else registered(self.model),
        }

    def _made(self, call: UnitCall) -> Any:
        if call.name in _OF_THE_SCENE:
            return _OF_THE_SCENE[call.name](self, call)
        arguments = {name: self._real(value) for name, value in call.arguments.items()}
        returned = getattr(self.units[call.unit], call.name)(**arguments)
        if call.name == "set_requires_gradient_sync":
            is_of_all = call.unit == ROOT and arguments.get("recurse", True)
            units = set(range(ROOT + 1)) if is_of_all else {call.unit}
            if arguments["requires_gradient_sync"]:
                self.unsynchronised -= units
            else:
                self.unsynchronised |= units
        if call.name == "finalize_backward":
            self.waiting &= self.unsynchronised
        if returned is not None:
            self.handles.append(returned)
            return isinstance(returned, getattr(self.library.distributed.fsdp, _HANDLES[call.name]))
        return None

    def _real(self, value: Any) -> Any:
        """Replace unit numbers by units, and names by the objects that they stand for."""
        if isinstance(value, list):
            return [self.units[number] if isinstance(number, int) else number for number in value]
        return _OBJECTS[value](self) if isinstance(value, str) and value in _OBJECTS else value

    def forward(self) -> torch.Tensor:
        batch = self.tree.batch(self._forwards, self.rank.rank)
        self._forwards += 1
        return loss_of(call_model(self.model, self.tree, batch))


_HANDLES = {"unshard": "UnshardHandle", "finalize_backward": "GradientReductionHandle"}
_FAILING = ("failing forward", "failing backward")


def _meet(*_: Any) -> None:
    dist.barrier()


def _meet_in_backward(unit: nn.Module, inputs: Any, output: torch.Tensor) -> None:
    if output.requires_grad:
        output.register_hook(lambda grad: dist.barrier())


# -- calls that are not methods


def _forward(scene: CallScene, call: UnitCall) -> torch.Tensor:
    scene.losses.append(scene.forward())
    return scene.losses[-1].detach()


def _look(scene: CallScene, call: UnitCall) -> torch.Tensor:
    with torch.no_grad():
        return scene.forward()


def _backward(scene: CallScene, call: UnitCall) -> int:
    """Run backward of the sum of all losses so far."""
    losses, scene.losses = scene.losses, []
    if losses:
        scene.waiting = set(scene.unsynchronised)
        torch.stack(losses).sum().backward()
    return len(losses)


def _failing_forward(scene: CallScene, call: UnitCall) -> None:
    """Run a forward in which a unit's pre-forward hook raises."""

    def fail(*_: Any) -> None:
        raise ArithmeticError("in a forward")

    handle = scene.units[call.unit].register_forward_pre_hook(fail)
    try:
        scene.forward()
    finally:
        handle.remove()


def _failing_backward(scene: CallScene, call: UnitCall) -> None:
    def fail(grad: torch.Tensor) -> None:
        raise ArithmeticError("in a backward")

    handle = scene.units[call.unit].register_forward_hook(lambda unit, inputs, output: _hooked(output, fail))
    try:
        scene.forward().backward()
    finally:
        handle.remove()


def _hooked(output: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
    output.register_hook(hook)


def _step(scene: CallScene, call: UnitCall) -> None:
    """Step only the parameters whose gradients are reduced. The clause `failures.waiting_step` covers the others."""
    group = scene.optimizer.param_groups[0]
    parameters = group["params"]
    group["params"] = [p for p in parameters if scene.unit_of[id(p)] not in scene.waiting]
    try:
        scene.optimizer.step()
    finally:
        group["params"] = parameters
    scene.optimizer.zero_grad()


def _step_of_shards(scene: CallScene, call: UnitCall) -> bool:
    """Reshard all units, then step.

    While units are unsharded, torch would continue with the weights from before the step. Do nothing between a forward
    and its backward, because no library has the forward's weights then.
    """
    if scene.losses:
        return False
    while scene.handles:
        scene.handles.pop(0).wait()
    for unit in scene.units:
        unit.reshard()
    _step(scene, call)
    return True


def _step_beside(scene: CallScene, call: UnitCall) -> None:
    """Step on a separate stream, if the device has streams.

    The model gets only the event of the step, by `set_post_optim_event`.
    """
    event: Any = _event(scene)
    if scene.rank.device.type == "cpu":
        scene.optimizer.step()
    else:
        beside = torch.Stream(scene.rank.device)
        beside.wait_stream(torch.accelerator.current_stream())
        with beside:
            scene.optimizer.step()
            event = beside.record_event()
    scene.model.set_post_optim_event(event)


def _zero_grad(scene: CallScene, call: UnitCall) -> None:
    scene.optimizer.zero_grad()


def _wait(scene: CallScene, call: UnitCall) -> Any:
    return scene.handles.pop(0).wait() if scene.handles else "no handle"


def _state_dict(scene: CallScene, call: UnitCall) -> list[str]:
    return list(scene.model.state_dict())


def _load(scene: CallScene, call: UnitCall) -> str:
    """Load a state dict with doubled parameters."""
    doubled = {name: value.detach() * 2 for name, value in scene.model.state_dict().items()}
    return str(scene.model.load_state_dict(doubled, **call.arguments))


def _convert(scene: CallScene, call: UnitCall) -> None:
    scene.model.to(call.arguments["dtype"])


def _skip_a_unit(scene: CallScene, call: UnitCall) -> torch.Tensor:
    """Run a forward and backward without one unit, on the ranks in `by` or on every rank."""
    unit, by = scene.units[call.unit], call.arguments.get("by")
    skips = by is None or scene.rank.rank in by
    original, unit.forward = unit.forward, (lambda x, *, ids: x * 1) if skips else unit.forward
    try:
        loss = scene.forward()
        loss.backward()
    finally:
        unit.forward = original
    return loss.detach()


_OF_THE_SCENE: dict[str, Callable[[CallScene, UnitCall], Any]] = {
    "forward": _forward,
    "look": _look,
    "backward": _backward,
    "failing forward": _failing_forward,
    "failing backward": _failing_backward,
    "step": _step,
    "step beside": _step_beside,
    "step of shards": _step_of_shards,
    "zero_grad": _zero_grad,
    "wait": _wait,
    "state_dict": _state_dict,
    "load": _load,
    "convert": _convert,
    "skip a unit": _skip_a_unit,
}


# -- objects that are passed to methods


class _Reporting:
    """User-defined communication that reports its arguments and then does what the default does."""

    def __init__(self, report: Callable[[list[Any]], object]) -> None:
        self._report = report

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self._report(["allocate", list(size), str(dtype), str(device)])
        return torch.empty(size, dtype=dtype, device=device)


class ReportingAllGather(_Reporting):
    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> Any:
        self._report(["gather", input_tensor.numel(), async_op])
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


class ReportingReduceScatter(_Reporting):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        self._report(["scatter", output_tensor.numel(), str(op), async_op])
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


def _doubling(scene: CallScene) -> Callable[[torch.Tensor], None]:
    def double(reduced: torch.Tensor) -> None:
        scene.reported.append(["hook", reduced.numel(), str(reduced.dtype)])
        reduced.mul_(2)

    return double


class _CpuEvent(torch.cpu.Event): ...


class _DeviceEvent(torch.Event): ...


def _event(scene: CallScene) -> Any:
    """Return an event for `set_post_optim_event`.

    The scene keeps only a weak reference, which shows whether the library still holds the event.
    """
    event = _CpuEvent() if scene.rank.device.type == "cpu" else _DeviceEvent(scene.rank.device)
    scene.event = weakref.ref(event)
    return event


_OBJECTS: dict[str, Callable[[CallScene], Any]] = {
    "an all-gather": lambda scene: ReportingAllGather(scene.reported.append),
    "a reduce-scatter": lambda scene: ReportingReduceScatter(scene.reported.append),
    "a doubling hook": _doubling,
    "an event": _event,
    "a stream": lambda scene: (
        torch.cpu.Stream() if scene.rank.device.type == "cpu" else torch.Stream(scene.rank.device)
    ),
}
