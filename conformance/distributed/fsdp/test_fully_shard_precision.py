"""Units of fully_shard whose parameters differ in dtype, and masters in a wider one."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from conformance.distributed.fsdp import fully_shard_precision_cases as cases
from conformance.distributed.fsdp.fully_shard_precision_cases import FULL, LOW, Dtypes
from conformance.distributed.fsdp.judging import assert_ranks_agree, outcomes
from conformance.distributed.fsdp.test_fully_shard_construct import judge_by_hand
from conformance.judge.clauses import clause
from conformance.judge.deviations import DeviationJudge
from conformance.judge.library import Library
from conformance.judge.outcome import observe
from conformance.ranks import RankPool

_PROBE = "fully_shard_construct_cases:probe"
_WHOLE: Dtypes = (FULL, None, FULL)


@clause("distributed.fsdp.fully_shard.dtypes_in_a_group")
@pytest.mark.deviation("fully_shard.dtypes_in_a_group")
@pytest.mark.parametrize(
    "thaws", ["", "inner", "router"], ids=["trained", "thaws alone", "thaws with others"]
)
def test_trains_parameters_of_two_dtypes(deviation: DeviationJudge, rank_pool: RankPool, thaws: str) -> None:
    expected = observe(cases.of_two_dtypes_by_hand, rank_pool.world_size, thaws)
    judge_by_hand(deviation, rank_pool, expected, cases.of_two_dtypes, thaws=thaws)


@clause("distributed.fsdp.fully_shard.precision_per_parameter")
@pytest.mark.parametrize(
    ("everywhere", "apart"),
    [
        ((LOW, FULL, FULL), {}),
        ((None, None, FULL), {}),
        ((LOW, FULL, FULL), {"norm": _WHOLE, "router": _WHOLE}),
        ((None, None, None), {"inner": (LOW, LOW, FULL), "router": (FULL, LOW, FULL)}),
    ],
    ids=["masters", "masters alone", "in full apart", "each otherwise"],
)
def test_computes_reduces_and_steps_by_parameter(
    subject: Library, rank_pool: RankPool, everywhere: Dtypes, apart: Mapping[str, Dtypes]
) -> None:
    given = {"everywhere": everywhere, "apart": apart}
    expected, found = (
        outcomes(rank_pool, subject, _PROBE, asks=asks, **given)
        for asks in (cases.by_policy_by_hand, cases.by_policy)
    )
    assert_ranks_agree(expected, found)
    assert found[0].raised is None, found[0].raised


@clause("distributed.fsdp.fully_shard.masters")
def test_masters_are_not_lost_in_silence(subject: Library, rank_pool: RankPool) -> None:
    (found, *_) = outcomes(rank_pool, subject, _PROBE, asks=cases.lost_masters)
    assert found.raised is None, found.raised
    assert found.value["loaded"] == [str(FULL)]
    assert found.value["rounded"].startswith("RuntimeError: norm.weight (torch.bfloat16)")
    assert found.value["partly"].startswith("RuntimeError: norm.weight (torch.bfloat16)")
    assert "router.weight" not in found.value["partly"]
    assert found.value["reloaded"] is None
    assert found.value["into low"].startswith("RuntimeError: norm.weight (torch.bfloat16)")
    assert found.value["cast"].startswith("RuntimeError")
    assert "router.weight" in found.value["cast"]
    assert "inner.weight" not in found.value["cast"]
    assert found.value["narrow"].startswith("ValueError")
    assert "norm.weight" in found.value["narrow"]


@clause("distributed.fsdp.fully_shard.param_precisions")
def test_reports_what_each_parameter_has(subject: Library, rank_pool: RankPool) -> None:
    (found, *_) = outcomes(rank_pool, subject, _PROBE, asks=cases.reported)
    assert found.raised is None, found.raised
    for name, has in found.value["wrapped"].items():
        own = torch.float64 if name.startswith("inner") else FULL
        assert has == str((LOW, FULL, own)), name
        assert found.value["plain"][name] == str((own, None, own)), name
    assert len(found.value["plain"]) == len(found.value["wrapped"]) == 6
