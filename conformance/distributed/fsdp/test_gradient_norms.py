"""`gradient_norms` and `update_ratios` of sharded parameters, compared with those of the unsharded model."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.optim import SGD, Optimizer, RMSprop

from conformance.distributed.fsdp.scenes.scaler_layouts import (
    named_params,
    on_meshes,
    plain_model,
    scaler_with_scale,
)
from conformance.distributed.fsdp.scenes.scaler_programs import EACH_SCALER, SCALER
from conformance.distributed.fsdp.scenes.scene import Scene, tried
from conformance.distributed.fsdp.scenes.twins import Twins, TwinsOf
from conformance.judge.clauses import clause


def unsharded(layout: str) -> list[torch.Tensor]:
    """Return the gradients of the second step as one tensor for each parameter of the layout."""
    if layout == "meshes":
        return [3.0 * value.value for value in on_meshes(0)]
    if layout == "disjoint meshes":
        return [torch.full((6,), 3.0)] * 2
    grads = [3.0 * param.detach().flatten() for param in plain_model().parameters()]
    return [torch.cat(grads)] if layout == "flat" else grads


SCALE = 8.0
OPTIMIZERS: dict[str, type[Optimizer]] = {"sgd": SGD, "rmsprop": RMSprop}


def joint_norm_and_norms(
    scene: Scene, *, scaler: str, layout: str, kind: str, norm_type: float, enabled: bool
) -> Any:
    """Return the joint norm, and the norm of each parameter that `gradient_norms` returns after two fused steps.

    Args:
        kind: an optimizer of all parameters, or several, joined by "+", which share the parameters.
    """
    named, kinds = named_params(scene, layout), kind.split("+")
    optimizers = [OPTIMIZERS[name](named[i :: len(kinds)], lr=0.0) for i, name in enumerate(kinds)]
    its_scaler = scaler_with_scale(scene, scaler, init_scale=SCALE, enabled=enabled)
    joint: Any = None
    for factor in (1.0, 3.0):  # the second step has cached lists
        for _, param in named:
            param.grad = param.detach() * (factor * SCALE if enabled else factor)
        joint = its_scaler.fused_step(
            optimizers if len(kinds) > 1 else optimizers[0], norm_type=norm_type, keep_norms=True
        )
    norms = {name: norm for own in map(its_scaler.gradient_norms, optimizers) for name, norm in own.items()}
    return joint.item(), {name: norms[name].item() for name, _ in named}


@clause("distributed.fsdp.sharded_grad_scaler.fused_step.gradient_norms")
@EACH_SCALER
@pytest.mark.parametrize(
    ("layout", "kind", "norm_type"),
    [
        ("flat", "sgd", 2.0),
        ("original", "sgd", 2.0),
        ("original", "rmsprop", 1.0),
        ("hybrid", "sgd", math.inf),
        ("original parallel", "sgd", 2.0),
        ("dtensor", "sgd", 2.0),
        ("dtensor", "rmsprop", 2.0),
        ("hybrid dtensor", "sgd", 3.0),
        ("meshes", "sgd", 2.0),
        ("meshes", "sgd", math.inf),
        ("disjoint meshes", "sgd", 2.0),
        ("original", "sgd+rmsprop", 2.0),
        ("hybrid", "rmsprop+rmsprop", 3.0),
        ("dtensor", "sgd+sgd", math.inf),
        ("meshes", "sgd+rmsprop", 2.0),
        ("disjoint meshes", "sgd+sgd", 2.0),
    ],
)
def test_norms_on_every_rank_are_those_of_unsharded_model(
    twins_of: TwinsOf, device: str, layout: str, scaler: str, kind: str, norm_type: float
) -> None:
    arguments: dict[str, Any] = {"layout": layout, "kind": kind, "norm_type": norm_type, "enabled": True}
    reports = twins_of(4, device).values(joint_norm_and_norms, scaler=scaler, **arguments)
    grads = unsharded(layout)
    expected = [torch.linalg.vector_norm(grad.double(), norm_type).item() for grad in grads]
    joint = torch.linalg.vector_norm(torch.tensor(expected), norm_type).item()
    for rank, (own_joint, norms) in enumerate(reports):
        assert [*norms.values()] == pytest.approx(expected, rel=1e-5), f"on rank {rank}: {norms}"
        assert own_joint == pytest.approx(joint, rel=1e-5), f"on rank {rank}"
        assert norms == reports[0][1], f"on rank {rank}"


@clause("distributed.fsdp.sharded_grad_scaler.fused_step.gradient_norms")
@EACH_SCALER
def test_disabled_scaler_returns_norms_of_unsharded_model(
    twins_of: TwinsOf, device: str, scaler: str
) -> None:
    arguments: dict[str, Any] = {"layout": "dtensor", "kind": "sgd", "norm_type": 2.0, "enabled": False}
    expected = [grad.double().norm().item() for grad in unsharded("dtensor")]
    for _, norms in twins_of(2, device).values(joint_norm_and_norms, scaler=scaler, **arguments):
        assert [*norms.values()] == pytest.approx(expected, rel=1e-5)


def ratios(scene: Scene, *, scaler: str, layout: str, kind: str) -> dict[str, float]:
    """Return `update_ratios` after the second of two fused steps."""
    named = named_params(scene, layout)
    optimizer = OPTIMIZERS[kind](named, lr=0.0)
    its_scaler = scaler_with_scale(scene, scaler, init_scale=SCALE)
    for lr in (0.0, 0.25):  # the second step has cached lists
        for _, param in named:
            param.grad = param.detach() * param.detach() * SCALE
        optimizer.param_groups[0]["lr"] = lr
        its_scaler.fused_step(optimizer, keep_update_norms=True)
    return {name: ratio.item() for name, ratio in its_scaler.update_ratios(optimizer).items()}


def unsharded_ratios(layout: str, kind: str) -> list[float]:
    weights = [(grad / 3.0).double() for grad in unsharded(layout)]
    params = [weight.clone() for weight in weights]
    optimizer = OPTIMIZERS[kind](params, lr=0.0)
    for lr in (0.0, 0.25):
        for param, weight in zip(params, weights, strict=True):
            param.grad = weight * weight
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
    pairs = zip(params, weights, strict=True)
    return [((param - weight).norm() / weight.norm()).item() for param, weight in pairs]


@clause("distributed.fsdp.sharded_grad_scaler.fused_step.update_ratios")
@EACH_SCALER
@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        ("flat", "sgd"),
        ("hybrid", "rmsprop"),
        ("original parallel", "sgd"),
        ("dtensor", "rmsprop"),
        ("hybrid dtensor", "sgd"),
        ("meshes", "sgd"),
        ("disjoint meshes", "sgd"),
    ],
)
def test_ratios_on_every_rank_are_those_of_unsharded_model(
    twins_of: TwinsOf, device: str, layout: str, kind: str, scaler: str
) -> None:
    reports = twins_of(4, device).values(ratios, scaler=scaler, layout=layout, kind=kind)
    for rank, by_name in enumerate(reports):
        expected = pytest.approx(unsharded_ratios(layout, kind), rel=1e-5)
        assert [*by_name.values()] == expected, f"on rank {rank}: {by_name}"


def ratios_of_rank_without_gradient(scene: Scene, *, scaler: str) -> list[float]:
    """Return ratios by parameter and module, and the expected ones, if a parameter has no gradient on rank 0."""
    named = named_params(scene, "dtensor")[:2]
    optimizer, its_scaler = SGD(named, lr=0.25), scaler_with_scale(scene, scaler, init_scale=SCALE)
    for _, param in named:
        param.grad = param.detach() * SCALE
    name, param = named[0]
    if scene.rank.rank == 0:
        param.grad = None
    weights = [param.detach().full_tensor().clone() for _, param in named]
    its_scaler.fused_step(optimizer, keep_update_norms=True)
    changes = [
        param.detach().full_tensor() - weight for (_, param), weight in zip(named, weights, strict=True)
    ]
    by_module = its_scaler.update_ratios(optimizer, per="module")
    expected = [(changes[0].norm() / weights[0].norm()), _norm(changes) / _norm(weights)]
    actual = [its_scaler.update_ratios(optimizer)[name], *by_module.values()]
    return [ratio.item() for ratio in (*actual, *expected)]


def _norm(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors]).norm()


@clause("distributed.fsdp.sharded_grad_scaler.fused_step.update_ratios")
@EACH_SCALER
@pytest.mark.world_sizes(fewest=2)
def test_ratios_count_weights_of_ranks_without_gradient(cpu_twins: Twins, scaler: str) -> None:
    for numbers in cpu_twins.values(ratios_of_rank_without_gradient, scaler=scaler):
        assert numbers[:2] == pytest.approx(numbers[2:], rel=1e-5)
        assert min(numbers) > 0, "no weight was updated"


def one_fails(scene: Scene, *, scaler: str) -> tuple[Any, Any]:
    """Return the error of a fused step that keeps norms and fails on rank 0, and the result of the next one."""
    named = named_params(scene, "dtensor")
    optimizer, its_scaler = SGD(named, lr=0.0), scaler_with_scale(scene, scaler)
    results: list[Any] = []
    for max_norm in (math.nan if scene.rank.rank == 0 else math.inf, math.inf):
        for _, param in named:
            param.grad = param.detach().clone()
        results.append(tried(lambda max_norm=max_norm: _step(its_scaler, optimizer, max_norm)))
    return tuple(results)


def _step(scaler: Any, optimizer: Optimizer, max_norm: float) -> int:
    scaler.fused_step(optimizer, max_norm, keep_norms=True)
    return len(scaler.gradient_norms(optimizer))


@clause("distributed.fsdp.sharded_grad_scaler.fused_step.failure_is_reported")
@pytest.mark.world_sizes(fewest=2)
def test_failure_beside_kept_norms_is_reported(cpu_twins: Twins) -> None:
    """The failing rank takes part in the exchange of all norms, so its peers raise too, and the next step works."""
    own, *others = cpu_twins.values(one_fails, scaler=SCALER)
    assert "max_norm is nan" in own[0]
    assert all("another rank" in other[0] for other in others), others
    assert [later for _, later in (own, *others)] == [4] * cpu_twins.world_size
