"""Modules that torch's class cannot train because of what they return, pass on or hold."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from conformance.distributed.fsdp import torch_limit_removed_cases as cases
from conformance.distributed.fsdp.test_fsdp_torch_limit_removed import averaged, gave
from conformance.distributed.fsdp.traffic import counts
from conformance.distributed.fsdp.twins import STRATEGIES, Twins, both_kinds, each, each_strategy, raises
from conformance.judge.clauses import clause
from conformance.judge.tolerances import TRAINED

torchs_limit = clause("distributed.fsdp.fsdp_torch_limit_removed.returned_parameters")
sharded_or_not = pytest.mark.parametrize(
    "strategy",
    [
        # torch reads freed memory of a unit here, which may end the process.
        *(pytest.param(strategy, marks=torchs_limit) for strategy in STRATEGIES[:2]),
        pytest.param(
            "NO_SHARD", marks=clause("distributed.fsdp.fully_sharded_data_parallel.returned_parameters")
        ),
    ],
)


@sharded_or_not
def test_parameters_that_are_returned_are_trained(cpu_twins: Twins, strategy: str) -> None:
    outcomes = cpu_twins.of_subject(cases.accumulate, module="returned", strategy=strategy)
    assert averaged("returned")(outcomes), outcomes


@pytest.mark.parametrize("inference", [False, True])
@sharded_or_not
def test_parameters_that_are_returned_can_be_read(cpu_twins: Twins, strategy: str, inference: bool) -> None:
    for read in cpu_twins.values(cases.returned_parameters, strategy=strategy, inference=inference):
        assert torch.equal(read.values, torch.ones(5, 2)), read


@clause("distributed.fsdp.fsdp_torch_limit_removed.objects")
@pytest.mark.deviation("fsdp.objects")
@pytest.mark.parametrize("module", ["object", "object inside"])
@each_strategy
def test_unit_may_return_object(cpu_twins: Twins, strategy: str, module: str) -> None:
    cpu_twins.deviate(
        cases.accumulate,
        module=module,
        strategy=strategy,
        we_do=averaged(module),
        may_agree=strategy == "NO_SHARD" or cpu_twins.is_alone,
    )


@clause("distributed.fsdp.fsdp_torch_limit_removed.objects_with_parameters")
@pytest.mark.parametrize("module", ["object with a parameter", "object inside with a parameter"])
@each_strategy
def test_returned_object_may_hold_parameters(cpu_twins: Twins, strategy: str, module: str) -> None:
    outcomes = cpu_twins.of_subject(cases.accumulate, module=module, strategy=strategy)
    assert averaged(module)(outcomes), outcomes


@clause("distributed.fsdp.fsdp_torch_limit_removed.objects")
def test_object_passed_between_units_adds_no_gathers(twins: Twins) -> None:
    def issued(keeps: bool) -> list[Counter[str]]:
        twins.values(cases.one_step_of_many_units, keeps=keeps)
        return [counts(trace) for trace in twins.pool.traces]

    assert issued(keeps=True) == issued(keeps=False)


@clause("distributed.fsdp.fsdp_torch_limit_removed.without_elements")
@pytest.mark.deviation("fsdp.without_elements")
@each_strategy
def test_unit_without_elements_trains(cpu_twins: Twins, strategy: str) -> None:
    cpu_twins.deviate(
        cases.accumulate,
        module="no elements",
        strategy=strategy,
        torch_does=raises(AssertionError, "unsharded_end_idx"),
        we_do=averaged("no elements"),
    )


@clause("distributed.fsdp.fsdp_torch_limit_removed.without_elements")
@pytest.mark.deviation("fsdp.unsharded_without_elements")
def test_last_unsharded_parameter_may_have_no_elements(cpu_twins: Twins) -> None:
    expected = {"gradients": [(4, 3), (4,), (0, 4)], "saved": ["0.bias", "0.weight", "1.weight"]}
    cpu_twins.deviate(
        cases.states_without_elements,
        torch_does=raises(RuntimeError, "1.weight is not in the optimizer state"),
        we_do=each(lambda value: value == expected),
    )


@clause("distributed.fsdp.fsdp_torch_limit_removed.hooks_of_inner_modules")
def test_hooks_of_inner_module_may_read_parameters(cpu_twins: Twins) -> None:
    with torch.no_grad():
        expected = cases.built("normed")(torch.ones(1, 3))
    outcomes = cpu_twins.of_subject(cases.output_of_an_inner_module, module="normed")
    assert gave(expected)(outcomes), outcomes


@clause("distributed.fsdp.fsdp_torch_limit_removed.computed_again_in_low_precision")
@pytest.mark.deviation("fsdp.computed_again_in_low_precision")
@pytest.mark.parametrize("around", ["unit", "root"])
def test_recomputed_unit_casts_its_inputs(cpu_twins: Twins, around: str) -> None:
    cpu_twins.deviate(
        cases.computed_again_in_low_precision,
        around=around,
        torch_does=raises(RuntimeError, "must have the same dtype"),
        we_do=each(lambda gradients: _are_equal(*gradients)),
        may_agree=around == "root",
    )


def _are_equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(first[name].values, second[name].values) for name in first
    )


@clause("distributed.fsdp.fully_sharded_data_parallel.transforms")
@both_kinds
def test_model_works_under_vmap(twins: Twins, use_orig_params: bool) -> None:
    twins.agree(cases.mapped, tolerance=TRAINED, use_orig_params=use_orig_params)
