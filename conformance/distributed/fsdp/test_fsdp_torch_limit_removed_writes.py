"""Writes to parameters and gradients between two calls of a model have the same effect as without sharding."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from conformance.distributed.fsdp.scenes.rank_judging import assert_all_close, assert_ranks_agree
from conformance.distributed.fsdp.scenes.scene import filled
from conformance.distributed.fsdp.scenes.twins import (
    RankOutcomes,
    Twins,
    Wrapping,
    each,
    each_strategy,
    each_wrapping,
    holds,
    raises,
)
from conformance.distributed.fsdp.scenes.written_weights import (
    Does,
    Forked,
    WritingTrainer,
    written,
    written_without_sharding,
)
from conformance.judge.clauses import clause
from conformance.judge.tolerances import ONE_STEP, TRAINED


def any_of(*does: Does) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("does", does, ids=lambda does: does.__name__)


def as_without_sharding(
    does: Does, ranks: int, makes: type[nn.Module] = Forked
) -> Callable[[RankOutcomes], bool]:
    expected = written_without_sharding(does, ranks, makes)

    def assert_same(actual: Any) -> None:
        for key, value in expected.items():
            assert_all_close(key, value, actual[key], ONE_STEP)

    return each(lambda value: holds(assert_same, value))


def exchanged_in_place(trainer: WritingTrainer) -> list[torch.Tensor]:
    """Write other values through `.data`, evaluate, and write the former values through `.data`."""
    parameters = list(trainer.model.parameters())
    former = [parameter.detach().clone() for parameter in parameters]
    for parameter in parameters:
        parameter.data.mul_(0.5)
    outputs = [trainer.output()]
    for parameter, values in zip(parameters, former, strict=True):
        parameter.data.copy_(values)
    return [*outputs, trainer.output()]


def exchanged_after_forward(trainer: WritingTrainer) -> list[torch.Tensor]:
    """Exchange the values in place for an evaluation, after a forward without a backward. Then run a backward."""
    trainer.loss(0)
    outputs = exchanged_in_place(trainer)
    trainer.backward(1)
    trainer.step()
    return [*outputs, trainer.output()]


def exchanged_by_memory(trainer: WritingTrainer) -> list[torch.Tensor]:
    """Assign other memory to `.data`, evaluate, and assign the former memory."""
    parameters = list(trainer.model.parameters())
    outputs = [trainer.output()]
    former = [parameter.data for parameter in parameters]
    for parameter in parameters:
        parameter.data = parameter.data * 0.5
    outputs.append(trainer.output())
    for parameter, values in zip(parameters, former, strict=True):
        parameter.data = values
    return [*outputs, trainer.output()]


def from_a_vector(trainer: WritingTrainer) -> list[torch.Tensor]:
    """Set all parameters with torch.nn.utils' vector functions between two evaluations."""
    outputs = [trainer.output()]
    vector = nn.utils.parameters_to_vector(trainer.model.parameters())
    nn.utils.vector_to_parameters(vector.detach() * 0.5, trainer.model.parameters())
    return [*outputs, trainer.output()]


def memory_while_unsharded(trainer: WritingTrainer) -> list[torch.Tensor]:
    """Assign other memory to `.data` while gradients accumulate and parameters are still unsharded."""
    with trainer.unsynced():
        trainer.backward(0)
    for parameter in trainer.model.parameters():
        parameter.data = parameter.data * 0.5
    trainer.backward(1)
    trainer.step()
    return [trainer.output()]


def stepped_and_cleared(trainer: WritingTrainer) -> list[torch.Tensor]:
    """Step with an optimizer that changes no version counter and clears its gradients.

    The model stays unsharded meanwhile for another backward.
    """
    trainer.backward(0)
    _unused = trainer.loss(1)
    optimizer = torch.optim.SGD(trainer.model.parameters(), 0.25, fused=True)
    optimizer.register_step_post_hook(lambda *_: optimizer.zero_grad())
    optimizer.step()
    return [trainer.output()]


def inferred_first(trainer: WritingTrainer) -> list[torch.Tensor]:
    """Run the first forward in inference mode, and then train."""
    with torch.inference_mode():
        outputs = [trainer.output().clone()]
    trainer.backward(0)
    trainer.step()
    return [*outputs, trainer.output()]


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
    we_do = as_without_sharding(does, twins.world_size)
    twins.deviate(written, does=does, **wrapping, we_do=we_do, may_agree=True)


class Headed(nn.Module):
    """Model whose backward reads the weights of the outermost unit."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Sequential(nn.Linear(3, 4)), nn.Linear(4, 2)
        filled(self)

    def forward(self, x: torch.Tensor, forks: bool = False) -> torch.Tensor:
        del forks
        return self.head(self.inner(x).tanh())


def stepped_between(trainer: WritingTrainer) -> list[torch.Tensor]:
    """Step with an optimizer between a forward and its backward."""
    return _written_between(trainer, trainer.step)


def stepped_between_by_a_fused_one(trainer: WritingTrainer) -> list[torch.Tensor]:
    return _written_between(trainer, lambda: trainer.step(fused=True))


def changed_between(trainer: WritingTrainer) -> list[torch.Tensor]:
    """Change the parameters in place between a forward and its backward."""

    def change() -> None:
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                parameter.mul_(0.5)

    return _written_between(trainer, change)


def memory_between(trainer: WritingTrainer) -> list[torch.Tensor]:
    """Assign other memory to `.data` between a forward and its backward."""

    def change() -> None:
        for parameter in trainer.model.parameters():
            parameter.data = parameter.data * 0.5

    return _written_between(trainer, change)


def _written_between(trainer: WritingTrainer, write: Callable[[], None]) -> list[torch.Tensor]:
    trainer.backward(0)
    loss = trainer.loss(1)
    write()
    loss.backward()
    return []


@clause("distributed.fsdp.fsdp_torch_limit_removed.graphs_of_former_weights")
@pytest.mark.deviation("fsdp.graphs_of_former_weights")
@each_wrapping
@pytest.mark.parametrize("makes", [Headed, Forked], ids=["root", "inner"])
@any_of(
    stepped_between,
    stepped_between_by_a_fused_one,
    changed_between,
    memory_between,
)
def test_backward_with_overwritten_weights_is_refused(
    twins: Twins, does: Does, makes: Any, wrapping: Wrapping
) -> None:
    """The outermost unit stays unsharded from forward to backward, and so do all units if nothing is resharded."""
    is_refused = raises(RuntimeError, "has been modified by an inplace operation")
    twins.deviate(written, does=does, makes=makes, **wrapping, we_do=is_refused, may_agree=True)


def stepped_beside(trainer: WritingTrainer) -> list[torch.Tensor]:
    """Step, between a forward and its backward, parameters that the backward does not read."""
    trainer.backward(0)
    loss = trainer.loss(1)
    trainer.step(of="inner")
    loss.backward()
    trainer.step()
    return [trainer.output()]


@clause("distributed.fsdp.fsdp_torch_limit_removed.graphs_of_former_weights")
@pytest.mark.deviation("fsdp.graphs_of_former_weights")
@each_wrapping
def test_backward_that_does_not_read_written_weights_works(twins: Twins, wrapping: Wrapping) -> None:
    does = stepped_beside
    we_do = as_without_sharding(does, twins.world_size, Headed)
    twins.deviate(written, does=does, makes=Headed, **wrapping, we_do=we_do, may_agree=True)


def given_more_elements(trainer: WritingTrainer) -> list[torch.Tensor]:
    """Assign memory with one more element to `.data` of the parameters of which this rank has elements."""
    for parameter in trainer.model.parameters():
        if parameter.numel() > 0:
            parameter.data = torch.ones(parameter.numel() + 1)
    return [trainer.output()]


def given_one_dimension(trainer: WritingTrainer) -> list[torch.Tensor]:
    """Assign one-dimensional memory with as many elements to `.data`."""
    for parameter in trainer.model.parameters():
        parameter.data = parameter.data.reshape(-1) * 0.5
    return [trainer.output()]


@clause("distributed.fsdp.fully_sharded_data_parallel.writes.shapes")
@each_strategy
@any_of(given_more_elements, given_one_dimension)
def test_memory_of_another_shape(twins: Twins, does: Does, strategy: str) -> None:
    arguments = {"does": does, "strategy": strategy, "use_orig_params": True}
    actual = twins.agree(written, tolerance=TRAINED, may_raise=True, **arguments)
    is_refused = raises(RuntimeError, "Cannot writeback")(actual)
    assert is_refused is (does is given_more_elements)


def zeroed(trainer: WritingTrainer) -> list[torch.Tensor]:
    """Zero averaged gradients together with gradients that are not averaged yet, and run another backward."""
    trainer.backward(0)
    with trainer.unsynced():
        trainer.backward(1)
    trainer.model.zero_grad(set_to_none=False)
    trainer.backward(2)
    trainer.step()
    return [trainer.output()]


def replaced_gradients(trainer: WritingTrainer) -> list[torch.Tensor]:
    """Replace the memory of gradients, once averaged and once not, and accumulate onto it."""
    for context in (contextlib.nullcontext, trainer.unsynced):
        with context():
            trainer.backward(0)
        for parameter in trainer.model.parameters():
            if parameter.grad is not None:
                parameter.grad.data = parameter.grad.data * 0.5
        trainer.backward(1)
        trainer.step()
    return [trainer.output()]


def not_reached(trainer: WritingTrainer) -> list[torch.Tensor]:
    """Run a backward that averages without a unit that took part in an earlier backward in no_sync."""
    with trainer.unsynced():
        trainer.backward(0)
    trainer.backward(1, forks=False)
    trainer.step()
    return [trainer.output()]


def moved(trainer: WritingTrainer) -> list[torch.Tensor]:
    """Move the model to its current device while gradients wait to be averaged."""
    trainer.backward(0)
    with trainer.unsynced():
        trainer.backward(1)
    trainer.model.to(next(trainer.model.parameters()).device)
    trainer.backward(2)
    trainer.step()
    return [trainer.output()]


@clause("distributed.fsdp.fsdp_torch_limit_removed.waiting_gradients")
@pytest.mark.deviation("fsdp.waiting_gradients")
@each_wrapping
@any_of(zeroed, replaced_gradients, not_reached, moved)
def test_gradients_that_wait_are_what_is_shown_of_them(twins: Twins, does: Does, wrapping: Wrapping) -> None:
    we_do = as_without_sharding(does, twins.world_size)
    twins.deviate(written, does=does, **wrapping, we_do=we_do, may_agree=True)


def called_with_others(trainer: WritingTrainer) -> list[torch.Tensor]:
    """Call the model with other parameters by torch.func.functional_call, and then with its own."""
    others = {name: parameter.detach() * 0.5 for name, parameter in trainer.model.named_parameters()}
    with torch.no_grad():
        output = torch.func.functional_call(trainer.model, others, (torch.ones(1, 3), True))
    return [output, trainer.output()]


@clause("distributed.fsdp.fsdp_torch_limit_removed.others_in_their_places")
@pytest.mark.deviation("fsdp.others_in_their_places")
@each_wrapping
def test_call_with_other_parameters_is_refused(twins: Twins, wrapping: Wrapping) -> None:
    is_refused = raises(RuntimeError, "was replaced by another tensor")
    twins.deviate(written, does=called_with_others, **wrapping, we_do=is_refused)


def given_a_parameter(trainer: WritingTrainer) -> list[torch.Tensor]:
    """Replace a parameter by another one."""
    inner: Any = trainer.model
    inner.body.bias = nn.Parameter(torch.full((4,), 3.0))
    return [trainer.output()]


@clause("distributed.fsdp.fsdp_torch_limit_removed.others_in_their_places")
@pytest.mark.deviation("fsdp.others_in_their_places")
@each_strategy
def test_replaced_parameter_is_refused(twins: Twins, strategy: str) -> None:
    arguments = {"does": given_a_parameter, "strategy": strategy, "use_orig_params": False}
    twins.deviate(
        written, **arguments, we_do=raises(RuntimeError, "body.bias was replaced by another tensor")
    )


def cast_between(trainer: WritingTrainer) -> list[torch.Tensor]:
    """Cast the model to another dtype between a forward and its backward."""
    loss = trainer.loss(0)
    trainer.model.double()
    loss.backward()
    return []


def flat_cast_between(trainer: WritingTrainer) -> list[torch.Tensor]:
    """Cast the flat parameters by their private name, as accelerate does, between a forward and its backward."""
    loss = trainer.loss(0)
    model: Any = trainer.model
    for unit in type(model).fsdp_modules(model):
        if unit._flat_param is not None:
            unit._flat_param.data = unit._flat_param.data.double()
    loss.backward()
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
