"""Steps of optimizers, told by the version counters of what they write to.

torch's fused updates do not move those counters, nor do its foreach ones those of DTensors, nor kernels of others that
are handed addresses. A unit that is still unsharded would take its shard for unchanged then, and compute with the
parameters of a step ago.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakMethod, WeakValueDictionary

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

_tracked: WeakValueDictionary[int, Tensor] = WeakValueDictionary()  # by id
_have_gradients: Any = WeakIdKeyDictionary()  # of each that is tracked, weakly, what tells of all ranks


def track_optimizer_writes(parameters: Iterable[Tensor], have_gradients: Callable[[], bool]) -> None:
    """From here on a step of any optimizer moves the version counters of those it writes to, and of DTensors.

    A reference to a DTensor, even a weak one, would keep its module from being moved, so these are not noted.

    Args:
        have_gradients: a method, held weakly: whether, on some rank, there are any of what these are sharded with.
    """
    _hook_steps()
    for parameter in parameters:
        _tracked[id(parameter)] = parameter
        _have_gradients[parameter] = WeakMethod(have_gradients)


@functools.cache
def _hook_steps() -> None:
    register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    del args, kwargs
    if torch.compiler.is_compiling():  # a graph moves the counters of what it writes to
        return
    stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    ours = [parameter for parameter in stepped if _tracked.get(id(parameter)) is parameter]
    # None is left where a hook of the optimizer's own has cleared them all.
    written = [parameter for parameter in ours if _is_written(parameter)] or ours
    written += [one for one in stepped if isinstance(one, DTensor) and one.grad is not None]
    torch.autograd.graph.increment_version(written)


def _is_written(parameter: Tensor) -> bool:
    """By a step, on any rank: all of them have to see one, also those that have no element of the parameter."""
    if parameter.grad is not None or parameter.numel() > 0:
        return parameter.grad is not None
    have_gradients = _have_gradients[parameter]()
    return have_gradients is not None and have_gradients()
