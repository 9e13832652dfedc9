"""Weights that torch's class computes with although they have changed, or cannot compute with at all."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from conformance.distributed.fsdp.fsdp_cases import Setup, Step, Training
from conformance.distributed.fsdp.judging import assert_like_unsharded, outcomes
from conformance.distributed.fsdp.module_trees import Group, Leaf, ModuleTree
from conformance.distributed.fsdp.test_fsdp_mixed_precision import tolerance_of
from conformance.distributed.fsdp.test_fsdp_torch_limit_removed import Seen, averaged_gradients, raised
from conformance.distributed.fsdp.torch_limit_removed_cases import built
from conformance.judge.clauses import clause
from conformance.judge.deviations import DeviationJudge
from conformance.judge.library import Library
from conformance.judge.tolerances import ONE_STEP
from conformance.ranks import RankPool


def output_without_sharding(ranks: int, steps: bool) -> torch.Tensor:
    model = built("plain")
    gradients = averaged_gradients("plain", ranks)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.sub_(gradients[name], alpha=0.5 if steps else 0.0)
        return model(torch.ones(1, 3))


def gave(seen: Seen, expected: torch.Tensor) -> bool:
    return all(
        outcome.raised is None and ONE_STEP.excess(expected, outcome.value.values) is None for outcome in seen
    )


@clause("distributed.fsdp.fsdp_torch_limit_removed.steps_are_seen")
@pytest.mark.deviation("fsdp.step_after_evaluation")
@pytest.mark.parametrize("fused", [False, True])
def test_a_step_after_an_evaluation_is_seen(
    deviation: DeviationJudge, ranks: Callable[..., RankPool], world_size: int, fused: bool
) -> None:
    """Fused updates of torch's write to parameters and do not move their version counters."""

    def probe(library: Library) -> Seen:
        return outcomes(
            ranks(world_size),
            library,
            "torch_limit_removed_cases:output_after_a_step",
            evaluates=True,
            fused=fused,
        )

    deviation.judge(
        probe,
        torch_does=lambda seen: gave(seen, output_without_sharding(world_size, steps=False)),
        we_do=lambda seen: gave(seen, output_without_sharding(world_size, steps=True)),
        may_agree=world_size == 1,
    )


@clause("distributed.fsdp.fsdp_torch_limit_removed.steps_are_seen")
def test_a_step_is_seen(subject: Library, ranks: Callable[..., RankPool], world_size: int) -> None:
    seen = outcomes(
        ranks(world_size),
        subject,
        "torch_limit_removed_cases:output_after_a_step",
        evaluates=False,
        fused=False,
    )
    assert gave(seen, output_without_sharding(world_size, steps=True)), seen


@clause("distributed.fsdp.fsdp_torch_limit_removed.inner_modules")
@pytest.mark.deviation("fsdp.forward_of_an_inner_module")
def test_a_module_inside_a_unit_is_called(
    deviation: DeviationJudge, ranks: Callable[..., RankPool], world_size: int
) -> None:
    def probe(library: Library) -> Seen:
        return outcomes(ranks(world_size), library, "torch_limit_removed_cases:output_of_an_inner_module")

    with torch.no_grad():
        expected = built("plain")(torch.ones(1, 3))
    deviation.judge(
        probe,
        torch_does=lambda seen: raised(seen, RuntimeError, ""),
        we_do=lambda seen: gave(seen, expected),
        may_agree=world_size == 1,
    )


@clause("distributed.fsdp.fsdp_torch_limit_removed.tied_in_low_precision")
@pytest.mark.deviation("fsdp.tied_in_low_precision")
@pytest.mark.parametrize("keeps", [True, False])
def test_gradients_in_low_precision_are_shown_at_both_places_of_a_parameter(
    deviation: DeviationJudge, ranks: Callable[..., RankPool], world_size: int, keeps: bool
) -> None:
    policy = {"param_dtype": torch.bfloat16, "keep_low_precision_grads": keeps}
    setup = Setup("NO_SHARD", arguments={"use_orig_params": True}, mixed_precision=policy)
    steps = (Step(forwards=2, order="in turn" if keeps else "no_sync"),)
    training = Training(ModuleTree(Group((Leaf("tied"),))), setup, steps)

    def probe(library: Library) -> Seen:
        return outcomes(ranks(world_size), library, "fsdp_cases:train", training=training)

    def trains(seen: Seen) -> bool:
        try:
            assert_like_unsharded(seen, training, tolerance_of(policy))
        except AssertionError:
            return False
        return True

    deviation.judge(
        probe,
        torch_does=lambda seen: raised(seen, RuntimeError, "attempting to assign a gradient with dtype"),
        we_do=trains,
    )
