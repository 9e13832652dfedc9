"""State dicts, compared with torch's key by key, and loaded into models of the other library."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.distributed.fsdp import state_dict_cases as cases
from conformance.distributed.fsdp import state_dict_hook_cases as hook_cases
from conformance.distributed.fsdp.fsdp_cases import Setup
from conformance.distributed.fsdp.lab import TREE
from conformance.distributed.fsdp.module_trees import ModuleTree
from conformance.distributed.fsdp.rank_judging import share_of_examples
from conformance.distributed.fsdp.state_dict_cases import Form
from conformance.distributed.fsdp.state_dict_memory_cases import held_while_loading, outlived
from conformance.distributed.fsdp.twins import (
    FLAT,
    Twins,
    TwinsOf,
    both_kinds,
    flat_or_originals,
    leaf_by_leaf,
    values_of,
)
from conformance.judge.clauses import clause
from conformance.judge.tolerances import EXACT
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
    """Draw a state dict configuration. LOCAL_STATE_DICT is drawn only if torch supports it: for flat parameters."""
    has_local = not setup.uses_orig_params and setup.ranks != "mesh"
    kind = draw(st.sampled_from(["FULL", "SHARDED", "LOCAL"] if has_local else ["FULL", "SHARDED"]))
    # torch cannot offload a full state dict on a CPU.
    flag = "rank0_only" if kind == "FULL" else "offload_to_cpu"
    return Form(kind, {flag: draw(st.booleans())})


@st.composite
def models(draw: st.DrawFn, **options: Any) -> tuple[Setup, ModuleTree]:
    # Wrapping by size is left out, because torch may assign a weight that two modules share to two units.
    wraps = ("root", "leaves", "groups", "manual")
    setup = draw(setups(strategy=draw(st.sampled_from(STRATEGIES)), wraps=wraps, **options))
    if setup.wrap != "manual":
        setup = replace(setup, ignored=draw(st.sampled_from(IGNORED)))
    frozen = ("none", "all") if setup.wrap == "leaves" else ("none",)
    return setup, draw(module_trees(frozen=frozen, dtype=torch.float32))


def places(setup: Setup, *more: str) -> st.SearchStrategy[str]:
    """Draw the module whose state dict is requested.

    A module inside a unit has no defined state dict, so `body` is drawn only if it holds complete units.
    """
    holds_whole_units = setup.wrap in ("leaves", "manual")
    return st.sampled_from(["root", *more, "body"] if holds_whole_units else ["root", *more])


each_kind = pytest.mark.parametrize("kind", ["FULL", "SHARDED"])


@clause("distributed.fsdp.fsdp_state_dict.saved")
@share_of_examples(0.7)
@given(data=st.data())
def test_saved_state_dict_matches_torch(twins: Twins, data: st.DataObject) -> None:
    precision = data.draw(st.sampled_from(PRECISIONS))
    setup, tree = data.draw(models(mixed_precision=precision))
    form = data.draw(forms(setup))
    # If only rank 0 gets a full state dict inside summon_full_params, torch's other ranks raise.
    can_be_inside = form.kind != "LOCAL" and not form.config.get("rank0_only")
    twins.agree(
        cases.saved,
        setup,
        EXACT,
        may_raise=True,
        tree=tree,
        form=form,
        at=data.draw(places(setup, "inner")),
        inside=can_be_inside and data.draw(st.booleans()),
        options=data.draw(st.sampled_from([{}, {}, {"prefix": "a."}, {"keep_vars": True}])),
    )


@clause("distributed.fsdp.fsdp_state_dict.saved")
@pytest.mark.parametrize("by", ["groups", "meshes"])
def test_state_dict_of_replicas_matches_torch(twins_of: TwinsOf, by: str) -> None:
    setup = Setup("HYBRID_SHARD", ranks=by, shards=2, wrap="leaves")
    twins_of(4).agree(cases.saved, setup, EXACT, form=Form("SHARDED"))


@clause("distributed.fsdp.fsdp_state_dict.saved")
@each_kind
def test_state_dict_of_cast_buffers_matches_torch(cpu_twins: Twins, kind: str) -> None:
    setup = leaf_by_leaf(mixed_precision={"buffer_dtype": torch.bfloat16})
    cpu_twins.agree(cases.saved, setup, EXACT, form=Form(kind))


@clause("distributed.fsdp.fsdp_state_dict.exchanged")
@share_of_examples(0.4)
@given(data=st.data())
def test_state_dicts_load_across_libraries(twins: Twins, data: st.DataObject) -> None:
    setup, tree = data.draw(models())
    form = Form(data.draw(forms(setup)).kind)
    options: dict[str, Any] = {
        "at": data.draw(places(setup)),
        "inside": form.kind != "LOCAL" and data.draw(st.booleans()),
    }
    pairs = (
        (twins.reference, twins.subject),
        (twins.subject, twins.reference),
        (twins.subject, twins.subject),
    )
    for saver, loader in pairs:
        arguments = {"tree": tree, "source": saver.spec, "form": form, **options}
        for state in values_of(twins.of(loader, cases.exchanged, setup, **arguments)):
            assert state["keys"] == "<All keys matched successfully>"
            assert state["buffers"].keys() == state["expected buffers"].keys()
            loaded = state["whole"] | state["buffers"]
            for name, expected in (state["expected"] | state["expected buffers"]).items():
                if options["at"] == "root" or name.startswith("body"):
                    assert torch.equal(loaded[name].values, expected.values), name


@clause("distributed.fsdp.fsdp_state_dict.exchanged")
@each_kind
@both_kinds
def test_modules_may_swap_tensors(twins: Twins, kind: str, use_orig_params: bool) -> None:
    setup = leaf_by_leaf(use_orig_params=use_orig_params)
    for outcome in twins.agree(cases.loads_by_swapping, setup, form=Form(kind)):
        assert outcome.value["loaded"]


@clause("distributed.fsdp.fsdp_state_dict.exchanged")
@pytest.mark.world_sizes(fewest=2, also=[3])
def test_local_state_dict_loads_on_rank_without_elements(cpu_twins: Twins) -> None:
    """The unit has two elements, so the third rank holds none."""
    for outcome in cpu_twins.agree(cases.loads_its_own, FLAT, form=Form("LOCAL")):
        assert outcome.value["loaded"]


@clause("distributed.fsdp.fsdp_state_dict.exchanged")
@each_kind
@flat_or_originals
def test_late_parameter_is_saved_and_loaded(cpu_twins: Twins, setup: Setup, kind: str) -> None:
    arguments = {"form": Form(kind), "of": "parts.0.inner"}
    for outcome in cpu_twins.agree(cases.with_a_late_parameter, setup, EXACT, **arguments):
        assert "body.parts.0.inner.late" in outcome.value["names"]


@clause("distributed.fsdp.fsdp_state_dict.on_demand")
@pytest.mark.parametrize("fault", ["", "misshaped"])
@both_kinds
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_state_dict_loads_values_on_demand(
    twins: Twins, strategy: str, use_orig_params: bool, fault: str
) -> None:
    for outcome in twins.agree(cases.loads_on_demand, leaf_by_leaf(strategy, use_orig_params), fault=fault):
        assert outcome.value["loaded"] is (not fault)


@clause("distributed.fsdp.fsdp_state_dict.on_demand")
@pytest.mark.world_sizes(fewest=2)
def test_values_on_demand_are_freed_while_loading(cpu_twins: Twins) -> None:
    for times_the_model in cpu_twins.values(held_while_loading):
        assert times_the_model < 0.9


@clause("distributed.fsdp.fsdp_state_dict.other_worlds")
@pytest.mark.parametrize(("by", "sizes"), [("default", (1, 2)), ("default", (3, 2)), ("mesh", (2, 4))])
def test_checkpoint_loads_on_another_world_size(
    twins_of: TwinsOf, tmp_path: Path, by: str, sizes: tuple[int, int]
) -> None:
    setup = Setup(wrap="leaves", ranks=by)
    arguments = {"path": str(tmp_path / "checkpoint"), "form": Form("SHARDED")}
    twins_of(sizes[0]).values(cases.written, setup, **arguments)
    for parameters in twins_of(sizes[1]).values(cases.read, setup, **arguments):
        for name, expected in TREE.build().named_parameters():
            assert torch.equal(parameters[name].values, expected.detach()), name


@clause("distributed.fsdp.fsdp_state_dict.settings")
@pytest.mark.parametrize("by", ["default", "mesh"])
def test_state_dict_settings_match_torch(twins: Twins, by: str) -> None:
    twins.agree(cases.settings, Setup(wrap="leaves", ranks=by), EXACT)


@clause("distributed.fsdp.fsdp_state_dict.freed")
@each_kind
def test_saved_state_dict_is_freed_with_last_reference(cpu_twins: Twins, kind: str) -> None:
    assert not any(cpu_twins.values(outlived, FLAT, form=Form(kind)))


@clause("distributed.fsdp.fsdp_state_dict.hooks")
@both_kinds
@pytest.mark.parametrize("wrap", ["root", "leaves"])
def test_hooks_of_users(twins: Twins, wrap: str, use_orig_params: bool) -> None:
    setup = Setup(wrap=wrap, arguments={"use_orig_params": use_orig_params})
    twins.agree(hook_cases.hooked, setup, EXACT)


@clause("distributed.fsdp.fsdp_state_dict.hooks")
@both_kinds
def test_modules_that_load_in_their_own_way(twins: Twins, use_orig_params: bool) -> None:
    setup = leaf_by_leaf(use_orig_params=use_orig_params)
    twins.agree(hook_cases.loaded_in_its_own_way, setup, EXACT, fits=True)


@clause("distributed.fsdp.fsdp_state_dict.refused")
@pytest.mark.parametrize("fault", ["missing", "missing buffer", "unexpected"])
@each_kind
@both_kinds
def test_non_strict_load_reports_missing_and_unexpected_keys(
    twins: Twins, kind: str, fault: str, use_orig_params: bool
) -> None:
    setup = leaf_by_leaf(use_orig_params=use_orig_params)
    twins.agree(cases.loaded_in_part, setup, EXACT, form=Form(kind), fault=fault)


@clause("distributed.fsdp.fsdp_state_dict.refused")
@pytest.mark.parametrize(("kind", "fault"), [(kind, fault) for kind in FAULTS for fault in FAULTS[kind]])
def test_faulty_state_dict_raises_like_torch(twins: Twins, kind: str, fault: str) -> None:
    """Every rank must raise torch's error. The model's state after the error is not compared."""
    arguments = {"form": Form(kind), "fault": fault, "on": range(twins.world_size)}
    expected, actual = twins.of_both(cases.failed, FLAT, **arguments)
    assert [outcome.value["error"] for outcome in actual] == [outcome.value["error"] for outcome in expected]


@clause("distributed.fsdp.fsdp_state_dict.refused")
@pytest.mark.parametrize("fault", ["two parts", "without values"])
def test_parts_that_cannot_be_taken_are_refused(twins_of: TwinsOf, fault: str) -> None:
    arguments = {"form": Form("SHARDED"), "fault": fault, "on": range(2)}
    for value in twins_of(2).values(cases.failed, FLAT, **arguments):
        assert "Error" in str(value["error"])
