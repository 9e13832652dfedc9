"""`nonfinite_parameters` with several ranks: the same parameters, ranks and numbers of elements on every rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD

from conformance.distributed.fsdp.scenes.scaler_layouts import named_params, scaler_with_scale
from conformance.distributed.fsdp.scenes.scaler_programs import EACH_SCALER, SCALER
from conformance.distributed.fsdp.scenes.scene import Scene, tried
from conformance.distributed.fsdp.scenes.twins import Twins, TwinsOf
from conformance.judge.clauses import clause

Entry = tuple[str, int, int]  # name, rank, number of elements


def by_parameter(reports: Sequence[tuple[list[tuple[int, Entry]], Any]]) -> list[Entry]:
    """Return the expected entries of all ranks, by parameter and rank."""
    numbered = [(number, entry) for own, _ in reports for number, entry in own]
    return [entry for _, entry in sorted(numbered, key=lambda pair: (pair[0], pair[1][1]))]


LAYOUTS = (
    "flat", "original", "hybrid", "flat parallel", "original parallel", "dtensor", "hybrid dtensor", "meshes",
    "disjoint meshes",
)  # fmt: skip


def entries(
    scene: Scene, *, scaler: str, layout: str, bad_ranks: tuple[int, ...], how: str, has_group: bool = False
) -> Any:
    """Check gradients of which some ranks spoil elements.

    Args:
        layout: one of `LAYOUTS`, or "plain".
        bad_ranks: ranks that spoil all gradients, or on other layouts than disjoint meshes all but the second. Higher
            ranks spoil more elements.
        how: the method that checks the gradients.
        has_group: whether the scaler gets a group that has a backend only for the device.

    Returns:
        This rank's expected entries with the number of the parameter, and the result of `nonfinite_parameters`.
    """
    named = named_params(scene, layout)
    optimizer = SGD(named, lr=0.125)
    more = {"process_group": scene.rank.group_of_device()} if has_group else {}
    its_scaler = scaler_with_scale(scene, scaler, init_scale=2.0, **more)
    own: list[tuple[int, Entry]] = []
    for number, (name, param) in enumerate(named):
        param.grad = torch.ones_like(param)
        local = _local(param.grad)
        if (number != 1 or layout == "disjoint meshes") and scene.rank.rank in bad_ranks:
            spoilt = min(local.numel(), 1 + number + scene.rank.rank)
            local.view(-1)[:spoilt] = math.nan if number % 2 else math.inf
            own += [(number, (name, scene.rank.rank, spoilt))] if spoilt else []
    getattr(its_scaler, how)(optimizer)
    return own, tried(lambda: [tuple(entry) for entry in its_scaler.nonfinite_parameters(optimizer)])


def _local(tensor: Any) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


@clause("distributed.fsdp.sharded_grad_scaler.nonfinite_parameters.every_rank")
@EACH_SCALER
@pytest.mark.parametrize(
    ("layout", "how"),
    [*((layout, "unscale_") for layout in LAYOUTS), ("dtensor", "step"), ("meshes", "fused_step")],
)
def test_every_rank_names_parameters_of_all_ranks(
    twins_of: TwinsOf, device: str, layout: str, scaler: str, how: str
) -> None:
    for bad_ranks in ((), (2,), (0, 1, 3)):
        reports = twins_of(4, device).values(
            entries, scaler=scaler, layout=layout, bad_ranks=bad_ranks, how=how
        )
        expected = by_parameter(reports)
        assert bool(expected) is bool(bad_ranks)
        assert [nonfinite for _, nonfinite in reports] == [expected] * 4, f"inf on ranks {bad_ranks}"


@clause("distributed.fsdp.sharded_grad_scaler.nonfinite_parameters.every_rank")
@pytest.mark.world_sizes(fewest=2)
def test_plain_parameters_are_named_for_all_ranks_of_sharded_scaler(twins: Twins) -> None:
    """A plain GradScaler, which knows no other ranks, names those of its own rank."""
    for scaler, more in ((SCALER, {}), (SCALER, {"has_group": True}), ("amp.GradScaler", {})):
        reports = twins.values(entries, scaler=scaler, layout="plain", bad_ranks=(1,), how="unscale_", **more)
        for report in reports:
            assert report[1] == by_parameter(reports if scaler == SCALER else [report])


def after_clearing(scene: Scene, *, scaler: str) -> Any:
    """Return the result of `nonfinite_parameters` after rank 0, which found inf, has cleared its gradients."""
    named = named_params(scene, "dtensor")
    optimizer, its_scaler = SGD(named, lr=0.125), scaler_with_scale(scene, scaler)
    for _, param in named:
        param.grad = torch.ones_like(param)
        _local(param.grad)[:1].fill_(math.inf if scene.rank.rank == 0 else 1.0)
    its_scaler.unscale_(optimizer)
    if scene.rank.rank == 0:
        optimizer.zero_grad()
    return tried(lambda: its_scaler.nonfinite_parameters(optimizer))


@clause("distributed.fsdp.sharded_grad_scaler.nonfinite_parameters.error_on_every_rank")
@EACH_SCALER
@pytest.mark.world_sizes(fewest=2)
def test_cleared_gradients_raise_on_every_rank(twins: Twins, scaler: str) -> None:
    reports = twins.values(after_clearing, scaler=scaler)
    assert all("RuntimeError" in report and "cleared" in report for report in reports), reports


def one_fails(scene: Scene, *, scaler: str) -> Any:
    """Return the result of `nonfinite_parameters` if rank 0 has written a gradient into a master and its copy."""
    device = scene.rank.device
    master, copy = nn.Parameter(torch.ones(3, device=device)), torch.ones(3, device=device).bfloat16()
    copy.requires_grad_()
    optimizer, its_scaler = SGD([master], lr=0.125), scene.library.find(scaler)(device.type)
    its_scaler.scale(copy.sum()).backward()
    its_scaler.fused_step(optimizer, low_precision_params=[copy])
    if scene.rank.rank == 0:
        master.grad = torch.ones_like(master)
    return tried(lambda: its_scaler.nonfinite_parameters(optimizer))


@clause("distributed.fsdp.sharded_grad_scaler.nonfinite_parameters.error_on_every_rank")
@pytest.mark.world_sizes(fewest=2)
def test_failure_on_one_rank_is_reported_to_peers(twins: Twins) -> None:
    own, *others = twins.values(one_fails, scaler=SCALER)
    assert own.startswith("ValueError: a parameter and its low-precision copy both have a gradient")
    assert all(other.startswith("RuntimeError: rank 0 cannot name its gradients") for other in others), others
