"""Gradient clipping by norm and by value, in place, without reading a tensor on the host.

Two ways through every call
    Ordinary gradients (plain dense tensors of floats, each element at an address of its own) go to `impl.kernels`
    a device at a time: one pass for the norm, one for the change, and a two-norm that neither overflows nor
    underflows on the way. So do each rank's parts of gradients that are all DTensors over one mesh, with one exchange
    of their norms. All others (sparse, complex and integer gradients, other tensor subclasses, DTensors over several
    meshes or among plain tensors, overlapping memory, gradients of no elements where the norm has no identity,
    everything under `torch.compile`) take the torch operators that torch's own functions call, so they also fail with
    torch's errors. One subclass in a list sends the whole list there.

All or nothing
    Ordinary gradients cannot refuse a change once it is known that their dtypes hold its numbers. So the others go
    first; when one of those refuses, all of them are put back. Copies are made for this of plain tensors that are
    not ordinary, and of DTensors among plain tensors. A list of DTensors only is taken or refused as a whole.
"""

from __future__ import annotations

import contextlib
import math
import types
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.utils._foreach_utils import (
    _device_has_foreach_support,
    _group_tensors_by_device_and_dtype,
    _has_foreach_support,
)

from impl import kernels
from impl.kernels import (
    KERNEL_DTYPES,
    OVERLAP,
    PLAIN_TYPES,
    are_on,
    dtypes_of,
    keep_layout,
    layouts_of,
    no_grad_fast,
    overlaps_itself,
    recognize_layout,
)
from impl.nn.utils._dtensors import ShardedTensors, sharded_tensors
from impl.optim._shards import is_distributed

__all__ = ["clip_grad_norm", "clip_grad_norm_", "clip_grad_value_"]


@no_grad_fast
def get_total_norm(
    tensors: Tensor | Iterable[Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Norm of all `tensors` laid end to end as one vector.

    Args:
        tensors: floating-point or complex tensors of any shape, dtype and device; None is refused.
        norm_type: any float, or `"inf"`. 0 counts the tensors that hold a non-zero element, as torch does.
        error_if_nonfinite: raise instead of returning nan or inf.
        foreach: True raises where torch has no foreach operators for the device; otherwise only a hint.

    Returns:
        0-dim norm on the first tensor's device, in the dtype that the tensors' dtypes promote to, but float32 for
        float16; `tensor(0.)` for no tensors. Of DTensors a DTensor, replicated.

    Raises:
        RuntimeError: the norm is nan or inf and `error_if_nonfinite` is set.
    Sync: none, unless `error_if_nonfinite`. Collectives: if the tensors are DTensors, one all-gather of a few numbers
        for each dimension of their mesh that cuts any; those of DTensor for norms of order 0 or less, and for sums
        that are still to be taken.
    Source: torch.nn.utils.get_total_norm 2.13; differences: the two-norm of finite tensors is not inf or 0 because
        a square on the way was, and float16 tensors give a float32 norm. An infinity norm of DTensors is replicated
        (torch hands out each rank's own, still to be reduced), also where a rank's part is empty (torch hangs).

    >>> get_total_norm([torch.tensor([3e20]), torch.tensor([4e20])])
    tensor(5.0000e+20)
    """
    listed = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    return _norm_of(_sorted_out(listed, foreach), float(norm_type), error_if_nonfinite)


@no_grad_fast
def clip_grads_with_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    total_norm: Tensor,
    foreach: bool | None = None,
) -> None:
    """Scale gradients in place by `max_norm / (total_norm + 1e-6)`, where that is below 1.

    Args:
        parameters: tensors of any shape; those with `grad is None` are skipped.
        max_norm: same unit as `total_norm`. A negative one turns the gradients round, as torch does.
        total_norm: 0-dim norm, on any device.
        foreach: as in `get_total_norm`.

    Raises:
        ValueError: `max_norm` is nan or -inf.
        RuntimeError: elements of a gradient share memory.
    Sync: none where `total_norm` lies on the gradients' device. Collectives: none, but of a DTensor that is not
        replicated, as torch's infinity norm is.
    Source: torch.nn.utils.clip_grads_with_norm_ 2.13; differences: the ValueError (torch overwrites every gradient
        with nan), and no plain gradient stays changed when one refuses.

    >>> weight = torch.zeros(2, requires_grad=True)
    >>> weight.grad = torch.tensor([3.0, 4.0])
    >>> clip_grads_with_norm_(weight, 1.0, torch.tensor(5.0))
    >>> weight.grad
    tensor([0.6000, 0.8000])
    """
    _scale_to_norm_(_sorted_out(_gradients_of(parameters), foreach), float(max_norm), total_norm)


@no_grad_fast
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale gradients in place so that their joint norm is at most `max_norm`.

    Args:
        parameters: tensors of any shape; those with `grad is None` are skipped. A parameter listed twice counts
            twice and is scaled twice, as torch does.
        max_norm: same unit as the gradients. A negative one turns the gradients round, as torch does.
        norm_type: as in `get_total_norm`.
        error_if_nonfinite: raise, before anything is changed, when the norm is nan or inf; otherwise the gradients
            are scaled by what follows from it (nan, or 0).
        foreach: as in `get_total_norm`.

    Returns:
        0-dim norm before clipping; device and dtype as in `get_total_norm`.

    Raises:
        RuntimeError: the norm is nan or inf and `error_if_nonfinite` is set; or elements of a gradient share memory.
        ValueError: `max_norm` is nan or -inf, or `norm_type` is nan, and there are gradients.
    Sync: none, unless `error_if_nonfinite`. Collectives: as `get_total_norm`.
    Source: torch.nn.utils.clip_grad_norm_ 2.13; differences: those of `get_total_norm` (finite float32 gradients of
        1e20 are clipped, where torch sets all of them to 0) and of `clip_grads_with_norm_`.

    >>> weight = torch.zeros(2, requires_grad=True)
    >>> weight.grad = torch.tensor([3.0, 4.0])
    >>> clip_grad_norm_([weight], max_norm=1.0)
    tensor(5.)
    >>> weight.grad
    tensor([0.6000, 0.8000])
    """
    if not isinstance(parameters, Tensor):
        is_generator = isinstance(parameters, types.GeneratorType)
        parameters = list(parameters)
        if is_generator and not parameters:
            # Two frames lie between here and the caller: this one and that of `no_grad_fast`.
            warnings.warn(
                "`parameters` is an empty generator, no gradient clipping will occur.", stacklevel=3
            )
    gradients = _sorted_out(_gradients_of(parameters), foreach)
    norm_type = float(norm_type)
    total_norm = _norm_of(gradients, norm_type, error_if_nonfinite)
    max_norm = float(max_norm)
    if math.isnan(norm_type) and gradients.every:
        raise ValueError(
            "norm_type is nan, which would overwrite every gradient with nan; pass a number or inf"
        )
    _scale_to_norm_(gradients, max_norm, total_norm)
    return total_norm


def clip_grad_norm(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Deprecated spelling of `clip_grad_norm_`; the same in all else, with a FutureWarning.

    Sync, collectives, returns, raises: as `clip_grad_norm_`.
    Source: torch.nn.utils.clip_grad_norm 2.13; differences: those of `clip_grad_norm_`.
    """
    warnings.warn(
        "`torch.nn.utils.clip_grad_norm` is now deprecated in favor of `torch.nn.utils.clip_grad_norm_`.",
        FutureWarning,
        stacklevel=2,
    )
    return clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, foreach)


@no_grad_fast
def clip_grad_value_(
    parameters: Tensor | Iterable[Tensor],
    clip_value: float,
    foreach: bool | None = None,
) -> None:
    """Clamp every element of every gradient to [-clip_value, clip_value], in place; nan stays nan.

    Args:
        parameters: tensors of any shape; those with `grad is None` are skipped.
        clip_value: not negative.
        foreach: as in `get_total_norm`.

    Raises:
        RuntimeError: there are no gradients at all, or a gradient's dtype cannot hold `clip_value`, as in torch; or
            elements of a gradient share memory.
        ValueError: `clip_value` is nan or negative.
    Sync: none. Collectives: none.
    Source: torch.nn.utils.clip_grad_value_ 2.13; differences: the ValueError (torch overwrites every gradient, with
        nan or with the negative value), and no plain gradient stays changed when one refuses.

    >>> weight = torch.zeros(2, requires_grad=True)
    >>> weight.grad = torch.tensor([-3.0, 0.25])
    >>> clip_grad_value_(weight, 0.5)
    >>> weight.grad
    tensor([-0.5000,  0.2500])
    """
    high = float(clip_value)
    gradients = _sorted_out(_gradients_of(parameters), foreach)
    if not gradients.every:
        # Raises what torch raises for a list without gradients; what it says is torch's affair.
        _by_device_and_dtype([])
    if not high >= 0.0:
        raise ValueError(
            f"clip_value is {high}, which would overwrite every gradient; pass a number not below 0"
        )

    def clamp_(tensors: list[Tensor], whole: bool) -> None:
        if whole:
            torch._foreach_clamp_min_(tensors, -high)
            torch._foreach_clamp_max_(tensors, high)
        else:
            for tensor in tensors:
                tensor.clamp_(min=-high, max=high)

    _refuse_unless_held(high, gradients)
    _change_others_(gradients, clamp_)
    for tensors in gradients.ordinary.values():
        kernels.clamp_(tensors, -high, high)
    if gradients.sharded is not None:
        gradients.sharded.note_written()


def _refuse_unless_held(bound: float, gradients: _Gradients) -> None:
    """Raise torch's error where a gradient's dtype cannot hold `bound`; the kernels would find out halfway."""
    if torch.finfo(torch.float16).max < bound < math.inf:
        for tensors in gradients.ordinary.values():
            for dtype in dtypes_of(tensors):
                torch.zeros((), dtype=dtype, device="cpu").clamp_(-bound, bound)


class _Gradients(NamedTuple):
    """A list of tensors, and which way each of them goes; where they are `sharded`, that are this rank's parts."""

    every: list[Tensor]
    ordinary: dict[torch.device, list[Tensor]]  # what kernels take, by device in order of first appearance
    others: list[Tensor]
    foreach: bool | None
    sharded: ShardedTensors | None = None


def _gradients_of(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    listed = [parameters] if isinstance(parameters, Tensor) else parameters
    return [grad for grad in [parameter.grad for parameter in listed] if grad is not None]


def _sorted_out(tensors: list[Tensor], foreach: bool | None) -> _Gradients:
    if torch.compiler.is_compiling():
        return _Gradients(tensors, {}, tensors, foreach)
    if (known := recognize_layout(tensors)) is not None:
        return _Gradients(tensors, {known[0].device: known}, [], foreach)
    if not PLAIN_TYPES.issuperset(map(type, tensors)):
        # Whether a subclass mixes with plain tensors is for its own implementation to say.
        return _parts_sorted_out(tensors, foreach) or _Gradients(tensors, {}, tensors, foreach)
    together = _together_if_ordinary(tensors, foreach)
    if together is not None:
        return _Gradients(tensors, {together[0].device: together}, [], foreach)
    ordinary: dict[torch.device, list[Tensor]] = {}
    others: list[Tensor] = []
    for tensor in tensors:
        if _is_ordinary(tensor):
            ordinary.setdefault(tensor.device, []).append(tensor)
        else:
            others.append(tensor)
    return _Gradients(tensors, ordinary, others, foreach)


def _parts_sorted_out(tensors: list[Tensor], foreach: bool | None) -> _Gradients | None:
    """Of DTensors over one mesh whose parts are ordinary; None of any others."""
    if not is_distributed(tensors[0]):
        return None
    sharded = sharded_tensors(tensors)
    if sharded is None or not PLAIN_TYPES.issuperset(map(type, sharded.parts)):
        return None
    parts = _sorted_out(sharded.parts, foreach)
    if parts.others or len(parts.ordinary) > 1:
        return None
    # As kernels know it again: a list whose addresses and sizes have been looked at.
    [listed] = parts.ordinary.values()
    return parts._replace(sharded=replace(sharded, parts=listed))


def _together_if_ordinary(tensors: list[Tensor], foreach: bool | None) -> list[Tensor] | None:
    """All `tensors`, if they lie on one device and every one is ordinary and dense; by whole-list calls, for speed."""
    if not tensors or layouts_of(tensors) != {torch.strided} or any(map(Tensor.is_inference, tensors)):
        return None
    device = tensors[0].device
    if not are_on(device, tensors):
        return None
    if (known := keep_layout(tensors)) is not None:
        return known
    if (
        dtypes_of(tensors) <= KERNEL_DTYPES
        and (device.type in ("cpu", "cuda") or _device_has_foreach_support(device))
        and all(map(Tensor.is_contiguous, tensors))
        # Views that negate: lists of them are refused by torch, each by itself is not.
        and not (foreach is False and any(map(Tensor.is_neg, tensors)))
    ):
        return tensors
    return None


def _is_ordinary(tensor: Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and tensor.dtype in KERNEL_DTYPES
        and _device_has_foreach_support(tensor.device)
        and torch._debug_has_internal_overlap(tensor) == 0
        and not tensor.is_neg()  # see `_together_if_ordinary`
        and (torch.is_inference_mode_enabled() or not tensor.is_inference())
    )


def _norm_of(gradients: _Gradients, norm_type: float, error_if_nonfinite: bool) -> Tensor:
    if not gradients.every:
        return torch.tensor(0.0)
    sharded = gradients.sharded
    if sharded is not None:
        if norm_type > 0.0 and not (norm_type == math.inf and sharded.has_empty):
            norm = sharded.joint_norm(norm_type)
            if error_if_nonfinite:
                refuse_nonfinite(norm, norm_type)
            return sharded.replicated(norm)
        gradients = gradients._replace(every=list(sharded.dtensors))
        total_norm = _norm_by_operators(gradients, norm_type)
    elif gradients.others or not _norm_is_defined(gradients.every, norm_type):
        total_norm = _norm_by_operators(gradients, norm_type)
    else:
        total_norm = _norm_by_kernels(gradients.ordinary, norm_type)
    if error_if_nonfinite:
        refuse_nonfinite(total_norm, norm_type)
    return total_norm


def refuse_nonfinite(total_norm: Tensor, norm_type: float) -> None:
    """Raise torch's error if the norm is inf or nan. Sync: one."""
    if not total_norm.isfinite():
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be "
            "clipped. To disable this error and scale the gradients by the non-finite norm anyway, "
            "set `error_if_nonfinite=False`"
        )


def _norm_is_defined(tensors: list[Tensor], norm_type: float) -> bool:
    """A largest or smallest element takes an element; the other norms of none are 0."""
    return 0.0 <= norm_type < math.inf or math.isnan(norm_type) or all(map(Tensor.numel, tensors))


def _norm_by_kernels(ordinary: dict[torch.device, list[Tensor]], norm_type: float) -> Tensor:
    norms = [kernels.total_norm(tensors, norm_type) for tensors in ordinary.values()]
    if len(norms) == 1:
        return norms[0]
    home = norms[0].device
    # Norms of order 0 are counts, which add up; all others combine as elements of one more vector.
    return kernels.total_norm([kernels.placed(norm, home) for norm in norms], norm_type or 1.0)


def _norm_by_operators(gradients: _Gradients, norm_type: float) -> Tensor:
    home = gradients.every[0].device
    norms: list[Tensor] = []
    for tensors, whole in _by_kernel(gradients.every, gradients.foreach):
        if whole:
            norms += torch._foreach_norm(tensors, norm_type)
        else:
            norms += [torch.linalg.vector_norm(tensor, norm_type) for tensor in tensors]
    return torch.linalg.vector_norm(torch.stack([norm.to(home) for norm in norms]), norm_type)


def _scale_to_norm_(gradients: _Gradients, max_norm: float, total_norm: Tensor) -> None:
    if not gradients.every:
        return
    if not max_norm > -math.inf:
        raise ValueError(
            f"max_norm is {max_norm}, which would overwrite every gradient; pass a number or inf"
        )
    if gradients.sharded is not None:
        gradients, total_norm = _beside(gradients, gradients.sharded, total_norm)
    if type(total_norm) is not Tensor or total_norm.dim() > 0:
        # No kernel takes such a norm: whether it fits is for the operators to say.
        gradients = gradients._replace(ordinary={}, others=gradients.every)
    coefficient = kernels.clip_coefficient(max_norm, total_norm) if gradients.others else total_norm

    def scale_(tensors: list[Tensor], whole: bool) -> None:
        factor = coefficient.to(tensors[0].device)
        if whole:
            torch._foreach_mul_(tensors, factor)
        else:
            for tensor in tensors:
                tensor.mul_(factor)

    _change_others_(gradients, scale_)
    for device, tensors in gradients.ordinary.items():
        kernels.clip_(tensors, max_norm, total_norm.to(device))
    if gradients.sharded is not None:
        gradients.sharded.note_written()


def _beside(gradients: _Gradients, sharded: ShardedTensors, total_norm: Tensor) -> tuple[_Gradients, Tensor]:
    """A norm that the parts may be scaled by; where there is none, the operators get the DTensors."""
    local = sharded.part_of(total_norm)
    if local is not None and local.dim() == 0:
        return gradients, local
    dtensors = list(sharded.dtensors)
    return _Gradients(dtensors, {}, dtensors, gradients.foreach), total_norm


def _by_kernel(tensors: list[Tensor], foreach: bool | None) -> list[tuple[list[Tensor], bool]]:
    """`tensors` by device and dtype, each list with whether it goes to a foreach operator as a whole."""
    lists: list[tuple[list[Tensor], bool]] = []
    for device, _, group in _by_device_and_dtype(tensors) if tensors else ():
        if foreach and not _device_has_foreach_support(device):
            raise RuntimeError(
                f"foreach=True was passed, but can't use the foreach API on {device.type} tensors"
            )
        lists.append((group, _has_foreach_support(group, device) if foreach is None else bool(foreach)))
    return lists


def _by_device_and_dtype(tensors: list[Tensor]) -> list[tuple[torch.device, torch.dtype, list[Tensor]]]:
    groups = _group_tensors_by_device_and_dtype([list(tensors)])
    return [(device, dtype, cast("list[Tensor]", group)) for (device, dtype), ([group], _) in groups.items()]


def _change_others_(gradients: _Gradients, change_: Callable[[list[Tensor], bool], None]) -> None:
    """Change those that are not ordinary, by `change_(tensors, whole)`; see "All or nothing" above."""
    lists = _by_kernel(gradients.others, gradients.foreach)
    if torch.compiler.is_compiling():
        kept: list[tuple[Tensor, Tensor]] = []
    else:
        _refuse_hidden_overlap(gradients.others)
        is_mixed = any(type(tensor) in PLAIN_TYPES for tensor in gradients.others)
        kept = [
            (tensor, tensor.clone())
            for tensor in gradients.others
            if type(tensor) in PLAIN_TYPES or (is_mixed and is_distributed(tensor))
        ]
    try:
        for tensors, whole in lists:
            change_(tensors, whole)
    except Exception:
        # Tensors made in inference mode are written before they refuse, and only there can be written again.
        with torch.inference_mode():
            for tensor, copy in kept:
                # Any other that cannot be written has not been.
                with contextlib.suppress(RuntimeError):
                    tensor.copy_(copy)
        raise


def _refuse_hidden_overlap(tensors: list[Tensor]) -> None:
    """Raise where elements share memory and torch does not see it: it would change them once for each."""
    for tensor in tensors:
        is_plain = type(tensor) in PLAIN_TYPES and tensor.layout is torch.strided
        if is_plain and torch._debug_has_internal_overlap(tensor) == 2 and overlaps_itself(tensor):
            raise RuntimeError(OVERLAP)
