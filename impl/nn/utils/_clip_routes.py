"""Routes of gradients through clipping: `route_for` chooses one, which returns the norm, scales and clamps.

Kernels
    Ordinary gradients (plain dense floating-point tensors without overlapping elements) are passed to `impl.kernels`,
    one device at a time: one pass for the norm, one for the scaling, and a two-norm that neither overflows nor
    underflows in between. A list of plain tensors of which only some are ordinary is split. Ordinary gradients cannot
    raise once it is known that their dtypes can hold the numbers. So the others are changed first.
LocalShards
    If some gradients are DTensors, over any meshes, and the others plain, the kernels get each rank's local tensors,
    and the ranks exchange their norms.
TorchOperators
    All other gradients take the torch operators that torch's own functions call, so that they raise torch's errors:
    sparse, nested, complex and integer gradients, other tensor subclasses, overlapping memory, empty gradients if the
    norm has no identity, and everything under `torch.compile` and in the transforms of `torch.func`, some of which know
    no foreach operators. One such subclass sends the whole list to the operators.

If a torch operator raises, all gradients are restored. For this, plain tensors that take operators and DTensors among
plain tensors are copied. A list with only DTensors is changed as a whole or not at all.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

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
    TensorList,
    are_on,
    dtypes_of,
    has_nested,
    is_plain_strided,
    is_transformed,
    keep_layout,
    layouts_of,
    overlaps_itself,
    recognize_layout,
)
from impl.nn.utils._dtensors import ShardedTensors, local_value, sharded_tensors
from impl.optim._shards import is_distributed


@dataclass(frozen=True)
class TorchOperators:
    tensors: list[Tensor]
    foreach: bool | None

    def total_norm(self, norm_type: float) -> Tensor:
        if not self.tensors:
            return torch.tensor(0.0)
        device = self.tensors[0].device
        norms: list[Tensor] = []
        for tensors, by_foreach in self._lists():
            if by_foreach:
                norms += torch._foreach_norm(tensors, norm_type)
            else:
                norms += [torch.linalg.vector_norm(tensor, norm_type) for tensor in tensors]
        return torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms]), norm_type)

    def scale_(self, max_norm: float, total_norm: Tensor) -> None:
        coefficient = kernels.clip_coefficient(max_norm, total_norm)

        def scale_(tensors: list[Tensor], by_foreach: bool) -> None:
            factor = coefficient.to(tensors[0].device)
            if by_foreach:
                for batch in kernels.foreach_slices(tensors):
                    torch._foreach_mul_(tensors[batch], factor)
            else:
                for tensor in tensors:
                    tensor.mul_(factor)

        self._change_(scale_)

    def clamp_(self, high: float) -> None:
        def clamp_(tensors: list[Tensor], by_foreach: bool) -> None:
            if by_foreach:
                torch._foreach_clamp_min_(tensors, -high)
                torch._foreach_clamp_max_(tensors, high)
            else:
                for tensor in tensors:
                    tensor.clamp_(min=-high, max=high)

        self._change_(clamp_)

    def _lists(self) -> list[tuple[list[Tensor], bool]]:
        """Return the tensors of each device and dtype, with whether they take foreach operators."""
        lists: list[tuple[list[Tensor], bool]] = []
        for device, _, group in by_device_and_dtype(self.tensors):
            if self.foreach and not _device_has_foreach_support(device):
                raise RuntimeError(
                    f"foreach=True was passed, but can't use the foreach API on {device.type} tensors"
                )
            by_foreach = _has_foreach_support(group, device) if self.foreach is None else bool(self.foreach)
            lists.append((group, by_foreach))
        return lists

    def _change_(self, change_: Callable[[list[Tensor], bool], None]) -> None:
        """Apply `change_` to each list. Restore all tensors if it raises."""
        lists = self._lists()
        copies: list[tuple[Tensor, Tensor]] = []
        if not torch.compiler.is_compiling() and not is_transformed():
            _check_no_hidden_overlap(self.tensors)
            is_mixed = any(type(tensor) in PLAIN_TYPES for tensor in self.tensors)
            copies = [
                (tensor, tensor.clone())
                for tensor in self.tensors
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


@dataclass(frozen=True)
class Kernels:
    tensors: list[Tensor]
    by_device: dict[torch.device, TensorList]  # ordinary tensors, devices in order of first appearance
    foreach: bool | None
    others: TorchOperators | None = None  # route of the other tensors

    @property
    def _by_operators(self) -> TorchOperators:
        return TorchOperators(self.tensors, self.foreach)

    def total_norm(self, norm_type: float) -> Tensor:
        is_extreme = norm_type < 0.0 or norm_type == math.inf
        # An empty tensor has no largest or smallest element, for which torch's operators have an error.
        if self.others is not None or (is_extreme and not all(map(Tensor.numel, self.tensors))):
            return self._by_operators.total_norm(norm_type)
        norms = [kernels.total_norm(tensors, norm_type) for tensors in self.by_device.values()]
        if len(norms) == 1:
            return norms[0]
        device = norms[0].device
        # Norms of order 0 are counts, so add them. All others combine like elements of a vector.
        return kernels.total_norm(
            TensorList([kernels.to_device(norm, device) for norm in norms]), norm_type or 1.0
        )

    def scale_(self, max_norm: float, total_norm: Tensor) -> None:
        # torch's operators raise if a norm that no kernel takes does not fit.
        if type(total_norm) is not Tensor or total_norm.dim() > 0:
            self._by_operators.scale_(max_norm, total_norm)
            return
        if self.others is not None:
            self.others.scale_(max_norm, total_norm)
        for device, tensors in self.by_device.items():
            kernels.clip_(tensors, max_norm, total_norm.to(device))

    def clamp_(self, high: float) -> None:
        if high == 0:
            # The sign of a zero between -0 and 0 depends on the operator, which torch selects for the whole list.
            self._by_operators.clamp_(high)
            return
        self._check_bound(high)
        if self.others is not None:
            self.others.clamp_(high)
        for tensors in self.by_device.values():
            kernels.clamp_(tensors, -high, high)

    def _check_bound(self, high: float) -> None:
        """Raise torch's error if a dtype cannot hold `high`. The kernels would only raise halfway."""
        if torch.finfo(torch.float16).max < high < math.inf:
            for tensors in self.by_device.values():
                for dtype in dtypes_of(tensors.representatives):
                    torch.zeros((), dtype=dtype, device="cpu").clamp_(-high, high)


@dataclass(frozen=True)
class LocalShards:
    tensors: list[Tensor]
    sharded: ShardedTensors
    local: Kernels

    def total_norm(self, norm_type: float) -> Tensor:
        if norm_type > 0.0 and not (norm_type == math.inf and self.sharded.has_empty):
            return self.sharded.total_norm(norm_type)
        return TorchOperators(self.tensors, self.local.foreach).total_norm(norm_type)

    def scale_(self, max_norm: float, total_norm: Tensor) -> None:
        local_norm = local_value(total_norm)
        if local_norm is None or local_norm.dim() > 0:
            TorchOperators(self.tensors, self.local.foreach).scale_(max_norm, total_norm)
            return
        self.local.scale_(max_norm, local_norm)
        self.sharded.increment_versions()

    def clamp_(self, high: float) -> None:
        if self.sharded.has_partial:
            TorchOperators(self.tensors, self.local.foreach).clamp_(high)
            return
        self.local.clamp_(high)
        self.sharded.increment_versions()


Route = TorchOperators | Kernels | LocalShards


def route_for(tensors: list[Tensor], foreach: bool | None) -> Route:
    if torch.compiler.is_compiling() or not tensors or is_transformed():
        return TorchOperators(tensors, foreach)
    if (layout := recognize_layout(tensors)) is not None:
        return Kernels(tensors, {tensors[0].device: TensorList(tensors, layout)}, foreach)
    if not PLAIN_TYPES.issuperset(map(type, tensors)):
        # DTensors may be mixed with plain tensors. Any other subclass decides that by its own implementation.
        return _local_shards(tensors, foreach) or TorchOperators(tensors, foreach)
    if (on_one_device := _ordinary_on_one_device(tensors, foreach)) is not None:
        return Kernels(tensors, {tensors[0].device: on_one_device}, foreach)
    ordinary: dict[torch.device, list[Tensor]] = {}
    others: list[Tensor] = []
    for tensor in tensors:
        if _is_ordinary(tensor):
            ordinary.setdefault(tensor.device, []).append(tensor)
        else:
            others.append(tensor)
    by_device = {device: TensorList(batch) for device, batch in ordinary.items()}
    return Kernels(tensors, by_device, foreach, TorchOperators(others, foreach) if others else None)


def _local_shards(tensors: list[Tensor], foreach: bool | None) -> LocalShards | None:
    """Return the route of DTensors, also among plain tensors, or None if some local tensors are not ordinary."""
    if not any(map(is_distributed, tensors)):
        return None
    sharded = sharded_tensors(tensors)
    if sharded is None or not PLAIN_TYPES.issuperset(map(type, sharded.local.tensors)):
        return None
    local = route_for([*sharded.local.tensors], foreach)
    if not isinstance(local, Kernels) or local.others is not None:
        return None
    if len(local.by_device) == 1:
        [local_tensors] = local.by_device.values()  # perhaps with a known layout
        sharded = replace(sharded, local=local_tensors)
    return LocalShards(tensors, sharded, local)


def _ordinary_on_one_device(tensors: list[Tensor], foreach: bool | None) -> TensorList | None:
    """Return `tensors` if all are ordinary, dense and on one device, else None. Checks whole lists, for speed."""
    if layouts_of(tensors) != {torch.strided} or any(map(Tensor.is_inference, tensors)):
        return None
    device = tensors[0].device
    if not are_on(device, tensors):
        return None
    if (layout := keep_layout(tensors)) is not None or (
        dtypes_of(tensors) <= KERNEL_DTYPES
        and (device.type in ("cpu", "cuda") or _device_has_foreach_support(device))
        and not has_nested(tensors)
        and all(map(Tensor.is_contiguous, tensors))
        # torch raises for lists of views with a negative bit, but not for single ones.
        and not (foreach is False and any(map(Tensor.is_neg, tensors)))
    ):
        return TensorList(tensors, layout)
    return None


def _is_ordinary(tensor: Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and not tensor.is_nested
        and tensor.dtype in KERNEL_DTYPES
        and _device_has_foreach_support(tensor.device)
        and torch._debug_has_internal_overlap(tensor) == 0
        and not tensor.is_neg()  # see `_ordinary_on_one_device`
        and (torch.is_inference_mode_enabled() or not tensor.is_inference())
    )


def by_device_and_dtype(tensors: list[Tensor]) -> list[tuple[torch.device, torch.dtype, list[Tensor]]]:
    groups = _group_tensors_by_device_and_dtype([list(tensors)])
    return [(device, dtype, cast("list[Tensor]", group)) for (device, dtype), ([group], _) in groups.items()]


def _check_no_hidden_overlap(tensors: list[Tensor]) -> None:
    """Raise if elements share memory unnoticed by torch, whose operators would change them several times."""
    for tensor in tensors:
        if (
            is_plain_strided(tensor)
            and torch._debug_has_internal_overlap(tensor) == 2
            and overlaps_itself(tensor)
        ):
            raise RuntimeError(OVERLAP)
