"""`fused_step` with sharded parameters, compared with torch's four calls on the unsharded model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.optim import SGD, AdamW, Optimizer, RMSprop

from conformance.distributed.fsdp.scenes.fully_shard_training import full_parameters
from conformance.distributed.fsdp.scenes.rank_judging import assert_all_close
from conformance.distributed.fsdp.scenes.scaler_layouts import on_meshes, plain_model, scaler_with_scale
from conformance.distributed.fsdp.scenes.scaler_programs import EACH_SCALER, SCALER
from conformance.distributed.fsdp.scenes.scene import Scene
from conformance.distributed.fsdp.scenes.twins import FULL_PROFILE, Twins, TwinsOf, values_of
from conformance.judge.clauses import clause
from conformance.judge.library import Library
from conformance.judge.outcome import observe
from conformance.judge.sandbox import seeding
from conformance.judge.tolerances import TRAINED
from conformance.strategies.dtensor_gradients import PlacedGradient, full_tensor
from conformance.strategies.fused_steps import TORCH_HAS_NO_FUSED_STEP
from conformance.strategies.scaling import judge_added_method


def judge_fused_step(
    twins: Twins, program: Any, judged: Callable[[list[Any]], None], scaler: str = SCALER, **arguments: Any
) -> None:
    """Run the program on the ranks of each library. `judged` asserts the expected results of all ranks."""

    def probe(library: Library) -> list[Any]:
        return values_of(twins.of(library, program, scaler=scaler, **arguments))

    def is_right(results: list[Any]) -> bool:
        judged(results)
        return True

    judge_added_method(twins, "fused_step", probe, is_right, scaler)


SIZE = 4  # rows of a rank's batch
MAX_NORM = 0.25
OPTIONS = {"init_scale": 8.0, "growth_interval": 2}
# The eps is as large as the gradients. With a smaller eps, rounding errors near zero would decide the update.
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": lambda parameters: AdamW(parameters, lr=0.125, eps=1.0),
    "nesterov": lambda parameters: SGD(parameters, lr=0.125, momentum=0.5, nesterov=True),
    "rmsprop": lambda parameters: RMSprop(parameters, lr=0.125, eps=1.0),
}


def inputs_of(number: int, ranks: int) -> torch.Tensor:
    """Return the inputs of all ranks in one iteration, concatenated."""
    return torch.randn(SIZE * ranks, 5, generator=seeding.generator(number))


def unsharded(
    grad_outcomes: Sequence[int | None],
    ranks: int,
    kind: str = "adamw",
    norm_type: float = 2.0,
    enabled: bool = True,
) -> list[Any]:
    """Train with torch's four calls. Return norm, scale and parameters after each iteration.

    In an iteration whose outcome is not None, one gradient element is inf.
    """
    model = plain_model()
    optimizer = OPTIMIZERS[kind](model.parameters())
    scaler = torch.amp.GradScaler("cpu", enabled=enabled, **OPTIONS)
    results: list[Any] = []
    for number, grad_outcome in enumerate(grad_outcomes):
        optimizer.zero_grad()
        scaler.scale(model(inputs_of(number, ranks)).square().mean()).backward()
        if grad_outcome is not None:
            _spoil(model)
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM, norm_type)
        scaler.step(optimizer)
        scaler.update()
        results.append((norm, scaler.get_scale(), [p.detach().clone() for p in model.parameters()]))
    return results


def sharded(
    scene: Scene,
    *,
    scaler: str,
    sharding: str,
    grad_outcomes: tuple[int | None, ...],
    kind: str = "adamw",
    norm_type: float = 2.0,
    enabled: bool = True,
) -> list[Any]:
    """Train a sharded model with `fused_step`. An outcome is the rank whose gradients contain inf, or None.

    Args:
        sharding: "dtensor", "flat", "original" or "offloaded". Offloaded parameters are on the host, and their group
            has no backend for the host.
    """
    model = _in_parts(scene, sharding)
    options: dict[str, Any] = {**OPTIONS, "enabled": enabled}
    if sharding == "offloaded" and scaler == SCALER:
        options["process_group"] = scene.rank.group_of_device()
    its_scaler = scene.library.find(scaler)(scene.rank.device.type, **options)
    optimizer = OPTIMIZERS[kind](model.parameters())
    results: list[Any] = []
    for number, grad_outcome in enumerate(grad_outcomes):
        optimizer.zero_grad()
        own = inputs_of(number, scene.rank.world_size).split(SIZE)[scene.rank.rank]
        its_scaler.scale(model(own).square().mean()).backward()
        if grad_outcome == scene.rank.rank:
            _spoil(model)
        norm = its_scaler.fused_step(optimizer, MAX_NORM, norm_type).cpu()
        results.append((norm, its_scaler.get_scale(), _unsharded(scene, model, sharding)))
    return results


def _in_parts(scene: Scene, sharding: str) -> nn.Module:
    if sharding == "dtensor":
        return fully_shard(plain_model(), mesh=scene.rank.mesh(scene.rank.world_size))
    if sharding == "offloaded":
        more = {
            "process_group": scene.rank.group_of_device(),
            "cpu_offload": scene.api.CPUOffload(offload_params=True),
        }
        return scene.wrap(plain_model(), use_orig_params=True, **more)
    return scene.wrap(plain_model(), use_orig_params=sharding == "original")


def _unsharded(scene: Scene, model: nn.Module, sharding: str) -> list[torch.Tensor]:
    if sharding == "dtensor":
        return [*full_parameters(model).values()]
    return [parameter.cpu() for parameter in scene.whole_parameters(model).values()]


def _spoil(model: nn.Module) -> None:
    for parameter in model.parameters():
        grad: Any = parameter.grad
        own = getattr(grad, "_local_tensor", grad)
        if own is not None and own.numel():
            own.view(-1)[-1] = math.inf
            return


def assert_close_norm(label: str, expected: torch.Tensor, actual: Any) -> None:
    assert (excess := TRAINED.excess(expected, actual.values.to(expected.dtype))) is None, (
        f"{label}the norm: {excess}"
    )


def judge_training(
    twins: Twins, scaler: str, sharding: str, *, grad_outcomes: Sequence[int | None], **how: Any
) -> None:
    """Judge the norm, the decision and the scale of each step by the unsharded model's."""
    expected = unsharded(grad_outcomes, twins.world_size, **how)

    def judged(results: list[Any]) -> None:
        for rank, iterations in enumerate(results):
            for grad_outcome, expected_step, actual_step in zip(
                grad_outcomes, expected, iterations, strict=True
            ):
                label = f"on rank {rank}, inf on {grad_outcome}: "
                (norm, scale, whole), (own_norm, own_scale, own_whole) = expected_step, actual_step
                assert own_scale == scale, label
                if grad_outcome is None:
                    assert_close_norm(label, norm, own_norm)
                assert_all_close(f"{label}parameters", whole, own_whole, TRAINED)

    judge_fused_step(twins, sharded, judged, scaler, sharding=sharding, grad_outcomes=grad_outcomes, **how)


@clause("distributed.fsdp.sharded_grad_scaler.fused_step.as_unsharded")
@TORCH_HAS_NO_FUSED_STEP
@pytest.mark.parametrize("kind", list(OPTIMIZERS))
@EACH_SCALER
@pytest.mark.parametrize(
    ("sharding", "some_ranks"),
    [
        ("flat", 2),
        ("original", 2),
        ("dtensor", 2),
        *(pytest.param(sharding, n, marks=FULL_PROFILE) for sharding in ("flat", "original") for n in (1, 3)),
    ],
)
def test_fused_step_matches_unsharded_with_inf_on_each_rank(
    twins_of: TwinsOf, sharding: str, some_ranks: int, scaler: str, kind: str
) -> None:
    how = {"kind": kind, "norm_type": 1.0 if kind == "nesterov" else 2.0}
    grad_outcomes = (None, *range(some_ranks), None)
    judge_training(twins_of(some_ranks), scaler, sharding, grad_outcomes=grad_outcomes, **how)


@clause("distributed.fsdp.sharded_grad_scaler.fused_step.group_of_the_device")
@TORCH_HAS_NO_FUSED_STEP
@pytest.mark.parametrize("enabled", [True, False])
@EACH_SCALER
@pytest.mark.world_sizes(fewest=2)
def test_fused_step_works_over_group_of_device_only(twins: Twins, scaler: str, enabled: bool) -> None:
    judge_training(twins, scaler, "offloaded", grad_outcomes=(None, None), enabled=enabled)


def unsharded_of_meshes(kind: str, grad_outcomes: Sequence[int | None]) -> list[Any]:
    """Do the steps of `over_meshes` with unsharded parameters and torch's four calls."""
    parameters = [nn.Parameter(start.value) for start in on_meshes(0)]
    optimizer = OPTIMIZERS[kind](parameters)
    results: list[Any] = []
    for number, bad in enumerate(grad_outcomes):
        for parameter, grad in zip(parameters, gradients_on_meshes(number, bad), strict=True):
            parameter.grad = grad.value
        norm = nn.utils.clip_grad_norm_(parameters, MAX_NORM)
        if bad is None:
            optimizer.step()
        results.append((norm, [parameter.detach().clone() for parameter in parameters]))
    return results


def gradients_on_meshes(number: int, bad: int | None, scale: float = 1.0) -> list[PlacedGradient]:
    """Return the gradients of an iteration. That of the parameter `bad` has inf in its last element, on some ranks."""
    grads = on_meshes(number + 1, scale)
    if bad is not None:
        grads[bad].value.view(-1)[-1] = math.inf
    return grads


def over_meshes(scene: Scene, *, scaler: str, kind: str, grad_outcomes: tuple[int | None, ...]) -> list[Any]:
    """Step parameters on several meshes. Return norms, and the unsharded parameters or None."""

    def distribute(values: Sequence[PlacedGradient]) -> list[torch.Tensor]:
        return [value.on(scene.rank.mesh(*value.mesh_shape)) for value in values]

    parameters = [nn.Parameter(value) for value in distribute(on_meshes(0))]
    optimizer = OPTIMIZERS[kind](parameters)
    its_scaler = scaler_with_scale(scene, scaler, **OPTIONS)
    results: list[Any] = []
    for number, bad in enumerate(grad_outcomes):
        grads = distribute(gradients_on_meshes(number, bad, its_scaler.get_scale()))
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad
        norm = its_scaler.fused_step(optimizer, MAX_NORM)
        results.append((norm, [full_tensor(parameter.detach().clone()) for parameter in parameters]))
    return results


@clause("distributed.fsdp.sharded_grad_scaler.fused_step.several_meshes")
@TORCH_HAS_NO_FUSED_STEP
@pytest.mark.parametrize("kind", list(OPTIMIZERS))
@EACH_SCALER
def test_fused_step_over_several_meshes_matches_unsharded(twins_of: TwinsOf, scaler: str, kind: str) -> None:
    """Each gradient in turn has inf, which only some ranks hold."""
    grad_outcomes = (None, 0, 1, 2, 3, 4, None)
    expected = unsharded_of_meshes(kind, grad_outcomes)

    def judged(results: list[Any]) -> None:
        for rank, iterations in enumerate(results):
            for bad, (norm, whole), (own_norm, own_whole) in zip(
                grad_outcomes, expected, iterations, strict=True
            ):
                label = f"on rank {rank}, inf in gradient {bad}: "
                if bad is None:
                    assert_close_norm(label, norm, own_norm)
                pairs = [(full, own) for full, own in zip(whole, own_whole, strict=True) if own is not None]
                assert_all_close(f"{label}parameters", *map(list, zip(*pairs, strict=True)), TRAINED)

    judge_fused_step(twins_of(4), over_meshes, judged, scaler, kind=kind, grad_outcomes=grad_outcomes)


# Placements of a parameter and of its gradient, for one parameter each.
OTHER_PLACEMENTS = {
    "replicated": [(Replicate(), Partial()), (Replicate(), Shard(0)), (Replicate(), Replicate())],
    "sharded": [
        (Replicate(), Partial()),
        (Shard(0), Partial()),
        (Shard(0), Replicate()),
        (Shard(0), Shard(0)),
    ],
}


def gradients_of_other_placements(count: int) -> list[torch.Tensor]:
    generator = seeding.generator(0)
    return [torch.randn(7, generator=generator) for _ in range(count)]


def with_other_placements(scene: Scene, *, scaler: str, params: str, joint: bool, keep_norms: bool) -> Any:
    """Step parameters of ones once. Return the norm, the `gradient_norms` if kept, and the full parameters."""
    mesh, ranks = scene.rank.mesh(scene.rank.world_size), scene.rank.world_size
    named: list[tuple[str, Any]] = []
    specs = OTHER_PLACEMENTS[params]
    for number, (value, (placement, of_grad)) in enumerate(
        zip(gradients_of_other_placements(len(specs)), specs, strict=True)
    ):
        param = nn.Parameter(PlacedGradient(torch.ones(7), None, placements=(placement,)).on(mesh))
        # The ranks have different summands.
        share = (scene.rank.rank + 1) * 2 / (ranks * (ranks + 1)) if of_grad.is_partial() else 1.0
        scaled = value * OPTIONS["init_scale"] * share
        param.grad = PlacedGradient(scaled, None, placements=(of_grad,)).on(mesh)
        named.append((str(number), param))
    optimizers = [RMSprop(part, lr=0.125, eps=1.0) for part in ([named[:1], named[1:]] if joint else [named])]
    its_scaler = scaler_with_scale(scene, scaler, **OPTIONS)
    norm = its_scaler.fused_step(optimizers if joint else optimizers[0], MAX_NORM, keep_norms=keep_norms)
    norms = (
        [norm for own in optimizers for norm in its_scaler.gradient_norms(own).values()] if keep_norms else []
    )
    return float(norm), [*map(float, norms)], [full_tensor(param.detach()) for _, param in named]


@clause("distributed.fsdp.sharded_grad_scaler.fused_step.other_placements")
@TORCH_HAS_NO_FUSED_STEP
@pytest.mark.parametrize("keep_norms", [False, True], ids=["", "keep_norms"])
@pytest.mark.parametrize("joint", [False, True], ids=["one optimizer", "two optimizers"])
@pytest.mark.parametrize("params", list(OTHER_PLACEMENTS))
@EACH_SCALER
@pytest.mark.world_sizes(fewest=2)
def test_fused_step_of_other_placements_matches_unsharded(
    twins: Twins, scaler: str, params: str, joint: bool, keep_norms: bool
) -> None:
    values = [nn.Parameter(torch.ones(7)) for _ in OTHER_PLACEMENTS[params]]
    for param, grad in zip(values, gradients_of_other_placements(len(values)), strict=True):
        param.grad = grad
    norms = torch.stack([param.grad.norm() for param in values])
    norm = nn.utils.clip_grad_norm_(values, MAX_NORM)
    RMSprop(values, lr=0.125, eps=1.0).step()

    def judged(results: list[Any]) -> None:
        for rank, (own_norm, own_norms, own_params) in enumerate(results):
            label = f"on rank {rank}: "
            assert own_norm == pytest.approx(norm.item(), rel=1e-5), label
            assert own_norms == pytest.approx(norms.tolist() if keep_norms else [], rel=1e-5), label
            assert_all_close(f"{label}parameters", [*map(torch.detach, values)], own_params, TRAINED)

    how = {"params": params, "joint": joint, "keep_norms": keep_norms}
    judge_fused_step(twins, with_other_placements, judged, scaler, **how)


def one_fails(scene: Scene, *, scaler: str, failure: str, beside: str) -> tuple[Any, Any, list[float]]:
    """Make a fused step fail on rank 0, of SGD and perhaps of an optimizer beside it.

    Return its error, the error of the next step after gradients were cleared, and the parameters between the steps.
    """
    params = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizers: Any = SGD(params, lr=0.125)
    if beside:
        optimizers = [
            SGD(params[:1], lr=0.125),
            {"SGD": SGD, "RMSprop": RMSprop}[beside.rsplit(maxsplit=1)[-1]](params[1:], lr=0.125),
        ]
    its_scaler = scene.library.find(scaler)("cpu", **OPTIONS)
    fails = scene.rank.rank == 0
    if not (fails and failure == "no scale"):
        its_scaler.scale(sum(param.sum() for param in params)).backward()
    if fails and failure == "sparse":
        params[0].grad = params[0].grad.to_sparse()
    if fails and failure == "overlap":
        params[1].grad = torch.ones(1).expand(2)
    if beside.startswith("unscaled"):
        its_scaler.unscale_(optimizers[1])
    max_norm = math.nan if fails and failure == "max_norm" else math.inf
    failed = observe(its_scaler.fused_step, optimizers, max_norm).raised
    after_failure = [value for param in params for value in param.tolist()]
    for param in params:
        param.grad = None
    if beside.startswith("unscaled"):
        its_scaler.update()
    its_scaler.scale(sum(param.sum() for param in params)).backward()
    return failed, observe(its_scaler.fused_step, optimizers).raised, after_failure


@clause("distributed.fsdp.sharded_grad_scaler.fused_step.failure_is_reported")
@TORCH_HAS_NO_FUSED_STEP
@pytest.mark.parametrize(
    ("failure", "why", "beside"),
    [
        ("no scale", "_scale is None", ""),
        ("no scale", "_scale is None", "SGD"),
        ("no scale", "_scale is None", "RMSprop"),
        ("max_norm", "max_norm is nan", ""),
        ("max_norm", "max_norm is nan", "SGD"),
        ("max_norm", "max_norm is nan", "RMSprop"),
        ("max_norm", "max_norm is nan", "unscaled RMSprop"),
        ("sparse", "no fused step of this", ""),
        ("sparse", "no fused step of this", "SGD"),
        ("sparse", "no fused step of this", "RMSprop"),
        ("sparse", "no fused step of this", "unscaled RMSprop"),
        ("overlap", "refers to a single memory location", "RMSprop"),
    ],
)
@pytest.mark.world_sizes(fewest=2)
def test_fused_step_failure_on_one_rank_is_reported(
    cpu_twins: Twins, failure: str, why: str, beside: str
) -> None:
    """The failing rank reports the cause, and its peers report another rank. No rank steps, and all can continue."""

    def judged(results: list[Any]) -> None:
        (own, *reported), later, parameters = zip(*results, strict=True)
        assert why in str(own)
        assert all("another rank" in str(raised) for raised in reported)
        assert [*parameters] == [[1.0] * 4] * cpu_twins.world_size
        assert [*later] == [None] * cpu_twins.world_size

    judge_fused_step(cpu_twins, one_fails, judged, failure=failure, beside=beside)


def sharded_one_fails(scene: Scene, *, scaler: str, is_unscaled: bool) -> tuple[Any, list[Any]]:
    """Make a fused step of sharded RMSprop fail on rank 0. Return its error, and each parameter after it."""
    model = fully_shard(plain_model(), mesh=scene.rank.mesh(scene.rank.world_size))
    optimizer = RMSprop(model.parameters(), lr=0.125)
    its_scaler = scene.library.find(scaler)("cpu", **OPTIONS)
    its_scaler.scale(model(inputs_of(0, 1)).square().mean()).backward()
    if is_unscaled:
        its_scaler.unscale_(optimizer)
    max_norm = math.nan if scene.rank.rank == 0 else math.inf
    raised = observe(its_scaler.fused_step, optimizer, max_norm).raised
    return raised, [*full_parameters(model).values()]


@clause("distributed.fsdp.sharded_grad_scaler.fused_step.failure_is_reported")
@TORCH_HAS_NO_FUSED_STEP
@pytest.mark.parametrize("is_unscaled", [False, True])
@pytest.mark.world_sizes(fewest=2)
def test_failure_of_sharded_step_by_optimizer_is_reported(cpu_twins: Twins, is_unscaled: bool) -> None:
    """RMSprop has no fused update. Its gradients are checked first, and then the ranks combine their norms."""
    expected = [parameter.detach() for parameter in plain_model().parameters()]

    def judged(results: list[Any]) -> None:
        (own, *reported), parameters = zip(*results, strict=True)
        assert "max_norm is nan" in str(own)
        assert all("another rank" in str(raised) for raised in reported)
        for rank, values in enumerate(parameters):
            assert_all_close(f"parameters on rank {rank}", expected, values, TRAINED)

    judge_fused_step(cpu_twins, sharded_one_fails, judged, is_unscaled=is_unscaled)


def no_optimizer(scene: Scene, *, scaler: str) -> list[Any]:
    """Return the error of `fused_step` if all ranks pass a model, and then for the optimizer."""
    parameter = nn.Parameter(torch.ones(4))
    optimizer, its_scaler = SGD([parameter], lr=0.125), scene.library.find(scaler)("cpu", **OPTIONS)
    its_scaler.scale(parameter.sum()).backward()
    return [observe(its_scaler.fused_step, argument).raised for argument in (nn.Linear(1, 1), optimizer)]


@clause("distributed.fsdp.sharded_grad_scaler.fused_step.failure_is_reported")
@TORCH_HAS_NO_FUSED_STEP
def test_fused_step_refuses_object_that_is_no_optimizer(cpu_twins: Twins) -> None:
    """The error is raised before any collective, so the next call matches the peers' collectives."""

    def judged(results: list[Any]) -> None:
        for refused, then in results:
            assert "expected an optimizer, which has param_groups, got Linear" in str(refused)
            assert then is None

    judge_fused_step(cpu_twins, no_optimizer, judged)
