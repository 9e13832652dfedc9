"""Calls that would silently lose data raise an error that names the cause, on every rank."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from conformance.distributed.fsdp.scenes.fsdp_training import Setup
from conformance.distributed.fsdp.scenes.module_trees import loss_of
from conformance.distributed.fsdp.scenes.scene import SIMPLE, Scene
from conformance.distributed.fsdp.scenes.twins import (
    STRATEGIES,
    Twins,
    both_kinds,
    each,
    leaf_by_leaf,
    raises,
)
from conformance.judge.clauses import clause


class Doubling(nn.Linear):
    """Linear layer that changes its own weight in forward."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.mul_(2)
        return super().forward(input)


def weight_changed_in_forward(scene: Scene) -> torch.Tensor:
    """Return the full weight after a forward that changed it. The weight began with ones."""
    plain = Doubling(3, 4)
    nn.init.ones_(plain.weight)
    model = scene.wrap(plain)
    model(torch.ones(1, 3)).sum().backward()
    with scene.fsdp.summon_full_params(model):
        return model.module.weight.detach().clone()


@clause("distributed.fsdp.fsdp_torch_limit_removed.change_in_forward")
def test_weight_changed_in_forward_is_not_lost(cpu_twins: Twins) -> None:
    outcomes = cpu_twins.of_subject(weight_changed_in_forward)
    is_kept = each(lambda weight: (weight.values == 2).all())(outcomes)
    assert is_kept or any(raises(RuntimeError, text)(outcomes) for text in ("weight", "modified inplace")), (
        outcomes
    )


def tied_in_two_units(scene: Scene) -> int:
    """Return the number of parameters to step if two explicitly wrapped units share one."""
    first, second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    second.weight = first.weight
    return len(list(scene.wrap(nn.Sequential(scene.wrap(first), scene.wrap(second))).parameters()))


@clause("distributed.fsdp.fsdp_torch_limit_removed.tied_in_two_units")
@pytest.mark.deviation("fsdp.tied_in_two_units")
def test_parameter_tied_in_two_units_is_refused(cpu_twins: Twins) -> None:
    cpu_twins.deviate(
        tied_in_two_units,
        torch_does=each(lambda parameters: parameters == 2),
        we_do=raises(ValueError, "is the same parameter as weight"),
    )


def copied(scene: Scene, *, use_orig_params: bool) -> str:
    """Return the type of a deep copy of a model with an inner unit."""
    inner = scene.wrap(nn.Linear(4, 2), use_orig_params=use_orig_params)
    model = scene.wrap(nn.Sequential(nn.Linear(3, 4), inner), use_orig_params=use_orig_params)
    return type(copy.deepcopy(model)).__name__


@clause("distributed.fsdp.fsdp_torch_limit_removed.copies")
@pytest.mark.deviation("fsdp.copies")
@both_kinds
def test_copy_of_wrapped_model_is_refused_with_cure(cpu_twins: Twins, use_orig_params: bool) -> None:
    cpu_twins.deviate(
        copied,
        use_orig_params=use_orig_params,
        torch_does=lambda outcomes: all(
            outcome.raised and "wrapped" not in outcome.raised.text for outcome in outcomes
        ),
        we_do=raises(TypeError, "copy it before it is wrapped"),
    )


def tied_on_meta(scene: Scene, *, across: bool, by: str) -> tuple[int, float]:
    """Wrap tied weights on the meta device, in one unit or `across` two.

    Return the number of parameters and the sum of their absolute gradients.
    """
    with torch.device("meta"):
        plain = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4, bias=False)))
    plain[1][0].weight = plain[0].weight

    def fill(module: nn.Module) -> None:
        module.to_empty(device="cpu", recurse=by == "recursive function")
        for parameter in module.parameters(recurse=by == "recursive function"):
            nn.init.ones_(parameter)

    arguments = {} if by == "reset" else {"param_init_fn": fill}
    model = scene.wrap(plain, use_orig_params=True, units=[nn.Sequential] if across else [], **arguments)
    model(torch.ones(2, 4)).sum().backward()
    with scene.fsdp.summon_full_params(model, with_grads=True):
        parameters = list(model.parameters())
        return len(parameters), sum(float(parameter.grad.abs().sum()) for parameter in parameters)


@clause("distributed.fsdp.fsdp_torch_limit_removed.tied_on_meta")
@pytest.mark.deviation("fsdp.tied_on_meta")
@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("by", ["reset", "function", "recursive function"])
def test_weights_tied_on_meta_device_stay_tied(cpu_twins: Twins, across: bool, by: str) -> None:
    """The model has one weight and one bias, not two weights and a bias.

    With ones as values, the gradients are known.
    """
    # The sum over 2 rows and 4 outputs: inner weight 2 * 4 * 5 * 4, outer weight 2 * 4 * 4 * 4, bias 2 * 4 * 4.
    of_ones = 160 + 128 + 32
    cpu_twins.deviate(
        tied_on_meta,
        across=across,
        by=by,
        torch_does=each(lambda value: value[0] == 3),
        we_do=each(lambda value: value[0] == 2 and (by == "reset" or value[1] == of_ones)),
    )


def clipped_with_an_inf(scene: Scene) -> torch.Tensor:
    """Clip with `error_if_nonfinite` while one rank's gradients contain an inf."""
    model = scene.wrap(nn.Linear(3, 4))
    model(torch.ones(1, 3)).sum().backward()
    if scene.rank.rank == 0:
        next(model.parameters()).grad[0] = torch.inf
    return model.clip_grad_norm_(0.5, error_if_nonfinite=True, foreach=False)


@clause("distributed.fsdp.fsdp_torch_limit_removed.nonfinite_is_refused")
@pytest.mark.deviation("fsdp.clip_can_refuse")
def test_clipping_refuses_an_inf_of_another_rank(cpu_twins: Twins) -> None:
    cpu_twins.deviate(
        clipped_with_an_inf,
        torch_does=raises(TypeError, "error_if_nonfinite"),
        we_do=raises(RuntimeError, "non-finite"),
    )


def moved_away(scene: Scene, *, returns: bool = False) -> torch.Tensor:
    """Run a forward after the parameters were moved to the meta device, and back from it if `returns`."""
    scene.model.to("meta")
    if returns:
        scene.model.to_empty(device=scene.rank.device)
        for parameter in scene.model.parameters():
            parameter.data.fill_(0.5)
    return loss_of(scene.forward()).detach()


@clause("distributed.fsdp.fsdp_torch_limit_removed.moved_to_meta")
@both_kinds
def test_model_moved_to_meta_device_refuses_to_compute(cpu_twins: Twins, use_orig_params: bool) -> None:
    setup = Setup(arguments={"use_orig_params": use_orig_params})
    cpu_twins.check_both(
        lambda outcomes: all("meta" in str(outcome.raised) for outcome in outcomes), moved_away, setup
    )


@clause("distributed.fsdp.fsdp_torch_limit_removed.moved_to_meta")
@pytest.mark.deviation("fsdp.returned_from_meta")
def test_model_returns_from_meta_device(cpu_twins: Twins) -> None:
    """torch's forward uses the weights from before the move."""
    cpu_twins.deviate_to_unsharded(moved_away, returns=True)


def backward_beside_gradients(scene: Scene) -> None:
    """Run a backward inside the context while full gradients are shown."""
    scene.backward()
    with scene.fsdp.summon_full_params(scene.model, with_grads=True):
        scene.backward(1)


@clause("distributed.fsdp.fsdp_torch_limit_removed.backward_beside_whole_gradients")
@pytest.mark.world_sizes(fewest=2)
@pytest.mark.parametrize("strategy", STRATEGIES[:2])
def test_backward_beside_unsharded_gradients_is_refused(twins: Twins, strategy: str) -> None:
    setup = leaf_by_leaf(strategy, use_orig_params=True)
    twins.check_both(
        lambda outcomes: all("grad" in str(outcome.raised) for outcome in outcomes),
        backward_beside_gradients,
        setup,
        tree=SIMPLE,
    )
