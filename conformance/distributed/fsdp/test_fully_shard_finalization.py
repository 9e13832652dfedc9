"""Manual finalization of backward with `fully_shard`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from conformance.distributed.fsdp.scenes.fully_shard_calls import (
    CLEAR,
    EVALUATE,
    REPLICAS,
    RESET,
    SHARDED,
    SKIP,
    STEP,
    TRAIN,
    WAIT,
    UnitCall,
    assert_plays_like_torch,
    play,
    setting,
)
from conformance.distributed.fsdp.scenes.fully_shard_training import Sharding, values_and_gradients
from conformance.distributed.fsdp.scenes.rank_judging import assert_ranks_agree, share_of_examples
from conformance.distributed.fsdp.scenes.scene import Scene, filled, tried
from conformance.distributed.fsdp.scenes.twins import PlainTwins, RankOutcomes, values_of
from conformance.judge.clauses import clause
from conformance.judge.deviations import does_as
from conformance.judge.outcome import Outcome
from conformance.judge.surface import is_torch_in
from conformance.judge.tolerances import TRAINED
from conformance.strategies.full_sharding import programs

_HAS_FINALIZATION = is_torch_in(">=2.15")
MANUAL = setting("set_manual_backward_finalization", enabled=True)
AUTOMATIC = setting("set_manual_backward_finalization", enabled=False)
FINALIZE = setting("finalize_backward")
FINALIZE_ASYNC = setting("finalize_backward", async_op=True)
PASS = TRAIN[:2]
SYNC, NO_SYNC = (
    setting("set_requires_gradient_sync", requires_gradient_sync=value) for value in (True, False)
)
ALL_REDUCE, NO_ALL_REDUCE = (
    setting("set_requires_all_reduce", requires_all_reduce=value) for value in (True, False)
)
KEEP = setting("set_reshard_after_backward", reshard_after_backward=False)
NO_SYNC_OF_ONE = setting("set_requires_gradient_sync", 1, requires_gradient_sync=False)
LAST, NOT_LAST = (setting("set_is_last_backward", is_last_backward=value) for value in (True, False))
FAILING = UnitCall("fail_backward", 1)

PROGRAMS = {
    "one backward": (MANUAL, *PASS, FINALIZE, STEP, *PASS, FINALIZE, STEP),
    "several backwards": (MANUAL, *PASS, *PASS, FINALIZE, STEP, *PASS, FINALIZE, STEP),
    "finalized twice": (MANUAL, *PASS, FINALIZE, FINALIZE, *PASS, FINALIZE, FINALIZE, STEP),
    "unsynchronised": (MANUAL, NO_SYNC, *PASS, *PASS, SYNC, FINALIZE, STEP, *PASS, FINALIZE, STEP),
    "a unit unsynchronised": (MANUAL, NO_SYNC_OF_ONE, *PASS, *PASS, SYNC, FINALIZE, STEP),
    "asynchronous": (MANUAL, *PASS, FINALIZE_ASYNC, WAIT, STEP, *PASS, FINALIZE_ASYNC, WAIT, STEP),
    "with evaluations": (MANUAL, *PASS, EVALUATE, *PASS, EVALUATE, FINALIZE, EVALUATE, STEP),
    "kept unsharded": (KEEP, MANUAL, *PASS, *PASS, FINALIZE),
    "a unit unused": (MANUAL, *PASS, SKIP, FINALIZE, STEP, SKIP, FINALIZE, STEP),
    "back to automatic": (MANUAL, *PASS, FINALIZE, AUTOMATIC, *PASS, STEP),
}
# Programs with automatic finalization, in which only the last backward before the first step synchronises.
LIKE = {
    "unsynchronised": (NO_SYNC, *PASS, SYNC, *PASS, STEP, *PASS, STEP),
    "a unit unsynchronised": (NO_SYNC_OF_ONE, *PASS, SYNC, *PASS, STEP),
}
_NOT_ROOT = "set_manual_backward_finalization must be called on the root FSDP module"
_NOT_MANUAL = (
    "FSDP finalize_backward requires manual backward finalization. Call set_manual_backward_finalization(True) before "
    "forward"
)
_BEGUN = "set_manual_backward_finalization cannot change mode after backward starts"
_NO_ALL_REDUCE = (
    "FSDP manual backward finalization requires all-reduce for parameter group {!r}. Call "
    "set_requires_all_reduce(True) before finalization"
)
_PARTIAL = (
    "FSDP manual backward finalization does not support partial gradient reductions for parameter group {!r}. Use "
    "automatic backward finalization for this configuration"
)
_PENDING = "The previous gradient reduction must be waited on before "
# Calls, and the errors that they raise.
REFUSED: dict[str, tuple[tuple[UnitCall, ...], list[str]]] = {
    "nothing to finalize": (
        (FINALIZE, FINALIZE_ASYNC, WAIT, WAIT, MANUAL, FINALIZE, EVALUATE, FINALIZE, *PASS, FINALIZE, STEP),
        [],
    ),
    "automatic": ((*TRAIN, FINALIZE, FINALIZE_ASYNC, *TRAIN), [_NOT_MANUAL] * 2),
    "inner unit": (
        (MANUAL, *PASS, setting("finalize_backward", 1), setting(MANUAL.name, 1, enabled=False), FINALIZE),
        ["finalize_backward must be called on the root FSDP module", _NOT_ROOT],
    ),
    "inner unit before the first forward": ((setting(MANUAL.name, 1, enabled=True), *PASS), [_NOT_ROOT]),
    "mode changed": ((MANUAL, *PASS, AUTOMATIC, MANUAL, FINALIZE, AUTOMATIC, *TRAIN), [_BEGUN]),
    "mode changed between backwards": (
        (NOT_LAST, *PASS, MANUAL, LAST, *PASS, MANUAL, *PASS, FINALIZE, STEP),
        [_BEGUN],
    ),
    "not waited for": (
        (MANUAL, *PASS, FINALIZE_ASYNC, EVALUATE, FINALIZE, AUTOMATIC, WAIT, STEP, *PASS, FINALIZE),
        [_PENDING + "forward", _PENDING + "finalizing backward again", _BEGUN],
    ),
    "reset": ((MANUAL, *PASS, RESET, FINALIZE, CLEAR, *PASS, FINALIZE), []),
    "reset before the wait": (
        (MANUAL, *PASS, FINALIZE_ASYNC, RESET, WAIT, STEP, *PASS, FINALIZE),
        ["This gradient reduction handle was invalidated"],
    ),
    "not synchronised": ((MANUAL, NO_SYNC, *PASS, FINALIZE, SYNC, FINALIZE, STEP), []),
    "partial all-reduce": (
        (NO_SYNC, *PASS, SYNC, NO_ALL_REDUCE, MANUAL, FINALIZE, ALL_REDUCE, FINALIZE, STEP),
        [_NO_ALL_REDUCE.format("<root>")],
    ),
    "no all-reduce": ((MANUAL, NO_ALL_REDUCE, *PASS, FINALIZE), [_PARTIAL.format("<root>")]),
}


def _automatic(calls: Sequence[UnitCall]) -> list[UnitCall]:
    """Return the calls without those of manual finalization. The last of several backwards synchronises."""
    return [call for call in calls if call not in (MANUAL, AUTOMATIC, FINALIZE, FINALIZE_ASYNC, WAIT)]


def _held(outcomes: RankOutcomes) -> RankOutcomes:
    return [Outcome(value["held"]) for value in values_of(outcomes)]


def _raised(outcomes: RankOutcomes) -> list[str]:
    """Return the errors of the calls on the first rank."""
    results = [call["made"] for call in values_of(outcomes)[0]["seen"]]
    return [text.partition("\n")[0] for text in results if isinstance(text, str) and "Error: " in text]


@clause("distributed.fsdp.fully_shard.finalization")
@pytest.mark.parametrize(
    ("program", "sharding"),
    [(program, Sharding()) for program in PROGRAMS]
    + [("unsynchronised", REPLICAS), ("asynchronous", REPLICAS), ("asynchronous", Sharding(offloads=True))],
    ids=[*PROGRAMS, "unsynchronised replicas", "replicas", "offloaded"],
)
@pytest.mark.world_sizes(fewest=2)
def test_finalization_trains_like_automatic(
    plain_twins: PlainTwins, program: str, sharding: Sharding
) -> None:
    calls = PROGRAMS[program]
    if _HAS_FINALIZATION:
        assert_plays_like_torch(plain_twins, calls, sharding=sharding)
    _assert_trains_like(plain_twins, calls, LIKE.get(program, _automatic(calls)), sharding)


def _assert_trains_like(
    plain_twins: PlainTwins, calls: Sequence[UnitCall], like: Sequence[UnitCall], sharding: Sharding = SHARDED
) -> None:
    """Assert that the subject's state after `calls` equals torch's state after `like`."""
    expected = plain_twins.of(plain_twins.reference, play, calls=like, sharding=sharding)
    assert_ranks_agree(
        _held(expected), _held(plain_twins.of_subject(play, calls=calls, sharding=sharding)), TRAINED
    )


@clause("distributed.fsdp.fully_shard.finalization")
@pytest.mark.parametrize("program", REFUSED)
@pytest.mark.world_sizes(fewest=2)
def test_finalization_in_wrong_order_raises(plain_twins: PlainTwins, program: str) -> None:
    calls, texts = REFUSED[program]
    sharding = REPLICAS if "all-reduce" in program else SHARDED
    if _HAS_FINALIZATION:
        assert_plays_like_torch(plain_twins, calls, sharding=sharding)
    raised = _raised(plain_twins.of_subject(play, calls=calls, sharding=sharding))
    assert raised == [f"RuntimeError: {text}" for text in texts]


@clause("distributed.fsdp.fully_shard.finalization_any_order")
@share_of_examples(0.7)
@given(data=st.data())
def test_finalization_before_each_step_matches_torch(plain_twins: PlainTwins, data: st.DataObject) -> None:
    module = plain_twins.reference.distributed.fsdp.FSDPModule
    sharding, drawn = data.draw(programs(module, plain_twins.world_size))
    steps = [(FINALIZE, call) if call.name == "step_of_shards" else (call,) for call in drawn]
    assert_plays_like_torch(plain_twins, [MANUAL, *itertools.chain(*steps)], sharding=sharding)


def _model(scene: Scene, *, is_manual: bool = True) -> Any:
    """Return a model whose first unit has no differentiable input, so that its backward does not end by itself."""
    model: Any = filled(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))).to(scene.rank.device)
    scene.shard_children(model)
    if is_manual:
        model.set_manual_backward_finalization(True)
    return model


def _loss(scene: Scene, model: Any, number: int = 0) -> Tensor:
    batch = torch.full((2, 4), 1.0 + scene.rank.rank + number, device=scene.rank.device)
    return model(batch).square().mean()


def finalize_open_unit(scene: Scene, is_manual: bool) -> dict[str, Any]:
    """Run two backwards that leave the first unit open. Return the parameters and gradients."""
    model = _model(scene, is_manual=is_manual)
    for number in range(2):
        _loss(scene, model, number).backward()
    if is_manual:
        model.finalize_backward()
    return values_and_gradients(model)


@clause("distributed.fsdp.fully_shard.finalization")
def test_finalization_reduces_open_units(plain_twins: PlainTwins) -> None:
    """Compare manual finalization by the subject with automatic finalization by torch."""
    expected = plain_twins.of(plain_twins.reference, finalize_open_unit, is_manual=False)
    assert_ranks_agree(expected, plain_twins.of_subject(finalize_open_unit, is_manual=True), TRAINED)


def finalize_two_roots(scene: Scene) -> dict[str, Any]:
    """Finalize one of two roots that share streams asynchronously, and call the other one meanwhile."""
    first, second = _model(scene), _model(scene)
    scene.api.share_comm_ctx([first, second])
    _loss(scene, second).backward()
    second.finalize_backward()
    _loss(scene, first).backward()
    handle = first.finalize_backward(async_op=True)
    refused = [
        tried(lambda: _loss(scene, second)),
        tried(second.finalize_backward),
        tried(second.reset_iter_state),
    ]
    handle.wait()
    handle.wait()
    _loss(scene, second, 1).backward()
    second.finalize_backward()
    return {"refused": refused, "held": [values_and_gradients(first), values_and_gradients(second)]}


@clause("distributed.fsdp.fully_shard.finalization")
def test_roots_that_share_streams_wait_for_one_finalization(plain_twins: PlainTwins) -> None:
    if _HAS_FINALIZATION:
        plain_twins.agree(finalize_two_roots)
    for value in plain_twins.values(finalize_two_roots):
        assert value["refused"] == [
            f"RuntimeError: {_PENDING}forward",
            "RuntimeError: Another gradient reduction sharing this communication context must be waited on before "
            "finalizing backward",
            "RuntimeError: reset_iter_state cannot reset a gradient reduction owned by another FSDP root sharing the "
            "communication context",
        ]


def drop_handle_of_finalization(scene: Scene) -> dict[str, Any]:
    """Drop the handle of an asynchronous finalization. Return the error's notes, and the gradients after a reset."""
    model = _model(scene)
    _loss(scene, model).backward()
    model.finalize_backward(async_op=True)
    notes: list[str] = []
    try:
        _loss(scene, model)
    except RuntimeError as error:
        notes = error.__notes__
    model.reset_iter_state()
    model.zero_grad()
    _loss(scene, model, 1).backward()
    model.finalize_backward()
    return {"notes": notes, "held": values_and_gradients(model)}


@clause("distributed.fsdp.fully_shard.unfinished_finalization")
def test_error_after_lost_handle_names_cure(plain_twins: PlainTwins) -> None:
    for value in plain_twins.values(drop_handle_of_finalization):
        assert "reset_iter_state() of the root if the handle was lost" in value["notes"][0]


EARLY_STEPS = {
    "not finalized": (MANUAL, *PASS, STEP, FINALIZE, STEP),
    "not waited for": (MANUAL, *PASS, FINALIZE_ASYNC, STEP, WAIT, STEP),
}
# Calls with a failed backward, and those that leave the same gradients with automatic finalization.
FAILED = {
    "after a backward": ((MANUAL, *PASS, FAILING, FINALIZE, STEP), TRAIN),
    "after an unsynchronised one": ((MANUAL, NO_SYNC, *PASS, SYNC, FAILING, FINALIZE, STEP), TRAIN),
    "alone": ((MANUAL, FAILING, FINALIZE, *PASS, FINALIZE, STEP), (EVALUATE, *TRAIN)),
    "mode changed": ((MANUAL, FAILING, AUTOMATIC, *TRAIN), (EVALUATE, *TRAIN)),
}


def _refuses_step(outcomes: RankOutcomes) -> bool:
    raised = _raised(outcomes)
    return len(raised) == 1 and "body.parts.0.inner.weight of " in raised[0]


def _refuses_after_failure(outcomes: RankOutcomes) -> bool:
    texts = (
        "finalize_backward must be called after backward completes",
        "cannot change mode after backward starts",
    )
    return any(text in raised for raised in _raised(outcomes) for text in texts)


@clause("distributed.fsdp.fully_shard.unfinished_finalization")
@pytest.mark.parametrize("program", EARLY_STEPS)
@pytest.mark.world_sizes(fewest=2)
def test_step_before_finalization_raises(plain_twins: PlainTwins, program: str) -> None:
    calls = EARLY_STEPS[program]
    outcomes = plain_twins.of_subject(play, calls=calls)
    assert _refuses_step(outcomes)
    assert "set_manual_backward_finalization(True) leaves that to the caller" in _raised(outcomes)[0]
    _assert_trains_like(plain_twins, calls, TRAIN)


@clause("distributed.fsdp.fully_shard.step_before_finalization")
@pytest.mark.deviation("fully_shard.step_before_finalization")
@pytest.mark.parametrize("program", EARLY_STEPS)
@pytest.mark.world_sizes(fewest=2)
def test_step_before_finalization_raises_unlike_torch(plain_twins: PlainTwins, program: str) -> None:
    plain_twins.deviate(
        play,
        calls=EARLY_STEPS[program],
        we_do=_refuses_step,
        torch_does=lambda outcomes: not _raised(outcomes),
    )


@clause("distributed.fsdp.fully_shard.unfinished_finalization")
@pytest.mark.parametrize("program", FAILED)
@pytest.mark.world_sizes(fewest=2)
def test_failed_backward_does_not_count_in_finalization(plain_twins: PlainTwins, program: str) -> None:
    _assert_trains_like(plain_twins, *FAILED[program])


@clause("distributed.fsdp.fully_shard.finalization_after_failed_backward")
@pytest.mark.deviation("fully_shard.finalization_after_failed_backward")
@pytest.mark.parametrize("program", FAILED)
@pytest.mark.world_sizes(fewest=2)
def test_finalization_after_failed_backward_keeps_earlier_gradients(
    plain_twins: PlainTwins, program: str
) -> None:
    calls, like = FAILED[program]
    expected = _held(plain_twins.of(plain_twins.reference, play, calls=like))
    plain_twins.deviate(
        play,
        calls=calls,
        we_do=lambda outcomes: does_as(expected, _held(outcomes)),
        torch_does=_refuses_after_failure,
    )
