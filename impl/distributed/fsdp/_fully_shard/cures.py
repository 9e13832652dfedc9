"""Notes that name the cause and the cure on errors of sharded models."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from impl.distributed.fsdp._fully_shard.module_state import state_of
from impl.distributed.fsdp._layout.per_param import DTensorGroup
from impl.distributed.fsdp._params.param_group import describe_names

_MIXED = "mixed torch.Tensor and DTensor"
_LOAD_UNSHARDED = (
    "load unsharded tensors by torch.distributed.checkpoint.state_dict.set_model_state_dict(model, state_dict, "
    "options=StateDictOptions(full_state_dict=True)), with broadcast_from_rank0=True if only rank 0 has them"
)


def note_unsharded_values(module: nn.Module, state_dict: Mapping[str, Any], error: Exception) -> None:
    """Name the unsharded values for sharded parameters in a note on the error of a load."""
    names = [
        name
        for name, param in module.named_parameters(remove_duplicate=False)
        if isinstance(param, DTensor) and _is_unsharded(state_dict.get(name))
    ]
    if names:
        error.add_note(
            f"{describe_names(names)}: unsharded in the state dict, but sharded in the model; {_LOAD_UNSHARDED}"
        )


def _is_unsharded(value: object) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, DTensor)


def check_loaded_params(module: nn.Module, groups: Iterable[DTensorGroup]) -> None:
    """Register sharded parameters again if a load has assigned unsharded ones.

    Raises:
        TypeError: the load has assigned unsharded tensors.
    """
    names = {id(param): name for name, param in module.named_parameters(remove_duplicate=False)}
    unsharded = [param for group in groups for param in group.replace_unsharded()]
    if unsharded:
        described = describe_names([names.get(id(param), "a parameter") for param in unsharded])
        raise TypeError(
            f"{described}: sharded, but the state dict has unsharded tensors to assign; {_LOAD_UNSHARDED}"
        )


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
    elif inner and _MIXED in text and not _is_raised_inside(inner, error):
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
