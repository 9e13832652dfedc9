"""torch.distributed.checkpoint (DCP) end to end: a wrapped model and its optimizer are written and read back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import DefaultLoadPlanner

from conformance.distributed.fsdp import dcp_cases as cases
from conformance.distributed.fsdp.fsdp_cases import Setup
from conformance.distributed.fsdp.lab import SIMPLE, TREE
from conformance.distributed.fsdp.module_trees import Leaf, ModuleGroup
from conformance.distributed.fsdp.optim_state_cases import Optimized, StateDictMethod, by_name, copied
from conformance.distributed.fsdp.optim_state_judging import as_tensors
from conformance.distributed.fsdp.rank_judging import assert_ranks_agree
from conformance.distributed.fsdp.twins import (
    FLAT,
    FULL,
    ORIGINALS,
    Twins,
    TwinsOf,
    flat_or_originals,
    values_of,
)
from conformance.judge.clauses import clause
from conformance.judge.tolerances import EXACT
from impl.distributed.fsdp.checkpoint import LoadPlanner

WHOLE, ROWS = StateDictMethod("FULL", offloads=False), StateDictMethod("SHARDED", offloads=False)
every_form = pytest.mark.parametrize(
    ("setup", "way"),
    [(FLAT, WHOLE), (ORIGINALS, ROWS), (Setup(wrap="leaves", ranks="mesh"), ROWS)],
    ids=["whole", "ShardedTensor", "DTensor"],
)
WORLDS = (1, 2, 3, 4)


def assert_same(expected: Any, actual: Any, place: str = "") -> None:
    """Compare nested dicts of tensors as ranks reported them."""
    if isinstance(expected, dict):
        assert expected.keys() == actual.keys(), f"{place}: {sorted(actual)}, expected {sorted(expected)}"
        for key, value in expected.items():
            assert_same(value, actual[key], f"{place}[{key!r}]")
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(expected, actual), f"{place}: {actual}, expected {expected}"
    else:
        assert expected == actual, f"{place}: {actual}, expected {expected}"


def assert_reads(
    twins: Twins, setup: Setup, expected: Any, path: Path, way: StateDictMethod, **arguments: Any
) -> None:
    for value in twins.values(cases.read, setup, path=str(path), way=way, **arguments):
        assert_same(as_tensors(expected), as_tensors(value))


def unsharded() -> dict[str, Any]:
    """Return the result of `cases.written` for a model that is not wrapped."""
    model, optimized = TREE.build(), Optimized(steps=1)
    states = by_name(model, optimized.stepped(model))["state"]
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    return copied({"parameters": parameters, "buffers": buffers, "states": states})


@clause("distributed.fsdp.fsdp_distributed_checkpoint.read")
@pytest.mark.parametrize(
    ("way", "worlds"), [(WHOLE, (2, 3)), (ROWS, (3, 2))], ids=lambda value: getattr(value, "name", None)
)
@flat_or_originals
def test_another_number_of_ranks_reads_it(
    twins_of: TwinsOf, tmp_path: Path, setup: Setup, way: StateDictMethod, worlds: tuple[int, int]
) -> None:
    before, after = map(twins_of, worlds)
    wrote, *_ = before.values(cases.written, setup, path=str(tmp_path), way=way)
    assert_reads(after, setup, wrote, tmp_path, way)


@clause("distributed.fsdp.fsdp_distributed_checkpoint.read")
@flat_or_originals
def test_ranks_without_rows_of_a_parameter_read_it(twins_of: TwinsOf, tmp_path: Path, setup: Setup) -> None:
    """Read with Tandem's `LoadPlanner`.

    DCP's default planner reports existing keys as missing on such ranks, with either library's class.
    """
    wrote, *_ = twins_of(2).values(cases.written, setup, path=str(tmp_path), way=ROWS)
    assert_reads(twins_of(4), setup, wrote, tmp_path, ROWS, planner=LoadPlanner)


@clause("distributed.fsdp.fsdp_distributed_checkpoint.read")
@flat_or_originals
def test_torchs_helper_reads_it(cpu_twins: Twins, twins_of: TwinsOf, tmp_path: Path, setup: Setup) -> None:
    arguments = {
        "tree": replace(SIMPLE, body=ModuleGroup((Leaf("affine", 1), Leaf("normed")))),
        "path": str(tmp_path),
    }
    wrote, *_ = twins_of(3).values(cases.written, setup, way=ROWS, **arguments)
    for value in cpu_twins.values(cases.read_by_torchs_helper, setup, **arguments):
        assert_same(as_tensors(wrote), as_tensors(value))


@clause("distributed.fsdp.fsdp_distributed_checkpoint.read")
@every_form
@pytest.mark.world_sizes(also=WORLDS)
@FULL
def test_checkpoint_of_any_world_size_is_read(
    cpu_twins: Twins, twins_of: TwinsOf, tmp_path: Path, setup: Setup, way: StateDictMethod
) -> None:
    expected = unsharded()
    for before in WORLDS:
        path = tmp_path / str(before)
        for wrote in twins_of(before).values(cases.written, setup, path=str(path), way=way):
            assert_same(expected, as_tensors(wrote), f"on {before} ranks")
        assert_reads(cpu_twins, setup, expected, path, way, planner=LoadPlanner)


@clause("distributed.fsdp.fsdp_distributed_checkpoint.asynchronous")
@every_form
def test_training_goes_on_while_it_is_written(
    cpu_twins: Twins, tmp_path: Path, setup: Setup, way: StateDictMethod
) -> None:
    wrote, *_ = cpu_twins.values(cases.written_meanwhile, setup, path=str(tmp_path), way=way)
    assert_reads(cpu_twins, setup, wrote, tmp_path, way, planner=LoadPlanner)


@clause("distributed.fsdp.fsdp_distributed_checkpoint.in_part")
@pytest.mark.parametrize("planner", [DefaultLoadPlanner, LoadPlanner], ids=["torch's", "ours"])
def test_partial_checkpoint_is_read(cpu_twins: Twins, tmp_path: Path, planner: type) -> None:
    arguments = {"path": str(tmp_path), "planner": planner}
    for state in map(as_tensors, cpu_twins.values(cases.read_in_part, ORIGINALS, **arguments)):
        for kind, after in state["after"].items():
            source = state["before"] if kind == "states" else state["written"]
            expected = {
                name: value if name.startswith("body.") else state["before"][kind][name]
                for name, value in source[kind].items()
            }
            assert_same(expected, after, kind)


@clause("distributed.fsdp.fsdp_distributed_checkpoint.named")
@flat_or_originals
def test_torchs_named_optimizer(cpu_twins: Twins, tmp_path: Path, setup: Setup) -> None:
    for first, second in map(as_tensors, cpu_twins.values(cases.named, setup, path=str(tmp_path))):
        assert_same(first, second)


@clause("distributed.fsdp.fsdp_distributed_checkpoint.named_by_itself")
@pytest.mark.world_sizes(fewest=2)
def test_torchs_named_optimizer_by_itself(cpu_twins: Twins, tmp_path: Path) -> None:
    outcomes = [
        cpu_twins.of(library, cases.named_by_itself, FLAT, path=str(tmp_path / side))
        for side, library in (("reference", cpu_twins.reference), ("subject", cpu_twins.subject))
    ]
    assert_ranks_agree(*outcomes, EXACT)
    own, read = zip(*map(as_tensors, values_of(outcomes[1])), strict=True)
    with pytest.raises(AssertionError):
        assert_same(dict(enumerate(own)), dict(enumerate(read)))
