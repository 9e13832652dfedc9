"""`fused_step` with sharded parameters, compared with torch's four calls on the unsharded model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from conformance.distributed.fsdp import fused_step_cases as cases
from conformance.distributed.fsdp.rank_judging import assert_all_close
from conformance.distributed.fsdp.scaler_cases import SCALER
from conformance.distributed.fsdp.twins import FULL, Twins, TwinsOf, values_of
from conformance.judge.clauses import clause
from conformance.judge.tolerances import TRAINED
from conformance.strategies import fused_steps
from conformance.strategies.fused_steps import ROW


def judge(
    twins: Twins, program: Any, judged: Callable[[list[Any]], None], scaler: str = SCALER, **arguments: Any
) -> None:
    """Run the program on the ranks of each library. `judged` asserts the expected results of all ranks."""
    fused_steps.judge(
        twins,
        lambda library: values_of(twins.of(library, program, scaler=scaler, **arguments)),
        judged,
        scaler,
    )


@clause("distributed.fsdp.sharded_grad_scaler.fused_step.as_unsharded")
@ROW
@pytest.mark.parametrize("kind", list(cases.OPTIMIZERS))
@pytest.mark.parametrize("scaler", ["amp.GradScaler", SCALER])
@pytest.mark.parametrize(
    ("sharding", "some_ranks"),
    [
        ("flat", 2),
        ("original", 2),
        ("dtensor", 2),
        *(pytest.param(sharding, n, marks=FULL) for sharding in ("flat", "original") for n in (1, 3)),
    ],
)
def test_fused_step_matches_unsharded_with_inf_on_each_rank(
    twins_of: TwinsOf, sharding: str, some_ranks: int, scaler: str, kind: str
) -> None:
    """The norm, the decision and the scale are those of the unsharded model."""
    grad_outcomes, norm_type = (None, *range(some_ranks), None), 1.0 if kind == "nesterov" else 2.0
    expected = cases.unsharded(kind, grad_outcomes, norm_type, some_ranks)

    def judged(results: list[Any]) -> None:
        for rank, iterations in enumerate(results):
            for grad_outcome, expected_step, actual_step in zip(
                grad_outcomes, expected, iterations, strict=True
            ):
                label = f"on rank {rank}, inf on {grad_outcome}: "
                (norm, scale, whole), (own_norm, own_scale, own_whole) = expected_step, actual_step
                assert own_scale == scale, label
                if grad_outcome is None:
                    own = own_norm.values.to(norm.dtype)
                    assert (excess := TRAINED.excess(norm, own)) is None, f"{label}the norm: {excess}"
                assert_all_close(f"{label}parameters", whole, own_whole, TRAINED)

    arguments = {"sharding": sharding, "kind": kind, "grad_outcomes": grad_outcomes, "norm_type": norm_type}
    judge(twins_of(some_ranks), cases.sharded, judged, scaler, **arguments)


@clause("distributed.fsdp.sharded_grad_scaler.fused_step.several_meshes")
@ROW
@pytest.mark.parametrize("kind", list(cases.OPTIMIZERS))
@pytest.mark.parametrize("scaler", ["amp.GradScaler", SCALER])
def test_fused_step_over_several_meshes_matches_unsharded(twins_of: TwinsOf, scaler: str, kind: str) -> None:
    """Each gradient in turn has inf, which only some ranks hold."""
    grad_outcomes = (None, 0, 1, 2, 3, 4, None)
    expected = cases.unsharded_of_meshes(kind, grad_outcomes)

    def judged(results: list[Any]) -> None:
        for rank, iterations in enumerate(results):
            for bad, (norm, whole), (own_norm, own_whole) in zip(
                grad_outcomes, expected, iterations, strict=True
            ):
                label = f"on rank {rank}, inf in gradient {bad}: "
                if bad is None:
                    own = own_norm.values.to(norm.dtype)
                    assert (excess := TRAINED.excess(norm, own)) is None, f"{label}the norm: {excess}"
                pairs = [(full, own) for full, own in zip(whole, own_whole, strict=True) if own is not None]
                assert_all_close(f"{label}parameters", *map(list, zip(*pairs, strict=True)), TRAINED)

    judge(twins_of(4), cases.over_meshes, judged, scaler, kind=kind, grad_outcomes=grad_outcomes)


@clause("distributed.fsdp.sharded_grad_scaler.fused_step.group_of_the_device")
@ROW
@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("scaler", ["amp.GradScaler", SCALER])
@pytest.mark.world_sizes(fewest=2)
def test_fused_step_works_over_group_of_device_only(twins: Twins, scaler: str, enabled: bool) -> None:
    expected = cases.unsharded("adamw", (None, None), 2.0, twins.world_size)

    def judged(results: list[Any]) -> None:
        for rank, iterations in enumerate(results):
            for (norm, _, whole), (own_norm, own_whole) in zip(expected, iterations, strict=True):
                own = own_norm.values.to(norm.dtype)
                assert (excess := TRAINED.excess(norm, own)) is None, f"on rank {rank} the norm: {excess}"
                assert_all_close(f"on rank {rank} parameters", whole, own_whole, TRAINED)

    judge(twins, cases.offloaded, judged, scaler, enabled=enabled)


@clause("distributed.fsdp.sharded_grad_scaler.fused_step.failure_is_reported")
@ROW
@pytest.mark.parametrize(
    ("failure", "why"),
    [("no scale", "_scale is None"), ("max_norm", "max_norm is nan"), ("sparse", "no fused step of this")],
)
@pytest.mark.world_sizes(fewest=2)
def test_fused_step_failure_on_one_rank_is_reported(cpu_twins: Twins, failure: str, why: str) -> None:
    """The failing rank reports the cause, and its peers report another rank. No rank steps, and all can continue."""

    def judged(results: list[Any]) -> None:
        (own, *reported), later, parameters = zip(*results, strict=True)
        assert why in str(own)
        assert all("another rank" in str(raised) for raised in reported)
        assert [*parameters] == [[1.0] * 4] * cpu_twins.world_size
        assert [*later] == [None] * cpu_twins.world_size

    judge(cpu_twins, cases.one_fails, judged, failure=failure)


@clause("distributed.fsdp.sharded_grad_scaler.fused_step.failure_is_reported")
@ROW
def test_fused_step_refuses_object_that_is_no_optimizer(cpu_twins: Twins) -> None:
    """The error is raised before any collective, so the next call matches the peers' collectives."""

    def judged(results: list[Any]) -> None:
        for refused, then in results:
            assert "expected an optimizer, which has param_groups, got Linear" in str(refused)
            assert then is None

    judge(cpu_twins, cases.no_optimizer, judged)
