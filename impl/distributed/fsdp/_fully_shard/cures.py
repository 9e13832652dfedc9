"""Notes that name the cause and the cure on errors of sharded models."""

from __future__ import annotations

import traceback
from collections.abc import Iterable

from torch import nn

from impl._names import describe_names
from impl.distributed.fsdp._fully_shard.module_state import MIXED_TENSORS, state_of


def add_cure(module: nn.Module, error: BaseException) -> None:
    """Note buffers on the meta device, or modules that must not be sharded separately, on the error of a forward."""
    if not isinstance(error, RuntimeError) or hasattr(error, "__notes__"):
        return
    text = str(error)
    on_meta = [name for name, buffer in module.named_buffers() if buffer.is_meta]
    inner = {child: name for name, child in module.named_modules() if child is not module and state_of(child)}
    if on_meta and "meta" in text:
        error.add_note(
            f"buffers on the meta device: {describe_names(on_meta)}; call to_empty(device=...) of their modules and "
            "fill them, as reset_parameters() does"
        )
    elif inner and MIXED_TENSORS in text and not _is_raised_inside(inner, error):
        has_attention = any(isinstance(child, nn.MultiheadAttention) for child in module.modules())
        example = ", like MultiheadAttention those of out_proj" if has_attention else ""
        error.add_note(
            f"a forward may read parameters of a module without calling it{example}. "
            f"Do not apply fully_shard to such a module, but to the module that reads them. Sharded inside "
            f"{type(module).__name__}: {describe_names([*inner.values()])}"
        )


def _is_raised_inside(modules: Iterable[nn.Module], error: BaseException) -> bool:
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    callers = [frame.f_locals.get("self") for frame in frames]
    return any(caller is module for module in modules for caller in callers)
