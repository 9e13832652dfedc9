"""Sharding combined with tensor parallelism, on four real ranks, compared with torch and with one unsharded process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.distributed.fsdp import tensor_parallel_cases as cases
from conformance.distributed.fsdp.rank_judging import assert_all_close, assert_ranks_agree, run_on_ranks
from conformance.distributed.fsdp.tensor_parallel_cases import Parallel
from conformance.distributed.fsdp.twins import FULL, RankOutcomes, Twins, TwinsOf, each, holds, values_of
from conformance.judge.clauses import clause
from conformance.judge.library import Library
from conformance.judge.outcome import Outcome
from conformance.judge.tolerances import TRAINED

DEEP = pytest.mark.profile("deep")

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


def twins_for(twins_of: TwinsOf, parallel: Parallel) -> Twins:
    return twins_of(parallel.batches * parallel.sizes[-1])


def seen_by(twins: Twins, library: Library, asks: Any, parallel: Parallel, **arguments: Any) -> RankOutcomes:
    return run_on_ranks(twins.pool, library, cases.probe, asks=asks, parallel=parallel, **arguments)


def assert_agree(
    twins_of: TwinsOf, asks: Any, parallel: Parallel, *, all_raise: bool = False, **arguments: Any
) -> RankOutcomes:
    """Compare the ranks of both libraries. Return the subject's outcomes."""
    twins = twins_for(twins_of, parallel)
    expected, actual = (
        seen_by(twins, library, asks, parallel, **arguments) for library in (twins.reference, twins.subject)
    )
    assert all((outcome.raised is not None) is all_raise for outcome in expected), expected
    assert_ranks_agree(expected, actual)
    return actual


def deviate(
    twins_of: TwinsOf, asks: Any, parallel: Parallel, arguments: dict[str, Any], **sides: Any
) -> None:
    """Judge the deviation that the test names. `sides` are arguments of `DeviationJudge.judge`."""
    twins = twins_for(twins_of, parallel)
    twins.judge(lambda library: seen_by(twins, library, asks, parallel, **arguments), **sides)


def assert_like_unsharded(got: RankOutcomes, expected: dict[str, Any]) -> None:
    for value in values_of(got):
        parameters = {name: state["values"] for name, state in value["parameters"].items()}
        assert_all_close("parameters", expected["parameters"], parameters, TRAINED)


def like_unsharded(expected: dict[str, Any]) -> Callable[[RankOutcomes], bool]:
    return lambda got: holds(assert_like_unsharded, got, expected)


@clause("distributed.fsdp.fsdp_tensor_parallel.trains")
@pytest.mark.parametrize("parallel", _MESHES, ids=str)
def test_tensor_parallel_training_matches_torch(twins_of: TwinsOf, parallel: Parallel) -> None:
    got = assert_agree(twins_of, cases.train, parallel)
    assert_like_unsharded(got, cases.train_unsharded(parallel))


@clause("distributed.fsdp.fsdp_tensor_parallel.accumulates")
def test_gradients_accumulate_over_backwards(twins_of: TwinsOf) -> None:
    got = assert_agree(twins_of, cases.accumulate, _FLAT)
    assert_like_unsharded(got, cases.train_unsharded(_FLAT, steps=1, backwards=2))


@clause("distributed.fsdp.fsdp_tensor_parallel.summoned")
@_BOTH
def test_writes_to_summoned_parameters_are_kept(twins_of: TwinsOf, parallel: Parallel) -> None:
    assert_agree(twins_of, cases.write_summoned, parallel)


@clause("distributed.fsdp.fsdp_tensor_parallel.saves")
@_KINDS
def test_state_dict_matches_torch(twins_of: TwinsOf, parallel: Parallel, kind: str) -> None:
    assert_agree(twins_of, cases.save, parallel, kind=kind)


@clause("distributed.fsdp.fsdp_tensor_parallel.loads")
@_KINDS
def test_state_dict_reloads_and_trains(twins_of: TwinsOf, parallel: Parallel, kind: str) -> None:
    got = assert_agree(twins_of, cases.reload, parallel, kind=kind)
    assert_like_unsharded(got, cases.train_unsharded(parallel, steps=1))


@clause("distributed.fsdp.fsdp_tensor_parallel.loads_together")
@pytest.mark.deviation("fsdp.load_beside_tensor_parallelism")
def test_loads_on_all_ranks_or_on_none(twins_of: TwinsOf) -> None:
    we_do = each(lambda value: value == "RuntimeError, unchanged: True")
    deviate(twins_of, cases.fit, _FLAT, {"rank_at_fault": 1}, we_do=we_do)


@clause("distributed.fsdp.fsdp_tensor_parallel.reshards")
@FULL
@pytest.mark.parametrize("sizes", [(4, 1), (1, 4)])
def test_another_mesh_reads_what_was_written(
    twins_of: TwinsOf, sizes: tuple[int, int], tmp_path: Path
) -> None:
    twins = twins_for(twins_of, _FLAT)
    expected = cases.train_unsharded(_FLAT, steps=1)["parameters"]
    for library in (twins.reference, twins.subject):
        path = str(tmp_path / library.spec.replace("/", "_"))
        for value in values_of(seen_by(twins, library, cases.reshard, _FLAT, path=path, sizes=sizes)):
            assert_all_close("parameters", expected, value["parameters"], TRAINED)


@clause("distributed.fsdp.fsdp_tensor_parallel.resumes")
@pytest.mark.deviation("fsdp.optimizer_state_of_dtensors")
@_KINDS
def test_training_is_resumed(twins_of: TwinsOf, parallel: Parallel, kind: str) -> None:
    expected = cases.train_unsharded(parallel, steps=2)

    def goes_on(value: Any) -> bool:
        return holds(assert_like_unsharded, [Outcome({"parameters": value["resumed"]})], expected)

    deviate(twins_of, cases.resume, parallel, {"kind": kind}, we_do=each(goes_on))


@clause("distributed.fsdp.fsdp_tensor_parallel.clips")
@pytest.mark.deviation("fsdp.norm_of_dtensors")
@pytest.mark.parametrize("norm_type", [2.0, pytest.param(torch.inf, marks=FULL)])
@_BOTH
def test_norm_counts_each_element_once(twins_of: TwinsOf, parallel: Parallel, norm_type: float) -> None:
    expected = cases.train_unsharded(parallel, norm=(0.5, norm_type), steps=1)

    def is_right(got: RankOutcomes) -> bool:
        if not holds(assert_like_unsharded, got, expected):
            return False
        norms = [outcome.value["norm"].values for outcome in got]
        return all(TRAINED.excess(expected["norm"], norm) is None for norm in norms)

    may_agree = norm_type == torch.inf
    deviate(twins_of, cases.clip, parallel, {"norm_type": norm_type}, we_do=is_right, may_agree=may_agree)


@clause("distributed.fsdp.fsdp_tensor_parallel.originals")
@pytest.mark.deviation("fsdp.original_dtensors")
@pytest.mark.parametrize("sizes", [(1, 2), pytest.param((1, 4), marks=FULL)])
def test_originals_that_are_not_sharded_train(twins_of: TwinsOf, sizes: tuple[int, int]) -> None:
    parallel = Parallel(sizes, ORIGINALS)
    we_do = like_unsharded(cases.train_unsharded(parallel))
    deviate(twins_of, cases.train, parallel, {}, we_do=we_do, torch_does=_raises)


@clause("distributed.fsdp.fsdp_tensor_parallel.originals")
@pytest.mark.deviation("fsdp.original_dtensors")
@FULL
def test_originals_accumulate(twins_of: TwinsOf) -> None:
    we_do = like_unsharded(cases.train_unsharded(_ORIGINALS, steps=1, backwards=2))
    deviate(twins_of, cases.accumulate, _ORIGINALS, {}, we_do=we_do, torch_does=_raises)


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
def test_fully_shard_trains(twins_of: TwinsOf, parallel: Parallel) -> None:
    got = assert_agree(twins_of, cases.train_sharded, parallel)
    assert_like_unsharded(got, cases.train_unsharded(parallel))


@clause("distributed.fsdp.fully_shard.tensor_parallel")
@pytest.mark.parametrize("asks", [pytest.param(cases.accumulate_sharded, marks=FULL), cases.load_sharded])
def test_fully_shard_accumulates_and_loads(twins_of: TwinsOf, asks: Any) -> None:
    assert_agree(twins_of, asks, _FULLY[0])


@clause("distributed.fsdp.fully_shard.tensor_parallel")
@FULL
def test_fully_shard_refuses_meshes_that_do_not_belong_together(twins_of: TwinsOf) -> None:
    assert_agree(twins_of, cases.on_another_mesh, _FULLY[0], all_raise=True)


def _raises(got: RankOutcomes) -> bool:
    return all(outcome.raised is not None for outcome in got)
