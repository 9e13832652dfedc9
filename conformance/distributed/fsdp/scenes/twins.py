"""Run one program on the ranks of both libraries, and compare what the ranks report or judge a deviation.

def loss_of_a_step(scene: Scene) -> torch.Tensor:
    return scene.backward()


@each_strategy
def test_loss_matches_torch(twins: Twins, strategy: str) -> None:
    twins.agree(loss_of_a_step, leaf_by_leaf(strategy))
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

from conformance.distributed.fsdp.scenes import fsdp_training, scene
from conformance.distributed.fsdp.scenes.fsdp_training import Setup, Training
from conformance.distributed.fsdp.scenes.rank_judging import (
    assert_like_unsharded,
    assert_ranks_agree,
    holds,
    run_on_ranks,
    trains_like_unsharded,
    without_layout,
)
from conformance.distributed.fsdp.scenes.scene import FOUR_UNITS, ONE_UNIT, TREE, Program, Scene
from conformance.judge.deviations import DeviationJudge, StaleDeviation
from conformance.judge.files.rows import ReferenceLimit
from conformance.judge.library import Library
from conformance.judge.outcome import Outcome, TensorState, observe
from conformance.judge.surface import torch_version
from conformance.judge.tolerances import ONE_STEP, TRAINED, Tolerance
from conformance.ranks import RankFault, RankPool

STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]
FULL_PROFILE = pytest.mark.profile("full")
each_strategy = pytest.mark.parametrize("strategy", STRATEGIES)
both_kinds = pytest.mark.parametrize("use_orig_params", [False, True])

Wrapping = dict[str, Any]  # strategy and use_orig_params
each_wrapping = pytest.mark.parametrize(
    "wrapping",
    [
        pytest.param(
            {"strategy": strategy, "use_orig_params": use_orig_params}, id=f"{strategy}-{use_orig_params}"
        )
        for use_orig_params in (False, True)
        for strategy in STRATEGIES
    ],
)

RankOutcomes = list[Outcome]  # outcomes by rank


def leaf_by_leaf(strategy: str = "FULL_SHARD", use_orig_params: bool = False, **more: Any) -> Setup:
    return Setup(strategy, wrap="leaves", arguments={"use_orig_params": use_orig_params}, **more)


# Parametrization by the setup, for tests that need nothing else.
FLAT, ORIGINALS = leaf_by_leaf(), leaf_by_leaf(use_orig_params=True)
flat_or_originals = pytest.mark.parametrize("setup", [FLAT, ORIGINALS], ids=["flat", "originals"])


class Twins:
    """The fixtures `twins`, `cpu_twins` and `twins_of`: both libraries on the ranks of one world.

    A program gets a `Scene` whose model FullyShardedDataParallel wraps.
    """

    # Defaults of programs and comparisons.
    setup: Setup | None = ONE_UNIT
    tree = TREE
    tolerance = ONE_STEP

    def __init__(
        self, reference: Library, subject: Library, pool: RankPool, deviation: DeviationJudge | None = None
    ) -> None:
        self.reference, self.subject, self.pool = reference, subject, pool
        self._deviation = deviation

    def judging(self, subject: Library) -> Twins:
        """Return a comparison with another subject on the same ranks."""
        return type(self)(self.reference, subject, self.pool, self._deviation)

    def __repr__(self) -> str:
        return f"Twins({self.reference.spec!r}, {self.subject.spec!r}, on {self.world_size} ranks)"

    @property
    def world_size(self) -> int:
        return self.pool.world_size

    @property
    def is_alone(self) -> bool:
        """Whether there is only one rank, which shards nothing, so that few of torch's faults occur."""
        return self.world_size == 1

    def of(
        self, library: Library, program: Program, setup: Setup | None = None, **arguments: Any
    ) -> RankOutcomes:
        """Run the program on every rank of a library.

        `arguments` are the program's arguments, besides the model's `tree` and the limit `deadline_s`.
        """
        limits = {name: arguments.pop(name) for name in ("deadline_s",) if name in arguments}
        environment = {
            "program": program,
            "setup": setup or self.setup,
            "tree": arguments.pop("tree", self.tree),
        }
        return run_on_ranks(self.pool, library, scene.run, arguments=arguments, **environment, **limits)

    def of_both(
        self, program: Program, setup: Setup | None = None, **arguments: Any
    ) -> tuple[RankOutcomes, RankOutcomes]:
        return self.of(self.reference, program, setup, **arguments), self.of_subject(
            program, setup, **arguments
        )

    def of_subject(self, program: Program, setup: Setup | None = None, **arguments: Any) -> RankOutcomes:
        return self.of(self.subject, program, setup, **arguments)

    def values(self, program: Program, setup: Setup | None = None, **arguments: Any) -> list[Any]:
        """Return the program's result on every rank of the subject."""
        return values_of(self.of_subject(program, setup, **arguments))

    def agree(
        self,
        program: Program,
        setup: Setup | None = None,
        tolerance: Tolerance | None = None,
        *,
        may_raise: bool = False,
        **arguments: Any,
    ) -> RankOutcomes:
        """Compare both libraries rank by rank. Return the subject's outcomes."""
        expected, actual = self.of_both(program, setup, **arguments)
        assert_ranks_agree(expected, actual, tolerance or self.tolerance)
        if not may_raise:
            values_of(actual)
        return actual

    def check_both(
        self,
        check: Callable[[RankOutcomes], bool],
        program: Program,
        setup: Setup | None = None,
        **arguments: Any,
    ) -> None:
        """Assert that `check` holds for the outcomes of both libraries, whose errors may differ."""
        for outcomes in self.of_both(program, setup, **arguments):
            assert check(outcomes), outcomes

    def deviate(
        self,
        program: Program,
        setup: Setup | None = None,
        *,
        we_do: Callable[[Any], bool],
        torch_does: Callable[[Any], bool] | None = None,
        may_agree: bool = False,
        may_fault: bool = False,
        **arguments: Any,
    ) -> None:
        """Judge the deviation that the test names, like `DeviationJudge.judge`."""

        def probe(library: Library) -> RankOutcomes | RankFault:
            try:
                return self.of(library, program, setup, **arguments)
            except RankFault as fault:
                if may_fault:
                    return fault
                raise

        self.judge(probe, we_do=we_do, torch_does=torch_does, may_agree=may_agree)

    def deviate_to_unsharded(
        self,
        program: Program,
        *,
        of: Any = None,
        torch_does: Callable[[Any], bool] | None = None,
        may_agree: bool = False,
        may_fault: bool = False,
        **arguments: Any,
    ) -> None:
        """Judge a deviation: every rank of the subject must have the results of the unsharded reference.

        `of` is an argument of `like_unsharded`. The others are arguments of `deviate`.
        """
        self.deviate(
            program,
            we_do=self.like_unsharded(program, of, **arguments),
            torch_does=torch_does,
            may_agree=may_agree,
            may_fault=may_fault,
            **arguments,
        )

    def like_unsharded(
        self, program: Program, of: Any = None, **arguments: Any
    ) -> Callable[[RankOutcomes], bool]:
        """Return a check whether every rank has the results of the program without sharding.

        Args:
            program: the program.
            of: key or position of the result that is compared. By default, the entire result is compared.
            arguments: the program's arguments, besides the model's `tree`.
        """
        tree = arguments.pop("tree", self.tree)

        def result(outcome: Outcome) -> Outcome:
            return (
                replace(outcome, value=outcome.value[of])
                if of is not None and outcome.raised is None
                else outcome
            )

        expected = [
            result(observe(program, Scene.unsharded(rank, self.world_size, tree), **arguments))
            for rank in range(self.world_size)
        ]
        values_of(expected)
        return lambda outcomes: (
            not isinstance(outcomes, RankFault)
            and holds(assert_ranks_agree, _bare(expected), _bare(map(result, outcomes)), self.tolerance)
        )

    def agree_with_unsharded(self, program: Program, **arguments: Any) -> None:
        """Assert that every rank of the subject has the results of the program without sharding."""
        outcomes = self.of_subject(program, **arguments)
        assert self.like_unsharded(program, **arguments)(outcomes), outcomes

    def judge(self, probe: Callable[[Library], Any], **sides: Any) -> None:
        assert self._deviation is not None, "the test names no row of deviations.toml"
        self._deviation.judge(probe, **sides)

    def trained(self, library: Library, training: Training, **limits: Any) -> RankOutcomes:
        return run_on_ranks(self.pool, library, fsdp_training.train, training=training, **limits)

    def agree_on_training(self, training: Training, tolerance: Tolerance = TRAINED, **limits: Any) -> None:
        """Compare the training twice: rank by rank with torch, and with one unsharded process.

        `limits` are arguments of the pool.
        """
        by_library = [self.trained(library, training, **limits) for library in (self.reference, self.subject)]
        if training.mixes_frozen_with_trained:
            by_library = [[without_layout(outcome) for outcome in ranks] for ranks in by_library]
        ranks = len(by_library[1])
        may_lose = training.accumulates_what_thawed(ranks) or training.loses_what_is_frozen(ranks)
        loses_in_torch = may_lose and not trains_like_unsharded(by_library[0], training, tolerance)
        if loses_in_torch and trains_like_unsharded(by_library[1], training, tolerance):
            return
        assert_ranks_agree(*by_library, tolerance)
        if not loses_in_torch:
            assert_like_unsharded(by_library[1], training, tolerance)


class PlainTwins(Twins):
    """The fixtures `plain_twins` and `plain_twins_of`: a program gets a `Scene` whose model it shards itself."""

    setup = None
    tree = FOUR_UNITS
    tolerance = TRAINED


@dataclass(frozen=True)
class TwinsOf:
    """The fixtures `twins_of` and `plain_twins_of`, which take any world size and device: `twins_of(4, "cpu")`."""

    reference: Library
    subject: Library
    ranks: Callable[..., RankPool]
    deviation: DeviationJudge | None
    kind: type[Twins] = Twins

    def __call__(self, world_size: int, device: str = "cpu") -> Any:
        return self.kind(self.reference, self.subject, self.ranks(world_size, device), self.deviation)

    def judging(self, subject: Library) -> TwinsOf:
        return replace(self, subject=subject)


def assert_limit(row: ReferenceLimit, program: Program, setup: Setup | None = None, **arguments: Any) -> None:
    """Assert that torch fails on two ranks if this row of `reference_limits.toml` applies to it, else succeeds."""
    if _torch_can(program, setup, **arguments) == row.is_of_this_torch:
        versions = f"torch {row.torch}" if row.torch else "all versions"
        does = "succeeds" if row.is_of_this_torch else "fails"
        raise StaleDeviation(
            f"row {row.id} of reference_limits.toml is of {versions}, but torch {torch_version()} {does}"
        )


def _torch_can(program: Program, setup: Setup, **arguments: Any) -> bool:
    torch = Library("torch")
    # The pool is not reused, because its ranks may hang.
    with RankPool(2) as pool:
        try:
            outcomes = Twins(torch, torch, pool).of_subject(program, setup, **arguments)
        except RankFault:
            return False
    return all(outcome.raised is None for outcome in outcomes)


def _bare(outcomes: Iterable[Outcome]) -> RankOutcomes:
    """Drop the warnings and the devices. The unsharded reference does not warn, and it runs on the CPU."""

    def on_cpu(value: Any) -> Any:
        return replace(value, device=torch.device("cpu")) if isinstance(value, TensorState) else value

    return [replace(outcome, warned=(), value=tree_map(on_cpu, outcome.value)) for outcome in outcomes]


def values_of(outcomes: Sequence[Outcome]) -> list[Any]:
    for rank, outcome in enumerate(outcomes):
        assert outcome.raised is None, f"rank {rank} raised {outcome.raised}"
    return [outcome.value for outcome in outcomes]


def each(holds: Callable[[Any], bool]) -> Callable[[RankOutcomes | RankFault], bool]:
    """Return a check whether no rank raised and `holds` is true of every rank's value."""

    def do(outcomes: RankOutcomes | RankFault) -> bool:
        return not isinstance(outcomes, RankFault) and all(
            outcome.raised is None and bool(holds(outcome.value)) for outcome in outcomes
        )

    return do


def raises(kind: type[Exception], text: str = "") -> Callable[[RankOutcomes], bool]:
    """Return a check whether every rank raised an error of this type with this text."""
    return lambda outcomes: all(
        outcome.raised is not None and outcome.raised.kind is kind and text in outcome.raised.text
        for outcome in outcomes
    )


def raise_an_error(outcomes: RankOutcomes) -> bool:
    """Return whether every rank raised an error of any type."""
    return all(outcome.raised is not None for outcome in outcomes)
