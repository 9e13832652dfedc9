"""GradScaler's state: state_dict, load_state_dict, pickles and copies, also between the libraries."""

from __future__ import annotations

import copy
import importlib
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.judge.clauses import clause
from conformance.judge.comparing import Compare
from conformance.judge.deviations import DeviationJudge
from conformance.judge.library import Library
from conformance.judge.outcome import Outcome, observe
from conformance.strategies.gradients import Gradient
from conformance.strategies.scaling import FOUR, Harness, entries, pickled

GOOD = {
    "scale": 2.0,
    "growth_factor": 4.0,
    "backoff_factor": 0.25,
    "growth_interval": 1,
    "_growth_tracker": 3,
}
OTHERS = {"init_scale": 512.0, "growth_factor": 3.0, "backoff_factor": 0.25, "growth_interval": 4}
STATES = st.fixed_dictionaries(
    {
        "scale": st.sampled_from([1.0, 3.0, 1024, 0.125]),
        "growth_factor": st.sampled_from([2.0, 4.0, 3]),
        "backoff_factor": st.sampled_from([0.5, 0.25]),
        "growth_interval": st.integers(1, 4),
        "_growth_tracker": st.integers(0, 3),
    }
)
GRAD_OUTCOMES = st.lists(st.sampled_from([None, None, None, math.inf]), max_size=4)


def lived(library: Library, device: str, grad_outcomes: list[float | None], **options: Any) -> Harness:
    harness = Harness(library, device, FOUR[2:], **options)
    for last in grad_outcomes:
        list(harness.iteration(last))
    return harness


def goes_on(harness: Harness) -> Iterator[Outcome]:
    """Yield the outcomes of further iterations: growth, backoff, and the count until the next growth."""
    yield harness.did(harness.scaler.get_scale)
    for last in (None, None, math.inf, None, None, None, None):
        yield from harness.iteration(last)


@clause("amp.grad_scaler.state_dict.five_entries")
@given(grad_outcomes=GRAD_OUTCOMES)
def test_state_dict(compare: Compare, device: str, grad_outcomes: list[float | None]) -> None:
    def scenario(library: Library) -> Iterator[Outcome]:
        harness = lived(library, device, grad_outcomes, init_scale=8.0, growth_interval=3)
        yield harness.did(harness.scaler.state_dict)
        yield observe(lambda: [type(value).__name__ for value in harness.scaler.state_dict().values()])
        yield observe(lambda: json.loads(json.dumps(harness.scaler.state_dict())))

    compare(scenario)


@clause("amp.grad_scaler.state_dict.five_entries")
def test_state_dict_is_a_copy(subject: Library, device: str) -> None:
    harness = Harness(subject, device, init_scale=8.0, growth_interval=1).used()
    before = harness.scaler.state_dict()
    harness.scaler.step(harness.optimizer)
    harness.scaler.update()
    after = harness.scaler.state_dict()
    assert (before["scale"], after["scale"]) == (8.0, 16.0)
    before["growth_factor"] = 100.0
    assert after["growth_factor"] == 2.0
    assert harness.scaler.get_growth_factor() == 2.0
    assert set(harness.scaler.state_dict()) == set(GOOD)


@clause("amp.grad_scaler.load_state_dict.restores_all")
@pytest.mark.parametrize("used", [False, True])
@given(state=STATES)
def test_loaded_state_matches_torch(compare: Compare, device: str, used: bool, state: dict[str, Any]) -> None:
    def scenario(library: Library) -> Iterator[Outcome]:
        harness = lived(library, device, [None] * used, **OTHERS)
        loaded = dict(state)
        yield harness.did(harness.scaler.load_state_dict, loaded)
        loaded["scale"] = 100.0
        yield from goes_on(harness)

    compare(scenario)


@clause("amp.grad_scaler.load_state_dict.restores_all")
def test_loads_in_the_middle_of_an_iteration(compare: Compare, device: str) -> None:
    def scenario(library: Library) -> Iterator[Outcome]:
        harness = Harness(library, device, init_scale=8.0)
        harness.backward()
        yield harness.did(harness.scaler.unscale_, harness.optimizer)
        yield harness.did(harness.scaler.load_state_dict, {**GOOD, "_growth_tracker": 0})
        yield from harness.calls("unscale_", "step", "update")

    compare(scenario)


@clause("amp.grad_scaler.load_state_dict.between_libraries")
@given(grad_outcomes=GRAD_OUTCOMES)
def test_state_dict_loads_into_other_library(
    subject: Library, reference: Library, device: str, grad_outcomes: list[float | None]
) -> None:
    """The subject continues from torch's checkpoint, and torch continues from the subject's."""
    for writer, reader in ((reference, subject), (subject, reference)):
        written = lived(writer, device, grad_outcomes, init_scale=8.0, growth_interval=3)
        stays = lived(writer, device, grad_outcomes, init_scale=8.0, growth_interval=3)
        read = lived(reader, device, [], **OTHERS)
        read.scaler.load_state_dict(written.scaler.state_dict())
        for last in (None, None, math.inf, None, None, None):
            for harness in (stays, read):
                list(harness.iteration(last))
            assert read.scaler.state_dict() == stays.scaler.state_dict()


FOREIGN: dict[str, Any] = {
    "an optimizer's": {"state": {}, "param_groups": []},
    "apex's": {"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 0}},
    "empty": {},
    "None": None,
    "a list": [1.0, 2.0],
    "a number": 3,
}


@clause("amp.grad_scaler.load_state_dict.foreign")
@pytest.mark.parametrize("foreign", list(FOREIGN))
@pytest.mark.parametrize("used", [False, True])
def test_foreign_states(compare: Compare, device: str, foreign: str, used: bool) -> None:
    """The load raises torch's exception before anything is changed."""

    def scenario(library: Library) -> Iterator[Outcome]:
        harness = lived(library, device, [None] * used, init_scale=8.0)
        yield harness.did(harness.scaler.load_state_dict, FOREIGN[foreign])
        yield from goes_on(harness)

    assert compare(scenario)[0].raised is not None


@clause("amp.grad_scaler.load_state_dict.foreign")
@pytest.mark.parametrize("used", [False, True])
def test_unknown_entries_are_ignored(compare: Compare, device: str, used: bool) -> None:
    def scenario(library: Library) -> Iterator[Outcome]:
        harness = lived(library, device, [None] * used)
        yield harness.did(harness.scaler.load_state_dict, {**GOOD, "hysteresis": 2, "module": None})
        yield from goes_on(harness)

    assert compare(scenario)[0].raised is None


@clause("amp.grad_scaler.load_state_dict.all_or_nothing")
@pytest.mark.deviation("grad_scaler.load_all_or_nothing")
@pytest.mark.parametrize("missing", [key for key in GOOD if key != "scale"])
@pytest.mark.parametrize("used", [False, True])
def test_missing_entry_leaves_scaler_unchanged(
    deviation: DeviationJudge, device: str, missing: str, used: bool
) -> None:
    broken = {key: value for key, value in GOOD.items() if key != missing}

    def probe(library: Library) -> tuple[str, bool]:
        harness = lived(library, device, [None] * used, **OTHERS)
        before = harness.scaler.state_dict()
        outcome = harness.did(harness.scaler.load_state_dict, broken)
        return str(outcome.raised), harness.scaler.state_dict() == before

    text = f"KeyError: '{missing}'"
    deviation.judge(
        probe,
        torch_does=lambda outcome: outcome == (text, False),
        we_do=lambda outcome: outcome == (text, True),
    )


# A used scaler's tensor rejects a scale that is not a number before torch has loaded any other entry.
CORRUPTED = [
    (entry, value, used)
    for entry in GOOD
    for value in ("2", None, [1.0], math.nan, 2.5 if entry == "growth_interval" else -3.5)
    for used in (False, True)
    if not (used and entry == "scale" and not isinstance(value, float))
]


@clause("amp.grad_scaler.load_state_dict.all_or_nothing")
@pytest.mark.deviation("grad_scaler.load_all_or_nothing")
@pytest.mark.parametrize(("entry", "value", "used"), CORRUPTED, ids=repr)
def test_corrupted_entry_leaves_scaler_unchanged(
    deviation: DeviationJudge, device: str, entry: str, value: Any, used: bool
) -> None:
    """Values that are not numbers, or that a scaler cannot use, raise without changing anything."""

    def probe(library: Library) -> tuple[bool, bool]:
        harness = lived(library, device, [None] * used, **OTHERS)
        before = harness.scaler.state_dict()
        outcome = harness.did(harness.scaler.load_state_dict, {**GOOD, entry: value})
        return outcome.raised is not None, harness.scaler.state_dict() == before

    deviation.judge(probe, we_do=lambda outcome: outcome == (True, True))


@clause("amp.grad_scaler.load_state_dict.then_unscale")
@pytest.mark.deviation("grad_scaler.loaded_scale_is_known")
@pytest.mark.parametrize("method", ["unscale_", "step"])
def test_unscale_right_after_loading(deviation: DeviationJudge, device: str, method: str) -> None:
    """A fresh scaler that loaded a state knows its scale, so gradients may come before the first loss."""

    def probe(library: Library) -> tuple[str, list[float]]:
        harness = Harness(library, device, FOUR[:1])
        harness.parameters[0].grad.fill_(8.0)
        harness.scaler.load_state_dict({**GOOD, "_growth_tracker": 0})
        outcome = harness.did(getattr(harness.scaler, method), harness.optimizer)
        if outcome.raised is None:
            if method == "unscale_":
                harness.scaler.step(harness.optimizer)
            harness.scaler.update()
        return str(outcome.raised), [float(harness.parameters[0].grad[0]), harness.scaler.get_scale()]

    text = (
        f"AssertionError: Attempted {method} but _scale is None.  This may indicate your script did not use "
        "scaler.scale(loss or outputs) earlier in the iteration."
    )
    deviation.judge(
        probe,
        torch_does=lambda outcome: outcome == (text, [8.0, 2.0]),
        we_do=lambda outcome: outcome == ("None", [4.0, 8.0]),
    )


@clause("amp.grad_scaler.pickle.between_iterations")
@pytest.mark.deviation("grad_scaler.refused_step_can_be_taken_again")
@pytest.mark.parametrize("refused", ["float16", "no gradients"])
def test_scaler_can_be_pickled_after_refused_step(
    deviation: DeviationJudge, device: str, refused: str
) -> None:
    gradient = Gradient((2,), torch.float16 if refused == "float16" else None)

    def probe(library: Library) -> tuple[str, str]:
        harness = Harness(library, device, (gradient,), init_scale=8.0).used()
        outcome = harness.did(harness.scaler.step, harness.optimizer)
        return str(outcome.raised), str(observe(lambda: pickled(harness.scaler).get_scale()).raised)

    refusal = "unscale FP16 gradients" if refused == "float16" else "No inf checks were recorded"
    text = (
        "AssertionError: A GradScaler instance may only be pickled at the beginning of an iteration, or at the end "
        "after scaler.update()."
    )
    deviation.judge(
        probe,
        torch_does=lambda outcome: refusal in outcome[0] and outcome[1] == text,
        we_do=lambda outcome: refusal in outcome[0] and outcome[1] == "None",
    )


COPIES: dict[str, Callable[[Any], Any]] = {"pickle": pickled, "deepcopy": copy.deepcopy}


@clause("amp.grad_scaler.pickle.keeps_all")
@pytest.mark.parametrize("how", list(COPIES))
@pytest.mark.parametrize("enabled", [True, False])
@given(grad_outcomes=GRAD_OUTCOMES)
def test_copies_continue_independently(
    compare: Compare, device: str, how: str, enabled: bool, grad_outcomes: list[float | None]
) -> None:
    """Copy a fresh, a used and a disabled scaler. The original and the copy continue independently."""

    def scenario(library: Library) -> Iterator[Outcome]:
        options = {"init_scale": 8.0, "growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 3}
        harness = lived(library, device, grad_outcomes, enabled=enabled, **options)
        copied = lived(library, device, [])
        yield harness.did(lambda: None)
        copied.scaler = COPIES[how](harness.scaler)
        yield copied.did(copied.scaler.is_enabled)
        yield from goes_on(copied)
        yield harness.did(harness.scaler.get_scale)
        yield from goes_on(harness)

    compare(scenario)


@clause("amp.grad_scaler.pickle.keeps_all")
def test_two_pickles_are_two_scalers(subject: Library, device: str) -> None:
    scalers = [subject.amp.GradScaler(device, init_scale=scale) for scale in (2.0, 32.0, 8.0)]
    assert [pickled(scaler).get_scale() for scaler in scalers] == [2.0, 32.0, 8.0]


@clause("amp.grad_scaler.pickle.keeps_all")
def test_copies_keep_subclass_attributes(subject: Library, device: str) -> None:
    class Counting(subject.amp.GradScaler):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.skipped = [1, 2]

    scaler = Counting(device, init_scale=4.0)
    scaler.scale(torch.ones((), device=device))
    for copied in (pickled(scaler), copy.deepcopy(scaler)):
        assert type(copied) is Counting
        assert (copied.skipped, copied.get_scale()) == ([1, 2], 4.0)
        assert copied.skipped is not scaler.skipped


@clause("amp.grad_scaler.pickle.found_by_name")
def test_class_is_importable_by_name(subject: Library) -> None:
    """The class is found in its module under its own name."""
    scaler_class = subject.amp.GradScaler
    importable = getattr(importlib.import_module(scaler_class.__module__), scaler_class.__qualname__)
    assert issubclass(scaler_class, importable)


@clause("amp.grad_scaler.pickle.between_iterations")
@pytest.mark.parametrize("how", list(COPIES))
@pytest.mark.parametrize("call", ["unscale_", "step"])
@pytest.mark.parametrize("optimizer", ["sgd", "aware"])
def test_copy_raises_in_the_middle_of_iteration(
    compare: Compare, device: str, how: str, call: str, optimizer: str
) -> None:
    def scenario(library: Library) -> Iterator[Outcome]:
        harness = Harness(library, device, optimizer=optimizer, init_scale=8.0)
        harness.backward()
        yield observe(lambda: entries(COPIES[how](harness.scaler)))
        yield harness.did(getattr(harness.scaler, call), harness.optimizer)
        yield observe(lambda: entries(COPIES[how](harness.scaler)))
        yield from harness.calls("step", "update")
        yield observe(lambda: entries(COPIES[how](harness.scaler)))

    before, _, within, *_, after = compare(scenario)
    assert [copied.raised for copied in (before, after)] == [None, None]
    assert "may only be pickled at the beginning of an iteration" in str(within.raised)


@clause("amp.grad_scaler.pickle.torchs_own")
@pytest.mark.parametrize("enabled", [True, False])
@given(grad_outcomes=GRAD_OUTCOMES)
def test_reads_torchs_pickle(
    compare: Compare, reference: Library, device: str, enabled: bool, grad_outcomes: list[float | None]
) -> None:
    """A scaler in a checkpoint written by torch is loaded as the subject's class instead of torch's."""
    options = {"init_scale": 8.0, "growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 3}
    written = lived(reference, device, grad_outcomes, enabled=enabled, **options)

    def scenario(library: Library) -> Iterator[Outcome]:
        harness = lived(library, device, [])
        harness.scaler = pickled(written.scaler, as_class=library.amp.GradScaler)
        yield harness.did(harness.scaler.is_enabled)
        yield from goes_on(harness)

    compare(scenario)


@clause("amp.grad_scaler.pickle.setstate")
def test_setstate_replaces_former_state(compare: Compare, reference: Library, device: str) -> None:
    """The state of an enabled scaler enables a disabled one, and sets its numbers."""

    def scenario(library: Library) -> Iterator[Outcome]:
        harness = Harness(library, device, enabled=False)
        for options in ({"init_scale": 8.0}, {"init_scale": 2.0, "growth_interval": 1}):
            harness.scaler.__setstate__(reference.amp.GradScaler(device, **options).__getstate__())
            yield harness.did(harness.scaler.is_enabled)
            yield from goes_on(harness)
            harness.scaler = library.amp.GradScaler(device, init_scale=1.0)

    compare(scenario)
