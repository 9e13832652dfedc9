"""The methods and attributes of a wrapped module: names, units, roots, apply, and conversions."""

from __future__ import annotations

import pytest
import torch

from conformance.distributed.fsdp import construct_cases
from conformance.distributed.fsdp.fsdp_cases import Setup
from conformance.distributed.fsdp.lab import SIMPLE
from conformance.distributed.fsdp.rank_judging import assert_ranks_agree
from conformance.distributed.fsdp.twins import (
    Twins,
    Wrapping,
    both_kinds,
    each_wrapping,
    flat_or_originals,
    leaf_by_leaf,
)
from conformance.judge.clauses import clause
from conformance.judge.tolerances import EXACT

each_wrap = pytest.mark.parametrize("wrap", ["root", "leaves", "manual"])


@clause("distributed.fsdp.fully_sharded_data_parallel.attributes")
@both_kinds
@each_wrap
def test_names_attributes_and_units(twins: Twins, wrap: str, use_orig_params: bool) -> None:
    setup = Setup(wrap=wrap, arguments={"use_orig_params": use_orig_params})
    twins.agree(construct_cases.attributes, setup)


@clause("distributed.fsdp.fully_sharded_data_parallel.roots")
@each_wrap
def test_outermost_unit_is_root(twins: Twins, wrap: str) -> None:
    twins.agree(construct_cases.roots, Setup(wrap=wrap))


@clause("distributed.fsdp.fully_sharded_data_parallel.attributes")
def test_wrapped_sequential_takes_indices(twins: Twins) -> None:
    assert twins.agree(construct_cases.indexed)[0].value[:2] == ["Linear", "Tanh"]


@clause("distributed.fsdp.fully_sharded_data_parallel.apply")
@each_wrapping
def test_apply_shows_whole_parameters(twins: Twins, wrapping: Wrapping) -> None:
    twins.agree(construct_cases.applied, leaf_by_leaf(**wrapping))


@clause("distributed.fsdp.fully_sharded_data_parallel.conversions")
@pytest.mark.parametrize("how", ["double", "to", "cpu", "cpu and back"])
@each_wrapping
def test_wrapped_model_can_be_converted(twins: Twins, wrapping: Wrapping, how: str) -> None:
    setup = leaf_by_leaf(**wrapping)
    twins.agree(construct_cases.converted, setup, how=how, may_raise=how == "cpu")


@clause("distributed.fsdp.fully_sharded_data_parallel.class_of_parameters")
@flat_or_originals
def test_optimizers_may_step_parameters_together(twins: Twins, setup: Setup) -> None:
    assert all(all(outcome.value.values()) for outcome in twins.agree(construct_cases.classes, setup))


@clause("distributed.fsdp.fully_sharded_data_parallel.conversions")
@each_wrapping
def test_moving_a_model_to_where_it_is_loses_no_graph(twins: Twins, wrapping: Wrapping) -> None:
    twins.agree(construct_cases.moved_between, leaf_by_leaf(**wrapping))


@clause("distributed.fsdp.fully_sharded_data_parallel.defaults")
@each_wrapping
def test_default_device_and_dtype_have_no_effect(cpu_twins: Twins, wrapping: Wrapping) -> None:
    program, arguments = (
        construct_cases.trained_under_defaults,
        {"setup": leaf_by_leaf(**wrapping), "tree": SIMPLE},
    )
    usual = cpu_twins.of_subject(program, device="cpu", dtype=torch.float32, **arguments)
    assert_ranks_agree(
        usual, cpu_twins.agree(program, device="meta", dtype=torch.float64, **arguments), EXACT
    )
