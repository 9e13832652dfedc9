"""Transforms of torch.func and functional_call over sharded models."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap

from conformance.distributed.fsdp.scenes.fsdp_training import zero_for_none
from conformance.distributed.fsdp.scenes.fully_shard_training import full_value
from conformance.distributed.fsdp.scenes.residual_blocks import ResidualBlock, blocks
from conformance.distributed.fsdp.scenes.scene import Scene, tried
from conformance.distributed.fsdp.scenes.twins import PlainTwins, Twins, TwinsOf, each
from conformance.judge.clauses import clause
from conformance.judge.judgement import unavailable
from conformance.judge.surface import is_torch_in

resharded_or_not = pytest.mark.parametrize("reshards", [False, True])
Transform = Callable[[Any, Tensor], Tensor]  # function of a model and its inputs [4, 6]


def _tangents(x: Tensor) -> Tensor:
    return torch.linspace(0.5, 1, x.numel(), dtype=x.dtype, device=x.device).view_as(x)


def _energy(model: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: model(x).square().sum()


def _dual(model: Any, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        output, tangent = forward_ad.unpack_dual(model(forward_ad.make_dual(x, _tangents(x))))
        return output + tangent.square()


def _vjp_and_output(model: Any, x: Tensor) -> Tensor:
    output, pull_back = vjp(model, x)
    return output.square() + pull_back(_tangents(x))[0].square()


# Transforms that call the model with tensors of an outer graph, on which torch puts its hooks.
FORWARD: dict[str, Transform] = {
    "vmap": lambda model, x: vmap(model)(x),
    "vmap of vmap": lambda model, x: vmap(vmap(model))(x.view(2, 2, 6)),
    "jvp": lambda model, x: torch.stack(jvp(model, (x,), (_tangents(x),))),
    "jvp of jvp": lambda model, x: jvp(
        lambda inner: jvp(model, (inner,), (_tangents(x),))[1], (x,), (_tangents(x),)
    )[1],
    "vmap of jvp": lambda model, x: vmap(lambda row: jvp(model, (row,), (_tangents(row),))[1])(x),
    "jacfwd": lambda model, x: jacfwd(model)(x[0]),
}


# Transforms that also differentiate a graph inside the transform.
REVERSE: dict[str, Transform] = {
    "vjp": lambda model, x: vjp(model, x)[1](_tangents(x))[0],
    "vjp and output": _vjp_and_output,
    "grad": lambda model, x: grad(_energy(model))(x),
    "grad of grad": lambda model, x: grad(lambda inner: grad(_energy(model))(inner).square().sum())(x),
    "vmap of grad": lambda model, x: vmap(grad(_energy(model)))(x),
    "grad of vmap": lambda model, x: grad(lambda inner: vmap(model)(inner).square().sum())(x),
    "jvp of grad": lambda model, x: jvp(grad(_energy(model)), (x,), (_tangents(x),))[1],
    "jacrev": lambda model, x: jacrev(model)(x[0]),
    "jacrev of jacrev": lambda model, x: jacrev(jacrev(_energy(model)))(x[0]),
    "hessian": lambda model, x: hessian(_energy(model))(x[0]),
    "output of linearize": lambda model, x: linearize(model, x)[0],
    "dual level": _dual,
}


def _inputs(device: torch.device, differentiable: bool) -> Tensor:
    x = torch.linspace(-1, 1, 24, dtype=torch.float64, device=device).view(4, 6)
    return x.requires_grad_(differentiable)


def _through(model: Any, transform: Transform, x: Tensor) -> dict[str, Any]:
    """Run two backwards, since the first one may leave units in another state."""
    outputs: list[Tensor] = []
    with warnings.catch_warnings(action="ignore"):  # torch's own warning at the first transform in a process
        for _ in range(2):
            output = transform(model, x)
            output.square().sum().backward()
            outputs.append(output.detach())
    return {"outputs": outputs, "of inputs": x.grad}


def through_fully_shard(scene: Scene, name: str, differentiable: bool, reshards: bool) -> dict[str, Any]:
    """Run backwards through a transform of a fully_shard model. Return outputs and gradients."""
    model = blocks(2).to(scene.rank.device)
    scene.shard_children(model, reshard_after_forward=reshards)
    results = _through(model, (FORWARD | REVERSE)[name], _inputs(scene.rank.device, differentiable))
    for block in (*model, model):
        block.reshard()
    # The result does not depend on some parameters, such as the last bias.
    gradients = {key: full_value(zero_for_none(param)) for key, param in model.named_parameters()}
    return results | {"gradients": gradients}


@clause("distributed.fsdp.fully_shard.backward_after_transforms")
@pytest.mark.deviation("fully_shard.backward_after_forward_transforms")
@pytest.mark.parametrize("differentiable", [False, True])
@resharded_or_not
@pytest.mark.parametrize("name", FORWARD)
def test_backward_after_forward_transform_reaches_parameters(
    plain_twins: PlainTwins, name: str, differentiable: bool, reshards: bool
) -> None:
    """torch before 2.13 gives parameters no gradients after `vmap`, and raises an error in `jvp` and `jacfwd`."""
    arguments = {"name": name, "differentiable": differentiable, "reshards": reshards}
    plain_twins.deviate_to_unsharded(through_fully_shard, **arguments)


@clause("distributed.fsdp.fully_shard.backward_after_transforms")
@pytest.mark.deviation("fsdp.backward_after_transforms")
@pytest.mark.parametrize("differentiable", [False, True])
@resharded_or_not
@pytest.mark.parametrize("name", REVERSE)
def test_backward_after_reverse_transform_reaches_parameters(
    plain_twins: PlainTwins, name: str, differentiable: bool, reshards: bool
) -> None:
    """torch ends the process with a segmentation fault, or raises RuntimeError."""
    arguments = {"name": name, "differentiable": differentiable, "reshards": reshards}
    plain_twins.deviate_to_unsharded(through_fully_shard, **arguments, may_fault=True)


def through_flat(scene: Scene, *, name: str, strategy: str, use_orig_params: bool) -> dict[str, Any]:
    """Run backwards through a transform of a wrapped model. Return outputs and gradients."""
    model = blocks(2).to(scene.rank.device)
    wrapping = {"strategy": strategy, "use_orig_params": use_orig_params}
    model = scene.wrap(model, units=[ResidualBlock], **wrapping)
    results = _through(model, (FORWARD | REVERSE)[name], _inputs(scene.rank.device, True))
    return results | {"gradients": scene.whole_gradients(model)}


@clause("distributed.fsdp.fsdp_torch_limit_removed.backward_after_transforms")
@pytest.mark.deviation("fsdp.backward_after_transforms")
@pytest.mark.parametrize(
    ("strategy", "use_orig_params"), [("FULL_SHARD", True), ("FULL_SHARD", False), ("SHARD_GRAD_OP", True)]
)
@pytest.mark.parametrize("name", ["vmap", "grad", "hessian"])
def test_backward_after_transform_reaches_flat_parameters(
    twins: Twins, name: str, strategy: str, use_orig_params: bool
) -> None:
    """torch raises NotImplementedError in `grad` and `hessian`, and an error in a backward after `vmap`."""
    arguments = {"name": name, "strategy": strategy, "use_orig_params": use_orig_params}
    twins.deviate_to_unsharded(through_flat, **arguments, may_agree=twins.is_alone, may_fault=True)


def _gradients(
    loss_of: Callable[[dict[str, Tensor]], Tensor], tensors: dict[str, Tensor], inner_steps: int
) -> dict[str, Tensor | None]:
    """Return the gradients of the loss after `inner_steps` of SGD, by the names in `tensors`."""
    for tensor in tensors.values():
        tensor.requires_grad_()
    fast = dict(tensors)
    for _ in range(inner_steps):
        grads = torch.autograd.grad(loss_of(fast), list(fast.values()), create_graph=True)
        pairs = zip(fast.items(), grads, strict=True)
        fast = {name: tensor - 0.1 * grad for (name, tensor), grad in pairs}
    loss_of(fast).backward()
    return {name: _whole(tensor.grad) for name, tensor in tensors.items()}


def _whole(grad: Tensor | None) -> Tensor | None:
    return None if grad is None else full_value(grad)


def substituted(scene: Scene, how: str, keeps: bool, inner_steps: int) -> dict[str, Any]:
    """Return results of a model with other tensors for its parameters. Only sharded tensors get mean gradients."""
    model: Any = blocks(2).to(scene.rank.device)
    whole = {name: param.detach() * 2 for name, param in model.named_parameters()}
    scene.shard_children(model, reshard_after_forward=not keeps)
    sharded = {name: param.detach() * 2 for name, param in model.named_parameters()}
    tensors = sharded if how == "sharded" else whole

    def loss(rank: int, tensors: dict[str, Tensor]) -> Tensor:
        batch = torch.linspace(-1, 1, 24, dtype=torch.float64, device=scene.rank.device).view(4, 6)
        return functional_call(model, dict(tensors), (batch * (1 + rank),)).square().mean()

    def mean_loss(tensors: dict[str, Tensor]) -> Tensor:
        if how == "sharded":
            return scene.mean(lambda rank: loss(rank, tensors))
        return loss(scene.rank.rank, tensors)

    with torch.no_grad():
        loss(scene.rank.rank, {})  # the root's first forward
        results: dict[str, Any] = {"loss": loss(scene.rank.rank, tensors)}
    results["gradients"] = _gradients(mean_loss, tensors, inner_steps)
    for block in (*model, model):
        block.reshard()
    own_grads = [_whole(param.grad) for param in model.parameters()]
    return results | {"own": [*map(full_value, model.parameters()), *own_grads]}


@clause("distributed.fsdp.fully_shard.functional_call")
@pytest.mark.deviation("fsdp.others_in_their_places")
@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize(("how", "inner_steps"), [("sharded", 0), ("sharded", 1), ("whole", 0), ("whole", 1)])
def test_functional_call_computes_with_given_tensors(
    plain_twins: PlainTwins, how: str, inner_steps: int, keeps: bool
) -> None:
    """torch computes with the model's own parameters, or raises RuntimeError."""
    if how == "sharded" and inner_steps and is_torch_in("<2.13"):
        unavailable("a DTensor has no second derivatives in torch 2.11")
    arguments = {"how": how, "keeps": keeps, "inner_steps": inner_steps}
    plain_twins.deviate_to_unsharded(substituted, **arguments, may_agree=keeps and how == "whole")


def substituted_twice(scene: Scene, reshards: int, differentiates: bool) -> dict[str, Any]:
    """Call a model twice with other tensors of one dictionary, and once with its own.

    Return the outputs, and whether the dictionary still has these tensors.
    """
    model: Any = blocks(2).to(scene.rank.device)
    scene.shard(model[0], reshard_after_forward=reshards)
    scene.shard(model)
    batch = _inputs(scene.rank.device, False)
    with torch.no_grad():
        model(batch)  # the root's first forward
    tensors = {name: param.detach() * 2 for name, param in model.named_parameters()}
    for tensor in tensors.values():
        tensor.requires_grad_(differentiates)
    before = dict(tensors)
    with torch.set_grad_enabled(differentiates):
        if differentiates:
            model(batch)  # a forward without a backward
        outputs = [functional_call(model, tensors, (batch,)).detach() for _ in range(2)]
        outputs.append(model(batch).detach())
    return {"outputs": outputs, "unchanged": [tensors[name] is before[name] for name in before]}


@clause("distributed.fsdp.fully_shard.functional_call")
@pytest.mark.deviation("fsdp.others_in_their_places")
@pytest.mark.parametrize("differentiates", [False, True])
@resharded_or_not
def test_functional_call_leaves_dictionary_unchanged(
    plain_twins: PlainTwins, reshards: bool, differentiates: bool
) -> None:
    """torch computes with the model's own parameters and replaces the tensors in the dictionary."""
    arguments = {"reshards": reshards, "differentiates": differentiates}
    plain_twins.deviate_to_unsharded(substituted_twice, **arguments, may_agree=not reshards)


@clause("distributed.fsdp.fully_shard.functional_call")
@pytest.mark.deviation("fsdp.others_in_their_places")
@pytest.mark.parametrize("differentiates", [False, True])
def test_functional_call_leaves_units_of_fewer_ranks_unchanged(
    plain_twins_of: TwinsOf, device: str, differentiates: bool
) -> None:
    """torch computes with the model's own parameters and replaces the tensors in the dictionary."""
    arguments = {"reshards": 2, "differentiates": differentiates}
    plain_twins_of(4, device).deviate_to_unsharded(substituted_twice, **arguments)


def _linearized_twice(scene: Scene, model: Any) -> list[Tensor]:
    """Return the output and the derivative before and after the parameters were doubled.

    An unsharded model would differentiate with its changed parameters.
    """
    x = _inputs(scene.rank.device, False)
    with warnings.catch_warnings(action="ignore"):  # torch's own warning at the first transform in a process
        output, derivative = linearize(model, x)
    before = derivative(_tangents(x)).detach()
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2)
        doubled = model(x)
    return [output.detach(), before, doubled, derivative(_tangents(x)).detach() if scene.shards else before]


def linearized(scene: Scene, reshards: bool) -> list[Tensor]:
    model = blocks(2).to(scene.rank.device)
    scene.shard_children(model, reshard_after_forward=reshards)
    return _linearized_twice(scene, model)


@clause("distributed.fsdp.fully_shard.linearize")
@pytest.mark.deviation("fsdp.linearize")
@resharded_or_not
def test_linearize_gives_the_derivative_of_unsharded_model(plain_twins: PlainTwins, reshards: bool) -> None:
    """torch raises RuntimeError about a custom Function that returns a view."""
    plain_twins.deviate_to_unsharded(linearized, reshards=reshards)


def linearized_flat(scene: Scene, *, strategy: str) -> list[Tensor]:
    model = blocks(2).to(scene.rank.device)
    model = scene.wrap(model, strategy=strategy, units=[ResidualBlock], use_orig_params=True)
    return _linearized_twice(scene, model)


@clause("distributed.fsdp.fsdp_torch_limit_removed.linearize")
@pytest.mark.deviation("fsdp.linearize")
@pytest.mark.world_sizes(fewest=2)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_linearize_gives_the_derivative_of_flat_model(twins: Twins, strategy: str) -> None:
    """torch raises RuntimeError about a storage of size 0 or about split sizes."""
    twins.deviate_to_unsharded(linearized_flat, strategy=strategy)


class _Hidden:
    """Output type in which no library can find the tensor."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class _Hiding(nn.Linear):
    def forward(self, input: Tensor) -> Any:
        return _Hidden(super().forward(input))


def unseen_gradients(scene: Scene, then: str) -> Any:
    """Return the error of a forward or step after a backward that no hook on outputs has seen."""
    model: Any = _Hiding(6, 6).double().to(scene.rank.device)
    nn.init.ones_(model.weight)
    scene.shard(model, reshard_after_forward=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = _inputs(scene.rank.device, False)
    model(x).tensor.square().sum().backward()
    return tried(lambda: model(x)) if then == "forward" else tried(optimizer.step)


@clause("distributed.fsdp.fully_shard.unseen_gradients")
@pytest.mark.deviation("fully_shard.unseen_gradients")
@pytest.mark.parametrize("then", ["forward", "step"])
def test_gradients_of_unseen_backward_are_an_error(plain_twins: PlainTwins, then: str) -> None:
    plain_twins.deviate(
        unseen_gradients,
        then=then,
        torch_does=each(lambda error: not isinstance(error, str)),
        we_do=each(lambda error: isinstance(error, str) and "RuntimeError: _Hiding" in error),
    )
