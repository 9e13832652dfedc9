"""Checks before every optimizer step, and calls after it, which leave fused and compiled steps as they are.

A check neither reads nor changes gradients, so fused updates stay possible. Dynamo traces the hooks of a compiled step,
so no hook here calls something that would break the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.compiler import is_dynamo_compiling
from torch.optim.optimizer import (
    Optimizer,
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

_checks: set[Callable[[Optimizer], None]] = set()
_hooks: set[Callable[..., Any]] = set()  # global pre-hooks that leave fused updates possible


class CheckingHook:
    """Pre-hook of every optimizer's step that neither reads nor changes gradients, and acts only while it is on.

    Dynamo traces the call, but a hook that is on breaks the graph if Dynamo does not trace `hook`.
    """

    def __init__(self, hook: Callable[..., Any]) -> None:
        self.is_on = False
        self._hook = hook

    def register(self) -> None:
        """Run before the steps of all optimizers from now on."""
        _register(self)

    def __call__(self, optimizer: Optimizer, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
        return self._hook(optimizer, args, kwargs) if self.is_on else None


def register_step_check(check: Callable[[Optimizer], None]) -> None:
    """Call `check` before each eager step of every optimizer. Do nothing if it is registered.

    Args:
        check: may raise. It must not read or change gradients.
    """
    if check not in _checks:
        _checks.add(check)
        _register(_eager_hook(check))


def register_after_step(callback: Callable[[Optimizer], None]) -> None:
    """Call `callback` after each eager step of every optimizer, for the rest of the process. Call this once."""
    register_optimizer_step_post_hook(_eager_hook(callback))


def _eager_hook(callback: Callable[[Optimizer], None]) -> Callable[..., None]:
    def hook(optimizer: Optimizer, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        del args, kwargs
        # `is_compiling` is also true while another thread exports a module.
        if not is_dynamo_compiling():
            callback(optimizer)

    return hook


def _register(hook: Callable[..., Any]) -> None:
    if hook not in _hooks:
        _hooks.add(hook)
        register_optimizer_step_pre_hook(hook)


def check_step(optimizer: Optimizer) -> None:
    """Run all registered checks, for a caller that raises before it calls the optimizer's step."""
    for check in _checks:
        check(optimizer)


def has_step_pre_hooks(optimizer: Optimizer) -> bool:
    """Return whether hooks other than checks run before the optimizer's step."""
    hooks = {*optimizer._optimizer_step_pre_hooks.values(), *_global_optimizer_pre_hooks.values()}
    return not hooks.issubset(_hooks)


def call_between_hooks(optimizer: Optimizer, update: Callable[[], None]) -> None:
    """Call `update` after the pre-hooks of the optimizer's step, which are checks, and before its post-hooks."""
    args = (optimizer,)  # arguments of the function `step`
    for hook in (*_global_optimizer_pre_hooks.values(), *optimizer._optimizer_step_pre_hooks.values()):
        hook(optimizer, args, {})
    update()
    for hook in (*optimizer._optimizer_step_post_hooks.values(), *_global_optimizer_post_hooks.values()):
        hook(optimizer, args, {})
