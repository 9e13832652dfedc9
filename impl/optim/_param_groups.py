"""Parameters in the groups of optimizers."""

from typing import Any

from torch.optim import Optimizer


def params_of(*optimizers: Optimizer) -> list[Any]:
    """Return the parameters of all groups of all optimizers, in order."""
    return [
        param for optimizer in optimizers for group in optimizer.param_groups for param in group["params"]
    ]
