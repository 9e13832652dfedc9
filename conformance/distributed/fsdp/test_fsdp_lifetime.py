"""Modules that are called without arguments, and resources that remain after a model is deleted."""

from __future__ import annotations

import pytest

from conformance.distributed.fsdp.lifetime_cases import called_without_inputs, left_behind
from conformance.distributed.fsdp.twins import Twins, each, each_strategy
from conformance.judge.clauses import clause
from conformance.judge.tolerances import TRAINED

nothing, something = each(lambda left: left == []), each(bool)


@clause("distributed.fsdp.fully_sharded_data_parallel.without_inputs")
@each_strategy
def test_module_without_inputs_trains(twins: Twins, strategy: str) -> None:
    twins.agree(called_without_inputs, tolerance=TRAINED, strategy=strategy)


@clause("distributed.fsdp.fsdp_torch_limit_removed.freed")
@pytest.mark.world_sizes(fewest=2)
def test_original_parameters_go_with_their_model(cpu_twins: Twins) -> None:
    outcomes = cpu_twins.of_subject(left_behind, use_orig_params=True)
    assert nothing(outcomes), outcomes


@clause("distributed.fsdp.fsdp_torch_limit_removed.freed")
@pytest.mark.deviation("fsdp.models_are_freed")
def test_flat_parameters_go_with_their_model(cpu_twins: Twins) -> None:
    cpu_twins.deviate(left_behind, use_orig_params=False, torch_does=something, we_do=nothing)


@clause("distributed.fsdp.fsdp_torch_limit_removed.freed")
@pytest.mark.deviation("fsdp.inputs_hold_models")
@pytest.mark.world_sizes(fewest=2)
def test_returned_input_keeps_no_model_alive(cpu_twins: Twins) -> None:
    arguments = {"use_orig_params": True, "returns_input": True}
    cpu_twins.deviate(left_behind, **arguments, torch_does=something, we_do=nothing)
