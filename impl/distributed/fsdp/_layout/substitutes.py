"""Tensors that `torch.func.functional_call` substitutes for a group's parameters in one forward."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial

from impl.distributed.fsdp._layout.sharded_param import ShardedParam


class Substitute(NamedTuple):
    """A user's tensor that replaces a parameter for one forward."""

    original: Tensor
    # Tensor that modules compute with in the forward. None before and after it.
    unsharded: Tensor | None

    def matches(self, tensor: Tensor | None) -> bool:
        return tensor is not None and (tensor is self.original or tensor is self.unsharded)


def unsharded_substitute(
    original: Tensor, param: ShardedParam, device: torch.device, param_dtype: torch.dtype | None
) -> Tensor:
    """Return the tensor that modules compute with instead of `param`.

    A DTensor over the parameter's mesh is gathered and cast to `param_dtype`, and gets the mean of the ranks'
    gradients. Any other tensor is returned as it is.

    Raises:
        NotImplementedError: the parameter is sharded by tensor parallelism too.

    Collectives: an all-gather of a DTensor, and a reduce-scatter in backward.
    """
    mesh = param.sharded.device_mesh
    if not isinstance(original, DTensor) or original.device_mesh != mesh:
        return original
    if param.info.parallel is not None:
        raise NotImplementedError(
            f"functional_call got a DTensor over the mesh {tuple(mesh.mesh_dim_names or ())} for {param.name}, which "
            "is sharded by tensor parallelism too; pass a DTensor over the tensor-parallel mesh only"
        )
    on_device = cast("DTensor", original.to(device))
    full = on_device.full_tensor(grad_placements=[Partial("avg")] * mesh.ndim)
    return full.to(param_dtype) if param_dtype is not None and full.is_floating_point() else full
