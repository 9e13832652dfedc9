"""Captured optimizer steps. Names are imported at their first use, because `impl.amp` only needs other modules."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from impl.optim.captured import Explanation, GraphExplanation, capture, explain, release

__all__ = ["Explanation", "GraphExplanation", "capture", "explain", "release"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("impl.optim.captured"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
