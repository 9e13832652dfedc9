"""The events of a training loop in any order have the results of the unsharded model."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

from conformance.distributed.fsdp.scenes.forked_model import Forked, loss, output
from conformance.distributed.fsdp.scenes.scene import Scene, filled, raise_in_backward
from conformance.distributed.fsdp.scenes.twins import Twins
from conformance.judge.clauses import clause

SHARDED_BY = ("flat", "flat SHARD_GRAD_OP", "originals", "originals SHARD_GRAD_OP", "fully_shard", "kept")


def _raise(*_: Any) -> None:
    raise KeyError("amid the forward")


class Loop:
    """A training loop of a model with a unit that only some forwards use. Each method is an event.

    A step is left out while gradients of this rank wait to be averaged.
    """

    def __init__(self, scene: Scene, sharded_by: str) -> None:
        kind, _, strategy = sharded_by.partition(" ")
        self.scene, self.is_fsdp1 = scene, kind in ("flat", "originals")
        model = filled(Forked())
        if self.is_fsdp1:
            strategy = strategy or "FULL_SHARD"
            how = {"strategy": strategy, "use_orig_params": kind == "originals"}
            scene.model = scene.wrap(model, units=[nn.Sequential], **how)
        else:
            scene.model = scene.shard_children(model)
            scene.model.set_reshard_after_backward(kind != "kept")
        self.model = scene.model
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.125, momentum=0.5)
        # The units whose gradients are not averaged yet: "always" and "sometimes".
        self.waiting: set[str] = set()
        self.outputs: list[Tensor] = []
        self._forwards = 0

    def _loss(self, *, forks: bool) -> Tensor:
        self._forwards += 1
        return loss(self.scene, self._forwards % 3, forks=forks)

    def _unsynchronised(self) -> contextlib.AbstractContextManager[None]:
        if self.is_fsdp1:
            return self.model.no_sync()
        stack = contextlib.ExitStack()
        self.model.set_requires_gradient_sync(False)
        stack.callback(self.model.set_requires_gradient_sync, True)
        return stack

    def backward(self, *, forks: bool = True, forwards: int = 1) -> None:
        # fully_shard averages waiting gradients only in a backward of their unit.
        forks = forks or "sometimes" in self.waiting
        torch.stack([self._loss(forks=forks) for _ in range(forwards)]).sum().backward()
        self.waiting.clear()

    def accumulate(self, *, forks: bool = True) -> None:
        with self._unsynchronised():
            self._loss(forks=forks).backward()
        self.waiting |= {"always", "sometimes"} if forks else {"always"}

    def fail(self, *, by: str, waits: bool = False) -> None:
        """Run a backward that raises after the reduction of the last units, then clear all gradients."""
        self._average_uncleared()
        with self._unsynchronised() if waits and self.is_fsdp1 else contextlib.nullcontext():
            with self.model.body.register_forward_hook(raise_in_backward):
                result = self._loss(forks=True)
            with pytest.raises(KeyError, match="amid the backward"):
                result.backward()
        self.clear(by=by)

    def fail_forward(self) -> None:
        """Run a forward that raises before its last unit. Gradients of earlier backwards stay."""
        with (
            self.model.always.register_forward_pre_hook(_raise),
            pytest.raises(KeyError, match="amid the forward"),
        ):
            self._loss(forks=True)

    def clear(self, *, by: str, set_to_none: bool = True) -> None:
        self._average_uncleared()
        (self.optimizer if by == "optimizer" else self.model).zero_grad(set_to_none=set_to_none)
        if set_to_none:
            self.waiting.clear()

    def _average_uncleared(self) -> None:
        """Run a backward if gradients wait that zero_grad does not clear: those of fully_shard."""
        if self.waiting and not self.is_fsdp1:
            self.backward()

    def freeze(self, *, thaws: bool = False) -> None:
        """Clear all gradients, and then freeze or thaw a unit."""
        self.clear(by="model")
        self.model.sometimes.requires_grad_(thaws)

    def step(self) -> None:
        if not self.waiting:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def load(self) -> None:
        self.model.load_state_dict({name: value * 0.75 for name, value in self.model.state_dict().items()})

    @torch.no_grad()
    def write(self) -> None:
        """Write to the parameters that the optimizer steps."""
        for parameter in self.optimizer.param_groups[0]["params"]:
            parameter.mul_(0.75)

    def evaluate(self) -> None:
        self.outputs.append(output(self.scene))

    def forward(self) -> None:
        self._loss(forks=True)


Event = tuple[str, dict[str, Any]]
_BACKWARD: Event = ("backward", {})
_ACCUMULATE: Event = ("accumulate", {})
_WITHOUT_UNIT = {"forks": False}
EVENTS: dict[str, list[dict[str, Any]]] = {
    "backward": [{}, _WITHOUT_UNIT, {"forwards": 2}],
    "accumulate": [{}, _WITHOUT_UNIT],
    "fail": [{"by": by, "waits": waits} for by in ("optimizer", "model") for waits in (True, False)],
    "fail_forward": [{}],
    "clear": [{"by": by, "set_to_none": sets} for by in ("optimizer", "model") for sets in (True, False)],
    "freeze": [{}, {"thaws": True}],
    "step": [{}],
    "load": [{}],
    "write": [{}],
    "evaluate": [{}],
    "forward": [{}],
}


def trained(scene: Scene, events: list[Event], sharded_by: str) -> list[Tensor]:
    """Run the events, then a step. Return the outputs of the evaluations, the last of which follows the step."""
    loop = Loop(scene, sharded_by)
    for verb, arguments in (*events, _BACKWARD, ("step", {}), ("evaluate", {})):
        getattr(loop, verb)(**arguments)
    return loop.outputs


@clause("distributed.fsdp.failures.any_order")
@pytest.mark.deviation("fsdp.events_in_any_order")
@pytest.mark.parametrize("sharded_by", SHARDED_BY)
@given(
    events=st.lists(
        st.sampled_from(list(EVENTS)).flatmap(
            lambda verb: st.tuples(st.just(verb), st.sampled_from(EVENTS[verb]))
        ),
        min_size=2,
        max_size=8,
    )
)
@example(events=[_ACCUMULATE, ("clear", {"by": "optimizer"}), ("accumulate", _WITHOUT_UNIT)])
@example(events=[_ACCUMULATE, ("fail", {"by": "optimizer"})])
@example(events=[_BACKWARD, ("freeze", {})])
@example(events=[_BACKWARD, ("clear", {"by": "model"})])
def test_events_in_any_order_train_like_unsharded(twins: Twins, sharded_by: str, events: list[Event]) -> None:
    twins.deviate_to_unsharded(trained, events=events, sharded_by=sharded_by, may_agree=True)
