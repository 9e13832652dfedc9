"""Graphs that were built before a step: backward raises if it would read other weights than forward did."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from conformance.distributed.fsdp.scenes.twins import (
    RankOutcomes,
    Twins,
    Wrapping,
    each_strategy,
    each_wrapping,
)
from conformance.distributed.fsdp.scenes.written_weights import (
    Does,
    Forked,
    WritingTrainer,
    written,
    written_without_sharding,
)
from conformance.distributed.fsdp.test_fsdp_torch_limit_removed_writes import any_of, as_without_sharding
from conformance.judge.clauses import clause

refused = clause("distributed.fsdp.fsdp_torch_limit_removed.graphs_of_former_weights")
deviates = pytest.mark.deviation("fsdp.graphs_of_former_weights")


class Scale(nn.Sequential):
    """Unit with a single element, which only one rank has."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(1))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input * self.factor


def _filled(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.linspace(0.5, 1.5, parameter.numel()).view(parameter.shape))
    return module


class Parted(nn.Module):
    """Model with two paths that share no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Sequential(nn.Linear(3, 4), nn.Tanh(), Scale(), nn.Linear(4, 2)) for _ in range(2)
        )
        _filled(self)

    def forward(self, x: torch.Tensor, forks: bool) -> torch.Tensor:
        return self.first(x) if forks else self.second(x)


def stepped_between(trainer: WritingTrainer) -> list[torch.Tensor]:
    before = trainer.loss(0)
    trainer.backward(1)
    trainer.step()
    before.backward()
    trainer.step()
    return [trainer.output()]


def stepped_between_by_a_fused_optimizer(trainer: WritingTrainer) -> list[torch.Tensor]:
    """Step between a forward and its backward with a fused optimizer, which changes no version counter."""
    before = trainer.loss(0)
    trainer.backward(1)
    trainer.step(fused=True)
    before.backward()
    trainer.step()
    return [trainer.output()]


def evaluated_between(trainer: WritingTrainer) -> list[torch.Tensor]:
    before = trainer.loss(0)
    trainer.backward(1)
    trainer.step()
    output = trainer.output()
    before.backward()
    trainer.step()
    return [output, trainer.output()]


@refused
@deviates
@each_wrapping
@pytest.mark.parametrize("makes", [Forked, Parted])
@any_of(
    stepped_between,
    stepped_between_by_a_fused_optimizer,
    evaluated_between,
)
def test_backward_after_weight_change_is_refused(
    twins: Twins, does: Does, makes: type[nn.Module], wrapping: Wrapping
) -> None:
    """Every rank raises autograd's error for unsharded parameters. torch fails in more than one way."""
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as without_sharding:
        written_without_sharding(stepped_between, 1, makes)
    expected = _without_versions_and_types(str(without_sharding.value))

    def is_refused(outcomes: RankOutcomes) -> bool:
        return all(
            outcome.raised is not None
            and outcome.raised.kind is RuntimeError
            and _without_versions_and_types(outcome.raised.text) == expected
            for outcome in outcomes
        )

    twins.deviate(written, does=does, makes=makes, **wrapping, we_do=is_refused, may_agree=True)


def _without_versions_and_types(text: str) -> str:
    """Remove versions from the text, and the types of tensors, which name their device."""
    return re.sub(r"\[[\w.]+ \[", "[[", re.sub(r"version \d+", "version", text))


def goes_on_after_the_error(trainer: WritingTrainer) -> list[torch.Tensor]:
    try:
        stepped_between(trainer)
    except RuntimeError:
        trainer.model.zero_grad()
    trainer.backward(2)
    trainer.step()
    return [trainer.output()]


def stepped_elsewhere(trainer: WritingTrainer) -> list[torch.Tensor]:
    """Run a backward whose graph reads no parameter that the step has changed."""
    before = trainer.loss(0, forks=True)
    trainer.backward(1, forks=False)
    trainer.step()
    before.backward()
    trainer.step()
    return [trainer.output()]


@refused
@deviates
@each_wrapping
@pytest.mark.parametrize(
    ("does", "makes"),
    [
        (goes_on_after_the_error, Forked),
        # A step of other parameters does no harm.
        (stepped_elsewhere, Parted),
    ],
    ids=lambda function: function.__name__,
)
def test_training_goes_on(twins: Twins, does: Does, makes: Any, wrapping: Wrapping) -> None:
    we_do = as_without_sharding(does, twins.world_size, makes)
    twins.deviate(written, does=does, makes=makes, **wrapping, we_do=we_do, may_agree=True)


class PartlyRead(nn.Module):
    """Model whose inner unit has a weight that backward reads and one that it does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), Scale())
        _filled(self)

    def forward(self, x: torch.Tensor, forks: bool) -> torch.Tensor:
        return self.inner(x) if forks else self.inner[0](x).sin()


def stepped_what_is_not_read(trainer: WritingTrainer) -> list[torch.Tensor]:
    before = trainer.loss(0)
    trainer.backward(1)
    trainer.step(of="0.weight")
    before.backward()
    trainer.step()
    return [trainer.output()]


@clause("distributed.fsdp.fsdp_torch_limit_removed.steps_in_between")
@each_strategy
def test_step_of_parameters_unread_by_backward_is_harmless(twins: Twins, strategy: str) -> None:
    does, makes = stepped_what_is_not_read, PartlyRead
    outcomes = twins.of_subject(written, does=does, strategy=strategy, use_orig_params=True, makes=makes)
    assert as_without_sharding(does, twins.world_size, makes)(outcomes), outcomes
