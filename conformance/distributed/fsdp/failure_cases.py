"""Cases of training that drops a step after an exception in a forward, loss, backward or collective, and goes on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from conformance.distributed.fsdp.fsdp_cases import LEARNING_RATE, MOMENTUM, gathered_parameters
from conformance.distributed.fsdp.fully_shard_calls import ReportingAllGather, ReportingReduceScatter
from conformance.distributed.fsdp.fully_shard_cases import Sharding, full_value, sharded, units_of
from conformance.distributed.fsdp.lab import Lab
from conformance.distributed.fsdp.module_trees import call, loss_of, out_of_form

STEPS, FAILS_IN = 4, 1


class UserError(Exception):
    """Error in the user's own code."""


class _FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise UserError


class Interruption(KeyboardInterrupt):
    """Interruption by the user."""


def _fail(*_: Any, **__: Any) -> None:
    raise UserError


def _interrupt(*_: Any, **__: Any) -> None:
    raise Interruption


def train(
    lab: Lab, *, face: str, fails: str = "", accumulates: str = "", clears: bool | str = True
) -> dict[str, Any]:
    """Train a few steps, of which the second fails or is left out. Return the losses and the full parameters.

    Args:
        face: API, FSDP1 or fully_shard.
        fails: place where the second step fails, a key of `_FAULTS`. Empty if the second step is left out.
        accumulates: type of another backward that comes first in each step: `synchronised`, `not` or `throughout`.
            With `throughout`, the backward that fails is not synchronised either.
        clears: whether the gradients of the second step are cleared, by the `model` or by the optimizer. Gradients that
            are not cleared count in the third step.
    """
    training = _Training(lab, face)
    training.communicate(fails)
    losses: list[torch.Tensor] = []
    for number in range(STEPS):
        if accumulates and (number != FAILS_IN or fails or not clears):
            with training.synchronised(accumulates == "synchronised"):
                training.backward(STEPS + number)
        if number != FAILS_IN:
            losses.append(training.backward(number))
            training.optimizer.step()
            training.optimizer.zero_grad()
        elif fails:
            with training.synchronised(accumulates != "throughout"):
                training.fail(fails, number)
            if clears == "model":
                training.model.zero_grad()
            elif clears:
                training.clear(accumulates)
    return {"losses": losses, "parameters": training.parameters()}


def step_unsynchronised(lab: Lab, *, face: str, clears: bool = False, detects: bool = True) -> dict[str, Any]:
    """Step after a backward without synchronisation. Return whether a parameter changed."""
    training = _Training(lab, face)
    if not detects:
        lab.api.set_detect_unsynchronized_step(False)
    before = training.parameters()
    try:
        with training.synchronised(False):
            training.backward(0)
        if clears:
            training.clear("not")
        training.optimizer.step()
    finally:
        if not detects:
            lab.api.set_detect_unsynchronized_step(True)
    after = training.parameters()
    training.optimizer.zero_grad()
    return {"is moved": any(not torch.equal(after[name], parameter) for name, parameter in before.items())}


def step_by_a_closure(lab: Lab, *, face: str, by_name: bool) -> dict[str, torch.Tensor]:
    """Step with a closure that runs the last backward. The earlier backwards run without synchronisation."""
    training = _Training(lab, face)
    for number in (0, 2):
        with training.synchronised(False):
            training.backward(number)

        def last(number: int = number + 1) -> torch.Tensor:
            return training.backward(number)

        training.optimizer.step(**{"closure": last}) if by_name else training.optimizer.step(last)
        training.optimizer.zero_grad()
    return training.parameters()


class _Training:
    def __init__(self, lab: Lab, face: str) -> None:
        self.lab, self.face = lab, face
        if face == "FSDP1":
            self.model: Any = lab.model
            self.units: list[Any] = [unit for unit in lab.units if unit is not self.model]
        else:
            self.model = lab.plain
            self.units = [*reversed(units_of(self.model, "leaves"))]
            sharded(lab.rank, lab.library, self.model, Sharding())
        self.optimizer = torch.optim.SGD(self.model.parameters(), LEARNING_RATE, MOMENTUM)
        self.fails_in_loss = False
        self.body = (self.model.module if face == "FSDP1" else self.model).body
        self.inner = self.units[1].module.inner if face == "FSDP1" else self.units[1].inner

    def communicate(self, fails: str) -> None:
        """Set communication that can fail: on one unit, or by an FSDP1 hook on all units."""
        self.comm = _Failing()
        if fails.startswith("gather"):
            self.units[1].set_custom_all_gather(ReportingAllGather(self.comm.count))
        elif fails == "reduction" and self.face == "FSDP1":

            def hook(state: _Failing, gradient: Any, output: Any) -> None:
                state.count(["scatter"])
                gradient.div_(self.lab.rank.world_size)
                dist.reduce_scatter_tensor(output, gradient)

            self.model.register_comm_hook(self.comm, hook)
        elif fails == "reduction":
            self.units[1].set_custom_reduce_scatter(ReportingReduceScatter(self.comm.count))

    def backward(self, number: int) -> torch.Tensor:
        # After a failed forward, torch's fully_shard moves no inputs to the device.
        batch = self.lab.tree.batch(number, self.lab.rank.rank).on(self.lab.rank.device)
        output = call(self.model, self.lab.tree, batch)
        loss = loss_of(output)
        if self.fails_in_loss:
            raise UserError
        loss.backward()
        return loss.detach()

    def fail(self, where: str, number: int) -> None:
        try:
            with _FAULTS[where](self):
                self.backward(number)
        except (UserError, Interruption):
            return
        raise AssertionError(f"nothing failed in {where}")

    def clear(self, accumulates: str) -> None:
        self.optimizer.zero_grad()
        if hasattr(self.model, "reset_iter_state") and accumulates in ("not", "throughout"):
            self.model.reset_iter_state()  # the optimizer cannot clear unsynchronised gradients

    @contextlib.contextmanager
    def synchronised(self, is_synchronised: bool) -> Generator[None]:
        if is_synchronised:
            yield
            return
        if self.face == "FSDP1":
            with self.model.no_sync():
                yield
            return
        self.model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.model.set_requires_gradient_sync(True)

    def parameters(self) -> dict[str, torch.Tensor]:
        if self.face == "FSDP1":
            return gathered_parameters(self.lab.library, self.model)
        return {name: full_value(parameter) for name, parameter in self.model.named_parameters()}


_Where = Callable[[_Training], "contextlib.AbstractContextManager[Any]"]


@contextlib.contextmanager
def _removed(*handles: Any) -> Generator[None]:
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _forward(training: _Training) -> Any:
    """Fail inside the module that a unit wraps."""
    return _removed(training.inner.register_forward_pre_hook(_fail))


def _pre_hook(training: _Training) -> Any:
    return _removed(training.units[1].register_forward_pre_hook(_fail))


def _post_hook(training: _Training) -> Any:
    return _removed(training.units[1].register_forward_hook(_fail))


def _behind_body(training: _Training) -> Any:
    """Fail after all inner units have run."""
    return _removed(training.body.register_forward_hook(_fail))


def _root_post_hook(training: _Training) -> Any:
    return _removed(training.model.register_forward_hook(_fail))


@contextlib.contextmanager
def _loss(training: _Training) -> Generator[None]:
    training.fails_in_loss = True
    try:
        yield
    finally:
        training.fails_in_loss = False


def _hooking(module: nn.Module) -> Any:
    return _removed(
        module.register_forward_hook(lambda _, __, out: out_of_form(out).register_hook(_fail) and None)
    )


def _root_backward(training: _Training) -> Any:
    return _hooking(training.model)


def _unit_backward(training: _Training) -> Any:
    return _hooking(training.units[1])


def _inside_unit(training: _Training) -> Any:
    return _removed(training.inner.register_forward_hook(lambda _, __, out: _FailsInBackward.apply(out)))


def _first_unit(training: _Training) -> Any:
    """Fail in the unit that comes last in the backward."""
    unit = training.units[0]
    return _removed(unit.register_forward_pre_hook(lambda _, args: (_FailsInBackward.apply(args[0]),)))


def _interrupted(training: _Training) -> Any:
    return _removed(training.inner.register_forward_pre_hook(_interrupt))


def _recomputed(training: _Training) -> Any:
    """Fail when backward recomputes a unit whose activations are checkpointed."""
    calls: list[None] = []

    def fail(*_: Any) -> None:
        calls.append(None)
        if len(calls) == 2:
            raise UserError

    return _removed(training.inner.register_forward_pre_hook(fail))


class _Failing:
    """Counter of user-defined communication calls, which raises in call number `at`."""

    def __init__(self) -> None:
        self.at = -1

    def count(self, request: list[Any]) -> None:
        self.at -= request[0] != "allocate"
        if self.at == 0:
            raise UserError

    @contextlib.contextmanager
    def failing(self, at: int) -> Generator[None]:
        self.at = at
        try:
            yield
        finally:
            self.at = -1


def _first_call(training: _Training) -> Any:
    return training.comm.failing(1)


def _second_call(training: _Training) -> Any:
    return training.comm.failing(2)


_FAULTS: dict[str, _Where] = {
    "interrupted": _interrupted,
    "recomputed": _recomputed,
    "gather": _first_call,
    "gather in backward": _second_call,
    "reduction": _first_call,
    "forward": _forward,
    "pre hook": _pre_hook,
    "post hook": _post_hook,
    "behind body": _behind_body,
    "root post hook": _root_post_hook,
    "loss": _loss,
    "root backward": _root_backward,
    "unit backward": _unit_backward,
    "inside unit": _inside_unit,
    "first unit": _first_unit,
}
