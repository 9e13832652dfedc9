"""Parameter of fully_shard: a DTensor whose shard this rank owns, and the layout of its elements in collectives.

n = elements of a rank's shard, padded so that all ranks' shards are equally long; W = ranks it is sharded over.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Generator, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from impl._names import describe_names
from impl.distributed.fsdp._layout.grad_dtypes import has_grad_dtype
from impl.distributed.fsdp._params.autograd import apply_gradient_hooks, share_hooks
from impl.distributed.fsdp._params.param_registration import ManagedParam, note_replaced, owner_of_replaced
from impl.distributed.fsdp._params.tensor_parallel import combine_meshes, new_dtensor

_instances: weakref.WeakSet[ShardedParam] = weakref.WeakSet()


def rows_of(rows: int, rank: int, world: int) -> tuple[int, int]:
    """Return the first row that `rank` owns, and one past its last, like torch.chunk: the tail is short or empty."""
    width = -(-rows // world)
    return min(rank * width, rows), min((rank + 1) * width, rows)


def _is_sharded_alike(parameter: DTensor, other: DTensor) -> bool:
    """Return whether both parameters have shards of the same elements on every rank."""
    return (
        parameter.shape == other.shape
        and (parameter.placements == other.placements or other.device_mesh.size() == 1)
        and torch.equal(parameter.device_mesh.mesh, other.device_mesh.mesh)
    )


def _description(parameter: Tensor) -> str:
    kind = type(parameter).__name__
    if not isinstance(parameter, DTensor):
        return kind
    placements = ", ".join(map(str, parameter.placements))
    return f"{kind} of shape {tuple(parameter.shape)} placed as ({placements})"


class ShardedParam:
    """Parameter that is sharded over a mesh.

    Args:
        managed: the parameter and its places in modules.
        mesh: one dimension to shard over, or two: to replicate over, and to shard over.
        dim: dimension to shard. Only the first one may be sharded unevenly.
        dtype: dtype of the shard.

    Raises:
        NotImplementedError: the parameter is not contiguous, or would be sharded unevenly in another than its first
            dimension.
    """

    def __init__(  # noqa: PLR0913  mesh and place of the shard
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
        self.unit_state: weakref.ref[Any] | None = None  # state of the unit that the parameter belongs to
        self.name = managed.info.name
        note_replaced(managed.original, self.name, self)
        _instances.add(self)
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
        self.local_shape = with_dim_size(self.shape, self.dim, stop - start)
        self._local_stride = contiguous_stride(self.local_shape)
        self.padded_shape = with_dim_size(self.shape, self.dim, -(-size // world))
        self.padded_numel = prod(self.padded_shape)
        spec = self._spec_over(mesh, dtype)
        local = self._copy_shard(parameter.detach(), rank, stop - start)
        if local.dtype is not dtype:
            local = local.to(dtype)
        if offloads and not local.is_meta:
            local = local.cpu()
        # An nn.Parameter, and a DTensor.
        self.sharded: Any = nn.Parameter(new_dtensor(local, spec), requires_grad=parameter.requires_grad)
        share_hooks(managed.original, self.sharded)
        if has_grad_dtype(managed.original):
            self.sharded.grad_dtype = managed.original.grad_dtype
        self._note_memory()

    def _spec_over(self, mesh: DeviceMesh, dtype: torch.dtype) -> DTensorSpec:
        """Return the DTensor spec, also over tensor-parallel ranks, whose shards of the same dimension are larger."""
        parallel = self.info.parallel
        replicas = (Replicate(),) * (mesh.ndim - 1)
        if parallel is None:
            meta = TensorMeta(torch.Size(self.shape), self.stride, dtype)
            return DTensorSpec(mesh, (*replicas, Shard(self.dim)), tensor_meta=meta)
        meta = TensorMeta(parallel.shape, parallel.stride, dtype)
        if parallel.data_dims is not None:
            return parallel.data_dims.spec(parallel.placements, self.dim, meta)
        shards = parallel.num_shards_of(self.dim)
        placement = Shard(self.dim) if shards == 1 else _StridedShard(self.dim, split_factor=shards)
        placements = (*replicas, placement, *parallel.placements)
        return DTensorSpec(combine_meshes(parallel.mesh, mesh), placements, tensor_meta=meta)

    def _copy_shard(self, unsharded: Tensor, rank: int, width: int) -> Tensor:
        """Return a copy of the shard of `rank`.

        Subclasses are split by the same operators as in torch, because they may support no others.
        """
        if type(unsharded) is Tensor:
            start = rank * self.padded_shape[self.dim]
            shard = unsharded.narrow(self.dim, min(start, self.shape[self.dim]), width)
            return shard.clone(memory_format=torch.contiguous_format)
        shard = unsharded.new_zeros(self.padded_shape).narrow(self.dim, 0, width)
        if width:
            shard.copy_(unsharded.chunk(self.world, self.dim)[rank])
        return shard

    @property
    def is_sharded(self) -> bool:
        """Whether the parameter is sharded, even over one rank."""
        parallel = self.info.parallel
        return parallel is None or parallel.data_dims is None or bool(parallel.data_dims.shard)

    @property
    def dtype(self) -> torch.dtype:
        return self.sharded.dtype

    @property
    def local(self) -> Tensor:
        """Shard of this rank, without padding."""
        return self.sharded._local_tensor

    @local.setter
    def local(self, shard: Tensor) -> None:
        self.sharded._local_tensor = shard
        self._note_memory()

    def _note_memory(self) -> None:
        self._storage = self.sharded.untyped_storage()._cdata
        self._shard = weakref.ref(self.sharded._local_tensor)

    def take_assigned_data(self) -> bool:
        """Return whether the user assigned `.data` since the last call, which does not change the local tensor."""
        # A cast or move of the module gives the parameter another local tensor too.
        if self.sharded.untyped_storage()._cdata == self._storage:
            return False
        is_same_shard = self._shard() is self.sharded._local_tensor
        self._note_memory()
        return is_same_shard

    def check_places(self, expected: Tensor) -> None:
        """Check that no place in a module lacks the parameter, and that all places or none have another tensor.

        Args:
            expected: tensor that the places have unless the user has changed them.
        Raises:
            TypeError: the user has removed the parameter, or replaced it at some of its places.
        """
        tensors = [(place, place.module._parameters.get(place.attribute)) for place in self.info.locations]
        removed = [str(place) for place, tensor in tensors if tensor is None]
        if removed:
            raise TypeError(
                f"{describe_names(removed)} was removed; remove or parametrize it before fully_shard, or set it to "
                "zero and call requires_grad_(False)"
            )
        changed = [str(place) for place, tensor in tensors if tensor is not expected]
        unchanged = [str(place) for place, tensor in tensors if tensor is expected]
        if changed and unchanged:
            raise TypeError(
                f"{self.name} is tied, and was replaced as {describe_names(changed)} but not as "
                f"{describe_names(unchanged)}; replace it at all places, or untie the weights before fully_shard"
            )

    def replace(self, other: nn.Parameter) -> None:
        """Use a parameter that the user has assigned instead."""
        if not isinstance(other, DTensor) or not _is_sharded_alike(other, self.sharded):
            raise TypeError(
                f"{self.name} was replaced by a {_description(other)}, but the parameter is a "
                f"{_description(self.sharded)}; assign a DTensor of distribute_tensor(value, parameter.device_mesh, "
                "parameter.placements), or copy an unsharded value to the ranks by set_model_state_dict(); pass "
                "detached tensors to functional_call, not parameters"
            )
        if has_grad_dtype(self.sharded) and not has_grad_dtype(other):
            other.grad_dtype = self.sharded.grad_dtype
        self.sharded = other
        self._note_memory()

    @contextlib.contextmanager
    def keeping_grad_dtype(self) -> Generator[None]:
        """Context manager for casts and moves of the parameter, in which an explicit `grad_dtype` would be lost.

        The gradient keeps its dtype and follows to the device.
        """
        if not has_grad_dtype(self.sharded):
            yield
            return
        grad_dtype, grad = self.grad_dtype, self.sharded.grad
        self.sharded.grad = None
        try:
            yield
        finally:
            self.sharded.grad_dtype = grad_dtype
            if grad is not None:
                self.sharded.grad = grad.to(self.sharded.device)

    @property
    def grad_dtype(self) -> torch.dtype | None:
        """Dtype of the sharded gradient, or None for any."""
        return self.sharded.grad_dtype

    def in_grad_dtype(self, shard: Tensor) -> Tensor:
        grad_dtype = self.grad_dtype
        return shard if grad_dtype is None else shard.to(grad_dtype)

    def gradient(self, local: Tensor) -> Any:
        """Return the sharded gradient with this rank's shard `local`."""
        spec = self.sharded._spec
        if local.dtype is not self.dtype:
            spec = replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=local.dtype))
        return new_dtensor(local, spec)

    def apply_hooks(self, grad: Any) -> Tensor:
        """Run the parameter's hooks on a gradient, and return this rank's shard of the result."""
        result = apply_gradient_hooks(self.sharded._backward_hooks, grad, self.name)
        # A copy, because hooks may keep their argument or return a tensor that they keep.
        return result.redistribute(placements=grad.placements)._local_tensor.clone()

    def post_forward_shard(self, run: Tensor, rank: int, ranks: int) -> Tensor:
        """Return a copy of the shard of a run [W * n] that `rank` of fewer `ranks` keeps for a backward.

        Its DTensor may have one row more than the parameter. That row is padding that was never written to, so it is
        zeroed.
        """
        shard = run.view(ranks, -1)[rank].clone()
        shard[max(prod(self.shape) - rank * len(shard), 0) :].zero_()
        return shard

    def post_forward_param(self, shard: Tensor, mesh: DeviceMesh) -> nn.Parameter:
        """Return rows of the unsharded parameter that the rank keeps for a backward, over the second mesh dimension."""
        start, stop = rows_of(self.shape[0], mesh.get_local_rank(1), mesh.size(1))
        shape = (stop - start, *self.shape[1:])
        meta = self.sharded._spec.tensor_meta
        spec = DTensorSpec(mesh, (Replicate(), Shard(0)), tensor_meta=meta)
        dtensor = new_dtensor(leading_view(shard, shape), spec)
        param = nn.Parameter(dtensor, requires_grad=self.sharded.requires_grad)
        note_replaced(param, self.name, self)  # an optimizer must not step it
        if has_grad_dtype(self.sharded):
            param.grad_dtype = self.grad_dtype
        return param

    def copy_out(self, shards: Tensor, unsharded: Tensor) -> None:
        """Copy all ranks' shards [W, n] into the unsharded parameter.

        For sharding in another than the first dimension.
        """
        unsharded.view(self._split_shape()).copy_(
            side_by_side(shards, self.world, self.padded_shape, self.dim)
        )

    def rows(self, grad: Tensor) -> Tensor:
        """Return a gradient with the ranks' shards concatenated in its first dimension."""
        if self.dim == 0:
            return grad
        shards = grad.reshape(self._split_shape()).movedim(self.dim, 0)
        return shards.reshape(self.world * self.padded_shape[0], *self.padded_shape[1:])

    def _split_shape(self) -> tuple[int, ...]:
        return (*self.shape[: self.dim], self.world, *self.padded_shape[self.dim :])

    def shard_in(self, flat: Tensor, start: int) -> Tensor:
        """Return this rank's shard as a view of a contiguous tensor, from the offset `start` of its storage on."""
        return flat.as_strided(self.local_shape, self._local_stride, start)


def sharded_param_of(replaced: Tensor) -> ShardedParam | None:
    """Return the owner of an original or unsharded parameter, or None if it is not sharded or its modules are gone."""
    _, owner = owner_of_replaced(replaced) or ("", None)
    return owner if isinstance(owner, ShardedParam) else None


def params_by_sharded_tensor() -> dict[Tensor, ShardedParam]:
    """Return the sharded parameters of all units by the tensor that modules have while their unit is sharded."""
    return {param.sharded: param for param in _instances}


def name_of_sharded(sharded: Tensor) -> str | None:
    """Return the name of a sharded parameter in its model, or None if no unit manages it."""
    return next((param.name for param in _instances if param.sharded is sharded), None)


def with_dim_size(shape: Sequence[int], dim: int, width: int) -> tuple[int, ...]:
    return (*shape[:dim], width, *shape[dim + 1 :])


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))


def side_by_side(shards: Tensor, world: int, shape: Sequence[int], dim: int) -> Tensor:
    """Return a view of all ranks' shards, each of `shape`, with the ranks before the sharded dimension."""
    return shards.view(world, *shape).movedim(0, dim)


def leading_view(run: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a view of `shape` at the start of a run, which may end with padding."""
    return run[: prod(shape)].view(shape)


def offsets(numels: Sequence[int]) -> list[int]:
    """Return the start of each of several consecutive runs, and the end of the last one."""
    return list(itertools.accumulate(numels, initial=0))
