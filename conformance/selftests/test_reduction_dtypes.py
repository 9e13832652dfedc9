"""The coefficients of `reduction_dtype_cases` tell in which dtype a sum was rounded."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch

from conformance.distributed.fsdp import reduction_dtype_cases as cases
from conformance.distributed.fsdp.reduction_dtype_cases import FULL, LOW, Dtypes


@pytest.mark.parametrize("ranks", [1, 2])
def test_coefficients_differ_in_each_dtype(ranks: int) -> None:
    def values(accumulated: Sequence[torch.dtype], reduced: Sequence[torch.dtype]) -> list[torch.Tensor]:
        pairs = itertools.product(accumulated, reduced)
        return [cases.expected(Dtypes(LOW, *pair), ranks, "accumulated") for pair in pairs]

    # What was rounded to few bits is exact in more of them.
    found = values([LOW], [LOW, FULL][:ranks]) + values([FULL], [LOW, FULL])
    for one, other in itertools.combinations(found, 2):
        assert not torch.equal(one, other)
