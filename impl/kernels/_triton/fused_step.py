"""Update of many parameters in one launch from gradients that are still scaled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from impl.kernels._lists import dtypes_of
from impl.kernels._native.memory import TensorList
from impl.kernels._parameters import Parameters
from impl.kernels._storage_order import match_layout
from impl.kernels._table import ChunkTable
from impl.kernels._triton import rules
from impl.kernels._triton.chunk import DTYPES, on_device
from impl.kernels._triton.launch import launch
from impl.kernels._triton.update import LAUNCH
from impl.kernels._update_table import known_update_table, update_table
from impl.kernels.rules import Rule

_HANDLED = (torch.float16, torch.bfloat16, torch.float32)


class _Alike(NamedTuple):
    """Parameters with one dtype of gradients and one of copies."""

    # Parameters, gradients, states, copies. They live here until the launch: some gradients are reordered copies.
    lists: list[Sequence[Tensor]]
    table: ChunkTable
    dtypes: dict[str, tl.dtype]  # arguments of the kernels


def launch_fused_step(
    rule: Rule, parameters: Parameters, grads: TensorList, factor: Tensor, found_inf: Tensor | None
) -> bool:
    """Run the rule's kernel. Return False, without a change, if it does not support the parameters."""
    if parameters.params[0].dtype not in _HANDLED:
        return False
    if grads.layout is not None and len(dtypes_of(parameters.low_precision_params)) <= 1:
        kinds = [_known(parameters, grads)]
    else:
        kinds = [
            _alike(parameters, grads.tensors, places) for places in _places_by_kind(parameters, grads.tensors)
        ]
    if None in kinds:
        return False
    kernel: Any = getattr(rules, rule.KERNELS.triton)
    flags = {name.upper(): getattr(rule, name) for name in rule.KERNELS.flags}
    settings = [float(getattr(rule, name)) for name in rule.KERNELS.settings]
    # A learning rate on the device stays there.
    lr_ptr = rule.lr if isinstance(rule.lr, Tensor) and rule.lr.device == factor.device else None
    lr = float(rule.lr) if lr_ptr is None else 0.0
    with on_device(factor):
        for alike in filter(None, kinds):
            if alike.table.chunks:
                launch(
                    kernel, (alike.table.chunks,), alike.table.rows, lr, *settings, lr_ptr, factor, found_inf,
                    LISTS=len(alike.lists), STATES=len(parameters.states), **flags, **alike.dtypes, **LAUNCH,
                )  # fmt: skip
    for written in (parameters.params, *parameters.states, parameters.low_precision_params):
        torch.autograd.graph.increment_version(written)
    return True


def _places_by_kind(parameters: Parameters, grads: Sequence[Tensor]) -> list[list[int] | None]:
    """Return the indices for each pair of dtypes of gradients and copies, or [None] if there is one pair."""
    copies = parameters.low_precision_params or grads
    if len(dtypes_of(grads)) == len(dtypes_of(copies)) == 1:
        return [None]
    kinds: dict[tuple[torch.dtype, torch.dtype], list[int]] = {}
    for place, (grad, copy) in enumerate(zip(grads, copies, strict=True)):
        kinds.setdefault((grad.dtype, copy.dtype), []).append(place)
    return [*kinds.values()]


def _alike(parameters: Parameters, grads: Sequence[Tensor], places: list[int] | None) -> _Alike | None:
    def picked(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return [tensors[place] for place in places] if places and tensors else tensors

    params, copies = picked(parameters.params), picked(parameters.low_precision_params)
    laid_out = [*map(match_layout, params, picked(grads))]
    states = [*map(picked, parameters.states)]
    lists = [params, laid_out, *states, *([copies] if copies else [])]
    table = update_table(lists, picked(parameters.steps))
    return None if table is None else _Alike(lists, table, _named_dtypes(params, laid_out, states, copies))


def _known(parameters: Parameters, grads: TensorList) -> _Alike | None:
    table = known_update_table(parameters.memory, grads)
    dtypes = _named_dtypes(
        parameters.params, grads.tensors, parameters.states, parameters.low_precision_params
    )
    return None if table is None else _Alike([grads.tensors, *parameters.memory.lists], table, dtypes)


def _named_dtypes(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[Sequence[Tensor]],
    copies: Sequence[Tensor],
) -> dict[str, tl.dtype]:
    named = {
        "OWN": params,
        "GRADS": grads,
        "STORED": states[0] if states else params,
        "COPIES": copies or params,
    }
    return {name: DTYPES[tensors[0].dtype] for name, tensors in named.items()}
