"""Backwards with fully_shard: hooks, accumulation, failed and missing backwards."""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from conformance.distributed.fsdp.scenes import prompted_model
from conformance.distributed.fsdp.scenes.fully_shard_training import (
    described,
    full_gradients,
    full_value,
    layout_of,
    registered,
    values_and_gradients,
)
from conformance.distributed.fsdp.scenes.prompted_model import Prompted
from conformance.distributed.fsdp.scenes.residual_blocks import ResidualBlock, batch_of, blocks
from conformance.distributed.fsdp.scenes.scene import Scene, fill_freed_memory, filled, tried
from conformance.distributed.fsdp.scenes.twins import PlainTwins, TwinsOf, each, raises
from conformance.judge.clauses import clause
from conformance.judge.outcome import Outcome, assert_same_outcome
from conformance.judge.tolerances import EXACT


def gathered_for_no_backward(scene: Scene) -> torch.Tensor:
    """Zero the first weights after a backward that ended just before their unit.

    Return the output of the next forward.
    """
    model, between = blocks(), []
    scene.shard_children(model)
    first = list(model[0].parameters())
    model.set_reshard_after_backward(False)
    model[2].register_forward_pre_hook(lambda module, args: between.append(*args))
    torch.autograd.grad(model(batch_of(scene, 0)).sum(), between)
    with torch.no_grad():
        for parameter in first:
            parameter.zero_()
        return model(batch_of(scene, 0)).cpu()


@clause("distributed.fsdp.fully_shard.gathered_for_no_backward")
def test_unit_unused_by_backward_is_gathered_again(plain_twins: PlainTwins) -> None:
    plain_twins.agree(gathered_for_no_backward)
    plain_twins.agree_with_unsharded(gathered_for_no_backward)


def no_sync(scene: Scene) -> list[list[dict[str, torch.Tensor]]]:
    """Return the gradients after each backward, by `set_requires_gradient_sync` and by `no_sync`."""
    return [_gradients_unsynchronised(scene, by_context) for by_context in (False, True)]


def _gradients_unsynchronised(scene: Scene, by_context: bool) -> list[dict[str, torch.Tensor]]:
    """Return gradients after each backward. The first two do not synchronise, and the last unit never does."""
    model = blocks()
    scene.shard_children(model)
    model[-1].set_requires_gradient_sync(False)
    gradients: list[dict[str, torch.Tensor]] = []
    for number in range(4):
        is_apart = number < 2
        for unit in () if by_context else (*model[:-1], model):
            unit.set_requires_gradient_sync(not is_apart, recurse=False)
        with model.no_sync() if by_context and is_apart else contextlib.nullcontext():
            model(batch_of(scene, number)).sum().backward()
        named = model.named_parameters()
        gradients.append({name: param.grad.full_tensor() for name, param in named if param.grad is not None})
    return gradients


@clause("distributed.fsdp.fully_shard.no_sync")
def test_no_sync_adds_up_gradients_unreduced(plain_twins: PlainTwins) -> None:
    for by_settings, by_context in plain_twins.values(no_sync):
        # Two units of four parameters synchronise, after two backwards that do not.
        assert [len(gradients) for gradients in by_context] == [0, 0, 8, 8]
        assert_same_outcome(Outcome(by_settings), Outcome(by_context), EXACT)


def gradients_of_regions(scene: Scene, is_mixed: bool) -> dict[str, torch.Tensor | None]:
    model = filled(Prompted(is_mixed).to(scene.rank.device, torch.float64))
    scene.shard(model.regions)
    scene.shard(model)
    for _ in range(2):
        prompted_model.backward(scene, model)
    return full_gradients(model)


@clause("distributed.fsdp.fully_shard.reentrant_regions")
@pytest.mark.parametrize("is_mixed", [False, True])
def test_reentrant_regions_train_unit_with_parameter_as_input(
    plain_twins: PlainTwins, is_mixed: bool
) -> None:
    plain_twins.agree(gradients_of_regions, is_mixed=is_mixed)
    plain_twins.agree_with_unsharded(gradients_of_regions, is_mixed=is_mixed)


def stepped_in_backward(scene: Scene, syncs_first: bool) -> dict[str, Any]:
    """Step each parameter in its own hook after accumulation. Return the order of the hooks and the final parameters.

    Each event also has the number of gradients that existed at that time.
    """
    model = blocks()
    scene.shard_children(model)
    events: list[Any] = []
    for name, parameter in model.named_parameters():
        optimizer = torch.optim.AdamW([parameter], 0.1)

        def step(
            tensor: torch.Tensor, name: str = name, optimizer: torch.optim.Optimizer = optimizer
        ) -> None:
            events.append((name, sum(param.grad is not None for param in model.parameters())))
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)
    for number in range(3):
        model.set_requires_gradient_sync(number > 0 or syncs_first)
        model(batch_of(scene, number)).sum().backward()
    return {"events": events, **values_and_gradients(model)}


@clause("distributed.fsdp.fully_shard.hooks_after_accumulation")
@pytest.mark.parametrize("syncs_first", [True, False])
def test_optimizers_step_in_the_backward(plain_twins: PlainTwins, syncs_first: bool) -> None:
    for outcome in plain_twins.agree(stepped_in_backward, syncs_first=syncs_first):
        assert {count for _, count in outcome.value["events"]} == {1}


def hooks_on_gradients(scene: Scene, before: bool) -> dict[str, Any]:
    """Return which hooks ran, and whether hooks that triple gradients make them three times as large."""
    plain = _accumulated(scene, blocks())
    model = blocks()
    events: list[str] = []
    if before:
        _register_hooks(model, events)
    hooked = _accumulated(scene, model, None if before else events)
    pairs = zip(plain, hooked, strict=True)
    return {
        "events": events,
        "layouts": registered(model),
        "are tripled": all(torch.allclose(3 * grad, tripled) for grad, tripled in pairs),
    }


def _accumulated(scene: Scene, model: Any, events: list[str] | None = None) -> list[torch.Tensor]:
    scene.shard_children(model)
    if events is not None:
        _register_hooks(model, events)
    for number in range(3):
        model.set_requires_gradient_sync(number > 0)
        model(batch_of(scene, number)).sum().backward()
    return [parameter.grad.full_tensor() for parameter in model.parameters()]


def _register_hooks(model: nn.Module, events: list[str]) -> None:
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda grad, name=name: events.append(f"{name} {layout_of(grad)}"))
        parameter.register_hook(lambda grad: grad * 3)
        parameter.register_hook(lambda grad: grad * 5).remove()
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: events.append(name))


@clause("distributed.fsdp.fully_shard.hooks_on_gradients")
@pytest.mark.deviation("fsdp.hooks_on_gradients")
@pytest.mark.parametrize("before", [False, True])
def test_hooks_on_gradients_of_sharded_parameters_run(plain_twins: PlainTwins, before: bool) -> None:
    after_accumulation = [name for name, _ in blocks().named_parameters()]

    def ran(value: Any) -> bool:
        on_gradients = [f"{name} {layout}" for name, layout in value["layouts"].items()]
        # Two of the three backwards synchronise.
        expected = dict.fromkeys([*after_accumulation, *on_gradients], 2)
        return value["are tripled"] and Counter(value["events"]) == expected

    plain_twins.deviate(
        hooks_on_gradients,
        before=before,
        torch_does=each(lambda value: set(value["events"]) <= set(after_accumulation)),
        we_do=each(ran),
    )


class _TrainsInside(ResidualBlock):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.norm(x.detach()).sum().backward()
        raise ValueError("the user's own")


def raised_behind_an_inner_backward(scene: Scene) -> list[str]:
    """Return the errors of two forwards that run a backward of an inner unit and then raise.

    The inputs need gradients.
    """
    model = _TrainsInside().double()
    for module in (model.norm, model):
        scene.shard(module)
    batch = batch_of(scene, 0).requires_grad_()
    return [tried(lambda: model(batch)) for _ in range(2)]


@clause("distributed.fsdp.failures.in_a_forward")
def test_forward_error_after_inner_backward_matches_torch(plain_twins: PlainTwins) -> None:
    plain_twins.agree(raised_behind_an_inner_backward)


class _WithAuxiliary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.auxiliary, self.head = blocks()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.body(x)
        return self.head(hidden), self.auxiliary(hidden)


def kept_by_one_rank(scene: Scene) -> dict[str, Any]:
    """Train while one rank keeps an output that is in no loss, for example to log it. The other ranks drop it."""
    model = _WithAuxiliary()
    scene.shard_children(model)
    logged = []
    for number in range(3):
        output, auxiliary = model(batch_of(scene, number))
        if scene.rank.rank == 0:
            logged.append(auxiliary)
        del auxiliary
        output.sum().backward()
    return values_and_gradients(model)


@clause("distributed.fsdp.fully_shard.without_a_backward")
@pytest.mark.world_sizes(fewest=2)
def test_output_kept_by_one_rank_keeps_collective_order(plain_twins: PlainTwins) -> None:
    plain_twins.agree(kept_by_one_rank)


def without_a_backward(scene: Scene) -> dict[str, bool]:
    """Return whether forwards with a graph but without a backward leave hooks on the input, or objects in memory."""
    model = blocks()
    scene.shard_children(model)
    batch = batch_of(scene, 0).requires_grad_()

    def left(forwards: int) -> tuple[int, int]:
        for _ in range(forwards):
            model(batch)
        gc.collect()
        return len(batch._backward_hooks or ()), len(gc.get_objects())

    hooks, objects = left(80)  # enough forwards to fill any history of recent steps
    more_hooks, more_objects = left(50)
    return {"hooks": more_hooks > hooks, "objects": more_objects >= objects + 50}


@clause("distributed.fsdp.fully_shard.without_a_backward")
def test_forwards_without_backward_leave_no_hooks_or_objects(plain_twins: PlainTwins) -> None:
    for outcome in plain_twins.agree(without_a_backward):
        assert outcome.value == {"hooks": False, "objects": False}


def kept_for_backward(scene: Scene, rows: int) -> dict[str, Any]:
    """Return descriptions of a parameter with `rows` rows after forwards that reshard it to groups of two ranks."""
    layer: Any = nn.Linear(64, rows, bias=False).to(scene.rank.device)
    with torch.no_grad():
        layer.weight.copy_(1 + torch.arange(float(rows))[:, None].expand(rows, 64))
    model: Any = nn.Sequential(layer, nn.Linear(rows, 1).to(scene.rank.device))
    nn.init.ones_(model[1].weight)
    scene.shard(layer, reshard_after_forward=2)
    scene.shard(model)
    weights = []
    for _ in range(4):
        fill_freed_memory(4 * -(-rows // 4) * 64, scene.rank.device, 1e30)
        loss = model(torch.ones(2, 64, device=scene.rank.device)).sum()
        weights.append(described(layer.weight))
        loss.backward()
    return {"weights": weights, "gradient": described(layer.weight.grad)}


@clause("distributed.fsdp.fully_shard.kept_for_backward")
@pytest.mark.parametrize("rows", [13, 5])
def test_shards_kept_for_backward_are_padded_with_zeros(plain_twins_of: TwinsOf, rows: int) -> None:
    outcomes = plain_twins_of(4).agree(kept_for_backward, rows=rows)
    assert outcomes[1].value["weights"][-1]["local"].values[-1].count_nonzero() == 0


class _Experts(nn.ModuleList):
    def forward(self, x: torch.Tensor, number: int | None) -> torch.Tensor:
        return x * 1 if number is None else self[number](x).tanh()


class _Routed(nn.Module):
    """Model whose units all get a leaf as input: the user's tensor, a parameter, or the input of a recomputation."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.own = nn.Parameter(torch.ones(2, 4)), nn.Linear(4, 4)
        self.asked, self.recomputed = (_Experts(nn.Linear(4, 4) for _ in range(2)) for _ in range(2))

    def forward(self, x: torch.Tensor, numbers: list[int | None]) -> torch.Tensor:
        without_input = self.own(self.own(self.query).tanh())
        hidden = self.own(x) + without_input + self.asked(self.query, numbers[0])
        return checkpoint(self.recomputed, hidden, numbers[1], use_reentrant=True)


def zeros_with_leaf_inputs(scene: Scene, numbers: list[int | None]) -> dict[str, torch.Tensor | None]:
    """Return the gradients of two backwards. All ranks but the first use the experts `numbers` of both units."""
    model: Any = filled(_Routed().double()).to(scene.rank.device)
    scene.shard(model.asked)
    scene.shard(model.recomputed)
    scene.shard(model)
    model.set_reduce_scatter_unused_params(True)
    x = torch.linspace(-1, 1, 8, dtype=torch.float64, device=scene.rank.device).view(2, 4)
    x.requires_grad_()
    for _ in range(2):
        model(x, numbers if scene.rank.rank else [0, 0]).square().sum().backward()
    return full_gradients(model)


@clause("distributed.fsdp.fully_shard.unused_parameters")
@pytest.mark.parametrize("numbers", [[0, 1], [None, 1], [1, None], [None, None]])
def test_zeros_are_reduced_for_units_with_leaf_inputs(plain_twins: PlainTwins, numbers: list[Any]) -> None:
    plain_twins.agree(zeros_with_leaf_inputs, numbers=numbers)


def clipped_while_unsharded(scene: Scene, *, unsharded_by: str) -> dict[str, Any]:
    """Clip the gradients of `model.parameters()` while units are unsharded. Return the norm and all gradients.

    Args:
        unsharded_by: a `backward` that keeps its units, or another `forward`, which no backward follows.
    """
    model = scene.shard_children(blocks(), reshard_after_forward=False)
    model.set_reshard_after_backward(unsharded_by != "backward")
    parameters = [*model.parameters()]
    x = torch.linspace(-1, 1, 12, dtype=torch.float64, device=scene.rank.device).view(2, 6)
    scene.mean(lambda rank: model(x + rank).square().mean()).backward()
    if unsharded_by == "forward":
        model(x)
    norm = scene.library.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    scene.library.nn.utils.clip_grad_value_(model.parameters(), 0.05)
    return {"norm": full_value(norm), "gradients": [full_value(parameter.grad) for parameter in parameters]}


@clause("nn.utils.clip_grad.clip_grad_norm_.while_unsharded")
@pytest.mark.deviation("fully_shard.clipped_while_unsharded")
@pytest.mark.parametrize("unsharded_by", ["backward", "forward"])
def test_gradients_are_clipped_while_unsharded(plain_twins: PlainTwins, unsharded_by: str) -> None:
    """torch finds no gradients, so `clip_grad_norm_` clips none and `clip_grad_value_` raises RuntimeError."""
    plain_twins.deviate_to_unsharded(clipped_while_unsharded, unsharded_by=unsharded_by)


def recomputed(scene: Scene, *, with_loss: bool) -> dict[str, Any]:
    """Checkpoint the whole model, with inputs on the CPU, for two backwards. Return the gradients.

    Args:
        with_loss: whether the checkpointed region also contains the loss.
    """
    model = scene.shard_children(blocks())

    def squares_of(output: torch.Tensor) -> torch.Tensor:
        return output.square().mean()

    def region(x: torch.Tensor) -> torch.Tensor:
        return squares_of(model(x)) if with_loss else model(x)

    def loss_of(rank: int) -> torch.Tensor:
        x = torch.linspace(-1, 1, 12, dtype=torch.float64).view(2, 6) + rank
        output = checkpoint(region, x, use_reentrant=False)
        return output if with_loss else squares_of(output)

    for _ in range(2):
        scene.mean(loss_of).backward()
    return full_gradients(model)


@clause("distributed.fsdp.fully_shard.recomputed")
@pytest.mark.deviation("fully_shard.recomputed_inputs")
@pytest.mark.parametrize("with_loss", [False, True])
def test_recomputed_root_moves_inputs(plain_twins: PlainTwins, with_loss: bool) -> None:
    plain_twins.deviate_to_unsharded(
        recomputed,
        torch_does=raises(RuntimeError, "Expected all tensors to be on the same device"),
        may_agree=True,  # torch agrees on the CPU or if the loss is recomputed
        with_loss=with_loss,
    )
