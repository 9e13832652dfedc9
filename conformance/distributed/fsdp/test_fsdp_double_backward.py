"""Double backward: gradients of inputs can be differentiated, and differentiating gradients of parameters raises."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from conformance.distributed.fsdp.scenes.fully_shard_training import full_parameters
from conformance.distributed.fsdp.scenes.scene import Scene, filled
from conformance.distributed.fsdp.scenes.twins import Twins, both_kinds, raises
from conformance.judge.clauses import clause


@dataclass(frozen=True)
class Penalty:
    """Penalty on the norm of an input's gradient, or of a gradient of higher order."""

    order: int = 1  # order of the gradient
    # Number of inputs. Each has its own forward, and all forwards run before the first gradient is computed.
    inputs: int = 1
    adds_loss: bool = False  # whether the loss of a last forward is added

    def loss(self, model: nn.Module, rank: int) -> torch.Tensor:
        values = torch.linspace(0, 1, 6).view(2, 3) - rank * 0.25
        inputs = [(values / (1 + number)).requires_grad_() for number in range(self.inputs)]
        outputs = [model(x).sum() for x in inputs]
        gradients = [self._gradient(output, x) for output, x in zip(outputs, inputs, strict=True)]
        penalty = torch.stack([(gradient.norm() - 1).square() for gradient in gradients]).sum()
        return penalty + model(2 * inputs[0]).square().mean() if self.adds_loss else penalty

    def _gradient(self, output: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        (gradient,) = torch.autograd.grad(output, x, create_graph=True)
        for _ in range(self.order - 1):
            (gradient,) = torch.autograd.grad(gradient.square().sum(), x, create_graph=True)
        return gradient


ONCE, WITH_A_LOSS = Penalty(), Penalty(adds_loss=True)


def built(freezes: bool) -> nn.Sequential:
    """Build a model whose inner unit has several layers, so that second derivatives pass through each of them."""
    layers = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh())
    model = filled(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), layers, nn.Linear(4, 2)))
    layers.requires_grad_(not freezes)
    return model


def _wrapped(
    scene: Scene, *, strategy: str = "FULL_SHARD", use_orig_params: bool = True, freezes: bool = False
) -> Any:
    """Wrap the model and its inner unit, which may be frozen."""
    model, arguments = built(freezes), {"strategy": strategy, "use_orig_params": use_orig_params}
    model[2] = scene.wrap(model[2], **arguments)
    return scene.wrap(model, **arguments)


def penalized(scene: Scene, *, penalty: Penalty, **wrapping: Any) -> dict[str, torch.Tensor]:
    """Run steps with a penalty on gradients of inputs. Return the full gradients."""
    model = _wrapped(scene, **wrapping)
    for _ in range(2):
        scene.mean(lambda rank: penalty.loss(model, rank)).backward()
    return scene.whole_gradients(model)


@clause("distributed.fsdp.fsdp_torch_limit_removed.gradient_penalty")
@pytest.mark.deviation("fsdp.gradient_penalty")
@both_kinds
@pytest.mark.parametrize(
    ("strategy", "freezes", "penalty"),
    [
        ("FULL_SHARD", False, ONCE),
        ("FULL_SHARD", True, WITH_A_LOSS),
        ("FULL_SHARD", False, Penalty(order=2)),
        ("FULL_SHARD", True, Penalty(order=3, inputs=2)),
        ("SHARD_GRAD_OP", False, ONCE),
        ("SHARD_GRAD_OP", False, Penalty(order=2, inputs=2)),
        ("NO_SHARD", False, ONCE),
    ],
)
def test_gradient_of_input_can_be_differentiated(
    cpu_twins: Twins, strategy: str, use_orig_params: bool, freezes: bool, penalty: Penalty
) -> None:
    """torch raises RuntimeError about a storage of size 0, or with NO_SHARD has wrong or no gradients."""
    cpu_twins.deviate_to_unsharded(
        penalized,
        strategy=strategy,
        use_orig_params=use_orig_params,
        freezes=freezes,
        penalty=penalty,
        may_agree=cpu_twins.is_alone,
    )


def directional_derivatives(scene: Scene, *, strategy: str) -> list[torch.Tensor]:
    """Return derivatives of the outputs in a direction, each computed from two gradients.

    All steps start the first gradient with the same leaf, `weights`.
    """
    model = _wrapped(scene, strategy=strategy)
    weights = torch.ones(2, 2, requires_grad=True)
    derivatives = []
    for _ in range(5):
        x = torch.linspace(-1, 1, 6).view(2, 3).requires_grad_()
        (gradient,) = torch.autograd.grad(model(x), x, weights, create_graph=True)
        (derivative,) = torch.autograd.grad(gradient, weights, torch.ones(2, 3))
        derivatives.append(derivative)
    assert len(weights._backward_hooks or ()) <= 2, "each step has left its hooks on a tensor of the user's"
    return derivatives


@clause("distributed.fsdp.fsdp_torch_limit_removed.gradient_penalty")
@pytest.mark.deviation("fsdp.gradient_penalty")
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_leaf_that_starts_gradients_may_be_kept(cpu_twins: Twins, strategy: str) -> None:
    """torch raises RuntimeError about a storage of size 0 if parameters are sharded."""
    may_agree = cpu_twins.is_alone
    cpu_twins.deviate_to_unsharded(directional_derivatives, strategy=strategy, may_agree=may_agree)


def input_used_elsewhere(scene: Scene) -> torch.Tensor:
    """Run a double backward of an unsharded model on rank 0 only, with an input that the sharded model has used."""
    model, x = _wrapped(scene), torch.linspace(-1, 1, 6).view(2, 3).requires_grad_()
    model(x).sum().backward()
    if scene.rank.rank == 0:
        (gradient,) = torch.autograd.grad(built(freezes=False)(x).sum(), x, create_graph=True)
        gradient.square().sum().backward()
    return model(x).detach()


@clause("distributed.fsdp.fsdp_torch_limit_removed.gradient_penalty")
def test_input_may_be_used_elsewhere_on_one_rank(cpu_twins: Twins) -> None:
    cpu_twins.agree_with_unsharded(input_used_elsewhere)


class Forces(nn.Module):
    """A model whose forward returns the negative gradient of an energy, scaled by a parameter of the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 1)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        energy = self.last(torch.tanh(self.first(x))).sum()
        (gradient,) = torch.autograd.grad(energy, x, create_graph=True)
        return -gradient * self.scale


def forces_differentiated(scene: Scene, *, strategy: str, use_orig_params: bool) -> dict[str, torch.Tensor]:
    """Differentiate the mean square of forces twice. Return the full gradients."""
    model, arguments = filled(Forces()), {"strategy": strategy, "use_orig_params": use_orig_params}
    model.first, model.last = (scene.wrap(part, **arguments) for part in (model.first, model.last))
    model = scene.wrap(model, **arguments)
    values = torch.linspace(0, 1, 6).view(2, 3)
    for _ in range(2):
        scene.mean(lambda rank: model(values - rank * 0.25).square().mean()).backward()
    return scene.whole_gradients(model)


@clause("distributed.fsdp.fully_sharded_data_parallel.gradients_in_forward")
@both_kinds
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_forward_may_compute_gradients_of_inner_units(
    cpu_twins: Twins, strategy: str, use_orig_params: bool
) -> None:
    cpu_twins.agree_with_unsharded(forces_differentiated, strategy=strategy, use_orig_params=use_orig_params)


class Descent(nn.Module):
    """A model whose forward takes a step down the gradient of an energy at its input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        energy = self.last(torch.tanh(self.first(x))).square().sum()
        (gradient,) = torch.autograd.grad(energy, x, create_graph=True)
        return x - 0.25 * gradient


def rolled_out(scene: Scene, *, api: str, has_units: bool) -> dict[str, torch.Tensor]:
    """Give the model its own output as input, and differentiate the last output. Return full parameters after steps."""
    model: Any = filled(Descent())
    shard = scene.shard if api == "fully_shard" else functools.partial(scene.wrap, use_orig_params=True)
    if has_units:
        model.first, model.last = shard(model.first), shard(model.last)
    model = shard(model)

    def loss(rank: int) -> torch.Tensor:
        x = torch.linspace(0, 1, 6).view(2, 3).sub(rank * 0.25).requires_grad_()
        for _ in range(3):
            x = model(x)
        return x.square().mean()

    optimizer = torch.optim.SGD(model.parameters(), 0.25)
    for _ in range(2):
        scene.mean(loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    return full_parameters(model) if api == "fully_shard" else scene.whole_parameters(model)


@clause("distributed.fsdp.fully_sharded_data_parallel.gradients_in_forward")
@pytest.mark.deviation("fsdp.gradient_of_earlier_output")
@pytest.mark.parametrize("has_units", [False, True])
@pytest.mark.parametrize("api", ["FSDP1", "fully_shard"])
def test_forward_may_compute_gradient_of_own_output(cpu_twins: Twins, api: str, has_units: bool) -> None:
    """torch raises ValueError with FullyShardedDataParallel, and RuntimeError if fully_shard has inner units."""
    cpu_twins.deviate_to_unsharded(rolled_out, api=api, has_units=has_units, may_agree=True)


def gradients_with_a_graph(scene: Scene, *, use_orig_params: bool) -> None:
    """Run a backward with `create_graph=True`, which asks for differentiable gradients of the parameters."""
    model = _wrapped(scene, use_orig_params=use_orig_params)
    model(torch.ones(1, 3) * scene.rank.rank).sum().backward(create_graph=True)


@clause("distributed.fsdp.fully_sharded_data_parallel.gradients_of_gradients")
@both_kinds
def test_gradients_of_parameters_cannot_be_differentiated(cpu_twins: Twins, use_orig_params: bool) -> None:
    outcomes = cpu_twins.of_subject(gradients_with_a_graph, use_orig_params=use_orig_params)
    assert raises(RuntimeError, "FSDP does not support gradients of gradients")(outcomes), outcomes
