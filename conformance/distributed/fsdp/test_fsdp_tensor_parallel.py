"""Sharding combined with tensor parallelism, on four real ranks, compared with torch and with one unsharded process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from conformance.distributed.fsdp.scenes.fsdp_training import clean
from conformance.distributed.fsdp.scenes.parallel_training import (
    DEEP,
    Parallel,
    ParallelTraining,
    assert_agree,
    assert_like_unsharded,
    laid_out,
    seen_by,
    train,
    train_unsharded,
    twins_for,
)
from conformance.distributed.fsdp.scenes.rank_judging import (
    assert_all_close,
)
from conformance.distributed.fsdp.scenes.twins import (
    FULL,
    RankOutcomes,
    TwinsOf,
    each,
    holds,
    values_of,
)
from conformance.judge.clauses import clause
from conformance.judge.library import Library
from conformance.judge.outcome import Outcome
from conformance.judge.tolerances import TRAINED
from conformance.ranks import Rank

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


def deviate(
    twins_of: TwinsOf, asks: Any, parallel: Parallel, arguments: dict[str, Any], **sides: Any
) -> None:
    """Judge the deviation that the test names. `sides` are arguments of `DeviationJudge.judge`."""
    twins = twins_for(twins_of, parallel)
    twins.judge(lambda library: seen_by(twins, library, asks, parallel, **arguments), **sides)


def like_unsharded(expected: dict[str, Any]) -> Callable[[RankOutcomes], bool]:
    return lambda got: holds(assert_like_unsharded, got, expected)


@clause("distributed.fsdp.fsdp_tensor_parallel.trains")
@pytest.mark.parametrize("parallel", _MESHES, ids=str)
def test_tensor_parallel_training_matches_torch(twins_of: TwinsOf, parallel: Parallel) -> None:
    got = assert_agree(twins_of, train, parallel)
    assert_like_unsharded(got, train_unsharded(parallel))


def accumulate(rank: Rank, library: Library, parallel: Parallel) -> dict[str, Any]:
    """Step after two backwards, of which the first does not synchronise. Return the gradients and the parameters."""
    training = ParallelTraining(rank, library, parallel)
    with training.model.no_sync():
        training.backward(0)
    training.backward(1)
    gradients = {name: p.grad for name, p in training.model.named_parameters()}
    training.optimizer.step()
    return {"gradients": gradients, "parameters": training.parameters()}


@clause("distributed.fsdp.fsdp_tensor_parallel.accumulates")
def test_gradients_accumulate_over_backwards(twins_of: TwinsOf) -> None:
    got = assert_agree(twins_of, accumulate, _FLAT)
    assert_like_unsharded(got, train_unsharded(_FLAT, steps=1, backwards=2))


def write_summoned(rank: Rank, library: Library, parallel: Parallel) -> dict[str, Any]:
    """Read and write unsharded parameters, and their gradients with `use_orig_params`. Then train."""
    training = ParallelTraining(rank, library, parallel)
    originals = bool(parallel.arguments.get("use_orig_params"))
    training.backward(0)
    with training.fsdp.summon_full_params(training.model, with_grads=originals):
        named = {clean(name): p for name, p in training.model.named_parameters()}
        gradients = {name: laid_out(p.grad) for name, p in named.items() if originals}
        with torch.no_grad():
            for number, parameter in enumerate(named.values()):
                parameter.mul_(1.0 + number)
                if originals:
                    assert parameter.grad is not None
                    parameter.grad.mul_(2.0)
    reported = {"gradients": gradients, "parameters": training.parameters(), "loss": training.backward(1)}
    training.optimizer.step()
    return reported | {"after": training.parameters()}


@clause("distributed.fsdp.fsdp_tensor_parallel.summoned")
@_BOTH
def test_writes_to_summoned_parameters_are_kept(twins_of: TwinsOf, parallel: Parallel) -> None:
    assert_agree(twins_of, write_summoned, parallel)


def save(rank: Rank, library: Library, parallel: Parallel, *, kind: str) -> dict[str, Any]:
    training = ParallelTraining(rank, library, parallel)
    training.step(0)
    model = {name: laid_out(value) for name, value in training.state_dict(kind).items()}
    states = training.optimizer_state(kind)["state"]
    optimizer = {
        name: {key: laid_out(value) for key, value in states[name].items()} for name in sorted(states)
    }
    return {"model": model, "optimizer": optimizer}


@clause("distributed.fsdp.fsdp_tensor_parallel.saves")
@_KINDS
def test_state_dict_matches_torch(twins_of: TwinsOf, parallel: Parallel, kind: str) -> None:
    assert_agree(twins_of, save, parallel, kind=kind)


def reload(rank: Rank, library: Library, parallel: Parallel, *, kind: str) -> dict[str, Any]:
    """Load the state dict of a trained model into a model with other values."""
    trained, other = (ParallelTraining(rank, library, parallel, seed) for seed in (0, 1))
    trained.step(0)
    other.load(kind, trained.state_dict(kind))
    return {"parameters": other.parameters(), "loss": other.step(1)}


@clause("distributed.fsdp.fsdp_tensor_parallel.loads")
@_KINDS
def test_state_dict_reloads_and_trains(twins_of: TwinsOf, parallel: Parallel, kind: str) -> None:
    got = assert_agree(twins_of, reload, parallel, kind=kind)
    assert_like_unsharded(got, train_unsharded(parallel, steps=1))


def fit(rank: Rank, library: Library, parallel: Parallel, *, rank_at_fault: int) -> str:
    """Load a state dict that lacks a key on one rank. Return the error, or "loaded"."""
    training = ParallelTraining(rank, library, parallel)
    before = training.shards()
    state = training.state_dict("FULL")
    if rank.rank == rank_at_fault:
        del state["0.up.weight"]
    try:
        training.load("FULL", state)
    except RuntimeError as error:
        unchanged = all(torch.equal(before[name], now) for name, now in training.shards().items())
        return f"{type(error).__name__}, unchanged: {unchanged}"
    return "loaded"


@clause("distributed.fsdp.fsdp_tensor_parallel.loads_together")
@pytest.mark.deviation("fsdp.load_that_fails_on_one_rank")
def test_loads_on_all_ranks_or_on_none(twins_of: TwinsOf) -> None:
    we_do = each(lambda value: value == "RuntimeError, unchanged: True")
    deviate(twins_of, fit, _FLAT, {"rank_at_fault": 1}, we_do=we_do)


def reshard(rank: Rank, library: Library, parallel: Parallel, *, path: str, sizes: tuple[int, ...]) -> Any:
    """Save a model on one mesh and load it on another one."""
    kind = "SHARDED"
    trained = ParallelTraining(rank, library, parallel)
    trained.step(0)
    dcp.save({"model": trained.state_dict(kind)}, checkpoint_id=path)
    other = ParallelTraining(rank, library, Parallel(sizes, parallel.arguments, parallel.leaves_last), seed=1)
    state = {"model": other.state_dict(kind)}
    dcp.load(state, checkpoint_id=path)
    other.load(kind, state["model"])
    return {"parameters": {name: value["values"] for name, value in other.parameters().items()}}


@clause("distributed.fsdp.fsdp_tensor_parallel.reshards")
@FULL
@pytest.mark.parametrize("sizes", [(4, 1), (1, 4)])
def test_another_mesh_reads_what_was_written(
    twins_of: TwinsOf, sizes: tuple[int, int], tmp_path: Path
) -> None:
    twins = twins_for(twins_of, _FLAT)
    expected = train_unsharded(_FLAT, steps=1)["parameters"]
    for library in (twins.reference, twins.subject):
        path = str(tmp_path / library.spec.replace("/", "_"))
        for value in values_of(seen_by(twins, library, reshard, _FLAT, path=path, sizes=sizes)):
            assert_all_close("parameters", expected, value["parameters"], TRAINED)


def resume(rank: Rank, library: Library, parallel: Parallel, *, kind: str) -> dict[str, Any]:
    """Load the states of a trained model and its optimizer into another model. Then step both."""
    trained, other = (ParallelTraining(rank, library, parallel, seed) for seed in (0, 1))
    trained.step(0)
    other.step(0)
    other.load(kind, trained.state_dict(kind))
    other.load_optimizer(kind, trained.optimizer_state(kind))
    for training in (trained, other):
        training.step(1)
    return {"trained": trained.parameters(), "resumed": other.parameters()}


@clause("distributed.fsdp.fsdp_tensor_parallel.resumes")
@pytest.mark.deviation("fsdp.optimizer_state_of_dtensors")
@_KINDS
def test_training_is_resumed(twins_of: TwinsOf, parallel: Parallel, kind: str) -> None:
    expected = train_unsharded(parallel, steps=2)

    def goes_on(value: Any) -> bool:
        return holds(assert_like_unsharded, [Outcome({"parameters": value["resumed"]})], expected)

    deviate(twins_of, resume, parallel, {"kind": kind}, we_do=each(goes_on))


def clip(rank: Rank, library: Library, parallel: Parallel, *, norm_type: float) -> dict[str, Any]:
    training = ParallelTraining(rank, library, parallel)
    training.backward(0)
    norm = training.model.clip_grad_norm_(0.5, norm_type)
    training.optimizer.step()
    training.optimizer.zero_grad()
    return {"norm": norm, "parameters": training.parameters()}


@clause("distributed.fsdp.fsdp_tensor_parallel.clips")
@pytest.mark.deviation("fsdp.norm_of_dtensors")
@pytest.mark.parametrize("norm_type", [2.0, pytest.param(torch.inf, marks=FULL)])
@_BOTH
def test_norm_counts_each_element_once(twins_of: TwinsOf, parallel: Parallel, norm_type: float) -> None:
    expected = train_unsharded(parallel, norm=(0.5, norm_type), steps=1)

    def is_right(got: RankOutcomes) -> bool:
        if not holds(assert_like_unsharded, got, expected):
            return False
        norms = [outcome.value["norm"].values for outcome in got]
        return all(TRAINED.excess(expected["norm"], norm) is None for norm in norms)

    may_agree = norm_type == torch.inf
    deviate(twins_of, clip, parallel, {"norm_type": norm_type}, we_do=is_right, may_agree=may_agree)


@clause("distributed.fsdp.fsdp_tensor_parallel.originals")
@pytest.mark.deviation("fsdp.original_dtensors")
@pytest.mark.parametrize("sizes", [(1, 2), pytest.param((1, 4), marks=FULL)])
def test_originals_that_are_not_sharded_train(twins_of: TwinsOf, sizes: tuple[int, int]) -> None:
    parallel = Parallel(sizes, ORIGINALS)
    we_do = like_unsharded(train_unsharded(parallel))
    deviate(twins_of, train, parallel, {}, we_do=we_do, torch_does=_raises)


@clause("distributed.fsdp.fsdp_tensor_parallel.originals")
@pytest.mark.deviation("fsdp.original_dtensors")
@FULL
def test_originals_accumulate(twins_of: TwinsOf) -> None:
    we_do = like_unsharded(train_unsharded(_ORIGINALS, steps=1, backwards=2))
    deviate(twins_of, accumulate, _ORIGINALS, {}, we_do=we_do, torch_does=_raises)


def _raises(got: RankOutcomes) -> bool:
    return all(outcome.raised is not None for outcome in got)
