"""Availability of mixed precision for CUDA on this machine, for `autocast` and `GradScaler`."""

import warnings
from importlib.util import find_spec

import torch


def amp_definitely_not_available() -> bool:
    """Return whether neither CUDA nor torch_xla, which uses its device type, is available.

    Sync: none. Source: torch.cuda.amp.common.amp_definitely_not_available 2.13; differences: none.

    >>> amp_definitely_not_available() and torch.cuda.is_available()
    False
    """
    return not (torch.cuda.is_available() or find_spec("torch_xla"))


def warn_of_missing_cuda(stacklevel: int) -> None:
    """Warn, with torch's text, that CUDA is missing and the `GradScaler` is disabled."""
    warnings.warn(
        "torch.cuda.amp.GradScaler is enabled, but CUDA is not available.  Disabling.",
        stacklevel=stacklevel + 1,
    )
