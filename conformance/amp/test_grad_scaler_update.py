"""GradScaler.update: growth, backoff, a manually set scale, and the getters and setters."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.judge.clauses import clause
from conformance.judge.comparing import Compare
from conformance.judge.deviations import DeviationJudge
from conformance.judge.judgement import unavailable
from conformance.judge.library import Library
from conformance.judge.outcome import Outcome, observe
from conformance.strategies.gradients import Gradient
from conformance.strategies.scaling import FOUR, Harness

SMALL = (Gradient((3,), seed=1), Gradient((2,), seed=2))
LARGEST = torch.finfo(torch.float32).max


def scales(harness: Harness, grad_outcomes: list[bool]) -> list[float]:
    """Return the scale after each iteration. The gradients are finite if the outcome is True."""
    history = []
    for finite in grad_outcomes:
        harness.zero_grad()
        harness.backward(None if finite else math.inf)
        harness.scaler.step(harness.optimizer)
        harness.scaler.update()
        history.append(harness.scaler.get_scale())
    return history


@clause("amp.grad_scaler.update.grows_after_interval")
@pytest.mark.parametrize("interval", [1, 2, 3, 5])
def test_grows_after_so_many_steps_in_a_row(subject: Library, device: str, interval: int) -> None:
    harness = Harness(subject, device, SMALL, init_scale=8.0, growth_interval=interval)
    assert scales(harness, [True] * 3 * interval) == [
        8.0 * 2.0 ** (done // interval) for done in range(1, 3 * interval + 1)
    ]


@clause("amp.grad_scaler.update.grows_after_interval")
def test_overflow_resets_growth_count(subject: Library, device: str) -> None:
    harness = Harness(subject, device, SMALL, init_scale=8.0, growth_interval=3)
    grad_outcomes = [True, True, False, True, True, False, True, True, True, True]
    assert scales(harness, grad_outcomes) == [8.0, 8.0, 4.0, 4.0, 4.0, 2.0, 2.0, 2.0, 4.0, 4.0]


@clause("amp.grad_scaler.update.backs_off")
@pytest.mark.parametrize("backoff", [0.5, 0.1, 0.25])
def test_backs_off_each_time(subject: Library, device: str, backoff: float) -> None:
    harness = Harness(subject, device, SMALL, init_scale=64.0, backoff_factor=backoff)
    actual = scales(harness, [False] * 3)
    expected, now = [], torch.tensor(64.0)
    for _ in range(3):
        now = (now.double() * backoff).float()
        expected.append(float(now))
    assert actual == expected


@clause("amp.grad_scaler.update.never_infinite")
@pytest.mark.parametrize(
    ("init_scale", "factor"), [(3e38, 2.0), (LARGEST, 1.5), (1e38, 1e30), (2.0**127, 2.0)]
)
@pytest.mark.parametrize("interval", [1, 2])
def test_holds_the_largest_finite_scale(
    subject: Library, compare: Compare, device: str, init_scale: float, factor: float, interval: int
) -> None:
    options = {"init_scale": init_scale, "growth_factor": factor, "growth_interval": interval}

    def scenario(library: Library) -> Iterator[Outcome]:
        # Gradients are about 1e-38, because larger ones would rightly overflow at this scale.
        harness = Harness(library, device, SMALL, **options)
        for _ in range(4):
            harness.zero_grad()
            harness.backward(times=1e-39)
            yield from harness.calls("step", "update")

    compare(scenario)
    harness = Harness(subject, device, SMALL, **options).used()
    for _ in range(3 * interval):
        harness.scaler.step(harness.optimizer)
        harness.scaler.update()
    assert harness.scaler.get_scale() == float(torch.tensor(init_scale))


def tensor(value: float, device: str, **options: Any) -> torch.Tensor:
    return torch.tensor(value, device=device, **options)


@clause("amp.grad_scaler.update.new_scale")
@given(
    news=st.lists(st.sampled_from([None, 2.0, 3.5, 65536.0, 1e-3]), min_size=3, max_size=6),
    as_tensor=st.booleans(),
)
def test_new_scale_replaces_scale(
    compare: Compare, device: str, news: list[float | None], as_tensor: bool
) -> None:
    """A new scale takes effect at once and ends the iteration. The count of clean steps continues."""

    def scenario(library: Library) -> Iterator[Outcome]:
        harness = Harness(library, device, SMALL, init_scale=8.0, growth_interval=3)
        for new in news:
            harness.zero_grad()
            yield harness.did(harness.backward)
            yield harness.did(harness.scaler.step, harness.optimizer)
            yield harness.did(
                harness.scaler.update, tensor(new, device) if new is not None and as_tensor else new
            )
            yield harness.did(harness.scaler.get_scale)

    compare(scenario)


@clause("amp.grad_scaler.update.new_scale")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.int64], ids=str)
def test_new_scale_tensor_is_copied(compare: Compare, device: str, dtype: torch.dtype) -> None:
    """Later changes of the tensor have no effect, and the scale keeps its own dtype."""

    def scenario(library: Library) -> Iterator[Outcome]:
        harness = Harness(library, device, SMALL, init_scale=8.0, growth_interval=1)
        harness.backward()
        new = torch.tensor(3, dtype=dtype, device=device)
        yield harness.did(harness.scaler.update, new)
        new.fill_(100)
        yield harness.did(harness.scaler.get_scale)
        yield harness.did(harness.scaler.scale, torch.ones(2, device=device))
        yield from harness.calls("step", "update")
        assert int(new) == 100

    compare(scenario)


@clause("amp.grad_scaler.update.new_scale")
def test_new_scale_ends_iteration(compare: Compare, device: str) -> None:
    def scenario(library: Library) -> Iterator[Outcome]:
        harness = Harness(library, device, SMALL, init_scale=8.0)
        harness.backward(math.inf)
        yield harness.did(harness.scaler.unscale_, harness.optimizer)
        yield harness.did(harness.scaler.update, 4.0)
        yield harness.did(harness.scaler.update)
        yield from harness.iteration()

    _, new_scale, repeated, *_ = compare(scenario)
    assert new_scale.raised is None
    assert "No inf checks" in str(repeated.raised)


REFUSED = [
    2,
    True,
    "2",
    [2.0],
    {},
    torch.tensor([1.0, 2.0]),
    torch.zeros(0),
    torch.tensor(2.0, requires_grad=True),
    torch.tensor(2.0, device="meta"),
    torch.tensor([2.0]),
    torch.tensor([[2.0]]),
]


@clause("amp.grad_scaler.update.bad_new_scale")
@pytest.mark.parametrize("new", REFUSED, ids=repr)
def test_invalid_new_scale_raises(compare: Compare, device: str, new: Any) -> None:
    """The update raises torch's error, and the scale and the iteration are as before."""
    if isinstance(new, torch.Tensor) and new.device.type == "cpu":
        new = new.to(device).detach().requires_grad_(new.requires_grad)

    def scenario(library: Library) -> Iterator[Outcome]:
        harness = Harness(library, device, SMALL, init_scale=8.0)
        harness.backward()
        yield harness.did(harness.scaler.unscale_, harness.optimizer)
        yield harness.did(harness.scaler.update, new)
        yield from harness.calls("unscale_", "step", "update")

    _, refused, unscaled_again, *others = compare(scenario)
    assert refused.raised is not None
    assert "unscale_() has already been called" in str(unscaled_again.raised)
    assert all(outcome.raised is None for outcome in others)


@clause("amp.grad_scaler.update.needs_checks")
@pytest.mark.parametrize("bare", [True, False])
def test_update_without_any_check(compare: Compare, device: str, bare: bool) -> None:
    """The update raises, also twice in a row. With a new scale, no check is needed."""

    def scenario(library: Library) -> Iterator[Outcome]:
        harness = Harness(library, device, (Gradient((2,), None),) if bare else FOUR).used()
        if bare:
            yield harness.did(harness.scaler.unscale_, harness.optimizer)
        yield harness.did(harness.scaler.update)
        yield harness.did(harness.scaler.update, 2.0)
        yield from harness.calls("unscale_", "update", "update")

    raised = [outcome.raised for outcome in compare(scenario)[bare:]]
    assert [error is not None for error in raised] == [True, False, False, bare, True]
    assert all("No inf checks were recorded" in error.text for error in raised if error is not None)


@clause("amp.grad_scaler.update.never_dies")
@pytest.mark.deviation("grad_scaler.scale_never_dies")
def test_scale_stays_above_zero_and_warns(deviation: DeviationJudge, device: str) -> None:
    """A clean step must be taken after two hundred overflows in a row, and a warning must have been given."""
    floor = torch.finfo(torch.float32).smallest_normal

    def probe(library: Library) -> tuple[float, bool, bool]:
        harness = Harness(library, device, SMALL, init_scale=2.0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            lowest = scales(harness, [False] * 200)[-1]
        harness.zero_grad()
        harness.backward()
        harness.scaler.step(harness.optimizer)
        stepped = bool((harness.parameters[-1] != 0).any()) and bool(harness.parameters[-1].isfinite().all())
        return lowest, stepped, any("scale" in str(warning.message) for warning in caught)

    deviation.judge(
        probe,
        torch_does=lambda outcome: outcome == (0.0, False, False),
        we_do=lambda outcome: outcome == (floor, True, True),
    )


SETTERS = {
    "growth_factor": st.sampled_from([2.0, 1.5, 4, 1.0]),
    "backoff_factor": st.sampled_from([0.5, 0.25, 1.0]),
    "growth_interval": st.integers(1, 4),
}


@clause("amp.grad_scaler.setters.take_effect")
@given(
    before=st.booleans(),
    calls=st.lists(
        st.sampled_from(list(SETTERS)).flatmap(lambda name: st.tuples(st.just(name), SETTERS[name])),
        min_size=1,
        max_size=5,
    ),
)
def test_setters_match_torch(
    compare: Compare, device: str, before: bool, calls: list[tuple[str, Any]]
) -> None:
    def scenario(library: Library) -> Iterator[Outcome]:
        harness = Harness(library, device, SMALL, init_scale=64.0, growth_interval=2)
        if not before:
            yield from harness.iteration()
        for name, value in calls:
            yield harness.did(getattr(harness.scaler, f"set_{name}"), value)
            yield harness.did(getattr(harness.scaler, f"get_{name}"))
        for last in (None, None, None, math.inf, None, None):
            yield from harness.iteration(last)

    compare(scenario)


def numbers(scaler: Any) -> tuple[float, float, int]:
    return scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()


@clause("amp.grad_scaler.getters.answer")
@pytest.mark.parametrize("used", [False, True])
def test_getters_return_current_values(subject: Library, device: str, used: bool) -> None:
    harness = Harness(
        subject, device, SMALL, init_scale=8.0, growth_factor=3.0, backoff_factor=0.25, growth_interval=1
    )
    if used:
        harness.used()
    scaler = harness.scaler
    assert (scaler.get_scale(), type(scaler.get_scale())) == (8.0, float)
    assert numbers(scaler) == (3.0, 0.25, 1)
    assert scaler.is_enabled() is True
    harness.backward()
    scaler.step(harness.optimizer)
    scaler.update()
    assert scaler.get_scale() == 24.0
    scaler.set_growth_factor(5.0)
    scaler.set_backoff_factor(0.75)
    scaler.set_growth_interval(4)
    assert numbers(scaler) == (5.0, 0.75, 4)
    assert scaler.get_scale() == 24.0


@clause("amp.grad_scaler.setters.take_effect")
@pytest.mark.parametrize("interval", [2.5, 2.0, 0, -1, True], ids=repr)
def test_growth_interval_keeps_its_type(compare: Compare, device: str, interval: float) -> None:
    """The interval is stored unchanged even if the next update rejects it."""

    def scenario(library: Library) -> Iterator[Outcome]:
        harness = Harness(library, device, SMALL, init_scale=8.0)
        yield harness.did(harness.scaler.set_growth_interval, interval)
        yield harness.did(harness.scaler.get_growth_interval)
        yield from harness.iteration()

    compare(scenario)


@clause("amp.grad_scaler.getters.answer")
@pytest.mark.parametrize("getter", ["get_scale", "state_dict", "get_growth_interval", "is_enabled"])
def test_getters_do_not_initialize_scale(subject: Library, device: str, getter: str) -> None:
    """The first loss decides the device of the scale, not the first query."""
    harness = Harness(subject, device, SMALL)
    getattr(harness.scaler, getter)()
    with pytest.raises(AssertionError, match="_scale is None"):
        harness.scaler.unscale_(harness.optimizer)


NO_NUMBERS = ["2", None, [2]]


@clause("amp.grad_scaler.setters.bad_values")
@pytest.mark.parametrize("value", NO_NUMBERS, ids=repr)
def test_growth_interval_rejects_non_numbers(compare: Compare, device: str, value: Any) -> None:
    """torch raises its operator's error in the next update. The scale is as before."""

    def scenario(library: Library) -> Iterator[Outcome]:
        harness = Harness(library, device, SMALL, init_scale=8.0)
        yield harness.did(harness.scaler.set_growth_interval, value)
        harness.backward()
        yield from harness.calls("step", "update")
        yield harness.did(harness.scaler.set_growth_interval, 2)
        yield harness.did(harness.scaler.update)

    _, _, refused, _, repeated = compare(scenario)
    assert refused.raised is not None
    assert repeated.raised is None


@clause("amp.grad_scaler.setters.bad_values")
@pytest.mark.parametrize("name", ["growth_factor", "backoff_factor"])
@pytest.mark.parametrize("value", NO_NUMBERS, ids=repr)
def test_factor_that_is_no_number_raises(
    subject: Library, reference: Library, device: str, name: str, value: Any
) -> None:
    for library in (reference, subject):
        harness = Harness(library, device, SMALL, init_scale=8.0)
        harness.backward()
        harness.scaler.step(harness.optimizer)
        calls = [partial(getattr(harness.scaler, f"set_{name}"), value), harness.scaler.update]
        raised = [outcome.raised for outcome in map(observe, calls) if outcome.raised]
        assert [error.kind for error in raised] == [TypeError]
        assert harness.scaler.get_scale() == 8.0


def make(**options: float) -> Callable[[Library, str], Any]:
    return lambda library, device: library.amp.GradScaler(device, **options)


def set_factor(name: str, value: float) -> Callable[[Library, str], Any]:
    return lambda library, device: getattr(library.amp.GradScaler(device), f"set_{name}")(value)


def update(value: float, as_tensor: bool) -> Callable[[Library, str], Any]:
    return lambda library, device: (
        Harness(library, device, SMALL).used().scaler.update(tensor(value, device) if as_tensor else value)
    )


# Calls that torch silently accepts, with the values that they set.
RUINOUS: dict[str, Callable[[Library, str], Any]] = {
    **{f"init_scale {value}": make(init_scale=value) for value in (math.nan, math.inf, -1.0, 0.0)},
    **{f"new_scale {value}": update(value, False) for value in (math.nan, math.inf, -1.0)},
    **{f"new_scale tensor {value}": update(value, True) for value in (math.nan, math.inf, -1.0)},
    **{
        f"set_growth_factor {value}": set_factor("growth_factor", value)
        for value in (math.nan, 0.5, 0.0, -2.0)
    },
    **{
        f"set_backoff_factor {value}": set_factor("backoff_factor", value)
        for value in (math.nan, 0.0, -0.5, 1.5)
    },
    "growth_factor nan": make(growth_factor=math.nan),
    **{f"backoff_factor {value}": make(backoff_factor=value) for value in (math.nan, 0.0, -1.0)},
}


@clause("amp.grad_scaler.numbers.ruinous")
@pytest.mark.deviation("grad_scaler.ruinous_numbers")
@pytest.mark.parametrize("call", list(RUINOUS))
def test_ruinous_numbers_raise(deviation: DeviationJudge, device: str, call: str) -> None:
    if "tensor" in call and device != "cpu":
        unavailable("a tensor there cannot be looked at without waiting for it")
    deviation.judge(
        lambda library: observe(RUINOUS[call], library, device).raised,
        torch_does=lambda raised: raised is None,
        we_do=lambda raised: raised is not None and issubclass(raised.kind, (ValueError, AssertionError)),
    )
