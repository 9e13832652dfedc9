"""Optimizers that a caller passes: checks, and their parameters."""

from typing import Any

from torch.optim import Optimizer


def check_is_optimizer(optimizer: object) -> None:
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"expected an instance of torch.optim.Optimizer, got {_describe(optimizer)}; pass the optimizer that it "
            "makes or holds"
        )


def check_has_param_groups(optimizer: object) -> None:
    """Raise TypeError if the object has no `param_groups`, which torch reports as an AttributeError."""
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(
            f"expected an optimizer, which has param_groups, got {_describe(optimizer)}; pass the one to be stepped"
        )


def optimizers_in(argument: object) -> list[Any]:
    """Return the optimizers of a list or tuple, or an optimizer alone in a list.

    Raises:
        TypeError: an object has no `param_groups`.
    """
    optimizers = list(argument) if isinstance(argument, (list, tuple)) else [argument]
    for optimizer in optimizers:
        check_has_param_groups(optimizer)
    return optimizers


def params_of(*optimizers: Optimizer) -> list[Any]:
    """Return the parameters of all groups of all optimizers, in order."""
    return [
        param for optimizer in optimizers for group in optimizer.param_groups for param in group["params"]
    ]


def _describe(argument: object) -> str:
    return f"the class {argument.__name__}" if isinstance(argument, type) else type(argument).__name__
