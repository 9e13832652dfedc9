"""Writes to parameters and gradients between two calls of a model have the same effect as without sharding."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conformance.distributed.fsdp.scenes.forked_model import Does, backward, loss, output, run_sharded, step
from conformance.distributed.fsdp.scenes.scene import Scene
from conformance.distributed.fsdp.scenes.twins import Twins, Wrapping, each_strategy, each_wrapping, raises
from conformance.judge.clauses import clause
from conformance.judge.tolerances import TRAINED


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
@pytest.mark.parametrize(
    "does",
    [
        exchanged_in_place,
        exchanged_after_forward,
        exchanged_by_memory,
        from_a_vector,
        memory_while_unsharded,
        stepped_and_cleared,
        inferred_first,
    ],
)
def test_written_values_are_used_in_computation(twins: Twins, does: Does, wrapping: Wrapping) -> None:
    """torch computes with old values, overwrites assigned memory, or raises an error in the next backward."""
    twins.deviate_to_unsharded(run_sharded, does=does, **wrapping, may_agree=True)


def stepped_after_evaluation(scene: Scene, *, fused: bool) -> list[Tensor]:
    """Step twice, the second time after an evaluation that follows the backward."""
    backward(scene, 0)
    step(scene, fused=fused)
    outputs = [output(scene)]
    backward(scene, 1)
    outputs.append(output(scene))
    step(scene, fused=fused)
    return [*outputs, output(scene)]


@clause("distributed.fsdp.fsdp_torch_limit_removed.steps_are_seen")
@pytest.mark.deviation("fsdp.step_after_evaluation")
@pytest.mark.parametrize("fused", [False, True])
def test_forward_uses_step_after_evaluation(cpu_twins: Twins, fused: bool) -> None:
    """torch's fused updates write to parameters without moving their version counters."""
    does = partial(stepped_after_evaluation, fused=fused)
    arguments = {"does": does, "strategy": "FULL_SHARD", "use_orig_params": False}
    cpu_twins.deviate_to_unsharded(run_sharded, **arguments, may_agree=cpu_twins.is_alone)


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
@pytest.mark.parametrize("does", [given_more_elements, given_one_dimension])
def test_assigned_memory_needs_same_number_of_elements(twins: Twins, does: Does, strategy: str) -> None:
    arguments = {"does": does, "strategy": strategy, "use_orig_params": True}
    actual = twins.agree(run_sharded, tolerance=TRAINED, may_raise=True, **arguments)
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
@pytest.mark.parametrize("does", [zeroed, replaced_gradients, not_reached, moved])
def test_unreduced_gradients_follow_changes_of_grad(twins: Twins, does: Does, wrapping: Wrapping) -> None:
    """torch steps with gradients that were zeroed or never averaged, or raises an error."""
    twins.deviate_to_unsharded(run_sharded, does=does, **wrapping, may_agree=True)


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
    """torch ignores the other parameters, or with use_orig_params overwrites the model's own with them."""
    is_refused = raises(RuntimeError, "was replaced by another tensor")
    twins.deviate(run_sharded, does=called_with_others, **wrapping, we_do=is_refused)


def given_a_parameter(scene: Scene) -> list[Tensor]:
    """Replace a parameter by another one."""
    inner: Any = scene.model
    inner.body.bias = nn.Parameter(torch.full((4,), 3.0))
    return [output(scene)]


@clause("distributed.fsdp.fsdp_torch_limit_removed.others_in_their_places")
@pytest.mark.deviation("fsdp.others_in_their_places")
@each_strategy
def test_replaced_parameter_is_refused(twins: Twins, strategy: str) -> None:
    """torch ignores the new parameter and computes with the old one."""
    arguments = {"does": given_a_parameter, "strategy": strategy, "use_orig_params": False}
    twins.deviate(
        run_sharded, **arguments, we_do=raises(RuntimeError, "body.bias was replaced by another tensor")
    )
