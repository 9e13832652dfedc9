"""GradScaler's constructor: its arguments, devices, the warning without CUDA, and the disabled scaler."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.judge.clauses import clause
from conformance.judge.comparing import Compare
from conformance.judge.library import Library
from conformance.judge.outcome import Outcome, observe
from conformance.strategies.scaling import Harness, entries

ARGUMENTS: dict[str, st.SearchStrategy[Any]] = {
    "init_scale": st.sampled_from([1.0, 2.0**16, 3.0, 0.5, 0.1, 1e-3, 8]),
    "growth_factor": st.sampled_from([2.0, 1.5, 1.001, 10.0, 3]),
    "backoff_factor": st.sampled_from([0.5, 0.1, 0.999, 0.25]),
    "growth_interval": st.integers(1, 5),
}


@clause("amp.grad_scaler.constructor.arguments")
@given(
    options=st.fixed_dictionaries({}, optional=ARGUMENTS),
    grad_outcomes=st.permutations([None] * 7 + [math.inf, math.nan]),
)
def test_arguments_take_effect(
    compare: Compare, device: str, options: dict[str, Any], grad_outcomes: list[float | None]
) -> None:
    def scenario(library: Library) -> Iterator[Outcome]:
        harness = Harness(library, device, **options)
        yield harness.did(harness.scaler.get_scale)
        for last in grad_outcomes:
            yield from harness.iteration(last)

    compare(scenario)


@clause("amp.grad_scaler.constructor.arguments")
def test_default_arguments_are_documented_values(subject: Library, device: str) -> None:
    scaler = subject.amp.GradScaler(device)
    assert scaler.get_scale() == 65536.0
    assert scaler.get_growth_factor() == 2.0
    assert scaler.get_backoff_factor() == 0.5
    assert scaler.get_growth_interval() == 2000
    assert scaler.is_enabled() is True


@clause("amp.grad_scaler.constructor.arguments")
def test_arguments_by_position(compare: Compare, device: str) -> None:
    def made(library: Library) -> Outcome:
        return observe(lambda: entries(library.amp.GradScaler(device, 4.0, 3.0, 0.25, 7, True)))

    compare(made)


@clause("amp.grad_scaler.constructor.arguments")
@pytest.mark.parametrize("interval", [0, -1, 2.5, 1.0, True], ids=repr)
def test_unusual_growth_intervals_match_torch(compare: Compare, device: str, interval: float) -> None:
    """An interval that is not a positive integer is stored unchanged, and its effect shows in the updates."""

    def scenario(library: Library) -> Iterator[Outcome]:
        harness = Harness(library, device, init_scale=8.0, growth_interval=interval)
        yield harness.did(harness.scaler.get_growth_interval)
        yield from harness.iteration()
        yield from harness.iteration()
        yield from harness.iteration(math.inf)

    compare(scenario)


@clause("amp.grad_scaler.constructor.bad_arguments")
@pytest.mark.parametrize(
    "arguments",
    [
        {"growth_factor": 1.0},
        {"growth_factor": 0.5},
        {"growth_factor": -2.0},
        {"growth_factor": "2"},
        {"growth_factor": None},
        {"backoff_factor": 1.0},
        {"backoff_factor": 1.5},
        {"backoff_factor": "0.5"},
        {"backoff_factor": None},
        {"growth_factor": 1.0, "backoff_factor": 1.0},
        {"scale": 2.0},
        {"growth_factor": 1.0, "backoff_factor": 1.0, "enabled": False},
        {"init_scale": "a", "growth_interval": None, "enabled": False},
    ],
    ids=str,
)
def test_bad_arguments(compare: Compare, device: str, arguments: dict[str, Any]) -> None:
    """A disabled scaler accepts every value."""

    def made(library: Library) -> Outcome:
        return observe(lambda: entries(library.amp.GradScaler(device, **arguments)))

    [outcome] = compare(made)
    assert (outcome.raised is None) == ("enabled" in arguments)


@clause("amp.grad_scaler.constructor.device")
@pytest.mark.parametrize("where", ["cpu", "cuda", "xpu", None])
@pytest.mark.parametrize("enabled", [True, False, None])
@pytest.mark.parametrize("cuda_is_there", [True, False])
def test_device_and_the_warning_without_cuda(
    compare: Compare,
    monkeypatch: pytest.MonkeyPatch,
    where: str | None,
    enabled: bool | None,
    cuda_is_there: bool,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda_is_there)
    keywords = {key: value for key, value in (("device", where), ("enabled", enabled)) if value is not None}

    def made(library: Library) -> Outcome:
        def make() -> tuple[bool, float, dict[str, Any]]:
            scaler = library.amp.GradScaler(**keywords)
            return scaler.is_enabled(), scaler.get_scale(), entries(scaler)

        return observe(make)

    [outcome] = compare(made)
    assert bool(outcome.warned) == (where in ("cuda", None) and enabled is not False and not cuda_is_there)


@clause("amp.grad_scaler.constructor.device")
def test_new_scale_must_be_on_device_of_scaler(compare: Compare, device: str) -> None:
    def scenario(library: Library) -> Iterator[Outcome]:
        for where in (device, "xpu"):
            harness = Harness(library, device)
            harness.scaler = library.amp.GradScaler(device=where)
            harness.used()
            yield harness.did(harness.scaler.update, torch.tensor(4.0, device=device))
            yield harness.did(harness.scaler.update, torch.tensor(4.0, device="meta"))

    accepted, *refused = compare(scenario)
    assert accepted.raised is None
    assert ["new_scale should be a float" in str(outcome.raised) for outcome in refused] == [True] * 3


@clause("amp.grad_scaler.enabled.off_does_nothing")
@given(data=st.data())
def test_disabled_scaler_does_nothing(compare: Compare, device: str, data: st.DataObject) -> None:
    """Call the methods of a disabled scaler in any order. The optimizer steps with any gradients."""
    calls = data.draw(
        st.lists(st.sampled_from(["backward", "unscale_", "step", "update", "state"]), max_size=8)
    )
    last = data.draw(st.sampled_from([None, math.inf, math.nan]))

    def scenario(library: Library) -> Iterator[Outcome]:
        harness = Harness(library, device, optimizer="recording", enabled=False, init_scale=8.0)
        yield harness.did(harness.scaler.is_enabled)
        for call in calls:
            if call == "backward":
                yield harness.did(harness.backward, last)
            elif call == "unscale_":
                yield harness.did(harness.scaler.unscale_, harness.optimizer)
            elif call == "step":
                yield harness.did(harness.scaler.step, harness.optimizer, 1, two=2)
            elif call == "update":
                yield harness.did(harness.scaler.update, 2.0)
            else:
                yield harness.did(harness.scaler.load_state_dict, {"scale": 3.0})
            yield harness.did(harness.scaler.get_scale)

    compare(scenario)


@clause("amp.grad_scaler.enabled.off_does_nothing")
@pytest.mark.parametrize("method", ["scale", "update", "unscale_", "load_state_dict"])
@pytest.mark.parametrize("argument", [None, 3, "x", {}, (), [[1]]], ids=repr)
def test_disabled_scaler_accepts_any_argument(
    compare: Compare, device: str, method: str, argument: Any
) -> None:
    def called(library: Library) -> Outcome:
        return observe(getattr(library.amp.GradScaler(device, enabled=False), method), argument)

    [outcome] = compare(called)
    assert outcome.raised is None


@clause("amp.grad_scaler.enabled.off_does_nothing")
def test_disabled_scaler_returns_outputs_themselves(subject: Library, device: str) -> None:
    scaler = subject.amp.GradScaler(device, enabled=False)
    for outputs in (torch.ones(2, device=device), [torch.ones((), device=device)], iter([]), "text", None):
        assert scaler.scale(outputs) is outputs


@clause("amp.grad_scaler.enabled.off_does_nothing")
def test_disabled_scaler_accepts_closures(compare: Compare, device: str) -> None:
    def scenario(library: Library) -> Iterator[Outcome]:
        harness = Harness(library, device, optimizer="sgd", enabled=False)

        def closure() -> float:
            harness.zero_grad()
            harness.backward()
            return 0.5

        yield harness.did(harness.scaler.step, harness.optimizer, closure)
        yield harness.did(harness.scaler.step, harness.optimizer, closure=closure)

    assert [outcome.value for outcome in compare(scenario)] == [0.5, 0.5]


@clause("amp.grad_scaler.enabled.off_answers")
def test_disabled_scaler_has_scale_one_and_empty_state(subject: Library, device: str) -> None:
    scaler = subject.amp.GradScaler(device, init_scale=4.0, enabled=False)
    assert (scaler.get_scale(), type(scaler.get_scale())) == (1.0, float)
    assert scaler.is_enabled() is False
    assert scaler.state_dict() == {}
