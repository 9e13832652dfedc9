"""Sharded training on the simulated accelerator: correct programs have one result, and impl needs each of its waits."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

import pytest

from conformance.distributed.fsdp.scenes.rank_judging import run_on_ranks
from conformance.distributed.fsdp.test_fully_shard_streams import (
    ORDERED,
    ORDERED_ON_FOUR_RANKS,
    ORDERED_WITH_EXTENSIONS,
)
from conformance.judge.library import Library
from conformance.ranks import RankPool
from conformance.ranks.fixtures import require_simulator
from conformance.selftests.processes import ROOT
from conformance.selftests.simulator_sharded import (
    HYBRID_WAYS,
    LIBRARIES,
    OF_ONE_LIBRARY,
    WAYS,
    ScheduledTraining,
    course,
    race,
    run_program,
    without_wait,
)
from conformance.simulator import NAME

SHARDING = ROOT / "impl/distributed/fsdp"
SEEDS = {"quick": 5, "full": 20, "deep": 100}
SEEDS_OF_PLAIN = SEEDS | {"deep": 1000}
DRAWN = 4  # number of the first drawn seed
CALLS_THAT_WAIT = (
    *(f"streams.{name}" for name in ("wait", "wait_stream", "wait_in", "block", "block_until_shards_read")),
    "wait_for_pinned_reads",
)
ON_TWO_RANKS = [*ORDERED, *ORDERED_WITH_EXTENSIONS]
# Waits that order no accesses to memory, and why they are there.
SPARED = {
    ("memory.py", "self.streams.block(event)"): "how far the host runs ahead is no number",
}

pytestmark = pytest.mark.deadline(560.0)


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, RankPool]]:
    require_simulator()
    pools_by_size = {size: RankPool(size, device=NAME, start_s=240) for size in (1, 2, 4)}
    yield pools_by_size
    for pool in pools_by_size.values():
        pool.close()


def courses(pool: RankPool, library: str, way: str, seed: int) -> list[ScheduledTraining]:
    return pool.run(course, deadline_s=120, library=library, way=way, seed=seed)


FULL, DEEP = pytest.mark.profile("full"), pytest.mark.profile("deep")
PLAIN = ("FSDP", "fully_shard", "DDP")


@pytest.mark.deadline(3600.0)  # limit in deep; each course has its own
@pytest.mark.parametrize("world", [pytest.param(1, marks=FULL), 2, pytest.param(4, marks=DEEP)])
@pytest.mark.parametrize(
    ("library", "way"),
    [
        pytest.param(library, way, marks=FULL if library == "torch" and way not in PLAIN else ())
        for way in WAYS
        if way not in HYBRID_WAYS
        for library in LIBRARIES
        if OF_ONE_LIBRARY.get(way, library) == library
    ],
)
def test_correct_training_has_one_result_and_seed_determines_course(
    pools: dict[int, RankPool], request: pytest.FixtureRequest, library: str, way: str, world: int
) -> None:
    seeds = (SEEDS_OF_PLAIN if way in PLAIN else SEEDS)[request.config.option.profile]
    check_one_result(pools[world], library, way, seeds)


@pytest.mark.deadline(3600.0)
@pytest.mark.parametrize("library", [pytest.param("torch", marks=FULL), "impl"])
@pytest.mark.parametrize("way", HYBRID_WAYS)
def test_hybrid_sharding_has_one_result_on_two_replicas(
    pools: dict[int, RankPool], request: pytest.FixtureRequest, library: str, way: str
) -> None:
    check_one_result(pools[4], library, way, SEEDS[request.config.option.profile])


def check_one_result(pool: RankPool, library: str, way: str, seeds: int) -> None:
    expected = [training.bits for training in courses(pool, library, way, 0)]
    for seed in range(1, seeds):
        first = courses(pool, library, way, seed)
        assert list(pool.hazards) == [], f"seed {seed}"
        assert [training.bits for training in first] == expected, f"seed {seed}"
        if seed >= DRAWN and not any(training.unreplayable for training in first):
            second = courses(pool, library, way, seed)
            assert second == first or any(training.unreplayable for training in second), f"seed {seed}"


def test_missing_wait_fails_programs_of_subjects_that_claim_order(pools: dict[int, RankPool]) -> None:
    with pytest.raises(AssertionError, match="missing: "):
        run_on_ranks(pools[2], Library("impl"), race)
    run_on_ranks(pools[2], Library("torch"), race)
    assert pools[2].hazards


@pytest.mark.parametrize("program", ON_TWO_RANKS, ids=lambda program: program.__name__)
def test_programs_on_streams_of_user_have_no_hazard(pools: dict[int, RankPool], program: Any) -> None:
    pools[2].run(run_program, library="impl", program=program)
    assert list(pools[2].hazards) == []


def test_cast_shards_are_pinned_again(pools: dict[int, RankPool]) -> None:
    assert pools[2].run("conformance.selftests.simulator_sharded:pinned_where_cast") == [[True] * 4] * 2


@pytest.mark.parametrize("keeps_params", [True, False])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_offloaded_flat_parameters_are_pinned_like_torch(
    pools: dict[int, RankPool], strategy: str, keeps_params: bool
) -> None:
    case = "conformance.selftests.simulator_sharded:pinned_by_training"
    expected, actual = (
        pools[2].run(case, library=library, strategy=strategy, keeps_params=keeps_params)
        for library in LIBRARIES
    )
    assert actual == expected
    assert any(is_pinned for rank_pairs in expected for pair in rank_pairs for is_pinned in pair)


def waits() -> Iterator[tuple[str, int, str]]:
    """File, line and text of each statement in impl's FSDP that lets a stream or the host wait."""
    for file in sorted(SHARDING.rglob("*.py")):
        if "tests" in file.parts or file.name == "streams.py":
            continue
        source = file.read_text()
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.Call):
                continue
            if ast.unparse(node.func).endswith(CALLS_THAT_WAIT):
                yield file.name, node.lineno, ast.unparse(node)


@FULL
@pytest.mark.parametrize(("file", "line", "text"), list(waits()), ids=lambda value: str(value)[:60])
def test_training_without_wait_has_hazard(
    pools: dict[int, RankPool], file: str, line: int, text: str
) -> None:
    """Run all programs until one has a hazard."""
    programs = [
        *((4 if way in HYBRID_WAYS else 2, course, {"way": way, "seed": 1}) for way in WAYS if way != "DDP"),
        *((2, run_program, {"program": program}) for program in ON_TWO_RANKS),
        *((4, run_program, {"program": program}) for program in ORDERED_ON_FOUR_RANKS),
    ]

    def has_hazard(ranks: int, training: Any, arguments: dict[str, Any]) -> bool:
        pools[ranks].run(without_wait, deadline_s=120, training=training, file=file, line=line, **arguments)
        return bool(pools[ranks].hazards)

    assert any(has_hazard(*program) for program in programs) is not ((file, text) in SPARED)
