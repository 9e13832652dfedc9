"""State dicts against torch's: what is in them, key by key, and that each library loads what the other one saved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.distributed.fsdp import state_dict_cases, state_dict_hook_cases
from conformance.distributed.fsdp.fsdp_cases import Setup
from conformance.distributed.fsdp.judging import (
    assert_probes_agree,
    probed,
    share_of_examples,
)
from conformance.distributed.fsdp.method_cases import TREE
from conformance.distributed.fsdp.module_trees import ModuleTree
from conformance.distributed.fsdp.state_dict_cases import Form
from conformance.judge.clauses import clause
from conformance.judge.library import Library
from conformance.judge.tolerances import EXACT
from conformance.ranks import RankPool
from conformance.strategies.modules import module_trees
from conformance.strategies.sharding import setups

STRATEGIES = ("FULL_SHARD", "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
IGNORED = ("", "", "ignored_modules", "ignored_states", "parameters")
PRECISIONS = (None, None, {"buffer_dtype": torch.bfloat16}, {"param_dtype": torch.bfloat16})

FAULTS = {
    "FULL": ["missing", "missing buffer", "unexpected", "misshaped", "misshaped buffer", "a word"],
    "SHARDED": ["missing", "missing buffer", "unexpected", "misshaped buffer", "whole"],
}


@st.composite
def forms(draw: st.DrawFn, setup: Setup) -> Form:
    """LOCAL_STATE_DICT where torch makes it of flat parameters alone."""
    has_local = not setup.uses_orig_params and setup.ranks != "mesh"
    kind = draw(st.sampled_from(["FULL", "SHARDED", "LOCAL"] if has_local else ["FULL", "SHARDED"]))
    # torch cannot offload whole parameters on a CPU.
    flag = "rank0_only" if kind == "FULL" else "offload_to_cpu"
    return Form(kind, {flag: draw(st.booleans())})


@st.composite
def models(draw: st.DrawFn, **given: Any) -> tuple[Setup, ModuleTree]:
    # By size, torch may deal a weight that two modules share to two units.
    wraps = ("root", "leaves", "groups", "manual")
    setup = draw(setups(strategy=draw(st.sampled_from(STRATEGIES)), wraps=wraps, **given))
    if setup.wrap != "manual":
        setup = replace(setup, ignored=draw(st.sampled_from(IGNORED)))
    frozen = ("none", "all") if setup.wrap == "leaves" else ("none",)
    return setup, draw(module_trees(frozen=frozen, dtype=torch.float32))


def places(setup: Setup, *more: str) -> st.SearchStrategy[str]:
    """Where a state dict can be asked for: of a part of a unit nobody can know it."""
    holds_whole_units = setup.wrap in ("leaves", "manual")
    return st.sampled_from(["root", *more, "body"] if holds_whole_units else ["root", *more])


@clause("distributed.fsdp.fsdp_state_dict.saved")
@share_of_examples(0.7)
@given(data=st.data())
def test_what_is_saved(
    subject: Library, reference: Library, rank_pool: RankPool, data: st.DataObject
) -> None:
    precision = data.draw(st.sampled_from(PRECISIONS))
    setup, tree = data.draw(models(mixed_precision=precision))
    form = data.draw(forms(setup))
    # torch's other ranks raise where the first one alone is to have a dict of what all see whole.
    can_be_inside = form.kind != "LOCAL" and not form.config.get("rank0_only")
    assert_probes_agree(
        rank_pool,
        (reference, subject),
        state_dict_cases.saved,
        setup,
        EXACT,
        tree=tree,
        form=form,
        at=data.draw(places(setup, "inner")),
        inside=can_be_inside and data.draw(st.booleans()),
        options=data.draw(st.sampled_from([{}, {}, {"prefix": "a."}, {"keep_vars": True}])),
    )


@clause("distributed.fsdp.fsdp_state_dict.saved")
@pytest.mark.parametrize("by", ["groups", "meshes"])
def test_what_replicas_save(
    subject: Library, reference: Library, ranks: Callable[..., RankPool], by: str
) -> None:
    setup = Setup("HYBRID_SHARD", ranks=by, shards=2, wrap="leaves")
    assert_probes_agree(
        ranks(4), (reference, subject), state_dict_cases.saved, setup, EXACT, form=Form("SHARDED")
    )


@clause("distributed.fsdp.fsdp_state_dict.saved")
@pytest.mark.parametrize("kind", ["FULL", "SHARDED"])
def test_what_is_saved_of_buffers_that_are_cast(
    subject: Library, reference: Library, ranks: Callable[..., RankPool], world_size: int, kind: str
) -> None:
    setup = Setup(wrap="leaves", mixed_precision={"buffer_dtype": torch.bfloat16})
    assert_probes_agree(
        ranks(world_size), (reference, subject), state_dict_cases.saved, setup, EXACT, form=Form(kind)
    )


@clause("distributed.fsdp.fsdp_state_dict.exchanged")
@share_of_examples(0.4)
@given(data=st.data())
def test_each_loads_what_the_other_saved(
    subject: Library, reference: Library, rank_pool: RankPool, data: st.DataObject
) -> None:
    setup, tree = data.draw(models())
    form = Form(data.draw(forms(setup)).kind)
    options: dict[str, Any] = {
        "at": data.draw(places(setup)),
        "inside": form.kind != "LOCAL" and data.draw(st.booleans()),
    }
    for saver, loader in ((reference, subject), (subject, reference), (subject, subject)):
        seen = probed(
            rank_pool,
            loader,
            state_dict_cases.exchanged,
            setup,
            tree,
            source=saver.spec,
            form=form,
            **options,
        )
        for outcome in seen:
            assert outcome.raised is None, f"{saver.spec} to {loader.spec}: {outcome.raised}"
            assert outcome.value["keys"] == "<All keys matched successfully>"
            assert outcome.value["buffers"].keys() == outcome.value["expected buffers"].keys()
            loaded = outcome.value["whole"] | outcome.value["buffers"]
            for name, expected in (outcome.value["expected"] | outcome.value["expected buffers"]).items():
                if options["at"] == "root" or name.startswith("body"):
                    assert torch.equal(loaded[name].values, expected.values), name


@clause("distributed.fsdp.fsdp_state_dict.exchanged")
@pytest.mark.parametrize("kind", ["FULL", "SHARDED"])
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_modules_may_swap_tensors(
    subject: Library, reference: Library, rank_pool: RankPool, kind: str, use_orig_params: bool
) -> None:
    setup = Setup(wrap="leaves", arguments={"use_orig_params": use_orig_params})
    asks, libraries = state_dict_cases.loads_by_swapping, (reference, subject)
    for seen in assert_probes_agree(rank_pool, libraries, asks, setup, form=Form(kind)):
        assert seen.raised is None, seen.raised
        assert seen.value["loaded"]


@clause("distributed.fsdp.fsdp_state_dict.on_demand")
@pytest.mark.parametrize("fault", ["", "misshaped"])
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_what_is_no_tensor_until_it_is_needed(
    subject: Library,
    reference: Library,
    rank_pool: RankPool,
    strategy: str,
    use_orig_params: bool,
    fault: str,
) -> None:
    setup = Setup(strategy, wrap="leaves", arguments={"use_orig_params": use_orig_params})
    asks, libraries = state_dict_cases.loads_on_demand, (reference, subject)
    for seen in assert_probes_agree(rank_pool, libraries, asks, setup, fault=fault):
        assert seen.raised is None, seen.raised
        assert seen.value["loaded"] is (not fault)


@clause("distributed.fsdp.fsdp_state_dict.on_demand")
@pytest.mark.world_sizes(fewest=2)
def test_what_is_read_on_demand_is_not_held(
    subject: Library, ranks: Callable[..., RankPool], world_size: int
) -> None:
    asks = "conformance.distributed.fsdp.state_dict_memory_cases:held_while_loading"
    for times_the_model in ranks(world_size).run(asks, library=subject.spec):
        assert times_the_model < 0.9


@clause("distributed.fsdp.fsdp_state_dict.other_worlds")
@pytest.mark.parametrize(("by", "sizes"), [("default", (1, 2)), ("default", (3, 2)), ("mesh", (2, 4))])
def test_what_other_numbers_of_ranks_saved(
    subject: Library, ranks: Callable[..., RankPool], tmp_path: Path, by: str, sizes: tuple[int, int]
) -> None:
    setup, form = Setup(wrap="leaves", ranks=by), Form("SHARDED")
    path = str(tmp_path / "checkpoint")
    for outcome in probed(ranks(sizes[0]), subject, state_dict_cases.written, setup, path=path, form=form):
        assert outcome.raised is None, outcome.raised
    for outcome in probed(ranks(sizes[1]), subject, state_dict_cases.read, setup, path=path, form=form):
        assert outcome.raised is None, outcome.raised
        for name, expected in TREE.build().named_parameters():
            assert torch.equal(outcome.value[name].values, expected.detach()), name


@clause("distributed.fsdp.fsdp_state_dict.settings")
@pytest.mark.parametrize("by", ["default", "mesh"])
def test_what_can_be_set(subject: Library, reference: Library, rank_pool: RankPool, by: str) -> None:
    setup = Setup(wrap="leaves", ranks=by)
    seen = assert_probes_agree(rank_pool, (reference, subject), state_dict_cases.settings, setup, EXACT)
    assert seen[0].raised is None, seen[0].raised


@clause("distributed.fsdp.fsdp_state_dict.freed")
@pytest.mark.parametrize("kind", ["FULL", "SHARDED"])
def test_nobody_else_holds_what_was_saved(
    subject: Library, ranks: Callable[..., RankPool], world_size: int, kind: str
) -> None:
    asks, setup = state_dict_cases.outlived, Setup(wrap="leaves")
    for outcome in probed(ranks(world_size), subject, asks, setup, form=Form(kind)):
        assert outcome.raised is None, outcome.raised
        assert outcome.value == []


@clause("distributed.fsdp.fsdp_state_dict.hooks")
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("wrap", ["root", "leaves"])
def test_hooks_of_users(
    subject: Library, reference: Library, rank_pool: RankPool, wrap: str, use_orig_params: bool
) -> None:
    setup = Setup(wrap=wrap, arguments={"use_orig_params": use_orig_params})
    seen = assert_probes_agree(rank_pool, (reference, subject), state_dict_hook_cases.hooked, setup, EXACT)
    assert seen[0].raised is None, seen[0].raised


@clause("distributed.fsdp.fsdp_state_dict.hooks")
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_modules_that_load_in_their_own_way(
    subject: Library, reference: Library, rank_pool: RankPool, use_orig_params: bool
) -> None:
    setup = Setup(wrap="leaves", arguments={"use_orig_params": use_orig_params})
    asks = state_dict_hook_cases.loaded_in_its_own_way
    seen = assert_probes_agree(rank_pool, (reference, subject), asks, setup, EXACT, fits=True)
    assert seen[0].raised is None, seen[0].raised


@clause("distributed.fsdp.fsdp_state_dict.refused")
@pytest.mark.parametrize("fault", ["missing", "missing buffer", "unexpected"])
@pytest.mark.parametrize("kind", ["FULL", "SHARDED"])
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_what_is_missing_or_unexpected_may_be(
    subject: Library,
    reference: Library,
    rank_pool: RankPool,
    kind: str,
    fault: str,
    use_orig_params: bool,
) -> None:
    setup = Setup(wrap="leaves", arguments={"use_orig_params": use_orig_params})
    asks = state_dict_cases.loaded_in_part
    seen = assert_probes_agree(
        rank_pool, (reference, subject), asks, setup, EXACT, form=Form(kind), fault=fault
    )
    assert seen[0].raised is None, seen[0].raised


@clause("distributed.fsdp.fsdp_state_dict.refused")
@pytest.mark.parametrize(("kind", "fault"), [(kind, fault) for kind in FAULTS for fault in FAULTS[kind]])
def test_what_raises(
    subject: Library, reference: Library, rank_pool: RankPool, kind: str, fault: str
) -> None:
    """On every rank; what torch leaves behind is another matter."""
    asks, everywhere = state_dict_cases.failed, range(rank_pool.world_size)
    expected, actual = (
        probed(rank_pool, library, asks, Setup(wrap="leaves"), form=Form(kind), fault=fault, on=everywhere)
        for library in (reference, subject)
    )
    assert [one.value["error"] for one in actual] == [one.value["error"] for one in expected]
