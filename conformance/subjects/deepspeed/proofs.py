"""Where DeepSpeed's clipping differs from torch's: the function as `conformance.subjects.deepspeed` runs it."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace

import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from conformance.subjects.deepspeed import clip_grad_norm_
from conformance.subjects.proof import Proofs, Sides, beside, mesh_of_one, parameter, warnings_of

PROOFS = Proofs()
both = beside(clip_grad_norm_, torch.nn.utils.clip_grad_norm_)


@PROOFS.keep
def a_gradient_without_dimensions() -> Sides:
    """A 0-dim gradient cannot be clipped: it is multiplied in place by a factor of shape [1]."""
    return both(lambda clip: clip([parameter(torch.tensor(3.0))], 1.0))


@PROOFS.keep
def an_order_of_zero() -> Sides:
    """A norm of order 0 divides by it."""
    return both(lambda clip: clip([parameter(torch.ones(2))], 1.0, 0.0))


@PROOFS.keep
def gradients_on_the_meta_device() -> Sides:
    """Gradients on the meta device have a norm there; it moves the norm to the CPU, which cannot be."""
    return both(lambda clip: clip([parameter(torch.zeros(2, device="meta"))], 1.0))


@PROOFS.keep
def nothing_to_clip() -> Sides:
    """Without any gradient it looks for the first parameter's device."""
    return both(lambda clip: clip([torch.nn.Parameter(torch.zeros(2))], 1.0))


@PROOFS.keep
def a_norm_that_is_not_finite() -> Sides:
    """It has no argument by which a norm that is not finite is refused."""
    return both(lambda clip: clip([parameter(torch.tensor([math.inf]))], 1.0, error_if_nonfinite=True))


@PROOFS.keep
def a_dtensor_without_dimensions() -> Sides:
    """As with plain tensors: a 0-dim gradient is multiplied in place by a factor of shape [1]."""
    shard = distribute_tensor(torch.tensor(3.0), mesh_of_one(), [Replicate()])
    return both(lambda clip: clip([parameter(shard)], 1.0).full_tensor())


@PROOFS.keep
def a_factor_of_shape_1() -> Sides:
    """Other DTensors are multiplied by that factor too, of which DTensor warns."""
    shard = parameter(distribute_tensor(torch.ones(4), mesh_of_one(), [Shard(0)]))
    return both(lambda clip: warnings_of(lambda: clip([shard], 1.0)))


@PROOFS.keep
def dtensors_among_plain_tensors() -> Sides:
    """The mixture is refused by another operator, after a warning."""
    mixed = [
        parameter(distribute_tensor(torch.ones(4), mesh_of_one(), [Replicate()])),
        parameter(torch.ones(2)),
    ]
    return both(lambda clip: clip(mixed, 1.0))


@PROOFS.keep
def sparse_gradients() -> Sides:
    """The gradients of a sparse embedding are clipped, where torch refuses them."""
    sparse = torch.sparse_coo_tensor([[0, 2]], [[1.0], [2.0]], (3, 1), check_invariants=True).coalesce()
    return both(lambda clip: clip([parameter(sparse)], 1.0))


@PROOFS.keep
def complex_gradients() -> Sides:
    """The norm of complex gradients leaves their imaginary parts out: it is taken after a cast to float32."""
    return both(lambda clip: clip([parameter(torch.tensor([3.0 + 4.0j]))], 100.0))


@PROOFS.keep
def lazily_negated_gradients() -> Sides:
    """A gradient that is lazily negated is clipped; it has no argument foreach, and torch's foreach refuses it."""
    view = torch._neg_view(torch.ones(3))
    return both(lambda clip: clip([SimpleNamespace(grad=view, device=view.device)], 1.0))


@PROOFS.keep
def gradients_made_in_inference_mode() -> Sides:
    """A gradient that was made in inference mode is changed outside it, which torch refuses."""
    with torch.inference_mode():
        grad = torch.full((2,), 8.0)
    return both(lambda clip: clip([SimpleNamespace(grad=grad, device=grad.device)], 1.0))


if __name__ == "__main__":
    sys.exit(PROOFS.show())
