"""A captured optimizer beside what else touches optimizers: sharded parameters, scalers, the compiler."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import impl.amp
from conformance.ranks import Rank, RankPool
from impl.distributed.fsdp import FullyShardedDataParallel, ShardedGradScaler
from impl.optim import capture, explain
from impl.optim.tests import captured_twins as on
from impl.optim.tests.captured_twins import CapturedTwins, Side, snapshot

pytestmark = pytest.mark.deadline(120)


def train_both(rank: Rank, *, use_orig_params: bool, options: dict[str, Any]) -> list[Any]:
    """Return whether both trainings are equal, and the explanation of the captured one."""
    plain, captured = (_train(rank, use_orig_params, options, is_captured) for is_captured in (False, True))
    return [plain["trained"] == captured["trained"], captured["how"]]


def _train(rank: Rank, use_orig_params: bool, options: dict[str, Any], is_captured: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    inner = FullyShardedDataParallel(nn.Linear(6, 5), use_orig_params=use_orig_params)
    model = FullyShardedDataParallel(
        nn.Sequential(nn.Linear(4, 6), inner, nn.Linear(5, 1)), use_orig_params=use_orig_params
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **options)
    scaler = ShardedGradScaler("cpu", init_scale=4.0)
    if is_captured:
        capture(optimizer)
    snapshots = []
    for step in range(6):
        optimizer.zero_grad()
        inputs = torch.full((3, 4), float(rank.rank + step))
        if step == 4:
            inputs[0, 0] = torch.inf
        scaler.scale(model(inputs).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        snapshots.append(
            snapshot([list(model.parameters()), list(optimizer.state.values()), scaler.get_scale()])
        )
    optim_state = FullyShardedDataParallel.optim_state_dict(model, optimizer)
    return {"trained": repr([snapshots, snapshot(optim_state)]), "how": str(explain(optimizer))}


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("implementation", ["fused", "foreach"])
def test_sharded_parameters(
    ranks: Callable[..., RankPool], world_size: int, use_orig_params: bool, implementation: str
) -> None:
    """Flat and original parameters. Their memory is freed and allocated again around each step."""
    reported = ranks(world_size).run(
        train_both,
        use_orig_params=use_orig_params,
        options={implementation: True},
    )
    how = f"captured, {implementation}: 1 build of lists, the last one because it is the first step"
    assert reported == [[True, how]] * world_size


@pytest.mark.parametrize("make", [impl.amp.GradScaler, torch.amp.GradScaler])
@pytest.mark.parametrize("kind", ["AdamW fused", "SGD fused momentum", "AdamW", "RMSprop foreach"])
@pytest.mark.parametrize("unscale", [False, True])
def test_scaled_steps_match_plain_steps(make: Callable[..., Any], kind: str, unscale: bool) -> None:
    def train(side: Side) -> list[Any]:
        scaler = make("cpu", init_scale=8.0, growth_interval=2)
        snapshots = []
        for number, last in enumerate([1.0, 1.0, math.inf, 1.0, 1.0, 1.0]):
            side.optimizer.zero_grad()
            scaler.scale(torch.ones(()))
            on.give_gradients(side, number)
            side.params[-1].grad = side.params[-1].detach() * last
            if unscale:
                scaler.unscale_(side.optimizer)
            scaler.step(side.optimizer)
            scaler.update()
            snapshots.append([scaler.get_scale(), side.seen()])
        return snapshots

    twins = CapturedTwins(kind)
    outcome = twins.do(train)
    assert outcome.raised is None
    assert explain(twins.captured.optimizer).captured


@pytest.mark.parametrize("kind", ["AdamW fused", "AdamW", "SGD foreach"])
def test_compiled_step_matches_plain_step(kind: str) -> None:
    """The compiler keeps lists of its own: it sees the plain optimizer, before and after captured steps."""

    def compiled(side: Side) -> None:
        torch.compiler.reset()
        step = torch.compile(side.optimizer.step, backend="eager")
        for seed in range(2):
            on.give_gradients(side, seed)
            step()

    twins = CapturedTwins(kind)
    for event in (compiled, on.iteration, on.iteration, compiled):
        for side in (twins.plain, twins.captured):
            event(side)
        assert twins.plain.seen() == twins.captured.seen()
        reported = explain(twins.captured.optimizer)
        traced = event is compiled and "fused" not in kind  # Dynamo runs fused updates eagerly
        assert (reported.compiled, reported.captured) == (traced, not traced)
        assert str(reported).startswith("compiled, " if traced else "captured, ")
    torch.compiler.reset()


def test_profile_names_captured_and_fused_steps() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer, scaler = capture(torch.optim.AdamW([weight], fused=True)), impl.amp.GradScaler("cpu")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        weight.grad = torch.ones(2)
        optimizer.step()
        scaler.scale(torch.ones(()))
        scaler.fused_step(optimizer)
    names = [event.name for event in profiled.events()]
    assert names.count("impl.optim.capture (AdamW)") == 1
    assert names.count("GradScaler.fused_step (AdamW)") == 1
