"""Private names of GradScaler that other libraries read, assign and override, and OptState."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from conformance.judge.clauses import clause
from conformance.judge.comparing import Compare
from conformance.judge.library import Library
from conformance.judge.outcome import Outcome, observe
from conformance.strategies.scaling import FOUR, Harness, entries, pickled


@clause("amp.grad_scaler.opt_state.stages")
def test_iteration_stages_match_torch(subject: Library, device: str) -> None:
    """Other libraries read the stage to know whether an optimizer's gradients are already unscaled."""
    stages = subject.amp.grad_scaler.OptState
    assert [(stage.name, stage.value) for stage in stages] == [("READY", 0), ("UNSCALED", 1), ("STEPPED", 2)]
    harness = Harness(subject, device).used()

    def stage() -> str:
        return harness.scaler._per_optimizer_states[id(harness.optimizer)]["stage"].name

    assert stage() == "READY"
    harness.scaler.unscale_(harness.optimizer)
    assert stage() == "UNSCALED"
    harness.scaler.step(harness.optimizer)
    assert stage() == "STEPPED"
    harness.scaler.update()
    assert stage() == "READY"


@clause("amp.grad_scaler.hooks.numbers")
@pytest.mark.parametrize("used", [False, True])
def test_numbers_that_others_read(compare: Compare, device: str, used: bool) -> None:
    names = [
        "_scale",
        "_growth_tracker",
        "_growth_factor",
        "_backoff_factor",
        "_growth_interval",
        "_enabled",
        "_device",
    ]

    def scenario(library: Library) -> Iterator[Outcome]:
        harness = Harness(library, device, init_scale=8.0, growth_factor=4.0, growth_interval=3)
        if used:
            yield from harness.iteration()
        yield observe(lambda: {name: getattr(harness.scaler, name) for name in names})
        yield observe(lambda: (harness.scaler._init_scale, harness.scaler._init_growth_tracker))
        yield observe(harness.scaler._get_scale_async)
        yield observe(lambda: harness.scaler._get_scale_async() is harness.scaler._scale)
        yield observe(harness.scaler._check_scale_growth_tracker, "their_method")

    outcomes = compare(scenario)
    assert [outcome.raised is None for outcome in outcomes[-5:]] == [True] * 4 + [used]


@clause("amp.grad_scaler.hooks.numbers")
def test_filling_the_scale_and_the_tracker(compare: Compare, device: str) -> None:
    """The owner updates the scaler in place, as composer and fairscale do."""

    def scenario(library: Library) -> Iterator[Outcome]:
        harness = Harness(library, device, init_scale=8.0, growth_interval=3).used()
        harness.scaler._scale.fill_(4.0)
        harness.scaler._growth_tracker.fill_(2)
        yield harness.did(harness.scaler.get_scale)
        yield from harness.iteration()
        yield from harness.iteration()

    compare(scenario)


@clause("amp.grad_scaler.hooks.numbers")
def test_scale_and_tracker_stay_same_tensors(subject: Library, device: str) -> None:
    """A captured graph reads the scale at its address, and the tensor that an optimizer got must follow the scale."""
    harness = Harness(subject, device, init_scale=8.0, growth_interval=1).used()
    scale, tracker = harness.scaler._scale, harness.scaler._growth_tracker
    moves: list[Callable[[], Any]] = [
        lambda: list(harness.iteration()),
        lambda: list(harness.iteration(last=math.inf)),
        lambda: harness.scaler.update(4.0),
        lambda: harness.scaler.update(torch.tensor(2.0, device=device)),
    ]
    for move in moves:
        move()
        assert harness.scaler._scale is scale
        assert harness.scaler._growth_tracker is tracker
    assert scale.item() == harness.scaler.get_scale() == 2.0


@clause("amp.grad_scaler.hooks.numbers")
def test_starting_the_scale_by_hand(compare: Compare, device: str) -> None:
    """accelerate creates the scale manually before it loads a state into a scaler that has not scaled yet."""
    state = {
        "scale": 2.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2,
        "_growth_tracker": 1,
    }

    def scenario(library: Library) -> Iterator[Outcome]:
        harness = Harness(library, device, init_scale=8.0)
        yield harness.did(harness.scaler._lazy_init_scale_growth_tracker, torch.device(device))
        yield harness.did(harness.scaler._lazy_init_scale_growth_tracker, torch.device(device))
        yield harness.did(harness.scaler.load_state_dict, state)
        yield from harness.calls("unscale_", "step", "update")

    compare(scenario)


@clause("amp.grad_scaler.hooks.per_optimizer_states")
@pytest.mark.parametrize("optimizer", ["sgd", "aware"])
@pytest.mark.parametrize("last", [None, math.inf], ids=repr)
def test_check_results_that_others_read(
    compare: Compare, device: str, optimizer: str, last: float | None
) -> None:
    def scenario(library: Library) -> Iterator[Outcome]:
        harness = Harness(library, device, optimizer=optimizer)
        harness.backward(last)
        yield harness.did(harness.scaler.unscale_, harness.optimizer)
        yield observe(
            lambda: dict(harness.scaler._per_optimizer_states[id(harness.optimizer)]["found_inf_per_device"])
        )
        yield harness.did(harness.scaler.step, harness.optimizer)
        yield observe(lambda: len(harness.scaler._per_optimizer_states))
        yield harness.did(harness.scaler.update)
        yield observe(lambda: len(harness.scaler._per_optimizer_states))

    compare(scenario)


@clause("amp.grad_scaler.hooks.per_optimizer_states")
def test_changed_found_inf_decides_step_and_update(compare: Compare, device: str) -> None:
    """Libraries reduce the flag over ranks. The step and the update follow the changed flag."""

    def scenario(library: Library) -> Iterator[Outcome]:
        for last in (None, math.inf):
            harness = Harness(library, device, optimizer="recording", init_scale=8.0)
            harness.backward(last)
            yield harness.did(harness.scaler.unscale_, harness.optimizer)
            for found_inf in harness.scaler._per_optimizer_states[id(harness.optimizer)][
                "found_inf_per_device"
            ].values():
                found_inf.fill_(0.0 if last else 1.0)
            yield from harness.calls("step", "update")

    compare(scenario)


@clause("amp.grad_scaler.hooks.per_optimizer_states")
def test_states_thrown_away_by_hand(compare: Compare, device: str) -> None:
    """composer discards a failed iteration by assigning fresh states."""

    def scenario(library: Library) -> Iterator[Outcome]:
        harness = Harness(library, device, init_scale=8.0)
        ready = library.amp.grad_scaler.OptState.READY
        harness.backward(math.inf)
        yield harness.did(harness.scaler.unscale_, harness.optimizer)
        harness.scaler._per_optimizer_states = defaultdict(
            lambda: {"stage": ready, "found_inf_per_device": {}}
        )
        harness.zero_grad()
        harness.backward()
        yield from harness.calls("unscale_", "step", "update")
        yield observe(lambda: entries(pickled(harness.scaler)))

    compare(scenario)


def overriding(library: Library, hook: str, device: str) -> type:
    """Return a subclass with one overridden hook, as trainers define it."""
    base = library.amp.GradScaler

    class Overridden(base):
        log: list[str]

    def _unscale_grads_(self: Any, optimizer: Any, inv_scale: Any, found_inf: Any, *allow_fp16: bool) -> Any:
        """Unscale nothing, and report an inf in every second call. torch passes all arguments by position."""
        self.log.append(f"{float(inv_scale)} {float(found_inf)} {allow_fp16}")
        return {torch.device(device): torch.tensor(float(len(self.log) % 2), device=device)}

    def unscale_half_too(self: Any, optimizer: Any, inv_scale: Any, found_inf: Any, allow_fp16: bool) -> Any:
        """Allow float16 gradients, a well-known workaround for torch's error."""
        self.log.append(str(allow_fp16))
        return base._unscale_grads_(self, optimizer, inv_scale, found_inf, True)

    def _maybe_opt_step(self: Any, optimizer: Any, optimizer_state: Any, *args: Any, **kwargs: Any) -> Any:
        """Step even if an inf was found."""
        found_inf = sum(float(value) for value in optimizer_state["found_inf_per_device"].values())
        self.log.append(f"{found_inf} {args} {kwargs}")
        return optimizer.step(*args, **kwargs) or "overridden"

    def _check_inf_per_device(self: Any, optimizer: Any) -> Any:
        self.log.append("checked")
        found_inf_per_device = {torch.device(device): torch.ones((), device=device)}
        self._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = found_inf_per_device
        return found_inf_per_device

    def unscale_(self: Any, optimizer: Any) -> None:
        self.log.append("unscaled")
        base.unscale_(self, optimizer)

    hooks = {
        "_unscale_grads_": _unscale_grads_,
        "_unscale_grads_ with float16": unscale_half_too,
        "_maybe_opt_step": _maybe_opt_step,
        "_check_inf_per_device": _check_inf_per_device,
        "unscale_": unscale_,
    }
    setattr(Overridden, hook.partition(" ")[0], hooks[hook])
    return Overridden


HOOKS = {
    "_unscale_grads_": ["sgd", "aware"],
    "_maybe_opt_step": ["sgd", "recording"],
    "_check_inf_per_device": ["aware", "fused adam"],
    "unscale_": ["sgd"],
}


@clause("amp.grad_scaler.hooks.overriding_takes_effect")
@pytest.mark.parametrize(
    ("hook", "optimizer"), [(hook, kind) for hook, kinds in HOOKS.items() for kind in kinds]
)
@pytest.mark.parametrize("unscale", [True, False])
def test_overriding_takes_effect(
    compare: Compare, device: str, hook: str, optimizer: str, unscale: bool
) -> None:
    def scenario(library: Library) -> Iterator[Outcome]:
        harness = Harness(library, device, optimizer=optimizer)
        harness.scaler = overriding(library, hook, device)(device, init_scale=8.0, growth_interval=1)
        harness.scaler.log = []
        for last in (None, math.inf, None, None):
            yield from harness.iteration(last, unscale=unscale)
            yield observe(lambda: list(harness.scaler.log))

    compare(scenario)


@clause("amp.grad_scaler.hooks.overriding_takes_effect")
@pytest.mark.parametrize("dtype", [torch.float16], ids=str)
@pytest.mark.parametrize("last", [None, math.inf], ids=repr)
def test_overridden_unscale_accepts_float16(
    compare: Compare, device: str, dtype: torch.dtype, last: float | None
) -> None:
    def scenario(library: Library) -> Iterator[Outcome]:
        harness = Harness(library, device)
        harness.scaler = overriding(library, "_unscale_grads_ with float16", device)(device, init_scale=8.0)
        harness.scaler.log = []
        for parameter in harness.parameters:
            parameter.data = parameter.data.to(dtype)
        harness.backward(last)
        yield from harness.calls("step", "update")
        yield observe(lambda: list(harness.scaler.log))

    assert [outcome.raised for outcome in compare(scenario)] == [None] * 3


@clause("amp.grad_scaler.hooks.overriding_takes_effect")
def test_aware_optimizer_gets_scale_of_subclass(compare: Compare, device: str) -> None:
    """Optimizers that unscale themselves get the value that _get_scale_async returns."""

    def scenario(library: Library) -> Iterator[Outcome]:
        class FixedScale(library.amp.GradScaler):
            def _get_scale_async(self) -> torch.Tensor:
                return torch.tensor(32.0, device=device)

        harness = Harness(library, device, FOUR, "aware")
        harness.scaler = FixedScale(device, init_scale=8.0)
        harness.backward()
        yield harness.did(harness.scaler.step, harness.optimizer)
        yield harness.did(harness.scaler.get_scale)

    compare(scenario)
