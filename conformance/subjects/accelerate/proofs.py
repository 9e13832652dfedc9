"""Where accelerate's clipping differs from torch's: the method as the module beside this one calls it."""

from __future__ import annotations

import math
import sys

import torch
from torch.distributed.tensor import Shard, distribute_tensor

from conformance.subjects.accelerate import clip_grad_norm_
from conformance.subjects.proof import Proofs, Sides, beside, mesh_of_one, parameter

PROOFS = Proofs()
both = beside(clip_grad_norm_, torch.nn.utils.clip_grad_norm_)


@PROOFS.keep
def a_norm_that_is_not_finite() -> Sides:
    """It has no argument by which a norm that is not finite is refused."""
    return both(lambda clip: clip([parameter(torch.tensor([math.inf]))], 1.0, error_if_nonfinite=True))


@PROOFS.keep
def foreach_where_it_cannot_be() -> Sides:
    """It has no argument foreach, so it is called without: what cannot be done that way is not refused."""
    return both(lambda clip: clip([parameter(torch.zeros(2, device="meta"))], 1.0, foreach=True))


@PROOFS.keep
def one_gradient_after_the_other() -> Sides:
    """It has no argument foreach to go without, and the one way refuses a gradient that is lazily negated."""

    class Holder:
        grad = torch._neg_view(torch.ones(3))

    return both(lambda clip: clip([Holder()], 1.0, foreach=False))


@PROOFS.keep
def dtensors_among_plain_tensors() -> Sides:
    """A DTensor and a plain tensor are clipped together, which it is for, where torch refuses them."""
    mixed = [parameter(distribute_tensor(torch.ones(4), mesh_of_one(), [Shard(0)])), parameter(torch.ones(2))]
    return both(lambda clip: clip(mixed, 1.0))


@PROOFS.keep
def one_tensor() -> Sides:
    """A tensor in the place of a list is taken for a list of its rows, which have no gradients: nothing is clipped."""
    return both(lambda clip: clip(parameter(torch.tensor([3.0, 4.0])), 1.0))


if __name__ == "__main__":
    sys.exit(PROOFS.show())
