"""Gradients of an optimizer: batches for the kernels, and names of the parameters with inf or nan.

All or nothing
    `sorted_gradients` raises for invalid gradients before one is changed. Gradients that an operator may still refuse
    (tensor subclasses, dtypes and layouts that torch's operator does not support) come first, so that the ordinary
    gradients after them are unchanged if it raises.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from impl import kernels
from impl.kernels import (
    KERNEL_DTYPES,
    OVERLAP,
    PLAIN_TYPES,
    TensorList,
    are_on,
    dtypes_of,
    has_nested,
    is_plain_strided,
    keep_layout,
    layouts_of,
    overlaps_itself,
    recognize_layout,
)
from impl.optim._mesh_placements import mesh_placements
from impl.optim._optimizers import params_of
from impl.optim._shards import all_reduce_max_, local_part, local_parts


class NonfiniteGradient(NamedTuple):
    """A gradient, or one rank's part of it, that holds inf or nan. `print` shows it in one line."""

    name: str
    rank: int  # rank of the default group, which holds the elements
    elements: int  # number of elements that are inf or nan

    def __str__(self) -> str:
        return f"{self.name}: {self.elements} element{'' if self.elements == 1 else 's'} on rank {self.rank}"


class _Report(NamedTuple):
    """Report of a rank about its own gradients."""

    nonfinite: Sequence[tuple[int, NonfiniteGradient]]  # index of the parameter, and its gradient
    has_lost_inf: bool  # the last check found inf or nan, now gone
    failure: str | None = None


# Gradients on one device, which are changed together.
Batch = tuple[torch.device, TensorList]


def sorted_gradients(optimizer: torch.optim.Optimizer, allow_fp16: bool) -> list[Batch]:
    """Return each gradient of `optimizer` once, in batches for `kernels.unscale_`. Those that may raise come first.

    A DTensor is replaced by its local tensor, and a sparse gradient by its values. A sparse float16 gradient is
    coalesced first, also in `.grad`, because the sum of duplicates may overflow even if no summand does.

    Raises:
        AssertionError: a parameter is not a tensor.
        ValueError: a gradient is float16 without `allow_fp16`; or two parameters have the same gradient.
        RuntimeError: elements of a gradient share memory.
    Sync: coalescing, like torch.
    """
    params = params_of(optimizer)
    for param_type in set(map(type, params)) - PLAIN_TYPES:
        if not issubclass(param_type, Tensor):
            raise AssertionError(f"expected param to be torch.Tensor, got {param_type.__name__}")
    grads = [grad for param in params if (grad := param.grad) is not None]
    if not grads:
        return []
    if not PLAIN_TYPES.issuperset(map(type, grads)):
        grads = local_parts(grads)
    tensors = TensorList(grads, recognize_layout(grads))
    dtypes = dtypes_of(tensors.representatives)
    if torch.float16 in dtypes and not allow_fp16:
        raise ValueError("Attempting to unscale FP16 gradients.")
    if tensors.layout is not None:
        return [(grads[0].device, tensors)]
    if len(set(map(id, grads))) < len(grads):
        raise ValueError(_describe_shared_grad(params))
    if _are_ordinary(grads, dtypes):
        if not all(map(Tensor.is_contiguous, grads)):
            _check_no_overlap(grads)
        if not are_on(device := grads[0].device, grads):
            return [*TensorList(grads).by_device().items()]
        layout = None if any(map(Tensor.is_inference, grads)) else keep_layout(grads)
        return [(device, TensorList(grads, layout))]
    _check_no_overlap([grad for grad in grads if is_plain_strided(grad)])
    return _ordinary_last([param for param in params if param.grad is not None])


def combine_over_meshes(
    optimizer: torch.optim.Optimizer,
    found_inf_per_device: dict[torch.device, Tensor],
    is_combined_later: Callable[[DeviceMesh], bool],
) -> None:
    """Set each device's flag to the largest one of the ranks that hold shards of the DTensor gradients on it.

    Args:
        is_combined_later: answers whether the caller combines the flags of a mesh, which is left out here.
    Collectives: one all-reduce for each dimension of a mesh that gradients are sharded over. Narrow meshes come first,
        so that their flags reach the ranks of wider ones.
    """
    params = params_of(optimizer)
    if not PLAIN_TYPES.issuperset(map(type, params)):
        _combine_over_meshes(params, found_inf_per_device, is_combined_later)


# Dynamo cannot trace queries of process groups.
@kernels.dynamo_disable
def _combine_over_meshes(
    params: Sequence[Tensor],
    found_inf_per_device: dict[torch.device, Tensor],
    is_combined_later: Callable[[DeviceMesh], bool],
) -> None:
    grads = [grad for param in params if (grad := param.grad) is not None]
    specs = mesh_placements(grads)
    dims: dict[DeviceMesh, set[int]] = {}
    for mesh, placements in specs.representatives():
        if mesh is not None:
            sharded = {dim for dim, placement in enumerate(placements) if not placement.is_replicate()}
            dims.setdefault(mesh, set()).update(sharded)
    for mesh in sorted(dims, key=DeviceMesh.size):
        if mesh.get_coordinate() is None or is_combined_later(mesh):
            continue
        on_mesh = (grad for grad, own_mesh in zip(grads, specs.meshes, strict=True) if own_mesh == mesh)
        for device in {grad.device: None for grad in on_mesh}:  # the same order on all ranks
            for dim in sorted(dims[mesh]):
                all_reduce_max_(found_inf_per_device[device], mesh.get_group(dim))


@contextmanager
def grads_from_copies(params: Sequence[Tensor], low_precision_params: Sequence[Tensor]) -> Generator[None]:
    """Context manager that gives parameters without a gradient the gradient of their copy, of any dtype.

    Raises:
        ValueError: number or shapes of copies and parameters differ; or both have a gradient.
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
    filled = [(param, copy.grad) for param, copy in pairs if copy.grad is not None]
    if any(param.grad is not None for param, _ in filled):
        raise ValueError(
            "a parameter and its low-precision copy both have a gradient; keep only the copy's, which backward writes"
        )
    dtypes = [param.grad_dtype for param, _ in filled]
    try:
        for param, grad in filled:
            param.grad_dtype = None
            param.grad = grad
        yield
    finally:
        for (param, _), dtype in zip(filled, dtypes, strict=True):
            param.grad = None
            param.grad_dtype = dtype


def nonfinite_parameters(
    optimizer: torch.optim.Optimizer,
    low_precision_params: Sequence[Tensor],
    local_found_inf: dict[torch.device, Tensor],
    groups: Sequence[dist.ProcessGroup | None],
) -> list[NonfiniteGradient]:
    """Return the gradients that hold inf or nan, on this rank and on all ranks of `groups`, sorted by parameter.

    Args:
        optimizer: owns the parameters.
        low_precision_params: copies of the parameters that have the gradients, or empty.
        local_found_inf: flags of the last check of these gradients.
        groups: groups over which ranks exchange reports. Each rank passes on the reports of earlier groups.

    Raises:
        RuntimeError: the last check found inf or nan, but no gradient holds any now; or another rank raised.
    Sync: one for each device, and another if no gradient on this rank holds inf or nan. Collectives: one
        `all_gather_object` for each group, which waits for its ranks.
    """
    rank = rank_in(groups)
    failure: Exception | None = None
    try:
        report = _report_of_rank(optimizer, low_precision_params, local_found_inf, rank)
    except Exception as error:
        # Peers wait for this rank, so raise after the exchange.
        failure, report = error, _Report([], False, f"{type(error).__name__}: {error}")
    reports = {rank: report}
    for group in groups:
        by_rank: list[dict[int, _Report]] = [{}] * dist.get_world_size(group)
        dist.all_gather_object(by_rank, reports, group=group)
        reports = {rank: report for known in by_rank for rank, report in known.items()}
    if failure is not None:
        raise failure
    for rank, report in reports.items():
        if report.failure is not None:
            raise RuntimeError(f"rank {rank} cannot name its gradients with inf or nan: {report.failure}")
    nonfinite = [entry for report in reports.values() for entry in report.nonfinite]
    if not nonfinite and any(report.has_lost_inf for report in reports.values()):
        raise RuntimeError(
            "the last check of this optimizer found inf or nan, but none of its gradients holds any now: they were "
            "cleared or overwritten; call nonfinite_parameters(optimizer) after unscale_() or step() and before "
            "zero_grad(), backward() or clipping"
        )
    return [gradient for _, gradient in sorted(nonfinite, key=lambda entry: (entry[0], entry[1].rank))]


def rank_in(groups: Sequence[dist.ProcessGroup | None]) -> int:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return next((group.rank() for group in groups if group is not None), 0)


def _report_of_rank(
    optimizer: torch.optim.Optimizer,
    low_precision_params: Sequence[Tensor],
    local_found_inf: dict[torch.device, Tensor],
    rank: int,
) -> _Report:
    params = params_of(optimizer)
    with grads_from_copies(params, low_precision_params):
        nonfinite = _nonfinite_gradients(optimizer, rank)
    return _Report(nonfinite, not nonfinite and any(flag.item() for flag in local_found_inf.values()))


def _nonfinite_gradients(optimizer: torch.optim.Optimizer, rank: int) -> list[tuple[int, NonfiniteGradient]]:
    names: dict[torch.device, list[tuple[int, str]]] = {}
    grads: dict[torch.device, list[Tensor]] = {}
    for index, (name, param) in enumerate(named_params(optimizer)):
        if param.grad is not None:
            values = values_of(param.grad)
            names.setdefault(values.device, []).append((index, name))
            grads.setdefault(values.device, []).append(values)
    nonfinite: list[tuple[int, NonfiniteGradient]] = []
    for device, batch in grads.items():
        counts = kernels.nonfinite_counts(batch).tolist()
        nonfinite += [
            (index, NonfiniteGradient(name, rank, count))
            for (index, name), count in zip(names[device], counts, strict=True)
            if count
        ]
    return nonfinite


def first_gradient(optimizer: torch.optim.Optimizer) -> Tensor | None:
    params = params_of(optimizer)
    return next((grad for param in params if (grad := getattr(param, "grad", None)) is not None), None)


def named_params(optimizer: torch.optim.Optimizer) -> list[tuple[str, Tensor]]:
    """Return the optimizer's parameters with the names that it knows, or else with group, index and shape.

    The names of a group whose list was changed since are not used.
    """
    named: list[tuple[str, Tensor]] = []
    for g, group in enumerate(optimizer.param_groups):
        names: Any = group.get("param_names") or ()
        are_current = len(names) == len(group["params"])
        for i, param in enumerate(group["params"]):
            label = f"param_groups[{g}]['params'][{i}] of shape {tuple(param.shape)}"
            named.append((names[i] if are_current else label, param))
    return named


def values_of(grad: Tensor) -> Tensor:
    """Return the dense tensor with a gradient's elements: a DTensor's local tensor, a sparse tensor's values."""
    local: Any = getattr(grad, "to_local", None)
    if local is not None:
        grad = local()
    return grad._values() if grad.is_sparse else grad


def _are_ordinary(grads: list[Tensor], dtypes: set[torch.dtype]) -> bool:
    return (
        PLAIN_TYPES.issuperset(map(type, grads))
        and not has_nested(grads)
        and dtypes <= KERNEL_DTYPES
        and layouts_of(grads) == {torch.strided}
    )


def _ordinary_last(params: list[Tensor]) -> list[Batch]:
    others: list[Batch] = []
    ordinary: list[Tensor] = []
    # Like torch, pass gradients of one device and dtype to the operator together, so that it raises for the same ones.
    for device, dtype, grads in _by_device_and_dtype([_dense_grad(param) for param in params]):
        if _are_ordinary(grads, {dtype}):
            ordinary += grads
        else:
            others.append((device, TensorList(grads)))
    return [*others, *TensorList(ordinary).by_device().items()]


def _dense_grad(param: Tensor) -> Tensor:
    """Return the local gradient, or the values of a sparse one. A sparse float16 gradient is coalesced first.

    The sum of duplicate rows can overflow in float16 although each row is finite.
    """
    grad = param.grad
    assert grad is not None
    if not grad.is_sparse:
        return local_part(grad)
    return (coalesced(param) if grad.dtype is torch.float16 else grad)._values()


def coalesced(param: Tensor) -> Tensor:
    """Return the gradient of `param`. Coalesce a sparse gradient first, and store it in `.grad`."""
    grad = param.grad
    assert grad is not None
    if grad.is_sparse and not grad.is_coalesced():
        param.grad = grad = grad.coalesce()
    return grad


def _check_no_overlap(grads: list[Tensor]) -> None:
    for grad in grads:
        if not grad.is_contiguous() and overlaps_itself(grad):
            raise RuntimeError(OVERLAP)


def _by_device_and_dtype(grads: list[Tensor]) -> list[tuple[torch.device, torch.dtype, list[Tensor]]]:
    groups: Any = torch._C._group_tensors_by_device_and_dtype([[*grads]], False)
    return [(device, dtype, group) for (device, dtype), ([group], _) in groups.items()]


def _describe_shared_grad(params: list[Tensor]) -> str:
    first_index: dict[int, int] = {}
    for index, param in enumerate(params):
        if param.grad is not None and (first := first_index.setdefault(id(param.grad), index)) != index:
            return (
                f"parameters {first} and {index} of this optimizer, counted over all groups, have one gradient tensor, "
                "which would be unscaled twice; give the optimizer each parameter once, and each its own gradient"
            )
    raise AssertionError("no gradient is shared")
