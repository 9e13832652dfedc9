"""Optimizers that step during backward, from user hooks or from torch's helper."""

from __future__ import annotations

from typing import Any

import pytest

from conformance.distributed.fsdp import optimizer_in_backward_cases as cases
from conformance.distributed.fsdp.rank_judging import assert_all_close
from conformance.distributed.fsdp.twins import Twins, both_kinds, each, holds, raises, values_of
from conformance.judge.clauses import clause
from conformance.judge.tolerances import TRAINED

sharded_or_not = pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
accumulates_or_not = pytest.mark.parametrize("accumulates", [False, True])
is_refused = raises(RuntimeError, "only supported with use_orig_params=True")


def assert_trained(outcomes: Any, accumulates: bool, of: int | None = None) -> None:
    expected = cases.trained_unsharded(len(outcomes), accumulates, of)
    for value in values_of(outcomes):
        assert of or value["left"] == 0
        assert_all_close("whole_parameters", expected, value["whole"], TRAINED)


@clause("distributed.fsdp.fully_sharded_data_parallel.hooks.optimizers")
@accumulates_or_not
@sharded_or_not
def test_optimizers_step_in_backward(cpu_twins: Twins, strategy: str, accumulates: bool) -> None:
    arguments = {"by": "torch", "strategy": strategy, "use_orig_params": True}
    assert_trained(cpu_twins.of_subject(cases.trained, accumulates=accumulates, **arguments), accumulates)


@clause("distributed.fsdp.fully_sharded_data_parallel.hooks.optimizers")
@sharded_or_not
def test_single_parameter_steps_in_backward(cpu_twins: Twins, strategy: str) -> None:
    arguments = {"by": "torch", "of": 1, "strategy": strategy, "use_orig_params": True}
    assert_trained(cpu_twins.agree(cases.trained, accumulates=False, **arguments), accumulates=False, of=1)


@clause("distributed.fsdp.fsdp_torch_limit_removed.stepping_hooks")
@pytest.mark.deviation("fsdp.one_steps_in_backward")
@sharded_or_not
def test_single_parameter_steps_in_backward_while_others_accumulate(cpu_twins: Twins, strategy: str) -> None:
    arguments = {"by": "torch", "of": 1, "strategy": strategy, "use_orig_params": True}
    cpu_twins.deviate(
        cases.trained,
        accumulates=True,
        **arguments,
        we_do=lambda outcomes: holds(assert_trained, outcomes, accumulates=True, of=1),
        may_agree=strategy == "FULL_SHARD" and not cpu_twins.is_alone,
    )


@clause("distributed.fsdp.fully_sharded_data_parallel.hooks.optimizers")
@sharded_or_not
def test_optimizers_are_refused_without_original_parameters(cpu_twins: Twins, strategy: str) -> None:
    arguments = {"strategy": strategy, "is_late": False}
    assert is_refused(cpu_twins.agree(cases.without_original_parameters, may_raise=True, **arguments))


@clause("distributed.fsdp.fsdp_torch_limit_removed.stepping_hooks")
@pytest.mark.deviation("fsdp.stepping_hooks")
@sharded_or_not
def test_optimizers_are_refused_without_original_parameters_at_any_time(
    cpu_twins: Twins, strategy: str
) -> None:
    arguments = {"strategy": strategy, "is_late": True}
    cpu_twins.deviate(cases.without_original_parameters, **arguments, we_do=is_refused)


@clause("distributed.fsdp.fsdp_torch_limit_removed.stepping_hooks")
@pytest.mark.deviation("fsdp.stepping_hooks")
@accumulates_or_not
@pytest.mark.parametrize(
    ("strategy", "use_orig_params"), [("FULL_SHARD", False), ("NO_SHARD", False), ("FULL_SHARD", True)]
)
def test_steps_in_backward_use_averaged_gradients(
    cpu_twins: Twins, strategy: str, use_orig_params: bool, accumulates: bool
) -> None:
    arguments = {"by": "hooks", "strategy": strategy, "use_orig_params": use_orig_params}
    cpu_twins.deviate(
        cases.trained,
        accumulates=accumulates,
        **arguments,
        we_do=lambda outcomes: holds(assert_trained, outcomes, accumulates),
        may_agree=cpu_twins.is_alone,
    )


@clause("distributed.fsdp.fsdp_torch_limit_removed.stepping_hooks")
@pytest.mark.deviation("fsdp.stepping_hooks")
@sharded_or_not
def test_hooks_that_step_are_kept_by_original_parameters(cpu_twins: Twins, strategy: str) -> None:
    cpu_twins.deviate(
        cases.trained,
        by="hooks",
        before=True,
        accumulates=False,
        strategy=strategy,
        use_orig_params=True,
        torch_does=each(lambda value: value["left"] > 0),
        we_do=lambda outcomes: holds(assert_trained, outcomes, accumulates=False),
    )


@clause("distributed.fsdp.fsdp_torch_limit_removed.hooks_before_wrapping")
@pytest.mark.deviation("fsdp.hooks_before_wrapping")
@pytest.mark.parametrize("by", ["hooks", "torch"])
@sharded_or_not
def test_hooks_that_step_are_refused_if_flat_parameters_would_drop_them(
    cpu_twins: Twins, strategy: str, by: str
) -> None:
    untrained = dict(cases.built().named_parameters())
    cpu_twins.deviate(
        cases.trained,
        by=by,
        before=True,
        accumulates=False,
        strategy=strategy,
        torch_does=each(lambda value: holds(assert_all_close, "", untrained, value["whole"], TRAINED)),
        we_do=raises(RuntimeError, "hooks after accumulation of 0.weight, 0.bias would never run"),
    )


@clause("distributed.fsdp.fully_sharded_data_parallel.hooks.optimizers")
@both_kinds
def test_hooks_are_not_called_without_accumulated_gradients(cpu_twins: Twins, use_orig_params: bool) -> None:
    """A hook that ran there would repeat the last step."""
    for by_backward, in_the_end in cpu_twins.values(cases.only_an_input, use_orig_params=use_orig_params):
        assert by_backward == in_the_end
