"""Detection of optimizer steps by the version counters of the parameters that they write to.

torch's fused updates do not increment these counters. Neither do its foreach updates for DTensors, nor other kernels
that get addresses. A unit that is still unsharded would then take its shard for unchanged, and compute with the
previous parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, MutableMapping
from weakref import WeakKeyDictionary, WeakMethod, WeakValueDictionary

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from impl.optim._optimizers import params_of
from impl.optim._step_checks import register_after_step, register_step_check

_tracked: WeakValueDictionary[int, Tensor] = WeakValueDictionary()  # tracked parameters by id
# For each tracked parameter a weak method that returns whether any rank has gradients.
_have_gradients: MutableMapping[Tensor, WeakMethod[Callable[[], bool]]] = WeakIdKeyDictionary()
# The ids of the DTensors that had gradients before the running step of each optimizer.
_had_gradients: WeakKeyDictionary[Optimizer, set[int]] = WeakKeyDictionary()


def track_optimizer_writes(parameters: Iterable[Tensor], have_gradients: Callable[[], bool]) -> None:
    """Make optimizer steps increment the version counters of these parameters, and of DTensors, if they write to them.

    DTensors are not listed here. `Module.to` swaps them, which torch refuses if a weak reference to one exists.

    Args:
        parameters: flat parameters, or views of them.
        have_gradients: a method, referenced weakly. It returns whether any rank has gradients of these parameters.
    """
    _hook_steps()
    method = WeakMethod(have_gradients)
    for parameter in parameters:
        _tracked[id(parameter)] = parameter
        _have_gradients[parameter] = method


@functools.cache
def _hook_steps() -> None:
    # Called by eager steps only. Compiled steps increment the counters themselves.
    register_step_check(_before_step)
    register_after_step(_after_step)


def _before_step(optimizer: Optimizer) -> None:
    _had_gradients[optimizer] = {
        id(param) for param in params_of(optimizer) if isinstance(param, DTensor) and param.grad is not None
    }


def _after_step(optimizer: Optimizer) -> None:
    stepped = params_of(optimizer)
    tracked = [parameter for parameter in stepped if _tracked.get(id(parameter)) is parameter]
    # No gradient is left if a hook of the optimizer has cleared all of them.
    answers: dict[int, bool] = {}
    written = [parameter for parameter in tracked if _is_written(parameter, answers)] or tracked
    had_gradients = _had_gradients.pop(optimizer, set())
    # The optimizer or its hooks may have cleared gradients, and a closure may have computed them.
    written += [
        param
        for param in stepped
        if isinstance(param, DTensor) and (param.grad is not None or id(param) in had_gradients)
    ]
    torch.autograd.graph.increment_version(written)


def _is_written(parameter: Tensor, answers: dict[int, bool]) -> bool:
    """Return whether a step on any rank writes to the parameter. Ranks without elements of it must notice too.

    Args:
        parameter: a tracked parameter.
        answers: of each method that was asked for this step, by id, because it reads all parameters of its unit.
    """
    if parameter.grad is not None or parameter.numel() > 0:
        return parameter.grad is not None
    method = _have_gradients[parameter]
    if id(method) not in answers:
        have_gradients = method()
        answers[id(method)] = have_gradients is not None and have_gradients()
    return answers[id(method)]
