"""Sequences of calls on a model sharded by `fully_shard`, and comparisons of what ranks observe after each call."""

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
    registered,
    reshard_all,
    sharded,
    units_of,
    values_and_gradients,
)
from conformance.distributed.fsdp.scenes.rank_judging import assert_ranks_agree
from conformance.distributed.fsdp.scenes.scene import Scene, tried
from conformance.distributed.fsdp.scenes.traffic import are_at_most
from conformance.distributed.fsdp.scenes.twins import PlainTwins, values_of
from conformance.ranks.collective_traces import Collective

ROOT = 4  # number of units inside the root
SHARDED, REPLICAS = Sharding(), Sharding(ranks="replicas")


@dataclass(frozen=True)
class UnitCall:
    """Call of a unit's method, or of a method of `CallScene` whose name begins with `do_`.

    Units are numbered in the order in which they run, and the last number is the root.
    """

    name: str
    unit: int = ROOT
    arguments: Any = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.name}[{self.unit}]{self.arguments or ''}"


def setting(method: str, unit: int = ROOT, **arguments: Any) -> UnitCall:
    return UnitCall(method, unit, arguments)


FORWARD, BACKWARD, STEP, EVALUATE = map(UnitCall, ("forward", "backward", "step", "evaluate"))
WAIT, SKIP, CLEAR, RESET = (
    UnitCall("wait"),
    UnitCall("skip", 1),
    UnitCall("zero_grad"),
    UnitCall("reset_iter_state"),
)
TRAIN = (FORWARD, BACKWARD, STEP)


def play(scene: Scene, calls: Sequence[UnitCall], sharding: Sharding = SHARDED) -> dict[str, Any]:
    """Run the calls. Return what the rank observed after each call, and what it holds at the end.

    The ranks wait for each other before every call, and before every unit computes.
    """
    scene = CallScene(scene, sharding)
    observed = [scene.make(call) for call in calls]
    if scene.is_evaluated:
        reshard_all(scene.model)
    return {"seen": observed, "held": values_and_gradients(scene.model)}


class CallScene(Scene):
    """A scene with a sharded model, and the state that calls leave for later calls."""

    def __init__(self, scene: Scene, sharding: Sharding) -> None:
        model = sharded(scene.rank, scene.library, scene.plain, sharding)
        super().__init__(scene.rank, scene.library, None, scene.tree, model)
        self.all_units = [*reversed(units_of(model, "leaves")), model]
        # foreach is torch's default on an accelerator.
        self.optimizer = torch.optim.SGD(model.parameters(), 0.05, 0.5, foreach=True)
        inner = {id(p): at for at, unit in enumerate(self.all_units[:ROOT]) for p in unit.parameters()}
        self.unit_of = {id(p): inner.get(id(p), ROOT) for p in model.parameters()}
        self.unsynchronised: set[int] = set()  # units with gradient synchronisation switched off
        self.waiting: set[int] = set()  # units whose gradients may be unreduced
        self.losses: list[torch.Tensor] = []
        self.handles: list[Any] = []
        self.reported: list[Any] = []
        self.event: Callable[[], Any] = lambda: None
        self._forwards = 0
        # Deviation fully_shard.written_after_evaluation: units may stay unsharded after an evaluation.
        self.is_evaluated = False
        for unit in self.all_units:
            unit.register_forward_pre_hook(_meet)
            unit.register_forward_hook(_meet_in_backward)

    def make(self, call: UnitCall) -> Any:
        dist.barrier()
        self.reported.clear()
        result = tried(lambda: self._made(call))
        self.is_evaluated = call.name == "evaluate" or (self.is_evaluated and call.name != "forward")
        return {
            "call": str(call),
            "made": result,
            "reported": sorted(self.reported, key=str),  # the order of gathers and reductions may vary
            "keeps the event": self.event() is not None,
            # After a failed call, it is undefined which parameters are registered, until the state is reset.
            "registered": {}
            if call.name.startswith("fail_") or self.is_evaluated
            else registered(self.model),
        }

    def _made(self, call: UnitCall) -> Any:
        if (verb := getattr(self, f"do_{call.name}", None)) is not None:
            return verb(**call.arguments) if call.unit == ROOT else verb(call.unit, **call.arguments)
        arguments = {name: self._real(value) for name, value in call.arguments.items()}
        returned = getattr(self.all_units[call.unit], call.name)(**arguments)
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
            return isinstance(returned, getattr(self.api, _HANDLES[call.name]))
        return None

    def _real(self, value: Any) -> Any:
        """Replace unit numbers by units, and names by the objects that they stand for."""
        if isinstance(value, list):
            return [self.all_units[number] if isinstance(number, int) else number for number in value]
        return _OBJECTS[value](self) if isinstance(value, str) and value in _OBJECTS else value

    def next_loss(self) -> torch.Tensor:
        self._forwards += 1
        return self.loss(self._forwards - 1)

    # Calls that are not methods of units

    def do_forward(self) -> torch.Tensor:
        self.losses.append(self.next_loss())
        return self.losses[-1].detach()

    @torch.no_grad()
    def do_evaluate(self) -> torch.Tensor:
        return self.next_loss()

    def do_backward(self) -> int:
        """Run backward of the sum of all losses so far."""
        losses, self.losses = self.losses, []
        if losses:
            self.waiting = set(self.unsynchronised)
            torch.stack(losses).sum().backward()
        return len(losses)

    def do_fail_forward(self, unit: int) -> None:
        """Run a forward in which a unit's pre-forward hook raises."""
        with self.all_units[unit].register_forward_pre_hook(_fail):
            self.next_loss()

    def do_fail_backward(self, unit: int) -> None:
        with self.all_units[unit].register_forward_hook(lambda _, __, out: _hooked(out, _fail)):
            self.next_loss().backward()

    def do_step(self) -> None:
        """Step only the parameters whose gradients are reduced. `failures.waiting_step` covers the others."""
        group = self.optimizer.param_groups[0]
        parameters = group["params"]
        group["params"] = [p for p in parameters if self.unit_of[id(p)] not in self.waiting]
        if self.rank.device.type != "cpu":
            # Reductions of a backward that is not the last, and gathers by `unshard`, may still run.
            torch.accelerator.synchronize()
        try:
            self.optimizer.step()
        finally:
            group["params"] = parameters
        self.optimizer.zero_grad()

    def do_step_of_shards(self) -> bool:
        """Reshard all units, then step.

        While units are unsharded, torch would continue with the weights from before the step. Do nothing between a
        forward and its backward, because no library has the forward's weights then.
        """
        if self.losses:
            return False
        while self.handles:
            self.handles.pop(0).wait()
        for unit in self.all_units:
            unit.reshard()
        self.do_step()
        return True

    def do_step_beside(self) -> None:
        """Step on a separate stream, if the device has streams.

        The model gets only the event of the step, by `set_post_optim_event`.
        """
        event: Any = _event(self)
        if self.rank.device.type == "cpu":
            self.optimizer.step()
        else:
            beside = torch.Stream(self.rank.device)
            beside.wait_stream(torch.accelerator.current_stream())
            with beside:
                self.optimizer.step()
                event = beside.record_event()
        self.model.set_post_optim_event(event)

    def do_zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def do_wait(self) -> Any:
        return self.handles.pop(0).wait() if self.handles else "no handle"

    def do_state_dict(self) -> list[str]:
        return list(self.model.state_dict())

    def do_load(self, **arguments: Any) -> str:
        """Load a state dict with doubled parameters."""
        doubled = {name: value.detach() * 2 for name, value in self.model.state_dict().items()}
        return str(self.model.load_state_dict(doubled, **arguments))

    def do_convert(self, dtype: torch.dtype) -> None:
        self.model.to(dtype)

    def do_skip(self, unit: int, by: Sequence[int] | None = None) -> torch.Tensor:
        """Run a forward and backward without one unit, on the ranks in `by` or on every rank."""
        skipped = self.all_units[unit]
        skips = by is None or self.rank.rank in by
        original, skipped.forward = skipped.forward, (lambda x, *, ids: x * 1) if skips else skipped.forward
        try:
            loss = self.next_loss()
            loss.backward()
        finally:
            skipped.forward = original
        return loss.detach()


_HANDLES = {"unshard": "UnshardHandle", "finalize_backward": "GradientReductionHandle"}


def _fail(*_: Any) -> None:
    raise ArithmeticError("in a call that fails")


def _meet(*_: Any) -> None:
    dist.barrier()


def _meet_in_backward(unit: nn.Module, inputs: Any, output: torch.Tensor) -> None:
    if output.requires_grad:
        _hooked(output, _meet)


def _hooked(output: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
    output.register_hook(hook)


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


# -- comparisons


def assert_plays_like_torch(
    twins: PlainTwins,
    calls: Sequence[UnitCall],
    *,
    names_groups: bool = False,
    gathers_again: bool = True,
    **how: Any,
) -> tuple[list[Sequence[Collective]], list[Sequence[Collective]]]:
    """Compare the calls. They must send at most as much as torch's. Return the traces of both libraries' ranks.

    Args:
        names_groups: whether new ranks run the calls, because groups are named by their members, only once each.
        gathers_again: whether an evaluation may gather units that are unsharded, and whether what follows it may too.
    """
    outcomes, traces = [], []
    for library in (twins.reference, twins.subject):
        if names_groups:
            twins.pool.kill()
        outcomes.append(twins.of(library, play, calls=calls, **how))
        traces.append([list(trace) for trace in twins.pool.traces])
    assert_ranks_agree(*outcomes)
    values_of(outcomes[1])
    if not are_at_most(traces[1], traces[0]) and gathers_again:
        # Deviation fully_shard.written_after_evaluation: units kept through an evaluation may be gathered again.
        twins.of(twins.reference, play, calls=_resharded_around_evaluations(calls), **how)
        traces[0] = [list(trace) for trace in twins.pool.traces]
    assert are_at_most(traces[1], traces[0]), "; torch ".join(str([*map(reported, sent)]) for sent in traces)
    return traces[0], traces[1]


def _resharded_around_evaluations(calls: Sequence[UnitCall]) -> list[UnitCall]:
    reshards = [setting("reshard", unit) for unit in range(ROOT + 1)]
    return [step for call in calls for step in ([*reshards, call, *reshards] if call == EVALUATE else [call])]


def reported(trace: Sequence[Collective]) -> list[str]:
    return [str(call) for call in trace]
