"""Where torch's optimizer-state methods lose or ruin something: rows of deviations.toml, asserted on both sides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from conformance.distributed.fsdp import optim_state_torch_limit_removed_cases as cases
from conformance.distributed.fsdp.fsdp_cases import Setup
from conformance.distributed.fsdp.judging import probed
from conformance.distributed.fsdp.method_cases import TREE
from conformance.distributed.fsdp.optim_state_cases import Optimized, Way
from conformance.distributed.fsdp.optim_state_judging import (
    assert_close_states,
    unwrapped,
    values_of,
)
from conformance.judge.clauses import clause
from conformance.judge.deviations import DeviationJudge
from conformance.judge.library import Library
from conformance.judge.outcome import Outcome
from conformance.ranks import RankFault, RankPool

FLAT, ORIGINAL = (Setup(wrap="leaves", arguments={"use_orig_params": one}) for one in (False, True))
both_kinds = pytest.mark.parametrize("setup", [FLAT, ORIGINAL], ids=["flat", "original"])
FULL = pytest.mark.profile("full")
Ranks = Callable[..., RankPool]


def asked(pool: RankPool, asks: Callable[..., Any], setup: Setup, **arguments: Any) -> Any:
    """The outcomes, or how the ranks failed each other."""

    def probe(library: Library) -> Sequence[Outcome] | RankFault:
        try:
            return probed(pool, library, asks, setup, **arguments)
        except RankFault as fault:
            return fault

    return probe


def have(seen: Sequence[Outcome] | RankFault, holds: Callable[[Any], bool]) -> bool:
    """Whether it holds of what every rank saw."""
    return not isinstance(seen, RankFault) and all(one.raised is None and holds(one.value) for one in seen)


def is_true(states: Any, optimized: Optimized) -> bool:
    try:
        assert_close_states(unwrapped(optimized)["state"], states)
    except AssertionError:
        return False
    return True


@clause("distributed.fsdp.fsdp_optim_state_torch_limit_removed.tensors_of_their_own")
@pytest.mark.deviation("optim_state.tensors_of_their_own")
@pytest.mark.parametrize("kind", ["adam", *(pytest.param(one, marks=FULL) for one in ("amsgrad", "rmsprop"))])
def test_every_tensor_of_a_state_is_saved(
    deviation: DeviationJudge, ranks: Ranks, world_size: int, kind: str
) -> None:
    optimized = Optimized(kind)
    deviation.judge(
        asked(ranks(world_size), cases.saved, ORIGINAL, optimized=optimized),
        we_do=lambda seen: have(seen, lambda states: is_true(states, optimized)),
        may_agree=world_size == 1,
    )


@clause("distributed.fsdp.fsdp_optim_state_torch_limit_removed.numbers_of_their_own")
@pytest.mark.deviation("optim_state.numbers_of_their_own")
def test_steps_are_counted_once(deviation: DeviationJudge, ranks: Ranks, world_size: int) -> None:
    deviation.judge(
        asked(ranks(world_size), cases.counts_after_a_step, ORIGINAL),
        we_do=lambda seen: have(seen, lambda steps: set(steps) == {3.0}),
    )


@clause("distributed.fsdp.fsdp_optim_state_torch_limit_removed.numbers_of_their_own")
@pytest.mark.deviation("optim_state.numbers_of_their_own")
def test_numbers_are_saved_apart(deviation: DeviationJudge, ranks: Ranks, world_size: int) -> None:
    deviation.judge(
        asked(ranks(world_size), cases.saved_numbers_are_separate, FLAT),
        torch_does=lambda seen: have(seen, lambda are: not are),
        we_do=lambda seen: have(seen, bool),
    )


@clause("distributed.fsdp.fsdp_optim_state_torch_limit_removed.given_stays")
@pytest.mark.deviation("optim_state.given_stays")
def test_what_was_given_is_not_trained_on(deviation: DeviationJudge, ranks: Ranks, world_size: int) -> None:
    setup = Setup("NO_SHARD", wrap="leaves", arguments={"use_orig_params": True})
    deviation.judge(
        asked(ranks(world_size), cases.given_stays, setup),
        torch_does=lambda seen: have(seen, lambda stays: not stays),
        we_do=lambda seen: have(seen, bool),
    )


@clause("distributed.fsdp.fsdp_optim_state_torch_limit_removed.first_without_state")
@pytest.mark.deviation("optim_state.first_without_state")
def test_a_flat_parameter_may_have_no_state_for_its_first(
    deviation: DeviationJudge, ranks: Ranks, world_size: int
) -> None:
    names = sorted(name for name, _ in TREE.build().named_parameters())
    deviation.judge(
        asked(ranks(world_size), cases.loaded_without_the_first, FLAT),
        we_do=lambda seen: have(seen, lambda found: found == names),
    )


@clause("distributed.fsdp.fsdp_optim_state_torch_limit_removed.misshaped")
@pytest.mark.deviation("optim_state.misshaped")
@pytest.mark.world_sizes(fewest=2)
def test_a_tensor_of_another_shape_is_refused(
    deviation: DeviationJudge, ranks: Ranks, world_size: int
) -> None:
    text = "ValueError: Tensor optimizer state does not have same shape as its parameter"
    deviation.judge(
        asked(ranks(world_size), cases.misshaped, ORIGINAL),
        torch_does=lambda seen: have(seen, lambda found: found is True),
        we_do=lambda seen: have(seen, lambda found: str(found).startswith(text)),
    )


@clause("distributed.fsdp.fsdp_optim_state_torch_limit_removed.groups_of_two_kinds")
@pytest.mark.deviation("optim_state.groups_of_two_kinds")
def test_parameters_of_a_unit_may_have_states_of_two_kinds(
    deviation: DeviationJudge, ranks: Ranks, world_size: int
) -> None:
    def are_right(found: Any) -> bool:
        if isinstance(found, str):
            return False
        fewest = ["exp_avg", "exp_avg_sq", "step"]
        most = sorted([*fewest, "max_exp_avg_sq"])
        return found == dict.fromkeys(found, most) | {"body.parts.0.inner.weight": fewest}

    deviation.judge(
        asked(ranks(world_size), cases.groups_of_two_kinds, ORIGINAL),
        torch_does=lambda seen: (
            isinstance(seen, RankFault)  # of three ranks those without such parameters go on
            or have(seen, lambda found: str(found).startswith("AssertionError: Manually"))
        ),
        we_do=lambda seen: have(seen, are_right),
        may_agree=world_size == 1,
    )


@clause("distributed.fsdp.fsdp_optim_state_torch_limit_removed.another_shape")
@pytest.mark.deviation("optim_state.another_shape")
@both_kinds
@pytest.mark.world_sizes(fewest=2)
def test_a_state_in_another_shape_is_refused_on_all_ranks(
    deviation: DeviationJudge, ranks: Ranks, world_size: int, setup: Setup
) -> None:
    def is_named(found: Any) -> bool:
        return str(found).startswith("ValueError: rank 1: 'extra' of ") and "(3,)" in str(found)

    deviation.judge(
        asked(ranks(world_size), cases.of_another_shape, setup),
        we_do=lambda seen: have(seen, is_named),
    )


@clause("distributed.fsdp.fsdp_optim_state_torch_limit_removed.another_shape")
@pytest.mark.deviation("optim_state.another_shape")
@both_kinds
@pytest.mark.world_sizes(fewest=2)
def test_tensors_in_a_list_are_refused(
    deviation: DeviationJudge, ranks: Ranks, world_size: int, setup: Setup
) -> None:
    """Nobody can tell which of them are dealt: a rank's parts would be taken for wholes."""

    def is_refused(found: Any) -> bool:
        return all(
            one.startswith("ValueError: ") and "'history' of " in one for one in map(str, found.values())
        )

    deviation.judge(
        asked(ranks(world_size), cases.in_a_list, setup),
        we_do=lambda seen: have(seen, is_refused),
    )


@clause("distributed.fsdp.fsdp_optim_state_torch_limit_removed.numbers_of_their_own")
@pytest.mark.deviation("optim_state.numbers_of_their_own")
@both_kinds
@pytest.mark.world_sizes(fewest=2)
def test_lists_of_numbers_are_saved_and_loaded_apart(
    deviation: DeviationJudge, ranks: Ranks, world_size: int, setup: Setup
) -> None:
    def are_apart(found: Any) -> bool:
        if isinstance(found, str):
            return False
        saved, loaded = found
        return all(one == [0.5, 0.25] for one in saved) and all(one == [0.5, 1.25, 1.0] for one in loaded)

    deviation.judge(
        asked(ranks(world_size), cases.numbers_in_a_list, setup),
        we_do=lambda seen: have(seen, are_apart),
    )


@clause("distributed.fsdp.fsdp_optim_state_torch_limit_removed.memory_order")
@pytest.mark.deviation("optim_state.memory_order")
@both_kinds
def test_a_transposed_parameter_gets_its_state_back(
    deviation: DeviationJudge, ranks: Ranks, world_size: int, setup: Setup
) -> None:
    deviation.judge(
        asked(ranks(world_size), cases.transposed, setup),
        we_do=lambda seen: have(seen, all),
        may_agree=world_size == 1,
    )


@clause("distributed.fsdp.fsdp_optim_state_torch_limit_removed.dtensor_without_mesh")
@pytest.mark.deviation("optim_state.dtensor_without_mesh")
@pytest.mark.world_sizes(fewest=2)
def test_dtensors_of_a_process_group(deviation: DeviationJudge, ranks: Ranks, world_size: int) -> None:
    deviation.judge(
        asked(ranks(world_size), cases.there_and_back_as_dtensors, Setup(wrap="leaves", ranks="group")),
        torch_does=lambda seen: all(one.raised and "_device_mesh" in one.raised.text for one in seen),
        we_do=lambda seen: have(seen, lambda value: value == {"types": {"DTensor"}, "is_kept": True}),
    )


@clause("distributed.fsdp.fsdp_optim_state_torch_limit_removed.groups_without_rank_zero")
@pytest.mark.deviation("optim_state.groups_without_rank_zero")
@FULL
def test_any_group_saves_and_loads(deviation: DeviationJudge, ranks: Ranks) -> None:
    names = sorted(name for name, _ in TREE.build().named_parameters())

    def are_right(seen: Any) -> bool:
        if isinstance(seen, RankFault) or any(one.raised is not None for one in seen):
            return False
        expected = [names, [], names, []]
        values = [one.value for one in seen]
        saved = [value["saved"] for value in values] == [value["again"] for value in values] == expected
        return saved and all(all(value["is_kept"]) for value in values)

    deviation.judge(
        asked(ranks(4), cases.in_a_group, Setup(), of=2),
        torch_does=lambda seen: isinstance(seen, RankFault) or "is not part of group" in str(seen),
        we_do=are_right,
    )


@clause("distributed.fsdp.fsdp_optim_state_torch_limit_removed.one_rank_refuses")
@pytest.mark.deviation("optim_state.one_rank_refuses")
@both_kinds
@pytest.mark.parametrize(
    "what", ["misshaped", *(pytest.param(one, marks=FULL) for one in ("unknown", "another optimizer"))]
)
@pytest.mark.world_sizes(fewest=2)
def test_what_one_rank_cannot_load_no_rank_loads(
    deviation: DeviationJudge, ranks: Ranks, world_size: int, setup: Setup, what: str
) -> None:
    def are_right(seen: Any) -> bool:
        first, second, *others = values_of(seen)
        reason = str(second["raised"]).partition(": ")[2]
        reported = [str(one["raised"]) for one in (first, *others)]
        is_named = all(
            one.startswith("RuntimeError: rank 1 cannot load") and reason in one for one in reported
        )
        return is_named and all(one["is_as_before"] for one in (first, second, *others))

    deviation.judge(
        asked(ranks(world_size), cases.one_rank_refuses, setup, what=what),
        torch_does=lambda seen: (
            not isinstance(seen, RankFault) and any(not one["is_as_before"] for one in values_of(seen))
        ),
        we_do=are_right,
    )


@clause("distributed.fsdp.fsdp_optim_state_torch_limit_removed.one_rank_refuses")
@pytest.mark.deviation("optim_state.one_rank_refuses")
@pytest.mark.world_sizes(fewest=2)
def test_parts_that_were_not_saved_together_are_refused(
    deviation: DeviationJudge, ranks: Ranks, world_size: int
) -> None:
    def is_refused(one: Any) -> bool:
        return (
            "differ between ranks" in one["raised"] and "head.weight" in one["raised"] and one["is_as_before"]
        )

    deviation.judge(
        asked(ranks(world_size), cases.parts_that_differ, FLAT),
        torch_does=lambda seen: isinstance(seen, RankFault),
        we_do=lambda seen: have(seen, is_refused),
    )


@clause("distributed.fsdp.fsdp_optim_state_torch_limit_removed.bytes_received")
@pytest.mark.deviation("optim_state.bytes_received")
@both_kinds
@pytest.mark.world_sizes(fewest=2, also=[3])
def test_each_rank_receives_its_part_alone(
    deviation: DeviationJudge, ranks: Ranks, world_size: int, setup: Setup
) -> None:
    def is_least(one: Any) -> bool:
        part = one["whole"] / world_size + one["rows"]
        # Of each parameter Adam keeps two tensors.
        return 0 < one["saving"] <= part and 0 < one["loading"] <= 2 * one["shard"]

    deviation.judge(
        asked(ranks(world_size), cases.received, setup, way=Way("SHARDED")),
        torch_does=lambda seen: have(seen, lambda one: min(one["saving"], one["loading"]) >= one["whole"]),
        we_do=lambda seen: have(seen, is_least),
    )


@clause("distributed.fsdp.fsdp_optim_state_torch_limit_removed.bytes_received")
@pytest.mark.deviation("optim_state.bytes_received")
@both_kinds
@pytest.mark.world_sizes(fewest=2, also=[3])
def test_the_first_rank_alone_receives_what_it_alone_saves(
    deviation: DeviationJudge, ranks: Ranks, world_size: int, setup: Setup
) -> None:
    def are_right(seen: Any) -> bool:
        first, *others = values_of(seen)
        # Padding to whole shards is received too.
        is_once = first["whole"] <= first["saving"] <= 1.5 * first["whole"]
        parts = [0 < one["loading"] <= 2 * (one["shard"] + one["rows"]) for one in others]
        return is_once and all(parts) and all(one["saving"] == 0 for one in others)

    deviation.judge(
        asked(ranks(world_size), cases.received, setup, way=Way("FULL", rank0_only=True)),
        torch_does=lambda seen: have(seen, lambda one: min(one["saving"], one["loading"]) >= one["whole"]),
        we_do=are_right,
    )
