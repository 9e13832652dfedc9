"""Optimizers that divide their gradients by the scale and skip steps themselves."""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
from collections.abc import Callable, Generator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from impl.amp._opt_state import FoundInf
from impl.kernels import to_device

_known_to_take_scaler: WeakKeyDictionary[Callable[..., Any], bool] = WeakKeyDictionary()


def takes_scaler(step: Callable[..., Any]) -> bool:
    """Return whether `step` has a parameter `grad_scaler`, as torch's fused optimizers once had."""
    function = getattr(step, "__func__", step)
    try:
        return _known_to_take_scaler[function]
    except (KeyError, TypeError):  # TypeError: a callable without weak references
        takes = "grad_scaler" in inspect.signature(step).parameters
    with contextlib.suppress(TypeError):
        _known_to_take_scaler[function] = takes
    return takes


def warn_of_scaler_as_argument(stacklevel: int) -> None:
    """Warn the caller of a scaler's `step` with torch's text."""
    warnings.warn(
        "GradScaler is going to stop passing itself as a keyword argument to the passed "
        "optimizer. In the near future GradScaler registers `grad_scale: Tensor` and "
        "`found_inf: Tensor` to the passed optimizer and let the optimizer use them directly.",
        FutureWarning,
        stacklevel=stacklevel + 1,
    )


@contextlib.contextmanager
def amp_attributes(
    optimizer: torch.optim.Optimizer,
    scale: Tensor | None,
    global_found_inf: FoundInf,
    local_found_inf: FoundInf,
    device: torch.device,
) -> Generator[None]:
    """Context manager that sets `optimizer.grad_scale` and `optimizer.found_inf`. An error restores earlier values.

    Args:
        optimizer: may have a `grad_scale` already, if the user multiplied the gradients by it.
        scale: scale of the gradients, or None if they are unscaled already.
        global_found_inf: flags that decide. They combine to at most 1.0, because fused kernels only skip at that value.
        local_found_inf: its keys are the devices of this process's gradients.
        device: device of the attributes. If gradients are on the host, the attributes are too, because torch's fused
            updates copy without blocking.
    """
    previous = {name: value for name, value in vars(optimizer).items() if name in ("grad_scale", "found_inf")}
    device = next((device for device in local_found_inf if device.type == "cpu"), device)
    flags = [to_device(flag, device) for flag in global_found_inf.values()]
    attributes: Any = optimizer
    if scale is None:
        attributes.grad_scale = getattr(optimizer, "grad_scale", None)
    else:
        attributes.grad_scale = to_device(scale * getattr(optimizer, "grad_scale", 1), device)
    attributes.found_inf = functools.reduce(torch.maximum, flags) if flags else 0
    try:
        yield
    except BaseException:
        for name in ("grad_scale", "found_inf"):
            vars(optimizer).pop(name, None)
        vars(optimizer).update(previous)
        raise
    del attributes.grad_scale, attributes.found_inf
