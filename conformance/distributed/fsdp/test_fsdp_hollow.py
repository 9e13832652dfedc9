"""Roots and units that hold nothing, only buffers, or only frozen parameters."""

from __future__ import annotations

import pytest

from conformance.distributed.fsdp.scenes.fsdp_training import Step, Training
from conformance.distributed.fsdp.scenes.module_trees import Leaf, ModuleGroup, ModuleTree
from conformance.distributed.fsdp.scenes.twins import FULL, Twins, Wrapping, each_wrapping, leaf_by_leaf
from conformance.judge.clauses import clause

STRATEGIES = [
    "FULL_SHARD",
    *(pytest.param(strategy, marks=FULL) for strategy in ("SHARD_GRAD_OP", "NO_SHARD")),
]
TRAINED, FROZEN = Leaf("affine", 4), Leaf("affine", 3, frozen="all")
# Trained units are around and after the hollow ones. Wrapped leaf by leaf, the outermost unit holds only the head.
TREES = {
    "root holds nothing": ModuleTree(ModuleGroup((TRAINED, Leaf("tied"))), head="none"),
    "root holds a buffer": ModuleTree(ModuleGroup((TRAINED, Leaf("batched"), Leaf("counted"))), head="none"),
    "root is frozen": ModuleTree(ModuleGroup((TRAINED, Leaf("tied"))), head="frozen"),
    "units hold nothing": ModuleTree(
        ModuleGroup((Leaf("bare"), TRAINED, Leaf("bare"), Leaf("tied"), Leaf("bare")))
    ),
    "units hold buffers": ModuleTree(ModuleGroup((Leaf("counted"), TRAINED, Leaf("counted")))),
    "first unit is frozen": ModuleTree(ModuleGroup((FROZEN, TRAINED))),
    "units between are frozen": ModuleTree(ModuleGroup((TRAINED, FROZEN, Leaf("bare"), FROZEN, TRAINED))),
    "one of two ways is frozen": ModuleTree(ModuleGroup((FROZEN, TRAINED), kind="branches", calls=2)),
    "one unit is trained": ModuleTree(ModuleGroup((FROZEN, Leaf("counted"), TRAINED, FROZEN)), head="frozen"),
    "a hollow root of hollow units": ModuleTree(
        ModuleGroup((Leaf("bare"), TRAINED, Leaf("counted"))), head="none"
    ),
}
STEPS = (Step(), Step(before="eval"), Step(forwards=2, order="no_sync"), Step(forwards=2, order="together"))


@clause("distributed.fsdp.fully_sharded_data_parallel.hollow")
@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
@each_wrapping
@pytest.mark.world_sizes(fewest=2)
def test_hollow_models_train_like_torch(twins: Twins, wrapping: Wrapping, tree: ModuleTree) -> None:
    twins.train(Training(tree, leaf_by_leaf(**wrapping), STEPS))
