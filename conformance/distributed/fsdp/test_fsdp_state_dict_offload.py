"""State dicts on the CPU: offloaded by configuration, or of parameters and gradients that are offloaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import nn

from conformance.distributed.fsdp.scenes import optimizer_states, state_dicts
from conformance.distributed.fsdp.scenes.fsdp_training import Setup
from conformance.distributed.fsdp.scenes.optimizer_states import Optimized, StateDictMethod
from conformance.distributed.fsdp.scenes.rank_judging import assert_ranks_agree
from conformance.distributed.fsdp.scenes.scene import Scene
from conformance.distributed.fsdp.scenes.state_dicts import Form, PeakBytes
from conformance.distributed.fsdp.scenes.twins import (
    FLAT,
    RankOutcomes,
    Twins,
    flat_or_originals,
    leaf_by_leaf,
    values_of,
)
from conformance.judge.clauses import clause
from conformance.judge.outcome import Outcome
from conformance.judge.tolerances import EXACT

_TO_CPU = {"offload_to_cpu": True}


def contents_of(outcomes: Sequence[Outcome]) -> RankOutcomes:
    """Keep the dict's contents and the model's later results. Drop the settings, warnings and shared memory."""
    values_of(outcomes)
    return [
        replace(
            outcome,
            value={key: value for key, value in outcome.value.items() if key not in ("settings", "shared")},
            warned=(),
        )
        for outcome in outcomes
    ]


@clause("distributed.fsdp.fsdp_state_dict.whole_on_the_cpu")
@pytest.mark.reference_limit("fsdp.full_state_dict_to_cpu")
def test_torch_cannot_offload_full_state_dict_on_cpu(torch_cannot: Callable[..., None]) -> None:
    form = Form("FULL", _TO_CPU)
    torch_cannot(state_dicts.saved, FLAT, form=form)


@clause("distributed.fsdp.fsdp_state_dict.whole_on_the_cpu")
@pytest.mark.parametrize("rank0_only", [False, True])
@flat_or_originals
def test_full_state_dict_offloads_to_cpu(cpu_twins: Twins, setup: Setup, rank0_only: bool) -> None:
    """The dict equals torch's dict without offload."""
    config = {"rank0_only": rank0_only}
    expected, actual = (
        cpu_twins.of(library, state_dicts.saved, setup, form=Form("FULL", flags))
        for library, flags in ((cpu_twins.reference, config), (cpu_twins.subject, config | _TO_CPU))
    )
    assert_ranks_agree(contents_of(expected), contents_of(actual), EXACT)


def held_while_saving(scene: Scene) -> tuple[int, float]:
    """Return the bytes of one large unit's state dict on this rank, and the peak memory as a multiple of the model.

    The peak does not include this rank's shard.
    """
    torch.manual_seed(1)
    body = nn.Sequential(*(nn.Linear(1792, 1792) for _ in range(5)))
    model_bytes = sum(parameter.nbytes for parameter in body.parameters())
    model = scene.wrap(body)
    config = scene.api.FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    scene.fsdp.set_state_dict_type(model, scene.api.StateDictType.FULL_STATE_DICT, config)
    with PeakBytes(model.parameters()) as held:
        state_dict = model.state_dict()
    return sum(value.nbytes for value in state_dict.values()), held.most_bytes / model_bytes


@clause("distributed.fsdp.fsdp_state_dict.held_once")
@pytest.mark.world_sizes(fewest=2)
def test_full_state_dict_is_stored_once(cpu_twins: Twins) -> None:
    (bytes_of_dict, times_the_model), *others = cpu_twins.values(held_while_saving)
    assert bytes_of_dict == 5 * 4 * (1792 * 1792 + 1792)
    assert 1 <= times_the_model < 1.4
    assert all(bytes_of_dict == 0 and times_the_model < 0.4 for bytes_of_dict, times_the_model in others)


@clause("distributed.fsdp.fsdp_state_dict.parameters_on_the_cpu")
@pytest.mark.parametrize("kind", ["FULL", "SHARDED", "LOCAL"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_states_of_offloaded_parameters_match_torch(cpu_twins: Twins, strategy: str, kind: str) -> None:
    """Model and optimizer states of offloaded parameters equal torch's states without offload, and can be loaded."""
    plain, form = leaf_by_leaf(strategy), Form(kind)
    offloaded = replace(plain, offload_params=True)
    pairs = ((cpu_twins.reference, plain), (cpu_twins.subject, offloaded))
    expected, actual = (
        cpu_twins.of(library, state_dicts.saved, setup, form=form) for library, setup in pairs
    )
    assert_ranks_agree(contents_of(expected), contents_of(actual), EXACT)

    exchange = {"source": cpu_twins.subject.spec, "form": form}
    for state in cpu_twins.values(state_dicts.exchanged, offloaded, **exchange):
        for name, value in state["expected"].items():
            assert torch.equal(state["whole"][name].values, value.values), name

    optimized = {"optimized": Optimized("momentum"), "way": StateDictMethod(kind, offloads=kind != "FULL")}
    expected, actual = (
        cpu_twins.of(library, optimizer_states.there_and_back, setup, **optimized) for library, setup in pairs
    )
    assert_ranks_agree(expected, actual, EXACT)
