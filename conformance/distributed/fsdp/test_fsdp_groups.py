"""Process groups of other kinds: made by hand, written in Python, whose ranks are threads, without a default one."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg

from conformance.distributed.fsdp.judging import assert_ranks_agree, outcomes
from conformance.judge.clauses import clause
from conformance.judge.deviations import DeviationJudge
from conformance.judge.judgement import unavailable
from conformance.judge.library import Library
from conformance.judge.outcome import Outcome
from conformance.ranks import RankPool


def assert_same(
    pool: RankPool, reference: Library, subject: Library, case: str, at: Path, **arguments: Any
) -> None:
    """Both libraries' ranks do it, which meet at files of their own."""
    expected, actual = (
        outcomes(pool, library, f"group_cases:{case}", path=str(at / role), **arguments)
        for role, library in (("reference", reference), ("subject", subject))
    )
    for outcome in expected:
        assert outcome.raised is None, outcome.raised
    assert_ranks_agree(expected, actual)


@clause("distributed.fsdp.fully_sharded_data_parallel.process_groups_of_other_kinds")
@pytest.mark.parametrize(
    ("kind", "has_default"),
    [("by hand", True), ("by hand", False), ("in Python", True), ("of threads", True)],
)
@pytest.mark.world_sizes(fewest=2)
def test_trains(
    subject: Library, reference: Library, rank_pool: RankPool, kind: str, has_default: bool, tmp_path: Path
) -> None:
    if kind == "of threads" and not hasattr(multi_threaded_pg.ThreadLocalWorld, "comms"):
        unavailable(f"torch {torch.__version__} cannot end groups of threads")
    arguments = {"kind": kind, "has_default": has_default}
    assert_same(rank_pool, reference, subject, "train", tmp_path, **arguments)


@clause("distributed.fsdp.fsdp_torch_limit_removed.backend_as_group")
@pytest.mark.deviation("fsdp.backend_as_group")
@pytest.mark.world_sizes(fewest=2)
def test_a_backend_in_the_place_of_a_group(
    deviation: DeviationJudge, reference: Library, rank_pool: RankPool, tmp_path: Path
) -> None:
    paths = (str(tmp_path / str(number)) for number in itertools.count())

    def probe(library: Library, kind: str = "a backend") -> list[Outcome]:
        return outcomes(rank_pool, library, "group_cases:train", kind=kind, path=next(paths))

    def trains(seen: list[Outcome]) -> bool:
        try:
            assert_ranks_agree(probe(reference, "by hand"), seen)
        except AssertionError:
            return False
        return True

    deviation.judge(
        probe,
        we_do=trains,
        may_agree=not hasattr(dist.ProcessGroup, "all_gather_single"),
    )


@clause("distributed.fsdp.sharded_grad_scaler.constructor.process_group_of_other_kinds")
@pytest.mark.parametrize("has_default", [True, False], ids=["default", "none"])
@pytest.mark.parametrize("kind", ["a backend", "by hand"])
@pytest.mark.world_sizes(fewest=2)
def test_scales(
    subject: Library, reference: Library, rank_pool: RankPool, kind: str, has_default: bool, tmp_path: Path
) -> None:
    arguments = {"kind": kind, "has_default": has_default}
    assert_same(rank_pool, reference, subject, "scale", tmp_path, **arguments)
