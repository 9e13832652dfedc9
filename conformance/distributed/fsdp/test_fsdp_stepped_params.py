"""Parameters that an optimizer steps: those of before wrapping, and those that a backward did not use."""

from __future__ import annotations

import pytest

from conformance.distributed.fsdp import stepped_params_cases as cases
from conformance.distributed.fsdp.twins import Twins, Wrapping, each, each_wrapping
from conformance.judge.clauses import clause

SECOND = {"second.weight", "second.bias"}


@clause("distributed.fsdp.fsdp_torch_limit_removed.optimizer_made_before")
@pytest.mark.deviation("fsdp.optimizer_made_before")
@pytest.mark.parametrize(("of", "use_orig_params"), [("model", False), ("meta", False), ("meta", True)])
def test_step_of_optimizer_made_before_wrapping_is_an_error(
    twins: Twins, of: str, use_orig_params: bool
) -> None:
    twins.deviate(
        cases.optimizer_made_before,
        of=of,
        use_orig_params=use_orig_params,
        torch_does=each(lambda value: value == {"step": None, "changed": []}),
        we_do=each(lambda value: str(value["step"]).startswith("RuntimeError: ") and not value["changed"]),
    )


@clause("distributed.fsdp.fsdp_torch_limit_removed.optimizer_made_before")
@pytest.mark.parametrize(
    ("of", "use_orig_params"),
    [
        ("model", True),
        ("frozen", False),
        ("frozen", True),
        ("replaced", False),
        ("ignored", False),
        ("ignored", True),
        ("another", False),
        ("shared", False),
    ],
)
def test_optimizer_made_before_wrapping_steps_parameters_that_stay(
    twins: Twins, of: str, use_orig_params: bool
) -> None:
    for outcome in twins.agree(cases.optimizer_made_before, of=of, use_orig_params=use_orig_params):
        assert outcome.value["step"] is None
        assert bool(outcome.value["changed"]) == (of not in ("another", "shared"))


@clause("distributed.fsdp.fully_sharded_data_parallel.unused_parameters")
@pytest.mark.parametrize("is_unit", [False, True])
@each_wrapping
def test_unused_parameters_of_used_units_are_stepped_with_zeros(
    twins: Twins, wrapping: Wrapping, is_unit: bool
) -> None:
    for outcome in twins.agree(cases.unused_parameters, is_unit=is_unit, **wrapping):
        assert SECOND & {*outcome.value["changed"]} == (set() if is_unit else SECOND)
