"""An update with one backend, on parameters built from a description that can be sent to another process."""

from __future__ import annotations

import contextlib
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor

from conformance.gpu.update_bounds import SIGNED_STATES
from impl import kernels
from impl.kernels import fused_step
from impl.kernels.tests.calls import Spec, build, is_intact


class ParamSpec(NamedTuple):
    """A parameter and what belongs to it."""

    numel: int
    layout: str  # layout of the parameter and its states
    grad_layout: str  # contiguous, misaligned, or alike
    grad_dtype: torch.dtype
    seed: int


class UpdateSpec(NamedTuple):
    rule: kernels.Rule
    states: int
    dtype: torch.dtype
    low_precision: torch.dtype | None
    places: list[ParamSpec]
    step: float  # 0.0 where the rule does not count
    factor: float
    found_inf: float | None
    narrow_states: bool = False  # whether the states are bf16

    @property
    def stored(self) -> torch.dtype:
        """Dtype of the states."""
        return kernels.NARROW_STATES if self.narrow_states else self.dtype


class Lists(NamedTuple):
    params: list[Tensor]
    grads: list[Tensor]
    states: list[list[Tensor]]
    low_precision_params: list[Tensor]
    steps: list[Tensor]
    outside: bool = True  # whether memory around the tensors is as it was


def lists_of(described: UpdateSpec) -> tuple[Lists, list[Tensor]]:
    """Return the lists before the update, and the buffers that surround all tensors with a sentinel."""
    buffers: list[Tensor] = []

    def built(place: ParamSpec, number: int, dtype: torch.dtype, layout: str) -> Tensor:
        tensor, buffer = build(Spec(place.numel, dtype, layout, 10 * place.seed + number))
        buffers.append(buffer)
        return tensor

    def grad(place: ParamSpec, param: Tensor) -> Tensor:
        layout = place.layout if place.grad_layout == "alike" else place.grad_layout
        scaled = built(place, 1, place.grad_dtype, layout).mul_(1 / described.factor)
        return scaled.view(param.shape) if param.shape != scaled.shape else scaled

    places, own = described.places, described.dtype
    params = [built(place, 0, own, place.layout) for place in places]
    grads = [*map(grad, places, params)]
    states = [
        [built(place, 2 + number, described.stored, place.layout) for place in places]
        for number in range(described.states)
    ]
    for name, state in zip(described.rule.STATES, states, strict=False):
        if name not in SIGNED_STATES:
            torch._foreach_abs_(state)
    copies = (
        [built(place, 9, described.low_precision, place.layout) for place in places]
        if described.low_precision
        else []
    )
    steps = [torch.tensor(described.step) for _ in places if described.step]
    return Lists(params, grads, states, copies, steps), buffers


def updated(backend: str, described: UpdateSpec) -> Lists:
    """Return the lists after the update. The backends "triton" and "native" raise if they fall back to other code."""
    lists, buffers = lists_of(described)
    updated_lists(backend, described, lists)
    tensors = [
        *lists.params,
        *lists.grads,
        *(t for state in lists.states for t in state),
        *lists.low_precision_params,
    ]
    return lists._replace(outside=all(map(is_intact, tensors, buffers)))


def updated_lists(backend: str, described: UpdateSpec, lists: Lists) -> Lists:
    """Update these lists by the rule, factor and flag of `described`, and return them."""
    found_inf = None if described.found_inf is None else torch.tensor(described.found_inf)
    others = [] if backend not in ("triton", "native") else ["_step_by_torch", "_step_cpu_blocked"]
    with kernels.backend(backend), contextlib.ExitStack() as refusing:
        for other in others:
            refusing.enter_context(mock.patch.object(fused_step, other, _refused))
        kernels.fused_step_(
            described.rule,
            kernels.Parameters(lists.params, lists.states, lists.steps, lists.low_precision_params),
            kernels.TensorList(lists.grads),
            torch.tensor(described.factor),
            found_inf,
        )
    return lists


def _refused(*_: object) -> None:
    raise AssertionError("the kernels refused to update these parameters")
