"""User hooks on modules and tensors, and communication hooks that replace the reduction."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._comm_hooks import default_hooks

from conformance.distributed.fsdp.scenes.fsdp_training import Setup, clean
from conformance.distributed.fsdp.scenes.module_trees import loss_of, out_of_form
from conformance.distributed.fsdp.scenes.rank_judging import assert_all_close, unsharded_gradients
from conformance.distributed.fsdp.scenes.scene import TREE, Scene, tried
from conformance.distributed.fsdp.scenes.twins import (
    FLAT,
    Twins,
    TwinsOf,
    Wrapping,
    both_kinds,
    each,
    each_strategy,
    each_wrapping,
    leaf_by_leaf,
)
from conformance.judge.clauses import clause
from conformance.judge.tolerances import Tolerance

LOW = {"fp16_compress_hook": torch.float16, "bf16_compress_hook": torch.bfloat16}


def hooks_of_modules(scene: Scene, *, on: str) -> dict[str, Any]:
    """Register every type of module hook on the root, on a unit, or on the module that a unit wraps."""
    module = {"root": scene.model, "unit": scene.units[1], "wrapped": scene.units[1].module}[on]
    events: list[Any] = []

    def note(kind: str) -> Any:
        def hook(_: Any, *arguments: Any) -> None:
            weight = tuple(module.inner.weight.shape) if on == "wrapped" else None
            events.append([kind, _described(arguments), weight])

        return hook

    module.register_forward_pre_hook(note("forward pre"))
    module.register_forward_hook(note("forward"))
    module.register_full_backward_pre_hook(note("backward pre"))
    module.register_full_backward_hook(note("backward"))
    scene.backward()
    return {"events": events, "whole": scene.whole_gradients()}


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return [tuple(value.shape), str(value.dtype)]
    if isinstance(value, (tuple, list)):
        return [_described(item) for item in value]
    return type(value).__name__


@clause("distributed.fsdp.fully_sharded_data_parallel.hooks.modules")
@pytest.mark.parametrize("on", ["root", "unit", "wrapped"])
@each_wrapping
def test_hooks_of_modules_run_as_with_torch(twins: Twins, wrapping: Wrapping, on: str) -> None:
    twins.agree(hooks_of_modules, leaf_by_leaf(**wrapping), on=on)


def hooks_that_change(scene: Scene) -> dict[str, Any]:
    """Register hooks that replace inputs, outputs and gradients."""
    unit = scene.units[1]
    unit.register_forward_pre_hook(lambda _, args: (args[0] * 2.0,))
    unit.register_forward_hook(lambda *arguments: arguments[2] * 0.5)
    unit.register_full_backward_hook(
        lambda _, inputs, __: tuple(grad if grad is None else grad * 3.0 for grad in inputs)
    )
    loss = scene.backward()
    return {"loss": loss, "whole": scene.whole_gradients()}


@clause("distributed.fsdp.fully_sharded_data_parallel.hooks.modules")
@each_strategy
def test_results_of_module_hooks_are_used(twins: Twins, strategy: str) -> None:
    twins.agree(hooks_that_change, leaf_by_leaf(strategy))


def hooks_of_tensors(scene: Scene) -> dict[str, Any]:
    """Register hooks on the input tensor and on the output tensor."""
    events: list[Any] = []
    batch = scene.batch()
    batch.x.register_hook(lambda grad: events.append(["input", tuple(grad.shape)]) or grad * 2)
    output = out_of_form(scene.model(batch.x, ids=batch.ids))
    output.register_hook(lambda grad: events.append(["output", tuple(grad.shape)]))
    # A plain sum after batch statistics would be the same for all inputs.
    loss_of(output).backward()
    return {"events": events, "input gradient": batch.x.grad}


@clause("distributed.fsdp.fully_sharded_data_parallel.hooks.tensors")
@each_wrapping
def test_hooks_of_tensors_run_as_with_torch(twins: Twins, wrapping: Wrapping) -> None:
    twins.agree(hooks_of_tensors, leaf_by_leaf(**wrapping))


def hooks_of_parameters(scene: Scene) -> list[str]:
    """Register hooks on the parameters of which this rank has elements."""
    events: list[str] = []
    for name, parameter in scene.model.named_parameters():
        if parameter.numel():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: events.append(clean(name)))
    scene.backward()
    return sorted(events)


@clause("distributed.fsdp.fully_sharded_data_parallel.hooks.parameters")
@each_strategy
def test_hooks_of_parameters_run_as_with_torch(twins: Twins, strategy: str) -> None:
    assert all(outcome.value for outcome in twins.agree(hooks_of_parameters, leaf_by_leaf(strategy)))


def hooks_on_gradients(scene: Scene, *, no_sync: bool, before: bool = False) -> dict[str, Any]:
    """Return the shapes that gradient hooks get and those of `.grad`, and whether the hooks tripled the gradients.

    Args:
        before: register the hooks before wrapping, and remove some of them afterwards.
    """
    plain = _accumulated(scene, no_sync=no_sync)
    hooked = Scene(scene.rank, scene.library, scene.setup, scene.tree)
    shapes: list[Any] = []
    removed: list[Any] = []
    for name, parameter in (hooked.plain if before else hooked.model).named_parameters():
        if parameter.numel():
            parameter.register_hook(_tripling(shapes, clean(name)))
            removed.append(parameter.register_hook(_tripling(shapes, clean(name))))
    model = hooked.model
    for hook in removed:
        hook.remove()
    whole = _accumulated(hooked, no_sync=no_sync)
    are_tripled = [torch.allclose(whole[name], 3 * plain[name]) for name in plain]
    return {
        "shapes": sorted(shapes),
        "grad shapes": sorted(
            (clean(name), tuple(parameter.grad.shape))
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        ),
        "whole": whole,
        "are tripled": all(are_tripled),
    }


def _accumulated(scene: Scene, *, no_sync: bool) -> dict[str, torch.Tensor]:
    with scene.model.no_sync() if no_sync else contextlib.nullcontext():
        scene.backward(0)
    scene.backward(1)
    return scene.whole_gradients()


def _tripling(shapes: list[Any], name: str) -> Any:
    return lambda grad: shapes.append((name, tuple(grad.shape))) or grad * 3


@clause("distributed.fsdp.fully_sharded_data_parallel.hooks.gradients")
@pytest.mark.parametrize("no_sync", [False, True])
@each_strategy
def test_hooks_on_gradients_of_flat_parameters_match_torch(
    twins: Twins, strategy: str, no_sync: bool
) -> None:
    twins.agree(hooks_on_gradients, leaf_by_leaf(strategy), no_sync=no_sync)


@clause("distributed.fsdp.fsdp_torch_limit_removed.hooks_on_gradients")
@pytest.mark.deviation("fsdp.hooks_on_gradients")
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("no_sync", [False, True])
@each_strategy
def test_hooks_on_gradients_of_original_parameters_run(
    twins: Twins, strategy: str, no_sync: bool, before: bool
) -> None:
    twins.deviate(
        hooks_on_gradients,
        leaf_by_leaf(strategy, use_orig_params=True),
        no_sync=no_sync,
        before=before,
        torch_does=each(lambda value: not value["shapes"]),
        we_do=each(lambda value: value["are tripled"] and {*value["shapes"]} == {*value["grad shapes"]}),
    )


@clause("distributed.fsdp.fsdp_torch_limit_removed.hooks_before_wrapping")
@pytest.mark.deviation("fsdp.hooks_before_wrapping")
@pytest.mark.parametrize("no_sync", [False, True])
@each_strategy
def test_hooks_on_gradients_before_wrapping_run(twins: Twins, strategy: str, no_sync: bool) -> None:
    shapes = [(name, tuple(parameter.shape)) for name, parameter in TREE.build().named_parameters()]
    twins.deviate(
        hooks_on_gradients,
        leaf_by_leaf(strategy),
        no_sync=no_sync,
        before=True,
        torch_does=each(lambda value: not value["shapes"]),
        we_do=each(lambda value: value["are tripled"] and value["shapes"] == sorted(2 * shapes)),
    )


class HookCalls:
    """State of a user-defined communication hook, which records the hook's inputs."""

    def __init__(self) -> None:
        self.inputs: list[Any] = []


def local_sum(state: HookCalls, grad: torch.Tensor, output: torch.Tensor | None = None) -> None:
    """Sum over the ranks without dividing, so that a division by the library would be visible."""
    parts = None if output is None else grad.numel() // output.numel()
    state.inputs.append([grad.dim(), str(grad.dtype), parts])
    dist.all_reduce(grad)
    if output is not None:
        rank = dist.get_rank()
        output.copy_(grad.chunk(dist.get_world_size())[rank])


def comm_hook(scene: Scene, *, hook: str, backwards: int = 1, no_sync: bool = False) -> dict[str, Any]:
    """Train with a communication hook. `hook` is the name of one of torch's hooks, or `own`."""
    state = HookCalls()
    if hook == "own":
        scene.model.register_comm_hook(state, local_sum)
    else:
        kind = default_hooks.LowPrecisionState if hook in LOW else default_hooks.DefaultState
        scene.model.register_comm_hook(kind(dist.group.WORLD), getattr(default_hooks, hook))
    for number in range(backwards):
        is_last = number == backwards - 1
        with scene.model.no_sync() if no_sync and not is_last else contextlib.nullcontext():
            scene.backward(number)
    return {"gradients": scene.gradients(), "inputs": state.inputs, "whole": scene.whole_gradients()}


@clause("distributed.fsdp.fully_sharded_data_parallel.register_comm_hook.replaces_the_reduction")
@pytest.mark.parametrize("no_sync", [False, True])
@both_kinds
@pytest.mark.parametrize(
    ("strategy", "hook"),
    [
        ("FULL_SHARD", "own"),
        ("FULL_SHARD", "reduce_scatter_hook"),
        ("SHARD_GRAD_OP", "own"),
        ("SHARD_GRAD_OP", "reduce_scatter_hook"),
        ("NO_SHARD", "own"),
        ("NO_SHARD", "allreduce_hook"),
    ],
)
def test_comm_hook_replaces_reduction(
    twins: Twins, strategy: str, hook: str, use_orig_params: bool, no_sync: bool
) -> None:
    if twins.is_alone and hook == "reduce_scatter_hook":
        strategy, hook = "NO_SHARD", "allreduce_hook"
    # With NO_SHARD, torch passes already reduced gradients to the hook again, which is only correct for a mean.
    backwards = 1 if hook == "own" and strategy == "NO_SHARD" and not no_sync else 2
    arguments = {"hook": hook, "backwards": backwards, "no_sync": no_sync}
    twins.agree(comm_hook, leaf_by_leaf(strategy, use_orig_params), **arguments)


@clause("distributed.fsdp.fully_sharded_data_parallel.register_comm_hook.low_precision")
@pytest.mark.reference_limit("fsdp.low_precision_comm_hooks")
def test_torch_cannot_run_low_precision_hooks_on_a_cpu(torch_cannot: Callable[..., None]) -> None:
    torch_cannot(comm_hook, hook="bf16_compress_hook")


@clause("distributed.fsdp.fully_sharded_data_parallel.register_comm_hook.low_precision")
@pytest.mark.parametrize("hook", LOW)
@each_strategy
def test_low_precision_hooks_round_and_average(twins: Twins, strategy: str, hook: str) -> None:
    setup = leaf_by_leaf(strategy)
    # Gradients of about 0.1 may cancel in the sum over the ranks.
    tolerance = Tolerance(
        4, "each gradient, the sum over the ranks and the quotient rounded", LOW[hook], terms=0.1
    )
    for rank, value in enumerate(twins.values(comm_hook, setup, hook=hook)):
        for gradient in value["whole"].values():
            assert gradient.dtype is torch.float32
            assert torch.equal(gradient.values, gradient.values.to(LOW[hook]).float())
        expected = unsharded_gradients(setup, twins.world_size, rank)
        assert_all_close("gradients", expected, value["whole"], tolerance)


def comm_hook_refused(scene: Scene, *, why: str) -> Any:
    """Return the error of registering a communication hook that is refused for the reason `why`."""
    model, hook = scene.model, local_sum
    match why:
        case "an inner unit":
            scene.forward()
            model = scene.units[1]
        case "twice":
            model.register_comm_hook(HookCalls(), hook)
        case "no callable":
            hook = "no hook"
        case "replicas of a part":
            # The root is not hybrid, but a unit inside is.
            model = scene.wrap(nn.Sequential(scene.wrapped(nn.Linear(3, 4)), nn.Linear(4, 2)))
    return tried(lambda: model.register_comm_hook(HookCalls(), hook))


@clause("distributed.fsdp.fully_sharded_data_parallel.register_comm_hook.refused")
@pytest.mark.parametrize("why", ["an inner unit", "twice", "no callable"])
def test_invalid_comm_hook_is_refused(twins: Twins, why: str) -> None:
    assert "Error" in str(twins.agree(comm_hook_refused, FLAT, why=why)[0].value)


@clause("distributed.fsdp.fully_sharded_data_parallel.register_comm_hook.refused")
@pytest.mark.parametrize("why", ["replicas", "replicas of a part"])
@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
def test_comm_hook_is_refused_for_replicas(twins_of: TwinsOf, strategy: str, why: str) -> None:
    setup = Setup(strategy, ranks="meshes", shards=2)
    outcomes = twins_of(2).agree(comm_hook_refused, setup, why=why)
    assert "hybrid strategies" in str(outcomes[0].value)
