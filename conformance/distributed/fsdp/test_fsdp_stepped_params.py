"""Parameters that an optimizer steps: those of before wrapping, and those that a backward did not use."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from conformance.distributed.fsdp.scenes.forked_model import Forked
from conformance.distributed.fsdp.scenes.fsdp_training import clean
from conformance.distributed.fsdp.scenes.scene import Scene, filled, tried
from conformance.distributed.fsdp.scenes.twins import Twins, Wrapping, each, each_strategy, each_wrapping
from conformance.judge.clauses import clause


def _backward(scene: Scene, model: nn.Module, **arguments: bool) -> None:
    x = torch.linspace(-1, 1, 15, device=scene.rank.device).view(5, 3)
    model(x, **arguments).square().mean().backward()


def _changed(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> list[str]:
    return [name for name in before if not torch.equal(before[name], after[name])]


def optimizer_made_before(scene: Scene, *, of: str, use_orig_params: bool) -> dict[str, Any]:
    """Make an optimizer before wrapping. Return the result or error of its first step, and the changed parameters.

    Args:
        of: the optimizer's parameters: those of the model, of a model on the "meta" device, or of a model of which only
            a "frozen" module is wrapped; those that are put into it after wrapping ("replaced"); "ignored" parameters;
            or those of another module, which may have one of the model's parameters ("shared").
    """
    wrap = partial(scene.wrap, use_orig_params=use_orig_params)
    model: Any = filled(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))).to(scene.rank.device)
    other = filled(nn.Linear(3, 4)).to(scene.rank.device)
    trained = model.to("meta") if of == "meta" else model
    if of in ("another", "shared"):
        trained = other
    if of == "shared":
        other.weight = model[0].weight
    stepped = model[0] if of == "ignored" else trained
    optimizer = torch.optim.SGD(stepped.parameters(), 0.1)
    if of == "frozen":
        model[1] = wrap(model[1].requires_grad_(False))
    else:
        model = wrap(model, ignored_states=[*model[0].parameters()] if of == "ignored" else None)
    if of == "replaced":
        optimizer.param_groups[0]["params"] = [*model.parameters()]
    before = scene.whole_parameters(model)
    _backward(scene, other if trained is other else model)
    step = tried(optimizer.step)
    return {"step": step, "changed": _changed(before, scene.whole_parameters(model))}


@clause("distributed.fsdp.fsdp_torch_limit_removed.optimizer_made_before")
@pytest.mark.deviation("fsdp.optimizer_made_before")
@pytest.mark.parametrize(("of", "use_orig_params"), [("model", False), ("meta", False), ("meta", True)])
def test_step_of_optimizer_made_before_wrapping_is_an_error(
    twins: Twins, of: str, use_orig_params: bool
) -> None:
    twins.deviate(
        optimizer_made_before,
        of=of,
        use_orig_params=use_orig_params,
        torch_does=each(lambda value: value == {"step": None, "changed": []}),
        we_do=each(lambda value: str(value["step"]).startswith("RuntimeError: ") and not value["changed"]),
    )


@clause("distributed.fsdp.fsdp_torch_limit_removed.optimizer_made_before")
@pytest.mark.parametrize(
    ("of", "use_orig_params"),
    [
        ("model", True),
        ("frozen", False),
        ("frozen", True),
        ("replaced", False),
        ("ignored", False),
        ("ignored", True),
        ("another", False),
        ("shared", False),
    ],
)
def test_optimizer_made_before_wrapping_steps_parameters_that_stay(
    twins: Twins, of: str, use_orig_params: bool
) -> None:
    for outcome in twins.agree(optimizer_made_before, of=of, use_orig_params=use_orig_params):
        assert outcome.value["step"] is None
        assert bool(outcome.value["changed"]) == (of not in ("another", "shared"))


def unused_parameters(scene: Scene, *, is_unit: bool, use_orig_params: bool, strategy: str) -> dict[str, Any]:
    """Train a layer in a first step and leave it out of a second one. Return what the second step does to it.

    Args:
        is_unit: the layer is a unit of its own.
    """
    model: Any = filled(Forked())
    wrap = partial(scene.wrap, use_orig_params=use_orig_params, strategy=strategy)
    if is_unit:
        model.sometimes = wrap(model.sometimes)
    model = wrap(model)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1, weight_decay=0.1)
    _backward(scene, model, forks=True)
    optimizer.step()
    optimizer.zero_grad()
    before = scene.whole_parameters(model)
    _backward(scene, model, forks=False)
    gradients = {clean(name): parameter.grad for name, parameter in model.named_parameters()}
    optimizer.step()
    after = scene.whole_parameters(model)
    return {"gradients": gradients, "parameters": after, "changed": _changed(before, after)}


@clause("distributed.fsdp.fully_sharded_data_parallel.unused_parameters")
@pytest.mark.parametrize("is_unit", [False, True])
@each_wrapping
def test_unused_parameters_of_used_units_are_stepped_with_zeros(
    twins: Twins, wrapping: Wrapping, is_unit: bool
) -> None:
    unused = {"sometimes.0.weight", "sometimes.0.bias"}
    for outcome in twins.agree(unused_parameters, is_unit=is_unit, **wrapping):
        assert unused & {*outcome.value["changed"]} == (set() if is_unit else unused)


class ScaledLayers(nn.Module):
    """Module that trains one element itself, which only one rank has."""

    def __init__(self, frozen: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        self.scale = nn.Parameter(torch.ones(1))
        self.shift = nn.Parameter(torch.zeros(frozen))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) * self.scale + self.shift.sum()


def forward_before_step(scene: Scene, *, frozen: int, **wrapping: Any) -> dict[str, torch.Tensor]:
    """Run a forward between each backward and its step. Return the last output and the parameters.

    Args:
        frozen: number of frozen elements in the unit of the trained element.
    """
    model = filled(ScaledLayers(frozen))
    model = scene.wrap(model, units=[nn.Linear], use_orig_params=True, **wrapping)
    model.shift.requires_grad = False
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    x = torch.linspace(-1, 1, 15, device=scene.rank.device).view(5, 3)
    for _ in range(3):
        scene.mean(lambda rank: model(x + rank).square().mean()).backward()
        output = model(x)
        optimizer.step()
        optimizer.zero_grad()
    return {"output": output, **scene.whole_parameters(model)}


@clause("distributed.fsdp.fsdp_torch_limit_removed.steps_are_seen")
@pytest.mark.deviation("fsdp.step_after_evaluation")
@each_strategy
@pytest.mark.parametrize("frozen", [1, 16])
def test_element_on_one_rank_is_stepped_after_forward(twins: Twins, strategy: str, frozen: int) -> None:
    """torch's next forward uses the weights from before the step."""
    twins.deviate_to_unsharded(forward_before_step, frozen=frozen, strategy=strategy, may_agree=True)
