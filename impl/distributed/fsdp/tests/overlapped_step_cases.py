"""Training with `overlapped_step` on the simulated accelerator, with and without its waits, as a case of a pool."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from conformance import simulator
from conformance.ranks import Rank
from impl.amp import GradScaler
from impl.distributed.fsdp import CPUOffload, CPUOffloadPolicy, FullyShardedDataParallel, fully_shard
from impl.distributed.fsdp.wrap import ModuleWrapPolicy
from impl.optim._updates_ahead import UpdatesAhead

STEPS = 4


@contextlib.contextmanager
def nothing_left_out() -> Iterator[None]:
    yield


@contextlib.contextmanager
def without_wait() -> Iterator[None]:
    """Context manager in which the host reads gradients without waiting for them."""
    receive = UpdatesAhead.receive

    def at_once(
        self: UpdatesAhead,
        holder: Any,
        part: Any,
        grads: Sequence[tuple[Tensor, Tensor]],
        wait: Callable[[], None],
    ) -> None:
        del wait
        receive(self, holder, part, grads, lambda: None)

    with mock.patch.object(UpdatesAhead, "receive", at_once):
        yield


@contextlib.contextmanager
def without_earlier_values() -> Iterator[None]:
    """Context manager in which a second forward in a region reads updated parameters."""
    with mock.patch.object(UpdatesAhead, "before_gather"):
        yield


FAULTS = {"nothing": nothing_left_out, "wait": without_wait, "earlier values": without_earlier_values}


def model_of(rank: Rank, face: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(5)))
    if face == "FSDP1":
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
            cpu_offload=CPUOffload(offload_params=True),
            device_id=rank.device,
            use_orig_params=True,
        )
    mesh = init_device_mesh(rank.device.type, (rank.world_size,))
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh, offload_policy=CPUOffloadPolicy())
    return model


def train(rank: Rank, *, face: str, fault: str, seed: int, overlaps: bool) -> list[Any]:
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
                with scaler.overlapped_step(optimizer) as result:
                    backward()
                norm = result.norm
            else:
                backward()
                norm = scaler.fused_step(optimizer)
            own = [getattr(param, "_local_tensor", param).detach() for param in model.parameters()]
            results.append((norm.item(), [str(param.tolist()) for param in own]))
    simulator.set_schedule(0, rank.rank)
    return results
