"""The clock's own arithmetic, and that asv will find every benchmark. Nothing is timed here."""

import argparse
import math
import random
import statistics
from dataclasses import replace

import pytest
import torch

from benchmarks import benchmark_cases, comparison, machine, timing
from benchmarks.common import LEFT_OUT_OF_HISTORY, LEFT_OUT_OF_QUICK, SHAPES, some_of, training
from benchmarks.decision import LIMIT
from benchmarks.timing import QUICK, Workload, by_turns, median_interval, paired, summary

benchmark_cases.load_all()
RATIOS = comparison.Ratio.__subclasses__()
(FSDP_STEP,) = (kind for kind in RATIOS if kind.__name__ == "RatioFsdpStep")


@pytest.mark.parametrize("kind", RATIOS, ids=lambda kind: kind.__name__)
def test_each_ratio_spells_out_its_setup_cache(kind):
    """One that is inherited shares its line with the others, and asv would run it for one class alone."""
    assert "setup_cache" in vars(kind)


@pytest.mark.parametrize(
    "kind", [*RATIOS, *comparison.Absolute.__subclasses__()], ids=lambda kind: kind.__name__
)
def test_parameters_have_names(kind):
    assert len(kind.params) == len(kind.param_names)
    assert "device" in kind.param_names or kind.params == [["cpu"]]
    assert int(kind.version) >= 1


def test_what_is_done_once_is_known():
    assert {kind.__name__ for kind in RATIOS if kind.is_one_off} == {
        "RatioImport",
        "RatioFsdpWrap",
        "RatioFsdpSave",
        "RatioFsdpLoad",
        "RatioFullyShardOwnState",
        "RatioFullyShardWholeState",
        "RatioOptimizerCompile",
    }


def test_quick_leaves_something_of_each_ratio_but_those_that_tell_least():
    assert {kind.__name__ for kind in RATIOS if not benchmark_cases.cases(kind, LEFT_OUT_OF_QUICK)} == {
        "RatioFullyShardOwnState",
        "RatioFullyShardStepToFsdp1",
    }


def test_history_has_what_the_dashboard_draws():
    tracked = [kind for kind in benchmark_cases.load_all() if benchmark_cases.is_tracked(kind)]
    assert set(RATIOS) <= set(tracked)
    assert all(hasattr(kind, "curve") for kind in tracked)
    cases = {kind.__name__: benchmark_cases.cases(kind, LEFT_OUT_OF_HISTORY) for kind in tracked}
    assert {case[0] for case in cases["RatioFsdpStep"]} == {1, 2, 4}
    assert {case[0] for case in benchmark_cases.cases(FSDP_STEP, LEFT_OUT_OF_QUICK)} == {2}
    assert {case[0] for case in cases["FsdpPeak"]} == {"impl", "torch"}
    assert all(
        set(benchmark_cases.cases(kind, LEFT_OUT_OF_QUICK)) <= set(cases[kind.__name__]) for kind in RATIOS
    )


def test_gpt2_has_the_published_size():
    assert len(SHAPES["gpt2"]) == 148
    assert sum(math.prod(shape) for shape in SHAPES["gpt2"]) == 124_439_808


@pytest.mark.parametrize("draws", [6, 9, 60, 150])
def test_median_interval_encloses_the_median_often_enough(draws):
    chance = random.Random(draws)
    trials = 2_000
    hits = 0
    for _ in range(trials):
        low, high = median_interval(sorted(chance.expovariate(1.0) for _ in range(draws)))
        hits += low <= math.log(2.0) <= high
    assert hits / trials > 0.95 - 3 * math.sqrt(0.05 * 0.95 / trials)


def test_summary_is_of_pairs_not_of_sums():
    """One pair during which the machine stood still must not count."""
    result = summary([1.0, 2.0, 30.0, 1.0, 1.0], [2.0, 4.0, 1.0, 2.0, 2.0])
    assert (result.ratio, result.noise, result.pairs) == (0.5, 0.0, 5)


class Drawn:
    """A stopwatch by which a call takes what it says."""

    def per_call(self, work, calls):
        return work.call()


@pytest.mark.parametrize("spread", [0.01, 0.05, 0.1, 0.15, 0.3])
def test_a_case_that_ends_early_is_wrong_no_more_often(monkeypatch, spread):
    """Its interval misses what is true, and a case that is as it was looks slower, as rarely as after all pairs."""
    monkeypatch.setattr(timing, "HostStopwatch", Drawn)
    chance = random.Random(spread)
    subject, reference = Workload(lambda: 0.7 * chance.lognormvariate(0.0, spread)), Workload(lambda: 1.0)
    trials = 1_000
    rates = {}
    for effort in (replace(QUICK, looks_from_s=0.0), replace(QUICK, looks=())):
        found = [paired(subject, reference, "cpu", effort) for _ in range(trials)]
        missed = sum(not one.low <= 0.7 <= one.high for one in found) / trials
        alarms = sum(one.ratio > 0.7 * LIMIT for one in found) / trials
        rates[effort.looks] = missed, alarms, statistics.fmean(one.pairs for one in found)
    (missed, alarms, pairs), (missed_by_all, alarms_by_all, all_pairs) = rates.values()
    assert missed < min(missed_by_all + 0.01, 0.05)
    assert alarms <= alarms_by_all + 0.001
    assert all_pairs == QUICK.pairs
    assert pairs < 0.2 * all_pairs or spread > 0.05


def test_what_is_timed_by_turns_has_a_ratio_to_each(monkeypatch):
    """Each turn is taken backwards after it was taken forwards, so that drift cancels."""
    monkeypatch.setattr(timing, "HostStopwatch", Drawn)
    order = []
    works = [Workload(lambda took=took: order.append(took) or took) for took in (0.5, 1.0, 2.0)]
    found = by_turns(works[0], works[1:], effort=QUICK)
    assert [(one.ratio, one.pairs) for one in found] == [(0.5, QUICK.pairs), (0.25, QUICK.pairs)]
    assert order[-6:] == [0.5, 1.0, 2.0, 2.0, 1.0, 0.5]


@pytest.mark.parametrize("wrong", ["value", "missing"])
def test_what_does_other_work_is_not_timed(wrong):
    def call() -> None: ...

    made = [torch.full((3,), 1.5)] if wrong == "value" else []
    subject = Workload(call, effect=lambda: made)
    reference = Workload(call, effect=lambda: [torch.ones(3)])
    with pytest.raises(AssertionError):
        paired(subject, reference, "cpu", QUICK)


@pytest.mark.parametrize("size", [1, 4_096, 4_097, 1_000_000])
def test_some_of_a_tensor_spans_it(size):
    (found,) = some_of([torch.arange(size).view(1, size)])
    assert found[-1] == size - 1
    assert len(found) == size if size <= 4_000 else 2_000 < len(found) <= 4_096
    assert found[0] < size / 1_000


def test_an_effect_leaves_the_gradients_as_they_were():
    data = training("4x1k", "float32", "cpu")
    before = [parameter.grad.clone() for parameter in data.parameters]
    data.effect_on_gradients(lambda: torch._foreach_mul_([p.grad for p in data.parameters], 3.0))
    assert all(map(torch.equal, before, [parameter.grad for parameter in data.parameters]))


def test_renewed_gradients_have_the_same_values_elsewhere():
    data = training("4x1k", "float32", "cpu")
    data.keep()
    before = [parameter.grad for parameter in data.parameters]
    data.renew()
    after = [parameter.grad for parameter in data.parameters]
    assert all(map(torch.equal, before, after))
    assert all(a.data_ptr() != b.data_ptr() for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("reported", [("NVIDIA H200", "580"), ("none", "none")])
def test_a_machine_tells_its_gpu_also_without_nvidia_smi(monkeypatch, reported):
    monkeypatch.setattr(machine, "nvidia", lambda: reported)
    found = machine.describe_machine("lab", "NVIDIA H200")
    assert (found["machine"], found["gpu"], found["driver"]) == ("lab", "NVIDIA H200", reported[1])


@pytest.fixture
def state(monkeypatch, tmp_path):
    """An empty place for the state of programs."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


def test_only_who_adds_points_has_a_name(state):
    assert machine.own_name() == ""
    assert not state.exists()
    name = machine.make_own_name()
    assert machine.own_name() == machine.make_own_name() == name
    assert machine.checked_name(name) == name


def test_no_two_machines_are_given_one_name(state, monkeypatch, tmp_path):
    name = machine.make_own_name()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "of another, equal one"))
    assert machine.make_own_name() != name


@pytest.mark.parametrize(
    ("what", "other"),
    [("platform.node", "another-host"), ("cpu_model", "Another CPU"), ("os.cpu_count", 999)],
)
def test_a_home_on_another_machine_brings_no_name(state, monkeypatch, what, other):
    name = machine.make_own_name()
    with monkeypatch.context() as there:
        there.setattr(f"benchmarks.machine.{what}", lambda: other)
        assert machine.own_name() == ""
        assert machine.make_own_name() != name


@pytest.mark.parametrize("name", ["", "../up", ".hidden", "two words", "a/b"])
def test_what_cannot_name_a_folder_names_no_machine(name):
    with pytest.raises(argparse.ArgumentTypeError, match="is no name of a machine"):
        machine.checked_name(name)
