"""Checks that an argument is an optimizer, and names in messages."""

from collections.abc import Sequence
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


def optimizer_name(cls: type[Optimizer]) -> str:
    """Return the class name, with its module unless the class is torch's."""
    is_torchs = f"{cls.__module__}.".startswith("torch.optim.")
    return cls.__name__ if is_torchs else f"{cls.__module__}.{cls.__qualname__}"


def describe_names(names: Sequence[str], most: int = 4) -> str:
    """Return the first `most` names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


def _describe(argument: object) -> str:
    return f"the class {argument.__name__}" if isinstance(argument, type) else type(argument).__name__
