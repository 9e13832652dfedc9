"""What a profiler is shown beside operators."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.profiler import record_function

is_profiled = torch.autograd._profiler_enabled
_NOTHING = contextlib.nullcontext()


def span(label: str, name: str) -> AbstractContextManager[Any]:
    """What is done inside of it, of what is called `name`; nothing where no profiler runs in this thread."""
    return record_function(f"{label} ({name})") if is_profiled() else _NOTHING
