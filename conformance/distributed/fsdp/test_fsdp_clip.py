"""clip_grad_norm_: the norm over the shards of all ranks, and the clipped gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.distributed.fsdp.scenes.fsdp_training import Setup
from conformance.distributed.fsdp.scenes.rank_judging import share_of_examples, unsharded_gradients
from conformance.distributed.fsdp.scenes.scene import SIMPLE, Scene, tried
from conformance.distributed.fsdp.scenes.twins import (
    FLAT,
    STRATEGIES,
    Twins,
    TwinsOf,
    both_kinds,
    each_strategy,
    leaf_by_leaf,
)
from conformance.judge.clauses import clause
from conformance.judge.tolerances import ONE_STEP, Tolerance


def joint_norm(gradients: dict[str, torch.Tensor], norm_type: Any) -> torch.Tensor:
    flat = torch.cat([grad.reshape(-1) for grad in gradients.values()])
    return torch.linalg.vector_norm(flat, float(norm_type))


def assert_close(expected: torch.Tensor, actual: torch.Tensor, label: str) -> None:
    assert (excess := ONE_STEP.excess(expected, actual)) is None, f"{label}: {excess}"


def assert_clipped(values: list[Any], setup: Setup, max_norm: float, norm_type: Any) -> None:
    for rank, value in enumerate(values):
        gradients = unsharded_gradients(setup, len(values), rank)
        norm = joint_norm(gradients, norm_type)
        assert_close(norm, value["norm"].values, f"the norm on rank {rank}")
        for name, grad in gradients.items():
            expected = grad * min(1.0, max_norm / (float(norm) + 1e-6))
            assert_close(expected, value["whole"][name].values, f"{name} on rank {rank}")


def clip(
    scene: Scene, *, max_norm: Any, norm_type: Any = 2.0, backwards: int = 1, **more: Any
) -> dict[str, Any]:
    """Run backwards and clip. Return the norm, this rank's gradients after clipping, and the full gradients."""
    for number in range(backwards):
        scene.backward(number)
    norm = scene.model.clip_grad_norm_(max_norm, norm_type, **more)
    return {"norm": norm, "gradients": scene.gradients(), "whole": scene.whole_gradients()}


@clause("distributed.fsdp.fully_sharded_data_parallel.clip_grad_norm_.as_torch")
@each_strategy
@share_of_examples(0.5)
@given(
    wrap=st.sampled_from(["root", "leaves"]),
    use_orig_params=st.booleans(),
    arguments=st.fixed_dictionaries(
        {
            "max_norm": st.sampled_from([0.01, 0.5, 100.0, 0.0, 1]),
            "norm_type": st.sampled_from([2.0, 1.0, 3, 0.5, math.inf, "inf"]),
        }
    ),
)
def test_clips_as_torch_does(
    twins: Twins, strategy: str, wrap: str, use_orig_params: bool, arguments: dict[str, Any]
) -> None:
    setup = Setup(strategy, wrap=wrap, arguments={"use_orig_params": use_orig_params})
    twins.agree(clip, setup, **arguments)


@clause("distributed.fsdp.fully_sharded_data_parallel.clip_grad_norm_.joint_norm")
@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, math.inf, "inf"])
@each_strategy
def test_norm_equals_norm_of_unsharded_gradients(twins: Twins, strategy: str, norm_type: Any) -> None:
    setup = leaf_by_leaf(strategy)
    values = twins.values(clip, setup, max_norm=0.25, norm_type=norm_type)
    assert_clipped(values, setup, 0.25, norm_type)


@clause("distributed.fsdp.fully_sharded_data_parallel.clip_grad_norm_.joint_norm")
@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
def test_norm_over_replicas_counts_each_element_once(twins_of: TwinsOf, strategy: str) -> None:
    setup = Setup(strategy, ranks="groups", shards=2, wrap="leaves")
    outcomes = twins_of(4).agree(clip, setup, max_norm=0.25)
    assert_clipped([outcome.value for outcome in outcomes], setup, 0.25, 2.0)


def clip_with_a_unit_that_is_not_sharded(scene: Scene, *, norm_type: float) -> dict[str, Any]:
    scene.plain.head = scene.wrap(scene.plain.head, strategy="NO_SHARD")
    scene.model = scene.wrap(scene.plain)
    return clip(scene, max_norm=0.25, norm_type=norm_type)


@clause("distributed.fsdp.fully_sharded_data_parallel.clip_grad_norm_.joint_norm")
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_sharded_gradients_and_others_have_one_norm(cpu_twins: Twins, norm_type: float) -> None:
    values = cpu_twins.values(clip_with_a_unit_that_is_not_sharded, FLAT, norm_type=norm_type)
    assert_clipped(values, FLAT, 0.25, norm_type)


def clip_tiny(scene: Scene) -> dict[str, Any]:
    """Clip gradients whose norm is below the 1e-6 that is added to it. Return the norm and the changed gradients."""
    scene.backward()
    gradients = {name: grad for name, grad in scene.gradients().items() if grad is not None}
    for grad in gradients.values():
        grad.mul_(2.0**-30)
    before = {name: grad.clone() for name, grad in gradients.items()}
    norm = scene.model.clip_grad_norm_(0.25)
    changed = [name for name, grad in gradients.items() if not torch.equal(grad, before[name])]
    return {"norm": norm / 2.0**-30, "changed": changed}


@clause("distributed.fsdp.fully_sharded_data_parallel.clip_grad_norm_.as_torch")
@each_strategy
def test_tiny_gradients_stay_unchanged(twins: Twins, strategy: str) -> None:
    for outcome in twins.agree(clip_tiny, leaf_by_leaf(strategy)):
        assert 0 < outcome.value["norm"].values < 2.0**30 * 1e-7
        assert outcome.value["changed"] == []


def clip_nonfinite(scene: Scene, *, value: float) -> dict[str, Any]:
    """Clip after rank 0 has set one gradient element to `value`."""
    scene.backward()
    grad = next(parameter.grad for parameter in scene.model.parameters() if parameter.grad is not None)
    if scene.rank.rank == 0:
        grad.view(-1)[0] = value
    return {"norm": scene.model.clip_grad_norm_(1.0)}


@clause("distributed.fsdp.fully_sharded_data_parallel.clip_grad_norm_.nonfinite")
@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("strategy", STRATEGIES[:2])
def test_nonfinite_gradient_on_one_rank_reaches_all_norms(twins: Twins, strategy: str, value: float) -> None:
    outcomes = twins.agree(clip_nonfinite, Setup(strategy), value=value)
    assert not any(outcome.value["norm"].values.isfinite() for outcome in outcomes)


@clause("distributed.fsdp.fully_sharded_data_parallel.clip_grad_norm_.without_gradients")
@each_strategy
def test_clipping_without_gradients_warns(twins: Twins, strategy: str) -> None:
    outcomes = twins.agree(clip, Setup(strategy), max_norm=1.0, backwards=0)
    assert all(outcome.value["norm"].values == 0 for outcome in outcomes)
    if not twins.is_alone and strategy != "NO_SHARD":
        assert any("with no gradients" in text for _, text in outcomes[0].warned)


def clip_an_inner_unit(scene: Scene) -> Any:
    scene.backward()
    return tried(lambda: scene.units[1].clip_grad_norm_(1.0))


def clip_before_any_forward(scene: Scene) -> Any:
    """Clip before the first forward, so that the call must initialise the root itself."""
    return {"norm": scene.model.clip_grad_norm_(1.0), "root": scene.model.check_is_root()}


def clip_in_backward(scene: Scene) -> Any:
    """Return the errors of clipping in a hook on the gradient of the input."""
    attempts: list[Any] = []
    batch = scene.batch()
    batch.x.register_hook(lambda _: attempts.append(tried(lambda: scene.model.clip_grad_norm_(1.0))))
    output: torch.Tensor = scene.model(batch.x, ids=batch.ids)
    output.sum().backward()
    return attempts


@clause("distributed.fsdp.fully_sharded_data_parallel.clip_grad_norm_.where")
@pytest.mark.parametrize("program", [clip_an_inner_unit, clip_before_any_forward, clip_in_backward])
def test_root_clips_only_between_steps(twins: Twins, program: Any) -> None:
    twins.agree(program, FLAT)


@clause("distributed.fsdp.fully_sharded_data_parallel.clip_grad_norm_.low_precision")
@both_kinds
def test_kept_low_precision_gradients_are_clipped(twins: Twins, use_orig_params: bool) -> None:
    precision = {"param_dtype": torch.bfloat16, "keep_low_precision_grads": True}
    setup = leaf_by_leaf(use_orig_params=use_orig_params, mixed_precision=precision)
    tolerance = Tolerance(
        4, "the gradients, their norm, its quotient and product each rounded", torch.bfloat16
    )
    for outcome in twins.agree(clip, setup, tolerance, tree=SIMPLE, max_norm=0.25):
        norm = outcome.value["norm"]
        assert norm.dtype is torch.bfloat16
        assert norm.values > 0.25
        gradients = [grad for grad in outcome.value["gradients"].values() if grad is not None]
        assert {grad.dtype for grad in gradients} == {torch.bfloat16}
