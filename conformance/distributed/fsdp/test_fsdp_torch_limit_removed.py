"""Limits and faults of torch's class that Tandem removes: deviations, asserted for both libraries."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from conformance.distributed.fsdp.scenes.fsdp_training import Setup, Step, Training, zero_for_none
from conformance.distributed.fsdp.scenes.module_trees import Leaf, ModuleGroup, ModuleTree
from conformance.distributed.fsdp.scenes.rank_judging import (
    assert_all_close,
    assert_close_gradients,
    trains_like_unsharded,
)
from conformance.distributed.fsdp.scenes.special_modules import accumulate, accumulated, built
from conformance.distributed.fsdp.scenes.twins import (
    STRATEGIES,
    RankOutcomes,
    Twins,
    both_kinds,
    each,
    holds,
    raises,
)
from conformance.judge.clauses import clause
from conformance.judge.judgement import unavailable
from conformance.judge.tolerances import ONE_STEP


def averaged_gradients(module: str, ranks: int) -> dict[str, torch.Tensor]:
    replicas = [built(module) for _ in range(ranks)]
    for rank, replica in enumerate(replicas):
        accumulated(replica, rank)
    gradients = [{n: zero_for_none(p) for n, p in replica.named_parameters()} for replica in replicas]
    return {
        name: torch.stack([replica_gradients[name] for replica_gradients in gradients]).mean(0)
        for name in gradients[0]
    }


def averaged(module: str) -> Callable[[RankOutcomes], bool]:
    """Return a check whether every rank has the gradients of one unsharded process."""

    def do(outcomes: RankOutcomes) -> bool:
        expected = averaged_gradients(module, len(outcomes))
        return each(lambda value: holds(assert_close_gradients, expected, value["whole"], ONE_STEP))(outcomes)

    return do


def gave(expected: torch.Tensor) -> Callable[[RankOutcomes], bool]:
    return each(lambda value: holds(assert_all_close, "what was returned", [expected], [value], ONE_STEP))


@clause("distributed.fsdp.fsdp_torch_limit_removed.frozen_in_part")
@pytest.mark.deviation("fsdp.frozen_in_part")
def test_frozen_and_trained_parameters_share_a_unit(twins: Twins) -> None:
    twins.deviate(
        accumulate,
        module="half frozen",
        torch_does=raises(ValueError, "uniform `requires_grad`"),
        we_do=averaged("half frozen"),
    )


@clause("distributed.fsdp.fsdp_torch_limit_removed.several_dtypes")
@pytest.mark.deviation("fsdp.several_dtypes")
def test_parameters_of_several_dtypes_share_a_unit(twins: Twins) -> None:
    twins.deviate(
        accumulate,
        module="several dtypes",
        torch_does=raises(ValueError, "uniform dtype"),
        we_do=averaged("several dtypes"),
    )


@clause("distributed.fsdp.fsdp_torch_limit_removed.one_element")
@pytest.mark.deviation("fsdp.unit_of_one_element")
def test_unit_of_one_element_accumulates_gradients(cpu_twins: Twins) -> None:
    we_do, module = averaged("one element"), "one element"
    cpu_twins.deviate(accumulate, module=module, we_do=we_do, may_agree=cpu_twins.is_alone)


@clause("distributed.fsdp.fsdp_torch_limit_removed.float64_clipped")
@pytest.mark.deviation("fsdp.float64_clipped")
def test_float64_gradients_are_clipped(cpu_twins: Twins) -> None:
    gradients = averaged_gradients("float64", cpu_twins.world_size)
    norm = torch.linalg.vector_norm(torch.cat([grad.reshape(-1) for grad in gradients.values()]))
    cpu_twins.deviate(
        accumulate,
        module="float64",
        clips=True,
        torch_does=raises(RuntimeError, "without narrowing"),
        we_do=each(lambda value: ONE_STEP.excess(norm, value["norm"].values) is None),
        may_agree=cpu_twins.is_alone,
    )


@clause("distributed.fsdp.fsdp_torch_limit_removed.replicas_of_one")
@pytest.mark.deviation("fsdp.replicas_of_one")
@pytest.mark.parametrize("replicas", ["mesh", "default"])
@pytest.mark.world_sizes(fewest=2)
def test_replicas_that_nobody_shares_are_averaged(cpu_twins: Twins, replicas: str) -> None:
    """The default groups assume as many ranks on a host as devices, which is one rank on the CPU."""
    cpu_twins.deviate(accumulate, module="plain", replicas=replicas, we_do=averaged("plain"))


@clause("distributed.fsdp.fsdp_torch_limit_removed.without_accelerator")
@pytest.mark.deviation("fsdp.without_accelerator")
def test_wrapping_needs_no_accelerator(twins: Twins, device: str) -> None:
    if device != "cpu" or torch.accelerator.is_available():
        unavailable("a machine without accelerator")
    twins.deviate(
        accumulate,
        module="plain",
        on="",
        torch_does=raises(RuntimeError, "no accelerator device is detected"),
        we_do=averaged("plain"),
    )


@clause("distributed.fsdp.fsdp_torch_limit_removed.reentrant_regions")
@pytest.mark.deviation("fsdp.reentrance_anywhere")
@both_kinds
@pytest.mark.parametrize("strategy", STRATEGIES[:2])
def test_reentrant_regions_follow_each_other_in_a_unit(
    cpu_twins: Twins, strategy: str, use_orig_params: bool
) -> None:
    tree = ModuleTree(
        ModuleGroup((Leaf("affine", 4), Leaf("tied"), Leaf("affine", 3)), checkpointing="reentrant")
    )
    setup = Setup(strategy, arguments={"use_orig_params": use_orig_params})
    training = Training(tree, setup, (Step(), Step()))
    cpu_twins.judge(
        lambda library: cpu_twins.trained(library, training),
        torch_does=raises(RuntimeError),
        we_do=lambda outcomes: trains_like_unsharded(outcomes, training),
        may_agree=cpu_twins.is_alone,
    )
