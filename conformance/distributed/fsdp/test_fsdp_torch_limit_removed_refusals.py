"""Calls that would silently lose data raise an error that names the cause, on every rank."""

from __future__ import annotations

from typing import Any

import pytest

from conformance.distributed.fsdp import construct_cases
from conformance.distributed.fsdp import torch_limit_removed_cases as cases
from conformance.distributed.fsdp.construct_cases import USED_UP
from conformance.distributed.fsdp.fsdp_cases import Setup
from conformance.distributed.fsdp.twins import Twins, both_kinds, each, raises
from conformance.judge.clauses import clause


@clause("distributed.fsdp.fsdp_torch_limit_removed.change_in_forward")
def test_weight_changed_in_forward_is_not_lost(cpu_twins: Twins) -> None:
    outcomes = cpu_twins.of_subject(cases.weight_changed_in_forward)
    is_kept = each(lambda weight: (weight.values == 2).all())(outcomes)
    assert is_kept or any(raises(RuntimeError, text)(outcomes) for text in ("weight", "modified inplace")), (
        outcomes
    )


@clause("distributed.fsdp.fsdp_torch_limit_removed.tied_in_two_units")
@pytest.mark.deviation("fsdp.tied_in_two_units")
def test_parameter_tied_in_two_units_is_refused(cpu_twins: Twins) -> None:
    cpu_twins.deviate(
        cases.tied_in_two_units,
        torch_does=each(lambda parameters: parameters == 2),
        we_do=raises(ValueError, "is the same parameter as weight"),
    )


@clause("distributed.fsdp.fsdp_torch_limit_removed.copies")
@pytest.mark.deviation("fsdp.copies")
@both_kinds
def test_copy_of_wrapped_model_is_refused_with_cure(cpu_twins: Twins, use_orig_params: bool) -> None:
    cpu_twins.deviate(
        cases.copied,
        use_orig_params=use_orig_params,
        torch_does=lambda outcomes: all(
            outcome.raised and "wrapped" not in outcome.raised.text for outcome in outcomes
        ),
        we_do=raises(TypeError, "copy it before it is wrapped"),
    )


@clause("distributed.fsdp.fsdp_torch_limit_removed.ignored_modules_used_up")
@pytest.mark.deviation("fsdp.ignored_modules_used_up")
@pytest.mark.parametrize("way", list(USED_UP))
def test_ignored_modules_may_be_iterator(cpu_twins: Twins, way: str) -> None:
    def is_ignored(report: Any) -> bool:
        return any(name.endswith("head.weight") for name in report["parameters"])

    cpu_twins.deviate(
        construct_cases.construct,
        way=way,
        torch_does=each(lambda report: not is_ignored(report)),
        we_do=each(is_ignored),
    )


@clause("distributed.fsdp.fsdp_torch_limit_removed.tied_on_meta")
@pytest.mark.deviation("fsdp.tied_on_meta")
@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("by", ["reset", "function", "recursive function"])
def test_weights_that_are_tied_on_the_meta_device_stay_tied(cpu_twins: Twins, across: bool, by: str) -> None:
    """The model has one weight and one bias, not two weights and a bias.

    With ones as values, the gradients are known.
    """
    # The sum over 2 rows and 4 outputs: inner weight 2 * 4 * 5 * 4, outer weight 2 * 4 * 4 * 4, bias 2 * 4 * 4.
    of_ones = 160 + 128 + 32
    cpu_twins.deviate(
        cases.tied_on_meta,
        across=across,
        by=by,
        torch_does=each(lambda value: value[0] == 3),
        we_do=each(lambda value: value[0] == 2 and (by == "reset" or value[1] == of_ones)),
    )


@clause("distributed.fsdp.fsdp_torch_limit_removed.nonfinite_is_refused")
@pytest.mark.deviation("fsdp.clip_can_refuse")
def test_clipping_refuses_an_inf_of_another_rank(cpu_twins: Twins) -> None:
    cpu_twins.deviate(
        cases.clipped_with_an_inf,
        torch_does=raises(TypeError, "error_if_nonfinite"),
        we_do=raises(RuntimeError, "non-finite"),
    )


@clause("distributed.fsdp.fsdp_torch_limit_removed.moved_to_meta")
@pytest.mark.deviation("fsdp.moved_to_meta")
@both_kinds
def test_model_moved_to_meta_device_refuses_to_compute(cpu_twins: Twins, use_orig_params: bool) -> None:
    refusal = (
        (NotImplementedError, "meta device") if use_orig_params else (RuntimeError, "parameters on meta")
    )
    cpu_twins.deviate(
        construct_cases.moved_away,
        Setup(arguments={"use_orig_params": use_orig_params}),
        torch_does=raises(NotImplementedError, "Cannot copy out of meta tensor"),
        we_do=raises(*refusal),
    )


@clause("distributed.fsdp.fsdp_torch_limit_removed.moved_to_meta")
def test_model_returns_from_meta_device(cpu_twins: Twins) -> None:
    cpu_twins.values(construct_cases.moved_away, returns=True)
