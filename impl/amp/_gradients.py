"""The gradients of an optimizer: sorted for the kernels, and called by name where they are not finite.

All or nothing
    `sorted_gradients` refuses what it can see is wrong before a gradient is touched, and puts first what an operator
    may still refuse (tensor subclasses, dtypes and layouts that torch's operator does not take): the ordinary
    gradients behind it are then as they were.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from impl import kernels
from impl.kernels import (
    KERNEL_DTYPES,
    OVERLAP,
    PLAIN_TYPES,
    are_on,
    dtypes_of,
    keep_layout,
    layouts_of,
    overlaps_itself,
    recognize_layout,
)

# Gradients of one device, to be changed together.
Batch = tuple[torch.device, list[Tensor]]


def sorted_gradients(optimizer: torch.optim.Optimizer, allow_fp16: bool) -> list[Batch]:
    """Every gradient of `optimizer` once, in batches for `kernels.unscale_`, those that may refuse first.

    A sparse gradient stands here by its values; in float16 it is coalesced first, and `.grad` replaced, because
    the sum of duplicates may overflow where no part of it does.

    Raises:
        AssertionError: a parameter is no tensor.
        ValueError: a float16 gradient without `allow_fp16`; or one gradient belongs to two entries.
        RuntimeError: elements of a gradient share memory.
    Sync: coalescing, as in torch.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for kind in set(map(type, params)) - PLAIN_TYPES:
        if not issubclass(kind, Tensor):
            raise AssertionError(f"expected param to be torch.Tensor, got {kind.__name__}")
    grads = [grad for param in params if (grad := param.grad) is not None]
    if not grads:
        return []
    known = recognize_layout(grads)
    dtypes = dtypes_of(grads if known is None else known[:1])
    if torch.float16 in dtypes and not allow_fp16:
        raise ValueError("Attempting to unscale FP16 gradients.")
    if known is not None:
        return [(known[0].device, known)]
    if len(set(map(id, grads))) < len(grads):
        raise ValueError(_shared(params))
    if _are_ordinary(grads, dtypes):
        if not all(map(Tensor.is_contiguous, grads)):
            _refuse_overlap(grads)
        device = grads[0].device
        if not any(map(Tensor.is_inference, grads)) and (known := keep_layout(grads)) is not None:
            return [(device, known)]
        return [(device, grads)] if are_on(device, grads) else _by_device(grads)
    _refuse_overlap([grad for grad in grads if type(grad) in PLAIN_TYPES and grad.layout is torch.strided])
    return _ordinary_last([param for param in params if param.grad is not None])


@contextmanager
def borrowed_grads(params: Sequence[Tensor], low_precision_params: Sequence[Tensor]) -> Generator[None]:
    """Parameters that have no gradient have that of their copy, whatever its dtype.

    Raises:
        ValueError: the copies are not as many, or not of the shapes of the parameters; or both have a gradient.
    """
    if not low_precision_params:
        yield
        return
    if [p.shape for p in params] != [c.shape for c in low_precision_params]:
        raise ValueError(
            f"low_precision_params are {len(low_precision_params)} tensors and the optimizer has {len(params)} "
            "parameters, or their shapes differ; pass one copy for each parameter, in the order of the optimizer's "
            "groups"
        )
    pairs = zip(params, low_precision_params, strict=True)
    borrowers = [(param, copy.grad) for param, copy in pairs if copy.grad is not None]
    if any(param.grad is not None for param, _ in borrowers):
        raise ValueError(
            "a parameter has a gradient and its copy has one too; leave gradients on the copies alone, "
            "which the backward writes"
        )
    dtypes = [param.grad_dtype for param, _ in borrowers]
    try:
        for param, grad in borrowers:
            param.grad_dtype = None
            param.grad = grad
        yield
    finally:
        for (param, _), dtype in zip(borrowers, dtypes, strict=True):
            param.grad = None
            param.grad_dtype = dtype


def nonfinite_parameters(
    optimizer: torch.optim.Optimizer,
    low_precision_params: Sequence[Tensor],
    found: dict[torch.device, Tensor],
) -> list[str]:
    """Names of the parameters whose gradients hold inf or nan; of a sharded one, this rank's part is looked at.

    Args:
        optimizer: has the parameters.
        low_precision_params: copies of them that have the gradients; or empty.
        found: by the last check, in these gradients.

    Raises:
        RuntimeError: the check found something that is not there any more.
    Sync: one for each device. Collectives: none.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    with borrowed_grads(params, low_precision_params):
        names = _nonfinite_names(optimizer)
    if not names and any(flag.item() for flag in found.values()):
        raise RuntimeError(
            "the last check of this optimizer found inf or nan, but none of its gradients holds any now: they were "
            "cleared or overwritten; call nonfinite_parameters(optimizer) after unscale_() or step() and before "
            "zero_grad(), backward() or clipping"
        )
    return names


def _nonfinite_names(optimizer: torch.optim.Optimizer) -> list[str]:
    names: dict[torch.device, list[tuple[int, str]]] = {}
    grads: dict[torch.device, list[Tensor]] = {}
    for place, (name, param) in enumerate(_named(optimizer)):
        if param.grad is not None:
            values = _values(param.grad)
            names.setdefault(values.device, []).append((place, name))
            grads.setdefault(values.device, []).append(values)
    found: list[tuple[int, str]] = []
    for device, batch in grads.items():
        found += [
            entry
            for entry, bad in zip(names[device], kernels.nonfinite_mask(batch).tolist(), strict=True)
            if bad
        ]
    return [name for _, name in sorted(found)]


def first_gradient(optimizer: torch.optim.Optimizer) -> Tensor | None:
    params = (param for group in optimizer.param_groups for param in group["params"])
    return next((grad for param in params if (grad := getattr(param, "grad", None)) is not None), None)


def _named(optimizer: torch.optim.Optimizer) -> list[tuple[str, Tensor]]:
    named: list[tuple[str, Tensor]] = []
    for g, group in enumerate(optimizer.param_groups):
        names: Any = group.get("param_names")
        for i, param in enumerate(group["params"]):
            label = f"param_groups[{g}]['params'][{i}] of shape {tuple(param.shape)}"
            named.append((names[i] if names else label, param))
    return named


def _values(grad: Tensor) -> Tensor:
    """The memory in which a gradient keeps its numbers: a DTensor's local part, a sparse tensor's values."""
    local: Any = getattr(grad, "to_local", None)
    if local is not None:
        grad = local()
    return grad._values() if grad.is_sparse else grad


def _are_ordinary(grads: list[Tensor], dtypes: set[torch.dtype]) -> bool:
    return (
        PLAIN_TYPES.issuperset(map(type, grads))
        and dtypes <= KERNEL_DTYPES
        and layouts_of(grads) == {torch.strided}
    )


def _ordinary_last(params: list[Tensor]) -> list[Batch]:
    refusing: list[Batch] = []
    ordinary: list[Tensor] = []
    # torch hands its operator what has one device and one dtype: what it refuses together is refused together here.
    for device, dtype, grads in _by_device_and_dtype([_numbers_of(param) for param in params]):
        if _are_ordinary(grads, {dtype}):
            ordinary += grads
        else:
            refusing.append((device, grads))
    return refusing + _by_device(ordinary)


def _numbers_of(param: Tensor) -> Tensor:
    grad = param.grad
    assert grad is not None
    if not grad.is_sparse:
        return grad
    return (coalesced(param) if grad.dtype is torch.float16 else grad)._values()


def coalesced(param: Tensor) -> Tensor:
    """The gradient; of a sparse one `.grad` is replaced by one that holds each element once."""
    grad = param.grad
    assert grad is not None
    if grad.is_sparse and not grad.is_coalesced():
        param.grad = grad = grad.coalesce()
    return grad


def _refuse_overlap(grads: list[Tensor]) -> None:
    for grad in grads:
        if not grad.is_contiguous() and overlaps_itself(grad):
            raise RuntimeError(OVERLAP)


def _by_device(grads: list[Tensor]) -> list[Batch]:
    batches: dict[torch.device, list[Tensor]] = {}
    for grad in grads:
        batches.setdefault(grad.device, []).append(grad)
    return list(batches.items())


def _by_device_and_dtype(grads: list[Tensor]) -> list[tuple[torch.device, torch.dtype, list[Tensor]]]:
    groups: Any = torch._C._group_tensors_by_device_and_dtype([[*grads]], False)
    return [(device, dtype, group) for (device, dtype), ([group], _) in groups.items()]


def _shared(params: list[Tensor]) -> str:
    seen: dict[int, int] = {}
    for place, param in enumerate(params):
        if param.grad is not None and (first := seen.setdefault(id(param.grad), place)) != place:
            return (
                f"parameters {first} and {place} of this optimizer, counted over all groups, have one gradient tensor, "
                "which would be unscaled twice; give the optimizer each parameter once, and each its own gradient"
            )
    raise AssertionError("no gradient is shared")
