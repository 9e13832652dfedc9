"""Cases of small modules that torch's FullyShardedDataParallel refuses or gets wrong."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from conformance.distributed.fsdp.fsdp_cases import gathered_gradients, mesh_of
from conformance.distributed.fsdp.lab import Lab, filled

_BACKWARDS = 2


class Shifted(nn.Module):
    """Module with parameters of two dtypes."""

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


class Position(nn.Module):
    """Module that returns a slice of its parameter, which the outer module adds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(9, 3))

    def forward(self, rows: int) -> torch.Tensor:
        return self.weight[:rows]


class Positioned(nn.Module):
    """Module that returns its result together with a slice of its own parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.position = Position()
        self.last = nn.Linear(3, 2)
        self.added = nn.Parameter(torch.ones(5, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self.both(x))

    def both(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.last(x + self.position(len(x))), self.added[: len(x)]


class Both(Positioned):
    def forward(self, x: torch.Tensor) -> Any:
        return self.both(x)


class Description:
    """Object that is not a container of torch or Python, with references to itself."""

    def __init__(self, mean: torch.Tensor, spread: torch.Tensor) -> None:
        self.parts = {"mean": mean}
        self.inner = _Spread(spread)
        self.itself = self
        self.circle: list[Any] = [self]
        self.circle.append(self.circle)

    def square(self) -> torch.Tensor:
        return (self.parts["mean"] * self.inner.spread).square()


@dataclass(frozen=True)
class _Spread:
    spread: torch.Tensor


class Describing(nn.Module):
    """Module that returns an object, which may hold a parameter."""

    def __init__(self, holds_parameter: bool) -> None:
        super().__init__()
        self.mean = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        self.spread = nn.Parameter(torch.ones(2))
        self.holds_parameter = holds_parameter

    def forward(self, x: torch.Tensor) -> Description:
        spread = self.spread.expand(len(x), 2)
        return Description(self.mean(x), spread if self.holds_parameter else spread.exp())


class Described(nn.Module):
    """Module that computes with the contents of an object that its inner module returns."""

    def __init__(self, holds_parameter: bool) -> None:
        super().__init__()
        self.describing = Describing(holds_parameter)
        self.last = nn.Linear(2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.describing(x).square())


class OutputRecord:
    """Object that is passed from unit to unit and keeps the output of each."""

    def __init__(self) -> None:
        self.outputs: list[torch.Tensor] = []


class Keeping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(
        self, inputs: tuple[torch.Tensor, OutputRecord | None]
    ) -> tuple[torch.Tensor, OutputRecord | None]:
        x, record = inputs
        x = self.layer(x).tanh()
        if record is not None:
            record.outputs.append(x)
        return x, record


class Nothing(nn.Module):
    """Module whose parameter has no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(0, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight.sum()


def _half_frozen() -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    module[0].requires_grad_(False)
    return module


def _normed() -> nn.Module:
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        return nn.utils.weight_norm(nn.Linear(3, 4))


MODULES: dict[str, Callable[[], nn.Module]] = {
    "half frozen": _half_frozen,
    "several dtypes": Shifted,
    "one element": OneElement,
    "float64": lambda: nn.Linear(3, 4).double(),
    "plain": lambda: nn.Linear(3, 4),
    "normed": _normed,
    "returned": Positioned,
    "object": lambda: Describing(holds_parameter=False),
    "object with a parameter": lambda: Describing(holds_parameter=True),
    "object inside": lambda: Described(holds_parameter=False),
    "object inside with a parameter": lambda: Described(holds_parameter=True),
    "no elements": lambda: nn.Sequential(nn.Linear(3, 4), Nothing(), nn.Linear(4, 2)),
}


def built(module: str) -> Any:
    return filled(MODULES[module]())


def accumulated(model: nn.Module, rank: int) -> list[torch.Tensor]:
    """Run backwards that accumulate. Return their losses."""
    dtype = min((parameter.dtype for parameter in model.parameters()), key=lambda dtype: dtype.itemsize)
    losses = []
    for number in range(_BACKWARDS):
        x = torch.linspace(0, 1 + number, 15, dtype=dtype).view(5, 3) - rank * 0.25
        loss = model(x).square().mean()
        loss.backward()
        losses.append(loss.detach())
    return losses


def accumulate(
    lab: Lab,
    *,
    module: str,
    replicas: str = "",
    clips: bool = False,
    on: str = "cpu",
    strategy: str = "FULL_SHARD",
) -> dict[str, Any]:
    """Accumulate gradients of a wrapped module. Inner modules with unusual parameters become units.

    `on` is the device that is passed, or empty. With `replicas`, each rank has a full replica, either by a `mesh` or by
    the `default` of a hybrid strategy.
    """
    arguments: dict[str, Any] = {"device_id": torch.device(on) if on else None}
    if replicas == "mesh":
        arguments["device_mesh"] = mesh_of(lab.rank, 1)
    else:
        arguments["units"] = [nn.Sequential] if replicas else [Position, Nothing, Describing]
    model = lab.wrap(built(module), strategy="HYBRID_SHARD" if replicas else strategy, **arguments)
    losses = accumulated(model, lab.rank.rank)
    norm = model.clip_grad_norm_(0.5) if clips else None
    return {"losses": losses, "norm": norm, "whole": gathered_gradients(lab.library, model)}


def saved_after_a_backward(lab: Lab, *, strategy: str) -> list[str]:
    """Return the saved names after a backward. The outer unit is frozen, and its input needs no gradient."""
    kind: dict[str, Any] = {"strategy": strategy, "use_orig_params": True}
    outer = nn.Linear(3, 4).requires_grad_(False)
    model = lab.wrap(nn.Sequential(outer, lab.wrap(nn.Linear(4, 2), **kind)), **kind)
    model(torch.ones(2, 3)).sum().backward()
    return sorted(model.state_dict())


def states_without_elements(lab: Lab) -> dict[str, Any]:
    """Return the shapes of gradients and the names of saved states. The last parameter has no elements."""
    whole = nn.Sequential(nn.Linear(3, 4), Nothing())
    model = lab.wrap(filled(whole), strategy="NO_SHARD", use_orig_params=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.5)
    accumulated(model, lab.rank.rank)
    gradients = [
        parameter.grad is not None and tuple(parameter.grad.shape) for parameter in model.parameters()
    ]
    optimizer.step()
    return {"gradients": gradients, "saved": sorted(lab.fsdp.optim_state_dict(model, optimizer)["state"])}


def one_step_of_many_units(lab: Lab, *, keeps: bool) -> None:
    model = lab.wrap(nn.Sequential(*(Keeping() for _ in range(4))), units=[Keeping])
    output, _ = model((torch.ones(2, 3), OutputRecord() if keeps else None))
    output.sum().backward()


def output_after_a_step(lab: Lab, *, evaluates: bool, fused: bool) -> torch.Tensor:
    """Return the model's output after a step. The model may be evaluated between the backward and the step."""
    model = lab.wrap(built("plain"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, fused=fused)
    accumulated(model, lab.rank.rank)
    with torch.no_grad():
        if evaluates:
            model(torch.ones(1, 3))
        optimizer.step()
        return model(torch.ones(1, 3))


def output_of_an_inner_module(lab: Lab, *, module: str = "plain") -> torch.Tensor:
    """Call a module inside a unit by itself."""
    model = lab.wrap(nn.Sequential(built(module), nn.Linear(4, 2)), use_orig_params=True)
    return model.module[0](torch.ones(1, 3)).detach()


def returned_parameters(lab: Lab, *, strategy: str, inference: bool) -> torch.Tensor:
    """Return parameters that a forward without gradients returned, after other memory of their size was written to."""
    model = lab.wrap(Both(), strategy=strategy)
    with torch.inference_mode() if inference else torch.no_grad():
        returned = model(torch.ones(5, 3))[1]
    _others = [torch.zeros(numel) for numel in range(1, 64)]
    return returned.clone()


class Full(nn.Module):
    """Model that passes float32 inputs to a unit, whose forward may be checkpointed."""

    def __init__(self, computed_again: bool) -> None:
        super().__init__()
        self.first, self.unit = nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
        self.computed_again = computed_again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).float()
        return checkpoint(self.unit, x, use_reentrant=False) if self.computed_again else self.unit(x)


def computed_again_in_low_precision(lab: Lab, *, around: str) -> list[dict[str, torch.Tensor]]:
    """Return the gradients without and with activation checkpointing, around a `unit` or the `root`."""
    precision = lab.api.MixedPrecision(param_dtype=torch.bfloat16, cast_forward_inputs=True)

    def gradients(computed_again: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(5)
        plain = Full(computed_again and around == "unit")
        model = lab.wrap(plain, units=[nn.Sequential], mixed_precision=precision)
        x = torch.linspace(-1, 1, 15).view(5, 3).requires_grad_()
        is_around_root = computed_again and around == "root"
        output = checkpoint(model, x, use_reentrant=False) if is_around_root else model(x)
        output.float().square().mean().backward()
        return gathered_gradients(lab.library, model)

    return [gradients(False), gradients(True)]


def mapped(lab: Lab, *, use_orig_params: bool) -> torch.Tensor:
    """Return the output of torch.vmap for a model that was never called before."""
    plain = filled(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)))
    model = lab.wrap(plain, use_orig_params=use_orig_params)
    return torch.vmap(model)(torch.linspace(-1, 1, 12).view(2, 2, 3)).detach()


class Doubling(nn.Linear):
    """Linear layer that changes its own weight in forward."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.mul_(2)
        return super().forward(input)


def weight_changed_in_forward(lab: Lab) -> torch.Tensor:
    """Return the full weight after a forward that changed it. The weight began with ones."""
    plain = Doubling(3, 4)
    nn.init.ones_(plain.weight)
    model = lab.wrap(plain)
    model(torch.ones(1, 3)).sum().backward()
    with lab.fsdp.summon_full_params(model):
        return model.module.weight.detach().clone()


def tied_in_two_units(lab: Lab) -> int:
    """Return the number of parameters to step if two explicitly wrapped units share one."""
    first, second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    second.weight = first.weight
    return len(list(lab.wrap(nn.Sequential(lab.wrap(first), lab.wrap(second))).parameters()))


def copied(lab: Lab, *, use_orig_params: bool) -> str:
    """Return the type of a deep copy of a model with an inner unit."""
    inner = lab.wrap(nn.Linear(4, 2), use_orig_params=use_orig_params)
    model = lab.wrap(nn.Sequential(nn.Linear(3, 4), inner), use_orig_params=use_orig_params)
    return type(copy.deepcopy(model)).__name__


def tied_on_meta(lab: Lab, *, across: bool, by: str) -> tuple[int, float]:
    """Wrap tied weights on the meta device, in one unit or `across` two.

    Return the number of parameters and the sum of their absolute gradients.
    """
    with torch.device("meta"):
        plain = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4, bias=False)))
    plain[1][0].weight = plain[0].weight

    def fill(module: nn.Module) -> None:
        module.to_empty(device="cpu", recurse=by == "recursive function")
        for parameter in module.parameters(recurse=by == "recursive function"):
            nn.init.ones_(parameter)

    arguments = {} if by == "reset" else {"param_init_fn": fill}
    model = lab.wrap(plain, use_orig_params=True, units=[nn.Sequential] if across else [], **arguments)
    model(torch.ones(2, 4)).sum().backward()
    with lab.fsdp.summon_full_params(model, with_grads=True):
        parameters = list(model.parameters())
        return len(parameters), sum(float(parameter.grad.abs().sum()) for parameter in parameters)


def clipped_with_an_inf(lab: Lab) -> torch.Tensor:
    """Clip with `error_if_nonfinite` while one rank's gradients contain an inf."""
    model = lab.wrap(built("plain"))
    accumulated(model, lab.rank.rank)
    if lab.rank.rank == 0:
        next(model.parameters()).grad[0] = torch.inf
    return model.clip_grad_norm_(0.5, error_if_nonfinite=True, foreach=False)
