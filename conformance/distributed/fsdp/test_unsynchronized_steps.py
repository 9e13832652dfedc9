"""Optimizer steps with gradients that no backward has synchronised raise, unless the user allows them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from conformance.distributed.fsdp.scenes.fsdp_training import accumulating
from conformance.distributed.fsdp.scenes.fully_shard_training import full_parameters
from conformance.distributed.fsdp.scenes.module_trees import Leaf, ModuleGroup, ModuleTree
from conformance.distributed.fsdp.scenes.scene import Scene
from conformance.distributed.fsdp.scenes.twins import RankOutcomes, Twins, each, leaf_by_leaf, raises
from conformance.judge.clauses import clause

pytestmark = pytest.mark.world_sizes(fewest=2)

TREE = ModuleTree(ModuleGroup((Leaf("affine", 4), Leaf("affine", 3), Leaf("normed"), Leaf("affine", 2))))


def _optimizer(scene: Scene) -> torch.optim.Optimizer:
    """Return an optimizer of the model, which is sharded leaf by leaf if it is not wrapped."""
    if not scene.setup:
        scene.leaf_by_leaf()
    return torch.optim.SGD(scene.model.parameters(), 0.125)


def _parameters(scene: Scene) -> dict[str, torch.Tensor]:
    return scene.whole_parameters() if scene.setup else full_parameters(scene.model)


def _backward(scene: Scene, number: int, order: str = "") -> torch.Tensor:
    with accumulating(scene.model, order):
        return scene.backward(number)


def step_unsynchronised(scene: Scene, *, clears: bool = False, detects: bool = True) -> bool:
    """Step after a backward without synchronisation. Return whether a parameter changed."""
    optimizer = _optimizer(scene)
    if not detects:
        scene.api.set_detect_unsynchronized_step(False)
    before = _parameters(scene)
    try:
        _backward(scene, 0, "no_sync")
        if not scene.setup:
            scene.model.set_requires_gradient_sync(True)
        if clears:
            optimizer.zero_grad()
            if not scene.setup:
                scene.model.reset_iter_state()  # the optimizer cannot clear unsynchronised gradients
        optimizer.step()
    finally:
        if not detects:
            scene.api.set_detect_unsynchronized_step(True)
    after = _parameters(scene)
    optimizer.zero_grad()
    return any(not torch.equal(after[name], parameter) for name, parameter in before.items())


def _of(strategy: str) -> dict[str, Any]:
    setup = None if strategy == "fully_shard" else leaf_by_leaf(strategy, use_orig_params=True)
    return {"setup": setup, "tree": TREE}


@clause("distributed.fsdp.failures.waiting_step")
@pytest.mark.deviation("fsdp.waiting_step")
@pytest.mark.parametrize("strategy", ["NO_SHARD", "fully_shard"])
def test_step_with_unsynchronised_gradients_raises(plain_twins: Twins, strategy: str) -> None:
    def is_named(outcomes: RankOutcomes) -> bool:
        pattern = re.compile(r"inner\.\w+ of 'body\.parts\.\d'.* wait to be synchronised")
        return raises(RuntimeError)(outcomes) and all(
            outcome.raised and pattern.search(outcome.raised.text) for outcome in outcomes
        )

    # torch steps with each rank's own gradients, or without any.
    changes = each(lambda is_changed: is_changed == (strategy == "NO_SHARD"))
    plain_twins.deviate(step_unsynchronised, torch_does=changes, we_do=is_named, **_of(strategy))
    values = plain_twins.values(step_unsynchronised, clears=True, **_of(strategy))
    assert values == [False] * plain_twins.world_size


@clause("distributed.fsdp.failures.waiting_step_allowed")
@pytest.mark.parametrize("strategy", ["NO_SHARD", "fully_shard"])
def test_step_with_unsynchronised_gradients_can_be_allowed(plain_twins: Twins, strategy: str) -> None:
    values = plain_twins.values(step_unsynchronised, detects=False, **_of(strategy))
    assert values == [strategy == "NO_SHARD"] * plain_twins.world_size


def step_by_a_closure(scene: Scene, *, by_name: bool) -> dict[str, torch.Tensor]:
    """Step with a closure that runs the last backward. The earlier backwards run without synchronisation."""
    optimizer = _optimizer(scene)
    for number in (0, 2):
        _backward(scene, number, "no_sync")

        def last(number: int = number + 1) -> torch.Tensor:
            return _backward(scene, number)

        optimizer.step(**{"closure": last}) if by_name else optimizer.step(last)
        optimizer.zero_grad()
    return _parameters(scene)


@clause("distributed.fsdp.failures.closures")
@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "fully_shard"])
def test_closure_may_run_last_backward(plain_twins: Twins, strategy: str, by_name: bool) -> None:
    plain_twins.agree(step_by_a_closure, **_of(strategy), by_name=by_name)
