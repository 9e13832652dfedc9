"""The events of a training loop in any order have the results of the unsharded model."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from conformance.distributed.fsdp.scenes.forked_model import Forked, output
from conformance.distributed.fsdp.scenes.scene import Scene, filled, raise_in_backward
from conformance.distributed.fsdp.scenes.twins import Twins
from conformance.judge.clauses import clause

SHARDED_BY = (
    "flat",
    "flat SHARD_GRAD_OP",
    "originals",
    "originals SHARD_GRAD_OP",
    "originals NO_SHARD",
    "fully_shard",
    "kept",
)


def _raise(*_: Any) -> None:
    raise KeyError("amid the forward")


def _plain(model: nn.Module, x: Tensor, forks: bool) -> Tensor:
    return model(x, forks).square().mean()


def _penalised(model: nn.Module, x: Tensor, forks: bool) -> Tensor:
    result = model(x.requires_grad_(), forks)
    (grad,) = torch.autograd.grad(result.sum(), x, create_graph=True)
    return grad.square().mean() + result.square().mean()


def _checkpointed(model: nn.Module, x: Tensor, forks: bool) -> Tensor:
    return checkpoint(model, x, forks, use_reentrant=False).square().mean()


def _reentrant(model: nn.Module, x: Tensor, forks: bool) -> Tensor:
    return checkpoint(model, x.requires_grad_(), forks, use_reentrant=True).square().mean()


LOSSES = {"plain": _plain, "penalised": _penalised, "checkpointed": _checkpointed, "reentrant": _reentrant}


class Loop:
    """A training loop of a model with a unit that only some forwards use. Each public method is an event.

    Events that change gradients are left out while gradients of this rank wait to be averaged.
    """

    def __init__(self, scene: Scene, sharded_by: str) -> None:
        kind, _, strategy = sharded_by.partition(" ")
        self.scene, self.is_fsdp1, self.is_flat = scene, kind in ("flat", "originals"), kind == "flat"
        model = filled(Forked())
        if self.is_fsdp1:
            strategy = strategy or "FULL_SHARD"
            keeps_originals = kind == "originals"
            how = {
                "strategy": strategy,
                "use_orig_params": keeps_originals,
                "forward_prefetch": keeps_originals,
            }
            scene.model = scene.wrap(model, units=[nn.Sequential], **how)
        else:
            scene.model = scene.shard_children(model)
            scene.model.set_reshard_after_backward(kind != "kept")
        self.model = scene.model
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.125, momentum=0.5)
        self.parameters: list[Any] = self.optimizer.param_groups[0]["params"]
        # The units whose gradients are not averaged yet: "always" and "sometimes".
        self.waiting: set[str] = set()
        # Without sharding, a penalty after a failed backward in no_sync looks like a changed gradient of that backward.
        self.is_sharded, self._hides_clears = strategy != "NO_SHARD" and scene.rank.world_size > 1, False
        self.outputs: list[Tensor] = []
        self._forwards = 0

    def _loss(self, *, forks: bool = True, of: str = "plain") -> Tensor:
        self._forwards += 1
        last = 1 + self._forwards % 3

        def of_rank(rank: int) -> Tensor:
            # On the device, because torch's fully_shard moves no inputs when backward recomputes the root.
            x = torch.linspace(0, last, 15, device=self.scene.rank.device).view(5, 3)
            return LOSSES[of](self.model, x - rank * 0.25, forks)

        return self.scene.mean(of_rank)

    def _unsynchronised(self) -> contextlib.AbstractContextManager[None]:
        if self.is_fsdp1:
            return self.model.no_sync()
        stack = contextlib.ExitStack()
        self.model.set_requires_gradient_sync(False)
        stack.callback(self.model.set_requires_gradient_sync, True)
        return stack

    def backward(self, *, forks: bool = True, of: str = "plain") -> None:
        # fully_shard averages waiting gradients only in a backward of their unit.
        forks = forks or "sometimes" in self.waiting
        self._loss(forks=forks, of=of).backward()
        self.waiting.clear()

    def two_backwards(self, *, of: str) -> None:
        """Run backwards `of` the joint loss of two forwards, of both losses in a row, or twice of one loss."""
        first = self._loss()
        second = first if of == "one" else self._loss()
        if of == "sum":
            (first + second).backward()
        else:
            first.backward(retain_graph=True)
            second.backward()
        self.waiting.clear()

    def accumulate(self, *, forks: bool = True, of: str = "plain") -> None:
        with self._unsynchronised():
            self._loss(forks=forks, of=of).backward()
        self.waiting |= {"always", "sometimes"} if forks else {"always"}

    def fail(self, *, by: str, waits: bool = False) -> None:
        """Run a backward that raises after the reduction of the last units, then clear all gradients."""
        self._average_uncleared()
        with self._unsynchronised() if waits and self.is_fsdp1 else contextlib.nullcontext():
            with self.model.body.register_forward_hook(raise_in_backward):
                result = self._loss()
            with pytest.raises(KeyError, match="amid the backward"):
                result.backward()
        self.clear(by=by)
        self._hides_clears |= waits and not self.is_sharded

    def fail_forward(self) -> None:
        """Run a forward that raises before its last unit. Gradients of earlier backwards stay."""
        with (
            self.model.always.register_forward_pre_hook(_raise),
            pytest.raises(KeyError, match="amid the forward"),
        ):
            self._loss()

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

    def decay(self, *, biases: bool = False) -> None:
        """Run a backward of a penalty on the sharded parameters themselves, or on the biases if they are apart."""
        # A unit that was frozen or thawed while it was unsharded sets its sharded parameters when it reshards.
        self._reshard()
        penalised = self.parameters[1::2] if biases and not self.is_flat else self.parameters
        trained = [parameter for parameter in penalised if parameter.requires_grad]
        if trained and not self.waiting and not self._hides_clears:
            torch.stack([_local(parameter).square().sum() for parameter in trained]).sum().backward()

    def scale(self, *, clips: bool) -> None:
        """Clip the gradients, or multiply them by a half."""
        if self.waiting:
            return
        if not clips:
            for parameter in self.parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)
        elif self.is_fsdp1:
            self.model.clip_grad_norm_(1.0)
        else:
            nn.utils.clip_grad_norm_(self.parameters, 1.0)

    def step(self) -> None:
        if not self.waiting:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def load(self) -> None:
        self.model.load_state_dict({name: value * 0.75 for name, value in self.model.state_dict().items()})

    @torch.no_grad()
    def write(self) -> None:
        """Write to the parameters that the optimizer steps."""
        for parameter in self.parameters:
            parameter.mul_(0.75)

    def write_whole(self) -> None:
        """Write to the unsharded parameters of FullyShardedDataParallel. Unshard and reshard fully_shard's."""
        if self.is_fsdp1:
            with self.scene.fsdp.summon_full_params(self.model), torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.mul_(0.75)
            return
        for unit in [self.model, *self.model.children()]:
            unit.unshard()
        self._reshard()
        self.write()

    def _reshard(self) -> None:
        for unit in () if self.is_fsdp1 else (self.model, *self.model.children()):
            unit.reshard()

    def cast(self) -> None:
        """Round the parameters and the gradients."""
        if not self.waiting:
            self.model.bfloat16().float()

    def keep(self, *, after: str, keeps: bool) -> None:
        if not self.is_fsdp1:
            getattr(self.model, f"set_reshard_after_{after}")(not keeps)

    def evaluate(self, *, infers: bool = False) -> None:
        with torch.inference_mode(infers):
            result = output(self.scene)
        self.outputs.append(result.clone())

    def forward(self) -> None:
        self._loss()


def _local(parameter: Any) -> Tensor:
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


Event = tuple[str, dict[str, Any]]
_BACKWARD: Event = ("backward", {})
_ACCUMULATE: Event = ("accumulate", {})
_WITHOUT_UNIT = {"forks": False}
_CLEAR: Event = ("clear", {"by": "optimizer"})
EVENTS: dict[str, list[dict[str, Any]]] = {
    "backward": [_WITHOUT_UNIT, *({"of": of} for of in LOSSES)],
    "two_backwards": [{"of": "sum"}, {"of": "both"}, {"of": "one"}],
    "accumulate": [_WITHOUT_UNIT, *({"of": of} for of in LOSSES)],
    "fail": [{"by": by, "waits": waits} for by in ("optimizer", "model") for waits in (True, False)],
    "fail_forward": [{}],
    "clear": [{"by": by, "set_to_none": sets} for by in ("optimizer", "model") for sets in (True, False)],
    "freeze": [{}, {"thaws": True}],
    "decay": [{}, {"biases": True}],
    "scale": [{"clips": True}, {"clips": False}],
    "step": [{}],
    "load": [{}],
    "write": [{}],
    "write_whole": [{}],
    "cast": [{}],
    "keep": [
        {"after": after, "keeps": keeps} for after in ("forward", "backward") for keeps in (True, False)
    ],
    "evaluate": [{}, {"infers": True}],
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
@example(events=[_ACCUMULATE, _CLEAR, ("accumulate", _WITHOUT_UNIT)])
@example(events=[_ACCUMULATE, ("fail", {"by": "optimizer"})])
@example(events=[_ACCUMULATE, _CLEAR, ("decay", {})])
@example(events=[_ACCUMULATE, _CLEAR, ("decay", {}), ("step", {})])
@example(events=[_ACCUMULATE, _CLEAR, ("decay", {"biases": True}), ("step", {})])
@example(events=[_ACCUMULATE, _CLEAR, ("decay", {"biases": True})])
@example(events=[_ACCUMULATE, ("fail", {"by": "optimizer", "waits": True}), ("decay", {})])
@example(events=[_BACKWARD, ("freeze", {})])
@example(events=[("freeze", {}), _BACKWARD, ("freeze", {"thaws": True}), ("decay", {})])
@example(events=[_BACKWARD, ("clear", {"by": "model"})])
@example(events=[("evaluate", {}), ("backward", _WITHOUT_UNIT), ("write", {})])
def test_events_in_any_order_train_like_unsharded(twins: Twins, sharded_by: str, events: list[Event]) -> None:
    """torch raises an error or silently trains differently in some of these orders."""
    how = {"events": events, "sharded_by": sharded_by}
    # After an evaluation in inference mode, a rank of torch may raise while others wait.
    twins.deviate_to_unsharded(trained, **how, may_agree=True, may_fault=True)
