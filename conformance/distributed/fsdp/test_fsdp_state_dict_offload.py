"""State dicts where something lies on the CPU by wish: the dict, by its configuration, or parameters and gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from conformance.distributed.fsdp import optim_state_cases, state_dict_cases
from conformance.distributed.fsdp.fsdp_cases import Setup
from conformance.distributed.fsdp.judging import assert_ranks_agree, probed
from conformance.distributed.fsdp.optim_state_cases import Optimized, Way
from conformance.distributed.fsdp.state_dict_cases import Form
from conformance.judge.clauses import clause
from conformance.judge.deviations import StaleRow
from conformance.judge.library import Library
from conformance.judge.outcome import Outcome
from conformance.judge.tolerances import EXACT
from conformance.ranks import RankFault, RankPool

Ranks = Callable[..., RankPool]
_TO_CPU = {"offload_to_cpu": True}


def what_is_in_it(outcome: Outcome) -> Outcome:
    """What the dict has, and what the model does afterwards; not how it was asked for, nor who else has its memory."""
    assert outcome.raised is None, outcome.raised
    kept = {key: value for key, value in outcome.value.items() if key not in ("settings", "shared")}
    return replace(outcome, value=kept, warned=())


@clause("distributed.fsdp.fsdp_state_dict.whole_on_the_cpu")
@pytest.mark.reference_limit("fsdp.full_state_dict_to_cpu")
def test_torch_cannot_bring_a_whole_dict_to_a_cpu() -> None:
    asks, form = state_dict_cases.saved, Form("FULL", _TO_CPU)
    with RankPool(2) as pool:
        try:
            seen = probed(pool, Library("torch"), asks, Setup(wrap="leaves"), form=form)
        except RankFault:
            return
        if all(outcome.raised is None for outcome in seen):
            raise StaleRow("torch brings a whole state dict to a CPU")


@clause("distributed.fsdp.fsdp_state_dict.whole_on_the_cpu")
@pytest.mark.parametrize("rank0_only", [False, True])
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_a_whole_dict_on_the_cpu(
    subject: Library,
    reference: Library,
    ranks: Ranks,
    world_size: int,
    use_orig_params: bool,
    rank0_only: bool,
) -> None:
    """Has what torch's has that was not to be brought there."""
    setup = Setup(wrap="leaves", arguments={"use_orig_params": use_orig_params})
    config = {"rank0_only": rank0_only}
    expected, actual = (
        probed(ranks(world_size), library, state_dict_cases.saved, setup, form=Form("FULL", flags))
        for library, flags in ((reference, config), (subject, config | _TO_CPU))
    )
    assert_ranks_agree(list(map(what_is_in_it, expected)), list(map(what_is_in_it, actual)), EXACT)


@clause("distributed.fsdp.fsdp_state_dict.held_once")
@pytest.mark.world_sizes(fewest=2)
def test_a_whole_dict_is_held_once(subject: Library, ranks: Ranks, world_size: int) -> None:
    asks = "conformance.distributed.fsdp.state_dict_memory_cases:held_while_saving"
    first, *others = ranks(world_size).run(asks, library=subject.spec)
    bytes_of_dict, times_the_model = first
    assert bytes_of_dict == 5 * 4 * (640 * 640 + 640)
    assert 1 <= times_the_model < 1.4
    assert all(bytes_of_dict == 0 and times_the_model < 0.4 for bytes_of_dict, times_the_model in others)


@clause("distributed.fsdp.fsdp_state_dict.parameters_on_the_cpu")
@pytest.mark.parametrize("kind", ["FULL", "SHARDED", "LOCAL"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_states_of_parameters_that_are_offloaded(
    subject: Library, reference: Library, ranks: Ranks, world_size: int, strategy: str, kind: str
) -> None:
    """The model's has what torch's has of parameters that are not, and loads; so has the optimizer's."""
    plain, form = Setup(strategy, wrap="leaves"), Form(kind)
    asked = ((reference, plain), (subject, replace(plain, offload_params=True)))
    expected, actual = (
        probed(ranks(world_size), library, state_dict_cases.saved, setup, form=form)
        for library, setup in asked
    )
    assert_ranks_agree(list(map(what_is_in_it, expected)), list(map(what_is_in_it, actual)), EXACT)

    for outcome in probed(
        ranks(world_size), subject, state_dict_cases.exchanged, asked[1][1], source=subject.spec, form=form
    ):
        assert outcome.raised is None, outcome.raised
        for name, value in outcome.value["expected"].items():
            assert torch.equal(outcome.value["whole"][name].values, value.values), name

    way = Way(kind, offloads=kind != "FULL")
    expected, actual = (
        probed(
            ranks(world_size),
            library,
            optim_state_cases.there_and_back,
            setup,
            optimized=Optimized("momentum"),
            way=way,
        )
        for library, setup in asked
    )
    assert_ranks_agree(expected, actual, EXACT)
