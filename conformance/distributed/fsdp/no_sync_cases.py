"""Cases of no_sync with other calls before, inside and after the context."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from conformance.distributed.fsdp.fsdp_cases import gathered_gradients, gathered_parameters, state_of
from conformance.distributed.fsdp.lab import Lab, filled, tried
from conformance.distributed.fsdp.module_trees import loss_of


def unpadded(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state without the padding at the end of a full flat gradient. The padding is zero."""
    grad = state["grad"]
    if grad is None or grad.dim() != 1 or not grad.any():
        return state
    return {**state, "grad": grad[: int(grad.nonzero()[-1]) + 1]}


def shown(lab: Lab) -> dict[str, Any]:
    """Return this rank's parameters and gradients. The gradients may be averaged or not."""
    return {name: unpadded(state_of(parameter)) for name, parameter in lab.model.named_parameters()}


def nothing_else(lab: Lab) -> Iterator[Any]:
    with lab.model.no_sync():
        lab.backward(0)
    yield shown(lab)
    lab.backward(1)


def several_backwards(lab: Lab) -> Iterator[Any]:
    with lab.model.no_sync():
        lab.backward(0)
        lab.backward(1)
    with lab.model.no_sync():
        lab.backward(2)
    yield shown(lab)
    lab.backward(3)


def a_backward_before(lab: Lab) -> Iterator[Any]:
    """Accumulate in no_sync after a backward whose gradients were averaged."""
    lab.backward(0)
    with lab.model.no_sync():
        lab.backward(1)
    lab.backward(2)
    yield shown(lab)


def a_forward_alone(lab: Lab) -> Iterator[Any]:
    """Run only the forward in no_sync. Its backward comes later, and its gradients are averaged."""
    with lab.model.no_sync():
        loss = loss_of(lab.forward(0))
    loss.backward()
    yield shown(lab)


def a_backward_alone(lab: Lab) -> Iterator[Any]:
    """Run only the backward in no_sync, after its forward. The gradients are not averaged."""
    loss = loss_of(lab.forward(0))
    with lab.model.no_sync():
        loss.backward()
    yield shown(lab)
    lab.backward(1)


def an_evaluation(lab: Lab) -> Iterator[Any]:
    with lab.model.no_sync():
        lab.backward(0)
        with torch.no_grad():
            yield loss_of(lab.forward(1))
    with torch.no_grad():
        yield loss_of(lab.forward(2))
    lab.backward(3)


def two_forwards(lab: Lab) -> Iterator[Any]:
    with lab.model.no_sync():
        first, second = (loss_of(lab.forward(number)) for number in range(2))
        (first + second).backward()
    yield shown(lab)
    lab.backward(2)


def cleared_gradients(lab: Lab) -> Iterator[Any]:
    with lab.model.no_sync():
        lab.backward(0)
    lab.model.zero_grad()
    yield shown(lab)
    lab.backward(1)


def cleared_inside(lab: Lab) -> Iterator[Any]:
    with lab.model.no_sync():
        lab.backward(0)
        lab.model.zero_grad()
        lab.backward(1)
    yield shown(lab)
    lab.backward(2)


def clipping(lab: Lab) -> Iterator[Any]:
    with lab.model.no_sync():
        lab.backward(0)
    lab.backward(1)
    yield lab.model.clip_grad_norm_(0.05)


def optimizer_steps(lab: Lab) -> Iterator[Any]:
    """Run steps that each begin with a backward in no_sync."""
    optimizer = torch.optim.SGD(lab.model.parameters(), 0.1, momentum=0.5)
    for number in range(3):
        with lab.model.no_sync():
            lab.backward(2 * number)
        yield lab.backward(2 * number + 1)
        optimizer.step()
        optimizer.zero_grad()
    yield gathered_parameters(lab.library, lab.model)
    lab.backward(7)


DOES = (
    nothing_else,
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


def around_no_sync(lab: Lab, *, does: Any) -> dict[str, Any]:
    """Run a function of `DOES`. Return its intermediate results, and this rank's and the full gradients at the end."""
    on_the_way = list(does(lab))
    return {
        "on the way": on_the_way,
        "shown": shown(lab),
        "whole": gathered_gradients(lab.library, lab.model),
    }


def and_restored(lab: Lab, *, nested: bool) -> dict[str, Any]:
    """Leave no_sync by an exception, or nest it. Return the gradients of the next backward, which must be reduced."""

    def raises() -> None:
        with lab.model.no_sync():
            raise KeyError("injected")

    def enters_twice() -> None:
        with lab.model.no_sync(), lab.model.no_sync():
            lab.backward()

    raised = tried(enters_twice if nested else raises)
    lab.backward(1)
    return {"raised": raised, "whole": gathered_gradients(lab.library, lab.model)}


class OptionalWeight(nn.Linear):
    """Layer that uses its weight only if the forward says so."""

    def forward(self, x: torch.Tensor, uses_weight: bool) -> torch.Tensor:
        return super().forward(x) if uses_weight else 2 * x


def cleared_after_unused_weight(lab: Lab, *, use_orig_params: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Clear gradients after a backward in no_sync that gave the unit no gradient, then run another backward.

    Return its gradient, and that of a fresh model.
    """

    def backward(model: nn.Module) -> torch.Tensor | None:
        x = torch.linspace(-1 - lab.rank.rank, 1, 6, device=lab.rank.device).view(2, 3)
        model(x, uses_weight=True).square().sum().backward()
        return gathered_gradients(lab.library, model)["weight"]

    model, fresh = (
        lab.wrap(filled(OptionalWeight(3, 3, bias=False)), use_orig_params=use_orig_params) for _ in range(2)
    )
    backward(model)
    with model.no_sync():
        model(torch.ones(2, 3, requires_grad=True), uses_weight=False).sum().backward()
    model.zero_grad()
    return backward(model), backward(fresh)


def of_an_inner_unit(lab: Lab) -> Any:
    lab.backward()
    return tried(lambda: lab.units[1].no_sync().__enter__())


def in_forward(lab: Lab) -> Any:
    attempts: list[Any] = []
    lab.model.head.register_forward_pre_hook(
        lambda *_: attempts.append(tried(lambda: lab.model.no_sync().__enter__()))
    )
    lab.forward()
    return attempts
