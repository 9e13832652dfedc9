"""ShardedGradScaler makes one decision for all ranks, whatever gradients they have, with one small collective."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision

from conformance.distributed.fsdp.scenes.fsdp_training import state_of
from conformance.distributed.fsdp.scenes.rank_judging import share_of_examples
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
from conformance.distributed.fsdp.scenes.twins import FULL_PROFILE, Twins, TwinsOf
from conformance.judge.clauses import clause
from conformance.judge.library import Library
from conformance.judge.sandbox import seeding
from conformance.judge.tolerances import EXACT
from conformance.strategies.gradients import Gradient
from conformance.strategies.scaling import PLAIN, TakesScaler, entries
from conformance.strategies.sharded_scaling import (
    SKIPPING_FOR_THEMSELVES,
    iteration,
    iterations,
    one_bad,
    parts,
    plans,
)

BAD = (math.inf, -math.inf, math.nan)
WITH_AND_WITHOUT_UNSCALE = pytest.mark.parametrize("unscale", [True, False], ids=["unscale_", "step alone"])


@clause("distributed.fsdp.sharded_grad_scaler.sequences.any")
@given(data=st.data())
def test_any_sequence_of_calls_matches_torch(twins: Twins, data: st.DataObject) -> None:
    assert_calls_match_torch(twins, data.draw(plans(twins.world_size)))


@clause("distributed.fsdp.sharded_grad_scaler.sequences.any")
@FULL_PROFILE
@pytest.mark.parametrize("more_ranks", [3, 4])
@share_of_examples(0.3)
@given(data=st.data())
def test_any_sequence_of_calls_on_more_ranks_matches_torch(
    twins_of: TwinsOf, more_ranks: int, data: st.DataObject
) -> None:
    assert_calls_match_torch(twins_of(more_ranks), data.draw(plans(more_ranks)))


@clause("distributed.fsdp.sharded_grad_scaler.step.one_decision")
@pytest.mark.parametrize("more_ranks", [2, 3, pytest.param(4, marks=FULL_PROFILE)])
@pytest.mark.parametrize("optimizer", PLAIN)
@WITH_AND_WITHOUT_UNSCALE
def test_inf_on_one_rank_skips_step_on_all(
    twins_of: TwinsOf, more_ranks: int, optimizer: str, unscale: bool
) -> None:
    """Each rank in turn finds inf, between clean steps."""
    bad_and_clean = [(one_bad(bad, more_ranks, BAD[bad % 3]), None) for bad in range(more_ranks)]
    calls = iterations(None, *itertools.chain(*bad_and_clean), unscale=unscale)
    plan = ScalerProgram(parts(more_ranks), calls, (optimizer,), options=INIT_SCALE_8)
    outcomes = assert_calls_match_torch(twins_of(more_ranks), plan)
    assert stepped(outcomes, plan) == [[True] + [False, True] * more_ranks] * more_ranks
    assert scales(outcomes) == [8.0 * 0.5**more_ranks] * more_ranks


@clause("distributed.fsdp.sharded_grad_scaler.step.one_decision")
@pytest.mark.parametrize(
    ("before", "after"), [(math.inf, 0.0), (None, math.inf)], ids=["inf replaced", "inf added"]
)
def test_flag_of_unscaling_decides_after_gradients_are_edited(
    twins: Twins, before: float | None, after: float
) -> None:
    """The flag of `unscale_` decides, on ranks that edited their gradients later and on ranks that did not."""
    last = twins.world_size - 1
    calls = (
        ScalerCall("backward", argument=one_bad(last, last + 1, before)),
        ScalerCall("unscale_"),
        ScalerCall("overwrite_gradients", argument=after, on=(last,)),
        ScalerCall("step"),
        ScalerCall("update"),
    )
    plan = ScalerProgram(parts(last + 1), calls, ("recording",), options=INIT_SCALE_8)
    outcomes = assert_calls_match_torch(twins, plan)
    assert [len(rank[-1].watched["calls"]) for rank in outcomes] == [before is None] * (last + 1)
    assert scales(outcomes) == [8.0 if before is None else 4.0] * (last + 1)


@clause("distributed.fsdp.sharded_grad_scaler.step.one_decision")
@WITH_AND_WITHOUT_UNSCALE
def test_inf_in_accumulated_backward_skips_step(twins: Twins, unscale: bool) -> None:
    """An inf in the first of three backwards skips the step after the third."""
    calls: tuple[ScalerCall, ...] = ()
    for grad_outcomes in (None, one_bad(0, twins.world_size), None):
        accumulated = (
            ScalerCall("backward", argument=grad_outcomes),
            ScalerCall("backward"),
            ScalerCall("backward"),
        )
        first, _, *rest = iteration(unscale=unscale)
        calls += (first, *accumulated, *rest)
    plan = ScalerProgram(parts(twins.world_size), calls, ("momentum",), options=INIT_SCALE_8)
    outcomes = assert_calls_match_torch(twins, plan)
    assert stepped(outcomes, plan) == [[True, False, True]] * twins.world_size


@clause("distributed.fsdp.sharded_grad_scaler.step.one_decision_amp_aware")
@pytest.mark.deviation("sharded_grad_scaler.one_decision_of_amp_aware_optimizers")
@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("optimizer", SKIPPING_FOR_THEMSELVES)
@pytest.mark.world_sizes(fewest=2)
def test_inf_on_one_rank_skips_amp_aware_steps_on_all(cpu_twins: Twins, optimizer: str, bad: int) -> None:
    """All ranks of the subject skip the step and lower the scale if one rank finds inf.

    With torch, only that rank does.
    """
    ranks = range(cpu_twins.world_size)
    calls = iterations(None, one_bad(bad, len(ranks)), None)
    plan = ScalerProgram(parts(len(ranks)), calls, (optimizer,), options=INIT_SCALE_8)
    alone = [[True, rank != bad, True] for rank in ranks], [4.0 if rank == bad else 8.0 for rank in ranks]
    together = [[True, False, True] for _ in ranks], [4.0 for _ in ranks]
    cpu_twins.judge(
        lambda library: errors_steps_and_scales(cpu_twins, plan, library),
        torch_does=lambda results: results == (set(), *alone),
        we_do=lambda results: results == (set(), *together),
    )


@clause("distributed.fsdp.sharded_grad_scaler.step.amp_aware_after_unscaling")
@pytest.mark.deviation("sharded_grad_scaler.found_inf_of_one_shape")
@pytest.mark.parametrize("optimizer", ["fused adam", "fused adamw"])
def test_fused_optimizers_step_after_unscaling(twins: Twins, optimizer: str) -> None:
    """torch raises RuntimeError, because two `found_inf` tensors differ in shape."""
    world_size = twins.world_size
    calls = iterations(None, one_bad(world_size - 1, world_size), None, unscale=True)
    plan = ScalerProgram(parts(world_size), calls, (optimizer,), options=INIT_SCALE_8)
    judge_steps_and_scale(twins, plan, [True, False, True], 4.0)


@clause("distributed.fsdp.sharded_grad_scaler.step.amp_aware_after_unscaling")
@pytest.mark.deviation("sharded_grad_scaler.found_inf_of_one_shape")
def test_fused_and_plain_optimizers_share_scaler(twins: Twins) -> None:
    """Each iteration calls zero_grad, backward and step for both optimizers in turn, and then update.

    `parts` has the gradients of both optimizers for every rank. In two iterations, the last rank has an inf in the
    gradients of one optimizer. torch's `update` raises RuntimeError, because the two `found_inf` differ in shape.
    """
    world_size = twins.world_size
    calls: tuple[ScalerCall, ...] = ()
    for bad in (None, 0, 1, None):
        for which in range(2):
            grad_outcomes = one_bad(world_size - 1, world_size) if bad == which else None
            calls += iteration(grad_outcomes, which=which)[:-1]
        calls += (ScalerCall("update"),)
    plan = ScalerProgram(parts(world_size, optimizers=2), calls, ("fused adam", "adam"), options=INIT_SCALE_8)
    of_both = [True, True, False, True, True, False, True, True]
    judge_steps_and_scale(twins, plan, of_both, 2.0)


def judge_steps_and_scale(twins: Twins, plan: ScalerProgram, expected: list[bool], scale: float) -> None:
    """Judge a deviation: steps are taken or skipped as `expected` without an error. torch may fail to broadcast."""
    ranks = twins.world_size
    twins.judge(
        lambda library: errors_steps_and_scales(twins, plan, library),
        torch_does=lambda results: any(
            "doesn't match the broadcast shape [1]" in text for text in results[0]
        ),
        we_do=lambda results: results == (set(), [expected] * ranks, [scale] * ranks),
    )


@clause("distributed.fsdp.sharded_grad_scaler.step.several_ranks_found_inf")
@pytest.mark.deviation("sharded_grad_scaler.found_inf_is_no_count")
@pytest.mark.parametrize("more_ranks", [2, 3, 4])
@pytest.mark.parametrize("optimizer", ["aware", "fused sgd"])
def test_found_inf_of_several_ranks_is_one(twins_of: TwinsOf, more_ranks: int, optimizer: str) -> None:
    """Check the flag after unscale_, for optimizers that skip steps themselves, such as torch's fused SGD."""
    twins = twins_of(more_ranks)
    calls = iteration((math.inf,) * more_ranks, unscale=True)
    plan = ScalerProgram(parts(more_ranks), calls, (optimizer,))

    def probe(library: Library) -> Any:
        outcomes = played(twins, plan, library)
        return [rank[-1].watched["handed"] for rank in outcomes], stepped(outcomes, plan)

    def sides(found_inf: float) -> Any:
        handed = [(None, found_inf)] if optimizer == "aware" else []
        return [handed] * more_ranks, [[found_inf != 1.0 and optimizer != "aware"]] * more_ranks

    twins.judge(
        probe,
        torch_does=lambda results: results == sides(float(more_ranks)),
        we_do=lambda results: results == sides(1.0),
    )


@clause("distributed.fsdp.sharded_grad_scaler.step.without_gradients")
@pytest.mark.parametrize(
    "more_ranks", [1, 2, *(pytest.param(number, marks=FULL_PROFILE) for number in (3, 4))]
)
@pytest.mark.parametrize("optimizer", ["recording", "aware", "adam"])
@WITH_AND_WITHOUT_UNSCALE
def test_ranks_without_gradients_count_clean_steps(
    twins_of: TwinsOf, more_ranks: int, optimizer: str, unscale: bool
) -> None:
    """Run once with gradients only on rank 0, then without gradients on any rank."""
    calls = iterations(None, None, None, unscale=unscale)
    for bare in (tuple(range(1, more_ranks)), tuple(range(more_ranks))):
        plan = ScalerProgram(
            parts(more_ranks, bare=bare), calls, (optimizer,), options=INIT_SCALE_8 | {"growth_interval": 2}
        )
        outcomes = assert_calls_match_torch(twins_of(more_ranks), plan)
        assert scales(outcomes) == [16.0] * more_ranks


@clause("distributed.fsdp.sharded_grad_scaler.step.without_gradients")
@pytest.mark.parametrize("more_ranks", [2, 3])
@WITH_AND_WITHOUT_UNSCALE
def test_ranks_without_gradients_skip_with_their_peers(
    twins_of: TwinsOf, more_ranks: int, unscale: bool
) -> None:
    last = more_ranks - 1
    calls = iterations(one_bad(last, more_ranks), None, unscale=unscale)
    plan = ScalerProgram(
        parts(more_ranks, bare=tuple(range(last))), calls, ("recording",), options=INIT_SCALE_8
    )
    outcomes = assert_calls_match_torch(twins_of(more_ranks), plan)
    assert [len(rank[-1].watched["calls"]) for rank in outcomes] == [1] * more_ranks
    assert scales(outcomes) == [4.0] * more_ranks


@clause("distributed.fsdp.sharded_grad_scaler.collectives.one_a_check")
@pytest.mark.parametrize("more_ranks", [1, 2, pytest.param(3, marks=FULL_PROFILE)])
@pytest.mark.parametrize("optimizer", ["sgd", "aware"])
@pytest.mark.parametrize("bare", [(), (0,), (0, 1, 2)], ids=str)
@WITH_AND_WITHOUT_UNSCALE
def test_check_is_one_all_reduce(
    twins_of: TwinsOf, more_ranks: int, optimizer: str, bare: tuple[int, ...], unscale: bool
) -> None:
    """Take three steps of two optimizers, with dtypes that differ between ranks.

    The checks are the only collectives.
    """
    both = parts(more_ranks, bare=bare, optimizers=2)
    mixed = tuple(
        (first, (*second, Gradient((4,), torch.float64 if rank else torch.bfloat16)))
        for rank, (first, second) in enumerate(both)
    )
    calls: tuple[ScalerCall, ...] = ()
    for grad_outcomes in (None, one_bad(0, more_ranks), None):
        for which in range(2):
            calls += iteration(grad_outcomes, which=which, unscale=unscale)[:-1]
        calls += (ScalerCall("update"), ScalerCall("resume"))
    plan = ScalerProgram(mixed, (*calls, ScalerCall("update", argument=4.0)), (optimizer, "sgd"))
    twins = twins_of(more_ranks)
    played(twins, plan)
    for trace in twins.pool.traces:
        assert {(call.name, sum(numel for _, numel in call.tensors)) for call in trace} == {("allreduce_", 1)}
        assert len(trace) <= 6


@clause("distributed.fsdp.sharded_grad_scaler.constructor.process_group")
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@WITH_AND_WITHOUT_UNSCALE
def test_groups_decide_for_themselves(twins_of: TwinsOf, optimizer: str, unscale: bool) -> None:
    """Four ranks form two groups. An inf on rank 3 stops the second group, and one on rank 0 the first group."""
    of_second, of_first = one_bad(3, 4), one_bad(0, 4)
    calls = iterations(None, of_second, None, of_first, of_first, unscale=unscale)
    plan = ScalerProgram(parts(4), calls, (optimizer,), options=INIT_SCALE_8, groups=2)
    outcomes = assert_calls_match_torch(twins_of(4), plan)
    first, second = [True, True, True, False, False], [True, False, True, True, True]
    assert stepped(outcomes, plan) == [first, first, second, second]
    assert scales(outcomes) == [2.0, 2.0, 4.0, 4.0]


@clause("distributed.fsdp.sharded_grad_scaler.constructor.process_group")
def test_groups_need_not_step_alike(twins_of: TwinsOf) -> None:
    """The first two of four ranks take two more steps than the other two."""
    alone = tuple(
        ScalerCall(call.name, call.which, call.argument, on=(0, 1)) for call in iteration(one_bad(1, 4)) * 2
    )
    plan = ScalerProgram(parts(4), (*iteration(), *alone, *iteration()), options=INIT_SCALE_8, groups=2)
    assert scales(played(twins_of(4), plan)) == [2.0, 2.0, 8.0, 8.0]


@clause("distributed.fsdp.sharded_grad_scaler.step.answers")
@pytest.mark.deviation("grad_scaler.tells_whether_the_step_was_taken")
@pytest.mark.parametrize("optimizer", ["sgd", "aware"])
@pytest.mark.world_sizes(fewest=2)
def test_queries_answer_for_all_ranks(cpu_twins: Twins, optimizer: str) -> None:
    """Query the scaler after a clean step, after an inf on rank 1, and after that rank cleared its gradients."""
    calls = (
        *iteration(),
        ScalerCall("queries"),
        *iteration(one_bad(1, cpu_twins.world_size)),
        ScalerCall("queries"),
        ScalerCall("zero_grad"),
        ScalerCall("queries"),
    )
    plan = ScalerProgram(parts(cpu_twins.world_size), calls, (optimizer,))
    places = [place for place, call in enumerate(calls) if call.name == "queries"]

    def probe(library: Library) -> Any:
        outcomes = played(cpu_twins, plan, library)
        return [[rank[place].raised or rank[place].value for place in places] for rank in outcomes]

    def is_ours(answers: Any) -> bool:
        label = "param_groups[1]['params'][1] of shape (5,)"
        return all(
            [clean, skipped] == [(0.0, True, []), (1.0, False, [(label, 1, 1)])] and "cleared" in str(gone)
            for clean, skipped, gone in answers
        )

    cpu_twins.judge(
        probe, torch_does=lambda answers: answers == [[None] * 3] * cpu_twins.world_size, we_do=is_ours
    )


def skip_until_error(scene: Scene, *, limit: int) -> tuple[int, str] | None:
    """Return after how many steps, which rank 1 spoils, the scaler with the limit raises, and the text."""
    device = scene.rank.device
    model = scene.shard(torch.nn.Linear(5, 2).to(device))
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.125)
    scaler = scene.library.find(SCALER)(device.type, max_skipped_steps=limit)
    inputs = torch.full((4, 5), math.nan if scene.rank.rank == 1 else 1.0, device=device)
    for number in range(limit + 2):
        optimizer.zero_grad()
        scaler.scale(model(inputs).sum()).backward()
        scaler.step(optimizer)
        if (error := tried(scaler.update)) is not None:
            return number + 1, error
        if device.type != "cpu":
            torch.accelerator.synchronize()
    return None


@clause("distributed.fsdp.sharded_grad_scaler.constructor.max_skipped_steps")
@pytest.mark.world_sizes(fewest=2)
def test_too_many_skipped_steps_raise_on_all_ranks(twins: Twins, device: str) -> None:
    """The error comes one update later on an accelerator."""
    for steps, error in twins.values(skip_until_error, limit=3):
        assert steps == (3 if device == "cpu" else 4)
        assert "max_skipped_steps=3" in error
        assert "weight" in error


def older_protocol(scene: Scene) -> dict[str, Any]:
    """Step an optimizer that takes the scaler. Return the result, whether it got the scaler, and the parameter."""
    scaler = scene.library.find(SCALER)(scene.rank.device.type)
    parameter = torch.nn.Parameter(torch.ones(1, device=scene.rank.device))
    scaler.scale(parameter.sum()).backward()
    optimizer = TakesScaler([parameter])
    result = scaler.step(optimizer)
    gets_scaler = [taken is scaler for taken in optimizer.scalers]
    return {"result": result, "gets scaler": gets_scaler, "parameter": state_of(parameter)}


@clause("distributed.fsdp.sharded_grad_scaler.step.older_protocol")
def test_optimizer_that_takes_scaler_gets_it(twins: Twins) -> None:
    for outcome in twins.agree(older_protocol, tolerance=EXACT):
        assert outcome.value["gets scaler"] == [True]


def train(
    scene: Scene, *, low_precision: bool, grad_outcomes: tuple[tuple[float | None, ...], ...]
) -> list[Any]:
    """Train torch's FSDP with a step for each of `grad_outcomes`, in which each rank scales its inputs by a factor."""
    device, rank = scene.rank.device, scene.rank.rank
    half = MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float16)
    model = FullyShardedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3)),
        device_id=device,
        use_orig_params=True,
        mixed_precision=half if low_precision else None,
    )
    scaler = scene.library.find(SCALER)(device.type, init_scale=1024.0, growth_interval=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    steps: list[Any] = []
    for step, factors in enumerate(grad_outcomes):
        inputs = torch.randn(4, 5, generator=seeding.generator(100 * step + rank)).to(device)
        factor = factors[rank]
        optimizer.zero_grad()
        loss = model(inputs if factor is None else inputs * factor).mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        result = scaler.step(optimizer)
        scaler.update()
        steps.append((result, [state_of(parameter) for parameter in model.parameters()], entries(scaler)))
    return steps


@clause("distributed.fsdp.sharded_grad_scaler.training.fsdp")
@pytest.mark.parametrize("low_precision", [False, True], ids=["float32", "float16"])
def test_fsdp_of_torch_trains_with_scaler(twins: Twins, low_precision: bool) -> None:
    """Every rank trains on its own data, and one rank gets an inf."""
    world_size = twins.world_size
    grad_outcomes = ((None,) * world_size, one_bad(world_size - 1, world_size), *[(None,) * world_size] * 3)
    arguments = {"low_precision": low_precision, "grad_outcomes": grad_outcomes}
    for outcome in twins.agree(train, tolerance=EXACT, **arguments):
        *_, final = outcome.value[-1]
        assert (final["scale"], final["_growth_tracker"]) == (1024.0, 1)
