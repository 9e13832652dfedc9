"""`nonfinite_parameters` with several ranks: the same parameters, ranks and numbers of elements on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from conformance.distributed.fsdp import nonfinite_cases as cases
from conformance.distributed.fsdp.nonfinite_cases import Entry
from conformance.distributed.fsdp.scaler_cases import SCALER
from conformance.distributed.fsdp.twins import Twins, TwinsOf
from conformance.judge.clauses import clause

SCALERS = pytest.mark.parametrize("scaler", ["amp.GradScaler", SCALER])


def by_parameter(reports: Sequence[tuple[list[tuple[int, Entry]], Any]]) -> list[Entry]:
    """Return the expected entries of all ranks, by parameter and rank."""
    numbered = [(number, entry) for own, _ in reports for number, entry in own]
    return [entry for _, entry in sorted(numbered, key=lambda pair: (pair[0], pair[1][1]))]


@clause("distributed.fsdp.sharded_grad_scaler.nonfinite_parameters.every_rank")
@SCALERS
@pytest.mark.parametrize(
    ("layout", "how"),
    [*((layout, "unscale_") for layout in cases.LAYOUTS), ("dtensor", "step"), ("meshes", "fused_step")],
)
def test_every_rank_names_parameters_of_all_ranks(
    twins_of: TwinsOf, device: str, layout: str, scaler: str, how: str
) -> None:
    for bad_ranks in ((), (2,), (0, 1, 3)):
        reports = twins_of(4, device).values(
            cases.entries, scaler=scaler, layout=layout, bad_ranks=bad_ranks, how=how
        )
        expected = by_parameter(reports)
        assert bool(expected) is bool(bad_ranks)
        assert [nonfinite for _, nonfinite in reports] == [expected] * 4, f"inf on ranks {bad_ranks}"


@clause("distributed.fsdp.sharded_grad_scaler.nonfinite_parameters.every_rank")
@pytest.mark.world_sizes(fewest=2)
def test_plain_parameters_are_named_for_all_ranks_of_sharded_scaler(twins: Twins) -> None:
    """A plain GradScaler, which knows no other ranks, names those of its own rank."""
    for scaler, more in ((SCALER, {}), (SCALER, {"has_group": True}), ("amp.GradScaler", {})):
        reports = twins.values(
            cases.entries, scaler=scaler, layout="plain", bad_ranks=(1,), how="unscale_", **more
        )
        for report in reports:
            assert report[1] == by_parameter(reports if scaler == SCALER else [report])


@clause("distributed.fsdp.sharded_grad_scaler.nonfinite_parameters.error_on_every_rank")
@SCALERS
@pytest.mark.world_sizes(fewest=2)
def test_cleared_gradients_raise_on_every_rank(twins: Twins, scaler: str) -> None:
    reports = twins.values(cases.after_clearing, scaler=scaler)
    assert all("RuntimeError" in report and "cleared" in report for report in reports), reports


@clause("distributed.fsdp.sharded_grad_scaler.nonfinite_parameters.error_on_every_rank")
@pytest.mark.world_sizes(fewest=2)
def test_failure_on_one_rank_is_reported_to_peers(twins: Twins) -> None:
    own, *others = twins.values(cases.one_fails, scaler=SCALER)
    assert own.startswith("ValueError: a parameter and its low-precision copy both have a gradient")
    assert all(other.startswith("RuntimeError: rank 0 cannot name its gradients") for other in others), others
