"""Steps of optimizers that were created before `fully_shard`: their parameters are no longer in the model."""

from __future__ import annotations

from weakref import WeakSet

from torch.optim.optimizer import Optimizer

from impl.distributed.fsdp._layout.sharded_param import sharded_param_of
from impl.distributed.fsdp._params.param_group import describe_names
from impl.optim._step_checks import register_step_check

_checked: WeakSet[Optimizer] = WeakSet()  # optimizers that stepped since the last call of fully_shard


def note_sharding() -> None:
    """Check the next step of every optimizer, because it may have been made before this call of fully_shard."""
    register_step_check(_check_step)
    _checked.clear()


def _check_step(optimizer: Optimizer) -> None:
    if optimizer in _checked:
        return
    params = [param for group in optimizer.param_groups for param in group["params"]]
    idle = [param for param in params if param.requires_grad and param.grad is None]
    names = [sharded.name for param in idle if (sharded := sharded_param_of(param)) is not None]
    if names:
        raise RuntimeError(
            f"the optimizer steps {describe_names(names)} as they were before fully_shard, which get no "
            "gradients any more; make the optimizer of model.parameters() after fully_shard"
        )
    _checked.add(optimizer)
