"""torch's own names at torch's paths: what the subjects in this folder are made of, each wrong in one way."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import amp, cpu, cuda

__all__ = ["after", "amp", "clamping_after", "clipping", "cpu", "cuda"]

_NAMES = (
    "clip_grad_norm",
    "clip_grad_norm_",
    "clip_grad_value_",
    "clip_grads_with_norm_",
    "get_total_norm",
)


def clipping(**instead: Any) -> SimpleNamespace:
    """`nn` with torch's clipping functions but for those given."""
    return SimpleNamespace(
        utils=SimpleNamespace(**{name: getattr(torch.nn.utils, name) for name in _NAMES} | instead)
    )


def after(act: Callable[[], object], function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, but something else is done first."""

    @functools.wraps(function)
    def acting(*args: Any, **kwargs: Any) -> Any:
        act()
        return function(*args, **kwargs)

    return acting


def clamping_after(act: Callable[[], object]) -> SimpleNamespace:
    """`nn` with a `clip_grad_value_` that does something else first."""
    return clipping(clip_grad_value_=after(act, torch.nn.utils.clip_grad_value_))
