"""`microbatch` with sharded models, compared with the unsharded model trained on the batches that count."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from conformance.distributed.fsdp import microbatch_cases as cases
from conformance.distributed.fsdp.microbatch_cases import BAD, LEARNING_RATE, SCALE, SKIP, Plan
from conformance.distributed.fsdp.scaler_cases import SCALER
from conformance.distributed.fsdp.twins import Twins, TwinsOf
from conformance.judge.clauses import clause

_GOOD = (None, None)
# Each pair has the plans of two steps of three microbatches on two ranks.
PLANS: dict[str, Sequence[Plan]] = {
    "good": [[_GOOD] * 3] * 2,
    "first": [[(None, BAD), _GOOD, _GOOD]] * 2,
    "last": [[_GOOD, _GOOD, (BAD, None)]] * 2,
    "skips": [[(None, SKIP), _GOOD, (SKIP, None)], [_GOOD, (None, SKIP), (None, SKIP)]],
    "both": [[(SKIP, None), _GOOD, (None, BAD)], [(BAD, SKIP), _GOOD, _GOOD]],
    "none": [[(BAD, None), (SKIP, SKIP), (None, BAD)], [_GOOD] * 3],
    "all skip": [[(SKIP, SKIP)] * 3, [_GOOD] * 3],
}
SHARDED = [layout for layout in cases.LAYOUTS if layout not in ("hybrid", "replicated")]


def expected_of(plans: Sequence[Plan]) -> tuple[dict[str, torch.Tensor], list[Any]]:
    """Train the unsharded model. Return its parameters and, for each step, whether it was taken and the scale."""
    model = cases.build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    scale, steps = SCALE, []
    for step, plan in enumerate(plans):
        optimizer.zero_grad()
        good = [(number, ranks) for number, ranks in enumerate(plan) if BAD not in ranks]
        batches = [(n, rank) for n, ranks in good for rank, outcome in enumerate(ranks) if outcome is None]
        for number, rank in batches:
            (model(cases.batch(step, number, rank)).square().mean() / len(batches)).backward()
        if batches:
            optimizer.step()
        scale = scale / 2 if len(good) < len(plan) else scale
        steps.append((bool(batches), scale))
    return {name: param.detach() for name, param in model.named_parameters()}, steps


def check(reports: Sequence[Any], plans: Sequence[Plan]) -> None:
    expected, steps = expected_of(plans)
    for parameters, its_steps in reports:
        assert [(taken, scale) for taken, scale, _ in its_steps] == steps
        for name, value in expected.items():
            torch.testing.assert_close(
                torch.tensor(parameters[name]), value, rtol=1e-5, atol=1e-6, msg=f"{name} differs"
            )
    assert all(report[1] == reports[0][1] for report in reports), "ranks report different microbatches"
    for plan, (_, _, skipped) in zip(plans, reports[0][1], strict=True):
        skips = [
            (n, rank) for n, ranks in enumerate(plan) for rank, outcome in enumerate(ranks) if outcome == SKIP
        ]
        assert [(number, rank) for number, rank, names in skipped if not names] == skips
        named = {number for number, _, names in skipped if names}
        assert named == {number for number, ranks in enumerate(plan) if BAD in ranks}


@clause("distributed.fsdp.sharded_grad_scaler.microbatch.sharded")
@pytest.mark.parametrize("plan", list(PLANS))
@pytest.mark.parametrize("layout", SHARDED)
def test_bad_microbatches_are_left_out_on_all_ranks(
    twins_of: TwinsOf, device: str, layout: str, plan: str
) -> None:
    plans = PLANS[plan]
    reports = twins_of(2, device).values(
        cases.accumulate, layout=layout, unsynced=(), how="step", plans=plans, scaler=SCALER
    )
    check(reports, plans)


@clause("distributed.fsdp.sharded_grad_scaler.microbatch.no_sync")
@pytest.mark.parametrize("plan", list(PLANS))
@pytest.mark.parametrize("layout", SHARDED)
def test_unsynchronised_bad_microbatches_are_left_out(
    twins_of: TwinsOf, device: str, layout: str, plan: str
) -> None:
    """A bad microbatch that synchronises does not take along the earlier ones that it is reduced with."""
    plans = PLANS[plan]
    for unsynced in ((0, 1), (0,)):
        reports = twins_of(2, device).values(
            cases.accumulate, layout=layout, unsynced=unsynced, how="step", plans=plans, scaler=SCALER
        )
        check(reports, plans)


@clause("distributed.fsdp.sharded_grad_scaler.microbatch.sharded")
@pytest.mark.parametrize("scaler", [SCALER, "amp.GradScaler"])
@pytest.mark.parametrize("layout", ["fully_shard", "original"])
def test_fused_step_leaves_out_bad_microbatches(
    twins_of: TwinsOf, device: str, layout: str, scaler: str
) -> None:
    """A GradScaler decides over the ranks that the parameters are sharded over."""
    for plans in PLANS.values():
        reports = twins_of(2, device).values(
            cases.accumulate, layout=layout, unsynced=(0,), how="fused_step", plans=plans, scaler=scaler
        )
        check(reports, plans)


@clause("distributed.fsdp.sharded_grad_scaler.microbatch.sharded")
@pytest.mark.parametrize("scaler", [SCALER, "amp.GradScaler"])
def test_hybrid_ranks_leave_out_bad_microbatches(twins_of: TwinsOf, device: str, scaler: str) -> None:
    plans = [[(*ranks, *_GOOD) for ranks in plan] for plan in PLANS["both"]]
    for unsynced in ((), (0, 1)):
        reports = twins_of(4, device).values(
            cases.accumulate, layout="hybrid", unsynced=unsynced, how="step", plans=plans, scaler=scaler
        )
        check(reports, plans)


@clause("distributed.fsdp.sharded_grad_scaler.microbatch.sharded")
@pytest.mark.parametrize("plan", list(PLANS))
def test_distributed_data_parallel_leaves_out_bad_microbatches(
    twins_of: TwinsOf, device: str, plan: str
) -> None:
    plans = PLANS[plan]
    reports = twins_of(2, device).values(
        cases.accumulate, layout="replicated", unsynced=(), how="step", plans=plans, scaler=SCALER
    )
    check(reports, plans)


@clause("distributed.fsdp.sharded_grad_scaler.microbatch.no_sync")
@pytest.mark.parametrize("amid", [False, True], ids=["after the backward", "amid the backward"])
@pytest.mark.parametrize("unsynced", [(), (0,), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("layout", SHARDED)
def test_failed_microbatch_leaves_others(
    twins_of: TwinsOf, device: str, layout: str, unsynced: tuple[int, ...], amid: bool
) -> None:
    """The second of four microbatches fails. The others are averaged."""
    model = cases.build_model()
    for number in (0, 2, 3):
        for rank in range(2):
            (model(cases.batch(0, number, rank)).square().mean() / 6).backward()
    torch.optim.SGD(model.parameters(), lr=LEARNING_RATE).step()
    reports = twins_of(2, device).values(cases.failing, layout=layout, unsynced=unsynced, amid=amid)
    for parameters in reports:
        for name, param in model.named_parameters():
            torch.testing.assert_close(torch.tensor(parameters[name]), param.detach(), rtol=1e-5, atol=1e-6)


@clause("distributed.fsdp.sharded_grad_scaler.microbatch.sharded")
@pytest.mark.parametrize("layout", ["fully_shard", "original", "replicated"])
def test_rank_with_fewer_batches_keeps_scale_of_others(twins_of: TwinsOf, device: str, layout: str) -> None:
    """The rank skips the steps for which it has no batch. The scale grows, and falls for the other rank's inf."""
    plans = [[ranks] for ranks in (_GOOD, (SKIP, None), (SKIP, None), (SKIP, BAD), (SKIP, None))]
    reports = twins_of(2, device).values(
        cases.accumulate,
        layout=layout, unsynced=(), how="step", plans=plans, scaler=SCALER, growth_interval=2,
    )  # fmt: skip
    expected = [SCALE, 2 * SCALE, 2 * SCALE, SCALE, SCALE]
    assert [[scale for _, scale, _ in steps] for _, steps in reports] == [expected] * 2
    parameters, _ = expected_of(plans)
    for values, _ in reports:
        for name, value in parameters.items():
            torch.testing.assert_close(torch.tensor(values[name]), value, rtol=1e-5, atol=1e-6)


@clause("distributed.fsdp.sharded_grad_scaler.constructor.max_skipped_steps")
@pytest.mark.world_sizes(fewest=2)
def test_too_many_skipped_steps_raise_on_all_ranks(twins: Twins, device: str) -> None:
    """The error comes one update later on an accelerator."""
    for steps, error in twins.values(cases.limited, limit=3):
        assert steps == (3 if device == "cpu" else 4)
        assert "max_skipped_steps=3" in error
        assert "weight" in error


@clause("distributed.fsdp.sharded_grad_scaler.microbatch.refused")
@pytest.mark.parametrize("is_inside", [False, True])
def test_unsynchronised_replicas_raise_and_keep_gradients(
    twins_of: TwinsOf, device: str, is_inside: bool
) -> None:
    for error, keeps in twins_of(2, device).values(cases.unsynchronised_replicas, is_inside=is_inside):
        assert error.startswith("NotImplementedError"), error
        assert "no_sync() of DistributedDataParallel" in error, error
        assert keeps


@clause("distributed.fsdp.sharded_grad_scaler.microbatch.refused")
@pytest.mark.parametrize("api", ["FullyShardedDataParallel", "fully_shard"])
def test_model_sharded_by_torch_raises(cpu_twins: Twins, api: str) -> None:
    for error in cpu_twins.values(cases.sharded_by_torch, api=api):
        assert error.startswith("NotImplementedError"), error
        assert "impl.distributed.fsdp" in error, error


@clause("distributed.fsdp.sharded_grad_scaler.microbatch.refused")
def test_skip_that_replicas_do_not_know_raises(twins_of: TwinsOf, device: str) -> None:
    for error in twins_of(2, device).values(cases.skipped_alone):
        assert error.startswith("RuntimeError"), error
        assert "ShardedGradScaler" in error, error


@clause("distributed.fsdp.sharded_grad_scaler.microbatch.refused")
@pytest.mark.parametrize(
    "setting", ["set_requires_all_reduce", "set_manual_backward_finalization", "parameters"]
)
@pytest.mark.world_sizes(fewest=2)
def test_unsupported_setting_raises_on_all_ranks(twins: Twins, setting: str) -> None:
    expected = "all trained parameters" if setting == "parameters" else setting
    for error in twins.values(cases.refused, setting=setting):
        assert error.startswith("NotImplementedError"), error
        assert expected in error, error
