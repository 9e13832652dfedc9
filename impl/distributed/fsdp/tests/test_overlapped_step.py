"""`overlapped_step` on a device that runs late has the bits of `fused_step`, and needs each of its waits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from conformance import simulator
from conformance.ranks import Rank, RankPool
from conformance.ranks.fixtures import require_simulator
from conformance.simulator import NAME
from impl.amp import GradScaler
from impl.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from impl.distributed.fsdp._layout import flat, per_param
from impl.distributed.fsdp.wrap import ModuleWrapPolicy
from impl.kernels import UpdateAhead, to_device
from impl.optim import _updates_ahead
from impl.optim._held_gradients import holders_of_any

STEPS = 4
# The first four schedules, of which the second one runs all as late as possible, and two random ones.
SEEDS = range(6)

pytestmark = pytest.mark.deadline(300)


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    require_simulator()
    with RankPool(2, device=NAME, start_s=240) as pool:
        yield pool


@contextlib.contextmanager
def without_wait() -> Iterator[None]:
    """Context manager in which the host reads gradients without waiting for them."""
    receive = _updates_ahead.UpdatesAhead.receive

    def at_once(
        self: _updates_ahead.UpdatesAhead,
        holder: Any,
        part: Any,
        grads: Sequence[tuple[Tensor, Tensor]],
        wait: Callable[[], None],
    ) -> None:
        del wait
        receive(self, holder, part, grads, lambda: None)

    with mock.patch.object(_updates_ahead.UpdatesAhead, "receive", at_once):
        yield


@contextlib.contextmanager
def without_earlier_values() -> Iterator[None]:
    """Context manager in which a second forward in a region reads updated parameters."""
    with mock.patch.object(_updates_ahead.UpdatesAhead, "before_gather"):
        yield


@contextlib.contextmanager
def without_earlier_casts() -> Iterator[None]:
    """Context manager in which a second forward in a region reads casts of updated parameters."""
    undo = UpdateAhead.undo

    def undo_but_casts(self: UpdateAhead) -> None:
        casts = [cast.clone() for cast in self.parameters.low_precision_params]
        undo(self)
        for cast, value in zip(self.parameters.low_precision_params, casts, strict=True):
            cast.copy_(value)

    with mock.patch.object(UpdateAhead, "undo", undo_but_casts):
        yield


FAULTS = {
    "nothing": contextlib.nullcontext,
    "wait": without_wait,
    "earlier values": without_earlier_values,
    "earlier casts": without_earlier_casts,
}


def model_of(rank: Rank, face: str, *, trains_weights: bool = True) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(5)))
    for layer in model:
        layer.weight.requires_grad_(trains_weights)
    if face == "FSDP1":
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
            cpu_offload=CPUOffload(offload_params=True),
            device_id=rank.device,
            use_orig_params=True,
            mixed_precision=MixedPrecision(param_dtype=torch.bfloat16),
        )
    mesh = init_device_mesh(rank.device.type, (rank.world_size,))
    for layer in (*model, model):
        fully_shard(
            layer,
            mesh=mesh,
            offload_policy=CPUOffloadPolicy(),
            mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        )
    return model


def train(
    rank: Rank, *, face: str, fault: str, seed: int, overlaps: bool, cast_params: bool = False
) -> list[Any]:
    """Return the norms and this rank's parameters after each step of a run with two backwards each."""
    simulator.set_schedule(seed, rank.rank)
    model = model_of(rank, face)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125)
    scaler = GradScaler(rank.device.type, init_scale=64.0)
    results: list[Any] = []
    with FAULTS[fault]():
        for step in range(STEPS):
            optimizer.zero_grad()

            def backward(step: int = step) -> None:
                for number in range(1 + step % 2):
                    inputs = torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * step + number))
                    scaler.scale(model(inputs.to(rank.device)).square().mean()).backward()

            if overlaps:
                with scaler.overlapped_step(optimizer, cast_params=cast_params) as result:
                    backward()
                norm = result.norm
            else:
                backward()
                norm = scaler.fused_step(optimizer)
            own = [getattr(param, "_local_tensor", param).detach() for param in model.parameters()]
            results.append((norm.item(), [str(param.tolist()) for param in own]))
    simulator.set_schedule(0, rank.rank)
    return results


def results_of(ranks: RankPool, **arguments: Any) -> str:
    return repr(ranks.run(train, deadline_s=120, **arguments))


@pytest.mark.parametrize("face", ["FSDP1", "fully_shard"])
def test_overlapped_step_has_bits_of_fused_step_on_late_device(ranks: RankPool, face: str) -> None:
    expected = results_of(ranks, face=face, fault="nothing", seed=0, overlaps=False)
    for seed in SEEDS:
        for cast_params in (False, True):
            run = {"seed": seed, "overlaps": True, "cast_params": cast_params}
            assert results_of(ranks, face=face, fault="nothing", **run) == expected, f"schedule {seed}"


@pytest.mark.parametrize("fault", ["wait", "earlier values", "earlier casts"])
@pytest.mark.parametrize("face", ["FSDP1", "fully_shard"])
def test_missing_wait_changes_result_on_late_device(ranks: RankPool, face: str, fault: str) -> None:
    expected = results_of(ranks, face=face, fault="nothing", seed=0, overlaps=False)
    run = {"seed": 1, "overlaps": True, "cast_params": fault == "earlier casts"}
    assert results_of(ranks, face=face, fault=fault, **run) != expected


def uploaded_shards(rank: Rank, *, face: str) -> list[list[str]]:
    """Return the dtypes of the shards that each iteration copies to the device, sorted."""
    model = model_of(rank, face)
    optimizer, scaler = torch.optim.AdamW(model.parameters()), GradScaler(rank.device.type, init_scale=1.0)
    iterations: list[list[str]] = []

    def upload(tensor: Tensor, *arguments: Any, **options: Any) -> Tensor:
        iterations[-1] += [str(tensor.dtype)] if tensor.is_cpu else []
        return to_device(tensor, *arguments, **options)

    with mock.patch.object(flat, "to_device", upload), mock.patch.object(per_param, "to_device", upload):
        for cast_params in (True, True, True, False, False):
            iterations.append([])
            optimizer.zero_grad()
            with scaler.overlapped_step(optimizer, cast_params=cast_params):
                scaler.scale(model(torch.ones(4, 16, device=rank.device)).square().mean()).backward()
    return [sorted(iteration) for iteration in iterations]


@pytest.mark.parametrize("face", ["FSDP1", "fully_shard"])
def test_only_casts_are_copied_to_device_after_step_with_casts(ranks: RankPool, face: str) -> None:
    """The first step has no states yet, so it updates nothing early."""
    for wide, still_wide, *narrow, wide_again in ranks.run(uploaded_shards, deadline_s=120, face=face):
        assert wide == still_wide == wide_again
        assert set(wide) == {"torch.float32"}
        assert [set(iteration) for iteration in narrow] == [{"torch.bfloat16"}] * 2
        assert [len(iteration) for iteration in narrow] == [len(wide)] * 2


def train_biases(rank: Rank, *, face: str) -> tuple[int, int]:
    """Return the elements of this rank's biases, and those of all casts."""
    model = model_of(rank, face, trains_weights=False)
    optimizer, scaler = torch.optim.AdamW(model.parameters()), GradScaler("cpu", init_scale=1.0)
    for _ in range(2):
        optimizer.zero_grad()
        with scaler.overlapped_step(optimizer, cast_params=True) as result:
            scaler.scale(model(torch.ones(4, 16)).square().mean()).backward()
    assert result.early_numel
    units: list[Any] = [*holders_of_any([*model.parameters()])]
    casts = [
        cast for unit in units for group in unit.param_groups for cast in group.shard_casts.tensors.values()
    ]
    return result.early_numel, sum(cast.numel() for cast in casts)


@pytest.mark.parametrize("face", ["FSDP1", "fully_shard"])
def test_frozen_parameters_have_no_casts(face: str) -> None:
    with RankPool(1) as pool:
        [(numel, cast_numel)] = pool.run(train_biases, face=face)
    assert cast_numel == numel


def train_with_biases_frozen_in_turn(rank: Rank) -> tuple[int, int]:
    """Return the elements of the parameters, and those of the parameters whose earlier values are saved."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    mesh = init_device_mesh("cpu", (rank.world_size,))
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    optimizer, scaler = torch.optim.AdamW(model.parameters()), GradScaler("cpu", init_scale=1.0)
    for step in range(8):
        for number, layer in enumerate(model):
            layer.bias.requires_grad_((step >> number) % 2 == 0)
        optimizer.zero_grad()
        with scaler.overlapped_step(optimizer) as result:
            scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    assert result.early_numel
    batches = _updates_ahead._records[optimizer].batches.values()
    saved = sum(param.numel() for batch in batches for param in batch.params)
    return sum(param.numel() for param in model.parameters()), saved


def test_earlier_values_are_saved_once_whatever_is_frozen() -> None:
    with RankPool(1) as pool:
        [(numel, saved)] = pool.run(train_with_biases_frozen_in_turn)
    assert 0 < saved <= numel
