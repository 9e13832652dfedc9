"""The clock's own arithmetic, and that asv will find every benchmark. Nothing is timed here."""

import math
import random

import pytest
import torch

from benchmarks import catalogue, comparison, machine
from benchmarks.common import SHAPES, training
from benchmarks.timing import QUICK, Workload, median_interval, paired, summary

catalogue.load_all()
RATIOS = comparison.Ratio.__subclasses__()


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


def test_quick_leaves_something_of_each_ratio():
    assert all(list(kind.cases(quick=True)) for kind in RATIOS)


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


@pytest.mark.parametrize("wrong", ["value", "missing"])
def test_what_does_other_work_is_not_timed(wrong):
    def call() -> None: ...

    made = [torch.full((3,), 1.5)] if wrong == "value" else []
    subject = Workload(call, effect=lambda: made)
    reference = Workload(call, effect=lambda: [torch.ones(3)])
    with pytest.raises(AssertionError):
        paired(subject, reference, "cpu", QUICK)


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


@pytest.mark.parametrize("told", [("NVIDIA H200", "580"), ("none", "none")])
def test_a_machine_is_known_by_its_gpu_also_without_nvidia_smi(monkeypatch, told):
    monkeypatch.delenv(machine.MACHINE_VARIABLE, raising=False)
    monkeypatch.setattr(machine, "nvidia", lambda: told)
    found = machine.describe_machine("NVIDIA H200")
    assert (found["gpu"], found["driver"]) == ("NVIDIA H200", told[1])
    assert found["machine"].endswith("-cores-nvidia-h200")
