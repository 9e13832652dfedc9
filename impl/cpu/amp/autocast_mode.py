"""Deprecated spelling of `impl.amp.autocast` for the CPU, like torch's."""

import warnings

import torch

import impl.amp.autocast_mode as amp

__all__ = ["autocast"]


class autocast(amp.autocast):
    """`impl.amp.autocast("cpu", ...)` with fixed defaults, independent of `torch.get_autocast_dtype`.

    Warns: FutureWarning. Sync: none.
    Source: torch.cpu.amp.autocast 2.13; differences: those of `impl.amp.autocast`; a subclass warns at its first
        instance, not at its definition.

    >>> import warnings
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("ignore")
    ...     autocast().fast_dtype
    torch.bfloat16
    """

    def __init__(
        self, enabled: bool = True, dtype: torch.dtype = torch.bfloat16, cache_enabled: bool = True
    ) -> None:
        warnings.warn(
            "`torch.cpu.amp.autocast(args...)` is deprecated. "
            "Please use `torch.amp.autocast('cpu', args...)` instead.",
            FutureWarning,
            stacklevel=2,
        )
        super().__init__("cpu", dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)
