"""Warnings at the user's line, however many frames of hooks are between."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import torch

_LIBRARIES = tuple(f"{folder}{os.sep}" for folder in (Path(__file__).parents[3], Path(torch.__file__).parent))


def warn_user(message: str) -> None:
    """Warn at the innermost line that is neither in torch nor in this package."""
    frame, stacklevel = sys._getframe(), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame, stacklevel = frame.f_back, stacklevel + 1
    warnings.warn(message, stacklevel=stacklevel)
