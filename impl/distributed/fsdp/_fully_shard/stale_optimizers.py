"""Steps of optimizers that were made before `fully_shard`: their parameters are no longer in the model."""

from __future__ import annotations

import functools
from typing import Any
from weakref import WeakKeyDictionary

from torch.optim.optimizer import Optimizer

from impl.distributed.fsdp._layout.sharded_param import sharded_as
from impl.kernels import dynamo_disable
from impl.optim._step_checks import register_step_check

_NAMED = 4


class _Check:
    """Check of each optimizer's first step after a call of fully_shard."""

    def __init__(self) -> None:
        self._calls = 0
        self._calls_before: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()

    def note_call(self) -> None:
        _hook_steps()
        self._calls += 1

    @dynamo_disable
    def before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        del args, kwargs
        if self._calls_before.get(optimizer) == self._calls:
            return
        params = [param for group in optimizer.param_groups for param in group["params"]]
        idle = [param for param in params if param.requires_grad and param.grad is None]
        names = [sharded.name for param in idle if (sharded := sharded_as(param)) is not None]
        if names:
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            raise RuntimeError(
                f"the optimizer steps {', '.join(names[:_NAMED])}{more} as they were before fully_shard, which get no "
                "gradients any more; make the optimizer of model.parameters() after fully_shard"
            )
        self._calls_before[optimizer] = self._calls


_check = _Check()


@functools.cache
def _hook_steps() -> None:
    register_step_check(_check.before_step)


def note_sharding() -> None:
    """Check the next step of every optimizer, because it may have been made before this call of fully_shard."""
    _check.note_call()
