"""Parameters that modules in different `fully_shard` units share."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from conformance.distributed.fsdp import fully_shard_tied_cases as cases
from conformance.distributed.fsdp.fully_shard_judging import Sites
from conformance.distributed.fsdp.twins import RankOutcomes
from conformance.judge.clauses import clause
from conformance.judge.outcome import observe


def refuses(words: str) -> Callable[[RankOutcomes], bool]:
    """Return a check whether every rank reports an error that begins with these words."""
    return lambda outcomes: all(str(outcome.value).startswith(words) for outcome in outcomes)


@clause("distributed.fsdp.fully_shard.tied_across_groups")
@pytest.mark.deviation("fully_shard.tied_across_groups")
@pytest.mark.parametrize(
    "units",
    [
        ("embed", "body.2"),
        ("body.2", "embed"),
        ("embed",),
        pytest.param(("body",), marks=pytest.mark.profile("full")),
        pytest.param(("embed", "body"), marks=pytest.mark.profile("full")),
        ("body.2", "body"),
    ],
    ids=" ".join,
)
def test_tied_weights_stay_tied(sites: Sites, units: tuple[str, ...]) -> None:
    """The unit that is sharded first owns the shared weight."""
    expected = observe(cases.tied_by_hand, sites.world_size)
    sites.deviate_by_hand(expected, cases.tied, units=units)


@clause("distributed.fsdp.fully_shard.tied_in_two_models")
@pytest.mark.deviation("fully_shard.tied_in_two_models")
def test_tying_across_models_is_refused(sites: Sites) -> None:
    sites.deviate(cases.tied_in_two_models, we_do=refuses("ValueError"))


@clause("distributed.fsdp.fully_shard.tied_across_groups")
@pytest.mark.deviation("fully_shard.tied_across_groups")
@pytest.mark.parametrize(
    ("trained", "zeros"), [(True, False), (False, False), (True, True)], ids=["trained", "frozen", "zeros"]
)
def test_owners_wait_for_what_is_around_them(sites: Sites, trained: bool, zeros: bool) -> None:
    """The unit around an owner uses its weight after the owner's backward, and after a failed forward of the owner."""
    expected = observe(cases.around_by_hand, trained)
    sites.deviate_by_hand(expected, cases.around, trained=trained, zeros=zeros)


@clause("distributed.fsdp.fully_shard.tied_across_groups")
@pytest.mark.deviation("fully_shard.tied_across_groups")
def test_owners_are_unsharded_where_others_need_them(sites: Sites) -> None:
    """The owner is an embedding, which is not unsharded for its backward. The last layer needs the weight there."""
    expected = observe(cases.tied_by_hand, sites.world_size)
    sites.deviate_by_hand(expected, cases.tied, units=("embed", "body.2"), not_unsharded="embed")


@clause("distributed.fsdp.fully_shard.tied_across_groups")
@pytest.mark.deviation("fully_shard.tied_across_groups")
def test_owners_are_unsharded_where_others_need_nothing(sites: Sites) -> None:
    """The sharer whose backward runs first is not unsharded for it."""
    sites.deviate_by_hand(observe(cases.shifted, None), cases.shifted)


@clause("distributed.fsdp.fully_shard.tied_across_groups")
@pytest.mark.deviation("fully_shard.tied_across_groups")
@pytest.mark.parametrize("has_run", [False, True], ids=["before the first forward", "behind a step"])
@pytest.mark.parametrize("waits", [False, True], ids=["at once", "by its handle"])
def test_modules_unshard_what_others_own(sites: Sites, has_run: bool, waits: bool) -> None:
    expected = observe(cases.unsharded_by_hand, has_run)
    sites.deviate_by_hand(expected, cases.unsharded, has_run=has_run, waits=waits)


@clause("distributed.fsdp.fully_shard.tied_across_groups")
@pytest.mark.deviation("fully_shard.tied_across_groups")
@pytest.mark.world_sizes(fewest=2)
def test_prefetching_gathers_what_others_own(sites: Sites) -> None:
    forward = ["FSDPSequential", "gather", "FSDPEmbedding", "gather", "FSDPLinear", "FSDPLinear"]
    expected = observe(lambda: [*forward, "gather", "backward"])
    sites.deviate_by_hand(expected, cases.prefetched)


@clause("distributed.fsdp.fully_shard.tied_across_groups")
@pytest.mark.deviation("fully_shard.tied_across_groups")
@pytest.mark.parametrize("differs", ["param_dtype", "reduce_dtype"])
def test_tied_parameter_with_two_precisions_is_refused(sites: Sites, differs: str) -> None:
    named = "ValueError: weight was sharded by an earlier call, as weight: to compute in torch.float64"
    sites.deviate(cases.of_other_dtypes, **{differs: torch.float32}, we_do=refuses(named))
