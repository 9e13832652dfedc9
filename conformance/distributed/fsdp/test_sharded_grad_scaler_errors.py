"""Errors of ShardedGradScaler on one rank or on all ranks, and pickling."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from conformance.distributed.fsdp.scenes.scaler_programs import (
    INIT_SCALE_8,
    SCALER,
    ScalerCall,
    ScalerProgram,
    assert_calls_match_torch,
    errors_steps_and_scales,
    played,
    scales,
    stepped,
)
from conformance.distributed.fsdp.scenes.scene import Scene, tried
from conformance.distributed.fsdp.scenes.twins import Twins, TwinsOf, values_of
from conformance.judge.clauses import clause
from conformance.judge.library import Library
from conformance.ranks import RankFault
from conformance.strategies.sharded_scaling import iteration, one_bad, parts

PEERS_WAIT = "peers wait"

FAILURES: dict[str, tuple[tuple[ScalerCall, ...], str]] = {
    "a closure": (
        (ScalerCall("backward"), ScalerCall("step_with_closure", on=(0,)), ScalerCall("step", on=(1,))),
        "Closure use",
    ),
    "no scale": (
        (ScalerCall("backward", on=(1,)), ScalerCall("unscale_")),
        "Attempted unscale_ but _scale is None",
    ),
    "no scale, step": (
        (ScalerCall("backward", on=(1,)), ScalerCall("step")),
        "Attempted step but _scale is None",
    ),
    "no groups": (
        (ScalerCall("backward"), ScalerCall("break_optimizer", on=(0,)), ScalerCall("unscale_")),
        "NoneType",
    ),
    "no groups, step": (
        (ScalerCall("backward"), ScalerCall("break_optimizer", on=(0,)), ScalerCall("step")),
        "NoneType",
    ),
}


@clause("distributed.fsdp.sharded_grad_scaler.errors.reported_to_peers")
@pytest.mark.deviation("sharded_grad_scaler.failed_checks_are_told")
@pytest.mark.parametrize("optimizer", ["sgd", "aware"])
@pytest.mark.parametrize("failure", FAILURES)
def test_failure_on_one_rank_is_reported_to_peers(twins_of: TwinsOf, failure: str, optimizer: str) -> None:
    """The failing rank raises its own error, and the other rank reports a failed peer.

    Training continues after all ranks cleared their gradients.
    """
    twins, (calls, why) = twins_of(2), FAILURES[failure]
    fixing = (ScalerCall("mend_optimizer", on=(0,)),) if failure.startswith("no groups") else ()
    failing = ScalerProgram(parts(2), calls, (optimizer,), options=INIT_SCALE_8)
    going_on = replace(failing, calls=(*calls, *fixing, *iteration()))

    def probe(library: Library) -> Any:
        try:
            outcomes = played(twins, failing, library)
        except RankFault:
            return PEERS_WAIT
        errors = [
            [str(outcome.raised) for outcome in rank if outcome and outcome.raised] for rank in outcomes
        ]
        if not errors[1]:
            return "the peer has stepped"
        after = played(twins, going_on, library)
        return errors, [rank[-2].raised for rank in after], scales(after)

    def is_reported(result: Any) -> bool:
        if isinstance(result, str):
            return False
        [[own], [reported]], late, scale = result
        return why in own and "another rank" in reported and late == [None, None] and scale == [8.0, 8.0]

    # In `step` of an optimizer that handles `found_inf` itself, torch does not reduce the check.
    torchs = (
        "the peer has stepped" if optimizer == "aware" and ScalerCall("unscale_") not in calls else PEERS_WAIT
    )
    twins.judge(probe, torch_does=lambda result: result == torchs, we_do=is_reported)


@clause("distributed.fsdp.sharded_grad_scaler.errors.reported_to_peers")
def test_calls_that_raise_on_all_ranks_change_nothing(twins: Twins) -> None:
    """Calls that raise on all ranks change nothing, so later calls work as if they had not been made."""
    names = (
        *("unscale_", "step", "update", "backward", "step_with_closure", "update", "unscale_"),
        *("unscale_", "step_with_closure", "step", "step", "unscale_", "update"),
    )
    calls = (*map(ScalerCall, names), *iteration())
    plan = ScalerProgram(parts(twins.world_size), calls, ("recording",), options=INIT_SCALE_8)
    raising = [0, 1, 2, 4, 5, 7, 8, 10, 11]
    for outcomes in assert_calls_match_torch(twins, plan):
        assert [number for number, outcome in enumerate(outcomes) if outcome.raised] == raising


def unscale_in_group_of_another_rank(scene: Scene) -> str | None:
    """Give every rank but the last a group that only has the last rank. Return the error of unscale_."""
    alone = dist.new_group([scene.rank.world_size - 1])
    scaler = scene.library.find(SCALER)(scene.rank.device.type, process_group=alone)
    parameter = torch.nn.Parameter(torch.ones(1, device=scene.rank.device))
    scaler.scale(parameter.sum()).backward()
    error = tried(lambda: scaler.unscale_(torch.optim.SGD([parameter])))
    if alone is not dist.GroupMember.NON_GROUP_MEMBER:
        dist.destroy_process_group(alone)
    return error


@clause("distributed.fsdp.sharded_grad_scaler.constructor.anothers_group")
def test_group_without_this_rank_is_refused(twins_of: TwinsOf) -> None:
    for outcomes in twins_of(2).of_both(unscale_in_group_of_another_rank):
        assert [error is not None for error in values_of(outcomes)] == [True, False]


@clause("distributed.fsdp.sharded_grad_scaler.pickle.without_group")
@pytest.mark.deviation("sharded_grad_scaler.pickles_without_its_group")
@pytest.mark.parametrize("way", ["through_a_pickle", "through_a_deep_copy"])
@pytest.mark.world_sizes(fewest=2)
def test_copied_scaler_decides_over_default_group(cpu_twins: Twins, way: str) -> None:
    skipped = iteration(one_bad(1, cpu_twins.world_size))
    plan = ScalerProgram(
        parts(cpu_twins.world_size),
        (*skipped, ScalerCall("hold_world"), ScalerCall(way), *skipped),
        options=INIT_SCALE_8,
    )
    cpu_twins.judge(
        lambda library: errors_steps_and_scales(cpu_twins, plan, library),
        torch_does=lambda result: any("ProcessGroup" in text for text in result[0]),
        we_do=lambda result: (
            result == (set(), [[False, False]] * cpu_twins.world_size, [2.0] * cpu_twins.world_size)
        ),
    )


@clause("distributed.fsdp.sharded_grad_scaler.pickle.without_group")
@pytest.mark.deviation("sharded_grad_scaler.pickles_without_its_group")
@pytest.mark.parametrize("way", ["through_a_pickle", "through_a_deep_copy"])
def test_copied_scaler_of_another_group_raises_until_group_is_set(twins_of: TwinsOf, way: str) -> None:
    """The unpickled scaler raises until a group is assigned, because the default group would be wrong."""
    twins = twins_of(2)
    calls = (*iteration(), ScalerCall(way), *iteration(unscale=True), ScalerCall("hold_world"), *iteration())
    plan = ScalerProgram(parts(2), calls, options=INIT_SCALE_8, groups=2)

    def probe(library: Library) -> Any:
        outcomes = played(twins, plan, library)
        return [[str(outcome.raised) for outcome in rank if outcome.raised] for rank in outcomes], stepped(
            outcomes, plan
        )

    def is_ours(result: Any) -> bool:
        errors, moved = result
        lost = "RuntimeError: this ShardedGradScaler has no process group"
        return moved == [[True, False, True]] * 2 and all(
            [error.startswith(lost) for error in rank] == [True, True, False] for rank in errors
        )

    twins.judge(
        probe,
        torch_does=lambda result: any("ProcessGroup" in text for rank in result[0] for text in rank),
        we_do=is_ours,
    )
