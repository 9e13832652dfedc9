"""Each argument of the optimizer-state methods, and their errors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from conformance.distributed.fsdp import optim_state_argument_cases as cases
from conformance.distributed.fsdp.fsdp_cases import Setup
from conformance.distributed.fsdp.twins import FULL, Twins, TwinsOf, flat_or_originals, values_of
from conformance.judge.clauses import clause
from conformance.judge.tolerances import EXACT, TRAINED


def agreed(twins: Twins, program: Any, setup: Setup, **arguments: Any) -> list[Any]:
    return values_of(twins.agree(program, setup, EXACT, **arguments))


@clause("distributed.fsdp.fsdp_optim_state.named_optimizer")
@flat_or_originals
@pytest.mark.world_sizes(also=[3])
def test_named_optimizer_is_saved_and_loaded(cpu_twins: Twins, setup: Setup) -> None:
    assert all(value["found"]["state"] for value in agreed(cpu_twins, cases.of_named_optimizer, setup))


@clause("distributed.fsdp.fsdp_optim_state.while_whole")
@flat_or_originals
def test_parameters_may_be_whole(cpu_twins: Twins, setup: Setup) -> None:
    agreed(cpu_twins, cases.while_unsharded, setup)


@clause("distributed.fsdp.fsdp_optim_state.some_ranks")
@pytest.mark.parametrize(
    "setup",
    [Setup(), pytest.param(Setup(arguments={"use_orig_params": True}), marks=FULL)],
    ids=["flat", "originals"],
)
@pytest.mark.world_sizes(fewest=3)
def test_ranks_that_have_no_model_need_not_take_part(cpu_twins: Twins, setup: Setup) -> None:
    *_, last_with_it, without = agreed(cpu_twins, cases.of_some_ranks, setup)
    assert without is None
    assert last_with_it["again"]["state"]


@clause("distributed.fsdp.fsdp_optim_state.some_ranks")
@flat_or_originals
def test_rank0_only_loads_state_of_first_rank(cpu_twins: Twins, setup: Setup) -> None:
    assert all(value["state"] for value in agreed(cpu_twins, cases.of_the_first_rank, setup))


@clause("distributed.fsdp.fsdp_optim_state.some_ranks")
def test_each_group_saves_and_loads_what_it_trains(twins_of: TwinsOf) -> None:
    values = values_of(twins_of(4).agree(cases.of_each_pair))
    saved = [[bool(state.get("state")) for state in value["saved"]] for value in values]
    assert saved == 2 * [[True] * 3, [True, False, True]]


@clause("distributed.fsdp.fsdp_optim_state.some_ranks")
@flat_or_originals
def test_first_replica_saves_without_others(twins_of: TwinsOf, setup: Setup) -> None:
    hybrid = replace(setup, strategy="HYBRID_SHARD", ranks="groups", shards=2)
    first, second, *others = values_of(twins_of(4).agree(cases.of_one_replica, hybrid, TRAINED))
    assert first["saved"]["state"]
    assert second["saved"]["state"]
    assert [value["saved"] for value in others] == [None, None]


@clause("distributed.fsdp.fsdp_optim_state.users_own")
@flat_or_originals
def test_user_state_without_parameter_is_kept(cpu_twins: Twins, setup: Setup) -> None:
    for value in agreed(cpu_twins, cases.of_users_own, setup):
        assert value["found"]["state"]["mine"]["name"] == "mine"


@clause("distributed.fsdp.fsdp_optim_state.there_and_back")
@flat_or_originals
def test_submodule_called_module_is_saved(cpu_twins: Twins, setup: Setup) -> None:
    for value in agreed(cpu_twins, cases.of_a_part_called_module, setup):
        assert "module.weight" in value["saved"]["state"]


@clause("distributed.fsdp.fsdp_optim_state.load_directly")
@flat_or_originals
@pytest.mark.parametrize("directly", [False, True])
def test_optimizer_loads_only_with_load_directly(cpu_twins: Twins, setup: Setup, directly: bool) -> None:
    for value in agreed(cpu_twins, cases.loaded_directly, setup, directly=directly):
        assert bool(value["state"]) is directly


@clause("distributed.fsdp.fsdp_optim_state.optim_input")
@flat_or_originals
def test_optim_input_replaces_optimizer(cpu_twins: Twins, setup: Setup) -> None:
    first, *_ = cpu_twins.agree(cases.by_input, setup, EXACT)
    assert any("optim_input" in text for _, text in first.warned)


@clause("distributed.fsdp.fsdp_optim_state.rekey")
@flat_or_originals
def test_names_and_numbers_are_exchanged(cpu_twins: Twins, setup: Setup) -> None:
    agreed(cpu_twins, cases.rekeyed, setup)


@clause("distributed.fsdp.fsdp_optim_state.rekey")
def test_torchs_own_types_of_keys_are_taken(cpu_twins: Twins) -> None:
    for value in cpu_twins.values(cases.rekeyed_by_torchs_types):
        assert value["by torch's"] == value["by its own"]


@clause("distributed.fsdp.fsdp_optim_state.refused")
@flat_or_originals
@pytest.mark.parametrize("asks", [cases.refused_to_load, cases.refused_to_save], ids=["load", "save"])
def test_faulty_states_are_refused_like_torch(cpu_twins: Twins, setup: Setup, asks: Any) -> None:
    for value in agreed(cpu_twins, asks, setup):
        # A single rank may save any state.
        assert cpu_twins.is_alone or any(isinstance(answer, str) for answer in value.values())
