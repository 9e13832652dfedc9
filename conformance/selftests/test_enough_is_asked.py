"""Whether enough is asked: each operator with a rule in torch's dispatcher, option of an optimizer, dtype of a sum."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from conformance.distributed.fsdp import test_reduction_dtypes as reductions
from conformance.judge.library import Library
from conformance.strategies.autocast_operators import CALLS
from conformance.strategies.operator_outcomes import (
    RECURRENT,
    Dtypes,
    Region,
    callable_spellings,
    flat,
    outcome_of,
    quiet,
    ran,
    region_of,
)
from conformance.strategies.optimizers import unknown_options
from conformance.strategies.regions import LOW

# Operators that only some builds of torch can run. The last one takes dimension names, which are not implemented.
NOT_EVERYWHERE = {*RECURRENT, "cudnn_convolution", "cudnn_convolution_transpose", "index_copy.dimname"}


def test_every_option_is_tried() -> None:
    assert unknown_options() == []


def operators_with_rules(device: str) -> set[str]:
    """Return the operators for which autocast on a device has an entry in the dispatcher."""
    key = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}[device]
    registrations = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return {name.removeprefix("aten::") for name in registrations if name.startswith("aten::")}


@pytest.mark.parametrize("which", ["cpu", "cuda"])
def test_every_operator_with_a_rule_is_asked(which: str) -> None:
    rules = operators_with_rules(which)
    assert {"mm", "conv2d", "mse_loss"} <= rules, "the dispatcher is asked for something else"
    assert rules - CALLS.keys() == set()


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_operator_calls_show_every_rule(reference: Library, device: str, dtype: torch.dtype) -> None:
    """The calls of an operator with a rule distinguish it from an operator without the rule."""
    region = region_of(reference, device, dtype)
    with quiet():
        showing = {name: rules_shown(name, device, dtype, region) for name in operators_with_rules(device)}
    assert {name for name, shown in showing.items() if not shown} <= NOT_EVERYWHERE
    assert set().union(*showing.values()) >= {"lower precision", "float32", "widest"}


def rules_shown(name: str, device: str, low: torch.dtype, region: Region) -> set[str]:
    """Return the rules that explain the result dtypes of an operator's spelling, inside regions and outside."""
    rules = set()
    for _, function in callable_spellings(device)[name]:
        kinds = functools.partial(kinds_of, name, function, device=device)
        if kinds([torch.float32], region=region) == kinds([low]) != kinds([torch.float32]):
            rules.add("lower precision")
        if kinds([low], region=region) == kinds([torch.float32]) != kinds([low]):
            rules.add("float32")
        mixed = kinds([torch.float32, low], region=region), kinds([low, torch.float32], region=region)
        if set(mixed) == {kinds([torch.float32])} and kinds([low], region=region) == kinds([low]):
            rules.add("widest")
        if not ran(functools.partial(outcome_of, name, function, [torch.float32], device, region)):
            rules.add("refused")
    return rules


def kinds_of(
    name: str,
    function: Callable[..., Any],
    dtypes: Dtypes,
    device: str,
    region: Region = contextlib.nullcontext,
) -> tuple[str, ...]:
    outcome = outcome_of(name, function, dtypes, device, region)
    return tuple(str(tensor.dtype) for tensor in flat(outcome.get("value", ()))) or ("raised",)


@pytest.mark.parametrize("ranks", [1, 2])
def test_coefficients_show_dtypes_in_which_a_sum_is_rounded(ranks: int) -> None:
    low, single = reductions.LOW, reductions.SINGLE

    def sums_of(accumulated: Sequence[torch.dtype], reduced: Sequence[torch.dtype]) -> list[torch.Tensor]:
        dtypes = (reductions.Dtypes(low, *pair) for pair in itertools.product(accumulated, reduced))
        return [reductions.expected_gradient(of_sum, ranks, "accumulated") for of_sum in dtypes]

    # A sum that was accumulated in `low` is exact in `single`. On one rank nothing is reduced.
    sums = sums_of([low], [low, single][:ranks]) + sums_of([single], [low, single])
    for first, other in itertools.combinations(sums, 2):
        assert not torch.equal(first, other)
