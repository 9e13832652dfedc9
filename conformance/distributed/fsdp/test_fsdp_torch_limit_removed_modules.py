"""Modules that torch's class cannot train: what they return, hand on or hold is not what it expects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch

from conformance.distributed.fsdp.judging import assert_ranks_agree, outcomes
from conformance.distributed.fsdp.test_fsdp_torch_limit_removed import Seen, accumulate, has_averaged, raised
from conformance.distributed.fsdp.test_fsdp_torch_limit_removed_weights import gave
from conformance.distributed.fsdp.torch_limit_removed_cases import built
from conformance.distributed.fsdp.traffic import counts
from conformance.judge.clauses import clause
from conformance.judge.deviations import DeviationJudge
from conformance.judge.library import Library
from conformance.ranks import RankPool

Ranks = Callable[..., RankPool]
STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]


sharded_or_not = pytest.mark.parametrize(
    "strategy",
    [
        # What torch reads of a unit that it has released may end the process.
        pytest.param(
            "FULL_SHARD", marks=clause("distributed.fsdp.fsdp_torch_limit_removed.returned_parameters")
        ),
        pytest.param(
            "SHARD_GRAD_OP", marks=clause("distributed.fsdp.fsdp_torch_limit_removed.returned_parameters")
        ),
        pytest.param(
            "NO_SHARD", marks=clause("distributed.fsdp.fully_sharded_data_parallel.returned_parameters")
        ),
    ],
)


@sharded_or_not
def test_parameters_that_are_returned_are_trained(
    subject: Library, ranks: Ranks, world_size: int, strategy: str
) -> None:
    seen = outcomes(
        ranks(world_size),
        subject,
        "torch_limit_removed_cases:accumulate",
        module="returned",
        strategy=strategy,
    )
    assert has_averaged(seen, "returned"), seen


@pytest.mark.parametrize("inference", [False, True])
@sharded_or_not
def test_parameters_that_are_returned_can_be_read(
    subject: Library, ranks: Ranks, world_size: int, strategy: str, inference: bool
) -> None:
    seen = outcomes(
        ranks(world_size),
        subject,
        "torch_limit_removed_cases:returned_parameters",
        strategy=strategy,
        inference=inference,
    )
    for outcome in seen:
        assert outcome.raised is None, outcome.raised
        assert torch.equal(outcome.value[0].values, torch.ones(5, 2)), outcome.value


@clause("distributed.fsdp.fsdp_torch_limit_removed.objects")
@pytest.mark.deviation("fsdp.objects")
@pytest.mark.parametrize("module", ["object", "object inside"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_unit_may_return_an_object(
    deviation: DeviationJudge, ranks: Ranks, world_size: int, strategy: str, module: str
) -> None:
    deviation.judge(
        accumulate(ranks(world_size), module=module, strategy=strategy),
        we_do=lambda seen: has_averaged(seen, module),
        may_agree=strategy == "NO_SHARD" or world_size == 1,
    )


@clause("distributed.fsdp.fsdp_torch_limit_removed.objects_with_parameters")
@pytest.mark.parametrize("module", ["object with a parameter", "object inside with a parameter"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_object_may_hold_parameters(
    subject: Library, ranks: Ranks, world_size: int, strategy: str, module: str
) -> None:
    seen = accumulate(ranks(world_size), module=module, strategy=strategy)(subject)
    assert has_averaged(seen, module), seen


@clause("distributed.fsdp.fsdp_torch_limit_removed.objects")
def test_an_object_that_goes_from_unit_to_unit_costs_no_gathers(
    subject: Library, rank_pool: RankPool
) -> None:
    def issued(keeps: bool) -> list[Counter[str]]:
        seen = outcomes(rank_pool, subject, "torch_limit_removed_cases:one_step_of_many_units", keeps=keeps)
        assert all(outcome.raised is None for outcome in seen), seen
        return [counts(trace) for trace in rank_pool.traces]

    assert issued(keeps=True) == issued(keeps=False)


@clause("distributed.fsdp.fsdp_torch_limit_removed.without_elements")
@pytest.mark.deviation("fsdp.without_elements")
@pytest.mark.parametrize("strategy", STRATEGIES[:2])
def test_a_unit_may_have_no_elements(
    deviation: DeviationJudge, ranks: Ranks, world_size: int, strategy: str
) -> None:
    def probe(library: Library) -> Seen:
        return outcomes(
            ranks(world_size),
            library,
            "torch_limit_removed_cases:accumulate",
            module="no elements",
            strategy=strategy,
        )

    deviation.judge(
        probe,
        torch_does=lambda seen: raised(seen, AssertionError, "unsharded_end_idx"),
        we_do=lambda seen: has_averaged(seen, "no elements"),
        may_agree=world_size == 1,
    )


@clause("distributed.fsdp.fsdp_torch_limit_removed.hooks_of_inner_modules")
def test_a_module_inside_a_unit_may_have_hooks_that_read_parameters(
    subject: Library, ranks: Ranks, world_size: int
) -> None:
    with torch.no_grad():
        expected = built("normed")(torch.ones(1, 3))
    seen = outcomes(
        ranks(world_size), subject, "torch_limit_removed_cases:output_of_an_inner_module", module="normed"
    )
    assert gave(seen, expected), seen


@clause("distributed.fsdp.fsdp_torch_limit_removed.computed_again_in_low_precision")
@pytest.mark.deviation("fsdp.computed_again_in_low_precision")
@pytest.mark.parametrize("around", ["unit", "root"])
def test_a_unit_casts_its_inputs_when_it_is_computed_again(
    deviation: DeviationJudge, ranks: Ranks, world_size: int, around: str
) -> None:
    def probe(library: Library) -> Seen:
        return outcomes(
            ranks(world_size),
            library,
            "torch_limit_removed_cases:computed_again_in_low_precision",
            around=around,
        )

    def is_alike(seen: Seen) -> bool:
        return all(outcome.raised is None and _are_equal(*outcome.value) for outcome in seen)

    deviation.judge(
        probe,
        torch_does=lambda seen: raised(seen, RuntimeError, "must have the same dtype"),
        we_do=is_alike,
        may_agree=around == "root",
    )


def _are_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[name].values, other[name].values) for name in one
    )


@clause("distributed.fsdp.fully_sharded_data_parallel.transforms")
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_a_model_is_mapped(
    subject: Library, reference: Library, rank_pool: RankPool, use_orig_params: bool
) -> None:
    expected, actual = (
        outcomes(rank_pool, library, "torch_limit_removed_cases:mapped", use_orig_params=use_orig_params)
        for library in (reference, subject)
    )
    assert_ranks_agree(expected, actual)
    assert actual[0].raised is None, actual[0].raised
