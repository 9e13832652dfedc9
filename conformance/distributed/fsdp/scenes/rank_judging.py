"""Comparison of outcomes on ranks, with torch's ranks and with the same model unsharded."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from hypothesis import settings

from conformance.distributed.fsdp.scenes.fsdp_training import Setup, Step, Training, train_unsharded
from conformance.distributed.fsdp.scenes.scene import TREE
from conformance.judge.files.claims import claimed_extensions
from conformance.judge.library import Library
from conformance.judge.outcome import Outcome, assert_same_outcome
from conformance.judge.tolerances import TRAINED, Tolerance
from conformance.ranks import RankFault, RankPool

_TO_TORCH_ITSELF = (
    "we are deprecating ShardedTensor",
    "_get_pg_default_device",
    "Multiple backends are registered",
    # torch reports this builtin when Dynamo traces into the runtime.
    "Dynamo does not know how to trace the builtin",
)
_ORDERED = "distributed.fsdp.fully_shard.ordered"
_OF_FROZEN_PARTS = "has both parameters with requires_grad=True and False"  # deviation fsdp.frozen_in_part
_UNSHARDED = ("outputs", "losses", "input_gradients", "whole_gradients", "whole_parameters", "buffers")


def share_of_examples(share: float) -> settings:
    """Return settings with a share of the profile's examples, for tests whose examples take about a second each."""
    return settings(max_examples=max(2, round(settings.default.max_examples * share)))


def run_on_ranks(
    pool: RankPool, library: Library, case: Callable[..., Outcome], **arguments: Any
) -> list[Outcome]:
    """Run a case on all ranks. Return the outcomes, with each warning once.

    On the simulated device, assert that waits order all accesses to the same memory, if the library claims the clause.
    How often a warning is given depends on the number of units, so it is not compared.
    """
    outcomes = pool.run(case, library=library.spec, **arguments)
    if _ORDERED in claimed_extensions(library.spec):
        assert not pool.hazards, "\n".join(pool.hazards)
    return [replace(outcome, warned=_without_torchs_own(outcome.warned)) for outcome in outcomes]


def _without_torchs_own(warned: Sequence[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Return each warning once, without the warnings about torch itself and those for its sharding developers."""
    of_torch = (*_TO_TORCH_ITSELF, _OF_FROZEN_PARTS)
    return tuple(
        sorted(warning for warning in set(warned) if not any(text in warning[1] for text in of_torch))
    )


def assert_ranks_agree(
    reference: Sequence[Outcome], subject: Sequence[Outcome], tolerance: Tolerance = TRAINED
) -> None:
    for rank, (expected, actual) in enumerate(zip(reference, subject, strict=True)):
        try:
            assert_same_outcome(expected, actual, tolerance)
        except AssertionError as error:
            raise AssertionError(f"on rank {rank} of {len(subject)} {error}") from None


def unsharded_gradients(setup: Setup, world_size: int, rank: int) -> dict[str, torch.Tensor]:
    """Return the unsharded gradients of one training step of the default model."""
    return train_unsharded(Training(TREE, setup, (Step(),)), world_size)[rank]["whole_gradients"]


def tolerance_of_policy(policy: Mapping[str, Any]) -> Tolerance:
    """Return a tolerance for results of both libraries with this MixedPrecision.

    Both round each gradient to the same dtypes, but may sum and divide it in another order before that.
    """
    dtypes = [policy.get(name) for name in ("param_dtype", "reduce_dtype")]
    coarsest = next((dtype for dtype in (torch.bfloat16, torch.float16) if dtype in dtypes), None)
    if coarsest is None:
        return replace(TRAINED, coarsest=torch.float32)
    return Tolerance(8, "three steps, each with a sum over the ranks and a quotient", coarsest, terms=1.0)


def without_layout(outcome: Outcome) -> Outcome:
    """Remove the layout of shards, because each library may lay out partly frozen units differently."""
    if outcome.raised is not None:
        return outcome
    names = [[*shards] for shards in outcome.value["shards"]]
    return replace(outcome, value=outcome.value | {"shards": names})


def assert_like_unsharded(
    outcomes: Sequence[Outcome], training: Training, tolerance: Tolerance = TRAINED
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        unsharded = train_unsharded(training, len(outcomes))
    for rank, (expected, outcome) in enumerate(zip(unsharded, outcomes, strict=True)):
        assert outcome.raised is None, f"rank {rank} raised {outcome.raised}"
        for key in _UNSHARDED:
            assert_all_close(f"{key} of rank {rank}", expected[key], outcome.value[key], tolerance)


def trains_like_unsharded(
    outcomes: Sequence[Outcome] | RankFault, training: Training, tolerance: Tolerance = TRAINED
) -> bool:
    return not isinstance(outcomes, RankFault) and holds(assert_like_unsharded, outcomes, training, tolerance)


def holds(check: Callable[..., Any], *arguments: Any, **more: Any) -> bool:
    """Return whether the assertion `check` passes."""
    try:
        check(*arguments, **more)
    except AssertionError:
        return False
    return True


def assert_all_close(label: str, expected: Any, actual: Any, tolerance: Tolerance) -> None:
    """Compare the tensors that a rank reported, by name or by position, with the unsharded ones."""
    named = dict(expected) if isinstance(expected, dict) else dict(enumerate(expected))
    reported = dict(actual) if isinstance(actual, dict) else dict(enumerate(actual))
    assert named.keys() == reported.keys(), f"{label}: {list(reported)}, unsharded {list(named)}"
    for name, value in named.items():
        _assert_close(f"{label}[{name!r}]", value, reported[name].values, tolerance)


def _assert_close(label: str, expected: torch.Tensor, actual: torch.Tensor, tolerance: Tolerance) -> None:
    assert expected.shape == actual.shape, (
        f"{label}: shape {tuple(actual.shape)}, unsharded {tuple(expected.shape)}"
    )
    assert (excess := tolerance.excess(expected.detach(), actual)) is None, (
        f"{label}, against unsharded: {excess}"
    )
