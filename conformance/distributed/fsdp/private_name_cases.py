"""What libraries that people train with read of units, and do to them, by names that are private in torch."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from conformance.distributed.fsdp.construct_cases import Site
from conformance.distributed.fsdp.fsdp_cases import FSDP, gathered_parameters, groups_put_back, state_of
from conformance.judge.library import load_library
from conformance.judge.outcome import Outcome, observe
from conformance.ranks import Rank

LEARNING_RATE = 0.1


class Model(nn.Module):
    """Of units with parameters and without any."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.last = nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.act(self.first(x)))


def _built(dtype: torch.dtype = torch.float32) -> Model:
    made = Model()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view(parameter.shape))
    return made.to(dtype)


def read(rank: Rank, *, library: str, path: str, name: str, use_orig_params: bool) -> Outcome:
    """The attribute of whatever is found at the path of each unit: one thing, or what calling it yields."""
    found, plain = load_library(library), _built()

    def run() -> list[Any]:
        policy = found.distributed.fsdp.wrap.ModuleWrapPolicy({nn.Linear, nn.Tanh})
        model = Site(rank, found, plain).wrap(
            auto_wrap_policy=policy, use_orig_params=use_orig_params, ignored_modules=[plain.last]
        )
        seen = []
        for unit in found.find(FSDP).fsdp_modules(model):
            carriers = unit
            for step in path.split(".") if path else ():
                carriers = getattr(carriers, step)
            several = list(carriers()) if inspect.ismethod(carriers) else [carriers]
            seen.append([_described(getattr(one, name, "missing")) for one in several])
        return seen

    with groups_put_back():
        return observe(run)


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return [value.dtype, tuple(value.shape), value.requires_grad]
    if isinstance(value, nn.Module):
        return type(value).__name__
    if isinstance(value, (list, tuple)):
        return list(value)
    return value if value is None or isinstance(value, (bool, str, torch.dtype)) else bool(value)


def upcast(
    rank: Rank,
    *,
    library: str,
    strategy: str,
    use_orig_params: bool,
    mixed_precision: Mapping[str, Any] | None,
    frozen: bool,
) -> Outcome:
    """Loaded in bfloat16, trained in float32: what accelerate's `prepare_model` does between wrapping and optimizer."""
    found, plain = load_library(library), _built(torch.bfloat16)
    fsdp = found.distributed.fsdp
    if frozen:
        plain.first.weight.requires_grad_(False)

    def run() -> dict[str, Any]:
        site = Site(rank, found, plain)
        model = site.wrap(
            sharding_strategy=site.strategy(strategy),
            auto_wrap_policy=fsdp.wrap.ModuleWrapPolicy({nn.Linear}) if not frozen else None,
            mixed_precision=None if mixed_precision is None else fsdp.MixedPrecision(**mixed_precision),
            use_orig_params=use_orig_params,
        )
        for unit in found.find(FSDP).fsdp_modules(model):
            if unit._has_params and unit._flat_param.requires_grad:
                unit._flat_param.data = unit._flat_param.data.to(torch.float32)
                unit._handle._orig_param_dtype = torch.float32
        optimizer = torch.optim.Adam(model.parameters(), LEARNING_RATE)
        computed: list[torch.dtype] = []
        seen = []
        plain.last.register_forward_hook(
            lambda _, args, output: computed.append((args[0].dtype, output.dtype))
        )
        for number in range(3):
            x = torch.linspace(0, 1 + number, 6).view(2, 3) - rank.rank * 0.25
            model(x.to(torch.bfloat16)).float().square().sum().backward()
            seen.append([state_of(parameter) for parameter in model.parameters()])
            optimizer.step()
            optimizer.zero_grad()
        return {
            # Which rank has which element of a unit that is frozen in part is the library's own affair.
            "seen": {one["grad"].dtype for step in seen for one in step if one["grad"] is not None}
            if frozen
            else seen,
            "dtypes": [parameter.dtype for parameter in model.parameters()],
            "computed": computed,
            "whole": gathered_parameters(found, model),
            "state": model.state_dict(),
        }

    with groups_put_back():
        return observe(run)
