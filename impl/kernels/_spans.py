"""What a profiler is shown beside operators."""

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
    label: str, name: str, within: AbstractContextManager[Any] = _NOTHING
) -> AbstractContextManager[Any]:
    """What is done `within`, of what is called `name`; nothing is shown where no profiler runs in this thread."""
    return _shown(f"{label} ({name})", within) if is_profiled() else within


@contextlib.contextmanager
def _shown(words: str, within: AbstractContextManager[Any]) -> Generator[None]:
    with record_function(words), within:
        yield
