"""Proofs that DeepSpeed's clipping, as `conformance.subjects.deepspeed` runs it, differs from torch's."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from conformance.subjects.deepspeed import clip_grad_norm_
from conformance.subjects.proof import Proofs, mesh_of_one, parameter, warnings_of

PROOFS = Proofs(clip_grad_norm_, torch.nn.utils.clip_grad_norm_)


@PROOFS.keep
def a_gradient_without_dimensions(clip: Any) -> object:
    """A 0-dim gradient cannot be clipped: it is multiplied in place by a factor of shape [1]."""
    return clip([parameter(torch.tensor(3.0))], 1.0)


@PROOFS.keep
def an_order_of_zero(clip: Any) -> object:
    """A norm of order 0 divides by zero."""
    return clip([parameter(torch.ones(2))], 1.0, 0.0)


@PROOFS.keep
def gradients_on_the_meta_device(clip: Any) -> object:
    """The norm of gradients on the meta device is moved to the CPU, which is impossible."""
    return clip([parameter(torch.zeros(2, device="meta"))], 1.0)


@PROOFS.keep
def nothing_to_clip(clip: Any) -> object:
    """The function raises IndexError if there are no gradients, because it reads the first parameter's device."""
    return clip([torch.nn.Parameter(torch.zeros(2))], 1.0)


@PROOFS.keep
def a_norm_that_is_not_finite(clip: Any) -> object:
    """The function has no argument that makes it reject a non-finite norm."""
    return clip([parameter(torch.tensor([math.inf]))], 1.0, error_if_nonfinite=True)


@PROOFS.keep
def a_dtensor_without_dimensions(clip: Any) -> object:
    """A 0-dim DTensor is multiplied in place by a factor of shape [1], like a plain tensor."""
    shard = distribute_tensor(torch.tensor(3.0), mesh_of_one(), [Replicate()])
    return clip([parameter(shard)], 1.0).full_tensor()


@PROOFS.keep
def a_factor_of_shape_1(clip: Any) -> object:
    """Other DTensors are multiplied by that factor too, and DTensor warns."""
    shard = parameter(distribute_tensor(torch.ones(4), mesh_of_one(), [Shard(0)]))
    return warnings_of(lambda: clip([shard], 1.0))


@PROOFS.keep
def sparse_gradients(clip: Any) -> object:
    """The gradients of a sparse embedding are clipped. torch rejects them."""
    sparse = torch.sparse_coo_tensor([[0, 2]], [[1.0], [2.0]], (3, 1), check_invariants=True).coalesce()
    return clip([parameter(sparse)], 1.0)


@PROOFS.keep
def complex_gradients(clip: Any) -> object:
    """The norm of complex gradients ignores their imaginary parts, because they are cast to float32 first."""
    return clip([parameter(torch.tensor([3.0 + 4.0j]))], 100.0)


@PROOFS.keep
def lazily_negated_gradients(clip: Any) -> object:
    """A lazily negated gradient is clipped. torch's foreach rejects it, and the function has no argument foreach."""
    view = torch._neg_view(torch.ones(3))
    return clip([SimpleNamespace(grad=view, device=view.device)], 1.0)


@PROOFS.keep
def gradients_made_in_inference_mode(clip: Any) -> object:
    """A gradient created in inference mode is changed outside it, which torch rejects."""
    with torch.inference_mode():
        grad = torch.full((2,), 8.0)
    return clip([SimpleNamespace(grad=grad, device=grad.device)], 1.0)


if __name__ == "__main__":
    sys.exit(PROOFS.show())
