"""Sharding beside tensor parallelism, on four real ranks: as torch does, and as one process does unsharded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.distributed.fsdp import tensor_parallel_cases as cases
from conformance.distributed.fsdp.judging import assert_all_close, assert_ranks_agree, outcomes
from conformance.distributed.fsdp.tensor_parallel_cases import Parallel
from conformance.distributed.fsdp.twins import FULL, holds
from conformance.judge.clauses import clause
from conformance.judge.deviations import DeviationJudge
from conformance.judge.library import Library
from conformance.judge.outcome import Outcome
from conformance.judge.tolerances import TRAINED
from conformance.ranks import RankPool

DEEP = pytest.mark.profile("deep")
Ranks = Callable[..., RankPool]

FLAT, ORIGINALS = {"use_orig_params": False}, {"use_orig_params": True}
_FLAT, _ORIGINALS = Parallel((2, 2), FLAT), Parallel((2, 2), ORIGINALS)
_KINDS = pytest.mark.parametrize(
    ("parallel", "kind"),
    [
        pytest.param(_FLAT, "SHARDED", id="flat, sharded"),
        pytest.param(_ORIGINALS, "FULL", id="originals, full"),
        pytest.param(_FLAT, "FULL", id="flat, full", marks=FULL),
        pytest.param(_ORIGINALS, "SHARDED", id="originals, sharded", marks=FULL),
    ],
)
_BOTH = pytest.mark.parametrize(
    "parallel", [pytest.param(_FLAT, marks=FULL), _ORIGINALS], ids=["flat", "originals"]
)
_LATTICE = [
    pytest.param(Parallel(sizes, FLAT | arguments, leaves_last), marks=FULL)
    for sizes, arguments, leaves_last in [
        ((2, 2), {}, True),
        ((2, 2), ORIGINALS | {"sharding_strategy": "SHARD_GRAD_OP"}, False),
        ((2, 2), {"sharding_strategy": "NO_SHARD"}, False),
        ((4, 1), ORIGINALS, False),
        ((1, 4), {}, False),
        ((1, 2), {}, False),
        ((2, 1), {}, True),
    ]
]
_REPLICAS = [
    pytest.param(Parallel((2, 2, 2), arguments | {"sharding_strategy": "HYBRID_SHARD"}), marks=DEEP)
    for arguments in (FLAT, ORIGINALS)
]
_MESHES = [_FLAT, _ORIGINALS, *_LATTICE, *_REPLICAS]


def seen(ranks: Ranks, library: Library, asks: Any, parallel: Parallel, **arguments: Any) -> list[Outcome]:
    pool = ranks(parallel.batches * parallel.sizes[-1])
    return outcomes(pool, library, "tensor_parallel_cases:probe", asks=asks, parallel=parallel, **arguments)


def assert_agree(
    ranks: Ranks, libraries: Sequence[Library], asks: Any, parallel: Parallel, **arguments: Any
) -> list[Outcome]:
    """Judges the subject by the reference; `libraries` is (reference, subject)."""
    expected, actual = (seen(ranks, library, asks, parallel, **arguments) for library in libraries)
    for outcome in expected:
        assert outcome.raised is None, outcome.raised
    assert_ranks_agree(expected, actual)
    return actual


def values_of(outcome: Outcome) -> dict[str, Any]:
    return {name: one["values"] for name, one in outcome.value["parameters"].items()}


def assert_like_unsharded(got: Sequence[Outcome], expected: dict[str, Any]) -> None:
    for outcome in got:
        assert outcome.raised is None, outcome.raised
        assert_all_close("parameters", expected["parameters"], values_of(outcome), TRAINED)


@clause("distributed.fsdp.fsdp_tensor_parallel.trains")
@pytest.mark.parametrize("parallel", _MESHES, ids=str)
def test_trains(subject: Library, reference: Library, ranks: Ranks, parallel: Parallel) -> None:
    got = assert_agree(ranks, (reference, subject), cases.train, parallel)
    assert_like_unsharded(got, cases.train_unsharded(parallel))


@clause("distributed.fsdp.fsdp_tensor_parallel.accumulates")
def test_accumulates(subject: Library, reference: Library, ranks: Ranks) -> None:
    parallel = Parallel((2, 2), FLAT)
    got = assert_agree(ranks, (reference, subject), cases.accumulate, parallel)
    assert_like_unsharded(got, cases.train_unsharded(parallel, steps=1, backwards=2))


@clause("distributed.fsdp.fsdp_tensor_parallel.summoned")
@_BOTH
def test_what_is_written_to_summoned_parameters_stays(
    subject: Library, reference: Library, ranks: Ranks, parallel: Parallel
) -> None:
    assert_agree(ranks, (reference, subject), cases.write_summoned, parallel)


@clause("distributed.fsdp.fsdp_tensor_parallel.saves")
@_KINDS
def test_saves(subject: Library, reference: Library, ranks: Ranks, parallel: Parallel, kind: str) -> None:
    assert_agree(ranks, (reference, subject), cases.save, parallel, kind=kind)


@clause("distributed.fsdp.fsdp_tensor_parallel.loads")
@_KINDS
def test_loads(subject: Library, reference: Library, ranks: Ranks, parallel: Parallel, kind: str) -> None:
    got = assert_agree(ranks, (reference, subject), cases.reload, parallel, kind=kind)
    assert_like_unsharded(got, cases.train_unsharded(parallel, steps=1))


@clause("distributed.fsdp.fsdp_tensor_parallel.loads_together")
@pytest.mark.deviation("fsdp.load_beside_tensor_parallelism")
def test_loads_on_all_ranks_or_on_none(deviation: DeviationJudge, ranks: Ranks) -> None:
    deviation.judge(
        lambda library: [
            one.value for one in seen(ranks, library, cases.fit, Parallel((2, 2), FLAT), rank_at_fault=1)
        ],
        we_do=lambda got: got == ["RuntimeError, unchanged: True"] * 4,
    )


@clause("distributed.fsdp.fsdp_tensor_parallel.reshards")
@FULL
@pytest.mark.parametrize("sizes", [(4, 1), (1, 4)])
def test_another_mesh_reads_what_was_written(
    subject: Library, reference: Library, ranks: Ranks, sizes: tuple[int, int], tmp_path: Path
) -> None:
    parallel = Parallel((2, 2), FLAT)
    for library in (reference, subject):
        path = str(tmp_path / library.spec.replace("/", "_"))
        got = seen(ranks, library, cases.reshard, parallel, path=path, sizes=sizes)
        expected = cases.train_unsharded(parallel, steps=1)["parameters"]
        for outcome in got:
            assert outcome.raised is None, outcome.raised
            assert_all_close("parameters", expected, outcome.value["parameters"], TRAINED)


@clause("distributed.fsdp.fsdp_tensor_parallel.resumes")
@pytest.mark.deviation("fsdp.optimizer_state_of_dtensors")
@_KINDS
def test_training_is_resumed(deviation: DeviationJudge, ranks: Ranks, parallel: Parallel, kind: str) -> None:
    expected = cases.train_unsharded(parallel, steps=2)

    def goes_on(got: Sequence[Outcome]) -> bool:
        return all(
            outcome.raised is None
            and holds(assert_like_unsharded, [Outcome({"parameters": outcome.value["resumed"]})], expected)
            for outcome in got
        )

    deviation.judge(
        partial(_seen_by, ranks, cases.resume, parallel, kind=kind),
        we_do=goes_on,
    )


@clause("distributed.fsdp.fsdp_tensor_parallel.clips")
@pytest.mark.deviation("fsdp.norm_of_dtensors")
@pytest.mark.parametrize("norm_type", [2.0, pytest.param(torch.inf, marks=FULL)])
@_BOTH
def test_the_norm_counts_each_element_once(
    deviation: DeviationJudge, ranks: Ranks, parallel: Parallel, norm_type: float
) -> None:
    expected = cases.train_unsharded(parallel, norm=(0.5, norm_type), steps=1)

    def is_right(got: Sequence[Outcome]) -> bool:
        if not holds(assert_like_unsharded, got, expected):
            return False
        norms = [outcome.value["norm"].values for outcome in got]
        return all(TRAINED.excess(expected["norm"], norm) is None for norm in norms)

    deviation.judge(
        partial(_seen_by, ranks, cases.clip, parallel, norm_type=norm_type),
        we_do=is_right,
        may_agree=norm_type == torch.inf,
    )


@clause("distributed.fsdp.fsdp_tensor_parallel.originals")
@pytest.mark.deviation("fsdp.original_dtensors")
@pytest.mark.parametrize("sizes", [(1, 2), pytest.param((1, 4), marks=FULL)])
def test_originals_that_are_not_sharded_train(
    deviation: DeviationJudge, ranks: Ranks, sizes: tuple[int, int]
) -> None:
    parallel = Parallel(sizes, ORIGINALS)
    expected = cases.train_unsharded(parallel)
    deviation.judge(
        partial(_seen_by, ranks, cases.train, parallel),
        we_do=lambda got: holds(assert_like_unsharded, got, expected),
        torch_does=_raises,
    )


@clause("distributed.fsdp.fsdp_tensor_parallel.originals")
@pytest.mark.deviation("fsdp.original_dtensors")
@FULL
def test_originals_accumulate(deviation: DeviationJudge, ranks: Ranks) -> None:
    parallel = Parallel((2, 2), ORIGINALS)
    expected = cases.train_unsharded(parallel, steps=1, backwards=2)
    deviation.judge(
        partial(_seen_by, ranks, cases.accumulate, parallel),
        we_do=lambda got: holds(assert_like_unsharded, got, expected),
        torch_does=_raises,
    )


_FULLY = [
    Parallel((2, 2), {}, is_fully_shard=True),
    *(
        pytest.param(Parallel(sizes, arguments, leaves_last, is_fully_shard=True), marks=FULL)
        for sizes, arguments, leaves_last in [
            ((2, 2), {"reshard_after_forward": False}, True),
            ((4, 1), {}, False),
            ((1, 4), {}, False),
        ]
    ),
    pytest.param(Parallel((2, 2, 2), {}, is_fully_shard=True), marks=DEEP),
]


@clause("distributed.fsdp.fully_shard.tensor_parallel")
@pytest.mark.parametrize("parallel", _FULLY, ids=str)
def test_fully_shard_trains(subject: Library, reference: Library, ranks: Ranks, parallel: Parallel) -> None:
    got = assert_agree(ranks, (reference, subject), cases.train_sharded, parallel)
    assert_like_unsharded(got, cases.train_unsharded(parallel))


@clause("distributed.fsdp.fully_shard.tensor_parallel")
@pytest.mark.parametrize("asks", [pytest.param(cases.accumulate_sharded, marks=FULL), cases.load_sharded])
def test_fully_shard_accumulates_and_loads(
    subject: Library, reference: Library, ranks: Ranks, asks: Any
) -> None:
    parallel = _FULLY[0]
    assert_agree(ranks, (reference, subject), asks, parallel)


@clause("distributed.fsdp.fully_shard.tensor_parallel")
@FULL
def test_fully_shard_refuses_meshes_that_do_not_belong_together(
    subject: Library, reference: Library, ranks: Ranks
) -> None:
    expected, actual = (
        seen(ranks, library, cases.on_another_mesh, _FULLY[0]) for library in (reference, subject)
    )
    assert expected[0].raised is not None
    assert_ranks_agree(expected, actual)


def _raises(got: Sequence[Outcome]) -> bool:
    return all(one.raised is not None for one in got)


def _seen_by(
    ranks: Ranks, asks: Any, parallel: Parallel, library: Library, **arguments: Any
) -> list[Outcome]:
    return seen(ranks, library, asks, parallel, **arguments)
