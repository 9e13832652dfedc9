"""Weights that changed and that torch's class ignores, or weights that it cannot compute with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffload, MixedPrecision

from conformance.distributed.fsdp.scenes.fsdp_training import Setup, Step, Training
from conformance.distributed.fsdp.scenes.module_trees import Leaf, ModuleGroup, ModuleTree
from conformance.distributed.fsdp.scenes.rank_judging import (
    assert_like_unsharded,
    holds,
    tolerance_of_policy,
    trains_like_unsharded,
)
from conformance.distributed.fsdp.scenes.scene import Scene
from conformance.distributed.fsdp.scenes.twins import Twins, each, raises
from conformance.judge.clauses import clause


@clause("distributed.fsdp.fsdp_torch_limit_removed.tied_in_low_precision")
@pytest.mark.deviation("fsdp.tied_in_low_precision")
@pytest.mark.parametrize("keeps", [True, False])
def test_low_precision_gradients_are_set_at_both_places_of_tied_parameter(
    cpu_twins: Twins, keeps: bool
) -> None:
    policy = {"param_dtype": torch.bfloat16, "keep_low_precision_grads": keeps}
    setup = Setup("NO_SHARD", arguments={"use_orig_params": True}, mixed_precision=policy)
    steps = (Step(forwards=2, order="in turn" if keeps else "no_sync"),)
    training = Training(ModuleTree(ModuleGroup((Leaf("tied"),))), setup, steps)
    cpu_twins.judge(
        lambda library: cpu_twins.trained(library, training),
        torch_does=raises(RuntimeError, "attempting to assign a gradient with dtype"),
        we_do=lambda outcomes: holds(assert_like_unsharded, outcomes, training, tolerance_of_policy(policy)),
    )


def summoned_gradients(scene: Scene, *, strategy: str, **arguments: Any) -> list[torch.Tensor]:
    """Return the unsharded gradients of a weight and a bias, and their sum after the user has doubled them."""
    model = scene.wrap(nn.Linear(2, 3), strategy=strategy, use_orig_params=True, **arguments)
    model(torch.ones(4, 2, device=scene.rank.device)).sum().backward()
    with scene.fsdp.summon_full_params(model, with_grads=True):
        grads = [param.grad.clone() for param in model.parameters()]
        for param in model.parameters():
            param.grad.mul_(2)
    with scene.fsdp.summon_full_params(model, with_grads=True):
        return [*grads, torch.stack([param.grad.sum() for param in model.parameters()]).sum()]


def _are_summoned(dtype: torch.dtype, device: str) -> Any:
    """Return a check whether each rank has the gradients of a sum over four rows of ones."""
    expected = [torch.full((3, 2), 4.0), torch.full((3,), 4.0), torch.tensor(72.0)]
    return each(
        lambda grads: all(
            torch.equal(grad.values.cpu(), values.to(dtype)) and grad.device.type == device
            for grad, values in zip(grads, expected, strict=True)
        )
    )


@clause("distributed.fsdp.fsdp_torch_limit_removed.summoned_in_low_precision")
@pytest.mark.deviation("fsdp.summoned_in_low_precision")
@pytest.mark.world_sizes(fewest=2)
def test_sharded_gradients_are_summoned_in_low_precision(twins: Twins, device: str) -> None:
    precision = MixedPrecision(param_dtype=torch.bfloat16, keep_low_precision_grads=True)
    twins.deviate(
        summoned_gradients,
        strategy="FULL_SHARD",
        mixed_precision=precision,
        torch_does=raises(RuntimeError, "attempting to assign a gradient with dtype"),
        we_do=_are_summoned(torch.bfloat16, device),
    )


@clause("distributed.fsdp.fsdp_torch_limit_removed.offloaded_whole")
@pytest.mark.deviation("fsdp.offloaded_whole")
def test_offloaded_gradients_are_summoned_without_sharding(twins: Twins) -> None:
    twins.deviate(
        summoned_gradients,
        strategy="NO_SHARD",
        cpu_offload=CPUOffload(offload_params=True),
        we_do=_are_summoned(torch.float32, "cpu"),
        may_agree=True,
    )


def names_saved_after_backward(scene: Scene, *, strategy: str) -> list[str]:
    """Run a backward through a frozen root unit, whose input needs no gradient, and a trained inner unit."""
    wrapping: dict[str, Any] = {"strategy": strategy, "use_orig_params": True}
    frozen, inner = nn.Linear(3, 4).requires_grad_(False), scene.wrap(nn.Linear(4, 2), **wrapping)
    model = scene.wrap(nn.Sequential(frozen, inner), **wrapping)
    model(torch.ones(2, 3)).sum().backward()
    return sorted(model.state_dict())


@clause("distributed.fsdp.fsdp_torch_limit_removed.frozen_without_sharding")
@pytest.mark.deviation("fsdp.frozen_without_sharding")
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_frozen_unit_is_in_state_dict_after_backward(cpu_twins: Twins, strategy: str) -> None:
    is_sharded = strategy == "FULL_SHARD" and not cpu_twins.is_alone
    cpu_twins.deviate(
        names_saved_after_backward,
        strategy=strategy,
        torch_does=raises(AssertionError, "FSDP assumes 0.weight is in the state_dict"),
        we_do=each(lambda names: names == ["0.bias", "0.weight", "1.bias", "1.weight"]),
        may_agree=is_sharded,  # torch loses only unsharded parameters
    )


@clause("distributed.fsdp.fsdp_torch_limit_removed.accumulates_what_thawed")
@pytest.mark.deviation("fsdp.accumulates_what_thawed")
def test_gradients_of_thawed_parameter_accumulate(cpu_twins: Twins) -> None:
    """Train with NO_SHARD, after a step of several backwards in which the parameter was frozen.

    torch drops the gradient that was accumulated in `no_sync`.
    """
    setup = Setup("NO_SHARD", arguments={"use_orig_params": True})
    steps = (Step(forwards=2), Step(forwards=2, order="no_sync", before="thaw"))
    training = Training(ModuleTree(ModuleGroup((Leaf("affine", 2, frozen="first"),))), setup, steps)
    cpu_twins.judge(
        lambda library: cpu_twins.trained(library, training),
        we_do=lambda outcomes: trains_like_unsharded(outcomes, training),
    )
