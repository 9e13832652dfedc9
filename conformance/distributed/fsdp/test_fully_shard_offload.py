"""fully_shard with offloaded parameters, and features that torch has only on accelerators."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

from conformance import simulator
from conformance.distributed.fsdp.scenes.residual_blocks import batch_of, blocks
from conformance.distributed.fsdp.scenes.scene import Scene
from conformance.distributed.fsdp.scenes.twins import PlainTwins, each
from conformance.judge.clauses import clause
from conformance.judge.deviations import does_as
from conformance.judge.judgement import unavailable
from conformance.judge.outcome import observe


def _offloaded(scene: Scene, **policy: Any) -> Any:
    model = blocks()
    scene.shard_children(model, offload_policy=scene.api.CPUOffloadPolicy(**policy))
    return model


def pinned(scene: Scene, pins: bool) -> dict[str, Any]:
    """Return whether shards and gradients are pinned, and how often the host waits during a forward and a backward."""
    model = _offloaded(scene, pin_memory=pins)
    is_pinned = {"sharded": _are_pinned(model.parameters())}
    loaded = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(loaded, assign=True)
    batch, waits = batch_of(scene, 0).requires_grad_(), []

    def note_waits(*_: Any) -> None:
        if scene.rank.device.type == simulator.NAME:
            waits.append(sum(wait.count for wait in simulator.take_host_waits()))

    model[-1].register_forward_hook(note_waits)
    batch.register_hook(note_waits)
    for _ in range(2):
        loss = model(batch).square().sum()
        note_waits()
        loss.backward()
        is_pinned["gradients"] = _are_pinned(parameter.grad for parameter in model.parameters())
        model.zero_grad()
        note_waits()
    is_pinned["loaded"] = _are_pinned(model.parameters())
    model.float()
    is_pinned["cast"] = _are_pinned(model.parameters())
    return is_pinned | ({"waits": [waits[at] for at in (-4, -2)]} if pins and waits else {})


def _are_pinned(tensors: Iterable[Any]) -> list[bool]:
    return [tensor.to_local().is_pinned() for tensor in tensors]


@clause("distributed.fsdp.fully_shard.pinned")
@pytest.mark.parametrize("pins", [True, False])
def test_offloaded_shards_are_pinned(plain_twins: PlainTwins, device: str, pins: bool) -> None:
    if device == "cpu":
        unavailable("an accelerator")
    (actual, *_) = plain_twins.agree(pinned, pins=pins)
    assert set(actual.value.pop("waits", [0])) == {0}
    assert {is_pinned for where in actual.value.values() for is_pinned in where} == {pins}, actual.value


def changed_behind(scene: Scene) -> bool:
    """Return whether a forward's output is unaffected by zeroing the offloaded parameters right after it."""
    model, batch = _offloaded(scene), batch_of(scene, 0)
    with torch.no_grad():
        expected = model(batch).cpu()
        torch.accelerator.synchronize()
        output = model(batch)
        for parameter in model.parameters():
            parameter.to_local().zero_()
    return torch.equal(output.cpu(), expected)


@clause("distributed.fsdp.fully_shard.offloaded_and_changed")
@pytest.mark.deviation("fully_shard.offloaded_and_changed")
def test_output_is_unaffected_by_later_writes_to_offloaded_parameters(
    plain_twins: PlainTwins, device: str
) -> None:
    if device == "cpu":
        unavailable("an accelerator")
    plain_twins.deviate(
        changed_behind,
        torch_does=lambda outcomes: not each(bool)(outcomes),
        we_do=each(bool),
        may_agree=True,  # unless copies end after the host writes
    )


def without_accelerator(scene: Scene, feature: str) -> torch.Tensor:
    """Use features on the CPU that torch has only on accelerators: pinned offloading, or a divide factor of three."""
    model = nn.Linear(3, 2, bias=False)
    nn.init.ones_(model.weight)
    policy = {"offload_policy": scene.api.CPUOffloadPolicy()} if feature == "pinned" else {}
    sharded = scene.shard(model, **policy)
    if feature == "divided":
        sharded.set_gradient_divide_factor(3.0)
    sharded(torch.arange(1.0, 4.0)).sum().backward()
    return sharded.weight.grad.full_tensor()


@clause("distributed.fsdp.fully_shard.without_accelerator")
@pytest.mark.deviation("fsdp.without_accelerator")
@pytest.mark.world_sizes(fewest=2)
@pytest.mark.parametrize("feature", ["pinned", "divided"])
def test_accelerator_features_work_on_cpu(plain_twins: PlainTwins, device: str, feature: str) -> None:
    """torch raises RuntimeError for both features."""
    if torch.accelerator.is_available() or device != "cpu":
        unavailable("a machine without an accelerator")
    factor = plain_twins.world_size / 3 if feature == "divided" else 1.0
    expected = observe(lambda: torch.arange(1.0, 4.0).repeat(2, 1) * factor)
    plain_twins.deviate(
        without_accelerator,
        feature=feature,
        we_do=lambda outcomes: all(does_as(expected, outcome) for outcome in outcomes),
    )
