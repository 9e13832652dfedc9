"""Cases of backwards through the results of torch.func transforms, for both APIs and without sharding."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap

from conformance.distributed.fsdp.fsdp_cases import gathered_gradients
from conformance.distributed.fsdp.fully_shard_beside_cases import ResidualBlock, blocks
from conformance.distributed.fsdp.fully_shard_cases import full_value
from conformance.distributed.fsdp.fully_shard_construct_cases import Site
from conformance.distributed.fsdp.lab import Lab, tried

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


def without_sharding(device: torch.device, name: str, differentiable: bool) -> dict[str, Any]:
    model = blocks(2).to(device)
    results = _through(model, (FORWARD | REVERSE)[name], _inputs(device, differentiable))
    results["gradients"] = {key: _gradient(param) for key, param in model.named_parameters()}
    return results


def _gradient(param: Tensor) -> Tensor:
    """Return zeros for a parameter that the result does not depend on, such as the last bias."""
    return torch.zeros_like(param) if param.grad is None else param.grad


def through_fully_shard(site: Site, name: str, differentiable: bool, reshards: bool) -> list[dict[str, Any]]:
    """Return the results of a sharded model, and of the same model without sharding."""
    model = blocks(2).to(site.rank.device)
    site.shard_children(model, reshard_after_forward=reshards)
    device = site.rank.device
    results = _through(model, (FORWARD | REVERSE)[name], _inputs(device, differentiable))
    for block in (*model, model):
        block.reshard()
    results["gradients"] = {key: full_value(_gradient(param)) for key, param in model.named_parameters()}
    return [results, without_sharding(device, name, differentiable)]


def through_flat(
    lab: Lab, *, name: str, differentiable: bool, strategy: str, use_orig_params: bool
) -> list[dict[str, Any]]:
    """Return the results of a wrapped model, and of the same model without sharding."""
    device = lab.rank.device
    model = lab.wrap(
        blocks(2).to(device), strategy=strategy, units=[ResidualBlock], use_orig_params=use_orig_params
    )
    results = _through(model, (FORWARD | REVERSE)[name], _inputs(device, differentiable))
    results["gradients"] = gathered_gradients(lab.library, model)
    return [results, without_sharding(device, name, differentiable)]


def _linearized_twice(model: Any, device: torch.device) -> list[Tensor]:
    """Return the output and the derivative before and after the parameters were doubled."""
    x = _inputs(device, False)
    with warnings.catch_warnings(action="ignore"):  # torch's own warning at the first transform in a process
        output, derivative = linearize(model, x)
    before = derivative(_tangents(x))
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2)
        doubled = model(x)
    return [output.detach(), before.detach(), doubled, derivative(_tangents(x)).detach()]


def linearized(site: Site, reshards: bool) -> list[list[Tensor]]:
    """Return results of linearize for a sharded model, and for the same model without sharding."""
    device = site.rank.device
    plain, model = (blocks(2).to(device) for _ in range(2))
    site.shard_children(model, reshard_after_forward=reshards)
    sharded = _linearized_twice(model, device)
    # An unsharded model would differentiate with its changed parameters.
    expected = _linearized_twice(plain, device)
    return [sharded, [*expected[:3], expected[1]]]


def linearized_flat(lab: Lab, *, strategy: str) -> list[list[Tensor]]:
    """Return results of linearize for a wrapped model, and for the same model without sharding."""
    device = lab.rank.device
    model = lab.wrap(blocks(2).to(device), strategy=strategy, units=[ResidualBlock], use_orig_params=True)
    expected = _linearized_twice(blocks(2).to(device), device)
    return [_linearized_twice(model, device), [*expected[:3], expected[1]]]


class _Hidden:
    """Output type in which no library can find the tensor."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class _Hiding(nn.Linear):
    def forward(self, input: Tensor) -> Any:
        return _Hidden(super().forward(input))


def unseen_gradients(site: Site, then: str) -> Any:
    """Return the error of a forward or step after a backward that no hook on outputs has seen."""
    model: Any = _Hiding(6, 6).double().to(site.rank.device)
    nn.init.ones_(model.weight)
    site.shard(model, reshard_after_forward=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = _inputs(site.rank.device, False)
    model(x).tensor.square().sum().backward()
    return tried(lambda: model(x)) if then == "forward" else tried(optimizer.step)
