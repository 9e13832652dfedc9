"""Training with either API continues correctly after a caught exception, or raises."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import pytest

from conformance.distributed.fsdp import failure_cases
from conformance.distributed.fsdp.fsdp_cases import Setup
from conformance.distributed.fsdp.module_trees import Leaf, ModuleGroup, ModuleTree
from conformance.distributed.fsdp.twins import (
    FLAT,
    FULL,
    ORIGINALS,
    RankOutcomes,
    Twins,
    each,
    leaf_by_leaf,
    raises,
)
from conformance.judge.clauses import clause
from conformance.judge.deviations import does_as
from conformance.judge.library import Library
from conformance.judge.surface import is_torch_in

pytestmark = pytest.mark.world_sizes(fewest=2)

TREE = ModuleTree(ModuleGroup((Leaf("affine", 4), Leaf("affine", 3), Leaf("normed"), Leaf("affine", 2))))


@dataclass(frozen=True)
class Face:
    name: str
    setup: Setup = FLAT

    def trains(self, twins: Twins, library: Library, checkpointing: str = "none", **how: Any) -> RankOutcomes:
        tree = replace(TREE, body=replace(TREE.body, checkpointing=checkpointing))
        return twins.of(library, failure_cases.train, self.setup, tree=tree, face=self.name, **how)


_FACES = {"flat": Face("FSDP1"), "originals": Face("FSDP1", ORIGINALS), "fully_shard": Face("fully_shard")}
each_face = pytest.mark.parametrize("face", _FACES.values(), ids=_FACES)
_FORWARDS = ["forward", "interrupted", "pre hook", "post hook", "behind body", "root post hook", "loss"]


@clause("distributed.fsdp.failures.in_a_forward")
@each_face
def test_training_continues_after_failed_forward(twins: Twins, face: Face) -> None:
    expected = face.trains(twins, twins.reference)
    for fails in [*_FORWARDS, "gather"] if face.name == "fully_shard" else _FORWARDS:
        for library in (twins.reference, twins.subject):
            actual = face.trains(twins, library, fails=fails)
            assert does_as(expected, actual), f"behind {fails} got {actual}, expected {expected}"


@clause("distributed.fsdp.failures.in_a_backward")
@pytest.mark.deviation("fsdp.behind_a_failed_backward")
@pytest.mark.parametrize(
    ("fails", "checkpointing"),
    [
        ("inside unit", "none"),
        ("first unit", "none"),
        pytest.param("root backward", "none", marks=FULL),
        pytest.param("unit backward", "none", marks=FULL),
        ("reduction", "none"),
        ("recomputed", "plain"),
        pytest.param("recomputed", "reentrant", marks=FULL),
    ],
)
@each_face
def test_training_continues_after_failed_backward(
    twins: Twins, face: Face, fails: str, checkpointing: str
) -> None:
    _judge(twins, face, fails=fails, checkpointing=checkpointing)


@clause("distributed.fsdp.failures.in_a_backward")
@pytest.mark.deviation("fsdp.behind_a_failed_backward")
def test_training_continues_after_failed_gather_in_backward(twins: Twins) -> None:
    _judge(twins, _FACES["fully_shard"], fails="gather in backward")


@clause("distributed.fsdp.failures.earlier_gradients")
@pytest.mark.deviation("fsdp.gradients_before_a_failed_backward")
@pytest.mark.parametrize("accumulates", ["synchronised", "not"])
@pytest.mark.parametrize("fails", ["unit backward", pytest.param("first unit", marks=FULL)])
@each_face
def test_gradients_of_earlier_backwards_count(twins: Twins, face: Face, accumulates: str, fails: str) -> None:
    _judge(twins, face, fails=fails, accumulates=accumulates, clears=False)


@clause("distributed.fsdp.failures.in_a_backward")
@pytest.mark.deviation("fsdp.behind_a_failed_backward")
@each_face
def test_gradients_of_earlier_backwards_are_cleared_by_the_model(twins: Twins, face: Face) -> None:
    """The model's `zero_grad` clears gradients even if the model is still in the backward that raised."""
    _judge(twins, face, fails="inside unit", accumulates="synchronised", clears="model")


@clause("distributed.fsdp.failures.gradients_in_part")
@pytest.mark.deviation("fsdp.gradients_in_part")
@pytest.mark.parametrize("clears", [False, True])
@each_face
def test_gradients_that_have_a_part_of_a_failed_backward(twins: Twins, face: Face, clears: bool) -> None:
    how = {"fails": "first unit", "accumulates": "throughout", "clears": clears}
    if clears:
        # In torch 2.15, reset_iter_state drops the gradients of the failed backward.
        _judge(twins, face, **how, may_agree=face.name == "fully_shard" and is_torch_in(">=2.15"))
        return
    twins.judge(
        lambda library: face.trains(twins, library, **how),
        we_do=raises(RuntimeError, "a backward without synchronisation raised"),
    )


@clause("distributed.fsdp.failures.waiting_step")
@pytest.mark.deviation("fsdp.waiting_step")
@pytest.mark.parametrize("strategy", ["NO_SHARD", "fully_shard"])
def test_step_with_unsynchronised_gradients_raises(twins: Twins, strategy: str) -> None:
    step: dict[str, Any] = {"program": failure_cases.step_unsynchronised, **_of(strategy)}

    def is_named(outcomes: RankOutcomes) -> bool:
        pattern = re.compile(r"inner\.\w+ of 'body\.parts\.\d'.* wait to be synchronised")
        return raises(RuntimeError)(outcomes) and all(
            outcome.raised and pattern.search(outcome.raised.text) for outcome in outcomes
        )

    # torch steps with each rank's own gradients, or without any.
    is_moved = strategy == "NO_SHARD"
    twins.deviate(torch_does=each(lambda value: value["is moved"] == is_moved), we_do=is_named, **step)
    assert [value["is moved"] for value in twins.values(clears=True, **step)] == [False] * twins.world_size


@clause("distributed.fsdp.failures.closures")
@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "fully_shard"])
def test_closure_may_run_last_backward(twins: Twins, strategy: str, by_name: bool) -> None:
    twins.agree(failure_cases.step_by_a_closure, **_of(strategy), by_name=by_name)


@clause("distributed.fsdp.failures.waiting_step_allowed")
@pytest.mark.parametrize("strategy", ["NO_SHARD", "fully_shard"])
def test_step_with_unsynchronised_gradients_can_be_allowed(twins: Twins, strategy: str) -> None:
    values = twins.values(failure_cases.step_unsynchronised, **_of(strategy), detects=False)
    assert [value["is moved"] for value in values] == [strategy == "NO_SHARD"] * twins.world_size


def _of(strategy: str) -> dict[str, Any]:
    if strategy == "fully_shard":
        return {"face": strategy, "tree": TREE}
    return {"face": "FSDP1", "setup": leaf_by_leaf(strategy, use_orig_params=True), "tree": TREE}


def _judge(
    twins: Twins, face: Face, *, checkpointing: str = "none", may_agree: bool = False, **how: Any
) -> None:
    """Judge a training with a failure: the subject must train on as torch does without the failure."""
    without = {name: value for name, value in how.items() if name != "fails"}
    expected = face.trains(twins, twins.reference, checkpointing, **without)
    assert all(outcome.raised is None for outcome in expected), expected
    twins.judge(
        lambda library: face.trains(twins, library, checkpointing, **how),
        we_do=lambda actual: does_as(expected, actual),
        may_agree=may_agree,
    )
