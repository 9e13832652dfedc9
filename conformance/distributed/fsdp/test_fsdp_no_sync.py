"""Gradient accumulation inside and outside no_sync."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from conformance.distributed.fsdp.scenes.fsdp_training import states_of
from conformance.distributed.fsdp.scenes.module_trees import loss_of
from conformance.distributed.fsdp.scenes.rank_judging import share_of_examples
from conformance.distributed.fsdp.scenes.scene import Scene, filled, tried
from conformance.distributed.fsdp.scenes.twins import (
    FLAT,
    Twins,
    Wrapping,
    each,
    each_strategy,
    each_wrapping,
    leaf_by_leaf,
)
from conformance.judge.clauses import clause
from conformance.strategies.sharding import steps, trainings

accumulating = steps(orders=("in turn", "no_sync", "no_sync"), befores=("",)).filter(
    lambda step: step.forwards > 1
)


@clause("distributed.fsdp.fully_sharded_data_parallel.no_sync.accumulates")
@each_strategy
@share_of_examples(0.2)
@given(data=st.data())
def test_accumulated_gradients_match_torch_and_unsharded(
    twins: Twins, strategy: str, data: st.DataObject
) -> None:
    twins.agree_on_training(data.draw(trainings(strategy=strategy, schedule=accumulating)))


def unpadded(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state without the padding at the end of a full flat gradient. The padding is zero."""
    grad = state["grad"]
    if grad is None or grad.dim() != 1 or not grad.any():
        return state
    return {**state, "grad": grad[: int(grad.nonzero()[-1]) + 1]}


def shown(scene: Scene) -> dict[str, Any]:
    """Return this rank's parameters and gradients. The gradients may be averaged or not."""
    return {name: unpadded(state) for name, state in states_of(scene.model).items()}


def one_backward(scene: Scene) -> Iterator[Any]:
    """Run one backward in no_sync and one after it."""
    with scene.model.no_sync():
        scene.backward(0)
    yield shown(scene)
    scene.backward(1)


def several_backwards(scene: Scene) -> Iterator[Any]:
    """Run three backwards in two contexts, and one after them."""
    with scene.model.no_sync():
        scene.backward(0)
        scene.backward(1)
    with scene.model.no_sync():
        scene.backward(2)
    yield shown(scene)
    scene.backward(3)


def a_backward_before(scene: Scene) -> Iterator[Any]:
    """Accumulate in no_sync after a backward whose gradients were averaged."""
    scene.backward(0)
    with scene.model.no_sync():
        scene.backward(1)
    yield shown(scene)
    scene.backward(2)
    yield shown(scene)


def a_forward_alone(scene: Scene) -> Iterator[Any]:
    """Run only the forward in no_sync. Its backward comes later, and its gradients are averaged."""
    with scene.model.no_sync():
        loss = loss_of(scene.forward(0))
    loss.backward()
    yield shown(scene)


def a_backward_alone(scene: Scene) -> Iterator[Any]:
    """Run only the backward in no_sync, after its forward. The gradients are not averaged."""
    loss = loss_of(scene.forward(0))
    with scene.model.no_sync():
        loss.backward()
    yield shown(scene)
    scene.backward(1)


def an_evaluation(scene: Scene) -> Iterator[Any]:
    """Evaluate inside no_sync, where gradients wait, and after it."""
    with scene.model.no_sync():
        scene.backward(0)
        with torch.no_grad():
            yield loss_of(scene.forward(1))
    with torch.no_grad():
        yield loss_of(scene.forward(2))
    scene.backward(3)


def two_forwards(scene: Scene) -> Iterator[Any]:
    """Run two forwards and one backward of their sum in no_sync."""
    with scene.model.no_sync():
        first, second = (loss_of(scene.forward(number)) for number in range(2))
        (first + second).backward()
    yield shown(scene)
    scene.backward(2)


def cleared_gradients(scene: Scene) -> Iterator[Any]:
    """Clear the gradients between no_sync and the next backward."""
    with scene.model.no_sync():
        scene.backward(0)
    scene.model.zero_grad()
    yield shown(scene)
    scene.backward(1)


def cleared_inside(scene: Scene) -> Iterator[Any]:
    """Clear the gradients between two backwards in no_sync."""
    with scene.model.no_sync():
        scene.backward(0)
        scene.model.zero_grad()
        scene.backward(1)
    yield shown(scene)
    scene.backward(2)


def clipping(scene: Scene) -> Iterator[Any]:
    with scene.model.no_sync():
        scene.backward(0)
    scene.backward(1)
    yield scene.model.clip_grad_norm_(0.05)


def optimizer_steps(scene: Scene) -> Iterator[Any]:
    """Run steps that each begin with a backward in no_sync."""
    optimizer = torch.optim.SGD(scene.model.parameters(), 0.1, momentum=0.5)
    for number in range(3):
        with scene.model.no_sync():
            scene.backward(2 * number)
        yield scene.backward(2 * number + 1)
        optimizer.step()
        optimizer.zero_grad()
    yield scene.whole_parameters()
    scene.backward(7)


DOES = (
    one_backward,
    several_backwards,
    a_backward_before,
    a_forward_alone,
    a_backward_alone,
    an_evaluation,
    two_forwards,
    cleared_gradients,
    cleared_inside,
    clipping,
    optimizer_steps,
)


def gradients_around_no_sync(scene: Scene, *, does: Any) -> dict[str, Any]:
    """Run a function of `DOES`. Return its intermediate results, and this rank's and the full gradients at the end."""
    on_the_way = list(does(scene))
    return {"on the way": on_the_way, "shown": shown(scene), "whole": scene.whole_gradients()}


@clause("distributed.fsdp.fully_sharded_data_parallel.no_sync.leaves_unreduced")
@pytest.mark.parametrize("does", DOES)
@each_wrapping
def test_unreduced_gradients_match_torch(twins: Twins, wrapping: Wrapping, does: Any) -> None:
    twins.agree(gradients_around_no_sync, leaf_by_leaf(**wrapping), does=does)


class OptionalWeight(nn.Linear):
    """Layer that uses its weight only if the forward says so."""

    def forward(self, x: torch.Tensor, uses_weight: bool) -> torch.Tensor:
        return super().forward(x) if uses_weight else 2 * x


def cleared_after_unused_weight(scene: Scene, *, use_orig_params: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Clear gradients after a backward in no_sync that gave the unit no gradient, then run another backward.

    Return its gradient, and that of a fresh model.
    """

    def backward(model: nn.Module) -> torch.Tensor | None:
        x = torch.linspace(-1 - scene.rank.rank, 1, 6, device=scene.rank.device).view(2, 3)
        model(x, uses_weight=True).square().sum().backward()
        return scene.whole_gradients(model)["weight"]

    model, fresh = (
        scene.wrap(filled(OptionalWeight(3, 3, bias=False)), use_orig_params=use_orig_params)
        for _ in range(2)
    )
    backward(model)
    with model.no_sync():
        model(torch.ones(2, 3, requires_grad=True), uses_weight=False).sum().backward()
    model.zero_grad()
    return backward(model), backward(fresh)


@clause("distributed.fsdp.fully_sharded_data_parallel.no_sync.cleared_gradients")
@pytest.mark.world_sizes(2)
@pytest.mark.deviation("fsdp.cleared_gradients_return")
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_cleared_gradients_stay_cleared_after_unused_weight(twins: Twins, use_orig_params: bool) -> None:
    def has_earlier_ones(gradients: Any) -> bool:
        # The simulated device fills unwritten memory with nan, and torch adds some of it.
        returned, right = (gradient.values for gradient in gradients)
        return torch.equal(returned, 2 * right) or bool(returned.isnan().any())

    twins.deviate(
        cleared_after_unused_weight,
        use_orig_params=use_orig_params,
        torch_does=each(has_earlier_ones),
        we_do=each(lambda gradients: torch.equal(gradients[0].values, gradients[1].values)),
    )


def gradients_after_no_sync(scene: Scene, *, nested: bool) -> dict[str, Any]:
    """Leave no_sync by an exception, or nest it. Return the gradients of the next backward, which must be reduced."""

    def raises() -> None:
        with scene.model.no_sync():
            raise KeyError("injected")

    def enters_twice() -> None:
        with scene.model.no_sync(), scene.model.no_sync():
            scene.backward()

    raised = tried(enters_twice if nested else raises)
    scene.backward(1)
    return {"raised": raised, "whole": scene.whole_gradients()}


@clause("distributed.fsdp.fully_sharded_data_parallel.no_sync.restores")
@pytest.mark.parametrize("nested", [False, True])
@each_strategy
def test_gradients_are_reduced_after_no_sync(twins: Twins, strategy: str, nested: bool) -> None:
    twins.agree(gradients_after_no_sync, leaf_by_leaf(strategy), nested=nested)


def no_sync_of_inner_unit(scene: Scene) -> Any:
    scene.backward()
    return tried(lambda: scene.units[1].no_sync().__enter__())


def no_sync_in_forward(scene: Scene) -> Any:
    """Return the errors of entering no_sync in a forward."""
    attempts: list[Any] = []
    scene.model.head.register_forward_pre_hook(
        lambda *_: attempts.append(tried(lambda: scene.model.no_sync().__enter__()))
    )
    scene.forward()
    return attempts


@clause("distributed.fsdp.fully_sharded_data_parallel.no_sync.refused")
@pytest.mark.parametrize("program", [no_sync_of_inner_unit, no_sync_in_forward])
def test_no_sync_is_refused_on_inner_units_and_in_forward(twins: Twins, program: Any) -> None:
    text = "on inner FSDP instances" if program is no_sync_of_inner_unit else "expected to be in states"
    for outcome in twins.agree(program, FLAT):
        assert text in str(outcome.value)
