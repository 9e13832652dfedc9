"""How close is close enough: bitwise, or a bound counted in roundings, each with its reason.

No test carries a bare rtol or atol. A bound is `roundings * eps(dtype) * |expected|`: the number of roundings by
which two correct evaluations may differ, times the spacing of the dtype at the expected value. The widest margin
seen (observed / allowed) is kept for the report, so that a bound which is too loose, or about to break, shows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tolerance:
    roundings: float
    reason: str
    # The dtype in which the coarsest rounding happens, where that is not the dtype of the result.
    coarsest: torch.dtype | None = None
    # How large the terms of a sum may be that cancel to something smaller: what is lost is as large as they are.
    terms: float = 0.0
    # The terms of every element are as large as the largest number of its tensor.
    of_largest: bool = False

    def bound(self, expected: torch.Tensor) -> torch.Tensor:
        """The error allowed at each element of `expected`, in float64."""
        own = torch.finfo(expected.dtype)
        eps = max(own.eps, torch.finfo(self.coarsest).eps) if self.coarsest else own.eps
        exact = expected.to(torch.complex128 if expected.is_complex() else torch.float64)
        smallest_subnormal = own.smallest_normal * own.eps
        terms = self.terms
        if self.of_largest:
            terms = max(terms, float(exact.abs().nan_to_num(0.0, 0.0, 0.0).max()))
        return self.roundings * (eps * exact.abs().clamp(min=terms) + smallest_subnormal)

    def excess(self, expected: torch.Tensor, actual: torch.Tensor) -> str | None:
        """None when `got` agrees, else a sentence on the worst element."""
        if expected.numel() == 0:
            return None
        if self.roundings == 0 or not (expected.is_floating_point() or expected.is_complex()):
            return _bitwise_excess(expected, actual)
        # As most are: one operator tells, where a margin takes twenty.
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
    """Bitwise and without a nan, as nearly always: two or four operators tell, where telling the place takes ten."""
    if expected.dtype is torch.complex32 or not torch.equal(
        expected, actual
    ):  # which torch.equal does not know
        return False
    return not expected.is_floating_point() or torch.equal(expected.signbit(), actual.signbit())


# Sums of ten-odd terms, one behind the other in ten-odd layers, in the order of another engine or over another
# number of ranks, then three steps, each of which may double what the one before has lost.
TRAINED = Tolerance(
    4096, "the steps of a small model of terms near 1, whose sums are taken in another order", terms=1.0
)
ONE_STEP = Tolerance(
    64, "one forward and backward of a small model of terms near 1, summed in another order", terms=1.0
)


def updates(steps: int) -> Tolerance:
    """Bound for parameters and states after so many updates by optimizers that do the same in another order.

    An update of Adam, the longest, rounds some 30 times on both sides together: scale and clip factor as one number or
    two, two moments with their coefficients, the root, its correction, the quotient, the product and the sum. What is
    lost in terms that cancel is as large as they are.
    """
    return Tolerance(
        32 * steps, "the roundings of an update, in another order, in each step", of_largest=True
    )


def stored_updates(steps: int, dtype: torch.dtype) -> Tolerance:
    """The same where parameters and states are rounded to halves when they are stored.

    What differs in f32 can round to the neighbour: the parameter, and each moment that it is computed from.
    """
    if dtype not in (torch.float16, torch.bfloat16):
        return updates(steps)
    return Tolerance(
        4 * steps,
        "neighbours that an update is rounded to when it is stored",
        coarsest=dtype,
        of_largest=True,
    )


EXACT = Tolerance(0, "the operation is a move, a copy or one rounding that both must do alike")


def norm_of(
    elements: int, tensors: int, order: float = 2.0, coarsest: torch.dtype | None = None
) -> Tolerance:
    """Bound for a joint norm of `elements` numbers in `tensors` tensors, and for whatever is scaled by it.

    A pairwise sum of n terms errs by at most log2(n) + 1 roundings; powers and the root of order p each cost about
    max(p, 1/p) more; both sides may err, in opposite directions; each tensor's norm, the joint norm, the quotient
    and the product are rounded once more.
    """
    order_cost = 1.0 if order in (0.0, math.inf, -math.inf) else max(abs(order), 1 / abs(order))
    sums = math.ceil(math.log2(elements + 1)) + math.ceil(math.log2(tensors + 1))
    reason = f"sums, powers and roots of order {order:g} on both sides, then quotient and product"
    return Tolerance(6 + order_cost * (2 + sums), reason, coarsest)


_margins: dict[str, float] = {}


def note_margin(tolerance: Tolerance, margin: float) -> None:
    if math.isfinite(margin):
        _margins[tolerance.reason] = max(_margins.get(tolerance.reason, 0.0), margin)


def take_margins() -> dict[str, float]:
    """The widest margin seen for each bound since the last call."""
    seen = dict(_margins)
    _margins.clear()
    return seen
