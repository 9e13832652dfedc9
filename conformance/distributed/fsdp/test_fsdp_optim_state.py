"""State dicts of optimizers of sharded models: as torch's ranks have them, and as one process does without sharding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.clauses import clause
from conformance.distributed.fsdp import optim_state_cases as cases
from conformance.distributed.fsdp.fsdp_cases import Setup
from conformance.distributed.fsdp.judging import assert_ranks_agree, probed, share_of_examples
from conformance.distributed.fsdp.module_trees import ModuleTree
from conformance.distributed.fsdp.optim_state_cases import OPTIMIZERS, Optimized, Way
from conformance.library import Library
from conformance.outcome import Outcome, TensorState
from conformance.ranks import RankPool
from conformance.strategies.modules import module_trees
from conformance.strategies.sharding import setups
from conformance.tolerances import EXACT, ONE_STEP

STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]
# torch overwrites a tensor of the state by the next one where parameters keep their own: deviation
# optim_state.tensors_of_their_own.
_OF_ONE_TENSOR = ("sgd", "momentum", "adagrad", "adafactor")
# What its ranks know of a part alone changes the step.
_OF_ELEMENTS = tuple(kind for kind in OPTIMIZERS if kind != "adafactor")


def without_torchs_own(outcome: Outcome) -> Outcome:
    """Without what torch warns of its own calls."""
    own = ("Multiple backends are registered", "`_get_pg_default_device` will be deprecated")
    return replace(outcome, warned=tuple(one for one in outcome.warned if not one[1].startswith(own)))


@st.composite
def optimized(draw: st.DrawFn, kinds: Sequence[str] = tuple(OPTIMIZERS)) -> Optimized:
    return Optimized(draw(st.sampled_from(kinds)), draw(st.sampled_from([1, 2])), draw(st.integers(0, 2)))


@st.composite
def saved_models(draw: st.DrawFn, strategy: str) -> tuple[ModuleTree, Setup, Optimized]:
    setup = draw(setups(strategy=strategy, ranks=("default", "group")))
    is_whole = not setup.uses_orig_params or strategy == "NO_SHARD"
    return (
        draw(module_trees(dtype=torch.float32)),
        setup,
        draw(optimized(tuple(OPTIMIZERS) if is_whole else _OF_ONE_TENSOR)),
    )


def assert_agrees(
    pool: RankPool, libraries: tuple[Library, Library], asks: Callable[..., Any], setup: Setup, **asked: Any
) -> list[Outcome]:
    """Judges a probe of the subject by the reference's, bit for bit."""
    wanted, got = (
        [without_torchs_own(outcome) for outcome in probed(pool, library, asks, setup, **asked)]
        for library in libraries
    )
    assert_ranks_agree(wanted, got, EXACT)
    return got


@clause("distributed.fsdp.fsdp_optim_state.older_methods")
@pytest.mark.parametrize("strategy", STRATEGIES)
@share_of_examples(0.3)
@given(data=st.data(), name=st.sampled_from(["whole", "scattered"]))
def test_whole_states_there_and_back(
    subject: Library,
    reference: Library,
    rank_pool: RankPool,
    strategy: str,
    data: st.DataObject,
    name: str,
) -> None:
    tree, setup, optimizer = data.draw(saved_models(strategy))
    assert_agrees(
        rank_pool,
        (reference, subject),
        cases.there_and_back,
        setup,
        tree=tree,
        optimized=optimizer,
        way=Way(name),
    )


@clause("distributed.fsdp.fsdp_optim_state.whole_states")
@pytest.mark.parametrize("strategy", STRATEGIES)
@share_of_examples(0.3)
@given(data=st.data(), kind=st.sampled_from(_OF_ELEMENTS), name=st.sampled_from(["whole", "scattered"]))
def test_whole_states_are_those_of_a_model_that_was_not_wrapped(
    subject: Library, rank_pool: RankPool, strategy: str, data: st.DataObject, kind: str, name: str
) -> None:
    tree = data.draw(module_trees(dtype=torch.float32))
    setup = data.draw(setups(strategy=strategy))
    optimizer = Optimized(kind)
    seen = probed(rank_pool, subject, cases.there_and_back, setup, tree, optimized=optimizer, way=Way(name))
    model = tree.build()
    wanted = cases.by_name(model, optimizer.stepped(model))["state"]
    for rank, outcome in enumerate(seen):
        assert outcome.raised is None, f"rank {rank} raised {outcome.raised}"
        if name == "whole" or rank == 0:
            assert_close_states(wanted, outcome.value["saved"]["state"])
        assert_same_states(outcome.value["before"]["state"], outcome.value["found"]["state"])


def assert_close_states(wanted: Mapping[str, Any], got: Mapping[str, Any]) -> None:
    assert wanted.keys() == got.keys(), f"parameters {sorted(got)}, wanted {sorted(wanted)}"
    for name, state in wanted.items():
        assert state.keys() == got[name].keys(), f"{name}: {sorted(got[name])}, wanted {sorted(state)}"
        for key, value in state.items():
            found: TensorState = got[name][key]
            assert found.shape == tuple(value.shape), f"{name}[{key!r}]: {found.shape}"
            assert (excess := ONE_STEP.excess(value, found.values)) is None, f"{name}[{key!r}]: {excess}"


def assert_same_states(wanted: Mapping[Any, Any], got: Mapping[Any, Any]) -> None:
    """A state without elements may be missing: it is made anew."""
    for key, state in wanted.items():
        tensors = [value for value in state.values() if value.shape]
        if key not in got:
            assert tensors
            assert all(not value.values.numel() for value in tensors), f"{key} is lost"
            continue
        for name, value in state.items():
            assert torch.equal(got[key][name].values, value.values), f"{key}[{name!r}] changed"
