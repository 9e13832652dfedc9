"""Proofs that accelerate's clipping differs from torch's. The package's `__init__` calls the same method."""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
from torch.distributed.tensor import Shard, distribute_tensor

from conformance.subjects.accelerate import clip_grad_norm_
from conformance.subjects.proof import Proofs, mesh_of_one, parameter

PROOFS = Proofs(clip_grad_norm_, torch.nn.utils.clip_grad_norm_)


@PROOFS.keep
def a_norm_that_is_not_finite(clip: Any) -> object:
    """The function has no argument that makes it reject a non-finite norm."""
    return clip([parameter(torch.tensor([math.inf]))], 1.0, error_if_nonfinite=True)


@PROOFS.keep
def unsupported_foreach(clip: Any) -> object:
    """The function has no argument foreach and is called without, so unsupported uses of foreach are not rejected."""
    return clip([parameter(torch.zeros(2, device="meta"))], 1.0, foreach=True)


@PROOFS.keep
def disabled_foreach(clip: Any) -> object:
    """The function has no argument foreach to disable it, and its only method rejects a lazily negated gradient."""

    class Holder:
        grad = torch._neg_view(torch.ones(3))

    return clip([Holder()], 1.0, foreach=False)


@PROOFS.keep
def dtensors_among_plain_tensors(clip: Any) -> object:
    """A DTensor and a plain tensor are clipped together, as intended. torch rejects them."""
    mixed = [parameter(distribute_tensor(torch.ones(4), mesh_of_one(), [Shard(0)])), parameter(torch.ones(2))]
    return clip(mixed, 1.0)


@PROOFS.keep
def tensor_instead_of_a_list(clip: Any) -> object:
    """A tensor instead of a list is taken for a list of its rows, which have no gradients, so nothing is clipped."""
    return clip(parameter(torch.tensor([3.0, 4.0])), 1.0)


if __name__ == "__main__":
    sys.exit(PROOFS.show())
