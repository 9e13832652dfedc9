"""Checks before every optimizer step, which neither read nor change gradients, so that fused updates stay possible."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import (
    Optimizer,
    _global_optimizer_pre_hooks,
    register_optimizer_step_pre_hook,
)

StepCheck = Callable[[Optimizer, tuple[Any, ...], dict[str, Any]], None]
_checks: set[StepCheck] = set()


def register_step_check(check: StepCheck) -> None:
    """Call `check` before each step of every optimizer. It may raise, and must not read or change gradients.

    Compiled steps are not checked.
    """

    def check_unless_compiling(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # A call of `check` would break the graph before the step, and Dynamo would not see an optimizer's step.
        if not torch.compiler.is_compiling():
            check(optimizer, args, kwargs)

    _checks.add(check_unless_compiling)
    register_optimizer_step_pre_hook(check_unless_compiling)


def has_step_pre_hooks(optimizer: Optimizer) -> bool:
    """Return whether hooks other than checks run before the optimizer's step."""
    hooks = {*optimizer._optimizer_step_pre_hooks.values(), *_global_optimizer_pre_hooks.values()}
    return not hooks <= _checks
