"""`fused_step` of parameters that ranks hold in parts, judged by torch's four calls on the whole model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from conformance.distributed.fsdp import fused_step_cases
from conformance.distributed.fsdp.fused_step_cases import OPTIMIZERS
from conformance.distributed.fsdp.scaler_cases import SCALER
from conformance.judge.clauses import clause
from conformance.judge.deviations import DeviationJudge
from conformance.judge.library import Library
from conformance.judge.tolerances import TRAINED
from conformance.ranks import RankPool

ROW = pytest.mark.deviation("grad_scaler.fused_step")
FULL = pytest.mark.profile("full")
LACKING = "no such method"
CASES = fused_step_cases.__name__


def on_ranks(pool: RankPool, library: Library, case: str, scaler: str, **arguments: Any) -> Any:
    if not hasattr(library.find(scaler), "fused_step"):
        return LACKING
    return pool.run(f"{CASES}:{case}", library=library.spec, scaler=scaler, **arguments)


def assert_close(expected: Any, actual: Any, what: str) -> None:
    assert (excess := TRAINED.excess(expected, actual)) is None, f"{what}: {excess}"


@clause("distributed.fsdp.sharded_grad_scaler.fused_step.as_unsharded")
@ROW
@pytest.mark.parametrize("kind", list(OPTIMIZERS))
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
def test_each_rank_in_turn_finds_inf(
    deviation: DeviationJudge,
    ranks: Callable[..., RankPool],
    sharding: str,
    some_ranks: int,
    scaler: str,
    kind: str,
) -> None:
    """One norm, one decision, one scale: those of the model that is not sharded."""
    grad_outcomes = (None, *range(some_ranks), None)
    norm_type = 1.0 if kind == "nesterov" else 2.0
    expected = fused_step_cases.unsharded(kind, grad_outcomes, norm_type, some_ranks)

    def we_do(seen: Any) -> bool:
        if seen is LACKING:
            return False
        for rank, iterations in enumerate(seen):
            for grad_outcome, (norm, scale, whole), mine in zip(
                grad_outcomes, expected, iterations, strict=True
            ):
                what = f"on rank {rank}, inf on {grad_outcome}"
                assert mine[1] == scale, what
                if grad_outcome is None:
                    assert_close(norm, mine[0].to(norm.dtype), f"the norm {what}")
                for one, other in zip(whole, mine[2], strict=True):
                    assert_close(one, other, f"parameters {what}")
        return True

    deviation.judge(
        lambda library: on_ranks(
            ranks(some_ranks),
            library,
            "sharded",
            scaler,
            sharding=sharding,
            kind=kind,
            grad_outcomes=grad_outcomes,
            norm_type=norm_type,
        ),
        torch_does=lambda seen: seen is LACKING,
        we_do=we_do,
    )


@clause("distributed.fsdp.sharded_grad_scaler.fused_step.failure_is_reported")
@ROW
@pytest.mark.parametrize(
    ("failure", "why"),
    [("no scale", "_scale is None"), ("max_norm", "max_norm is nan"), ("sparse", "no fused step of this")],
)
@pytest.mark.world_sizes(fewest=2)
def test_one_rank_fails(
    deviation: DeviationJudge, ranks: Callable[..., RankPool], world_size: int, failure: str, why: str
) -> None:
    """It says why, its peers that another rank failed; none has stepped, and all can go on."""

    def we_do(seen: Any) -> bool:
        if seen is LACKING:
            return False
        (own, *reported), later, kept = zip(*seen, strict=True)
        assert why in str(own.raised)
        assert all("another rank" in str(outcome.raised) for outcome in reported)
        assert [*kept] == [[1.0] * 4] * world_size
        assert [outcome.raised for outcome in later] == [None] * world_size
        return True

    deviation.judge(
        lambda library: on_ranks(ranks(world_size), library, "one_fails", SCALER, failure=failure),
        torch_does=lambda seen: seen is LACKING,
        we_do=we_do,
    )


@clause("distributed.fsdp.sharded_grad_scaler.fused_step.failure_is_reported")
@ROW
def test_what_is_no_optimizer(
    deviation: DeviationJudge, ranks: Callable[..., RankPool], world_size: int
) -> None:
    """Refused before a collective: the next call is in step with the peers'."""

    def we_do(seen: Any) -> bool:
        return seen is not LACKING and all(
            "expected an optimizer, which has param_groups, got Linear" in str(refused.raised)
            and taken.raised is None
            for refused, taken in seen
        )

    deviation.judge(
        lambda library: on_ranks(ranks(world_size), library, "no_optimizer", SCALER),
        torch_does=lambda seen: seen is LACKING,
        we_do=we_do,
    )
