"""Each argument of the optimizer-state methods, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from conformance.distributed.fsdp import optim_state_argument_cases as cases
from conformance.distributed.fsdp.fsdp_cases import Setup
from conformance.distributed.fsdp.judging import probed
from conformance.distributed.fsdp.optim_state_judging import assert_agrees, values_of
from conformance.judge.clauses import clause
from conformance.judge.library import Library
from conformance.ranks import RankPool

FULL = pytest.mark.profile("full")
both_kinds = pytest.mark.parametrize(
    "setup",
    [Setup(wrap="leaves", arguments={"use_orig_params": one}) for one in (False, True)],
    ids=["flat", "original"],
)


@clause("distributed.fsdp.fsdp_optim_state.named_optimizer")
@both_kinds
@pytest.mark.world_sizes(also=[3])
def test_an_optimizer_may_have_names_for_keys(
    subject: Library, reference: Library, ranks: Callable[..., RankPool], world_size: int, setup: Setup
) -> None:
    seen = assert_agrees(ranks(world_size), (reference, subject), cases.of_named_optimizer, setup)
    assert all(set(value["found"]["state"]) for value in values_of(seen))


@clause("distributed.fsdp.fsdp_optim_state.while_whole")
@both_kinds
def test_parameters_may_be_whole(
    subject: Library, reference: Library, ranks: Callable[..., RankPool], world_size: int, setup: Setup
) -> None:
    values_of(assert_agrees(ranks(world_size), (reference, subject), cases.while_whole, setup))


@clause("distributed.fsdp.fsdp_optim_state.some_ranks")
@pytest.mark.parametrize(
    "setup",
    [Setup(), pytest.param(Setup(arguments={"use_orig_params": True}), marks=FULL)],
    ids=["flat", "original"],
)
@pytest.mark.world_sizes(fewest=3)
def test_ranks_that_have_no_model_need_not_take_part(
    subject: Library, reference: Library, ranks: Callable[..., RankPool], world_size: int, setup: Setup
) -> None:
    seen = values_of(assert_agrees(ranks(world_size), (reference, subject), cases.of_some_ranks, setup))
    assert seen[-1] is None
    assert seen[-2]["again"]["state"]


@clause("distributed.fsdp.fsdp_optim_state.users_own")
@both_kinds
def test_what_belongs_to_no_parameter_is_kept(
    subject: Library, reference: Library, ranks: Callable[..., RankPool], world_size: int, setup: Setup
) -> None:
    seen = assert_agrees(ranks(world_size), (reference, subject), cases.of_users_own, setup)
    assert all(value["found"]["state"]["mine"]["name"] == "mine" for value in values_of(seen))


@clause("distributed.fsdp.fsdp_optim_state.there_and_back")
@both_kinds
def test_a_part_may_be_called_module(
    subject: Library, reference: Library, ranks: Callable[..., RankPool], world_size: int, setup: Setup
) -> None:
    seen = assert_agrees(ranks(world_size), (reference, subject), cases.of_a_part_called_module, setup)
    assert all("module.weight" in value["saved"]["state"] for value in values_of(seen))


@clause("distributed.fsdp.fsdp_optim_state.load_directly")
@both_kinds
@pytest.mark.parametrize("directly", [False, True])
def test_the_optimizer_loads_it_only_if_told(
    subject: Library,
    reference: Library,
    ranks: Callable[..., RankPool],
    world_size: int,
    setup: Setup,
    directly: bool,
) -> None:
    seen = assert_agrees(
        ranks(world_size), (reference, subject), cases.loaded_directly, setup, directly=directly
    )
    assert all(bool(value["state"]) is directly for value in values_of(seen))


@clause("distributed.fsdp.fsdp_optim_state.optim_input")
@both_kinds
def test_what_an_optimizer_was_made_of_may_stand_for_it(
    subject: Library, reference: Library, ranks: Callable[..., RankPool], world_size: int, setup: Setup
) -> None:
    seen = assert_agrees(ranks(world_size), (reference, subject), cases.by_input, setup)
    assert any("optim_input" in text for _, text in seen[0].warned)


@clause("distributed.fsdp.fsdp_optim_state.rekey")
@both_kinds
def test_names_and_numbers_are_exchanged(
    subject: Library, reference: Library, ranks: Callable[..., RankPool], world_size: int, setup: Setup
) -> None:
    values_of(assert_agrees(ranks(world_size), (reference, subject), cases.rekeyed, setup))


@clause("distributed.fsdp.fsdp_optim_state.rekey")
def test_torchs_own_types_of_keys_are_taken(
    subject: Library, ranks: Callable[..., RankPool], world_size: int
) -> None:
    for value in values_of(probed(ranks(world_size), subject, cases.rekeyed_by_torchs_types, Setup())):
        assert value["by torch's"] == value["by its own"]


@clause("distributed.fsdp.fsdp_optim_state.refused")
@both_kinds
@pytest.mark.parametrize("asks", [cases.refused_to_load, cases.refused_to_save], ids=["load", "save"])
def test_is_refused_as_torch_refuses(
    subject: Library,
    reference: Library,
    ranks: Callable[..., RankPool],
    world_size: int,
    setup: Setup,
    asks: Any,
) -> None:
    seen = assert_agrees(ranks(world_size), (reference, subject), asks, setup)
    # A rank alone may save anything.
    assert world_size == 1 or all(
        any(isinstance(one, str) for one in value.values()) for value in values_of(seen)
    )
