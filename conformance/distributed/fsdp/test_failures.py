"""Training with either API continues correctly after a caught exception, or raises."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from conformance.distributed.fsdp.scenes.fsdp_training import (
    LEARNING_RATE,
    MOMENTUM,
    Setup,
    accumulating,
    gathered_parameters,
)
from conformance.distributed.fsdp.scenes.fully_shard_calls import ReportingAllGather, ReportingReduceScatter
from conformance.distributed.fsdp.scenes.fully_shard_training import (
    Sharding,
    full_parameters,
    sharded,
    units_of,
)
from conformance.distributed.fsdp.scenes.module_trees import (
    Leaf,
    ModuleGroup,
    ModuleTree,
    call,
    loss_of,
    out_of_form,
)
from conformance.distributed.fsdp.scenes.scene import Scene
from conformance.distributed.fsdp.scenes.twins import (
    FLAT,
    FULL_PROFILE,
    ORIGINALS,
    RankOutcomes,
    Twins,
    raises,
)
from conformance.judge.clauses import clause
from conformance.judge.deviations import does_as
from conformance.judge.library import Library
from conformance.judge.surface import is_torch_in

pytestmark = pytest.mark.world_sizes(fewest=2)

TREE = ModuleTree(ModuleGroup((Leaf("affine", 4), Leaf("affine", 3), Leaf("normed"), Leaf("affine", 2))))
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
    scene: Scene, *, api: str, fails: str = "", accumulates: str = "", clears: bool | str = True
) -> dict[str, Any]:
    """Train a few steps, of which the second fails or is left out. Return the losses and the full parameters.

    Args:
        api: `FSDP1`, `fully_shard`, or `groups` for fully_shard with two leaves in a group.
        fails: place where the second step fails, a key of `_FAULTS`. Empty if the second step is left out.
        accumulates: type of another backward that comes first in each step: `synchronised`, `unsynchronised` or
            `throughout`.
            With `throughout`, the backward that fails is not synchronised either.
        clears: whether the gradients of the second step are cleared: by the `model`, by a loop over its `parameters`,
            or by the optimizer, which may set them `to zero`. Gradients that are not cleared count in the third step.
    """
    training = _Training(scene, api)
    training.communicate(fails)
    losses: list[torch.Tensor] = []
    for number in range(STEPS):
        if accumulates and (number != FAILS_IN or fails or not clears):
            training.backward(STEPS + number, "" if accumulates == "synchronised" else "no_sync")
        if number != FAILS_IN:
            losses.append(training.backward(number))
            training.optimizer.step()
            training.optimizer.zero_grad()
        elif fails:
            training.fail(fails, number, "no_sync" if accumulates == "throughout" else "")
            if clears == "model":
                training.model.zero_grad()
            elif clears == "parameters":
                for parameter in training.model.parameters():
                    parameter.grad = None
            elif clears:
                training.clear(accumulates, set_to_none=clears != "to zero")
    return {"losses": losses, "parameters": training.parameters()}


class _Training:
    def __init__(self, scene: Scene, api: str) -> None:
        self.scene, self.api = scene, api
        if api == "FSDP1":
            self.model: Any = scene.model
            self.units: list[Any] = [unit for unit in scene.units if unit is not self.model]
        else:
            self.model = scene.plain
            self.units = [*reversed(units_of(self.model, "leaves"))]
            if api == "groups":
                # Another unit runs between the group's modules.
                scene.shard([self.units[0], self.units[2]])
                for module in (self.units[1], self.units[3], self.model):
                    scene.shard(module)
            else:
                sharded(scene.rank, scene.library, self.model, Sharding())
        self.optimizer = torch.optim.SGD(self.model.parameters(), LEARNING_RATE, MOMENTUM)
        self.before_backward: Callable[[], Any] = lambda: None
        self.inner = self.units[1].inner

    def communicate(self, fails: str) -> None:
        """Set communication that can fail: on one unit, or by an FSDP1 hook on all units."""
        self.comm = _Failing()
        if fails.startswith("gather"):
            self.units[1].set_custom_all_gather(ReportingAllGather(self.comm.count))
        elif fails == "reduction" and self.api == "FSDP1":

            def hook(state: _Failing, gradient: Any, output: Any) -> None:
                state.count(["scatter"])
                gradient.div_(self.scene.rank.world_size)
                dist.reduce_scatter_tensor(output, gradient)

            self.model.register_comm_hook(self.comm, hook)
        elif fails == "reduction":
            self.units[1].set_custom_reduce_scatter(ReportingReduceScatter(self.comm.count))

    def backward(self, number: int, order: str = "") -> torch.Tensor:
        """Run a forward and a backward. `order` is "no_sync" for a backward without synchronisation."""
        # After a failed forward, torch's fully_shard moves no inputs to the device.
        batch = self.scene.tree.batch(number, self.scene.rank.rank).on(self.scene.rank.device)
        with accumulating(self.model, order):
            loss = loss_of(call(self.model, self.scene.tree, batch))
            self.before_backward()
            loss.backward()
        return loss.detach()

    def fail(self, where: str, number: int, order: str) -> None:
        try:
            with _FAULTS[where](self):
                self.backward(number, order)
        except (UserError, Interruption):
            return
        raise AssertionError(f"nothing failed in {where}")

    def clear(self, accumulates: str, *, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)
        if hasattr(self.model, "reset_iter_state") and accumulates in ("unsynchronised", "throughout"):
            self.model.reset_iter_state()  # the optimizer cannot clear unsynchronised gradients

    def parameters(self) -> dict[str, torch.Tensor]:
        if self.api == "FSDP1":
            return gathered_parameters(self.scene.library, self.model)
        return full_parameters(self.model)


@contextlib.contextmanager
def _failing_after_move(training: _Training) -> Generator[None]:
    """Call the model's `to`, which moves nothing, between the forward and the backward that fails."""
    move = functools.partial(training.model.to, training.scene.rank.device)
    with mock.patch.object(training, "before_backward", move), _FAULTS["first unit"](training):
        yield


def _failing_backward_hook(module: nn.Module) -> Any:
    return module.register_forward_hook(lambda _, __, out: out_of_form(out).register_hook(_fail) and None)


def _failing_recomputation(training: _Training) -> Any:
    calls: list[None] = []

    def fail(*_: Any) -> None:
        calls.append(None)
        if len(calls) == 2:
            raise UserError

    return training.inner.register_forward_pre_hook(fail)


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


# Contexts in which a step fails. A hook's handle is a context that removes the hook.
_FAULTS: dict[str, Callable[[_Training], contextlib.AbstractContextManager[Any]]] = {
    # Fail in the module that a unit wraps.
    "forward": lambda training: training.inner.register_forward_pre_hook(_fail),
    "interrupted": lambda training: training.inner.register_forward_pre_hook(_interrupt),
    "pre hook": lambda training: training.units[1].register_forward_pre_hook(_fail),
    "post hook": lambda training: training.units[1].register_forward_hook(_fail),
    # Fail after all inner units have run.
    "after body": lambda training: training.model.body.register_forward_hook(_fail),
    "root post hook": lambda training: training.model.register_forward_hook(_fail),
    "loss": lambda training: mock.patch.object(training, "before_backward", _fail),
    "gather": lambda training: training.comm.failing(1),
    "gather in backward": lambda training: training.comm.failing(2),
    "reduction": lambda training: training.comm.failing(1),
    "root backward": lambda training: _failing_backward_hook(training.model),
    "unit backward": lambda training: _failing_backward_hook(training.units[1]),
    "inside unit": lambda training: training.inner.register_forward_hook(
        lambda _, __, out: _FailsInBackward.apply(out)
    ),
    # Fail in the unit that comes last in the backward.
    "first unit": lambda training: training.units[0].register_forward_pre_hook(
        lambda _, args: (_FailsInBackward.apply(args[0]),)
    ),
    "moved": _failing_after_move,
    # Fail when backward recomputes a unit whose activations are checkpointed.
    "recomputed": _failing_recomputation,
}


@dataclass(frozen=True)
class Api:
    name: str
    setup: Setup = FLAT

    def runs(self, twins: Twins, library: Library, program: Any, **how: Any) -> RankOutcomes:
        return twins.of(library, program, self.setup, tree=TREE, api=self.name, **how)

    def trains(self, twins: Twins, library: Library, checkpointing: str = "none", **how: Any) -> RankOutcomes:
        tree = replace(TREE, body=replace(TREE.body, checkpointing=checkpointing))
        return twins.of(library, train, self.setup, tree=tree, api=self.name, **how)


_APIS = {"flat": Api("FSDP1"), "originals": Api("FSDP1", ORIGINALS), "fully_shard": Api("fully_shard")}
each_api = pytest.mark.parametrize("api", _APIS.values(), ids=_APIS)
each_sharding = pytest.mark.parametrize("api", [*_APIS.values(), Api("groups")], ids=[*_APIS, "groups"])
_FORWARDS = ["forward", "interrupted", "pre hook", "post hook", "after body", "root post hook", "loss"]


@clause("distributed.fsdp.failures.in_a_forward")
@each_sharding
def test_training_continues_after_failed_forward(twins: Twins, api: Api) -> None:
    expected = api.trains(twins, twins.reference)
    for fails in _FORWARDS if api.name == "FSDP1" else [*_FORWARDS, "gather"]:
        for library in (twins.reference, twins.subject):
            actual = api.trains(twins, library, fails=fails)
            assert does_as(expected, actual), f"after {fails} got {actual}, expected {expected}"


def step_after_failed_forward(scene: Scene, *, api: str, fails: str = "") -> dict[str, Any]:
    """Step with the gradients of a backward, after which a forward may fail. Return what follows."""
    training = _Training(scene, api)
    training.backward(0)
    if fails:
        training.fail(fails, 1, "")
    training.optimizer.step()
    training.optimizer.zero_grad()
    return {"losses": [training.backward(number) for number in (2, 3)], "parameters": training.parameters()}


@clause("distributed.fsdp.failures.in_a_forward")
@pytest.mark.deviation("fsdp.step_after_failed_forward")
@pytest.mark.parametrize("fails", ["interrupted", "after body"])
@each_sharding
def test_step_after_failed_forward_counts(twins: Twins, api: Api, fails: str) -> None:
    """torch's next forward uses the old weights, and with flat parameters torch raises RuntimeError."""
    program = step_after_failed_forward
    expected = api.runs(twins, twins.reference, program)
    twins.judge(
        lambda library: api.runs(twins, library, program, fails=fails),
        we_do=lambda actual: does_as(expected, actual),
    )


def judge_like_training_without_failure(
    twins: Twins, api: Api, *, checkpointing: str = "none", may_agree: bool = False, **how: Any
) -> None:
    """Judge training with a failure: the subject must train on like torch does without the failure.

    `how` are arguments of `train`: where a step fails, what accumulates before it, and what clears its gradients.
    """
    without = {name: value for name, value in how.items() if name != "fails"}
    expected = api.trains(twins, twins.reference, checkpointing, **without)
    assert all(outcome.raised is None for outcome in expected), expected
    twins.judge(
        lambda library: api.trains(twins, library, checkpointing, **how),
        we_do=lambda actual: does_as(expected, actual),
        may_agree=may_agree,
    )


@clause("distributed.fsdp.failures.in_a_backward")
@pytest.mark.deviation("fsdp.behind_a_failed_backward")
@pytest.mark.parametrize(
    ("fails", "checkpointing"),
    [
        ("inside unit", "none"),
        ("first unit", "none"),
        pytest.param("root backward", "none", marks=FULL_PROFILE),
        pytest.param("unit backward", "none", marks=FULL_PROFILE),
        ("reduction", "none"),
        ("recomputed", "plain"),
        pytest.param("recomputed", "reentrant", marks=FULL_PROFILE),
    ],
)
@each_api
def test_training_continues_after_failed_backward(
    twins: Twins, api: Api, fails: str, checkpointing: str
) -> None:
    """torch's next step includes gradients of the failed backward, or units have no gradients in the step."""
    judge_like_training_without_failure(twins, api, fails=fails, checkpointing=checkpointing)


@clause("distributed.fsdp.failures.in_a_backward")
@pytest.mark.deviation("fsdp.behind_a_failed_backward")
@pytest.mark.parametrize("api", ["flat", "originals"])
def test_training_continues_after_failed_backward_of_moved_model(twins: Twins, api: str) -> None:
    """torch's next step includes gradients of the failed backward, or has no gradients."""
    judge_like_training_without_failure(twins, _APIS[api], fails="moved")


@clause("distributed.fsdp.failures.in_a_backward")
@pytest.mark.deviation("fsdp.behind_a_failed_backward")
def test_training_continues_after_failed_gather_in_backward(twins: Twins) -> None:
    """torch's unfinished units stay unsharded and have no gradients in the next step."""
    judge_like_training_without_failure(twins, _APIS["fully_shard"], fails="gather in backward")


def losses_after_failed_backward(
    scene: Scene, *, api: str, fails: str = "", calls_unit: bool = False
) -> list[torch.Tensor]:
    """Return the losses of steps whose inputs are on the host, after a backward that may fail, as in `train`.

    With `calls_unit`, an evaluation calls a unit directly before the steps.
    """
    training = _Training(scene, api)
    if fails:
        training.fail(fails, 0, "")
    else:
        training.backward(0)
    training.optimizer.zero_grad()
    if calls_unit:
        with torch.no_grad():
            training.units[2](torch.ones(2, 3, dtype=torch.float64, device=scene.rank.device), ids=None)
    losses = []
    for number in (1, 2):
        loss = loss_of(call(training.model, scene.tree, scene.tree.batch(number, scene.rank.rank)))
        loss.backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


@clause("distributed.fsdp.failures.in_a_backward")
@pytest.mark.deviation("fsdp.behind_a_failed_backward")
@pytest.mark.parametrize("calls_unit", [False, True])
@each_sharding
def test_steps_run_after_failed_backward(twins: Twins, api: Api, calls_unit: bool) -> None:
    """torch's next step includes gradients of the failed backward, or units have no gradients in the step."""
    program, how = losses_after_failed_backward, {"fails": "inside unit", "calls_unit": calls_unit}
    expected = api.runs(twins, twins.reference, program)
    twins.judge(
        lambda library: api.runs(twins, library, program, **how),
        we_do=lambda actual: does_as(expected, actual),
        # In some cases, torch has finished all units.
        may_agree=True,
    )


@clause("distributed.fsdp.failures.earlier_gradients")
@pytest.mark.deviation("fsdp.behind_a_failed_backward")
@pytest.mark.parametrize("accumulates", ["synchronised", "unsynchronised"])
@pytest.mark.parametrize("fails", ["unit backward", pytest.param("first unit", marks=FULL_PROFILE)])
@each_api
def test_gradients_of_earlier_backwards_count(twins: Twins, api: Api, accumulates: str, fails: str) -> None:
    """torch adds gradients of the failed backward, leaves out those of some units, or raises ValueError."""
    judge_like_training_without_failure(twins, api, fails=fails, accumulates=accumulates, clears=False)


@clause("distributed.fsdp.failures.in_a_backward")
@pytest.mark.deviation("fsdp.behind_a_failed_backward")
@each_api
def test_gradients_of_earlier_backwards_are_cleared_by_the_model(twins: Twins, api: Api) -> None:
    """The model's `zero_grad` clears gradients even if the model is still in the backward that raised.

    torch's next step includes the cleared gradients, or units have no gradients in the step.
    """
    judge_like_training_without_failure(
        twins, api, fails="inside unit", accumulates="synchronised", clears="model"
    )


@clause("distributed.fsdp.failures.in_a_backward")
@pytest.mark.deviation("fsdp.behind_a_failed_backward")
@pytest.mark.parametrize("accumulates", ["synchronised", "unsynchronised"])
@pytest.mark.parametrize("api", ["flat", "originals"])
def test_gradients_of_earlier_backwards_are_cleared_through_parameters(
    twins: Twins, api: str, accumulates: str
) -> None:
    """`parameters()` returns those that the optimizer steps, although a unit is in the backward that raised.

    torch's next step includes the cleared gradients or has none, and torch raises ValueError after `no_sync`.
    """
    judge_like_training_without_failure(
        twins, _APIS[api], fails="inside unit", accumulates=accumulates, clears="parameters"
    )


@clause("distributed.fsdp.failures.in_a_backward")
@pytest.mark.deviation("fsdp.behind_a_failed_backward")
@pytest.mark.parametrize("clears", [True, "to zero"])
@each_api
def test_unsynchronised_gradients_are_cleared_by_the_optimizer(
    twins: Twins, api: Api, clears: bool | str
) -> None:
    """The optimizer also clears gradients that the failed backward has already reduced.

    torch silently trains differently with fully_shard, and raises ValueError with FullyShardedDataParallel.
    """
    how = {"fails": "first unit", "accumulates": "unsynchronised", "clears": clears}
    # In torch 2.15, reset_iter_state drops the gradients of the failed backward.
    judge_like_training_without_failure(
        twins, api, **how, may_agree=api.name == "fully_shard" and is_torch_in(">=2.15")
    )


@clause("distributed.fsdp.failures.gradients_in_part")
@pytest.mark.deviation("fsdp.behind_a_failed_backward")
@pytest.mark.parametrize("clears", [False, True])
@each_api
def test_partial_gradients_of_failed_backward_must_be_cleared(twins: Twins, api: Api, clears: bool) -> None:
    """torch silently trains differently with fully_shard, and raises ValueError with FullyShardedDataParallel."""
    how = {"fails": "first unit", "accumulates": "throughout", "clears": clears}
    if clears:
        # In torch 2.15, reset_iter_state drops the gradients of the failed backward.
        judge_like_training_without_failure(
            twins, api, **how, may_agree=api.name == "fully_shard" and is_torch_in(">=2.15")
        )
        return

    def is_named(outcomes: RankOutcomes) -> bool:
        pattern = re.compile(
            r"a backward without synchronisation raised .* earlier backwards, of .*inner\.\w+"
        )
        return raises(RuntimeError)(outcomes) and all(
            pattern.search(str(outcome.raised)) for outcome in outcomes
        )

    twins.judge(lambda library: api.trains(twins, library, **how), we_do=is_named)
