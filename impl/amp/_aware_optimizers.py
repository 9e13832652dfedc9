"""Optimizers that divide their gradients by the scale, and skip a step, themselves."""

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

from impl.amp._opt_state import Found
from impl.kernels import placed

_known_to_take_scaler: WeakKeyDictionary[Callable[..., Any], bool] = WeakKeyDictionary()


def takes_scaler(step: Callable[..., Any]) -> bool:
    """Whether `step` has a parameter `grad_scaler`, as torch's fused optimizers once had."""
    function = getattr(step, "__func__", step)
    try:
        return _known_to_take_scaler[function]
    except (KeyError, TypeError):  # not seen yet; or a callable that has no weak references
        takes = "grad_scaler" in inspect.signature(step).parameters
    with contextlib.suppress(TypeError):
        _known_to_take_scaler[function] = takes
    return takes


def warn_of_scaler_as_argument(stacklevel: int) -> None:
    """Tell the caller of a scaler's `step`, as torch does."""
    warnings.warn(
        "GradScaler is going to stop passing itself as a keyword argument to the passed "
        "optimizer. In the near future GradScaler registers `grad_scale: Tensor` and "
        "`found_inf: Tensor` to the passed optimizer and let the optimizer use them directly.",
        FutureWarning,
        stacklevel=stacklevel + 1,
    )


@contextlib.contextmanager
def amp_attributes(
    optimizer: torch.optim.Optimizer, scale: Tensor | None, found: Found, here: Found, home: torch.device
) -> Generator[None]:
    """The optimizer finds `grad_scale` and `found_inf` in its attributes; after an error what was there is back.

    Args:
        optimizer: may come with a `grad_scale` of its own: whoever set it has multiplied the gradients by it.
        scale: of the gradients; None if they are unscaled already.
        found: by the check; 1.0 counts once however many find one, since fused kernels skip at that value alone.
        here: has the devices of this process's gradients.
        home: where the attributes lie; but on the host if gradients do, since torch's fused updates copy without
            blocking.
    """
    before = {name: value for name, value in vars(optimizer).items() if name in ("grad_scale", "found_inf")}
    home = next((device for device in here if device.type == "cpu"), home)
    flags = [placed(flag, home) for flag in found.values()]
    attributes: Any = optimizer
    if scale is None:
        attributes.grad_scale = getattr(optimizer, "grad_scale", None)
    else:
        attributes.grad_scale = placed(scale * getattr(optimizer, "grad_scale", 1), home)
    attributes.found_inf = functools.reduce(torch.maximum, flags) if flags else 0
    try:
        yield
    except BaseException:
        for name in ("grad_scale", "found_inf"):
            vars(optimizer).pop(name, None)
        vars(optimizer).update(before)
        raise
    del attributes.grad_scale, attributes.found_inf
