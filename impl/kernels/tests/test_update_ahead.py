"""An update that is applied ahead: kept, repeated with another factor or undone, it leaves the right bits."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from conformance.gpu.update_bounds import EACH, states_of
from impl import kernels
from impl.kernels import Parameters, Rule, TensorList, UpdateAhead, squares_of_chunks
from impl.kernels._native import SHORT_CHUNK
from impl.kernels._native.norm import sum_of_squares
from impl.kernels.tests.native import the_library

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_NUMELS = st.lists(
    st.sampled_from([1, 5, 513, SHORT_CHUNK - 1, SHORT_CHUNK + 3, 3 * SHORT_CHUNK]), min_size=1, max_size=3
)


@dataclass(frozen=True)
class Case:
    """Tensors of an update."""

    rule: Rule
    numels: tuple[int, ...]
    dtype: torch.dtype
    grad_dtype: torch.dtype
    narrow_states: bool
    copies: torch.dtype | None = None  # dtype of low-precision copies

    def build(self) -> tuple[Parameters, TensorList]:
        """Return the same tensors in each call."""
        generator = torch.Generator().manual_seed(len(self.numels))
        stored = torch.bfloat16 if self.narrow_states else self.dtype

        def tensors(dtype: torch.dtype) -> list[Tensor]:
            return [torch.rand(numel, generator=generator).to(dtype) for numel in self.numels]

        states = [tensors(stored) for _ in range(states_of(self.rule))]
        steps = torch.full((len(self.numels),), 3.0).unbind() if self.rule.COUNTS else ()
        params = tensors(self.dtype)
        copies = [] if self.copies is None else [param.to(self.copies, copy=True) for param in params]
        return Parameters(params, states, steps, copies), TensorList(tensors(self.grad_dtype))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    dtype, narrow_states = draw(
        st.sampled_from([*((dtype, False) for dtype in _DTYPES), (torch.float32, True)])
    )
    numels = tuple(draw(_NUMELS))
    rule, grad_dtype = draw(st.sampled_from(EACH)), draw(st.sampled_from(_DTYPES))
    copies = draw(st.sampled_from([None, torch.bfloat16]))
    return Case(rule, numels, dtype, grad_dtype, narrow_states, copies)


def contents(parameters: Parameters) -> list[Tensor]:
    return [tensor.clone() for tensor in parameters.written()]


def updated(case: Case, factor: float) -> list[Tensor]:
    parameters, grads = case.build()
    kernels.fused_step_(case.rule, parameters, grads, torch.tensor(factor))
    return contents(parameters)


@settings(max_examples=40, deadline=None)
@given(cases(), st.sampled_from(["keep", "redo", "undo"]), st.integers(14, 18))
def test_update_ahead_leaves_right_bits(case: Case, end: str, power: int) -> None:
    library = the_library()
    parameters, grads = case.build()
    before, versions = contents(parameters), [param._version for param in parameters.params]
    ahead = UpdateAhead(parameters)
    squares = ahead.apply(case.rule, grads, 0.25, power)
    assert [param._version for param in parameters.params] == versions
    assert all(map(torch.equal, contents(parameters), updated(case, 0.25)))
    assert ahead.is_by(case.rule, 0.25)
    assert not ahead.is_by(case.rule, 0.5)
    assert squares == squares_of_chunks(grads, power)
    if end == "keep":
        ahead.keep()
        expected = updated(case, 0.25)
    elif end == "redo":
        ahead.redo(case.rule, grads, 0.125)
        expected = updated(case, 0.125)
    else:
        ahead.undo()
        expected = before
    assert not ahead.is_applied
    assert all(map(torch.equal, contents(parameters), expected))
    has_written = end != "undo"
    assert [param._version > version for param, version in zip(parameters.params, versions, strict=True)] == [
        has_written
    ] * len(versions)
    del library


@settings(max_examples=40, deadline=None)
@given(_NUMELS, _NUMELS, st.sampled_from(_DTYPES), st.integers(14, 15))
def test_known_squares_leave_sum_the_same(
    known: list[int], others: list[int], dtype: torch.dtype, power: int
) -> None:
    library = the_library()
    generator = torch.Generator().manual_seed(sum(known))
    tensors = [torch.rand(numel, generator=generator).to(dtype) for numel in (*known, *others)]
    squares = squares_of_chunks(TensorList(tensors[: len(known)]), power)
    order = tensors[::2] + tensors[1::2]
    expected = sum_of_squares(library, TensorList(order))
    assert sum_of_squares(library, TensorList(order), known=squares) == expected


def test_known_squares_are_not_read_again() -> None:
    library = the_library()
    first, second = torch.ones(SHORT_CHUNK + 5), torch.full((3,), 2.0)
    squares = squares_of_chunks(TensorList([first]), 14)
    assert squares is not None
    squares = {address: entry._replace(sums=array("d", [7.0, 8.0])) for address, entry in squares.items()}
    assert sum_of_squares(library, TensorList([second, first]), known=squares) == 12.0 + 15.0
    shorter = {first.data_ptr(): entry._replace(power=15) for entry in squares.values()}
    assert sum_of_squares(library, TensorList([second, first]), known=shorter) == pytest.approx(
        SHORT_CHUNK + 17
    )
