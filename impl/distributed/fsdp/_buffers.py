"""Buffers are not dealt to the ranks; they are only brought to the device and the dtype in which the unit computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from impl.distributed.fsdp._managed import clean_name


def cast_buffers(wrappers: Sequence[Any], device: torch.device) -> None:
    """Each buffer as the innermost of the wrappers around it wants it; outer wrappers come first in `wrappers`.

    What holds no floating-point numbers keeps its dtype.
    """
    seen: set[Tensor] = set()
    for wrapper in reversed(wrappers):
        dtype = wrapper.mixed_precision.buffer_dtype
        for name, buffer in wrapper.named_buffers():
            if buffer in seen:
                continue
            seen.add(buffer)
            if clean_name(name) not in wrapper._ignored.buffer_names:
                buffer.data = buffer.to(
                    device, dtype if dtype is not None and buffer.is_floating_point() else None
                )
