"""Optimizers that step during backward, from user hooks or from torch's helper."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward

from conformance.distributed.fsdp.scenes.rank_judging import assert_all_close, holds
from conformance.distributed.fsdp.scenes.scene import Scene, filled
from conformance.distributed.fsdp.scenes.twins import Twins, both_kinds, each, raises, values_of
from conformance.judge.clauses import clause
from conformance.judge.tolerances import TRAINED

sharded_or_not = pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
accumulates_or_not = pytest.mark.parametrize("accumulates", [False, True])
is_refused = raises(RuntimeError, "only supported with use_orig_params=True")
_STEPS = 3
_LEARNING_RATE = 0.5


def built() -> nn.Module:
    return filled(nn.Sequential(nn.Linear(3, 4), nn.Tanh()))


def _loss(model: nn.Module, rank: int, number: int) -> torch.Tensor:
    x = torch.linspace(0, 1 + number, 15).view(5, 3) - rank * 0.25
    return model(x).square().mean()


def _backward(model: nn.Module, rank: int, number: int) -> None:
    _loss(model, rank, number).backward()


def trained_unsharded(world_size: int, accumulates: bool, of: int | None = None) -> dict[str, torch.Tensor]:
    """Train unsharded. One optimizer of the first `of` parameters steps after each backward."""
    model = built()
    optimizer = torch.optim.SGD([*model.parameters()][:of], lr=_LEARNING_RATE)
    for number in range(_STEPS):
        parts = [2 * number, 2 * number + 1] if accumulates else [2 * number + 1]
        for rank, part in itertools.product(range(world_size), parts):
            (_loss(model, rank, part) / world_size).backward()
        optimizer.step()
        model.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def assert_trained_like_unsharded(outcomes: Any, accumulates: bool, of: int | None = None) -> None:
    expected = trained_unsharded(len(outcomes), accumulates, of)
    for value in values_of(outcomes):
        assert of or value["left"] == 0
        assert_all_close("whole_parameters", expected, value["whole"], TRAINED)


def trained(
    scene: Scene, *, by: str, accumulates: bool, of: int | None = None, before: bool = False, **wrapping: Any
) -> dict[str, Any]:
    """Train with one optimizer for each of the first `of` parameters, which steps during backward.

    `by` is `hooks` for hooks of the user, or `torch` for torch's helper. They are registered on the wrapped model, or
    `before`. If `accumulates`, a backward in no_sync precedes each backward.
    """
    plain = built()
    model = plain if before else scene.wrap(plain, **wrapping)
    stepped = [*model.parameters()][:of]
    if by == "torch":
        _apply_optimizer_in_backward(torch.optim.SGD, stepped, {"lr": _LEARNING_RATE})
    else:
        for parameter in stepped:
            parameter.register_post_accumulate_grad_hook(_stepping(parameter))
    if before:
        model = scene.wrap(plain, **wrapping)
    for number in range(_STEPS):
        if accumulates:
            with model.no_sync():
                _backward(model, scene.rank.rank, 2 * number)
        _backward(model, scene.rank.rank, 2 * number + 1)
    left = [parameter for parameter in model.parameters() if parameter.grad is not None]
    return {"left": len(left), "whole": scene.whole_parameters(model)}


def _stepping(parameter: nn.Parameter) -> Any:
    optimizer = torch.optim.SGD([parameter], lr=_LEARNING_RATE)

    def step(_: torch.Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    return step


@clause("distributed.fsdp.fully_sharded_data_parallel.hooks.optimizers")
@accumulates_or_not
@sharded_or_not
def test_optimizers_step_in_backward(cpu_twins: Twins, strategy: str, accumulates: bool) -> None:
    arguments = {"by": "torch", "strategy": strategy, "use_orig_params": True}
    assert_trained_like_unsharded(
        cpu_twins.of_subject(trained, accumulates=accumulates, **arguments), accumulates
    )


@clause("distributed.fsdp.fully_sharded_data_parallel.hooks.optimizers")
@sharded_or_not
def test_single_parameter_steps_in_backward(cpu_twins: Twins, strategy: str) -> None:
    arguments = {"by": "torch", "of": 1, "strategy": strategy, "use_orig_params": True}
    assert_trained_like_unsharded(
        cpu_twins.agree(trained, accumulates=False, **arguments), accumulates=False, of=1
    )


@clause("distributed.fsdp.fsdp_torch_limit_removed.stepping_hooks")
@pytest.mark.deviation("fsdp.stepping_hooks")
@sharded_or_not
def test_single_parameter_steps_in_backward_while_others_accumulate(cpu_twins: Twins, strategy: str) -> None:
    """torch with NO_SHARD silently trains to other weights than unsharded training."""
    arguments = {"by": "torch", "of": 1, "strategy": strategy, "use_orig_params": True}
    cpu_twins.deviate(
        trained,
        accumulates=True,
        **arguments,
        we_do=lambda outcomes: holds(assert_trained_like_unsharded, outcomes, accumulates=True, of=1),
        may_agree=strategy == "FULL_SHARD" and not cpu_twins.is_alone,
    )


def without_original_parameters(scene: Scene, *, strategy: str, is_late: bool) -> None:
    """Use torch's helper with the flat parameter, before or after the first backward."""
    model = scene.wrap(built(), strategy=strategy)
    if is_late:
        _backward(model, scene.rank.rank, 0)
        model.zero_grad()
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": _LEARNING_RATE})
    _backward(model, scene.rank.rank, 1)


@clause("distributed.fsdp.fully_sharded_data_parallel.hooks.optimizers")
@sharded_or_not
def test_optimizers_are_refused_without_original_parameters(cpu_twins: Twins, strategy: str) -> None:
    arguments = {"strategy": strategy, "is_late": False}
    assert is_refused(cpu_twins.agree(without_original_parameters, may_raise=True, **arguments))


@clause("distributed.fsdp.fsdp_torch_limit_removed.stepping_hooks")
@pytest.mark.deviation("fsdp.stepping_hooks")
@sharded_or_not
def test_optimizers_are_refused_without_original_parameters_at_any_time(
    cpu_twins: Twins, strategy: str
) -> None:
    """torch raises an unrelated AssertionError with FULL_SHARD, and no error with NO_SHARD."""
    arguments = {"strategy": strategy, "is_late": True}
    cpu_twins.deviate(without_original_parameters, **arguments, we_do=is_refused)


@clause("distributed.fsdp.fsdp_torch_limit_removed.stepping_hooks")
@pytest.mark.deviation("fsdp.stepping_hooks")
@accumulates_or_not
@pytest.mark.parametrize(
    ("strategy", "use_orig_params"), [("FULL_SHARD", False), ("NO_SHARD", False), ("FULL_SHARD", True)]
)
def test_steps_in_backward_use_averaged_gradients(
    cpu_twins: Twins, strategy: str, use_orig_params: bool, accumulates: bool
) -> None:
    """torch with NO_SHARD steps with the rank's own gradients, and with use_orig_params never runs the hooks."""
    arguments = {"by": "hooks", "strategy": strategy, "use_orig_params": use_orig_params}
    cpu_twins.deviate(
        trained,
        accumulates=accumulates,
        **arguments,
        we_do=lambda outcomes: holds(assert_trained_like_unsharded, outcomes, accumulates),
        may_agree=cpu_twins.is_alone,
    )


@clause("distributed.fsdp.fsdp_torch_limit_removed.stepping_hooks")
@pytest.mark.deviation("fsdp.stepping_hooks")
@sharded_or_not
def test_hooks_that_step_are_kept_by_original_parameters(cpu_twins: Twins, strategy: str) -> None:
    cpu_twins.deviate(
        trained,
        by="hooks",
        before=True,
        accumulates=False,
        strategy=strategy,
        use_orig_params=True,
        torch_does=each(lambda value: value["left"] > 0),
        we_do=lambda outcomes: holds(assert_trained_like_unsharded, outcomes, accumulates=False),
    )


@clause("distributed.fsdp.fsdp_torch_limit_removed.hooks_before_wrapping")
@pytest.mark.deviation("fsdp.hooks_before_wrapping")
@pytest.mark.parametrize("by", ["hooks", "torch"])
@sharded_or_not
def test_hooks_that_step_are_refused_if_flat_parameters_would_drop_them(
    cpu_twins: Twins, strategy: str, by: str
) -> None:
    untrained = dict(built().named_parameters())
    cpu_twins.deviate(
        trained,
        by=by,
        before=True,
        accumulates=False,
        strategy=strategy,
        torch_does=each(lambda value: holds(assert_all_close, "", untrained, value["whole"], TRAINED)),
        we_do=raises(RuntimeError, "hooks after accumulation of 0.weight, 0.bias would never run"),
    )


def only_an_input(scene: Scene, *, use_orig_params: bool) -> list[int]:
    """Return how often hooks ran in a backward, and after that with a request for the gradient of an input only."""
    model = scene.wrap(built(), use_orig_params=use_orig_params)
    called: list[torch.Tensor] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(called.append)
    _backward(model, scene.rank.rank, 1)
    by_backward = len(called)
    x = torch.ones(5, 3, requires_grad=True)
    torch.autograd.grad(model(x).sum(), x)
    return [by_backward, len(called)]


@clause("distributed.fsdp.fully_sharded_data_parallel.hooks.optimizers")
@both_kinds
def test_hooks_are_not_called_without_accumulated_gradients(cpu_twins: Twins, use_orig_params: bool) -> None:
    """A hook that ran there would repeat the last step."""
    for by_backward, in_the_end in cpu_twins.values(only_an_input, use_orig_params=use_orig_params):
        assert by_backward == in_the_end
        # With original parameters, torch runs no hooks of the user: deviation fsdp.stepping_hooks.
        assert by_backward > 0 or use_orig_params
