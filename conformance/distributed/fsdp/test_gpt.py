"""The gate's GPT on two ranks with half of each batch has the loss curve of one process with the full batch."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn

from conformance.distributed.fsdp.scenes.optimizer_states import create_states
from conformance.distributed.fsdp.scenes.scene import Scene
from conformance.distributed.fsdp.scenes.twins import FULL_PROFILE, TwinsOf
from conformance.judge.clauses import clause
from conformance.training.config import small_config
from conformance.training.corpus import load_corpus, windows
from conformance.training.gpt import BYTES, GPT, GPTBlock

STEPS, DEADLINE_S = 24, 120
# Two terms have the same sum in either order. Only the loss's mean over the ranks is rounded differently.
SAME_CURVE = 1e-5
CONFIG = small_config("bf16")
PARTS = 2  # parts of a batch in the unsharded run
WINDOWS = PARTS * CONFIG.batch  # windows in a batch, for any number of ranks


def train_sharded(
    scene: Scene, *, use_orig_params: bool, steps: int, strategy: str = "FULL_SHARD", folder: str = ""
) -> list[float]:
    """Train the first steps, and write a checkpoint if there is a folder.

    Return the loss over the whole batch before each step, in bits per byte.
    """
    optimizer = _shard(scene, use_orig_params, strategy)
    curve = _train(optimizer, _backward_of_ranks(scene), range(steps))
    if folder:
        dcp.save(_state(scene, optimizer), checkpoint_id=folder)
    return curve


def _shard(scene: Scene, use_orig_params: bool, strategy: str = "FULL_SHARD") -> torch.optim.Optimizer:
    scene.model = scene.wrap(_model(), strategy=strategy, units=[GPTBlock], use_orig_params=use_orig_params)
    return _optimizer(scene.model)


def _backward_of_ranks(scene: Scene) -> Callable[[int], float]:
    def backward(step: int) -> float:
        loss = _loss(scene.model, _part(step, scene.rank.rank, scene.rank.world_size))
        loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return float(mean) / scene.rank.world_size

    return backward


@functools.cache
def train_unsharded(steps: int) -> list[float]:
    model = _model()

    def backward(step: int) -> float:
        losses = [_loss(model, _part(step, part, PARTS)) / PARTS for part in range(PARTS)]
        for loss in losses:
            loss.backward()
        return sum(float(loss.detach()) for loss in losses)

    return _train(_optimizer(model), backward, range(steps))


def _model() -> GPT:
    torch.manual_seed(CONFIG.seed)
    return GPT(CONFIG.shape)


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=CONFIG.weight_decay)


def _train(optimizer: torch.optim.Optimizer, backward: Callable[[int], float], steps: range) -> list[float]:
    losses: list[float] = []
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = CONFIG.learning_rate_at(step)
        losses.append(backward(step) / math.log(2))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _part(step: int, part: int, parts: int) -> Tensor:
    numel = WINDOWS // parts
    first = step * WINDOWS + part * numel
    drawn = range(first, first + numel)
    return windows(load_corpus().train, CONFIG.shape.context + 1, f"train {CONFIG.seed}", drawn)


def _loss(model: nn.Module, window_BT: Tensor) -> Tensor:
    logits = model(window_BT[:, :-1])
    return F.cross_entropy(logits.reshape(-1, BYTES), window_BT[:, 1:].flatten())


@clause("distributed.fsdp.fully_sharded_data_parallel.trains")
@pytest.mark.parametrize(
    ("strategy", "use_orig_params"),
    [
        ("FULL_SHARD", False),
        pytest.param("FULL_SHARD", True, marks=FULL_PROFILE),
        pytest.param("SHARD_GRAD_OP", True, marks=FULL_PROFILE),
        pytest.param("NO_SHARD", False, marks=FULL_PROFILE),
    ],
)
def test_gpt_learns_as_in_one_process(twins_of: TwinsOf, strategy: str, use_orig_params: bool) -> None:
    expected = train_unsharded(STEPS)
    assert expected[-1] < expected[0] - 1, "the model learns, or its curve would tell nothing"
    arguments = {"strategy": strategy, "use_orig_params": use_orig_params, "deadline_s": DEADLINE_S}
    for curve in twins_of(PARTS).values(train_sharded, steps=STEPS, **arguments):
        assert_same_curve(expected, curve)


def go_on(scene: Scene, *, use_orig_params: bool, steps: tuple[int, int], folder: str) -> list[float]:
    """Load the checkpoint on any number of ranks and train the next steps. Return the losses."""
    optimizer = _shard(scene, use_orig_params)
    create_states(optimizer)
    state = _state(scene, optimizer)
    dcp.load(state, checkpoint_id=folder)
    with _by_rows(scene):
        scene.model.load_state_dict(state["model"])
        moments = scene.fsdp.optim_state_dict_to_load(scene.model, optimizer, state["optimizer"])
    optimizer.load_state_dict(moments)
    return _train(optimizer, _backward_of_ranks(scene), range(*steps))


def _by_rows(scene: Scene) -> contextlib.AbstractContextManager[None]:
    return scene.fsdp.state_dict_type(scene.model, scene.api.StateDictType.SHARDED_STATE_DICT)


def _state(scene: Scene, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    with _by_rows(scene):
        optimizer_state = scene.fsdp.optim_state_dict(scene.model, optimizer)
        return {"model": scene.model.state_dict(), "optimizer": optimizer_state}


@clause("distributed.fsdp.fsdp_distributed_checkpoint.resumes")
@pytest.mark.parametrize(
    ("worlds", "use_orig_params"),
    [
        ((2, 4), True),
        pytest.param((4, 1), False, marks=FULL_PROFILE),
        pytest.param((1, 2), True, marks=FULL_PROFILE),
    ],
)
def test_gpt_goes_on_with_another_number_of_ranks(
    twins_of: TwinsOf, tmp_path: Path, worlds: tuple[int, int], use_orig_params: bool
) -> None:
    before, after = map(twins_of, worlds)
    arguments: dict[str, Any] = {"folder": str(tmp_path), "use_orig_params": use_orig_params}
    arguments["deadline_s"] = DEADLINE_S
    expected = train_unsharded(STEPS)
    first, *_ = before.values(train_sharded, steps=STEPS // 2, **arguments)
    for then in after.values(go_on, steps=(STEPS // 2, STEPS), **arguments):
        assert_same_curve(expected, [*first, *then])


def assert_same_curve(expected: list[float], actual: list[float]) -> None:
    assert len(expected) == len(actual)
    apart = [
        step for step in range(STEPS) if not math.isclose(actual[step], expected[step], rel_tol=SAME_CURVE)
    ]
    assert not apart, f"steps {apart}: got {actual}, expected {expected}"
