"""Proofs that megatron-core's clipping, as the package's `__init__` runs it, differs from torch's."""

from __future__ import annotations

import math
import sys
import warnings
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from conformance.subjects.megatron_core import clip_grad_norm_
from conformance.subjects.proof import Proofs, mesh_of_one, parameter, warnings_of

PROOFS = Proofs(clip_grad_norm_, torch.nn.utils.clip_grad_norm_)


@PROOFS.keep
def gradients_in_other_dtypes(clip: Any) -> object:
    """Gradients that are not in float32 end in an assertion without a text."""
    return clip([parameter(torch.ones(2, dtype=torch.bfloat16))], 1.0)


@PROOFS.keep
def a_nan(clip: Any) -> object:
    """The other gradients are unchanged if one is nan, because comparisons with nan are false. torch's become nan."""
    finite = parameter(torch.tensor([8.0]))
    clip([finite, parameter(torch.tensor([math.nan]))], 1.0)
    return finite.grad


@PROOFS.keep
def the_smallest_element(clip: Any) -> object:
    """The norm of order -inf of several gradients is 1, because each is raised to that power before they are added."""
    return clip([parameter(torch.tensor([3.0])), parameter(torch.tensor([4.0]))], 1.0, -math.inf)


@PROOFS.keep
def an_order_of_zero(clip: Any) -> object:
    """A norm of order 0 divides by zero."""
    return clip([parameter(torch.ones(2))], 1.0, 0.0)


@PROOFS.keep
def gradients_on_the_meta_device(clip: Any) -> object:
    """The norm is a number, which gradients on the meta device do not have."""
    return clip([parameter(torch.zeros(2, device="meta"))], 1.0)


@PROOFS.keep
def nothing_to_clip(clip: Any) -> object:
    """Every order except for 2 raises if there are no gradients, the infinity norm too."""
    return clip([torch.nn.Parameter(torch.zeros(2))], 1.0, math.inf)


@PROOFS.keep
def a_norm_that_is_not_finite(clip: Any) -> object:
    """The function has no argument that makes it reject a non-finite norm."""
    return clip([parameter(torch.tensor([math.inf]))], 1.0, error_if_nonfinite=True)


@PROOFS.keep
def max_norm_that_is_not_a_number(clip: Any) -> object:
    """A max_norm that is not a number fails at its division, with another exception."""
    return clip([parameter(torch.ones(2))], "a string")


@PROOFS.keep
def arguments_of_nan(clip: Any) -> object:
    """A max_norm or an order of nan changes no gradient, because every comparison with nan is false."""
    bound, order = parameter(torch.tensor([8.0])), parameter(torch.tensor([8.0]))
    clip([bound], math.nan)
    clip([order], 1.0, math.nan)
    return [bound.grad, order.grad]


@PROOFS.keep
def norm_of_dtensors(clip: Any) -> object:
    """The norm of DTensors is a number. torch's norm is a DTensor that is reduced when it is read."""
    sharded = parameter(distribute_tensor(torch.ones(4), mesh_of_one(), [Shard(0)]))
    return type(clip([sharded], 1.0))


@PROOFS.keep
def collectives_of_dtensors(clip: Any) -> object:
    """The norm of DTensors is reduced at once. torch issues no collective until the norm is read."""
    sharded = parameter(distribute_tensor(torch.ones(4), mesh_of_one(), [Shard(0)]))
    with CommDebugMode() as mode:
        clip([sharded], 1.0)
    return mode.get_total_counts()


@PROOFS.keep
def dtensors_over_two_dimensions(clip: Any) -> object:
    """DTensors on a mesh of two dimensions raise, because its process group is requested without a dimension."""
    mesh = mesh_of_one((1, 1))
    sharded = parameter(distribute_tensor(torch.ones(4), mesh, [Replicate(), Shard(0)]))
    return float(clip([sharded], 1.0))


@PROOFS.keep
def dtensors_among_plain_tensors(clip: Any) -> object:
    """A DTensor and a plain tensor are clipped together. torch rejects them."""
    mixed = [parameter(distribute_tensor(torch.ones(4), mesh_of_one(), [Shard(0)])), parameter(torch.ones(2))]
    return clip(mixed, 1.0)


@PROOFS.keep
def an_empty_generator(clip: Any) -> object:
    """An empty or exhausted generator is clipped silently. torch warns."""
    return warnings_of(lambda: clip((tensor for tensor in ()), 1.0))


@PROOFS.keep
def complex_gradients(clip: Any) -> object:
    """Complex gradients end in the assertion too."""
    return clip([parameter(torch.ones(2, dtype=torch.complex64))], 1.0)


@PROOFS.keep
def sparse_gradients(clip: Any) -> object:
    """Sparse gradients end in the assertion. torch names the operator that has no kernel for them."""
    sparse = torch.sparse_coo_tensor([[0, 2]], [[1.0], [2.0]], (3, 1), check_invariants=True).coalesce()
    return clip([parameter(sparse)], 1.0)


@PROOFS.keep
def lazily_negated_gradients(clip: Any) -> object:
    """A lazily negated gradient is clipped. torch's foreach rejects it, and the function has no argument foreach."""

    class Holder:
        grad = torch._neg_view(torch.ones(3))

    return clip([Holder()], 1.0)


@PROOFS.keep
def gradients_of_graphs(clip: Any) -> object:
    """The norm of gradients that belong to a graph is computed as part of the graph, with a warning."""
    leaf = torch.ones(2, requires_grad=True)
    with warnings.catch_warnings(action="ignore"):
        (leaf**3).sum().backward(create_graph=True)
    return warnings_of(lambda: clip([leaf], 1.0)) != []


if __name__ == "__main__":
    sys.exit(PROOFS.show())
