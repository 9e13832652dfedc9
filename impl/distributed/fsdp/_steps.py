"""Steps of optimizers, told by the version counters of what they write to.

torch's fused updates do not move those counters, nor do kernels of others that are handed addresses. A unit that is
still whole would take its shard for unchanged then, and compute with parameters that are one step old.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

_watched: WeakValueDictionary[int, Tensor] = WeakValueDictionary()  # by id


def watch(parameters: Iterable[Tensor]) -> None:
    """From here on a step of any optimizer that has these moves their version counters, however it writes."""
    _hook_steps()
    _watched.update((id(parameter), parameter) for parameter in parameters)


@functools.cache
def _hook_steps() -> None:
    register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    del args, kwargs
    if torch.compiler.is_compiling():  # a graph moves the counters of what it writes to
        return
    stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    written = [parameter for parameter in stepped if _watched.get(id(parameter)) is parameter]
    torch.autograd.graph.increment_version(written)
