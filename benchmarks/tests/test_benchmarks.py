"""Tests of the benchmarks' arithmetic, and that asv finds every benchmark. Nothing is timed here."""

import argparse
import math
import random
import statistics
from dataclasses import replace

import pytest
import torch

from benchmarks import catalogue, comparison, machine, single, timing
from benchmarks.common import LEFT_OUT_OF_HISTORY, LEFT_OUT_OF_QUICK, SHAPES, some_of, training
from benchmarks.decision import LIMIT
from benchmarks.timing import QUICK, Workload, by_turns, median_interval, paired, summary

RATIOS = [kind for kind in catalogue.load_all() if issubclass(kind, comparison.Ratio)]
(FSDP_STEP,) = (kind for kind in RATIOS if kind.__name__ == "RatioFsdpStep")


@pytest.mark.parametrize("kind", RATIOS, ids=lambda kind: kind.__name__)
def test_each_ratio_defines_its_setup_cache(kind):
    """An inherited one has the same line for all classes, and asv would run it for one class only."""
    assert "setup_cache" in vars(kind)


@pytest.mark.parametrize(
    "kind", [*RATIOS, *comparison.Absolute.__subclasses__()], ids=lambda kind: kind.__name__
)
def test_parameters_have_names(kind):
    assert len(kind.params) == len(kind.param_names)
    assert "device" in kind.param_names or kind.params == [["cpu"]]
    assert int(kind.version) >= 1


def test_benchmarks_of_one_off_work_are_marked():
    assert {kind.__name__ for kind in RATIOS if kind.is_one_off} == {
        "RatioImport",
        "RatioFsdpWrap",
        "RatioFsdpSave",
        "RatioFsdpLoad",
        "RatioFullyShardOwnState",
        "RatioFullyShardWholeState",
        "RatioOptimizerCompile",
    }


def test_quick_has_cases_of_each_ratio_except_two():
    assert {kind.__name__ for kind in RATIOS if not catalogue.cases(kind, LEFT_OUT_OF_QUICK)} == {
        "RatioFullyShardOwnState",
        "RatioFullyShardStepToFsdp1",
    }


def test_history_includes_all_cases_of_the_dashboard():
    tracked = [kind for kind in catalogue.load_all() if catalogue.is_tracked(kind)]
    assert set(RATIOS) <= set(tracked)
    assert all(hasattr(kind, "curve") for kind in tracked)
    cases = {kind.__name__: catalogue.cases(kind, LEFT_OUT_OF_HISTORY) for kind in tracked}
    assert {case[0] for case in cases["RatioFsdpStep"]} == {1, 2, 4}
    assert {case[0] for case in catalogue.cases(FSDP_STEP, LEFT_OUT_OF_QUICK)} == {2}
    assert {case[0] for case in cases["FsdpPeak"]} == {"impl", "torch"}
    assert all(set(catalogue.cases(kind, LEFT_OUT_OF_QUICK)) <= set(cases[kind.__name__]) for kind in RATIOS)


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


def test_summary_is_the_median_of_pairs():
    """A pair during which the machine paused must not change the result."""
    result = summary([1.0, 2.0, 30.0, 1.0, 1.0], [2.0, 4.0, 1.0, 2.0, 2.0])
    assert (result.ratio, result.noise, result.pairs) == (0.5, 0.0, 5)


class FakeStopwatch:
    """Stopwatch whose time of a call is the value that the call returns."""

    def per_call(self, work, calls):
        return work.call()


@pytest.mark.parametrize("spread", [0.01, 0.05, 0.1, 0.15, 0.3])
def test_early_end_adds_no_errors(monkeypatch, spread):
    """An early end misses the true ratio, and raises a false alarm, no more often than all pairs."""
    monkeypatch.setattr(timing, "HostStopwatch", FakeStopwatch)
    chance = random.Random(spread)
    subject, reference = Workload(lambda: 0.7 * chance.lognormvariate(0.0, spread)), Workload(lambda: 1.0)
    trials = 1_000
    rates = {}
    for effort in (replace(QUICK, looks_from_s=0.0), replace(QUICK, looks=())):
        results = [paired(subject, reference, "cpu", effort) for _ in range(trials)]
        missed = sum(not result.low <= 0.7 <= result.high for result in results) / trials
        alarms = sum(result.ratio > 0.7 * LIMIT for result in results) / trials
        rates[effort.looks] = missed, alarms, statistics.fmean(result.pairs for result in results)
    (missed, alarms, pairs), (missed_by_all, alarms_by_all, all_pairs) = rates.values()
    assert missed < min(missed_by_all + 0.01, 0.05)
    assert alarms <= alarms_by_all + 0.001
    assert all_pairs == QUICK.pairs
    assert pairs < 0.2 * all_pairs or spread > 0.05


def test_timing_by_turns_gives_a_ratio_to_each_reference(monkeypatch):
    """The order of the workloads is reversed after each turn, so that drift cancels out."""
    monkeypatch.setattr(timing, "HostStopwatch", FakeStopwatch)
    order = []
    works = [Workload(lambda took=took: order.append(took) or took) for took in (0.5, 1.0, 2.0)]
    results = by_turns(works[0], works[1:], effort=QUICK)
    assert [(result.ratio, result.pairs) for result in results] == [(0.5, QUICK.pairs), (0.25, QUICK.pairs)]
    assert order[-6:] == [0.5, 1.0, 2.0, 2.0, 1.0, 0.5]


def test_share_of_copy_counts_each_pass_as_half_a_copy(monkeypatch):
    """A call of four passes in the time of a copy, which has two, reaches twice the bandwidth of the copy."""
    monkeypatch.setattr(timing, "HostStopwatch", FakeStopwatch)
    monkeypatch.setattr(comparison, "_copy_of", lambda *_: Workload(lambda: 2.0))

    class FourPasses(comparison.MemoryBound):
        params, param_names, passes = [["1x1k"], ["cpu"]], ["shapes", "device"], 4

        @staticmethod
        def workload(subject, *case):
            return Workload(lambda: {"impl": 2.0, "torch": 4.0}[subject])

    result = FourPasses.measure(("1x1k", "cpu"), QUICK)
    assert (result.ratio, result.share_of_copy) == (0.5, 2.0)


def test_ratio_is_stored_with_the_seconds_of_both_sides():
    case = ("1x1k", "cpu")
    stored = {case: timing.Paired(0.5, 0.4, 0.6, 0.1, subject_s=1.0, reference_s=2.0, pairs=9)}
    names = [name for name in single.names_of(FSDP_STEP) if "seconds" in name]
    assert [getattr(FSDP_STEP(), name.rpartition(".")[2])(stored, *case) for name in names] == [1.0, 2.0]


def test_plain_copy_has_the_bytes_of_the_list():
    copied = comparison._copy_of("16x1k", "bfloat16", "cpu").call()
    assert (copied.numel(), copied.dtype) == (16_000, torch.bfloat16)
    assert copied.min() == copied.max() == 1


@pytest.mark.parametrize("wrong", ["value", "missing"])
def test_workloads_with_different_effects_are_not_timed(wrong):
    def call() -> None: ...

    results = [torch.full((3,), 1.5)] if wrong == "value" else []
    subject = Workload(call, effect=lambda: results)
    reference = Workload(call, effect=lambda: [torch.ones(3)])
    with pytest.raises(AssertionError):
        paired(subject, reference, "cpu", QUICK)


@pytest.mark.parametrize("size", [1, 4_096, 4_097, 1_000_000])
def test_sample_spans_the_tensor(size):
    (sample,) = some_of([torch.arange(size).view(1, size)])
    assert sample[-1] == size - 1
    assert len(sample) == size if size <= 4_000 else 2_000 < len(sample) <= 4_096
    assert sample[0] < size / 1_000


def test_effect_restores_the_gradients():
    data = training("4x1k", "float32", "cpu")
    before = [parameter.grad.clone() for parameter in data.parameters]
    data.effect_on_gradients(lambda: torch._foreach_mul_([p.grad for p in data.parameters], 3.0))
    assert all(map(torch.equal, before, [parameter.grad for parameter in data.parameters]))


def test_renewed_gradients_have_equal_values_at_other_addresses():
    data = training("4x1k", "float32", "cpu")
    data.keep()
    before = [parameter.grad for parameter in data.parameters]
    data.renew()
    after = [parameter.grad for parameter in data.parameters]
    assert all(map(torch.equal, before, after))
    assert all(a.data_ptr() != b.data_ptr() for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("reported", [("NVIDIA H200", "580"), ("none", "none")])
def test_machine_description_names_the_gpu_without_nvidia_smi(monkeypatch, reported):
    monkeypatch.setattr(machine, "nvidia", lambda: reported)
    description = machine.describe_machine("lab", "NVIDIA H200")
    assert (description["machine"], description["gpu"], description["driver"]) == (
        "lab",
        "NVIDIA H200",
        reported[1],
    )


@pytest.fixture
def state(monkeypatch, tmp_path):
    """Empty folder for the state of programs."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


def test_machine_gets_its_name_only_when_it_records_results(state):
    assert machine.own_name() == ""
    assert not state.exists()
    name = machine.make_own_name()
    assert machine.own_name() == machine.make_own_name() == name
    assert machine.machine_name(name) == name


def test_equal_machines_get_different_names(state, monkeypatch, tmp_path):
    name = machine.make_own_name()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "of another, equal one"))
    assert machine.make_own_name() != name


@pytest.mark.parametrize(
    ("trait", "other"),
    [("platform.node", "another-host"), ("cpu_model", "Another CPU"), ("os.cpu_count", 999)],
)
def test_name_is_ignored_if_the_home_folder_is_on_another_machine(state, monkeypatch, trait, other):
    name = machine.make_own_name()
    with monkeypatch.context() as there:
        there.setattr(f"benchmarks.machine.{trait}", lambda: other)
        assert machine.own_name() == ""
        assert machine.make_own_name() != name


@pytest.mark.parametrize("name", ["", "../up", ".hidden", "two words", "a/b"])
def test_machine_name_must_be_a_folder_name(name):
    with pytest.raises(argparse.ArgumentTypeError, match="is not a valid machine name"):
        machine.machine_name(name)
