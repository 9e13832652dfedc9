"""The implementation (fused, foreach or single) of an optimizer, and the change to another one."""

from __future__ import annotations

import inspect
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _default_to_fused_or_foreach, _get_scalar_dtype

from impl._names import optimizer_name

Implementation = Literal["fused", "foreach", "single"]

# Constructor arguments of each implementation.
_FLAGS: dict[str, dict[str, bool | None]] = {
    "fused": {"foreach": None, "fused": True},
    "foreach": {"foreach": True, "fused": None},
    "single": {"foreach": False, "fused": None},
}
# Attribute of optimizers that unscale their gradients themselves, like fused ones. Scalers read it.
_MARK = "_step_supports_amp_scaling"


def implementation_of(optimizer: Optimizer) -> str:
    """Return the implementation of the groups. If they differ, list each once, in the order of the groups."""
    return ", ".join(dict.fromkeys(map(_of_group, optimizer.param_groups)))


def _of_group(group: dict[str, Any]) -> Implementation:
    if group.get("fused"):
        return "fused"
    if group.get("foreach") is not None or group.get("fused") is not None or "foreach" not in group:
        return "foreach" if group.get("foreach") else "single"
    _, foreach = _default_to_fused_or_foreach(group["params"], group.get("differentiable", False))
    lr_stays_on_device = isinstance(group["lr"], Tensor) and not group.get("capturable", True)
    return "foreach" if foreach and not lr_stays_on_device else "single"


def choose(optimizer: Optimizer, implementation: str) -> None:
    """Change the optimizer as if built with `implementation`. If this raises, nothing is changed."""
    flags = _flags_for(optimizer, implementation)
    examples = [_built_with(optimizer, group, flags) for group in optimizer.param_groups]
    for owner in (optimizer.defaults, *optimizer.param_groups):
        owner.update(flags)
    vars(optimizer).pop(_MARK, None)
    if hasattr(examples[0], _MARK):
        setattr(optimizer, _MARK, getattr(examples[0], _MARK))
    for group in optimizer.param_groups:
        for param in group["params"]:
            _place_counter(optimizer.state.get(param, {}), param, group)


def _flags_for(optimizer: Optimizer, implementation: str) -> dict[str, bool | None]:
    if implementation not in _FLAGS:
        raise ValueError(
            f"implementation is {implementation!r}; expected one of {list(get_args(Implementation))}"
        )
    known = inspect.signature(type(optimizer)).parameters
    flags = {name: value for name, value in _FLAGS[implementation].items() if name in known}
    if implementation not in ("single", *flags):
        raise ValueError(
            f"{optimizer_name(type(optimizer))} has no {implementation} implementation; leave the argument out to "
            f"capture the {implementation_of(optimizer)} one"
        )
    return flags


def _built_with(optimizer: Optimizer, group: dict[str, Any], flags: dict[str, bool | None]) -> Optimizer:
    """Build an optimizer of the same class with one group's values and these flags, so that its checks run."""
    cls: Any = type(optimizer)
    known = inspect.signature(cls).parameters
    arguments = {name: value for name, value in group.items() if name in known and name != "params"}
    return cls([torch.zeros(1, 1, device="cpu")], **{**arguments, **flags})


def _place_counter(state: dict[str, Any], param: Tensor, group: dict[str, Any]) -> None:
    """Move a step counter to the device and dtype of the group's implementation."""
    step = state.get("step")
    if isinstance(step, Tensor):
        on_device = group.get("fused") or group.get("capturable")
        dtype = _get_scalar_dtype(is_fused=group.get("fused"))
        state["step"] = step.to(dtype=dtype, device=param.device if on_device else "cpu")
