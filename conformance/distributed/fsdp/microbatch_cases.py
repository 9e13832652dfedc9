"""Cases of `microbatch` with sharded models: accumulation in which ranks spoil or skip their batches."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed import fsdp
from torch.optim import SGD

from conformance.distributed.fsdp.fsdp_cases import clean, gathered_parameters
from conformance.distributed.fsdp.lab import Lab, tried
from conformance.judge.sandbox import seeding

LAYOUTS = ("fully_shard", "kept", "hybrid", "original", "flat", "no_shard", "replicated")
LEARNING_RATE = 0.125
SCALE = 64.0
# For each microbatch what each rank does: nothing (None), spoil its batch or skip it.
BAD, SKIP = "bad", "skip"
Plan = Sequence[Sequence[str | None]]


def build_model() -> nn.Sequential:
    seeding.seed_all()
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 1))


def batch(step: int, microbatch: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 5, generator=seeding.generator(100 * step + 10 * microbatch + rank))


def accumulate(
    lab: Lab,
    *,
    layout: str,
    unsynced: Sequence[int],
    how: str,
    plans: Sequence[Plan],
    scaler: str,
    growth_interval: int = 100,
) -> Any:
    """Train for one step for each plan.

    Args:
        lab: the rank.
        layout: one of `LAYOUTS`.
        unsynced: microbatches that run in `no_sync`.
        how: the method that steps.
        plans: outcomes of the microbatches.
        scaler: name of the scaler.
        growth_interval: that of the scaler.

    Returns:
        The full parameters and, for each step, whether it was taken, the scale, and the skipped microbatches.
    """
    device, rank = lab.rank.device, lab.rank.rank
    sharded = _sharded(lab, layout)
    optimizer = SGD(sharded.named_parameters(), lr=LEARNING_RATE)
    its_scaler = lab.library.find(scaler)(device.type, init_scale=SCALE, growth_interval=growth_interval)
    steps: list[Any] = []
    for step, plan in enumerate(plans):
        optimizer.zero_grad()
        for number, outcomes in enumerate(plan):
            inputs = batch(step, number, rank).to(device)
            context = sharded.no_sync() if number in unsynced else contextlib.nullcontext()
            with context, its_scaler.microbatch(optimizer) as microbatch:
                if outcomes[rank] == SKIP:
                    microbatch.skip()
                loss = sharded(inputs if outcomes[rank] is None else inputs * math.nan).square().mean()
                its_scaler.scale(loss / len(plan)).backward()
        if how == "fused_step":
            its_scaler.fused_step(optimizer, update=False)
        else:
            its_scaler.step(optimizer)
        its_scaler.update()
        skipped = [tuple(entry) for entry in its_scaler.skipped_microbatches(optimizer)]
        steps.append((its_scaler.step_was_taken(optimizer), its_scaler.get_scale(), skipped))
    return _parameters(lab, layout, sharded), steps


def failing(lab: Lab, *, layout: str, unsynced: Sequence[int], amid: bool) -> Any:
    """Return the full parameters after a step whose second microbatch has raised.

    Args:
        lab: the rank.
        layout: one of `LAYOUTS`.
        unsynced: microbatches that run in `no_sync`.
        amid: raise before the last unit's backward, the second of the microbatch, instead of after one.
    """
    device, rank = lab.rank.device, lab.rank.rank
    sharded = _sharded(lab, layout)
    optimizer = SGD(sharded.named_parameters(), lr=LEARNING_RATE)
    its_scaler = lab.library.find("distributed.fsdp.ShardedGradScaler")(device.type, init_scale=SCALE)

    def run(number: int) -> None:
        context = sharded.no_sync() if number in unsynced else contextlib.nullcontext()
        with context, its_scaler.microbatch(optimizer):
            is_amid = amid and number == 1
            if is_amid:
                its_scaler.scale(sharded(batch(1, 0, rank).to(device)).sum()).backward()
            handle = sharded[0].register_forward_hook(_raise_in_backward) if is_amid else None
            loss = sharded(batch(0, number, rank).to(device)).square().mean() / 3
            if handle is not None:
                handle.remove()
            its_scaler.scale(loss).backward()
            if number == 1:
                raise KeyError("after the backward")

    for number in range(4):
        tried(lambda number=number: run(number))
    its_scaler.step(optimizer)
    return _parameters(lab, layout, sharded)


def limited(lab: Lab, *, limit: int) -> Any:
    """Return after how many steps, which rank 1 spoils, the scaler with the limit raises, and the text."""
    device, rank = lab.rank.device, lab.rank.rank
    sharded = _sharded(lab, "fully_shard")
    optimizer = SGD(sharded.named_parameters(), lr=LEARNING_RATE)
    its_scaler = lab.library.find("distributed.fsdp.ShardedGradScaler")(device.type, max_skipped_steps=limit)
    for number in range(limit + 2):
        optimizer.zero_grad()
        inputs = batch(number, 0, rank).to(device) * (math.nan if rank == 1 else 1.0)
        its_scaler.scale(sharded(inputs).sum()).backward()
        its_scaler.step(optimizer)
        error = tried(its_scaler.update)
        if error is not None:
            return number + 1, error
        if device.type != "cpu":
            torch.accelerator.synchronize()
    return None


def _raise_in_backward(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
    del module, inputs

    def fail(grad: torch.Tensor) -> None:
        raise KeyError("amid the backward")

    output.register_hook(fail)


def unsynchronised_replicas(lab: Lab, *, is_inside: bool) -> Any:
    """Return the error of a microbatch in `no_sync` of DistributedDataParallel, or around it, and the gradients left.

    Args:
        lab: the rank.
        is_inside: whether `no_sync` is inside of the region.
    """
    device = lab.rank.device
    replicated = _sharded(lab, "replicated")
    optimizer = SGD(replicated.parameters(), lr=LEARNING_RATE)
    its_scaler = lab.library.find("distributed.fsdp.ShardedGradScaler")(device.type, init_scale=1.0)

    def run(synchronises: bool) -> None:
        contexts = [lambda: its_scaler.microbatch(optimizer)]
        if not synchronises:
            contexts.insert(int(is_inside), replicated.no_sync)
        with contextlib.ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context())
            its_scaler.scale(replicated(batch(0, 0, 0).to(device)).sum()).backward()

    run(True)
    before = [param.grad.clone() for param in replicated.parameters()]
    error = tried(lambda: run(False))
    after = [param.grad for param in replicated.parameters()]
    return error, all(map(torch.equal, before, after))


def sharded_by_torch(lab: Lab, *, api: str) -> Any:
    """Return the error of a microbatch of a model that torch has sharded by `api`."""
    device = lab.rank.device
    sharded: nn.Module
    if api == "fully_shard":
        sharded = fsdp.fully_shard(build_model().to(device), mesh=lab.rank.mesh(lab.rank.world_size))
    else:
        sharded = fsdp.FullyShardedDataParallel(build_model().to(device), device_id=device)
    optimizer = SGD(sharded.parameters(), lr=LEARNING_RATE)
    its_scaler = lab.library.find("distributed.fsdp.ShardedGradScaler")(device.type)
    return tried(its_scaler.microbatch(optimizer).__enter__)


def skipped_alone(lab: Lab) -> Any:
    """Return the error of `skip()` of a GradScaler with DistributedDataParallel."""
    replicated = _sharded(lab, "replicated")
    optimizer = SGD(replicated.parameters(), lr=LEARNING_RATE)
    with lab.library.find("amp.GradScaler")(lab.rank.device.type).microbatch(optimizer) as microbatch:
        return tried(microbatch.skip)


def refused(lab: Lab, *, setting: str) -> Any:
    """Return the error of a microbatch that runs with a setting that it does not support."""
    device = lab.rank.device
    sharded = _sharded(lab, "hybrid" if setting == "set_requires_all_reduce" else "fully_shard")
    params = [*sharded.parameters()]
    optimizer = SGD(params[:1] if setting == "parameters" else params, lr=LEARNING_RATE)
    its_scaler = lab.library.find("amp.GradScaler")(device.type)

    def run() -> None:
        with its_scaler.microbatch(optimizer):
            its_scaler.scale(sharded(batch(0, 0, lab.rank.rank).to(device)).sum()).backward()

    if setting == "set_requires_all_reduce":
        sharded.set_requires_all_reduce(False)
    elif setting == "set_manual_backward_finalization":
        sharded.set_manual_backward_finalization(True)
        its_scaler.scale(sharded(batch(0, 0, lab.rank.rank).to(device)).sum()).backward()
    return tried(run)


def _sharded(lab: Lab, layout: str) -> Any:
    sharded, api, world = build_model().to(lab.rank.device), lab.api, lab.rank.world_size
    if layout in ("fully_shard", "kept", "hybrid"):
        sizes = (2, world // 2) if layout == "hybrid" else (world,)
        more = {"reshard_after_forward": False} if layout == "kept" else {}
        mesh = lab.rank.mesh(*sizes, names=("replicas", "shards")[-len(sizes) :])
        for child in (sharded[0], sharded[2]):
            api.fully_shard(child, mesh=mesh, **more)
        return api.fully_shard(sharded, mesh=mesh, **more)
    if layout == "replicated":
        return nn.parallel.DistributedDataParallel(sharded)
    strategy = "NO_SHARD" if layout == "no_shard" else "FULL_SHARD"
    originals = layout != "flat"
    for number in (0, 2):
        sharded[number] = lab.wrap(sharded[number], use_orig_params=originals, strategy=strategy)
    return lab.wrap(sharded, use_orig_params=originals, strategy=strategy)


def _parameters(lab: Lab, layout: str, sharded: Any) -> dict[str, list[Any]]:
    if layout in ("original", "flat", "no_shard"):
        return {name: value.tolist() for name, value in gathered_parameters(lab.library, sharded).items()}
    values = {
        clean(name).removeprefix("module."): param.full_tensor() if hasattr(param, "full_tensor") else param
        for name, param in sharded.named_parameters()
    }
    return {name: value.tolist() for name, value in values.items()}
