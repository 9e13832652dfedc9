"""Comparison of `fully_shard` probes, which are functions of a `Site`, on the ranks of both libraries."""

from __future__ import annotations

from typing import Any

from conformance.distributed.fsdp.fully_shard_construct_cases import probe
from conformance.distributed.fsdp.lab import ONE_UNIT, Program
from conformance.distributed.fsdp.rank_judging import run_on_ranks
from conformance.distributed.fsdp.twins import RankOutcomes, Setup, Twins
from conformance.judge.deviations import does_as
from conformance.judge.library import Library
from conformance.judge.outcome import Outcome
from conformance.judge.tolerances import TRAINED


class Sites(Twins):
    """The fixtures `sites` and `sites_of`: a rank comparison whose programs get a `Site` instead of a wrapped model."""

    tolerance = TRAINED

    def of(
        self, library: Library, program: Program, setup: Setup = ONE_UNIT, **arguments: Any
    ) -> RankOutcomes:
        return run_on_ranks(self.pool, library, probe, asks=program, **arguments)

    def deviate_by_hand(self, expected: Outcome, program: Program, **arguments: Any) -> None:
        """Judge a deviation: every rank of the subject must have the results of one unsharded process."""
        self.deviate(
            program,
            we_do=lambda outcomes: all(does_as(expected, outcome) for outcome in outcomes),
            **arguments,
        )
