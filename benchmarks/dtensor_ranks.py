"""Cases for the ranks of bench_dtensors.py. Each rank keeps its DTensors between calls."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from benchmarks.common import SEED, member

TENSORS, ELEMENTS = 2_000, 1_000
# Calls in a row, which take much longer than a message to the ranks.
CALLS = 8


@dataclass(frozen=True)
class Work:
    parameters: list[Any]
    call: Callable[[], Any]


@functools.lru_cache(maxsize=4)
def _work(operation: str, subject: str, meshes: int) -> Work:
    """Return the work on DTensors that alternate between meshes. torch's are all on the first one."""
    size = dist.get_world_size()
    layouts = [
        (init_device_mesh("cpu", (1,) * more + (size,)), [Replicate()] * more + [Shard(0)])
        for more in range(1 if subject == "torch" else meshes)
    ]
    random = torch.Generator().manual_seed(SEED + dist.get_rank())

    def draw(index: int) -> DTensor:
        local = torch.randn(ELEMENTS // size, generator=random).mul_(0.01)
        return DTensor.from_local(local, *layouts[index % len(layouts)], run_check=False)

    parameters = [nn.Parameter(draw(index)) for index in range(TENSORS)]
    for index, parameter in enumerate(parameters):
        parameter.grad = draw(index)
    return Work(parameters, _CALLS[operation](subject, parameters))


def _clip(subject: str, parameters: list[Any]) -> Callable[[], Any]:
    # Each call multiplies the gradients by about -1, see bench_clip_grad.
    return functools.partial(member(subject, "nn.utils.clip_grad_norm_"), parameters, -1.0)


def _scaler(subject: str) -> Any:
    scaler = member(subject, "amp.GradScaler")("cpu", init_scale=1.0, growth_interval=2**30)
    scaler.scale(torch.ones(()))
    return scaler


def _adamw(subject: str, parameters: list[Any]) -> Callable[[], Any]:
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, foreach=True)
    if subject == "torch":
        return optimizer.step
    scaler = _scaler(subject)
    if not hasattr(scaler, "fused_step"):
        raise NotImplementedError(f"{subject} has no fused_step")
    return functools.partial(scaler.fused_step, optimizer)


def _unscale(subject: str, parameters: list[Any]) -> Callable[[], Any]:
    optimizer = torch.optim.SGD(parameters)
    scaler = _scaler(subject)

    def call() -> None:
        scaler.unscale_(optimizer)
        scaler.update()  # allows the next unscale_

    return call


_CALLS = {"clip": _clip, "adamw": _adamw, "unscale": _unscale}


def run(rank: Any, *, operation: str, subject: str, meshes: int) -> None:
    work = _work(operation, subject, meshes)
    for _ in range(CALLS):
        work.call()


def effect(rank: Any, *, operation: str, subject: str, meshes: int) -> list[Tensor]:
    """Make the first call. Return this rank's elements of the first tensors after it."""
    work = _work(operation, subject, meshes)
    work.call()
    return [
        local.to_local().detach().clone()
        for parameter in work.parameters[:20]
        for local in (parameter, parameter.grad)
    ]
