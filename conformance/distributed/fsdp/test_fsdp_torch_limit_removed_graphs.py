"""Graphs built before a write to parameters: backward raises if it would read other weights than forward did."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from conformance.distributed.fsdp.scenes.forked_model import (
    Does,
    Forked,
    backward,
    loss,
    output,
    run_sharded,
    step,
)
from conformance.distributed.fsdp.scenes.rank_judging import assert_ranks_agree
from conformance.distributed.fsdp.scenes.scene import Scene
from conformance.distributed.fsdp.scenes.twins import (
    STRATEGIES,
    RankOutcomes,
    Twins,
    Wrapping,
    both_kinds,
    each_strategy,
    each_wrapping,
    raises,
)
from conformance.judge.clauses import clause


class Headed(nn.Module):
    """Model whose backward reads the weights of the outermost unit."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Sequential(nn.Linear(3, 4)), nn.Linear(4, 2)

    def forward(self, x: Tensor, forks: bool = False) -> Tensor:
        del forks
        return self.head(self.inner(x).tanh())


class Scale(nn.Sequential):
    """Unit with a single element, which only one rank has."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(1))

    def forward(self, input: Tensor) -> Tensor:
        return input * self.factor


class Parted(nn.Module):
    """Model with two paths that share no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Sequential(nn.Linear(3, 4), nn.Tanh(), Scale(), nn.Linear(4, 2)) for _ in range(2)
        )

    def forward(self, x: Tensor, forks: bool) -> Tensor:
        return self.first(x) if forks else self.second(x)


def stepped_between(scene: Scene) -> list[Tensor]:
    """Step with an optimizer between a forward and its backward."""
    return _written_between(scene, lambda: step(scene))


def stepped_between_by_a_fused_optimizer(scene: Scene) -> list[Tensor]:
    """Step between a forward and its backward with a fused optimizer, which changes no version counter."""
    return _written_between(scene, lambda: step(scene, fused=True))


def changed_between(scene: Scene) -> list[Tensor]:
    """Change the parameters in place between a forward and its backward."""

    def change() -> None:
        with torch.no_grad():
            for parameter in scene.model.parameters():
                parameter.mul_(0.5)

    return _written_between(scene, change)


def memory_between(scene: Scene) -> list[Tensor]:
    """Assign other memory to `.data` between a forward and its backward."""

    def change() -> None:
        for parameter in scene.model.parameters():
            parameter.data = parameter.data * 0.5

    return _written_between(scene, change)


def summoned_between(scene: Scene) -> list[Tensor]:
    """Change summoned parameters in place, with writeback, between a forward and its backward."""

    def change() -> None:
        with scene.fsdp.summon_full_params(scene.model), torch.no_grad():
            for parameter in scene.model.parameters():
                parameter.mul_(0.5)

    return _written_between(scene, change)


def _written_between(scene: Scene, write: Callable[[], None]) -> list[Tensor]:
    backward(scene, 0)
    graph = loss(scene, 1)
    write()
    graph.backward()
    return []


def stepped_after_another_backward(scene: Scene) -> list[Tensor]:
    return _stepped_after_another(scene)


def stepped_after_another_backward_by_a_fused_optimizer(scene: Scene) -> list[Tensor]:
    return _stepped_after_another(scene, fused=True)


def evaluated_after_another_backward(scene: Scene) -> list[Tensor]:
    return _stepped_after_another(scene, evaluates=True)


def _stepped_after_another(
    scene: Scene, fused: bool = False, evaluates: bool = False, of: str = ""
) -> list[Tensor]:
    """Run a backward and a step of the parameters `of` between a forward and its backward."""
    graph = loss(scene, 0)
    backward(scene, 1)
    step(scene, of=of, fused=fused)
    outputs = [output(scene)] if evaluates else []
    graph.backward()
    step(scene)
    return [*outputs, output(scene)]


REFUSED = [
    *itertools.product(
        (
            stepped_between,
            stepped_between_by_a_fused_optimizer,
            changed_between,
            summoned_between,
            memory_between,
        ),
        (Headed, Forked),
    ),
    *itertools.product(
        (
            stepped_after_another_backward,
            stepped_after_another_backward_by_a_fused_optimizer,
            evaluated_after_another_backward,
        ),
        (Forked, Parted),
    ),
]
refused = clause("distributed.fsdp.fsdp_torch_limit_removed.graphs_of_former_weights")
deviates = pytest.mark.deviation("fsdp.graphs_of_former_weights")


@refused
@deviates
@each_wrapping
@pytest.mark.parametrize(("does", "makes"), REFUSED)
def test_backward_after_weight_change_is_refused(
    twins: Twins, does: Does, makes: type[nn.Module], wrapping: Wrapping
) -> None:
    """Every rank raises autograd's error for unsharded parameters. torch fails in more than one way.

    The outermost unit stays unsharded from forward to backward, and so do all units if nothing is resharded.
    """
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as without_sharding:
        run_sharded(Scene.unsharded(0, 1), does=stepped_after_another_backward, makes=makes, **wrapping)
    expected = _without_versions_and_types(str(without_sharding.value))

    def is_refused(outcomes: RankOutcomes) -> bool:
        return all(
            outcome.raised is not None
            and outcome.raised.kind is RuntimeError
            and _without_versions_and_types(outcome.raised.text) == expected
            for outcome in outcomes
        )

    twins.deviate(run_sharded, does=does, makes=makes, **wrapping, we_do=is_refused, may_agree=True)


def _without_versions_and_types(text: str) -> str:
    """Remove versions from the text, and the types of tensors, which name their device."""
    return re.sub(r"\[[\w.]+ \[", "[[", re.sub(r"version \d+", "version", text))


def continued_after_the_error(scene: Scene) -> list[Tensor]:
    """Catch the error of a backward after a step, clear the gradients and train on."""
    try:
        stepped_after_another_backward(scene)
    except RuntimeError:
        scene.model.zero_grad()
    backward(scene, 2)
    step(scene)
    return [output(scene)]


def stepped_elsewhere(scene: Scene) -> list[Tensor]:
    """Run a backward whose graph reads no parameter that the step has changed."""
    graph = loss(scene, 0, forks=True)
    backward(scene, 1, forks=False)
    step(scene)
    graph.backward()
    step(scene)
    return [output(scene)]


def stepped_beside(scene: Scene) -> list[Tensor]:
    """Step, between a forward and its backward, parameters that the backward does not read."""
    backward(scene, 0)
    graph = loss(scene, 1)
    step(scene, of="inner")
    graph.backward()
    step(scene)
    return [output(scene)]


@refused
@deviates
@each_wrapping
@pytest.mark.parametrize(
    ("does", "makes"),
    [(continued_after_the_error, Forked), (stepped_elsewhere, Parted), (stepped_beside, Headed)],
)
def test_training_continues_after_unread_step(
    twins: Twins, does: Does, makes: type[nn.Module], wrapping: Wrapping
) -> None:
    """A step of parameters that the backward does not read does no harm."""
    arguments = {"does": does, "makes": makes, **wrapping}
    twins.deviate_to_unsharded(run_sharded, **arguments, may_agree=True)


def discarded_between(scene: Scene) -> list[Tensor]:
    """Write to summoned parameters, without writeback, between a forward and its backward."""
    graph = loss(scene, 0)
    if scene.shards:
        with scene.fsdp.summon_full_params(scene.model, writeback=False), torch.no_grad():
            for parameter in scene.model.parameters():
                parameter.mul_(0.5)
    graph.backward()
    step(scene)
    return [output(scene)]


@clause("distributed.fsdp.fsdp_torch_limit_removed.discarded_writes")
@pytest.mark.deviation("fsdp.discarded_writes")
@pytest.mark.world_sizes(fewest=2)
@both_kinds
@pytest.mark.parametrize("strategy", STRATEGIES[:2])
def test_backward_after_discarded_write_has_gradients_of_its_forward(
    twins: Twins, strategy: str, use_orig_params: bool
) -> None:
    """The outermost unit of torch stays unsharded from forward to backward."""
    wrapping = {"strategy": strategy, "use_orig_params": use_orig_params}
    twins.deviate_to_unsharded(run_sharded, does=discarded_between, makes=Headed, **wrapping)


class PartlyRead(nn.Module):
    """Model whose inner unit has a weight that backward reads and one that it does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), Scale())

    def forward(self, x: Tensor, forks: bool) -> Tensor:
        return self.inner(x) if forks else self.inner[0](x).sin()


def stepped_what_is_not_read(scene: Scene) -> list[Tensor]:
    return _stepped_after_another(scene, of="0.weight")


@clause("distributed.fsdp.fsdp_torch_limit_removed.steps_in_between")
@each_strategy
def test_step_of_parameters_unread_by_backward_is_harmless(twins: Twins, strategy: str) -> None:
    wrapping = {"strategy": strategy, "use_orig_params": True}
    twins.agree_with_unsharded(run_sharded, does=stepped_what_is_not_read, makes=PartlyRead, **wrapping)


def cast_between(scene: Scene) -> list[Tensor]:
    """Cast the model to another dtype between a forward and its backward. Return the full gradients."""
    graph = loss(scene, 0)
    scene.model.double()
    graph.backward()
    return list(scene.whole_gradients().values())


def flat_cast_between(scene: Scene) -> list[Tensor]:
    """Cast the flat parameters by their private name, as accelerate does. Return the full gradients."""
    graph = loss(scene, 0)
    for unit in scene.units:
        if unit._flat_param is not None:
            unit._flat_param.data = unit._flat_param.data.double()
    graph.backward()
    return list(scene.whole_gradients().values())


@clause("distributed.fsdp.fsdp_torch_limit_removed.cast_between")
@each_wrapping
@pytest.mark.parametrize("does", [cast_between, flat_cast_between])
def test_cast_between_forward_and_backward_keeps_gradients_or_is_refused(
    twins: Twins, does: Does, wrapping: Wrapping
) -> None:
    expected, actual = twins.of_both(run_sharded, does=does, **wrapping)
    if not raises(RuntimeError)(actual):
        assert_ranks_agree(expected, actual)
