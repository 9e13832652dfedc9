"""Where megatron-core's clipping differs from torch's: its functions as the module beside this one runs them."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import Shard, distribute_tensor

from conformance.subjects.megatron_core import clip_grad_norm_
from conformance.subjects.proof import Proofs, Sides, beside, mesh_of_one, parameter, warnings_of

PROOFS = Proofs()
_CLIPPING = "nn.utils.clip_grad.clip_grad_norm_."
both = beside(clip_grad_norm_, torch.nn.utils.clip_grad_norm_)


@PROOFS.of(
    f"{_CLIPPING}scales_to_max_norm",
    f"{_CLIPPING}returns_norm_before_clipping",
    f"{_CLIPPING}mixed_dtypes",
    f"{_CLIPPING}half_precision",
    f"{_CLIPPING}extreme_gradients_survive",
    f"{_CLIPPING}new_gradients_at_old_addresses",
    f"{_CLIPPING}foreach",
    "nn.utils.clip_grad.refusal_is_whole",
)
def gradients_in_other_dtypes() -> Sides:
    """Gradients that are not in float32 end in an assertion without a text."""
    return both(lambda clip: clip([parameter(torch.ones(2, dtype=torch.bfloat16))], 1.0))


@PROOFS.of(f"{_CLIPPING}nonfinite_gradients")
def a_nan() -> Sides:
    """Where a gradient is nan the others stay as they are, since no comparison with nan holds; torch's are nan too."""

    def clipped(clip: Callable[..., Any]) -> torch.Tensor | None:
        finite = parameter(torch.tensor([8.0]))
        clip([finite, parameter(torch.tensor([math.nan]))], 1.0)
        return finite.grad

    return both(clipped)


@PROOFS.of(f"{_CLIPPING}every_norm_type")
def the_smallest_element() -> Sides:
    """The norm of order -inf of several gradients is 1: they are raised to that power one by one, and added up."""
    return both(
        lambda clip: clip([parameter(torch.tensor([3.0])), parameter(torch.tensor([4.0]))], 1.0, -math.inf)
    )


@PROOFS.of(f"{_CLIPPING}no_gradients")
def nothing_to_clip() -> Sides:
    """Without any gradient the infinity norm raises, and orders other than 2 do."""
    return both(lambda clip: clip([torch.nn.Parameter(torch.zeros(2))], 1.0, math.inf))


@PROOFS.of(f"{_CLIPPING}error_if_nonfinite", f"{_CLIPPING}dtensor_nonfinite")
def a_norm_that_is_not_finite() -> Sides:
    """It has no argument by which a norm that is not finite is refused."""
    return both(lambda clip: clip([parameter(torch.tensor([math.inf]))], 1.0, error_if_nonfinite=True))


@PROOFS.of(f"{_CLIPPING}bad_arguments", "nn.utils.clip_grad.ruinous_arguments")
def arguments_that_cannot_be() -> Sides:
    """A max_norm of nan is no smaller than anything, and so clips nothing; torch writes nan into every gradient."""

    def clipped(clip: Callable[..., Any]) -> torch.Tensor | None:
        one = parameter(torch.tensor([8.0]))
        clip([one], math.nan)
        return one.grad

    return both(clipped)


@PROOFS.of(f"{_CLIPPING}dtensor", f"{_CLIPPING}dtensor_collectives")
def norm_of_dtensors() -> Sides:
    """Of DTensors comes back a number, where torch's norm is a DTensor that is reduced when it is asked for."""
    sharded = parameter(distribute_tensor(torch.ones(4), mesh_of_one(), [Shard(0)]))
    return both(lambda clip: type(clip([sharded], 1.0)))


@PROOFS.of(f"{_CLIPPING}dtensor_among_plain")
def dtensors_among_plain_tensors() -> Sides:
    """A DTensor and a plain tensor are clipped together, where torch refuses them."""
    mixed = [parameter(distribute_tensor(torch.ones(4), mesh_of_one(), [Shard(0)])), parameter(torch.ones(2))]
    return both(lambda clip: clip(mixed, 1.0))


@PROOFS.of(f"{_CLIPPING}parameter_containers")
def an_empty_generator() -> Sides:
    """An empty generator, which one that is used up is too, is clipped in silence, where torch warns."""
    return both(lambda clip: warnings_of(lambda: clip((each for each in ()), 1.0)))


@PROOFS.of(f"{_CLIPPING}sparse_and_complex")
def complex_gradients() -> Sides:
    """Complex gradients end in the assertion too."""
    return both(lambda clip: clip([parameter(torch.ones(2, dtype=torch.complex64))], 1.0))


@PROOFS.of(f"{_CLIPPING}overlapping_memory")
def lazily_negated_gradients() -> Sides:
    """A gradient that is lazily negated is clipped; it has no argument foreach, and torch's foreach refuses it."""

    class Holder:
        grad = torch._neg_view(torch.ones(3))

    return both(lambda clip: clip([Holder()], 1.0))


@PROOFS.of(f"{_CLIPPING}gradients_of_graphs")
def gradients_of_graphs() -> Sides:
    """The norm of gradients that belong to a graph is computed within the graph, which warns."""

    def warned(clip: Callable[..., Any]) -> bool:
        leaf = torch.ones(2, requires_grad=True)
        with warnings.catch_warnings(action="ignore"):
            (leaf**3).sum().backward(create_graph=True)
        return warnings_of(lambda: clip([leaf], 1.0)) != []

    return both(warned)


if __name__ == "__main__":
    sys.exit(PROOFS.show())
