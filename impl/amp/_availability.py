"""Whether mixed precision for CUDA can do anything on this machine; `autocast` and `GradScaler` both ask."""

import warnings
from importlib.util import find_spec

import torch


def amp_definitely_not_available() -> bool:
    """True where neither CUDA nor torch_xla, which borrows its device type, is there.

    Sync: none. Source: torch.cuda.amp.common.amp_definitely_not_available 2.13; differences: none.

    >>> amp_definitely_not_available() and torch.cuda.is_available()
    False
    """
    return not (torch.cuda.is_available() or find_spec("torch_xla"))


def warn_of_missing_cuda(stacklevel: int) -> None:
    """Tell the maker of a `GradScaler`, as torch does."""
    warnings.warn(
        "torch.cuda.amp.GradScaler is enabled, but CUDA is not available.  Disabling.",
        stacklevel=stacklevel + 1,
    )
