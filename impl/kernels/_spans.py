"""Named spans for the profiler."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.profiler import record_function

is_profiled = torch.autograd._profiler_enabled
_NOTHING = contextlib.nullcontext()


def span(
    label: str, name: str, within: AbstractContextManager[object] = _NOTHING
) -> AbstractContextManager[Any]:
    """Return `within`, recorded as a span if a profiler runs in this thread."""
    return _recorded(f"{label} ({name})", within) if is_profiled() else within


@contextlib.contextmanager
def _recorded(label: str, within: AbstractContextManager[object]) -> Generator[None]:
    with record_function(label), within:
        yield
