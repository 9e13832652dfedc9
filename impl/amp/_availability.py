"""Whether mixed precision for CUDA can do anything on this machine; `autocast` and `GradScaler` both ask."""

from importlib.util import find_spec

import torch


def amp_definitely_not_available() -> bool:
    """True where neither CUDA nor torch_xla, which borrows its device type, is there.

    Sync: none. Source: torch.cuda.amp.common.amp_definitely_not_available 2.13; differences: none.

    >>> amp_definitely_not_available() and torch.cuda.is_available()
    False
    """
    return not (torch.cuda.is_available() or find_spec("torch_xla"))
