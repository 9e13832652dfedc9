"""`microbatch` with sharded models, compared with the unsharded model trained on the batches that count."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.tensor import Partial, Placement, Replicate
from torch.optim import SGD

from conformance.distributed.fsdp.scenes.fsdp_training import clean, gathered_parameters
from conformance.distributed.fsdp.scenes.scaler_programs import EACH_SCALER, SCALER
from conformance.distributed.fsdp.scenes.scene import Scene, raise_in_backward, tried
from conformance.distributed.fsdp.scenes.twins import Twins, TwinsOf
from conformance.judge.clauses import clause
from conformance.judge.sandbox import seeding
from conformance.strategies.dtensor_gradients import PlacedGradient

# For each microbatch what each rank does: nothing (None), spoil its batch or skip it.
BAD, SKIP = "bad", "skip"
_GOOD = (None, None)
Plan = Sequence[Sequence[str | None]]
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
LAYOUTS = ("fully_shard", "kept", "hybrid", "original", "flat", "no_shard", "replicated")
SHARDED = [layout for layout in LAYOUTS if layout not in ("hybrid", "replicated")]
LEARNING_RATE, SCALE = 0.125, 64.0


def build_model() -> nn.Sequential:
    seeding.seed_all()
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 1))


def batch(step: int, microbatch: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 5, generator=seeding.generator(100 * step + 10 * microbatch + rank))


def expected_of(plans: Sequence[Plan]) -> tuple[dict[str, torch.Tensor], list[Any]]:
    """Train the unsharded model. Return its parameters and, for each step, whether it was taken and the scale."""
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    scale, steps = SCALE, []
    for step, plan in enumerate(plans):
        optimizer.zero_grad()
        good = [(number, ranks) for number, ranks in enumerate(plan) if BAD not in ranks]
        batches = [(n, rank) for n, ranks in good for rank, outcome in enumerate(ranks) if outcome is None]
        for number, rank in batches:
            (model(batch(step, number, rank)).square().mean() / len(batches)).backward()
        if batches:
            optimizer.step()
        scale = scale / 2 if len(good) < len(plan) else scale
        steps.append((bool(batches), scale))
    return {name: param.detach() for name, param in model.named_parameters()}, steps


def assert_close(parameters: dict[str, list[Any]], expected: dict[str, torch.Tensor]) -> None:
    for name, value in expected.items():
        actual = torch.tensor(parameters[name])
        torch.testing.assert_close(actual, value, rtol=1e-5, atol=1e-6, msg=f"{name} differs")


def assert_trains_without_bad_batches(reports: Sequence[Any], plans: Sequence[Plan]) -> None:
    expected, steps = expected_of(plans)
    for parameters, its_steps in reports:
        assert [(taken, scale) for taken, scale, _ in its_steps] == steps
        assert_close(parameters, expected)
    assert all(report[1] == reports[0][1] for report in reports), "ranks report different microbatches"
    for plan, (_, _, skipped) in zip(plans, reports[0][1], strict=True):
        skips = [
            (n, rank) for n, ranks in enumerate(plan) for rank, outcome in enumerate(ranks) if outcome == SKIP
        ]
        assert [(number, rank) for number, rank, names in skipped if not names] == skips
        named = {number for number, _, names in skipped if names}
        assert named == {number for number, ranks in enumerate(plan) if BAD in ranks}


def accumulate(
    scene: Scene,
    *,
    layout: str,
    unsynced: Sequence[int],
    how: str,
    plans: Sequence[Plan],
    scaler: str,
    growth_interval: int = 100,
) -> Any:
    """Train for one step for each plan.

    Args:
        layout: one of `LAYOUTS`.
        unsynced: microbatches that run in `no_sync`.
        how: the method that steps.
        plans: outcomes of the microbatches.

    Returns:
        The full parameters and, for each step, whether it was taken, the scale, and the skipped microbatches.
    """
    device, rank = scene.rank.device, scene.rank.rank
    options = {"init_scale": SCALE, "growth_interval": growth_interval}
    sharded, optimizer, its_scaler = _prepared(scene, layout, scaler, **options)
    steps: list[Any] = []
    for step, plan in enumerate(plans):
        optimizer.zero_grad()
        for number, outcomes in enumerate(plan):
            inputs = batch(step, number, rank).to(device)
            context = sharded.no_sync() if number in unsynced else contextlib.nullcontext()
            with context, its_scaler.microbatch(optimizer) as microbatch:
                if outcomes[rank] == SKIP:
                    microbatch.skip()
                loss = sharded(inputs if outcomes[rank] is None else inputs * math.nan).square().mean()
                its_scaler.scale(loss / len(plan)).backward()
        if how == "fused_step":
            its_scaler.fused_step(optimizer, update=False)
        else:
            its_scaler.step(optimizer)
        its_scaler.update()
        skipped = [tuple(entry) for entry in its_scaler.skipped_microbatches(optimizer)]
        steps.append((its_scaler.step_was_taken(optimizer), its_scaler.get_scale(), skipped))
    return _parameters(scene, layout, sharded), steps


def _prepared(scene: Scene, layout: str, scaler: str = SCALER, **options: Any) -> tuple[Any, SGD, Any]:
    """Return a sharded model, its optimizer, and a scaler."""
    sharded = _sharded(scene, layout)
    its_scaler = scene.library.find(scaler)(scene.rank.device.type, **options)
    return sharded, SGD(sharded.named_parameters(), lr=LEARNING_RATE), its_scaler


def _sharded(scene: Scene, layout: str) -> Any:
    sharded, api, world = build_model().to(scene.rank.device), scene.api, scene.rank.world_size
    if layout in ("fully_shard", "kept", "hybrid"):
        sizes = (2, world // 2) if layout == "hybrid" else (world,)
        more = {"reshard_after_forward": False} if layout == "kept" else {}
        mesh = scene.rank.mesh(*sizes, names=("replicas", "shards")[-len(sizes) :])
        for child in (sharded[0], sharded[2]):
            api.fully_shard(child, mesh=mesh, **more)
        return api.fully_shard(sharded, mesh=mesh, **more)
    if layout == "replicated":
        return nn.parallel.DistributedDataParallel(sharded)
    strategy = "NO_SHARD" if layout == "no_shard" else "FULL_SHARD"
    originals = layout != "flat"
    for number in (0, 2):
        sharded[number] = scene.wrap(sharded[number], use_orig_params=originals, strategy=strategy)
    return scene.wrap(sharded, use_orig_params=originals, strategy=strategy)


def _parameters(scene: Scene, layout: str, sharded: Any) -> dict[str, list[Any]]:
    if layout in ("original", "flat", "no_shard"):
        return {name: value.tolist() for name, value in gathered_parameters(scene.library, sharded).items()}
    values = {
        clean(name).removeprefix("module."): param.full_tensor() if hasattr(param, "full_tensor") else param
        for name, param in sharded.named_parameters()
    }
    return {name: value.tolist() for name, value in values.items()}


# Layout, number of ranks, microbatches that run in no_sync, the method that steps, and the plan.
_RUNS: list[tuple[str, int, tuple[int, ...], str, str]] = [
    *((layout, 2, (), "step", plan) for layout in (*SHARDED, "replicated") for plan in PLANS),
    *((layout, 2, (0,), "fused_step", plan) for layout in ("fully_shard", "original") for plan in PLANS),
    *(("hybrid", 4, unsynced, "step", "both") for unsynced in ((), (0, 1))),
]


@clause("distributed.fsdp.sharded_grad_scaler.microbatch.sharded")
@pytest.mark.parametrize(("layout", "world", "unsynced", "how", "plan"), _RUNS, ids=str)
def test_bad_microbatches_are_left_out_on_all_ranks(
    twins_of: TwinsOf, device: str, *, layout: str, world: int, unsynced: tuple[int, ...], how: str, plan: str
) -> None:
    """A GradScaler decides over the ranks that the parameters are sharded over, but knows no other replicas."""
    plans = [[(*outcomes, *[None] * (world - 2)) for outcomes in step] for step in PLANS[plan]]
    knows_ranks = layout == "hybrid" or how == "fused_step"
    for scaler in (SCALER, "amp.GradScaler") if knows_ranks else (SCALER,):
        arguments = {"layout": layout, "unsynced": unsynced, "how": how, "plans": plans, "scaler": scaler}
        assert_trains_without_bad_batches(twins_of(world, device).values(accumulate, **arguments), plans)


@clause("distributed.fsdp.sharded_grad_scaler.microbatch.no_sync")
@pytest.mark.parametrize("unsynced", [(0, 1), (0,)], ids=str)
@pytest.mark.parametrize("plan", list(PLANS))
@pytest.mark.parametrize("layout", SHARDED)
def test_unsynchronised_bad_microbatches_are_left_out(
    twins_of: TwinsOf, device: str, layout: str, plan: str, unsynced: tuple[int, ...]
) -> None:
    """A bad microbatch that synchronises does not take along the earlier ones that it is reduced with."""
    arguments = {"layout": layout, "unsynced": unsynced, "how": "step", "scaler": SCALER}
    assert_trains_without_bad_batches(
        twins_of(2, device).values(accumulate, plans=PLANS[plan], **arguments), PLANS[plan]
    )


def with_placements(scene: Scene, *, scaler: str, placements: Sequence[Placement], bad: int | None) -> Any:
    """Return the replicated parameter after a step of microbatches whose gradients have these placements."""
    device, rank, ranks = scene.rank.device, scene.rank.rank, range(scene.rank.world_size)
    mesh = scene.rank.mesh(scene.rank.world_size)
    param = nn.Parameter(PlacedGradient(torch.zeros(5), None, placements=(Replicate(),)).on(mesh))
    optimizer = SGD([param], lr=1.0)
    its_scaler = scene.library.find(scaler)(device.type, init_scale=SCALE)
    for number, placement in enumerate(placements):
        inputs = torch.cat([batch(0, number, r) for r in (ranks if placement.is_replicate() else [rank])])
        with its_scaler.microbatch(optimizer):
            local: Any = param.to_local(grad_placements=[placement])
            products = inputs.to(device) * local * (math.nan if number == bad else 1.0)
            its_scaler.scale(products.sum() / len(placements)).backward()
            assert param.grad.placements == (placement,)
    its_scaler.step(optimizer)
    return param.detach().full_tensor().tolist()


@clause("distributed.fsdp.sharded_grad_scaler.microbatch.placements")
@pytest.mark.parametrize("bad", [None, 0, 1, 2])
@pytest.mark.parametrize("placements", ["PRP", "RPR"])
@EACH_SCALER
@pytest.mark.world_sizes(fewest=2)
def test_microbatches_of_other_placements_are_added(
    twins: Twins, scaler: str, placements: str, bad: int | None
) -> None:
    good = [number for number in range(len(placements)) if number != bad]
    grads = [batch(0, number, rank).sum(0) for number in good for rank in range(twins.world_size)]
    expected = -torch.stack(grads).sum(0) / len(good)
    by_letter: dict[str, Placement] = {"P": Partial(), "R": Replicate()}
    how = {"placements": [by_letter[letter] for letter in placements], "bad": bad}
    for actual in twins.values(with_placements, scaler=scaler, **how):
        assert_close({"param": actual}, {"param": expected})


def failing(scene: Scene, *, layout: str, unsynced: Sequence[int], amid: bool) -> Any:
    """Return the full parameters after a step whose second microbatch has raised.

    Args:
        layout: one of `LAYOUTS`.
        unsynced: microbatches that run in `no_sync`.
        amid: raise before the last unit's backward, the second of the microbatch, instead of after one.
    """
    device, rank = scene.rank.device, scene.rank.rank
    sharded, optimizer, its_scaler = _prepared(scene, layout, init_scale=SCALE)

    def run(number: int) -> None:
        context = sharded.no_sync() if number in unsynced else contextlib.nullcontext()
        with context, its_scaler.microbatch(optimizer):
            is_amid = amid and number == 1
            if is_amid:
                its_scaler.scale(sharded(batch(1, 0, rank).to(device)).sum()).backward()
            hook = (
                sharded[0].register_forward_hook(raise_in_backward) if is_amid else contextlib.nullcontext()
            )
            with hook:
                loss = sharded(batch(0, number, rank).to(device)).square().mean() / 3
            its_scaler.scale(loss).backward()
            if number == 1:
                raise KeyError("after the backward")

    for number in range(4):
        tried(lambda number=number: run(number))
    its_scaler.step(optimizer)
    return _parameters(scene, layout, sharded)


@clause("distributed.fsdp.sharded_grad_scaler.microbatch.no_sync")
@pytest.mark.parametrize("amid", [False, True], ids=["after the backward", "amid the backward"])
@pytest.mark.parametrize("unsynced", [(), (0,), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("layout", SHARDED)
def test_failed_microbatch_leaves_others(
    twins_of: TwinsOf, device: str, layout: str, unsynced: tuple[int, ...], amid: bool
) -> None:
    """The second of four microbatches fails. The others are averaged."""
    model = build_model()
    for number in (0, 2, 3):
        for rank in range(2):
            (model(batch(0, number, rank)).square().mean() / 6).backward()
    torch.optim.SGD(model.parameters(), lr=LEARNING_RATE).step()
    expected = {name: param.detach() for name, param in model.named_parameters()}
    for parameters in twins_of(2, device).values(failing, layout=layout, unsynced=unsynced, amid=amid):
        assert_close(parameters, expected)


@clause("distributed.fsdp.sharded_grad_scaler.microbatch.sharded")
@pytest.mark.parametrize("layout", ["fully_shard", "original", "replicated"])
def test_rank_with_fewer_batches_keeps_scale_of_others(twins_of: TwinsOf, device: str, layout: str) -> None:
    """The rank skips the steps for which it has no batch. The scale grows, and falls for the other rank's inf."""
    plans = [[ranks] for ranks in (_GOOD, (SKIP, None), (SKIP, None), (SKIP, BAD), (SKIP, None))]
    reports = twins_of(2, device).values(
        accumulate,
        layout=layout, unsynced=(), how="step", plans=plans, scaler=SCALER, growth_interval=2,
    )  # fmt: skip
    expected = [SCALE, 2 * SCALE, 2 * SCALE, SCALE, SCALE]
    assert [[scale for _, scale, _ in steps] for _, steps in reports] == [expected] * 2
    parameters, _ = expected_of(plans)
    for values, _ in reports:
        assert_close(values, parameters)


class OneElement(nn.Module):
    """Module with one trained element, which only one rank has."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def cleared_between_microbatches(
    scene: Scene, *, scaler: str, factors: Sequence[float], cleared_before: int, how: str
) -> Any:
    """Run microbatches of a module with one element, and a step.

    Args:
        factors: gradient of each microbatch.
        cleared_before: index of the microbatch before which the gradients are cleared.
        how: the method that steps.

    Returns:
        The elements of this rank, whether the step was taken, the scale, and the indices of skipped microbatches.
    """
    device = scene.rank.device
    sharded = scene.wrap(OneElement().to(device), use_orig_params=True)
    optimizer = SGD(sharded.parameters(), lr=LEARNING_RATE)
    its_scaler = scene.library.find(scaler)(device.type, init_scale=SCALE)
    for number, factor in enumerate(factors):
        if number == cleared_before:
            optimizer.zero_grad()
        with its_scaler.microbatch(optimizer):
            its_scaler.scale(sharded(torch.full((1,), factor, device=device)).sum()).backward()
    if how == "fused_step":
        its_scaler.fused_step(optimizer, update=False)
    else:
        its_scaler.step(optimizer)
    its_scaler.update()
    elements = [element for param in sharded.parameters() for element in param.tolist()]
    skipped = [entry.position for entry in its_scaler.skipped_microbatches(optimizer)]
    return elements, its_scaler.step_was_taken(optimizer), its_scaler.get_scale(), skipped


@clause("distributed.fsdp.sharded_grad_scaler.microbatch.cleared")
@pytest.mark.world_sizes(fewest=2)
@pytest.mark.parametrize(
    ("last", "average", "scale", "skipped"),
    [(4.0, 6.0, SCALE, []), (math.inf, 4.0, SCALE / 2, [1])],
    ids=["good", "bad"],
)
@pytest.mark.parametrize("how", ["step", "fused_step"])
@EACH_SCALER
def test_ranks_without_elements_begin_new_sum(
    twins: Twins, *, scaler: str, how: str, last: float, average: float, scale: float, skipped: list[int]
) -> None:
    """The sum that is cleared has a bad microbatch. The `last` microbatch of the next sum may be bad too."""
    outcomes = twins.values(
        cleared_between_microbatches,
        scaler=scaler, factors=[1.0, math.inf, 2.0, last], cleared_before=2, how=how,
    )  # fmt: skip
    assert [element for elements, *_ in outcomes for element in elements] == [1 - LEARNING_RATE * average]
    assert [outcome for _, *outcome in outcomes] == [[True, scale, skipped]] * len(outcomes)


def unsynchronised_replicas(scene: Scene, *, is_inside: bool) -> Any:
    """Return the error of a microbatch in `no_sync` of DistributedDataParallel, or around it, and the gradients left.

    Args:
        is_inside: whether `no_sync` is inside of the region.
    """
    replicated, optimizer, its_scaler = _prepared(scene, "replicated", init_scale=1.0)

    def run(*contexts: Callable[[], Any]) -> None:
        with contextlib.ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context())
            its_scaler.scale(replicated(batch(0, 0, 0).to(scene.rank.device)).sum()).backward()

    microbatch = functools.partial(its_scaler.microbatch, optimizer)
    run(microbatch)
    before = [param.grad.clone() for param in replicated.parameters()]
    contexts = (microbatch, replicated.no_sync) if is_inside else (replicated.no_sync, microbatch)
    error = tried(lambda: run(*contexts))
    after = [param.grad for param in replicated.parameters()]
    return error, all(map(torch.equal, before, after))


@clause("distributed.fsdp.sharded_grad_scaler.microbatch.refused")
@pytest.mark.parametrize("is_inside", [False, True])
def test_unsynchronised_replicas_raise_and_keep_gradients(
    twins_of: TwinsOf, device: str, is_inside: bool
) -> None:
    for error, keeps in twins_of(2, device).values(unsynchronised_replicas, is_inside=is_inside):
        assert error.startswith("NotImplementedError"), error
        assert "no_sync() of DistributedDataParallel" in error, error
        assert keeps


def sharded_by_torch(scene: Scene, *, api: str) -> Any:
    """Return the error of a microbatch of a model that torch has sharded by `api`."""
    device = scene.rank.device
    sharded: nn.Module
    if api == "fully_shard":
        sharded = fsdp.fully_shard(build_model().to(device), mesh=scene.rank.mesh(scene.rank.world_size))
    else:
        sharded = fsdp.FullyShardedDataParallel(build_model().to(device), device_id=device)
    optimizer = SGD(sharded.parameters(), lr=LEARNING_RATE)
    its_scaler = scene.library.find(SCALER)(device.type)
    return tried(its_scaler.microbatch(optimizer).__enter__)


@clause("distributed.fsdp.sharded_grad_scaler.microbatch.refused")
@pytest.mark.parametrize("api", ["FullyShardedDataParallel", "fully_shard"])
def test_model_sharded_by_torch_raises(cpu_twins: Twins, api: str) -> None:
    for error in cpu_twins.values(sharded_by_torch, api=api):
        assert error.startswith("NotImplementedError"), error
        assert "impl.distributed.fsdp" in error, error


def skipped_alone(scene: Scene) -> Any:
    """Return the error of `skip()` of a GradScaler with DistributedDataParallel."""
    _, optimizer, its_scaler = _prepared(scene, "replicated", "amp.GradScaler")
    with its_scaler.microbatch(optimizer) as microbatch:
        return tried(microbatch.skip)


@clause("distributed.fsdp.sharded_grad_scaler.microbatch.refused")
def test_skip_that_replicas_do_not_know_raises(twins_of: TwinsOf, device: str) -> None:
    for error in twins_of(2, device).values(skipped_alone):
        assert error.startswith("RuntimeError"), error
        assert "ShardedGradScaler" in error, error


def refused(scene: Scene, *, setting: str) -> Any:
    """Return the error of a microbatch that runs with a setting that it does not support."""
    device = scene.rank.device
    sharded = _sharded(scene, "hybrid" if setting == "set_requires_all_reduce" else "fully_shard")
    params = [*sharded.parameters()]
    optimizer = SGD(params[:1] if setting == "parameters" else params, lr=LEARNING_RATE)
    its_scaler = scene.library.find("amp.GradScaler")(device.type)

    def run() -> None:
        with its_scaler.microbatch(optimizer):
            its_scaler.scale(sharded(batch(0, 0, scene.rank.rank).to(device)).sum()).backward()

    if setting == "set_requires_all_reduce":
        sharded.set_requires_all_reduce(False)
    elif setting == "set_manual_backward_finalization":
        sharded.set_manual_backward_finalization(True)
        its_scaler.scale(sharded(batch(0, 0, scene.rank.rank).to(device)).sum()).backward()
    return tried(run)


@clause("distributed.fsdp.sharded_grad_scaler.microbatch.refused")
@pytest.mark.parametrize(
    "setting", ["set_requires_all_reduce", "set_manual_backward_finalization", "parameters"]
)
@pytest.mark.world_sizes(fewest=2)
def test_unsupported_setting_raises_on_all_ranks(twins: Twins, setting: str) -> None:
    expected = "all trained parameters" if setting == "parameters" else setting
    for error in twins.values(refused, setting=setting):
        assert error.startswith("NotImplementedError"), error
        assert expected in error, error
