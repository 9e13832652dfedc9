"""Parameters of fully_shard that are frozen or made trainable while their unit is unsharded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from conformance.distributed.fsdp.scenes.fully_shard_training import full_value
from conformance.distributed.fsdp.scenes.residual_blocks import batch_of, blocks
from conformance.distributed.fsdp.scenes.scene import Scene
from conformance.distributed.fsdp.scenes.twins import PlainTwins, TwinsOf
from conformance.judge.clauses import clause

Gradients = dict[str, torch.Tensor | None]

_TRAINED_ALWAYS = "2.norm."


def gradients_around_change(
    scene: Scene,
    when: str,
    thaws: bool,
    changed: str = "1.",
    backwards: int = 1,
    reshards: bool | int = False,
    is_listed_before: bool = False,
) -> list[Gradients]:
    """Change `requires_grad` of parameters while units are unsharded. Return the gradients of backwards from then on.

    Args:
        when: `forward` is between a forward and its backward, `evaluated` after a forward without a backward, `unshard`
            after `unshard()`, and `kept` after a backward that does not reshard.
        thaws: the parameters are frozen before, and trained afterwards.
        changed: beginning of the names of the changed parameters. If it is empty, the model's `requires_grad_` changes
            all but a few.
        reshards: `reshard_after_forward` of the units.
        is_listed_before: the parameters are listed before they are unsharded.
    """
    model = blocks().to(scene.rank.device)
    set_requires_grad(model, dict(model.named_parameters()), changed, not thaws)
    scene.shard_children(model, reshard_after_forward=reshards)
    named = dict(model.named_parameters())
    if when == "kept":
        model.set_reshard_after_backward(False)
    backward(scene, model, named)
    loss = loss_of(scene, model) if when in {"forward", "evaluated"} else None
    for unit in (*model, model) if when == "unshard" else ():
        unit.unshard()
    set_requires_grad(model, named if is_listed_before else dict(model.named_parameters()), changed, thaws)
    first = backward(scene, model, named, loss if when == "forward" else None)
    return [first, *(backward(scene, model, named) for _ in range(backwards - 1))]


def set_requires_grad(
    model: nn.Module, named: dict[str, nn.Parameter], changed: str, requires_grad: bool
) -> None:
    if not changed:
        model.requires_grad_(requires_grad)
    for name, param in named.items():
        if name.startswith(_TRAINED_ALWAYS):
            param.requires_grad_()
        elif changed and name.startswith(changed):
            param.requires_grad_(requires_grad)


def loss_of(scene: Scene, model: Any) -> torch.Tensor:
    def loss_on(rank: int) -> torch.Tensor:
        return model(batch_of(scene, 0, rank)).square().mean()

    return scene.mean(loss_on)


def backward(
    scene: Scene, model: Any, named: dict[str, nn.Parameter], loss: torch.Tensor | None = None
) -> Gradients:
    """Run the backward of `loss`, by default of a new forward. Clear the gradients and return them."""
    (loss_of(scene, model) if loss is None else loss).backward()
    gradients: Gradients = {}
    for name, param in named.items():
        gradients[name] = None if param.grad is None else full_value(param.grad).cpu()
        param.grad = None
    return gradients


either_way = pytest.mark.parametrize("thaws", [False, True], ids=["frozen", "trained"])


@clause("distributed.fsdp.fully_shard.frozen_while_unsharded")
@either_way
@pytest.mark.parametrize("when", ["forward", "evaluated", "unshard"])
@pytest.mark.parametrize("changed", ["", "1.", "1.inner.weight"], ids=["model", "unit", "parameter"])
def test_next_backward_follows_change_of_unsharded_unit(
    plain_twins: PlainTwins, when: str, thaws: bool, changed: str
) -> None:
    arguments = {"when": when, "thaws": thaws, "changed": changed}
    plain_twins.agree(gradients_around_change, **arguments)
    plain_twins.agree_with_unsharded(gradients_around_change, **arguments)


@clause("distributed.fsdp.fully_shard.frozen_while_unsharded")
@either_way
def test_change_lasts_while_unit_stays_unsharded(plain_twins: PlainTwins, thaws: bool) -> None:
    arguments = {"when": "kept", "thaws": thaws, "backwards": 3}
    plain_twins.agree(gradients_around_change, **arguments)
    plain_twins.agree_with_unsharded(gradients_around_change, **arguments)


@clause("distributed.fsdp.fully_shard.frozen_over_resharding")
@pytest.mark.deviation("fully_shard.frozen_while_unsharded")
@either_way
@pytest.mark.parametrize("when", ["forward", "evaluated", "unshard"])
def test_change_outlasts_resharding(plain_twins: PlainTwins, when: str, thaws: bool) -> None:
    """torch forgets the change when the unit is resharded."""
    plain_twins.deviate_to_unsharded(gradients_around_change, when=when, thaws=thaws, backwards=3)


@clause("distributed.fsdp.fully_shard.frozen_over_resharding")
@pytest.mark.deviation("fully_shard.frozen_while_unsharded")
@either_way
def test_change_of_unit_on_fewer_ranks_lasts(plain_twins_of: TwinsOf, device: str, thaws: bool) -> None:
    """torch ignores the change of parameters that are resharded to fewer ranks."""
    twins = plain_twins_of(4, device)
    twins.deviate_to_unsharded(gradients_around_change, when="forward", thaws=thaws, backwards=2, reshards=2)


@clause("distributed.fsdp.fully_shard.frozen_over_resharding")
@pytest.mark.deviation("fully_shard.frozen_while_unsharded")
@either_way
@pytest.mark.parametrize("when", ["unshard", "kept"])
def test_change_of_sharded_parameters_reaches_unsharded_unit(
    plain_twins: PlainTwins, when: str, thaws: bool
) -> None:
    """torch ignores the change while the unit is unsharded."""
    plain_twins.deviate_to_unsharded(
        gradients_around_change, when=when, thaws=thaws, backwards=2, is_listed_before=True
    )


class _Joined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.early, self.last = blocks(2), blocks(1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.last(self.early(x) + y)


def frozen_before_backward_with_leaf(scene: Scene, reshards: bool) -> Gradients:
    """Freeze the first blocks of a unit between forward and backward. Autograd reaches a leaf input before them."""
    model = _Joined().to(scene.rank.device)
    scene.shard(model, reshard_after_forward=reshards)
    named = dict(model.named_parameters())

    def loss_on(rank: int) -> torch.Tensor:
        batch = batch_of(scene, 0, rank)
        return model(batch, torch.zeros_like(batch, requires_grad=True)).square().mean()

    loss = scene.mean(loss_on)
    model.early.requires_grad_(False)
    return backward(scene, model, named, loss)


@clause("distributed.fsdp.fully_shard.frozen_while_unsharded")
@pytest.mark.parametrize("reshards", [False, True])
def test_unit_stays_unsharded_for_blocks_frozen_after_forward(
    plain_twins: PlainTwins, reshards: bool
) -> None:
    plain_twins.agree(frozen_before_backward_with_leaf, reshards=reshards)
    plain_twins.agree_with_unsharded(frozen_before_backward_with_leaf, reshards=reshards)


class _Prompted(nn.Module):
    """Frozen layers that compute from their input and from a trained tensor in an attribute."""

    def __init__(self, prompt: torch.Tensor) -> None:
        super().__init__()
        self.layers = blocks(2).requires_grad_(False)
        self.prompt = (prompt,)  # no parameter of the module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        prompted = self.layers(self.prompt[0].sin())
        return self.layers[0](x).tanh() + prompted  # backward reaches `x` before the prompt


def gradients_of_inputs(scene: Scene) -> list[torch.Tensor]:
    """Return the gradients of a leaf input, and of a tensor that the frozen unit reads from an attribute."""
    x = torch.linspace(-1, 1, 24, dtype=torch.float64, device=scene.rank.device).view(4, 6).requires_grad_()
    prompt = torch.ones_like(x).requires_grad_()
    model = scene.shard_children(nn.Sequential(_Prompted(prompt), *blocks(1)).to(scene.rank.device))
    model(x).square().mean().backward()
    assert x.grad is not None
    assert prompt.grad is not None
    return [x.grad, prompt.grad]


@clause("distributed.fsdp.fully_shard.frozen_units")
def test_frozen_unit_with_leaf_input_reads_trained_attribute(plain_twins: PlainTwins) -> None:
    plain_twins.agree(gradients_of_inputs)


def gradients_of_differing_leaves(scene: Scene) -> Gradients:
    """Return the gradients of a partly frozen unit whose input is a leaf on the first rank only."""
    model = blocks().to(scene.rank.device)
    for block in model:
        block.inner.weight.requires_grad_(False)
    scene.shard_children(model)
    batch = batch_of(scene, 0).requires_grad_()
    model(batch if scene.rank.rank == 0 else batch * 1).square().mean().backward()
    return {
        name: None if param.grad is None else full_value(param.grad)
        for name, param in model.named_parameters()
    }


@clause("distributed.fsdp.fully_shard.frozen_units")
@pytest.mark.world_sizes(fewest=2)
def test_ranks_may_differ_in_leaf_inputs_of_partly_frozen_unit(plain_twins: PlainTwins) -> None:
    plain_twins.agree(gradients_of_differing_leaves)
