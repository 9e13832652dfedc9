"""Sequences of calls of a sharded scaler, run on ranks and compared call by call."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from conformance.distributed.fsdp.scenes.twins import Twins
from conformance.judge.library import Library, load_library
from conformance.judge.outcome import Outcome, assert_same_outcome
from conformance.ranks import Rank
from conformance.strategies.gradients import Gradient
from conformance.strategies.scaling import Harness, pickled

SCALER = "distributed.fsdp.sharded_grad_scaler.ShardedGradScaler"
EACH_SCALER = pytest.mark.parametrize("scaler", ["amp.GradScaler", SCALER])
INIT_SCALE_8 = {"init_scale": 8.0}


@dataclass(frozen=True)
class ScalerCall:
    """Call of a method of `Player` for one optimizer. With `on`, only these ranks make the call."""

    name: str
    which: int = 0
    argument: Any = None
    on: tuple[int, ...] | None = None


@dataclass(frozen=True)
class ScalerProgram:
    """Gradients of each rank, and the calls that the ranks make."""

    parts: tuple[tuple[tuple[Gradient, ...], ...], ...]  # gradients by rank, then by optimizer
    calls: tuple[ScalerCall, ...]
    optimizers: tuple[str, ...] = ("sgd",)
    options: Mapping[str, Any] = field(default_factory=dict)  # arguments of the scaler
    groups: int = 1  # groups of neighbouring ranks, which decide separately


class Player:
    """Gradients and optimizers of one rank, under one scaler of the library."""

    def __init__(
        self, rank: Rank, library: str, plan: ScalerProgram, group: dist.ProcessGroup | None
    ) -> None:
        self._rank, self._device = rank.rank, rank.device.type
        self._make = load_library(library).find(SCALER)
        options = {**plan.options, **({} if group is None else {"process_group": group})}
        scaler = self._make(self._device, **options)
        self._harnesses = [
            Harness(load_library(library), self._device, gradients, kind, scaler)
            for gradients, kind in zip(plan.parts[rank.rank], plan.optimizers, strict=True)
        ]

    def make(self, call: ScalerCall) -> Outcome | None:
        if call.on is not None and self._rank not in call.on:
            return None
        harness = self._harnesses[call.which]
        return harness.did(lambda: getattr(self, call.name)(harness, call.argument))

    def _take(self, scaler: Any) -> None:
        for harness in self._harnesses:
            harness.scaler = scaler

    def backward(self, harness: Harness, grad_outcomes: tuple[float | None, ...] | None) -> None:
        """Add computed gradients to the existing ones.

        The rank's outcome goes into the last element of the last gradient.
        """
        harness.backward(grad_outcomes[self._rank] if grad_outcomes else None)

    def zero_grad(self, harness: Harness, _: None) -> None:
        harness.zero_grad()

    def overwrite_gradients(self, harness: Harness, value: float) -> None:
        for parameter in harness.parameters:
            if parameter.grad is not None:
                parameter.grad.fill_(value)

    def sparse(self, harness: Harness, values: torch.Tensor) -> None:
        """Replace all parameters by one that has a sparse gradient with a repeated row."""
        parameter = torch.nn.Parameter(torch.zeros(4, dtype=values.dtype, device=self._device))
        rows = torch.tensor([[0, 2, 2]], device=self._device)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # general warning about sparse tensors, once per process
            parameter.grad = torch.sparse_coo_tensor(rows, values.to(self._device), (4,))
        harness.parameters = [parameter]
        harness.optimizer = torch.optim.SGD([parameter], lr=0.125)
        harness.used()

    def break_optimizer(self, harness: Harness, _: None) -> None:
        """Remove the optimizer's groups, so that any search for its gradients raises."""
        harness.optimizer.whole_groups, harness.optimizer.param_groups = harness.optimizer.param_groups, None

    def mend_optimizer(self, harness: Harness, _: None) -> None:
        harness.optimizer.param_groups = harness.optimizer.whole_groups

    def scale(self, harness: Harness, outputs: Any) -> Any:
        on_device = tree_map_only(torch.Tensor, lambda tensor: tensor.to(self._device), outputs)
        return harness.scaler.scale(on_device)

    def unscale_(self, harness: Harness, _: None) -> Any:
        return harness.scaler.unscale_(harness.optimizer)

    def step(self, harness: Harness, _: None) -> Any:
        return harness.scaler.step(harness.optimizer)

    def step_with_closure(self, harness: Harness, _: None) -> Any:
        return harness.scaler.step(harness.optimizer, closure=lambda: 0.0)

    def update(self, harness: Harness, new_scale: Any) -> None:
        harness.scaler.update(new_scale)
        if isinstance(new_scale, torch.Tensor):
            new_scale.zero_()  # tensor that the caller may reuse

    def set(self, harness: Harness, numbers: Mapping[str, Any]) -> Any:
        for name, number in numbers.items():
            getattr(harness.scaler, f"set_{name}")(number)
        return [getattr(harness.scaler, f"get_{name}")() for name in numbers]

    def load_state_dict(self, harness: Harness, state: Mapping[str, Any]) -> Any:
        return harness.scaler.load_state_dict(dict(state))

    def resume(self, harness: Harness, _: None) -> None:
        """Continue with another scaler, created with other arguments, that loads the state dict."""
        other = self._make(self._device, init_scale=2.0, growth_factor=7.0)
        if state := harness.scaler.state_dict():
            other.load_state_dict(state)
        self._take(other)
        harness.used()

    def through_a_pickle(self, harness: Harness, _: None) -> None:
        self._take(pickled(harness.scaler))
        harness.used()

    def through_a_deep_copy(self, harness: Harness, _: None) -> None:
        self._take(copy.deepcopy(harness.scaler))
        harness.used()

    def hold_world(self, harness: Harness, _: None) -> None:
        """Set the world group, as torch's scalers do if the group exists when their module is imported."""
        harness.scaler.process_group = dist.group.WORLD

    def queries(self, harness: Harness, _: None) -> Any:
        """Return the results that torch's scalers do not offer, or None if the scaler lacks them."""
        if not hasattr(harness.scaler, "step_was_taken"):
            return None
        return (
            float(harness.scaler.found_inf(harness.optimizer)),
            harness.scaler.step_was_taken(harness.optimizer),
            [tuple(entry) for entry in harness.scaler.nonfinite_parameters(harness.optimizer)],
        )


def play(rank: Rank, *, library: str, plan: ScalerProgram) -> list[Outcome | None]:
    """Return the outcome of each call, or None for a call that this rank does not make."""
    with _group_of(rank, plan.groups) as group:
        player = Player(rank, library, plan, group)
        return [player.make(call) for call in plan.calls]


@contextlib.contextmanager
def _group_of(rank: Rank, groups: int) -> Iterator[dist.ProcessGroup | None]:
    """Context manager that splits the world into groups. Yield this rank's group, or None if there is only one."""
    if groups == 1:
        yield None
        return
    size = rank.world_size // groups
    process_groups = [
        dist.new_group(list(range(first, first + size))) for first in range(0, rank.world_size, size)
    ]
    try:
        yield process_groups[rank.rank // size]
    finally:
        for group in process_groups:
            dist.destroy_process_group(group)


# For each rank, the outcome of each call.
ScalerOutcomes = Sequence[Sequence[Outcome]]


def played(twins: Twins, plan: ScalerProgram, library: Library | None = None) -> ScalerOutcomes:
    """Run the plan on the ranks of `library`, by default the subject."""
    library = library or twins.subject
    # A missing scaler is detected here, so that it is reported as not provided.
    library.find(SCALER)
    return twins.pool.run(play, library=library.spec, plan=plan)


def errors_steps_and_scales(
    twins: Twins, plan: ScalerProgram, library: Library
) -> tuple[set[str], list[list[bool]], list[float]]:
    """Run the plan. Return the errors of all calls, and the results of `stepped` and `scales`."""
    outcomes = played(twins, plan, library)
    errors = {str(outcome.raised) for rank in outcomes for outcome in rank if outcome.raised is not None}
    return errors, stepped(outcomes, plan), scales(outcomes)


def assert_calls_match_torch(twins: Twins, plan: ScalerProgram) -> ScalerOutcomes:
    """Run the plan on the ranks of both libraries and compare the outcome of every call.

    Return the subject's outcomes.
    """
    expected, actual = played(twins, plan, twins.reference), played(twins, plan)
    for rank, (expected_calls, actual_calls) in enumerate(zip(expected, actual, strict=True)):
        for call, outcome, expected_outcome in zip(plan.calls, actual_calls, expected_calls, strict=True):
            if expected_outcome is None:
                assert outcome is None
                continue
            try:
                assert_same_outcome(expected_outcome, outcome)
            except AssertionError as error:
                error.add_note(f"on rank {rank} of {len(actual)}, at {call}")
                raise
    return actual


def scales(outcomes: ScalerOutcomes) -> list[float]:
    """Return each rank's scale after the last call."""
    return [calls[-1].watched["scaler"]["scale"] for calls in outcomes]


def stepped(outcomes: ScalerOutcomes, plan: ScalerProgram) -> list[list[bool]]:
    """Return, for each rank, whether each `step` of the plan moved the parameters.

    Every parameter must have a gradient.
    """
    moved: list[list[bool]] = []
    for calls in outcomes:
        weights = [_weights(outcome) for outcome in calls]
        moved.append(
            [
                not all(map(torch.equal, weights[place - 1], weights[place]))
                for place, call in enumerate(plan.calls)
                if call.name == "step"
            ]
        )
    return moved


def _weights(outcome: Outcome) -> list[torch.Tensor]:
    states = [state["data"] if isinstance(state, dict) else state for state in outcome.watched["parameters"]]
    return [state.values for state in states]
