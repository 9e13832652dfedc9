"""A small model whose leaves impl's FullyShardedDataParallel wraps, on one rank of a fake group."""

from __future__ import annotations

from typing import Any

import torch

from conformance.distributed.fsdp.scenes.fsdp_training import Setup, wrapped
from conformance.distributed.fsdp.scenes.module_trees import Leaf, ModuleGroup, ModuleTree, call, loss_of
from conformance.judge.library import Library
from conformance.ranks import Rank

TREE = ModuleTree(ModuleGroup((Leaf("affine", 4), Leaf("tied"), Leaf("lookup", 3))), dtype=torch.float32)


def model_of(**setup: Any) -> Any:
    rank = Rank(2, 4, torch.device("cpu"))
    return wrapped(rank, Library("impl"), TREE.build(), Setup(wrap="leaves", **setup))


def loss_of_batch(model: Any) -> torch.Tensor:
    return loss_of(call(model, TREE, TREE.batch(0, 0)))
