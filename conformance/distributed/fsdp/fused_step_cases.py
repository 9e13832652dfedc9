"""Cases of `fused_step`: training a small model with sharded parameters, and the same model unsharded."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.optim import SGD, AdamW, Optimizer, RMSprop

from conformance.distributed.fsdp.fsdp_cases import gathered_parameters
from conformance.distributed.fsdp.lab import Lab
from conformance.judge.outcome import observe
from conformance.judge.sandbox import seeding
from conformance.ranks.cases import PlacedGradient, full_tensor

SIZE = 4  # rows of a rank's batch
# The eps is as large as the gradients. With a smaller eps, rounding errors near zero would decide the update.
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": lambda parameters: AdamW(parameters, lr=0.125, eps=1.0),
    "nesterov": lambda parameters: SGD(parameters, lr=0.125, momentum=0.5, nesterov=True),
    "rmsprop": lambda parameters: RMSprop(parameters, lr=0.125, eps=1.0),
}
MAX_NORM = 0.25
OPTIONS = {"init_scale": 8.0, "growth_interval": 2}


def plain_model() -> nn.Module:
    seeding.seed_all()
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def inputs_of(number: int, ranks: int) -> torch.Tensor:
    """Return the inputs of all ranks in one iteration, concatenated."""
    return torch.randn(SIZE * ranks, 5, generator=seeding.generator(number))


def unsharded(kind: str, grad_outcomes: Sequence[int | None], norm_type: float, ranks: int) -> list[Any]:
    """Train with torch's four calls. Return norm, scale and parameters after each iteration.

    In an iteration whose outcome is not None, one gradient element is inf.
    """
    model = plain_model()
    optimizer, scaler = OPTIMIZERS[kind](model.parameters()), torch.amp.GradScaler("cpu", **OPTIONS)
    results: list[Any] = []
    for number, grad_outcome in enumerate(grad_outcomes):
        optimizer.zero_grad()
        scaler.scale(model(inputs_of(number, ranks)).square().mean()).backward()
        if grad_outcome is not None:
            _spoil(model)
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM, norm_type)
        scaler.step(optimizer)
        scaler.update()
        results.append((norm, scaler.get_scale(), [p.detach().clone() for p in model.parameters()]))
    return results


def unsharded_of_meshes(kind: str, grad_outcomes: Sequence[int | None]) -> list[Any]:
    """Do the steps of `over_meshes` with unsharded parameters and torch's four calls."""
    parameters = [nn.Parameter(start.value) for start in on_meshes(0)]
    optimizer = OPTIMIZERS[kind](parameters)
    results: list[Any] = []
    for number, bad in enumerate(grad_outcomes):
        for parameter, grad in zip(parameters, gradients_on_meshes(number, bad), strict=True):
            parameter.grad = grad.value
        norm = nn.utils.clip_grad_norm_(parameters, MAX_NORM)
        if bad is None:
            optimizer.step()
        results.append((norm, [parameter.detach().clone() for parameter in parameters]))
    return results


def sharded(
    lab: Lab,
    *,
    scaler: str,
    sharding: str,
    kind: str,
    grad_outcomes: tuple[int | None, ...],
    norm_type: float,
) -> list[Any]:
    """Train a sharded model with `fused_step`. An outcome is the rank whose gradients contain inf, or None."""
    model = _in_parts(lab, sharding)
    optimizer, its_scaler = OPTIMIZERS[kind](model.parameters()), lab.library.find(scaler)("cpu", **OPTIONS)
    results: list[Any] = []
    for number, grad_outcome in enumerate(grad_outcomes):
        optimizer.zero_grad()
        own = inputs_of(number, lab.rank.world_size).split(SIZE)[lab.rank.rank]
        its_scaler.scale(model(own).square().mean()).backward()
        if grad_outcome == lab.rank.rank:
            _spoil(model)
        norm = its_scaler.fused_step(optimizer, MAX_NORM, norm_type)
        results.append((norm, its_scaler.get_scale(), _unsharded(lab, model, sharding)))
    return results


# Experts beside data parallelism, a mesh of two ranks, and a parameter that is no DTensor.
_SHAPES_AND_PLACEMENTS: list[tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...]]] = [
    ((8, 5), (4,), (Shard(0),)),
    ((8, 5), (2, 2), (Shard(0), Shard(1))),
    ((6,), (2, 2), (Replicate(), Shard(0))),
    ((3, 3), (2,), (Shard(0),)),
    ((4,), (4,), ()),
]


def on_meshes(seed: int, factor: float = 1.0) -> list[PlacedGradient]:
    """Return values for one parameter each, on meshes of the first of four ranks."""
    generator = seeding.generator(seed)
    return [
        PlacedGradient(
            torch.randn(shape, generator=generator) * factor, None, bool(placements), placements, mesh
        )
        for shape, mesh, placements in _SHAPES_AND_PLACEMENTS
    ]


def gradients_on_meshes(number: int, bad: int | None, scale: float = 1.0) -> list[PlacedGradient]:
    """Return the gradients of an iteration. That of the parameter `bad` has inf in its last element, on some ranks."""
    grads = on_meshes(number + 1, scale)
    if bad is not None:
        grads[bad].value.view(-1)[-1] = math.inf
    return grads


def over_meshes(lab: Lab, *, scaler: str, kind: str, grad_outcomes: tuple[int | None, ...]) -> list[Any]:
    """Step parameters on several meshes. Return norms, and the unsharded parameters or None."""

    def distribute(values: Sequence[PlacedGradient]) -> list[torch.Tensor]:
        return [value.on(lab.rank.mesh(*value.mesh_shape)) for value in values]

    parameters = [nn.Parameter(value) for value in distribute(on_meshes(0))]
    optimizer = OPTIMIZERS[kind](parameters)
    its_scaler = lab.library.find(scaler)("cpu", **OPTIONS)
    its_scaler.scale(torch.ones(()))
    results: list[Any] = []
    for number, bad in enumerate(grad_outcomes):
        grads = distribute(gradients_on_meshes(number, bad, its_scaler.get_scale()))
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad
        norm = its_scaler.fused_step(optimizer, MAX_NORM)
        results.append((norm, [full_tensor(parameter.detach().clone()) for parameter in parameters]))
    return results


def offloaded(lab: Lab, *, scaler: str, enabled: bool) -> list[Any]:
    """Train with parameters on the host and a group without a backend for the host. Return norms and parameters."""
    group = lab.rank.group_of_device()
    model = lab.wrap(
        plain_model(),
        use_orig_params=True,
        process_group=group,
        cpu_offload=lab.api.CPUOffload(offload_params=True),
    )
    more = {"process_group": group} if "Sharded" in scaler else {}
    its_scaler = lab.library.find(scaler)(lab.rank.device.type, enabled=enabled, **more, **OPTIONS)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    results: list[Any] = []
    for number in range(2):
        optimizer.zero_grad()
        own = inputs_of(number, lab.rank.world_size).split(SIZE)[lab.rank.rank]
        its_scaler.scale(model(own).square().mean()).backward()
        norm = its_scaler.fused_step(optimizer, MAX_NORM).cpu()
        results.append(
            (norm, [parameter.cpu() for parameter in gathered_parameters(lab.library, model).values()])
        )
    return results


def _in_parts(lab: Lab, sharding: str) -> nn.Module:
    if sharding == "dtensor":
        return fully_shard(plain_model(), mesh=lab.rank.mesh(lab.rank.world_size))
    return lab.wrap(plain_model(), use_orig_params=sharding == "original")


def _unsharded(lab: Lab, model: nn.Module, sharding: str) -> list[torch.Tensor]:
    if sharding == "dtensor":
        parameters: Any = model.parameters()
        return [parameter.full_tensor().detach().clone() for parameter in parameters]
    return [*gathered_parameters(lab.library, model).values()]


def _spoil(model: nn.Module) -> None:
    for parameter in model.parameters():
        grad: Any = parameter.grad
        own = getattr(grad, "_local_tensor", grad)
        if own is not None and own.numel():
            own.view(-1)[-1] = math.inf
            return


def one_fails(lab: Lab, *, scaler: str, failure: str) -> tuple[Any, Any, list[float]]:
    """Make a fused step fail on rank 0.

    Return its error, the error of the next step after gradients were cleared, and the parameter between the steps.
    """
    parameter = nn.Parameter(torch.ones(4))
    optimizer, its_scaler = SGD([parameter], lr=0.125), lab.library.find(scaler)("cpu", **OPTIONS)
    fails = lab.rank.rank == 0
    if not (fails and failure == "no scale"):
        its_scaler.scale(parameter.sum()).backward()
    if fails and failure == "sparse":
        parameter.grad = parameter.grad.to_sparse()
    max_norm = math.nan if fails and failure == "max_norm" else math.inf
    failed = observe(its_scaler.fused_step, optimizer, max_norm).raised
    after_failure = parameter.tolist()
    parameter.grad = None
    its_scaler.scale(parameter.sum()).backward()
    return failed, observe(its_scaler.fused_step, optimizer).raised, after_failure


def no_optimizer(lab: Lab, *, scaler: str) -> list[Any]:
    """Return the error of `fused_step` if all ranks pass a model, and then for the optimizer."""
    parameter = nn.Parameter(torch.ones(4))
    optimizer, its_scaler = SGD([parameter], lr=0.125), lab.library.find(scaler)("cpu", **OPTIONS)
    its_scaler.scale(parameter.sum()).backward()
    return [observe(its_scaler.fused_step, argument).raised for argument in (nn.Linear(1, 1), optimizer)]
