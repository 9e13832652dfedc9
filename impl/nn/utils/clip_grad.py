"""Gradient clipping by norm and by value, in place, without reading a tensor on the host.

Kernels and operators
    Ordinary gradients (plain dense floating-point tensors without overlapping elements) are passed to `impl.kernels`,
    one device at a time: one pass for the norm, one for the scaling, and a two-norm that neither overflows nor
    underflows in between. If all gradients are DTensors over one mesh, the same is done with each rank's local tensors,
    and the ranks exchange their norms. All other gradients take the torch operators that torch's own functions call, so
    that they raise torch's errors: sparse, complex and integer gradients, other tensor subclasses, DTensors over
    several meshes or among plain tensors, overlapping memory, empty gradients if the norm has no identity, and
    everything under `torch.compile`. One subclass in a list sends the whole list to the operators.

All or nothing
    Ordinary gradients cannot raise once it is known that their dtypes can hold the numbers. So the others are changed
    first, and restored if one of them raises. For this, plain tensors that are not ordinary and DTensors among plain
    tensors are copied. A list with only DTensors is changed as a whole or not at all.
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
    """Return the norm of all `tensors`, as if concatenated into one vector.

    Args:
        tensors: floating-point or complex tensors of any shape, dtype and device. None is not allowed.
        norm_type: any float, or `"inf"`. 0 counts the tensors that hold a non-zero element, like torch.
        error_if_nonfinite: raise instead of returning nan or inf.
        foreach: True raises if torch has no foreach operators for the device; otherwise only a hint.

    Returns:
        0-dim norm on the first tensor's device. Its dtype is the promotion of the tensors' dtypes, but float32 for
        float16. `tensor(0.)` if there are no tensors, and a replicated DTensor if they are DTensors.

    Raises:
        RuntimeError: the norm is nan or inf and `error_if_nonfinite` is set.
    Sync: none, unless `error_if_nonfinite`. Collectives: for DTensors, one all-gather of a few numbers for each sharded
        dimension of the mesh. Norms of order 0 or less and partial DTensors take the collectives of DTensor's
        operators.
    Source: torch.nn.utils.get_total_norm 2.13; differences: the two-norm of finite tensors does not overflow or
        underflow in intermediate squares, and float16 tensors give a float32 norm. The infinity norm of DTensors is
        replicated (torch returns an unreduced one), also if a rank's shard is empty (torch hangs).

    >>> get_total_norm([torch.tensor([3e20]), torch.tensor([4e20])])
    tensor(5.0000e+20)
    """
    listed = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    return _norm_of(_partition(listed, foreach), float(norm_type), error_if_nonfinite)


@no_grad_fast
def clip_grads_with_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    total_norm: Tensor,
    foreach: bool | None = None,
) -> None:
    """Scale gradients in place by `max_norm / (total_norm + 1e-6)` if that is below 1.

    Args:
        parameters: tensors of any shape. Those with `grad is None` are skipped.
        max_norm: same unit as `total_norm`. A negative value reverses the gradients, like torch.
        total_norm: 0-dim norm, on any device.
        foreach: as in `get_total_norm`.

    Raises:
        ValueError: `max_norm` is nan or -inf.
        RuntimeError: elements of a gradient share memory.
    Sync: none if `total_norm` is on the gradients' device. Collectives: none, unless `total_norm` is a DTensor that is
        not replicated, like torch's infinity norm.
    Source: torch.nn.utils.clip_grads_with_norm_ 2.13; differences: the ValueError (torch overwrites every gradient
        with nan), and if one gradient raises, no plain gradient is changed.

    >>> weight = torch.zeros(2, requires_grad=True)
    >>> weight.grad = torch.tensor([3.0, 4.0])
    >>> clip_grads_with_norm_(weight, 1.0, torch.tensor(5.0))
    >>> weight.grad
    tensor([0.6000, 0.8000])
    """
    _scale_to_norm_(_partition(_gradients_of(parameters), foreach), float(max_norm), total_norm)


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
        parameters: tensors of any shape. Those with `grad is None` are skipped. A parameter listed twice counts
            twice and is scaled twice, like torch.
        max_norm: same unit as the gradients. A negative value reverses the gradients, like torch.
        norm_type: as in `get_total_norm`.
        error_if_nonfinite: raise, before anything is changed, if the norm is nan or inf. Otherwise such a norm scales
            the gradients by nan or 0.
        foreach: as in `get_total_norm`.

    Returns:
        0-dim norm before clipping, with device and dtype as in `get_total_norm`.

    Raises:
        RuntimeError: the norm is nan or inf and `error_if_nonfinite` is set; or elements of a gradient share memory.
        ValueError: `max_norm` is nan or -inf, or `norm_type` is nan, and there are gradients.
    Sync: none, unless `error_if_nonfinite`. Collectives: as `get_total_norm`.
    Source: torch.nn.utils.clip_grad_norm_ 2.13; differences: those of `get_total_norm` (finite float32 gradients of
        1e20 are clipped, while torch sets all of them to 0) and of `clip_grads_with_norm_`.

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
            # There are two frames up to the caller: this one and that of `no_grad_fast`.
            warnings.warn(
                "`parameters` is an empty generator, no gradient clipping will occur.", stacklevel=3
            )
    gradients = _partition(_gradients_of(parameters), foreach)
    norm_type = float(norm_type)
    total_norm = _norm_of(gradients, norm_type, error_if_nonfinite)
    max_norm = float(max_norm)
    if math.isnan(norm_type) and gradients.tensors:
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
    """Call `clip_grad_norm_` with a FutureWarning. This spelling is deprecated.

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
    """Clamp every element of every gradient to [-clip_value, clip_value] in place. NaN stays NaN.

    Args:
        parameters: tensors of any shape. Those with `grad is None` are skipped.
        clip_value: not negative.
        foreach: as in `get_total_norm`.

    Raises:
        RuntimeError: there are no gradients, or a gradient's dtype cannot hold `clip_value`, as in torch; or elements
            of a gradient share memory.
        ValueError: `clip_value` is nan or negative.
    Sync: none. Collectives: none.
    Source: torch.nn.utils.clip_grad_value_ 2.13; differences: the ValueError (torch overwrites every gradient, with
        nan or with the negative value), and if one gradient raises, no plain gradient is changed.

    >>> weight = torch.zeros(2, requires_grad=True)
    >>> weight.grad = torch.tensor([-3.0, 0.25])
    >>> clip_grad_value_(weight, 0.5)
    >>> weight.grad
    tensor([-0.5000,  0.2500])
    """
    high = float(clip_value)
    gradients = _partition(_gradients_of(parameters), foreach)
    if not gradients.tensors:
        # Raise torch's error for a list without gradients.
        _by_device_and_dtype([])
    if not high >= 0.0:
        raise ValueError(
            f"clip_value is {high}, which would overwrite every gradient; pass a number not below 0"
        )

    def clamp_(tensors: list[Tensor], by_foreach: bool) -> None:
        if by_foreach:
            torch._foreach_clamp_min_(tensors, -high)
            torch._foreach_clamp_max_(tensors, high)
        else:
            for tensor in tensors:
                tensor.clamp_(min=-high, max=high)

    _check_dtypes_hold(high, gradients)
    _change_others_(gradients, clamp_)
    for tensors in gradients.ordinary.values():
        kernels.clamp_(tensors, -high, high)
    if gradients.sharded is not None:
        gradients.sharded.increment_versions()


def _check_dtypes_hold(bound: float, gradients: _Gradients) -> None:
    """Raise torch's error if a gradient's dtype cannot hold `bound`. The kernels would only raise halfway."""
    if torch.finfo(torch.float16).max < bound < math.inf:
        for tensors in gradients.ordinary.values():
            for dtype in dtypes_of(tensors):
                torch.zeros((), dtype=dtype, device="cpu").clamp_(-bound, bound)


class _Gradients(NamedTuple):
    """Gradients for the kernels and gradients for torch's operators. Local tensors if `sharded` is set."""

    tensors: list[Tensor]
    # Tensors for the kernels, by device in order of first appearance.
    ordinary: dict[torch.device, list[Tensor]]
    others: list[Tensor]
    foreach: bool | None
    sharded: ShardedTensors | None = None


def _gradients_of(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    listed = [parameters] if isinstance(parameters, Tensor) else parameters
    return [grad for grad in [parameter.grad for parameter in listed] if grad is not None]


def _partition(tensors: list[Tensor], foreach: bool | None) -> _Gradients:
    if torch.compiler.is_compiling():
        return _Gradients(tensors, {}, tensors, foreach)
    if (known := recognize_layout(tensors)) is not None:
        return _Gradients(tensors, {known[0].device: known}, [], foreach)
    if not PLAIN_TYPES.issuperset(map(type, tensors)):
        # Whether a subclass can be mixed with plain tensors is decided by its own implementation.
        return _partition_dtensors(tensors, foreach) or _Gradients(tensors, {}, tensors, foreach)
    on_one_device = _ordinary_on_one_device(tensors, foreach)
    if on_one_device is not None:
        return _Gradients(tensors, {on_one_device[0].device: on_one_device}, [], foreach)
    ordinary: dict[torch.device, list[Tensor]] = {}
    others: list[Tensor] = []
    for tensor in tensors:
        if _is_ordinary(tensor):
            ordinary.setdefault(tensor.device, []).append(tensor)
        else:
            others.append(tensor)
    return _Gradients(tensors, ordinary, others, foreach)


def _partition_dtensors(tensors: list[Tensor], foreach: bool | None) -> _Gradients | None:
    """Return the local tensors of DTensors over one mesh, or None if these are not all ordinary."""
    if not is_distributed(tensors[0]):
        return None
    sharded = sharded_tensors(tensors)
    if sharded is None or not PLAIN_TYPES.issuperset(map(type, sharded.local_tensors)):
        return None
    gradients = _partition(sharded.local_tensors, foreach)
    if gradients.others or len(gradients.ordinary) > 1:
        return None
    # The kernels recognise this list object, so that they need not query its layout again.
    [local_tensors] = gradients.ordinary.values()
    return gradients._replace(sharded=replace(sharded, local_tensors=local_tensors))


def _ordinary_on_one_device(tensors: list[Tensor], foreach: bool | None) -> list[Tensor] | None:
    """Return `tensors` if all are ordinary, dense and on one device, else None. Checks whole lists, for speed."""
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
        # torch raises for lists of views with a negative bit, but not for single ones.
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
        and not tensor.is_neg()  # see `_ordinary_on_one_device`
        and (torch.is_inference_mode_enabled() or not tensor.is_inference())
    )


def _norm_of(gradients: _Gradients, norm_type: float, error_if_nonfinite: bool) -> Tensor:
    if not gradients.tensors:
        return torch.tensor(0.0)
    sharded = gradients.sharded
    if sharded is not None:
        if norm_type > 0.0 and not (norm_type == math.inf and sharded.has_empty):
            norm = sharded.joint_norm(norm_type)
            if error_if_nonfinite:
                check_finite(norm, norm_type)
            return sharded.replicated(norm)
        gradients = gradients._replace(tensors=list(sharded.dtensors))
        total_norm = _norm_by_operators(gradients, norm_type)
    elif gradients.others or not _norm_is_defined(gradients.tensors, norm_type):
        total_norm = _norm_by_operators(gradients, norm_type)
    else:
        total_norm = _norm_by_kernels(gradients.ordinary, norm_type)
    if error_if_nonfinite:
        check_finite(total_norm, norm_type)
    return total_norm


def check_finite(total_norm: Tensor, norm_type: float) -> None:
    """Raise torch's error if the norm is inf or nan. Sync: one."""
    if not total_norm.isfinite():
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be "
            "clipped. To disable this error and scale the gradients by the non-finite norm anyway, "
            "set `error_if_nonfinite=False`"
        )


def _norm_is_defined(tensors: list[Tensor], norm_type: float) -> bool:
    """Return whether the norm exists. The largest or smallest element of an empty tensor does not."""
    return 0.0 <= norm_type < math.inf or math.isnan(norm_type) or all(map(Tensor.numel, tensors))


def _norm_by_kernels(ordinary: dict[torch.device, list[Tensor]], norm_type: float) -> Tensor:
    norms = [kernels.total_norm(tensors, norm_type) for tensors in ordinary.values()]
    if len(norms) == 1:
        return norms[0]
    device = norms[0].device
    # Norms of order 0 are counts, so add them. All others combine like elements of a vector.
    return kernels.total_norm([kernels.to_device(norm, device) for norm in norms], norm_type or 1.0)


def _norm_by_operators(gradients: _Gradients, norm_type: float) -> Tensor:
    device = gradients.tensors[0].device
    norms: list[Tensor] = []
    for tensors, by_foreach in _split_for_operators(gradients.tensors, gradients.foreach):
        if by_foreach:
            norms += torch._foreach_norm(tensors, norm_type)
        else:
            norms += [torch.linalg.vector_norm(tensor, norm_type) for tensor in tensors]
    return torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms]), norm_type)


def _scale_to_norm_(gradients: _Gradients, max_norm: float, total_norm: Tensor) -> None:
    if not gradients.tensors:
        return
    if not max_norm > -math.inf:
        raise ValueError(
            f"max_norm is {max_norm}, which would overwrite every gradient; pass a number or inf"
        )
    if gradients.sharded is not None:
        gradients, total_norm = _with_local_norm(gradients, gradients.sharded, total_norm)
    if type(total_norm) is not Tensor or total_norm.dim() > 0:
        # No kernel supports such a norm. torch's operators raise if it does not fit.
        gradients = gradients._replace(ordinary={}, others=gradients.tensors)
    coefficient = kernels.clip_coefficient(max_norm, total_norm) if gradients.others else total_norm

    def scale_(tensors: list[Tensor], by_foreach: bool) -> None:
        factor = coefficient.to(tensors[0].device)
        if by_foreach:
            torch._foreach_mul_(tensors, factor)
        else:
            for tensor in tensors:
                tensor.mul_(factor)

    _change_others_(gradients, scale_)
    for device, tensors in gradients.ordinary.items():
        kernels.clip_(tensors, max_norm, total_norm.to(device))
    if gradients.sharded is not None:
        gradients.sharded.increment_versions()


def _with_local_norm(
    gradients: _Gradients, sharded: ShardedTensors, total_norm: Tensor
) -> tuple[_Gradients, Tensor]:
    """Return the local value of `total_norm`, or fall back to torch's operators on the DTensors if it has none."""
    local = sharded.local_value(total_norm)
    if local is not None and local.dim() == 0:
        return gradients, local
    dtensors = list(sharded.dtensors)
    return _Gradients(dtensors, {}, dtensors, gradients.foreach), total_norm


def _split_for_operators(tensors: list[Tensor], foreach: bool | None) -> list[tuple[list[Tensor], bool]]:
    """Split `tensors` by device and dtype. Return each list with whether it takes foreach operators."""
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
    """Apply `change_` to gradients that no kernel takes. Restore them if it raises. See "All or nothing" above."""
    lists = _split_for_operators(gradients.others, gradients.foreach)
    if torch.compiler.is_compiling():
        copies: list[tuple[Tensor, Tensor]] = []
    else:
        _check_no_hidden_overlap(gradients.others)
        is_mixed = any(type(tensor) in PLAIN_TYPES for tensor in gradients.others)
        copies = [
            (tensor, tensor.clone())
            for tensor in gradients.others
            if type(tensor) in PLAIN_TYPES or (is_mixed and is_distributed(tensor))
        ]
    try:
        for tensors, by_foreach in lists:
            change_(tensors, by_foreach)
    except Exception:
        # An inference tensor is changed before its operator raises, and only inference mode can change it back.
        with torch.inference_mode():
            for tensor, copy in copies:
                # A tensor that refuses this copy was never changed.
                with contextlib.suppress(RuntimeError):
                    tensor.copy_(copy)
        raise


def _check_no_hidden_overlap(tensors: list[Tensor]) -> None:
    """Raise if elements share memory unnoticed by torch, whose operators would change them several times."""
    for tensor in tensors:
        is_plain = type(tensor) in PLAIN_TYPES and tensor.layout is torch.strided
        if is_plain and torch._debug_has_internal_overlap(tensor) == 2 and overlaps_itself(tensor):
            raise RuntimeError(OVERLAP)
