"""The gate's model, trained by what `impl` has beside torch's names: the fused step, and captured optimizers."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from conformance.judge.library import load_library
from conformance.training.compare import Bound, compare
from conformance.training.config import TrainingConfig, small_config
from conformance.training.corpus import load_corpus
from conformance.training.judge import judge, parts_of
from conformance.training.trainer import ByFusedStep, Captured, Trainer, TrainingRun, train
from impl.optim import explain

IMPL = parts_of(load_library("impl"))


class CapturedIndeed(Captured):
    def update(self) -> torch.Tensor:
        norm = super().update()
        assert explain(self.optimizer).captured
        return norm


def run(config: TrainingConfig, trained_by: type[Trainer] = Trainer) -> TrainingRun:
    return train(IMPL, config, load_corpus(), trained_by=trained_by)


@pytest.mark.parametrize("optimizer", ["fused", "adamw", "foreach"])
def test_training_with_captured_optimizer_has_same_bits(optimizer: str) -> None:
    config = dataclasses.replace(small_config("fp16"), optimizer=optimizer)
    expected, actual = run(config), run(config, CapturedIndeed)
    assert expected.skipped
    for name in ("losses", "grad_norms", "scales", "skipped", "held_out", "weights"):
        assert repr(getattr(actual, name)) == repr(getattr(expected, name)), name


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_training_by_fused_step_has_same_curve(dtype: str) -> None:
    """The curve differs from torch's less than the curves of torch's own update implementations differ."""
    config = dataclasses.replace(small_config(dtype), optimizer="fused")
    expected = run(config)
    bound = Bound.between(expected, *map(run, config.neighbours()))
    failed = [
        check for check in compare(config, expected, run(config, ByFusedStep), bound) if not check.passed
    ]
    assert not failed, failed


def test_judge_trains_by_every_method() -> None:
    """The subject's names replace torch's, and a captured optimizer is compared bit by bit."""
    result = judge("impl", small_config("fp16"))
    assert [comparison.name for comparison in result.comparisons] == [
        f"fp16, adamw, {way}" for way in ("backend torch", "backend auto", "fused step", "captured")
    ]
    assert result.passed
    assert [comparison.bound is None for comparison in result.comparisons] == [True, False, False, True]
