"""Limits and faults of torch's class that are removed: each is a row of deviations.toml, asserted on both sides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from conformance.distributed.fsdp.fsdp_cases import Setup, Step, Training, zero_for_none
from conformance.distributed.fsdp.judging import assert_close_gradients, outcomes, trains_like_unsharded
from conformance.distributed.fsdp.module_trees import Group, Leaf, ModuleTree
from conformance.distributed.fsdp.torch_limit_removed_cases import accumulated, built
from conformance.judge.clauses import clause
from conformance.judge.deviations import DeviationJudge
from conformance.judge.library import Library
from conformance.judge.outcome import Outcome
from conformance.judge.tolerances import ONE_STEP
from conformance.ranks import RankPool

Seen = Sequence[Outcome]


def averaged_gradients(module: str, ranks: int) -> dict[str, torch.Tensor]:
    replicas = [built(module) for _ in range(ranks)]
    for rank, replica in enumerate(replicas):
        accumulated(replica, rank)
    gradients = [{n: zero_for_none(p) for n, p in replica.named_parameters()} for replica in replicas]
    return {name: torch.stack([each[name] for each in gradients]).mean(0) for name in gradients[0]}


def has_averaged(seen: Seen, module: str) -> bool:
    return have_whole(seen, averaged_gradients(module, len(seen)))


def have_whole(seen: Seen, expected: dict[str, torch.Tensor]) -> bool:
    """Whether every rank has the gradients that one process has without sharding."""
    try:
        for outcome in seen:
            assert outcome.raised is None
            assert_close_gradients(expected, outcome.value["whole"], ONE_STEP)
    except AssertionError:
        return False
    return True


def raised(seen: Seen, kind: type[Exception], text: str) -> bool:
    return all(
        outcome.raised is not None and outcome.raised.kind is kind and text in outcome.raised.text
        for outcome in seen
    )


def accumulate(pool: RankPool, **arguments: Any) -> Any:
    return lambda library: outcomes(pool, library, "torch_limit_removed_cases:accumulate", **arguments)


@clause("distributed.fsdp.fsdp_torch_limit_removed.frozen_in_part")
@pytest.mark.deviation("fsdp.frozen_in_part")
def test_frozen_and_trained_parameters_share_a_unit(deviation: DeviationJudge, rank_pool: RankPool) -> None:
    deviation.judge(
        accumulate(rank_pool, module="half frozen"),
        torch_does=lambda seen: raised(seen, ValueError, "uniform `requires_grad`"),
        we_do=lambda seen: has_averaged(seen, "half frozen"),
    )


@clause("distributed.fsdp.fsdp_torch_limit_removed.several_dtypes")
@pytest.mark.deviation("fsdp.several_dtypes")
def test_parameters_of_several_dtypes_share_a_unit(deviation: DeviationJudge, rank_pool: RankPool) -> None:
    deviation.judge(
        accumulate(rank_pool, module="several dtypes"),
        torch_does=lambda seen: raised(seen, ValueError, "uniform dtype"),
        we_do=lambda seen: has_averaged(seen, "several dtypes"),
    )


@clause("distributed.fsdp.fsdp_torch_limit_removed.one_element")
@pytest.mark.deviation("fsdp.unit_of_one_element")
def test_a_unit_of_one_element_accumulates(deviation: DeviationJudge, ranks: Any, world_size: int) -> None:
    deviation.judge(
        accumulate(ranks(world_size), module="one element"),
        we_do=lambda seen: has_averaged(seen, "one element"),
        may_agree=world_size == 1,
    )


@clause("distributed.fsdp.fsdp_torch_limit_removed.float64_clipped")
@pytest.mark.deviation("fsdp.float64_clipped")
def test_float64_gradients_are_clipped(deviation: DeviationJudge, ranks: Any, world_size: int) -> None:
    flat = torch.cat([grad.reshape(-1) for grad in averaged_gradients("float64", world_size).values()])
    norm = torch.linalg.vector_norm(flat)
    deviation.judge(
        accumulate(ranks(world_size), module="float64", clips=True),
        torch_does=lambda seen: raised(seen, RuntimeError, "without narrowing"),
        we_do=lambda seen: all(
            outcome.raised is None and ONE_STEP.excess(norm, outcome.value["norm"].values) is None
            for outcome in seen
        ),
        may_agree=world_size == 1,
    )


@clause("distributed.fsdp.fsdp_torch_limit_removed.replicas_of_one")
@pytest.mark.deviation("fsdp.replicas_of_one")
@pytest.mark.parametrize("replicas", ["mesh", "default"])
@pytest.mark.world_sizes(fewest=2)
def test_replicas_that_nobody_shares_are_averaged(
    deviation: DeviationJudge, ranks: Any, world_size: int, replicas: str
) -> None:
    """Without groups a host has as many ranks as devices: on the CPU one."""
    deviation.judge(
        accumulate(ranks(world_size), module="plain", replicas=replicas),
        we_do=lambda seen: has_averaged(seen, "plain"),
    )


@clause("distributed.fsdp.fsdp_torch_limit_removed.without_accelerator")
@pytest.mark.deviation("fsdp.without_accelerator")
@pytest.mark.skipif(torch.accelerator.is_available(), reason="unavailable: a machine without accelerator")
def test_a_machine_without_accelerator_needs_no_device(
    deviation: DeviationJudge, rank_pool: RankPool
) -> None:
    deviation.judge(
        accumulate(rank_pool, module="plain", on=""),
        torch_does=lambda seen: raised(seen, RuntimeError, "no accelerator device is detected"),
        we_do=lambda seen: has_averaged(seen, "plain"),
    )


@clause("distributed.fsdp.fsdp_torch_limit_removed.reentrant_regions")
@pytest.mark.deviation("fsdp.reentrant_regions")
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_reentrant_regions_follow_each_other_in_a_unit(
    deviation: DeviationJudge, ranks: Any, world_size: int, strategy: str, use_orig_params: bool
) -> None:
    tree = ModuleTree(Group((Leaf("affine", 4), Leaf("tied"), Leaf("affine", 3)), checkpointing="reentrant"))
    setup = Setup(strategy, arguments={"use_orig_params": use_orig_params})
    training = Training(tree, setup, (Step(), Step()))

    def probe(library: Library) -> Seen:
        return outcomes(ranks(world_size), library, "fsdp_cases:train", training=training)

    deviation.judge(
        probe,
        torch_does=lambda seen: raised(seen, RuntimeError, ""),
        we_do=lambda seen: trains_like_unsharded(seen, training),
        may_agree=world_size == 1,
    )
