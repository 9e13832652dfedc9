"""One parameter of fully_shard: a DTensor whose part this rank owns, and how its elements travel.

n = elements of a rank's part, padded so that all ranks' parts are as long; W = ranks it is sharded over.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils.weak import WeakTensorKeyDictionary

from impl.distributed.fsdp._layout.grad_dtypes import has_grad_dtype
from impl.distributed.fsdp._params.autograd import apply_gradient_hooks
from impl.distributed.fsdp._params.param_registration import ManagedParam
from impl.distributed.fsdp._params.tensor_parallel import made_dtensor, mesh_beside

# What was made of a parameter, for other modules that have it. Not an attribute, which would be saved with it.
_sharded_as = WeakTensorKeyDictionary()


def rows_of(rows: int, rank: int, world: int) -> tuple[int, int]:
    """The first row that `rank` owns, and one past its last, as torch.chunk cuts them: the tail is short or empty."""
    width = -(-rows // world)
    return min(rank * width, rows), min((rank + 1) * width, rows)


class ShardedParam:
    """
    Args:
        managed: the parameter and where its modules keep it; replaced there by the sharded one.
        mesh: of one dimension to shard over, behind one to replicate over if there are two.
        dim: that is cut; any but the first has to be cut evenly.
        dtype: of the part.

    Raises:
        NotImplementedError: the parameter is not contiguous, or would be cut unevenly in another than its first
            dimension.
    """

    def __init__(  # noqa: PLR0913  where it is cut, and where it is kept
        self,
        managed: ManagedParam,
        mesh: DeviceMesh,
        dim: int,
        rank: int,
        world: int,
        dtype: torch.dtype,
        *,
        offloads: bool,
    ) -> None:
        parameter = managed.parameter
        if not parameter.is_contiguous():
            raise NotImplementedError(
                "FSDP does not support non-contiguous parameters yet: "
                f"param.shape={parameter.shape} param.stride()={parameter.stride()}"
            )
        self.info = managed.info
        self.unit_state: weakref.ref[Any] | None = None  # that it is a parameter of
        _sharded_as[managed.original] = weakref.ref(self)
        self.name = managed.info.name
        self.mesh = mesh
        self.replicates = mesh.ndim == 2
        self.shape, self.stride = parameter.shape, parameter.stride()
        self.dim = dim if dim >= 0 else dim + parameter.ndim
        if self.dim >= parameter.ndim:
            raise AssertionError(
                f"Shard dim {self.dim} is invalid for {parameter.ndim}D tensor: {parameter.shape}"
            )
        size = self.shape[self.dim]
        if self.dim > 0 and size % world:
            raise NotImplementedError(
                f"FSDP does not support uneven sharding on dim {self.dim}: {self.shape} (world size: {world})"
            )
        self.world = world
        start, stop = rows_of(size, rank, world)
        self.local_shape = cut_to(self.shape, self.dim, stop - start)
        self._local_stride = contiguous_stride(self.local_shape)
        self.padded_shape = cut_to(self.shape, self.dim, -(-size // world))
        self.padded_numel = prod(self.padded_shape)
        spec = self._spec_over(mesh, dtype)
        local = self._part_of(parameter.detach(), rank, stop - start)
        if local.dtype is not dtype:
            local = local.to(dtype)
        if offloads and not local.is_meta:
            local = local.cpu()
        # An nn.Parameter, and a DTensor.
        self.sharded: Any = nn.Parameter(made_dtensor(local, spec), requires_grad=parameter.requires_grad)
        # The same dictionaries, so that handles of hooks from before can still remove them.
        self.sharded._backward_hooks = managed.original._backward_hooks
        self.sharded._post_accumulate_grad_hooks = managed.original._post_accumulate_grad_hooks
        if has_grad_dtype(managed.original):
            self.sharded.grad_dtype = managed.original.grad_dtype

    def _spec_over(self, mesh: DeviceMesh, dtype: torch.dtype) -> DTensorSpec:
        """How it lies, also over the ranks of tensor parallelism, whose parts of the same dimension are the coarser."""
        parallel = self.info.parallel
        replicas = (Replicate(),) * (mesh.ndim - 1)
        if parallel is None:
            meta = TensorMeta(torch.Size(self.shape), self.stride, dtype)
            return DTensorSpec(mesh, (*replicas, Shard(self.dim)), tensor_meta=meta)
        meta = TensorMeta(parallel.shape, parallel.stride, dtype)
        if parallel.data is not None:
            return parallel.data.spec(parallel.placements, self.dim, meta)
        parts = parallel.parts_of(self.dim)
        mine = Shard(self.dim) if parts == 1 else _StridedShard(self.dim, split_factor=parts)
        placements = (*replicas, mine, *parallel.placements)
        return DTensorSpec(mesh_beside(parallel.mesh, mesh), placements, tensor_meta=meta)

    def _part_of(self, whole: Tensor, rank: int, width: int) -> Tensor:
        """A copy of the part of `rank`; of subclasses by the operators that torch calls, which is all they may know."""
        if type(whole) is Tensor:
            start = rank * self.padded_shape[self.dim]
            part = whole.narrow(self.dim, min(start, self.shape[self.dim]), width)
            return part.clone(memory_format=torch.contiguous_format)
        part = whole.new_zeros(self.padded_shape).narrow(self.dim, 0, width)
        if width:
            part.copy_(whole.chunk(self.world, self.dim)[rank])
        return part

    @property
    def is_sharded(self) -> bool:
        """Over however few ranks."""
        parallel = self.info.parallel
        return parallel is None or parallel.data is None or bool(parallel.data.shard)

    @property
    def dtype(self) -> torch.dtype:
        return self.sharded.dtype

    @property
    def local(self) -> Tensor:
        """The part of this rank, without padding."""
        return self.sharded._local_tensor

    @local.setter
    def local(self, part: Tensor) -> None:
        self.sharded._local_tensor = part

    def replace(self, other: nn.Parameter) -> None:
        """By what a user has put in its place."""
        if not isinstance(other, DTensor):
            raise TypeError(
                f"{self.name} is sharded, and a {type(other).__name__} that is not has been put in its place; put a "
                "DTensor there, as distribute_tensor(value, parameter.device_mesh, parameter.placements) makes it, or "
                "copy what is whole to the ranks by set_model_state_dict()"
            )
        if has_grad_dtype(self.sharded) and not has_grad_dtype(other):
            other.grad_dtype = self.sharded.grad_dtype
        self.sharded = other

    @property
    def grad_dtype(self) -> torch.dtype | None:
        """Dtype of the sharded gradient; None for any."""
        return self.sharded.grad_dtype

    def in_grad_dtype(self, shard: Tensor) -> Tensor:
        grad_dtype = self.grad_dtype
        return shard if grad_dtype is None else shard.to(grad_dtype)

    def gradient(self, local: Tensor) -> Any:
        """Return the sharded gradient that has this rank's shard of it."""
        spec = self.sharded._spec
        if local.dtype is not self.dtype:
            spec = replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=local.dtype))
        return made_dtensor(local, spec)

    def hooked(self, grad: Any) -> Any:
        """Return what the hooks of the sharded parameter make of a gradient, placed like the parameter."""
        if not self.sharded._backward_hooks:
            return grad
        result = apply_gradient_hooks(self.sharded, grad, self.name)
        return result.redistribute(placements=grad.placements)

    def kept_of(self, run: Tensor, rank: int, ranks: int) -> Tensor:
        """A copy of the part of a run [W * n] that `rank` of fewer `ranks` keeps for a backward.

        What it shows of that may have a row more than there is, which lies in the padding: nobody has written to it.
        """
        kept = run.view(ranks, -1)[rank].clone()
        kept[max(prod(self.shape) - rank * len(kept), 0) :].zero_()
        return kept

    def shown_for_backward(self, part: Tensor, mesh: DeviceMesh) -> nn.Parameter:
        """What the rank keeps of the unsharded parameter for a backward: rows of it, over the second dimension."""
        start, stop = rows_of(self.shape[0], mesh.get_local_rank(1), mesh.size(1))
        shape = (stop - start, *self.shape[1:])
        meta = self.sharded._spec.tensor_meta
        spec = DTensorSpec(mesh, (Replicate(), Shard(0)), tensor_meta=meta)
        made = made_dtensor(beginning_of(part, shape), spec)
        shown = nn.Parameter(made, requires_grad=self.sharded.requires_grad)
        if has_grad_dtype(self.sharded):
            shown.grad_dtype = self.grad_dtype
        return shown

    def copy_out(self, parts: Tensor, unsharded: Tensor) -> None:
        """Into the unsharded parameter what all ranks have, [W, n], of one that is not cut in its first dimension."""
        unsharded.view(self._split_shape()).copy_(
            side_by_side(parts, self.world, self.padded_shape, self.dim)
        )

    def rows(self, grad: Tensor) -> Tensor:
        """A gradient with the ranks' parts one behind the other in its first dimension."""
        if self.dim == 0:
            return grad
        parts = grad.reshape(self._split_shape()).movedim(self.dim, 0)
        return parts.reshape(self.world * self.padded_shape[0], *self.padded_shape[1:])

    def _split_shape(self) -> tuple[int, ...]:
        return (*self.shape[: self.dim], self.world, *self.padded_shape[self.dim :])

    def part_in(self, flat: Tensor, start: int) -> Tensor:
        """The view of a contiguous tensor that has this rank's part, from `start` in its storage on."""
        return flat.as_strided(self.local_shape, self._local_stride, start)


def sharded_as(original: nn.Parameter) -> ShardedParam | None:
    """What fully_shard has made of a parameter; None if nothing, or if its modules are gone."""
    made: weakref.ref[ShardedParam] | None = _sharded_as.get(original)
    return None if made is None else made()


def cut_to(shape: Sequence[int], dim: int, width: int) -> tuple[int, ...]:
    return (*shape[:dim], width, *shape[dim + 1 :])


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))


def side_by_side(parts: Tensor, world: int, shape: Sequence[int], dim: int) -> Tensor:
    """The view of all ranks' parts, each in this shape, that has the ranks just before the dimension that is cut."""
    return parts.view(world, *shape).movedim(0, dim)


def beginning_of(run: Tensor, shape: Sequence[int]) -> Tensor:
    """The view of a run that has a tensor in this shape; behind it may lie padding."""
    return run[: prod(shape)].view(shape)


def offsets(numels: Sequence[int]) -> list[int]:
    """Where each of several runs begins that follow one another, and at the end where the last one ends."""
    return list(itertools.accumulate(numels, initial=0))
