"""Process groups built manually, implemented in Python, with threads as ranks, or without a default group.

Training tests use groups of the CPU: gloo, or torch's groups of threads, which on an accelerator wait for no stream.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg

from conformance.distributed.fsdp import group_cases
from conformance.distributed.fsdp.fsdp_cases import Setup
from conformance.distributed.fsdp.rank_judging import assert_ranks_agree
from conformance.distributed.fsdp.twins import FLAT, RankOutcomes, Twins, flat_or_originals, holds, values_of
from conformance.judge.clauses import clause
from conformance.judge.judgement import unavailable
from conformance.judge.library import Library


def assert_same(twins: Twins, program: Any, at: Path, setup: Setup = FLAT, **arguments: Any) -> None:
    """Run the program on the ranks of both libraries and compare.

    The ranks of each library rendezvous at their own file.
    """
    expected, actual = (
        twins.of(library, program, setup, path=str(at / role), **arguments)
        for role, library in (("reference", twins.reference), ("subject", twins.subject))
    )
    values_of(expected)
    assert_ranks_agree(expected, actual)


@clause("distributed.fsdp.fully_sharded_data_parallel.process_groups_of_other_kinds")
@pytest.mark.parametrize(
    ("kind", "has_default"),
    [("by hand", True), ("by hand", False), ("in Python", True), ("of threads", True)],
)
@flat_or_originals
@pytest.mark.world_sizes(fewest=2)
def test_training_works_with_other_kinds_of_group(
    cpu_twins: Twins, setup: Setup, kind: str, has_default: bool, tmp_path: Path
) -> None:
    if kind == "of threads" and not hasattr(multi_threaded_pg.ThreadLocalWorld, "comms"):
        unavailable(f"torch {torch.__version__} cannot end groups of threads")
    assert_same(cpu_twins, group_cases.train, tmp_path, setup, kind=kind, has_default=has_default)


@clause("distributed.fsdp.fsdp_torch_limit_removed.backend_as_group")
@pytest.mark.deviation("fsdp.backend_as_group")
@pytest.mark.world_sizes(fewest=2)
def test_backend_works_in_place_of_group(cpu_twins: Twins, tmp_path: Path) -> None:
    paths = (str(tmp_path / str(number)) for number in itertools.count())

    def probe(library: Library, kind: str = "a backend") -> RankOutcomes:
        return cpu_twins.of(library, group_cases.train, kind=kind, path=next(paths))

    cpu_twins.judge(
        probe,
        we_do=lambda outcomes: holds(assert_ranks_agree, probe(cpu_twins.reference, "by hand"), outcomes),
        may_agree=not hasattr(dist.ProcessGroup, "all_gather_single"),
    )


@clause("distributed.fsdp.sharded_grad_scaler.constructor.process_group_of_other_kinds")
@pytest.mark.parametrize("has_default", [True, False], ids=["default", "none"])
@pytest.mark.parametrize("kind", ["a backend", "by hand"])
@pytest.mark.world_sizes(fewest=2)
def test_scaler_works_with_other_kinds_of_group(
    twins: Twins, kind: str, has_default: bool, tmp_path: Path
) -> None:
    assert_same(twins, group_cases.scale, tmp_path, kind=kind, has_default=has_default)
