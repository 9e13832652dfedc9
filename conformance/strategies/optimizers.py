"""Optimizers to compile: those of `torch.optim` with their options, and some user-defined ones."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch

from conformance.judge.sandbox import seeding
from conformance.judge.tolerances import Tolerance

Make = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]

CLASSES: dict[str, type[torch.optim.Optimizer]] = {
    name: value
    for name, value in sorted(vars(torch.optim).items())
    if inspect.isclass(value)
    and issubclass(value, torch.optim.Optimizer)
    and value is not torch.optim.Optimizer
}
# Dynamo does not trace the steps of these classes.
UNCOMPILED = ("LBFGS", "SparseAdam")
COMPILED = [name for name in CLASSES if name not in UNCOMPILED]

# Non-default values that take effect in a few steps, for every option of every optimizer.
_VALUES: dict[str, Any] = {
    "weight_decay": 0.1,
    "maximize": True,
    "amsgrad": True,
    "momentum": 0.9,
    "dampening": 0.0,
    "nesterov": True,
    "centered": True,
    "decoupled_weight_decay": True,
    "momentum_decay": 0.01,
    "lr_decay": 0.1,
    "initial_accumulator_value": 0.5,
    "betas": (0.8, 0.95),
    "etas": (0.4, 1.3),
    "step_sizes": (1e-5, 10),
    "eps": 1e-6,
    "rho": 0.8,
    "alpha": 0.9,
    "lambd": 1e-3,
    "t0": 2.0,
    "d": 1.1,
    "beta2_decay": -0.7,
    "ns_steps": 3,
    "ns_coefficients": (3.0, -4.0, 2.0),
    "adjust_lr_fn": "match_rms_adamw",
}
_OWN_VALUES = {("Adafactor", "eps"): (1e-6, 1e-3), ("Adadelta", "eps"): 1e-4}
# Options that select how a step is computed. torch rejects some combinations.
_WAYS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "foreach": {"foreach": True},
    "capturable": {"capturable": True, "foreach": True},
    "tensor lr": {"capturable": True, "lr": torch.tensor(0.05)},
    "differentiable": {"differentiable": True},
    "fused": {"fused": True},
}
WAYS = list(_WAYS)
# Arguments that are neither values nor modes.
_GIVEN = ("params", "lr")


def options_of(name: str) -> list[str]:
    return [
        option
        for option in inspect.signature(CLASSES[name]).parameters
        if option not in _GIVEN and option in _VALUES
    ]


def unknown_options() -> list[str]:
    """Return the options of `torch.optim` that no value above covers."""
    known = {*_GIVEN, *_VALUES, *(option for way in _WAYS.values() for option in way)}
    return [
        f"{name}({option})"
        for name in COMPILED
        for option in inspect.signature(CLASSES[name]).parameters
        if option not in known
    ]


def has_way(name: str, way: str) -> bool:
    return _WAYS[way].keys() <= {*inspect.signature(CLASSES[name]).parameters}


def is_compiled(name: str, way: str = "defaults") -> bool:
    """Return whether Dynamo compiles anything of the optimizer's step. It skips Adafactor's and fused updates."""
    return name != "Adafactor" and way != "fused"


def _values_of(name: str, options: Iterable[str]) -> dict[str, Any]:
    return {option: _OWN_VALUES.get((name, option), _VALUES[option]) for option in options}


def maker(name: str, way: str = "defaults", options: Iterable[str] = (), **more: Any) -> Make:
    """Return a function that makes the optimizer, with non-default values for `options`."""
    values = _values_of(name, options)
    # Clone tensors, because a learning-rate tensor belongs to one optimizer.
    chosen = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in _WAYS[way].items()}
    lr = {} if "lr" in chosen or name in ("Adadelta", "Rprop") else {"lr": 0.05}
    return lambda parameters: CLASSES[name](parameters, **lr, **values, **chosen, **more)


# Options that only have an effect together with others.
_TOGETHER = {"nesterov": {"momentum": 0.9}, "dampening": {"momentum": 0.9, "dampening": 0.3}}
_DECAY = "weight_decay"


def option_groups(name: str) -> list[dict[str, Any]]:
    """Return groups of options: none, each on its own, each together with weight decay, and all."""
    values = _values_of(name, options_of(name))
    decay = {_DECAY: values[_DECAY]} if _DECAY in values else {}
    alone = [{option: value} | _TOGETHER.get(option, {}) for option, value in values.items()]
    decayed = [chosen | decay for chosen in alone if decay and _DECAY not in chosen]
    return [{}, *alone, *decayed, values]


def decay_cases() -> list[tuple[str, dict[str, Any]]]:
    """Return each compiled optimizer that has weight decay with it, and with decoupled weight decay as well."""
    decay = {_DECAY: _VALUES[_DECAY]}
    coupled = [(name, decay) for name in COMPILED if _DECAY in options_of(name)]
    decoupled = decay | {"decoupled_weight_decay": True}
    return coupled + [(name, decoupled) for name, _ in coupled if decoupled.keys() <= {*options_of(name)}]


def four_parameters(device: str = "cpu") -> list[torch.nn.Parameter]:
    draw = seeding.generator(100)
    return [torch.nn.Parameter(torch.randn(3, 2 + index, generator=draw).to(device)) for index in range(4)]


def draw_gradient(parameter: torch.Tensor, number: int) -> torch.Tensor:
    drawn = torch.randn(parameter.shape, generator=seeding.generator(number))
    return drawn.to(parameter.device, parameter.dtype)


def against_eager(name: str) -> Tolerance:
    """Return the tolerance for comparing compiled with eager steps.

    A compiled step count is a tensor, so its powers and quotients are rounded in float32 instead of float64.
    """
    if name == "Muon":
        return Tolerance(
            8,
            "an update orthogonalised in bfloat16, of learning rate 0.05, a few times",
            torch.bfloat16,
            terms=0.05,
        )
    return Tolerance(
        64, "five updates of terms near 1, each of a dozen roundings, with step counts in float32", terms=1.0
    )
