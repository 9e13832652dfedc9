"""torch.distributed.checkpoint (DCP) end to end: what it wrote of a wrapped model and its optimizer comes back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import DefaultLoadPlanner

from conformance.distributed.fsdp import dcp_cases as cases
from conformance.distributed.fsdp.fsdp_cases import Setup
from conformance.distributed.fsdp.judging import assert_ranks_agree, probed
from conformance.distributed.fsdp.method_cases import SIMPLE, TREE
from conformance.distributed.fsdp.module_trees import Group, Leaf
from conformance.distributed.fsdp.optim_state_cases import Optimized, Way, by_name, copied
from conformance.distributed.fsdp.optim_state_judging import as_tensors, values_of
from conformance.judge.clauses import clause
from conformance.judge.library import Library
from conformance.judge.tolerances import EXACT
from conformance.ranks import RankPool
from impl.distributed.fsdp.checkpoint import LoadPlanner

FLAT, ORIGINAL = (Setup(wrap="leaves", arguments={"use_orig_params": one}) for one in (False, True))
WHOLE, ROWS = Way("FULL", offloads=False), Way("SHARDED", offloads=False)
both_kinds = pytest.mark.parametrize("setup", [FLAT, ORIGINAL], ids=["flat", "original"])
every_form = pytest.mark.parametrize(
    ("setup", "way"),
    [(FLAT, WHOLE), (ORIGINAL, ROWS), (Setup(wrap="leaves", ranks="mesh"), ROWS)],
    ids=["whole", "ShardedTensor", "DTensor"],
)
WORLDS = (1, 2, 3, 4)
Ranks = Callable[..., RankPool]


def assert_same(expected: Any, actual: Any, place: str = "") -> None:
    """Of nested dicts of tensors, as ranks saw them."""
    if isinstance(expected, dict):
        assert expected.keys() == actual.keys(), f"{place}: {sorted(actual)}, expected {sorted(expected)}"
        for key, value in expected.items():
            assert_same(value, actual[key], f"{place}[{key!r}]")
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(expected, actual), f"{place}: {actual}, expected {expected}"
    else:
        assert expected == actual, f"{place}: {actual}, expected {expected}"


def assert_reads(
    pool: RankPool, subject: Library, setup: Setup, expected: Any, path: Path, way: Way, **given: Any
) -> None:
    for seen in values_of(probed(pool, subject, cases.read, setup, path=str(path), way=way, **given)):
        assert_same(as_tensors(expected), as_tensors(seen))


@clause("distributed.fsdp.fsdp_distributed_checkpoint.read")
@pytest.mark.parametrize(
    ("way", "worlds"), [(WHOLE, (2, 3)), (ROWS, (3, 2))], ids=lambda one: getattr(one, "name", None)
)
@both_kinds
def test_another_number_of_ranks_reads_it(
    subject: Library, ranks: Ranks, tmp_path: Path, setup: Setup, way: Way, worlds: tuple[int, int]
) -> None:
    before, after = worlds
    wrote = probed(ranks(before), subject, cases.written, setup, path=str(tmp_path), way=way)
    assert_reads(ranks(after), subject, setup, values_of(wrote)[0], tmp_path, way)


@clause("distributed.fsdp.fsdp_distributed_checkpoint.read")
@both_kinds
def test_ranks_without_rows_of_a_parameter_read_it(
    subject: Library, ranks: Ranks, tmp_path: Path, setup: Setup
) -> None:
    """With the planner of `impl`; by DCP's own such ranks miss keys that are there, whosever class it is."""
    wrote = probed(ranks(2), subject, cases.written, setup, path=str(tmp_path), way=ROWS)
    assert_reads(ranks(4), subject, setup, values_of(wrote)[0], tmp_path, ROWS, planner=LoadPlanner)


@clause("distributed.fsdp.fsdp_distributed_checkpoint.read")
@both_kinds
def test_torchs_helper_reads_it(
    subject: Library, ranks: Ranks, world_size: int, tmp_path: Path, setup: Setup
) -> None:
    tree = replace(SIMPLE, body=Group((Leaf("affine", 1), Leaf("normed"))))
    wrote = values_of(probed(ranks(3), subject, cases.written, setup, tree, path=str(tmp_path), way=ROWS))
    asks, pool = cases.read_by_torchs_helper, ranks(world_size)
    for seen in values_of(probed(pool, subject, asks, setup, tree, path=str(tmp_path))):
        assert_same(as_tensors(wrote[0]), as_tensors(seen))


@clause("distributed.fsdp.fsdp_distributed_checkpoint.read")
@every_form
@pytest.mark.world_sizes(also=WORLDS)
@pytest.mark.profile("full")
def test_what_any_number_of_ranks_has_written_is_read(
    subject: Library, ranks: Ranks, world_size: int, tmp_path: Path, setup: Setup, way: Way
) -> None:
    expected = unsharded()
    for before in WORLDS:
        path = tmp_path / str(before)
        for wrote in values_of(probed(ranks(before), subject, cases.written, setup, path=str(path), way=way)):
            assert_same(expected, as_tensors(wrote), f"on {before} ranks")
        assert_reads(ranks(world_size), subject, setup, expected, path, way, planner=LoadPlanner)


def unsharded() -> dict[str, Any]:
    """What `cases.written` has of a model that is not wrapped."""
    model, optimized = TREE.build(), Optimized(steps=1)
    states = by_name(model, optimized.stepped(model))["state"]
    return copied(
        {
            "parameters": dict(model.named_parameters()),
            "buffers": dict(model.named_buffers()),
            "states": states,
        }
    )


@clause("distributed.fsdp.fsdp_distributed_checkpoint.asynchronous")
@every_form
def test_training_goes_on_while_it_is_written(
    subject: Library, ranks: Ranks, world_size: int, tmp_path: Path, setup: Setup, way: Way
) -> None:
    pool = ranks(world_size)
    wrote = probed(pool, subject, cases.written_meanwhile, setup, path=str(tmp_path), way=way)
    assert_reads(pool, subject, setup, values_of(wrote)[0], tmp_path, way, planner=LoadPlanner)


@clause("distributed.fsdp.fsdp_distributed_checkpoint.in_part")
@pytest.mark.parametrize("planner", [DefaultLoadPlanner, LoadPlanner], ids=["torch's", "ours"])
def test_a_part_is_read(
    subject: Library, ranks: Ranks, world_size: int, tmp_path: Path, planner: type
) -> None:
    seen = probed(
        ranks(world_size), subject, cases.read_in_part, ORIGINAL, path=str(tmp_path), planner=planner
    )
    for one in map(as_tensors, values_of(seen)):
        for kind, after in one["after"].items():
            source = one["before"] if kind == "states" else one["written"]
            expected = {
                name: value if name.startswith("body.") else one["before"][kind][name]
                for name, value in source[kind].items()
            }
            assert_same(expected, after, kind)


@clause("distributed.fsdp.fsdp_distributed_checkpoint.named")
@both_kinds
def test_torchs_named_optimizer(
    subject: Library, ranks: Ranks, world_size: int, tmp_path: Path, setup: Setup
) -> None:
    for first, second in map(
        as_tensors, values_of(probed(ranks(world_size), subject, cases.named, setup, path=str(tmp_path)))
    ):
        assert_same(first, second)


@clause("distributed.fsdp.fsdp_distributed_checkpoint.named_by_itself")
@pytest.mark.world_sizes(fewest=2)
def test_torchs_named_optimizer_by_itself(
    subject: Library, reference: Library, ranks: Ranks, world_size: int, tmp_path: Path
) -> None:
    seen = [
        probed(ranks(world_size), library, cases.named_by_itself, FLAT, path=str(tmp_path / whose))
        for whose, library in (("reference", reference), ("subject", subject))
    ]
    assert_ranks_agree(*seen, EXACT)
    own, read = zip(*map(as_tensors, values_of(seen[1])), strict=True)
    with pytest.raises(AssertionError):
        assert_same(dict(enumerate(own)), dict(enumerate(read)))
