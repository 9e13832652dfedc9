"""fully_shard with other features: reductions, compiled blocks, transforms, chunked losses, replicas."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.tensor import Shard

from conformance.distributed.fsdp.scenes.fully_shard_calls import ReportingAllGather, ReportingReduceScatter
from conformance.distributed.fsdp.scenes.fully_shard_training import (
    full_parameters,
    full_value,
    registered,
    values_and_gradients,
)
from conformance.distributed.fsdp.scenes.residual_blocks import batch_of, blocks
from conformance.distributed.fsdp.scenes.scene import Scene, tried
from conformance.distributed.fsdp.scenes.twins import PlainTwins, raises
from conformance.judge.clauses import clause


def hooked(scene: Scene, dtype: torch.dtype, sums_alone: bool, own: bool) -> dict[str, Any]:
    """Return what a hook on reduced gradients gets, and the gradient after the hook clamped it.

    If `own`, a user-defined reduce-scatter also records its inputs.
    """
    model = nn.Linear(3, 2, bias=False).to(scene.rank.device, dtype)
    nn.init.ones_(model.weight)
    sharded = scene.shard(model)
    inputs: list[Any] = []

    def clamp(reduced: torch.Tensor) -> None:
        inputs.append(reduced.cpu())
        reduced.clamp_(max=2.0)

    sharded.set_all_reduce_hook(clamp)
    if own:
        sharded.set_custom_reduce_scatter(ReportingReduceScatter(inputs.append))
    if sums_alone:
        sharded.set_force_sum_reduction_for_comms(True)
    batch = torch.arange(1.0, 4.0, device=scene.rank.device, dtype=dtype) + scene.rank.rank
    sharded(batch).sum().backward()
    return {"given": inputs, "gradient": sharded.weight.grad.full_tensor().cpu()}


@clause("distributed.fsdp.fully_shard.reduction")
@pytest.mark.world_sizes(fewest=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sums_alone", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_hooks_and_user_communication_get_same_inputs_as_in_torch(
    plain_twins: PlainTwins, dtype: torch.dtype, sums_alone: bool, own: bool
) -> None:
    plain_twins.agree(hooked, dtype=dtype, sums_alone=sums_alone, own=own)


class _KeepingAllGather(ReportingAllGather):
    """All-gather that reports a copy of its input."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.full(size, 1e30, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> Any:
        self._report([input_tensor.clone()])
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


def gather_by_user(scene: Scene) -> list[Any]:
    """Return the output, and the inputs of a user-defined all-gather.

    The last rank has fewer rows of the parameters.
    """
    layer: Any = nn.Linear(4, 5).to(scene.rank.device)
    for parameter in layer.parameters():
        nn.init.ones_(parameter)
    inputs: list[Any] = []
    scene.shard(layer).set_custom_all_gather(_KeepingAllGather(inputs.extend))
    return [layer(torch.ones(1, 4, device=scene.rank.device)).detach(), *inputs]


@clause("distributed.fsdp.fully_shard.reduction")
@pytest.mark.world_sizes(fewest=2)
def test_user_all_gather_gets_same_inputs_as_in_torch(plain_twins: PlainTwins) -> None:
    plain_twins.agree(gather_by_user)


class _Partly(nn.Module):
    """Module with a parameter that has no elements, and a weight if `has_weight`."""

    def __init__(self, shape: tuple[int, ...], has_weight: bool) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.empty(shape))
        self.weight = nn.Parameter(torch.ones(4, 4)) if has_weight else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x if self.weight is None else x @ self.weight) + self.empty.sum()


def train_without_elements(scene: Scene, shape: tuple[int, ...], dim: int, has_weight: bool) -> list[Any]:
    """Train a unit with an empty parameter and its root for two steps.

    Return the shapes of its gradients and the parameters.
    """
    model: Any = nn.Sequential(_Partly(shape, has_weight), nn.Linear(4, 1, bias=False)).to(scene.rank.device)
    nn.init.ones_(model[1].weight)
    scene.shard(model[0], shard_placement_fn=lambda parameter: Shard(dim))
    scene.shard(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.125)
    shapes = []
    for _ in range(2):
        model(torch.ones(1, 4, device=scene.rank.device)).sum().backward()
        shapes.append(tuple(full_value(model[0].empty.grad).shape))
        optimizer.step()
        optimizer.zero_grad()
    return [shapes, full_parameters(model)]


@clause("distributed.fsdp.fully_shard.without_elements")
@pytest.mark.deviation("fsdp.without_elements")
@pytest.mark.parametrize("has_weight", [True, False])
@pytest.mark.parametrize(("shape", "dim"), [((0, 4), 0), ((4, 0), 0), ((0, 4), 1)])
def test_parameter_without_elements_trains(
    plain_twins: PlainTwins, shape: tuple[int, ...], dim: int, has_weight: bool
) -> None:
    arguments = {"shape": shape, "dim": dim, "has_weight": has_weight}
    words = (RuntimeError, "_chunk_cat") if dim == 0 else (AssertionError, "requires even sharding")
    plain_twins.deviate_to_unsharded(train_without_elements, torch_does=raises(*words), **arguments)


def compiled(scene: Scene, how: str) -> dict[str, Any]:
    """Train with blocks that are compiled before they are sharded, in place or by a compiled wrapper."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = blocks()
    for name, block in list(model.named_children()):
        if how == "in place":
            block.compile(backend="aot_eager")
        else:
            block = torch.compile(block, backend="aot_eager", fullgraph=True)  # noqa: PLW2901
            model.register_module(name, block)
        scene.shard(block)
    scene.shard(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for number in range(3):
        loss = model(batch_of(scene, number)).square().mean()
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return {"losses": losses, "held": values_and_gradients(model), "compiles": graphs > 0}


@clause("distributed.fsdp.fully_shard.compiled_blocks")
@pytest.mark.parametrize("how", ["in place", "wrapped"])
def test_compiled_blocks_train_like_torch(plain_twins: PlainTwins, how: str) -> None:
    assert all(outcome.value["compiles"] for outcome in plain_twins.agree(compiled, how=how))


def transformed(scene: Scene, how: str) -> dict[str, Any]:
    """Return the result of a torch.func transform of a model that was never called before, and of a later backward."""
    model = blocks(2)
    scene.shard_children(model)
    batch = batch_of(scene, 0)
    with warnings.catch_warnings(action="ignore"):  # torch's own warning at the first use in a process
        torch.func.jvp(torch.sin, (batch,), (batch,))
    if how == "vjp":
        result = torch.func.vjp(model, batch)[1](torch.ones_like(batch))[0]
    elif how == "jvp":
        result = torch.func.jvp(model, (batch,), (torch.ones_like(batch),))[1]
    else:
        result = torch.func.grad(lambda inputs: model(inputs).square().sum())(batch)
    model(batch).sum().backward()
    return {"made": result.detach(), "held": values_and_gradients(model)}


@clause("distributed.fsdp.fully_shard.transforms")
@pytest.mark.parametrize("how", ["vjp", "jvp", "grad"])
def test_transforms_differentiate_sharded_model(plain_twins: PlainTwins, how: str) -> None:
    plain_twins.agree(transformed, how=how)


class _Headed(nn.Module):
    """Model whose forward leaves the head to the loss function."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = blocks(2), nn.LayerNorm(6).double(), nn.Linear(6, 6).double()
        with torch.no_grad():
            self.head.weight.copy_(torch.linspace(-1, 1, 36, dtype=torch.float64).view(6, 6))
            self.head.bias.fill_(0.25)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.body(x))


def _headed(scene: Scene) -> Any:
    model = _Headed()
    for block in model.body:
        scene.shard(block)
    scene.shard([model.norm, model.head])
    return scene.shard(model)


def train_with_chunked_loss(scene: Scene, keeps: bool) -> dict[str, Any]:
    """Train with a chunked loss: after a forward, the head runs forward and backward for two rows at a time.

    An evaluation of model and head comes first.

    Args:
        keeps: whether the head is unsharded once for all chunks and reduces its gradients with the last chunk.
    """
    model = _headed(scene)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    result: dict[str, Any] = {"losses": [], "held": []}
    with torch.no_grad():
        result["evaluated"] = model.head(model(batch_of(scene, 9)))
    for number in range(2):
        hidden = model(batch_of(scene, number))
        chunks = [chunk.requires_grad_() for chunk in hidden.detach().split(2)]
        if keeps:
            model.head.set_reshard_after_forward(False)
            model.head.set_reshard_after_backward(False)
            model.head.unshard()
        for index, chunk in enumerate(chunks):
            if keeps:
                model.head.set_requires_gradient_sync(index == len(chunks) - 1, recurse=False)
            loss = model.head(chunk).square().sum()
            loss.backward()
            result["losses"].append(loss.detach())
        if keeps:
            model.head.set_reshard_after_forward(True)
            model.head.set_reshard_after_backward(True)
            model.head.reshard()
        hidden.backward(torch.cat([chunk.grad for chunk in chunks]))
        result["held"].append(values_and_gradients(model))
        optimizer.step()
        optimizer.zero_grad()
    return result


@clause("distributed.fsdp.fully_shard.loss_in_chunks")
@pytest.mark.parametrize("keeps", [False, True])
def test_chunked_loss_trains_like_torch(plain_twins: PlainTwins, keeps: bool) -> None:
    plain_twins.agree(train_with_chunked_loss, keeps=keeps)


def evaluated_again(scene: Scene) -> torch.Tensor:
    """Evaluate with inputs on the CPU, after an evaluation that called the head separately."""
    model = _headed(scene)
    with torch.no_grad():
        model.head(model(batch_of(scene, 0)))
        return model(batch_of(scene, 1).cpu()).cpu()


@clause("distributed.fsdp.fully_shard.loss_in_chunks")
@pytest.mark.deviation("fully_shard.root_behind_a_part")
def test_root_moves_inputs_after_call_of_submodule(plain_twins: PlainTwins) -> None:
    plain_twins.deviate_to_unsharded(
        evaluated_again,
        torch_does=raises(RuntimeError, "Expected all tensors to be on the same device"),
        may_agree=True,  # torch agrees if the inputs are on the CPU
    )


def unit_called_directly(scene: Scene) -> dict[str, Any]:
    """Train the model, then a unit that does not call the head of its group, and the model again."""
    unit = _headed(scene)
    model = scene.shard(nn.Sequential(unit))
    for number, called in enumerate([model, unit, model]):
        called(batch_of(scene, number)).square().sum().backward()
    return values_and_gradients(model)


@clause("distributed.fsdp.fully_shard.units_called_directly")
def test_unit_called_without_head_of_its_group_trains(plain_twins: PlainTwins) -> None:
    plain_twins.agree(unit_called_directly)


def replicated(scene: Scene) -> dict[str, Any]:
    """Train with one part sharded and the model around it replicated.

    Also return the error of replicating that part.
    """
    first = scene.shard(scene.model.body.parts[0], reshard_after_forward=True)
    refused = tried(lambda: replicate(first))
    replicate(scene.model.to(scene.rank.device))
    return {"refused": refused.partition(" but ")[0], **scene.train(), "registered": registered(scene.model)}


@clause("distributed.fsdp.fully_shard.replicated")
def test_model_around_units_is_replicated(plain_twins: PlainTwins) -> None:
    plain_twins.agree(replicated)


def trained_as_two_models(
    scene: Scene, prefetches: str, evaluates: bool, steps_in_between: bool = False
) -> list[Any]:
    """Return the parameters of two models after three steps. One model prefetches a layer of the other.

    Args:
        evaluates: both models have run before the first prefetch.
        steps_in_between: the second model is trained alone first, after the first one has prefetched its layer.
    """
    batch = torch.linspace(-1, 1, 24, dtype=torch.float64, device=scene.rank.device).view(4, 6)
    first, second = (blocks().to(scene.rank.device) for _ in range(2))
    for model in (first, second):
        for layer in model:
            scene.shard(layer)
        scene.shard(model)
        if evaluates:
            with torch.no_grad():
                model(batch)
    if prefetches == "forward":
        first[-1].set_modules_to_forward_prefetch([second[0]])
    else:
        second[0].set_modules_to_backward_prefetch([first[-1]])
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], 0.25)
    for _ in range(3):
        if steps_in_between:
            scene.mean(lambda rank: second(batch + rank).square().mean()).backward()
            first(batch)
            if scene.shards and scene.rank.device.type != "cpu":
                # The prefetch, whose values are not used, reads what the step writes.
                torch.accelerator.synchronize()
            optimizer.step()
            optimizer.zero_grad()
        scene.mean(lambda rank: second(first(batch + rank)).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [full_parameters(first), full_parameters(second)]


@clause("distributed.fsdp.fully_shard.prefetched_by_another_model")
@pytest.mark.deviation("fully_shard.prefetched_by_another_model")
@pytest.mark.parametrize(
    ("prefetches", "evaluates"), [("forward", False), ("forward", True), ("backward", False)]
)
def test_layer_of_another_model_is_prefetched_with_current_values(
    plain_twins: PlainTwins, prefetches: str, evaluates: bool
) -> None:
    """torch fails if the other model has not run. After that, whether it reads old values depends on the device."""
    fails_in_torch = prefetches == "forward" and not evaluates and not plain_twins.is_alone
    plain_twins.deviate_to_unsharded(
        trained_as_two_models, prefetches=prefetches, evaluates=evaluates, may_agree=not fails_in_torch
    )


@clause("distributed.fsdp.fully_shard.prefetched_by_another_model")
@pytest.mark.deviation("fully_shard.prefetched_by_another_model")
@pytest.mark.world_sizes(fewest=2)
def test_step_between_prefetch_and_use_is_seen(plain_twins: PlainTwins) -> None:
    """torch computes with the prefetched values from before the step."""
    plain_twins.deviate_to_unsharded(
        trained_as_two_models, prefetches="forward", evaluates=True, steps_in_between=True, may_agree=True
    )
