"""The coefficients of `test_reduction_dtypes` distinguish the dtypes in which a sum may be rounded."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch

from conformance.distributed.fsdp import test_reduction_dtypes as tests
from conformance.distributed.fsdp.test_reduction_dtypes import LOW, SINGLE, Dtypes


@pytest.mark.parametrize("ranks", [1, 2])
def test_coefficients_differ_in_each_dtype(ranks: int) -> None:
    def sums_of(accumulated: Sequence[torch.dtype], reduced: Sequence[torch.dtype]) -> list[torch.Tensor]:
        pairs = itertools.product(accumulated, reduced)
        return [tests.expected_gradient(Dtypes(LOW, *pair), ranks, "accumulated") for pair in pairs]

    # A sum that was accumulated in LOW is exact in SINGLE. On one rank nothing is reduced.
    reduced = [LOW, SINGLE][:ranks]
    sums = sums_of([LOW], reduced) + sums_of([SINGLE], [LOW, SINGLE])
    for first, other in itertools.combinations(sums, 2):
        assert not torch.equal(first, other)
