"""What torch's class refuses or gets wrong, on small modules of their own; a rank returns what it ends with."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from conformance.distributed.fsdp.fsdp_cases import FSDP, gathered_gradients, groups_put_back, mesh_of
from conformance.library import load_library
from conformance.outcome import Outcome, observe
from conformance.ranks import Rank

_BACKWARDS = 2


class Shifted(nn.Module):
    """Has parameters of two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 4)
        self.shift = nn.Parameter(torch.zeros(5, 1, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).double() + self.shift.sum()


class OneElement(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def _half_frozen() -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    module[0].requires_grad_(False)
    return module


MODULES: dict[str, Callable[[], nn.Module]] = {
    "half frozen": _half_frozen,
    "several dtypes": Shifted,
    "one element": OneElement,
    "float64": lambda: nn.Linear(3, 4).double(),
    "plain": lambda: nn.Linear(3, 4),
}


def built(module: str) -> nn.Module:
    made = MODULES[module]()
    with torch.no_grad():
        for number, parameter in enumerate(made.parameters()):
            values = torch.linspace(-1, 1, parameter.numel() + number, dtype=torch.float64)[number:]
            parameter.copy_(values.view(parameter.shape))
    return made


def accumulated(model: nn.Module, rank: int) -> list[torch.Tensor]:
    """The losses of backwards that accumulate."""
    dtype = min((parameter.dtype for parameter in model.parameters()), key=lambda dtype: dtype.itemsize)
    losses = []
    for number in range(_BACKWARDS):
        x = torch.linspace(0, 1 + number, 15, dtype=dtype).view(5, 3) - rank * 0.25
        loss = model(x).square().mean()
        loss.backward()
        losses.append(loss.detach())
    return losses


def accumulate(
    rank: Rank, *, library: str, module: str, replicas: str = "", clips: bool = False, on: str = "cpu"
) -> Outcome:
    """`on` is the device that is named, or none.

    Replicas are as many as ranks, none of which is shared: by a `mesh`, or for want of one and of groups by `default`.
    """
    found, plain = load_library(library), built(module)

    def run() -> dict[str, Any]:
        arguments: dict[str, Any] = {"device_id": torch.device(on)} if on else {}
        if replicas == "mesh":
            arguments["device_mesh"] = mesh_of(rank, 1)
        elif replicas:
            arguments["auto_wrap_policy"] = found.distributed.fsdp.wrap.ModuleWrapPolicy({nn.Sequential})
        if replicas:
            arguments["sharding_strategy"] = found.distributed.fsdp.ShardingStrategy.HYBRID_SHARD
        model = found.find(FSDP)(plain, **arguments)
        losses = accumulated(model, rank.rank)
        norm = model.clip_grad_norm_(0.5) if clips else None
        return {"losses": losses, "norm": norm, "whole": gathered_gradients(found, model)}

    with groups_put_back():
        return observe(run)


def output_after_a_step(rank: Rank, *, library: str, evaluates: bool, fused: bool) -> Outcome:
    """What the model makes of one input after a step, between whose backward and itself it may have been evaluated."""
    found, plain = load_library(library), built("plain")

    def run() -> torch.Tensor:
        model = found.find(FSDP)(plain, device_id=torch.device("cpu"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, fused=fused)
        accumulated(model, rank.rank)
        with torch.no_grad():
            if evaluates:
                model(torch.ones(1, 3))
            optimizer.step()
            return model(torch.ones(1, 3))

    return observe(run)


def output_of_an_inner_module(rank: Rank, *, library: str) -> Outcome:
    """A module inside a unit, called by itself."""
    found, plain = load_library(library), nn.Sequential(built("plain"), nn.Linear(4, 2))

    def run() -> torch.Tensor:
        model = found.find(FSDP)(plain, device_id=torch.device("cpu"), use_orig_params=True)
        return model.module[0](torch.ones(1, 3)).detach()

    return observe(run)


class Doubling(nn.Linear):
    """Changes its own weight while it computes."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.mul_(2)
        return super().forward(input)


def weight_changed_in_forward(rank: Rank, *, library: str) -> Outcome:
    """The whole weight afterwards, which began with ones."""
    found, plain = load_library(library), Doubling(3, 4)
    nn.init.ones_(plain.weight)

    def run() -> torch.Tensor:
        fsdp = found.find(FSDP)
        model = fsdp(plain, device_id=torch.device("cpu"))
        model(torch.ones(1, 3)).sum().backward()
        with fsdp.summon_full_params(model):
            return model.module.weight.detach().clone()

    return observe(run)


def tied_in_two_units(rank: Rank, *, library: str) -> Outcome:
    """How many parameters are left to step where two units, wrapped by hand, have one between them."""
    found = load_library(library)
    first, second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    second.weight = first.weight

    def run() -> int:
        cpu = torch.device("cpu")
        fsdp = found.find(FSDP)
        units = nn.Sequential(fsdp(first, device_id=cpu), fsdp(second, device_id=cpu))
        return len(list(fsdp(units, device_id=cpu).parameters()))

    return observe(run)


def copied(rank: Rank, *, library: str, use_orig_params: bool) -> Outcome:
    """A deep copy of a model with a unit inside."""
    found, plain = load_library(library), nn.Sequential(built("plain"), nn.Linear(4, 2))

    def run() -> str:
        fsdp = found.find(FSDP)
        arguments = {"device_id": torch.device("cpu"), "use_orig_params": use_orig_params}
        plain[1] = fsdp(plain[1], **arguments)
        return type(copy.deepcopy(fsdp(plain, **arguments))).__name__

    return observe(run)


def tied_on_meta(rank: Rank, *, library: str, across: bool, by: str) -> Outcome:
    """Tied weights of a model on the meta device, in one unit or `across` two: how many there are in the end."""
    found = load_library(library)
    with torch.device("meta"):
        plain = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4, bias=False)))
    plain[1][0].weight = plain[0].weight

    def fill(module: nn.Module) -> None:
        module.to_empty(device="cpu", recurse=by == "recursive function")
        for parameter in module.parameters(recurse=by == "recursive function"):
            nn.init.ones_(parameter)

    def run() -> tuple[int, float]:
        fsdp = found.find(FSDP)
        arguments = (
            {"auto_wrap_policy": found.distributed.fsdp.wrap.ModuleWrapPolicy({nn.Sequential})}
            if across
            else {}
        )
        if by != "reset":
            arguments["param_init_fn"] = fill
        model = fsdp(plain, device_id=torch.device("cpu"), use_orig_params=True, **arguments)
        model(torch.ones(2, 4)).sum().backward()
        with fsdp.summon_full_params(model, with_grads=True):
            parameters = list(model.parameters())
            return len(parameters), sum(float(parameter.grad.abs().sum()) for parameter in parameters)

    return observe(run)


def clipped_with_an_inf(rank: Rank, *, library: str) -> Outcome:
    """Clipping that is to refuse: one rank's gradients have an inf."""
    found, plain = load_library(library), built("plain")

    def run() -> torch.Tensor:
        model = found.find(FSDP)(plain, device_id=torch.device("cpu"))
        accumulated(model, rank.rank)
        if rank.rank == 0:
            next(model.parameters()).grad[0] = torch.inf
        return model.clip_grad_norm_(0.5, error_if_nonfinite=True, foreach=False)

    return observe(run)
