"""Evaluation with fully_shard between training steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from conformance.distributed.fsdp.scenes.fully_shard_training import registered, reshard_all
from conformance.distributed.fsdp.scenes.residual_blocks import batch_of, blocks
from conformance.distributed.fsdp.scenes.scene import Scene
from conformance.distributed.fsdp.scenes.twins import PlainTwins, TwinsOf, each
from conformance.judge.clauses import clause


class _Generating(nn.Sequential):
    """Model with a method that disables gradients."""

    @torch.no_grad()
    def generate(self, batch: torch.Tensor) -> torch.Tensor:
        return self.forward(batch)


def _generating(scene: Scene, reshards: int = False) -> Any:
    """Return a model, sharded as two units that by default stay unsharded after forward."""
    model: Any = _Generating(*blocks(2)).to(scene.rank.device)
    scene.shard(model[0], reshard_after_forward=reshards)
    scene.shard(model, reshard_after_forward=reshards)
    if scene.shards:
        scene.api.register_fsdp_forward_method(model, "generate")
    return model


def _evaluate(model: Any, batch: torch.Tensor, method: str = "forward") -> torch.Tensor:
    if method == "generate":
        return model.generate(batch).cpu()
    with torch.no_grad():
        return model(batch).cpu()


def written_after_evaluation(
    scene: Scene, how: str, method: str, is_listed_before: bool, reshards: int = False
) -> list[torch.Tensor]:
    """Evaluate before and after a write to the parameters.

    Args:
        reshards: `reshard_after_forward` of the units.
        method: `generate` disables gradients itself.
        is_listed_before: the parameters are listed before the first evaluation. Otherwise they are listed after it, and
            the units are resharded after the write.
    """
    model = _generating(scene, reshards)
    params, batch = list(model.parameters()), batch_of(scene, 0)
    outputs = [_evaluate(model, batch, method)]
    if not is_listed_before:
        params = list(model.parameters())
    with torch.no_grad():
        targets = [torch.zeros_like(param) for param in params]
        if how == "foreach":
            torch._foreach_lerp_(params, targets, 0.5)
        else:
            for param, target in zip(params, targets, strict=True):
                param.data.copy_(target)
    if not is_listed_before:
        reshard_all(model)
    return [*outputs, _evaluate(model, batch, method)]


@clause("distributed.fsdp.fully_shard.written_after_evaluation")
@pytest.mark.deviation("fully_shard.written_after_evaluation")
@pytest.mark.parametrize("method", ["forward", "generate"])
@pytest.mark.parametrize(
    ("how", "is_listed_before"),
    [("foreach", True), ("data", True), ("data", False)],
    ids=["foreach", "data", "data, listed after"],
)
def test_evaluation_sees_writes_to_kept_units(
    plain_twins: PlainTwins, how: str, is_listed_before: bool, method: str
) -> None:
    plain_twins.deviate_to_unsharded(
        written_after_evaluation,
        how=how,
        method=method,
        is_listed_before=is_listed_before,
        torch_does=each(lambda outputs: torch.equal(outputs[0].values, outputs[1].values)),
    )


@clause("distributed.fsdp.fully_shard.written_after_evaluation")
@pytest.mark.deviation("fully_shard.written_after_evaluation")
@pytest.mark.parametrize(("how", "is_listed_before"), [("foreach", True), ("data", False)])
def test_evaluation_sees_writes_to_units_of_fewer_ranks(
    plain_twins_of: TwinsOf, device: str, how: str, is_listed_before: bool
) -> None:
    """torch's second evaluation uses the weights from before the write."""
    arguments = {"how": how, "method": "forward", "is_listed_before": is_listed_before, "reshards": 2}
    plain_twins_of(4, device).deviate_to_unsharded(written_after_evaluation, **arguments)


def optimizer_made_after_evaluation(scene: Scene, method: str, reshards: int = False) -> torch.Tensor:
    """Train two steps with an optimizer made after an evaluation. Return the output."""
    model = _generating(scene, reshards)
    batch = torch.ones_like(batch_of(scene, 0))  # equal on all ranks
    _evaluate(model, batch, method)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return _evaluate(model, batch)


@clause("distributed.fsdp.fully_shard.written_after_evaluation")
@pytest.mark.deviation("fully_shard.written_after_evaluation")
@pytest.mark.parametrize("method", ["forward", "generate"])
def test_optimizer_made_after_evaluation_trains(plain_twins: PlainTwins, method: str) -> None:
    """torch drops the optimizer's parameters when units are resharded, so the steps have no effect."""
    plain_twins.deviate_to_unsharded(optimizer_made_after_evaluation, method=method)


@clause("distributed.fsdp.fully_shard.written_after_evaluation")
@pytest.mark.deviation("fully_shard.written_after_evaluation")
def test_optimizer_made_after_evaluation_trains_units_of_fewer_ranks(
    plain_twins_of: TwinsOf, device: str
) -> None:
    """torch drops the optimizer's parameters when units are resharded, so the steps have no effect."""
    twins = plain_twins_of(4, device)
    twins.deviate_to_unsharded(optimizer_made_after_evaluation, method="forward", reshards=2)


def exchanged_for_evaluation(scene: Scene, trains: str) -> list[torch.Tensor]:
    """Evaluate exchanged weights while parameters are unsharded, and train.

    Args:
        trains: "backward" calls the forward before the evaluation. "forward" drops that forward and calls another one.
            "accumulation" calls both, and units stay unsharded after the first backward.
    """
    model = _generating(scene)
    params, batch = list(model.parameters()), torch.ones_like(batch_of(scene, 0))  # equal on all ranks
    if trains == "accumulation":
        model.set_reshard_after_backward(False)
    loss = model(batch).square().mean()
    if trains == "accumulation":
        loss.backward()
    former = [param.detach().clone() for param in params]
    for param in params:
        param.data.mul_(0.5)
    outputs = [_evaluate(model, batch)]
    for param, values in zip(params, former, strict=True):
        param.data.copy_(values)
    if trains != "backward":
        loss = model(batch).square().mean()
    loss.backward()
    torch.optim.SGD(params, 0.1).step()
    return [*outputs, _evaluate(model, batch)]


@clause("distributed.fsdp.fully_shard.written_after_evaluation")
@pytest.mark.deviation("fully_shard.written_after_evaluation")
@pytest.mark.parametrize("trains", ["backward", "forward", "accumulation"])
def test_training_goes_on_with_weights_exchanged_for_evaluation(plain_twins: PlainTwins, trains: str) -> None:
    is_like_unsharded = plain_twins.like_unsharded(exchanged_for_evaluation, of=0, trains=trains)
    plain_twins.deviate_to_unsharded(
        exchanged_for_evaluation, trains=trains, torch_does=lambda outcomes: not is_like_unsharded(outcomes)
    )


def unsharded_through_evaluation(scene: Scene, **options: bool) -> list[dict[str, str]]:
    """Return the root's registered parameters after `unshard`, an evaluation, and a write with another evaluation."""
    model = scene.shard(blocks(2).to(scene.rank.device), **options)
    written = next(model.parameters())
    observed: list[dict[str, str]] = []
    model.unshard()
    observed.append(registered(model))
    for _ in range(2):
        with torch.no_grad():
            model(batch_of(scene, 0))
            observed.append(registered(model))
            written.mul_(2)
    return observed


@clause("distributed.fsdp.fully_shard.unshard")
@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}, {"reshard_after_forward": True}])
def test_unsharded_root_outlives_evaluation(plain_twins: PlainTwins, options: dict[str, bool]) -> None:
    plain_twins.agree(unsharded_through_evaluation, **options)
