"""fully_shard of models in which tensor parallelism has made some parameters DTensors."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from conformance.distributed.fsdp.scenes.fully_shard_training import FULLY_SHARD
from conformance.distributed.fsdp.scenes.parallel_training import (
    DEEP,
    Parallel,
    ParallelTraining,
    assert_agree,
    assert_like_unsharded,
    laid_out,
    mesh_of,
    plain_model,
    train,
    train_unsharded,
)
from conformance.distributed.fsdp.scenes.twins import (
    FULL,
    TwinsOf,
)
from conformance.judge.clauses import clause
from conformance.judge.library import Library
from conformance.ranks import Rank

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


def train_sharded(rank: Rank, library: Library, parallel: Parallel) -> dict[str, Any]:
    """Train with fully_shard. Also return the gradients before the first step, and clipped gradients."""
    training = ParallelTraining(rank, library, parallel)
    training.backward(0)
    clipped = [p for p in training.model.parameters() if len(p.placements) == len(parallel.sizes)]
    gradients = {name: laid_out(p.grad) for name, p in training.model.named_parameters()}
    norm = library.find("nn.utils.clip_grad_norm_")(clipped, 0.5)
    after = [laid_out(p.grad) for p in clipped]
    training.optimizer.zero_grad()
    return {"gradients": gradients, "norm": laid_out(norm), "clipped": after} | train(rank, library, parallel)


@clause("distributed.fsdp.fully_shard.tensor_parallel")
@pytest.mark.parametrize("parallel", _FULLY, ids=str)
def test_fully_shard_trains(twins_of: TwinsOf, parallel: Parallel) -> None:
    got = assert_agree(twins_of, train_sharded, parallel)
    assert_like_unsharded(got, train_unsharded(parallel))


def accumulate_sharded(rank: Rank, library: Library, parallel: Parallel) -> dict[str, Any]:
    training = ParallelTraining(rank, library, parallel)
    training.model.set_requires_gradient_sync(False)
    training.backward(0)
    training.model.set_requires_gradient_sync(True)
    training.step(1)
    return {"parameters": training.parameters()}


def load_sharded(rank: Rank, library: Library, parallel: Parallel) -> dict[str, Any]:
    """Save a model and its optimizer with DCP's own functions, and load them into another model."""
    trained, other = (ParallelTraining(rank, library, parallel, seed) for seed in (0, 1))
    for training in (trained, other):
        training.step(0)
    model, optimizer = get_state_dict(trained.model, trained.optimizer)
    set_state_dict(other.model, other.optimizer, model_state_dict=model, optim_state_dict=optimizer)
    saved = {name: laid_out(value) for name, value in model.items()}
    other.step(1)
    return {"saved": saved, "parameters": other.parameters()}


@clause("distributed.fsdp.fully_shard.tensor_parallel")
@pytest.mark.parametrize("asks", [pytest.param(accumulate_sharded, marks=FULL), load_sharded])
def test_fully_shard_accumulates_and_loads(twins_of: TwinsOf, asks: Any) -> None:
    assert_agree(twins_of, asks, _FULLY[0])


def on_another_mesh(rank: Rank, library: Library, parallel: Parallel) -> None:
    """Shard a model over a mesh that is unrelated to the mesh of its DTensor parameters."""
    model = plain_model()
    parallelize_module(model[0], mesh_of(rank, parallel.sizes)["model"], {"up": ColwiseParallel()})
    other = rank.mesh(rank.world_size, names=("elsewhere",))
    library.find(FULLY_SHARD)(model, mesh=other)


@clause("distributed.fsdp.fully_shard.tensor_parallel")
@FULL
def test_fully_shard_refuses_meshes_that_do_not_belong_together(twins_of: TwinsOf) -> None:
    assert_agree(twins_of, on_another_mesh, _FULLY[0], all_raise=True)
