"""`impl.optim.capture(..., graph=True)` on a device that has graphs: run by `test_captured_graphs`.

On the simulated one each test has a schedule of its own, and may show no hazard.
"""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler
from torch.utils._python_dispatch import TorchDispatchMode

import impl.amp
from conformance import simulator
from impl.optim import _graphed_update, explain
from impl.optim._graphed_update import GraphedSettings
from impl.optim._graphs import capture_graph, graphs_for
from impl.optim.tests import captured_twins as on
from impl.optim.tests.captured_twins import FUSED, CapturedTwins, Side
from impl.optim.tests.test_captured import SCRIPTS, TrainingEvent, play

pytestmark = pytest.mark.deadline(120)

GRAPHED = [kind for kind in FUSED if kind != "Adam fused tensor lr"]
DTYPES = (torch.float32, torch.bfloat16)
SCHEDULES = 12


@pytest.fixture(autouse=True)
def schedule(request: pytest.FixtureRequest, device: str) -> Generator[None]:
    if device == simulator.NAME:
        simulator.log_hazards()
        simulator.set_schedule(zlib.crc32(request.node.nodeid.encode()) % SCHEDULES)
    yield
    if device == simulator.NAME:
        simulator.synchronize()
        assert simulator.take_hazards() == []


def settled(count: int = 4) -> list[TrainingEvent]:
    """Steps of which the second captures a graph, unless one is there."""
    return [(on.settled_iteration, {"seed": seed}) for seed in range(count)]


def reported(side: Side) -> Any:
    graph = explain(side.optimizer).graph
    assert graph is not None
    return graph


def step_until_replayed(twins: CapturedTwins) -> None:
    """Steps until they are replayed; more, the oftener a graph was of no use before."""
    for seed in range(64):
        if reported(twins.captured).replayed:
            return
        twins.do(on.settled_iteration, seed)
    raise AssertionError(f"no replay: {reported(twins.captured).reason}")


def replaying(kind: str, device: str, **options: Any) -> Side:
    side = Side(kind, captured=True, device=device, graph=True, **options)
    run(side, settled())
    assert reported(side).replayed
    return side


def run(side: Side, events: list[TrainingEvent]) -> None:
    for event, kwargs in events:
        event(side, **kwargs)


# Whether there may be a graph


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("AdamW", "graphs are of fused updates, and its implementation is foreach"),
        ("Adam fused tensor lr", "a group's tensors or numbers are not plain"),
    ],
)
def test_updates_of_several_operators_stay_eager(kind: str, reason: str, device: str) -> None:
    twins = CapturedTwins(kind, device=device, graph=True)
    play(twins, settled())
    assert reported(twins.captured).reason == reason
    assert not reported(twins.captured).replayed


def test_betas_that_are_tensors_are_read_in_every_step(device: str) -> None:
    """Tensors inside a list are read too. A graph would keep their old values."""
    twins = CapturedTwins("AdamW fused", device=device, graph=True)
    for side in (twins.plain, twins.captured):
        on.set_values(side, betas=[torch.tensor(0.5), torch.tensor(0.75)])
    play(twins, settled())
    assert reported(twins.captured).reason.startswith("a group's tensors")
    for side in (twins.plain, twins.captured):
        side.optimizer.param_groups[0]["betas"][0].fill_(0.25)
    play(twins, settled(1))


# Capture and replay


def test_second_step_captures_and_later_steps_replay(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step warms up, the second captures and replays. Later steps only fill in settings and replay."""
    done: list[str] = []
    monkeypatch.setattr(GraphedSettings, "fill", noting("fill", GraphedSettings.fill, done))
    for name in ("step_bucket", "capture_graph"):
        monkeypatch.setattr(_graphed_update, name, noting(name, getattr(_graphed_update, name), done))
    side = Side("AdamW fused", captured=True, device=device, graph=True)
    calls_by_step = []
    for seed in range(4):
        on.settled_iteration(side, seed)
        calls_by_step.append(done[:])
        done.clear()
    assert calls_by_step == [
        ["fill", "step_bucket"],
        ["fill", "capture_graph", "step_bucket"],
        ["fill"],
        ["fill"],
    ]
    assert str(explain(side.optimizer)) == (
        "captured, fused, lr a float32 on the device: 1 build of lists, the last one because it is the first step; "
        "replayed from a graph: 1 capture, the last one because its lists are new"
    )


def noting(name: str, call: Callable[..., Any], done: list[str]) -> Callable[..., Any]:
    def tell(*args: Any) -> Any:
        done.append(name)
        return call(*args)

    return tell


def test_graph_contains_two_operators(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    operators: list[str] = []
    real = _graphed_update.capture_graph

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            operators.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    def capture_graph(graphs: Any, work: Callable[[], None]) -> Any:
        def watched() -> None:
            with Names():
                work()

        return real(graphs, watched)

    monkeypatch.setattr(_graphed_update, "capture_graph", capture_graph)
    replaying("AdamW fused", device)
    assert operators == ["aten::add_", "aten::_fused_adamw_"]


# After these the update is never one operator, or not one that a graph may do.
EAGER_AFTER = {
    *(
        (kind, script)
        for kind in GRAPHED
        for script in ("a shared gradient", "dtype changed", "fused is None")
    ),
    *((kind, "lr is tensor(0.5000)") for kind in GRAPHED),
    ("SGD fused momentum", "one state forgotten"),
}


# In the profile quick these kinds run every script. The other kinds share the scripts, because the capturing code
# sees of a kind only its operator and its lists of states.
RUN_EVERY_SCRIPT = ("AdamW fused", "SGD fused momentum")
SHARE_SCRIPTS = [kind for kind in GRAPHED if kind not in RUN_EVERY_SCRIPT]


def kinds_and_scripts() -> list[Any]:
    rows = []
    for number, script in enumerate(SCRIPTS):
        quick_kinds = (*RUN_EVERY_SCRIPT, SHARE_SCRIPTS[number % len(SHARE_SCRIPTS)])
        for kind in GRAPHED:
            marks = () if kind in quick_kinds else pytest.mark.profile("full")
            rows.append(pytest.param(kind, script, marks=marks))
    return rows


@pytest.mark.parametrize(("kind", "script"), kinds_and_scripts())
def test_replayed_step_matches_plain_step(kind: str, script: str, device: str) -> None:
    """Steps that leave the gradients where they are, so that graphs come before a script, in it and after it."""
    twins = CapturedTwins(kind, dtypes=DTYPES, device=device, graph=True)
    play(twins, settled())
    assert reported(twins.captured).replayed
    for event, kwargs in SCRIPTS[script]:
        in_place = event is on.iteration and "missing" not in kwargs
        twins.do(on.settled_iteration if in_place else event, **kwargs)
    play(twins, settled())
    step_fails = twins.do(on.settled_iteration).raised is not None
    if (kind, script) in EAGER_AFTER:
        assert not reported(twins.captured).replayed
    elif not step_fails:
        step_until_replayed(twins)


@pytest.mark.parametrize("kind", GRAPHED)
def test_learning_rate_is_rounded_to_float32(kind: str, device: str) -> None:
    """The result matches an optimizer whose learning rate is a tensor."""
    plain = Side(kind, captured=False, device=device)
    graphed = Side(kind, captured=True, device=device, graph=True)
    for seed, lr in enumerate([0.1, 0.1, 0.1, 0.3, 1e-3, 0.7]):
        on.set_values(plain, lr=torch.tensor(lr))
        on.set_values(graphed, lr=lr if seed else torch.tensor(lr).item())
        for side in (plain, graphed):
            on.settled_iteration(side, seed)
    assert reported(graphed).replayed
    assert on.snapshot(plain.params) == on.snapshot(graphed.params)


def stepped(scaler: Any, optimizer: torch.optim.Optimizer) -> None:
    scaler.step(optimizer)
    scaler.update()


def unscaled_first(scaler: Any, optimizer: torch.optim.Optimizer) -> None:
    scaler.unscale_(optimizer)
    stepped(scaler, optimizer)


@pytest.mark.parametrize("way", [stepped, unscaled_first])
@pytest.mark.parametrize("kind", ["AdamW fused", "SGD fused momentum"])
def test_scaled_steps_are_replayed(
    kind: str, way: Callable[[Any, torch.optim.Optimizer], None], device: str
) -> None:
    def train(side: Side) -> list[Any]:
        scaler = impl.amp.GradScaler(device, init_scale=8.0, growth_interval=2)
        snapshots = []
        for number, factor in enumerate([1.0, 1.0, 1.0, 1.0, math.inf, 1.0, 1.0]):
            on.refill_gradients(side, number)
            scaler.scale(torch.ones((), device=device))
            grad = side.params[-1].grad
            assert grad is not None
            side.params[-1].grad = grad.mul_(factor)
            way(scaler, side.optimizer)
            snapshots.append([scaler.get_scale(), side.seen()])
        return snapshots

    twins = CapturedTwins(kind, device=device, graph=True)
    assert twins.do(train).raised is None
    assert reported(twins.captured).replayed
    assert reported(twins.captured).captures == 1


def fused(scaler: Any, optimizer: torch.optim.Optimizer) -> None:
    scaler.fused_step(optimizer)


def fused_and_clipped(scaler: Any, optimizer: torch.optim.Optimizer) -> None:
    scaler.fused_step(optimizer, max_norm=0.5)


@pytest.mark.parametrize("way", [stepped, fused, fused_and_clipped])
@pytest.mark.parametrize("kind", ["AdamW fused", "SGD fused momentum"])
@pytest.mark.parametrize("captured_too", [False, True])
def test_user_graph_of_full_step_matches_eager_step(
    kind: str, way: Any, captured_too: bool, device: str
) -> None:
    """Forward, backward, the scaler's part and the update, with a scale that overflows in a replay."""

    def trained(in_a_graph: bool) -> list[Any]:
        side = Side(kind, captured=captured_too, device=device, graph=True)
        for group in side.optimizer.param_groups:
            group["capturable"] = True
        scaler = impl.amp.GradScaler(device, init_scale=8.0, growth_interval=2, min_scale=2.0)
        factor = torch.ones((), device=device)
        for param in side.params:
            param.grad = torch.zeros_like(param)

        def step() -> None:
            for param in side.params:
                assert param.grad is not None
                param.grad.zero_()
            loss = torch.stack([param.square().sum() for param in side.params]).sum() * factor
            scaler.scale(loss).backward(inputs=side.params)
            way(scaler, side.optimizer)

        graphs = graphs_for(torch.device(device))
        assert graphs is not None
        for _ in range(2):
            step()
        again = capture_graph(graphs, step).replay if in_a_graph else step
        snapshots = []
        for value in (1.0, math.inf, math.inf, 0.5, 0.25):
            factor.fill_(value)
            again()
            snapshots.append([on.snapshot(side.params), scaler.get_scale()])
        return snapshots

    assert trained(in_a_graph=True) == trained(in_a_graph=False)


# Guards of a graph


def give_other_strides(side: Side) -> None:
    """A matrix and all that belongs to it are transposed where they lie."""
    param = side.params[1]
    assert param.grad is not None
    for tensor in (param, param.grad, *side.optimizer.state[param].values()):
        if tensor.shape == param.shape:
            tensor.data = tensor.data.as_strided(param.shape, (1, param.shape[0]))


def move_gradient(side: Side) -> None:
    # The log keeps the old gradient alive, so that its memory is not reused.
    side.log.append(side.params[1].grad)
    grad = side.params[1].grad
    assert grad is not None
    side.params[1].grad = grad.clone()


def move_state(side: Side) -> None:
    momentum = side.optimizer.state[side.params[2]]["exp_avg"]
    momentum.data = momentum.data.clone()


def require_gradient_of_a_state(side: Side) -> None:
    side.optimizer.state[side.params[2]]["exp_avg"].requires_grad_()


def change_betas_in_place(side: Side) -> None:
    side.optimizer.param_groups[0]["betas"][0] = 0.1


GUARDS: dict[str, tuple[TrainingEvent, str]] = {
    "betas": ((on.set_values, {"betas": (0.5, 0.6)}), "the group's betas changed"),
    "betas in place": ((change_betas_in_place, {}), "the group's betas changed"),
    "weight decay": ((on.set_values, {"weight_decay": 0.5}), "the group's weight_decay changed"),
    "both": ((on.set_values, {"eps": 0.5, "weight_decay": 0.5}), "the group's eps, weight_decay changed"),
    "a gradient": ((move_gradient, {}), "grads[1] has other memory"),
    "parameters": ((on.move_parameters, {}), "params_with_grad[0] has other memory"),
    "a state": ((move_state, {}), "exp_avgs[2] has other memory"),
    "strides": (
        (give_other_strides, {}),
        "tensor 'params_with_grad[1]' stride mismatch at index 0. expected 3, actual 1",
    ),
    "requires_grad": (
        (require_gradient_of_a_state, {}),
        "tensor 'exp_avgs[2]' requires_grad mismatch. expected requires_grad=0",
    ),
    "other lists": ((on.edit_states, {"how": "replaced"}), "its lists are new"),
}


@pytest.mark.parametrize("name", list(GUARDS))
def test_guard_failure_captures_new_graph(name: str, device: str) -> None:
    """Once what has changed stays; the step in which it changes is the warm-up."""
    (event, kwargs), reason = GUARDS[name]
    twins = CapturedTwins("AdamW fused", device=device, graph=True)
    twins.do(on.set_values, betas=[0.8, 0.9])
    play(twins, settled(16))
    twins.do(event, **kwargs)
    twins.do(on.settled_iteration, 1)
    assert (
        reported(twins.captured).reason
        == f"{reason}; a graph is captured when the next step brings no change"
    )
    step_until_replayed(twins)
    play(twins, settled(2))


def test_scaling_of_another_kind(device: str) -> None:
    twins = CapturedTwins("AdamW fused", device=device, graph=True)
    play(twins, settled(16))
    for number, (unscaled, replays) in enumerate(
        [(False, False), (False, True), (False, True), (True, False), (True, False), (True, True)]
    ):
        twins.do(on.scaled, inf=number % 2 == 1, unscaled=unscaled)
        assert reported(twins.captured).replayed == replays
    assert reported(twins.captured).reason == "grad_scale or found_inf has another type, shape or dtype"


def test_another_stream(device: str) -> None:
    twins = CapturedTwins("AdamW fused", device=device, graph=True)
    play(twins, settled())
    before, another = torch.accelerator.current_stream(), torch.Stream(device)
    another.wait_stream(before)
    with another:
        play(twins, settled(1))
        assert reported(twins.captured).reason.startswith("the current stream is another one; ")
        step_until_replayed(twins)
    before.wait_stream(another)


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_steps_that_must_be_seen_are_eager(device: str) -> None:
    twins = CapturedTwins("AdamW fused", device=device, graph=True)
    play(twins, settled())
    with Watching():
        play(twins, settled())
    assert reported(twins.captured).reason.startswith("a TorchDispatchMode is active, ")
    step_until_replayed(twins)


# Changes without a new capture


def test_lr_schedule_captures_no_new_graph(device: str) -> None:
    side = Side("SGD fused momentum", captured=True, device=device, graph=True)
    schedule = lr_scheduler.OneCycleLR(side.optimizer, max_lr=0.5, total_steps=20, cycle_momentum=False)
    run(side, settled())
    for seed in range(10):
        schedule.step()
        on.settled_iteration(side, seed)
        assert reported(side).replayed
    assert reported(side).captures == 1


def test_beta_schedule_stays_eager(device: str) -> None:
    side = Side("AdamW fused", captured=True, device=device, graph=True)
    schedule = lr_scheduler.OneCycleLR(side.optimizer, max_lr=0.5, total_steps=20)
    run(side, settled())
    for seed in range(10):
        schedule.step()
        on.settled_iteration(side, seed)
        assert reported(side).reason.startswith("the group's betas changed; ")
    assert reported(side).captures == 1


@pytest.mark.parametrize("stays_for", [1, 2, 3])
def test_gradients_that_move_capture_little(stays_for: int, device: str) -> None:
    side = replaying("AdamW fused", device)
    for number in range(60):
        if number % stays_for == 0:
            move_gradient(side)
        on.settled_iteration(side, number)
    assert reported(side).captures == (2 if stays_for == 3 else 1)
    assert not reported(side).replayed
    waits_for = 4 if stays_for == 3 else 2
    for seed in range(waits_for):
        on.settled_iteration(side, seed)
    assert reported(side).replayed


@pytest.mark.parametrize(
    ("comes_and_goes", "captures"), [("every 3 steps", 2), ("every 6 steps", 3), ("every 16 steps", 8)]
)
def test_lists_that_are_built_again_capture_little(comes_and_goes: str, captures: int, device: str) -> None:
    """A graph that went with its lists before it was worth its capture delays the next one as any other does."""
    side = Side("AdamW fused", captured=True, device=device, graph=True)
    on.give_gradients(side)
    gradient, every = side.params[1].grad, int(comes_and_goes.split()[1])
    for number in range(8 * every):
        side.params[1].grad = gradient if number // every % 2 == 0 else None
        on.step(side)
    assert explain(side.optimizer).builds == 8
    assert reported(side).captures == captures


def test_no_step_waits_for_the_device(device: str) -> None:
    side = replaying("AdamW fused", device)
    with waits_refused(device):
        for lr in (0.5, 0.25, 0.125):
            on.set_values(side, lr=lr)
            on.step(side)
            assert reported(side).replayed


@contextlib.contextmanager
def waits_refused(device: str) -> Generator[None]:
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return
    simulator.take_host_waits()
    yield
    assert simulator.take_host_waits() == []
