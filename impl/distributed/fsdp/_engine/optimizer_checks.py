"""Checks that refuse steps of unsharded parameters or states. Clipping gets the sharded parameters instead."""

from __future__ import annotations

from weakref import WeakSet

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from impl._names import describe_names
from impl.distributed.fsdp._layout.sharded_param import name_of_sharded, sharded_param_of
from impl.distributed.fsdp._params.param_registration import owner_of_replaced
from impl.optim._optimizers import params_of
from impl.optim._shards import register_sharded_parameters
from impl.optim._step_checks import register_step_check

_checked: WeakSet[Optimizer] = WeakSet()  # optimizers that stepped since parameters were sharded


def note_sharding() -> None:
    """Check the next step of every optimizer, because it may have been made before the parameters were sharded."""
    register_step_check(_check_params)
    register_step_check(_check_states)
    register_sharded_parameters(_sharded_parameter)
    _checked.clear()


def _sharded_parameter(parameter: Tensor) -> Tensor | None:
    owner = sharded_param_of(parameter)
    return None if owner is None else owner.sharded


def _check_params(optimizer: Optimizer) -> None:
    """Check that the optimizer's parameters are not the original or the unsharded ones of a sharded model.

    Such parameters with gradients are those of another module, which is not sharded.
    """
    if optimizer in _checked:
        return
    params = [param for param in params_of(optimizer) if param.requires_grad]
    replaced = [(param, owned[0]) for param in params if (owned := owner_of_replaced(param)) is not None]
    if replaced and all(param.grad is None for param, _ in replaced):
        raise RuntimeError(
            f"the optimizer steps {describe_names([name for _, name in replaced])} as they were before sharding or "
            "while they are unsharded, and such parameters get no gradients; make the optimizer of "
            "model.parameters() after fully_shard or FullyShardedDataParallel, and not between a forward and its "
            "backward"
        )
    _checked.add(optimizer)


def _check_states(optimizer: Optimizer) -> None:
    """Check that the states of sharded parameters are sharded, before a step changes some of them.

    A load replaces all states of a group, so only its first DTensor with a state is checked. DTensors that no unit
    manages may have any states.

    Raises:
        RuntimeError: the states of a group are unsharded.
    """
    for group in optimizer.param_groups:
        dtensors = (param for param in group["params"] if isinstance(param, DTensor))
        first = next((param for param in dtensors if optimizer.state.get(param)), None)
        states = [] if first is None else _unsharded_states(optimizer, first)
        if not states or not _steps_like_torch(optimizer):
            continue
        unsharded = [param for param in group["params"] if _unsharded_states(optimizer, param)]
        names = [name for param in unsharded if (name := name_of_sharded(param)) is not None]
        if not names:
            continue
        raise RuntimeError(
            f"the optimizer has unsharded states ({describe_names(states)}) of the sharded parameters "
            f"{describe_names(names)}, and has not stepped. Load them by torch.distributed.checkpoint."
            "state_dict.set_optimizer_state_dict(model, optimizer, states, options=StateDictOptions("
            "full_state_dict=True)). FullyShardedDataParallel.rekey_optim_state_dict(states, "
            "OptimStateKeyType.PARAM_NAME, model) gives optimizer.state_dict() the names that this needs"
        )


def _unsharded_states(optimizer: Optimizer, param: Tensor) -> list[str]:
    if not isinstance(param, DTensor):
        return []
    return [
        key
        for key, value in optimizer.state.get(param, {}).items()
        if isinstance(value, Tensor) and not isinstance(value, DTensor) and value.shape == param.shape
    ]


def _steps_like_torch(optimizer: Optimizer) -> bool:
    """Return whether the step is that of a torch optimizer. Others may use unsharded states on purpose."""
    return type(optimizer).step.__module__.startswith("torch.optim.")
