"""Gradient scalers with DTensor gradients, which are checked on the ranks of their mesh."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from conformance.distributed.fsdp.scenes.scaler_layouts import scaler_with_scale
from conformance.distributed.fsdp.scenes.scaler_programs import INIT_SCALE_8, SCALER
from conformance.distributed.fsdp.scenes.scene import Scene
from conformance.distributed.fsdp.scenes.twins import Twins, values_of
from conformance.judge.clauses import clause
from conformance.judge.library import Library
from conformance.judge.outcome import observe
from conformance.ranks import RankFault
from conformance.strategies.dtensor_gradients import PlacedGradient

SKIPPED, TAKEN = (4.0, [1.0, 1.0]), (8.0, [0.0, 1.0])  # scale, elements of both parameters on one rank


def step_with_inf_on_last_rank(
    scene: Scene, *, scaler: str, first: str, alone: bool = False, is_compiled: bool = False
) -> tuple[float, list[float]]:
    """Step a replicated and a sharded parameter, whose shard on the last rank has an inf gradient.

    Args:
        first: "sharded" or "replicated" is the optimizer's first parameter.
        alone: each rank's process group has no other rank.
        is_compiled: `unscale_` is compiled.
    Returns:
        The scale after `update`, and the first local element of the replicated and of the sharded parameter.
    """
    ranks = scene.rank.world_size
    mesh = scene.rank.mesh(ranks)

    def on_mesh(values: torch.Tensor, placement: Any) -> torch.Tensor:
        return PlacedGradient(values, None, True, (placement,), (ranks,)).on(mesh)

    grad_of_shards = torch.zeros(ranks)
    grad_of_shards[-1] = math.inf
    replicated = nn.Parameter(on_mesh(torch.ones(ranks), Replicate()))
    replicated.grad = on_mesh(torch.full((ranks,), 8.0), Replicate())
    sharded = nn.Parameter(on_mesh(torch.ones(ranks), Shard(0)))
    sharded.grad = on_mesh(grad_of_shards, Shard(0))
    optimizer = torch.optim.SGD(
        [sharded, replicated] if first == "sharded" else [replicated, sharded], lr=1.0
    )
    groups = [dist.new_group([rank]) for rank in range(ranks)] if alone else []
    options = {"process_group": groups[scene.rank.rank]} if alone else {}
    its_scaler = scaler_with_scale(scene, scaler, **INIT_SCALE_8, **options)
    if is_compiled:
        torch._dynamo.reset()
        torch.compile(its_scaler.unscale_, backend="eager")(optimizer)
    else:
        its_scaler.unscale_(optimizer)
    its_scaler.step(optimizer)
    its_scaler.update()
    elements = [parameter.detach().to_local()[0].item() for parameter in (replicated, sharded)]
    return its_scaler.get_scale(), elements


@clause("distributed.fsdp.sharded_grad_scaler.step.one_decision_of_a_mesh")
@pytest.mark.parametrize(
    ("scaler", "how"),
    [
        ("amp.GradScaler", {}),
        ("amp.GradScaler", {"is_compiled": True}),
        (SCALER, {}),
        (SCALER, {"alone": True}),
    ],
)
@pytest.mark.world_sizes(fewest=2)
def test_inf_in_one_shard_skips_step_on_all_ranks(
    cpu_twins: Twins, scaler: str, how: dict[str, bool]
) -> None:
    for outcomes in cpu_twins.of_both(step_with_inf_on_last_rank, scaler=scaler, first="sharded", **how):
        assert values_of(outcomes) == [SKIPPED] * cpu_twins.world_size


@clause("distributed.fsdp.sharded_grad_scaler.step.one_decision_of_a_mesh")
@pytest.mark.deviation("grad_scaler.replicated_gradient_first")
@pytest.mark.world_sizes(fewest=2)
def test_inf_after_replicated_gradient_skips_step_on_all_ranks(cpu_twins: Twins) -> None:
    def probe(library: Library) -> Any:
        how = {"scaler": "amp.GradScaler", "first": "replicated"}
        return values_of(cpu_twins.of(library, step_with_inf_on_last_rank, **how))

    ranks = cpu_twins.world_size
    cpu_twins.judge(
        probe,
        torch_does=lambda result: result == [TAKEN] * (ranks - 1) + [SKIPPED],
        we_do=lambda result: result == [SKIPPED] * ranks,
    )


def check_without_scale_on_rank_0(scene: Scene, *, call: str) -> Any:
    """Check a sharded gradient. Rank 0 has not scaled a loss yet, so its call fails. Return the error."""
    ranks = scene.rank.world_size
    parameter = nn.Parameter(
        PlacedGradient(torch.ones(ranks), None, True, (Shard(0),), (ranks,)).on(scene.rank.mesh(ranks))
    )
    parameter.grad = parameter.detach().clone()
    its_scaler = scene.library.find(SCALER)("cpu")
    if scene.rank.rank != 0:
        its_scaler.scale(torch.ones(()))
    return observe(getattr(its_scaler, call), torch.optim.SGD([parameter])).raised


@clause("distributed.fsdp.sharded_grad_scaler.errors.reported_to_peers")
@pytest.mark.deviation("sharded_grad_scaler.failed_checks_are_told")
@pytest.mark.parametrize("call", ["unscale_", "step"])
@pytest.mark.world_sizes(fewest=2)
def test_failed_check_of_dtensors_is_reported_to_peers(cpu_twins: Twins, call: str) -> None:
    def probe(library: Library) -> Any:
        try:
            return values_of(cpu_twins.of(library, check_without_scale_on_rank_0, call=call))
        except RankFault:
            return "peers wait"

    def is_reported(result: Any) -> bool:
        own, *reported = map(str, result)
        return f"Attempted {call} but _scale is None" in own and all(
            "another rank" in text for text in reported
        )

    cpu_twins.judge(probe, torch_does=lambda result: result == "peers wait", we_do=is_reported)
