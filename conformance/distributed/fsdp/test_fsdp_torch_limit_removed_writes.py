"""Writes to parameters and gradients between two calls of a model have the same effect as without sharding."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conformance.distributed.fsdp.scenes.rank_judging import assert_ranks_agree
from conformance.distributed.fsdp.scenes.scene import Scene, filled
from conformance.distributed.fsdp.scenes.twins import (
    RankOutcomes,
    Twins,
    Wrapping,
    each_strategy,
    each_wrapping,
    raises,
)
from conformance.judge.clauses import clause
from conformance.judge.tolerances import TRAINED


class Forked(nn.Module):
    """Model with two inner units, of which one is only used if `forks`."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.always = nn.Sequential(nn.Linear(4, 5))
        self.sometimes = nn.Sequential(nn.Linear(4, 5))

    def forward(self, x: Tensor, forks: bool = False) -> Tensor:
        hidden = self.body(x).tanh()
        return self.always(hidden) + self.sometimes(hidden) if forks else self.always(hidden)


def loss(scene: Scene, number: int, *, forks: bool = True) -> Tensor:
    def of_rank(rank: int) -> Tensor:
        x = torch.linspace(0, 1 + number, 15).view(5, 3) - rank * 0.25
        return scene.model(x, forks).square().mean()

    return scene.mean(of_rank)


def backward(scene: Scene, number: int, *, forks: bool = True) -> None:
    loss(scene, number, forks=forks).backward()


def step(scene: Scene, *, of: str = "", fused: bool = False) -> None:
    """Step the parameters whose names contain `of` with torch's SGD, and clear all gradients."""
    stepped = [parameter for name, parameter in scene.model.named_parameters() if of in name]
    torch.optim.SGD(stepped, 0.25, fused=fused).step()
    scene.model.zero_grad()


def output(scene: Scene) -> Tensor:
    with torch.no_grad():
        return scene.model(torch.ones(1, 3), forks=True)


Does = Callable[[Scene], list[Tensor]]


def written(
    scene: Scene, *, does: Does, strategy: str, use_orig_params: bool, makes: type[nn.Module] = Forked
) -> dict[str, Any]:
    """Run `does` on a sharded model. Return the outputs and the full parameters at the end."""
    wrapping = {"strategy": strategy, "use_orig_params": use_orig_params}
    scene.model = scene.wrap(filled(makes()), units=[nn.Sequential], **wrapping)
    return {"outputs": does(scene), "whole": scene.whole_parameters(scene.model)}


def any_of(*does: Does) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("does", does, ids=lambda does: does.__name__)


def exchanged_in_place(scene: Scene) -> list[Tensor]:
    """Write other values through `.data`, evaluate, and write the former values through `.data`."""
    parameters = list(scene.model.parameters())
    former = [parameter.detach().clone() for parameter in parameters]
    for parameter in parameters:
        parameter.data.mul_(0.5)
    outputs = [output(scene)]
    for parameter, values in zip(parameters, former, strict=True):
        parameter.data.copy_(values)
    return [*outputs, output(scene)]


def exchanged_after_forward(scene: Scene) -> list[Tensor]:
    """Exchange the values in place for an evaluation, after a forward without a backward. Then run a backward."""
    loss(scene, 0)
    outputs = exchanged_in_place(scene)
    backward(scene, 1)
    step(scene)
    return [*outputs, output(scene)]


def exchanged_by_memory(scene: Scene) -> list[Tensor]:
    """Assign other memory to `.data`, evaluate, and assign the former memory."""
    parameters = list(scene.model.parameters())
    outputs = [output(scene)]
    former = [parameter.data for parameter in parameters]
    for parameter in parameters:
        parameter.data = parameter.data * 0.5
    outputs.append(output(scene))
    for parameter, values in zip(parameters, former, strict=True):
        parameter.data = values
    return [*outputs, output(scene)]


def from_a_vector(scene: Scene) -> list[Tensor]:
    """Set all parameters with torch.nn.utils' vector functions between two evaluations."""
    outputs = [output(scene)]
    vector = nn.utils.parameters_to_vector(scene.model.parameters())
    nn.utils.vector_to_parameters(vector.detach() * 0.5, scene.model.parameters())
    return [*outputs, output(scene)]


def memory_while_unsharded(scene: Scene) -> list[Tensor]:
    """Assign other memory to `.data` while gradients accumulate and parameters are still unsharded."""
    with scene.model.no_sync():
        backward(scene, 0)
    for parameter in scene.model.parameters():
        parameter.data = parameter.data * 0.5
    backward(scene, 1)
    step(scene)
    return [output(scene)]


def stepped_and_cleared(scene: Scene) -> list[Tensor]:
    """Step with an optimizer that changes no version counter and clears its gradients.

    The model stays unsharded meanwhile for another backward.
    """
    backward(scene, 0)
    _unused = loss(scene, 1)
    optimizer = torch.optim.SGD(scene.model.parameters(), 0.25, fused=True)
    optimizer.register_step_post_hook(lambda *_: optimizer.zero_grad())
    optimizer.step()
    return [output(scene)]


def inferred_first(scene: Scene) -> list[Tensor]:
    """Run the first forward in inference mode, and then train."""
    with torch.inference_mode():
        outputs = [output(scene).clone()]
    backward(scene, 0)
    step(scene)
    return [*outputs, output(scene)]


@clause("distributed.fsdp.fsdp_torch_limit_removed.writes_are_seen")
@pytest.mark.deviation("fsdp.step_after_evaluation")
@each_wrapping
@any_of(
    exchanged_in_place,
    exchanged_after_forward,
    exchanged_by_memory,
    from_a_vector,
    memory_while_unsharded,
    stepped_and_cleared,
    inferred_first,
)
def test_written_values_are_used_in_computation(twins: Twins, does: Does, wrapping: Wrapping) -> None:
    twins.deviate_to_unsharded(written, does=does, **wrapping, may_agree=True)


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
        (stepped_between, stepped_between_by_a_fused_optimizer, changed_between, memory_between),
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
@pytest.mark.parametrize(("does", "makes"), REFUSED, ids=lambda value: value.__name__)
def test_backward_after_weight_change_is_refused(
    twins: Twins, does: Does, makes: type[nn.Module], wrapping: Wrapping
) -> None:
    """Every rank raises autograd's error for unsharded parameters. torch fails in more than one way.

    The outermost unit stays unsharded from forward to backward, and so do all units if nothing is resharded.
    """
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as without_sharding:
        written(Scene.unsharded(0, 1), does=stepped_after_another_backward, makes=makes, **wrapping)
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


def continued_after_the_error(scene: Scene) -> list[Tensor]:
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
    ids=lambda value: value.__name__,
)
def test_training_goes_on(twins: Twins, does: Does, makes: type[nn.Module], wrapping: Wrapping) -> None:
    """A step of parameters that the backward does not read does no harm."""
    arguments = {"does": does, "makes": makes, **wrapping}
    twins.deviate_to_unsharded(written, **arguments, may_agree=True)


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
    twins.agree_with_unsharded(written, does=stepped_what_is_not_read, makes=PartlyRead, **wrapping)


def given_more_elements(scene: Scene) -> list[Tensor]:
    """Assign memory with one more element to `.data` of the parameters of which this rank has elements."""
    for parameter in scene.model.parameters():
        if parameter.numel() > 0:
            parameter.data = torch.ones(parameter.numel() + 1)
    return [output(scene)]


def given_one_dimension(scene: Scene) -> list[Tensor]:
    """Assign one-dimensional memory with as many elements to `.data`."""
    for parameter in scene.model.parameters():
        parameter.data = parameter.data.reshape(-1) * 0.5
    return [output(scene)]


@clause("distributed.fsdp.fully_sharded_data_parallel.writes.shapes")
@each_strategy
@any_of(given_more_elements, given_one_dimension)
def test_memory_of_another_shape(twins: Twins, does: Does, strategy: str) -> None:
    arguments = {"does": does, "strategy": strategy, "use_orig_params": True}
    actual = twins.agree(written, tolerance=TRAINED, may_raise=True, **arguments)
    is_refused = raises(RuntimeError, "Cannot writeback")(actual)
    assert is_refused is (does is given_more_elements)


def zeroed(scene: Scene) -> list[Tensor]:
    """Zero averaged gradients together with gradients that are not averaged yet, and run another backward."""
    backward(scene, 0)
    with scene.model.no_sync():
        backward(scene, 1)
    scene.model.zero_grad(set_to_none=False)
    backward(scene, 2)
    step(scene)
    return [output(scene)]


def replaced_gradients(scene: Scene) -> list[Tensor]:
    """Replace the memory of gradients, once averaged and once not, and accumulate onto it."""
    for context in (contextlib.nullcontext, scene.model.no_sync):
        with context():
            backward(scene, 0)
        for parameter in scene.model.parameters():
            if parameter.grad is not None:
                parameter.grad.data = parameter.grad.data * 0.5
        backward(scene, 1)
        step(scene)
    return [output(scene)]


def not_reached(scene: Scene) -> list[Tensor]:
    """Run a backward that averages without a unit that took part in an earlier backward in no_sync."""
    with scene.model.no_sync():
        backward(scene, 0)
    backward(scene, 1, forks=False)
    step(scene)
    return [output(scene)]


def moved(scene: Scene) -> list[Tensor]:
    """Move the model to its current device while gradients wait to be averaged."""
    backward(scene, 0)
    with scene.model.no_sync():
        backward(scene, 1)
    scene.model.to(next(scene.model.parameters()).device)
    backward(scene, 2)
    step(scene)
    return [output(scene)]


@clause("distributed.fsdp.fsdp_torch_limit_removed.waiting_gradients")
@pytest.mark.deviation("fsdp.waiting_gradients")
@each_wrapping
@any_of(zeroed, replaced_gradients, not_reached, moved)
def test_gradients_that_wait_are_what_is_shown_of_them(twins: Twins, does: Does, wrapping: Wrapping) -> None:
    twins.deviate_to_unsharded(written, does=does, **wrapping, may_agree=True)


def called_with_others(scene: Scene) -> list[Tensor]:
    """Call the model with other parameters by torch.func.functional_call, and then with its own."""
    others = {name: parameter.detach() * 0.5 for name, parameter in scene.model.named_parameters()}
    with torch.no_grad():
        called = torch.func.functional_call(scene.model, others, (torch.ones(1, 3), True))
    return [called, output(scene)]


@clause("distributed.fsdp.fsdp_torch_limit_removed.others_in_their_places")
@pytest.mark.deviation("fsdp.others_in_their_places")
@each_wrapping
def test_call_with_other_parameters_is_refused(twins: Twins, wrapping: Wrapping) -> None:
    is_refused = raises(RuntimeError, "was replaced by another tensor")
    twins.deviate(written, does=called_with_others, **wrapping, we_do=is_refused)


def given_a_parameter(scene: Scene) -> list[Tensor]:
    """Replace a parameter by another one."""
    inner: Any = scene.model
    inner.body.bias = nn.Parameter(torch.full((4,), 3.0))
    return [output(scene)]


@clause("distributed.fsdp.fsdp_torch_limit_removed.others_in_their_places")
@pytest.mark.deviation("fsdp.others_in_their_places")
@each_strategy
def test_replaced_parameter_is_refused(twins: Twins, strategy: str) -> None:
    arguments = {"does": given_a_parameter, "strategy": strategy, "use_orig_params": False}
    twins.deviate(
        written, **arguments, we_do=raises(RuntimeError, "body.bias was replaced by another tensor")
    )


def cast_between(scene: Scene) -> list[Tensor]:
    """Cast the model to another dtype between a forward and its backward."""
    graph = loss(scene, 0)
    scene.model.double()
    graph.backward()
    return []


def flat_cast_between(scene: Scene) -> list[Tensor]:
    """Cast the flat parameters by their private name, as accelerate does, between a forward and its backward."""
    graph = loss(scene, 0)
    model: Any = scene.model
    for unit in type(model).fsdp_modules(model):
        if unit._flat_param is not None:
            unit._flat_param.data = unit._flat_param.data.double()
    graph.backward()
    return []


@clause("distributed.fsdp.fsdp_torch_limit_removed.cast_between")
@each_wrapping
@any_of(cast_between, flat_cast_between)
def test_cast_between_forward_and_backward_keeps_gradients_or_is_refused(
    twins: Twins, does: Does, wrapping: Wrapping
) -> None:
    expected, actual = twins.of_both(written, does=does, **wrapping)
    if not raises(RuntimeError)(actual):
        assert_ranks_agree(expected, actual)
