"""Deprecated spellings of `impl.amp.autocast_mode` for CUDA, like torch's."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

import impl.amp.autocast_mode as amp

__all__ = ["autocast", "custom_bwd", "custom_fwd"]


class autocast(amp.autocast):
    """`impl.amp.autocast("cuda", ...)` with fixed defaults, independent of `torch.get_autocast_dtype`.

    Warns: FutureWarning. Sync: none.
    Source: torch.cuda.amp.autocast 2.13; differences: those of `impl.amp.autocast`; a subclass warns at its first
        instance, not at its definition.

    >>> import warnings
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("ignore")
    ...     autocast(enabled=False).device
    'cuda'
    """

    def __init__(
        self, enabled: bool = True, dtype: torch.dtype = torch.float16, cache_enabled: bool = True
    ) -> None:
        _warn("`torch.cuda.amp.autocast(args...)`", "`torch.amp.autocast('cuda', args...)`")
        super().__init__("cuda", dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)


def custom_fwd(fwd: Callable[..., Any] | None = None, *, cast_inputs: torch.dtype | None = None) -> Any:
    """Decorate like `impl.amp.custom_fwd`, for CUDA.

    Warns: FutureWarning. Sync: none. Source: torch.cuda.amp.custom_fwd 2.13; differences: those of `impl.amp`.
    """
    _warn("`torch.cuda.amp.custom_fwd(args...)`", "`torch.amp.custom_fwd(args..., device_type='cuda')`")
    decorate = functools.partial(amp.custom_fwd, device_type="cuda", cast_inputs=cast_inputs)
    return decorate if fwd is None else decorate(fwd)


def custom_bwd(bwd: Callable[..., Any]) -> Any:
    """Decorate like `impl.amp.custom_bwd`, for CUDA.

    Warns: FutureWarning. Sync: none. Source: torch.cuda.amp.custom_bwd 2.13; differences: those of `impl.amp`.
    """
    _warn("`torch.cuda.amp.custom_bwd(args...)`", "`torch.amp.custom_bwd(args..., device_type='cuda')`")
    return amp.custom_bwd(bwd, device_type="cuda")


def _warn(old: str, new: str) -> None:
    """Warn with torch's text, at the line that called the caller of this function."""
    warnings.warn(f"{old} is deprecated. Please use {new} instead.", FutureWarning, stacklevel=3)
