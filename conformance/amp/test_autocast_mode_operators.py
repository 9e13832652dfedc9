"""The operators that a region casts: every operator with a rule in the dispatcher, and similar ones without a rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from conformance.judge.clauses import clause
from conformance.judge.library import Library
from conformance.judge.outcome import Outcome, assert_same_outcome, observe
from conformance.judge.tolerances import EXACT, Tolerance
from conformance.strategies.autocast_operators import FACTORIZING
from conformance.strategies.operator_outcomes import callable_spellings, outcome_of, quiet, region_of
from conformance.strategies.regions import LOW

# The dtypes of the operands, in turn. None is the region's dtype.
OPERANDS: dict[str, tuple[torch.dtype | None, ...]] = {
    "float32": (torch.float32,),
    "low": (None,),
    "mixed": (torch.float32, None),
    "mixed the other way": (None, torch.float32),
    "float64": (torch.float64,),
    "float64 among others": (torch.float32, torch.float64),
    "integers": (torch.int32,),
}
SOON = [
    *((torch.bfloat16, operands) for operands in ("float32", "low")),
    (torch.float16, "mixed"),
    (None, "float64"),
]
BY_LAPACK = Tolerance(64, "a factorization of three rows, and what is made of it", terms=4.0)


def in_dtypes(operands: str, low: torch.dtype) -> list[torch.dtype]:
    return [low if dtype is None else dtype for dtype in OPERANDS[operands]]


def asked_of_all(
    library: Library, device: str, dtype: torch.dtype | None, operands: str, backward: bool = False
) -> Outcome:
    low = torch.get_autocast_dtype(device) if dtype is None else dtype
    region, dtypes = region_of(library, device, dtype), in_dtypes(operands, low)

    def run() -> dict[str, Any]:
        with quiet():
            return {
                f"{name}, as {spelling}": outcome_of(name, function, dtypes, device, region, backward)
                for name, spellings in callable_spellings(device).items()
                for spelling, function in spellings
            }

    outcome = observe(run)
    assert outcome.raised is None, outcome.raised
    return outcome


def assert_same_of_all(reference: Outcome, subject: Outcome) -> None:
    for tolerance, is_one in (EXACT, is_to_the_bit), (BY_LAPACK, lambda name: not is_to_the_bit(name)):
        assert_same_outcome(*(only(library, is_one) for library in (reference, subject)), tolerance)


def is_to_the_bit(name: str) -> bool:
    """Return whether results are bit-identical. LAPACK's results may depend on the addresses of its operands."""
    return name.partition(",")[0].partition(".")[0] not in FACTORIZING


def only(outcome: Outcome, is_one: Callable[[str], bool]) -> Outcome:
    return replace(outcome, value={name: value for name, value in outcome.value.items() if is_one(name)})


@clause("amp.autocast_mode.autocast.casts_by_operator")
@pytest.mark.parametrize(
    ("dtype", "operands"),
    [
        pytest.param(dtype, operands, marks=() if (dtype, operands) in SOON else pytest.mark.profile("full"))
        for dtype in (None, *LOW)
        for operands in OPERANDS
    ],
    ids=str,
)
def test_casts_by_operator(
    subject: Library, reference: Library, device: str, dtype: torch.dtype | None, operands: str
) -> None:
    assert_same_of_all(*(asked_of_all(library, device, dtype, operands) for library in (reference, subject)))


@clause("amp.autocast_mode.autocast.gradients")
@pytest.mark.parametrize(
    "operands",
    [
        "float32",
        *(pytest.param(operands, marks=pytest.mark.profile("full")) for operands in ("mixed", "low")),
    ],
)
def test_gradients_by_operator(subject: Library, reference: Library, device: str, operands: str) -> None:
    """The operands are leaves, whose casts are cached."""
    outcomes = [
        asked_of_all(library, device, LOW[0], operands, backward=True) for library in (reference, subject)
    ]
    assert_same_of_all(*outcomes)
