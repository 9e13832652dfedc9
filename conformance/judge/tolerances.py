"""Tolerances of comparisons: bitwise, or a bound counted in roundings. Each has a reason.

No test uses a bare rtol or atol. A bound is `roundings * eps(dtype) * |expected|`: the number of roundings by which two
correct evaluations may differ, times the spacing of the dtype at the expected value. The report has the widest margin
(observed / allowed) of each bound, so that a bound that is too loose or too tight is visible.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tolerance:
    roundings: float
    reason: str
    # The dtype of the coarsest rounding, if it is not the dtype of the result.
    coarsest: torch.dtype | None = None
    # The magnitude of the terms of a sum that cancel to a smaller result. The error is relative to the terms.
    terms: float = 0.0
    # Whether the terms of every element are as large as the largest number of its tensor.
    of_largest: bool = False

    def bound(self, expected: torch.Tensor) -> torch.Tensor:
        """Return the error that is allowed at each element of `expected`, in float64."""
        own = torch.finfo(expected.dtype)
        eps = max(own.eps, torch.finfo(self.coarsest).eps) if self.coarsest else own.eps
        exact = expected.to(torch.complex128 if expected.is_complex() else torch.float64)
        smallest_subnormal = own.smallest_normal * own.eps
        terms = self.terms
        if self.of_largest:
            terms = max(terms, float(exact.abs().nan_to_num(0.0, 0.0, 0.0).max()))
        return self.roundings * (eps * exact.abs().clamp(min=terms) + smallest_subnormal)

    def excess(self, expected: torch.Tensor, actual: torch.Tensor) -> str | None:
        """Return None if `actual` agrees with `expected`, else a text about the worst element."""
        if expected.numel() == 0:
            return None
        if self.roundings == 0 or not (expected.is_floating_point() or expected.is_complex()):
            return _bitwise_excess(expected, actual)
        # Most tensors are equal, which one operator shows, while a margin takes twenty.
        if expected.dtype is actual.dtype is not torch.complex32 and torch.equal(expected, actual):
            note_margin(self, 0.0)
            return None
        return self._rounding_excess(expected, actual)

    def _rounding_excess(self, expected: torch.Tensor, actual: torch.Tensor) -> str | None:
        exact = torch.complex128 if expected.is_complex() else torch.float64
        expected_64, actual_64 = expected.to(exact), actual.to(exact)
        allowed = self.bound(expected)
        same = (expected_64 == actual_64) | (expected_64.isnan() & actual_64.isnan())
        error = torch.where(same, 0.0, (expected_64 - actual_64).abs())
        margin = torch.where(same, 0.0, error / allowed).nan_to_num(nan=math.inf, posinf=math.inf)
        worst = float(margin.max())
        note_margin(self, worst)
        if worst <= 1.0:
            return None
        where = tuple(int(i) for i in torch.unravel_index(margin.argmax(), margin.shape))
        return (
            f"at {where} got {actual[where]!s}, expected {expected[where]!s}: off by {float(error[where]):.3e}, "
            f"{worst:.2f} times the bound of {self.roundings:g} roundings ({self.reason})"
        )


def _bitwise_excess(expected: torch.Tensor, actual: torch.Tensor) -> str | None:
    if _are_plainly_equal(expected, actual):
        return None
    same = (expected == actual) | (expected.isnan() & actual.isnan())
    if expected.is_floating_point():
        same &= expected.isnan() | (expected.signbit() == actual.signbit())
    if bool(same.all()):
        return None
    where = tuple(int(i) for i in (~same).nonzero()[0])
    count = int((~same).sum())
    first = f"at {where} got {actual[where]!s}, expected {expected[where]!s}"
    return f"{count} of {same.numel()} elements differ in bits; {first}"


def _are_plainly_equal(expected: torch.Tensor, actual: torch.Tensor) -> bool:
    """Return whether two tensors are equal bitwise and have no nan.

    This usual case takes two or four operators, while locating a difference takes ten.
    """
    # torch.equal does not support complex32.
    if expected.dtype is torch.complex32 or not torch.equal(expected, actual):
        return False
    return not expected.is_floating_point() or torch.equal(expected.signbit(), actual.signbit())


# About ten layers in sequence, each with sums of about ten terms, in another order or over another number of ranks,
# then three steps, each of which may double the error of the previous step.
TRAINED = Tolerance(
    4096, "several steps of a small model with terms near 1, summed in another order", terms=1.0
)
ONE_STEP = Tolerance(
    64, "one forward and backward of a small model with terms near 1, summed in another order", terms=1.0
)


def updates(steps: int) -> Tolerance:
    """Return the bound for parameters and states after `steps` updates whose operations are in another order.

    An update of Adam, the longest, rounds about 30 times on both sides together: scale and clip factor as one number or
    two, two moments with their coefficients, the root, its correction, the quotient, the product and the sum. If terms
    cancel, the error is relative to the terms.
    """
    return Tolerance(32 * steps, "the roundings of an update in each step, in another order", of_largest=True)


def stored_updates(steps: int, dtype: torch.dtype) -> Tolerance:
    """Return the bound of `updates` for parameters and states that are stored in half precision.

    Values that differ in f32 may round to adjacent halves: the parameter, and each moment that it is computed from.
    """
    if dtype not in (torch.float16, torch.bfloat16):
        return updates(steps)
    return Tolerance(
        4 * steps,
        "rounding to an adjacent value when an update is stored",
        coarsest=dtype,
        of_largest=True,
    )


EXACT = Tolerance(0, "a move, a copy or one rounding, which must be the same on both sides")
SAME_BITS = Tolerance(0, "the same operators, and sums over at most two ranks, which have one order")


def norm_of(
    elements: int, tensors: int, order: float = 2.0, coarsest: torch.dtype | None = None
) -> Tolerance:
    """Return the bound for a joint norm of `elements` numbers in `tensors` tensors, and for tensors scaled by it.

    A pairwise sum of n terms has an error of at most log2(n) + 1 roundings. On the CPU, torch adds the powers of other
    orders than 2 in sequence, whose error grows like the square root of n. Powers and the root of order p each add
    about max(p, 1/p). The errors of both sides may have opposite signs. Each tensor's norm, the joint norm, the
    quotient and the product add one rounding.
    """
    is_short = order in (0.0, 2.0, math.inf, -math.inf)
    order_cost = max(abs(order), 1 / abs(order)) if order and math.isfinite(order) else 1.0
    own_sum = math.log2(elements + 1) if is_short else math.sqrt(elements)
    sums = math.ceil(own_sum) + math.ceil(math.log2(tensors + 1))
    reason = f"sums, powers and roots of order {order:g} on both sides, then quotient and product"
    return Tolerance(6 + order_cost * (2 + sums), reason, coarsest)


_margins: dict[str, float] = {}


def note_margin(tolerance: Tolerance, margin: float) -> None:
    if math.isfinite(margin):
        _margins[tolerance.reason] = max(_margins.get(tolerance.reason, 0.0), margin)


def take_margins() -> dict[str, float]:
    """Return the widest margin of each bound since the last call."""
    margins = dict(_margins)
    _margins.clear()
    return margins
