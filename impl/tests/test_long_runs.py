"""Long runs: neither objects nor memory, graphs nor guards grow with the steps of an optimizer."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._dynamo.eval_frame import _debug_get_cache_entry_list

from benchmarks.process_memory import resident_bytes
from conformance.judge.sandbox import seeding
from impl import dynamo
from impl.amp import GradScaler

STEPS = pytest.mark.parametrize(
    "steps",
    [
        200,
        pytest.param(10_000, marks=pytest.mark.profile("deep")),
    ],
)
_WINDOWS = 10
_SLACK = 1 << 20  # bytes that the allocator may keep from one window to another


def assert_nothing_grows(step: Callable[[int], None], steps: int) -> None:
    """Run ten windows. Fail if the later half has more objects or more resident memory than the first half."""

    def held_after(window: int) -> tuple[int, int]:
        for i in range(steps // _WINDOWS):
            step(window * steps // _WINDOWS + i)
        resident = resident_bytes()
        return len(gc.get_objects()), resident

    held_after(0)
    objects, memory = zip(*map(held_after, range(_WINDOWS)), strict=True)
    half = _WINDOWS // 2
    assert max(objects[half:]) <= max(objects[:half])
    assert max(memory[half:]) <= max(memory[:half]) + _SLACK


def parameters() -> list[Tensor]:
    generator = seeding.generator(1)
    shapes = [(4, 4), (16,), (3, 5), ()]
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def give_gradients(params: list[Tensor], *, factor: float = 1.0, all_of_them: bool = True) -> None:
    for param in params if all_of_them else params[1:]:
        param.grad = torch.full_like(param, 0.5 * factor)


@pytest.mark.deadline(280)
@STEPS
@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.NAdam], ids=["fused", "by its own step"])
def test_fused_steps_leak_nothing(make: type[torch.optim.Optimizer], steps: int) -> None:
    """The steps include skipped ones, gradients that come and go, and loaded states."""
    params = parameters()
    optimizer = make(params, lr=1e-3)  # type: ignore[call-arg]
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=50)
    scaler.scale(torch.zeros(()))

    def step(number: int) -> None:
        bad = float("inf") if number % 7 == 0 else 1.0
        give_gradients(params, factor=scaler.get_scale() * bad, all_of_them=number % 5 != 0)
        scaler.fused_step(optimizer, max_norm=1.0)
        optimizer.zero_grad()
        if number % 20 == 19:
            optimizer.load_state_dict(optimizer.state_dict())
            scaler.load_state_dict(scaler.state_dict() | {"scale": 8.0})

    assert_nothing_grows(step, steps)


@pytest.mark.deadline(280)
@STEPS
def test_compiled_steps_leak_nothing(steps: int) -> None:
    """Dynamo traces nothing more after each case has occurred once."""
    params = parameters()
    optimizer = torch.optim.AdamW(params, lr=torch.tensor(1e-3), foreach=False)
    schedule = torch.optim.lr_scheduler.CyclicLR(optimizer, 1e-4, 1e-3, step_size_up=5, cycle_momentum=False)
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        graphs.append(graph)
        return graph

    def update() -> None:
        optimizer.step()

    torch._dynamo.reset()
    with dynamo.installed():
        compiled = torch.compile(update, backend=backend)

        def step(number: int) -> None:
            give_gradients(params, all_of_them=number % 5 != 0)
            compiled()
            schedule.step()
            optimizer.zero_grad()

        for number in range(10):
            step(number)
        known = len(graphs), len(_debug_get_cache_entry_list(update.__code__))
        assert all(known)
        assert_nothing_grows(step, steps)
        assert (len(graphs), len(_debug_get_cache_entry_list(update.__code__))) == known
    torch._dynamo.reset()
