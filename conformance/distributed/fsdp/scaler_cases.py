"""Cases of sharded gradient scalers: each rank makes the calls of a plan on its own gradients.

The parent process creates a `ScalerProgram`, which is the same on every rank. Each rank returns the outcomes.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.utils._pytree import tree_map_only

from conformance.judge.library import load_library
from conformance.judge.outcome import Outcome, observe
from conformance.judge.sandbox import seeding
from conformance.ranks import Rank
from conformance.strategies.gradients import Gradient
from conformance.strategies.scaling import Harness, TakesScaler, entries, pickled

SCALER = "distributed.fsdp.sharded_grad_scaler.ShardedGradScaler"


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

    def spoil(self, harness: Harness, value: float) -> None:
        """Overwrite the gradients that the rank has."""
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

    def answers(self, harness: Harness, _: None) -> Any:
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


def in_anothers_group(rank: Rank, *, library: str) -> str:
    """Give every rank but the last a group that only has the last rank. Return the error of the scaler's check."""
    alone = dist.new_group([rank.world_size - 1])
    scaler = load_library(library).find(SCALER)(rank.device.type, process_group=alone)
    parameter = torch.nn.Parameter(torch.ones(1, device=rank.device))
    scaler.scale(parameter.sum()).backward()
    raised = observe(scaler.unscale_, torch.optim.SGD([parameter])).raised
    if alone is not dist.GroupMember.NON_GROUP_MEMBER:
        dist.destroy_process_group(alone)
    return f"{raised}, gradient {parameter.grad.item():g}"


def older_protocol(rank: Rank, *, library: str) -> tuple[Outcome, bool]:
    """Return the outcome of a step by an optimizer that takes the scaler, and whether it got the scaler."""
    scaler = load_library(library).find(SCALER)(rank.device.type)
    parameter = torch.nn.Parameter(torch.ones(1, device=rank.device))
    scaler.scale(parameter.sum()).backward()
    optimizer = TakesScaler([parameter])
    outcome = observe(scaler.step, optimizer, watch=[parameter])
    return outcome, [id(taken) for taken in optimizer.scalers] == [id(scaler)]


def train(
    rank: Rank,
    *,
    library: str,
    low_precision: bool,
    grad_outcomes: tuple[tuple[float | None, ...], ...],
    **options: Any,
) -> list[Outcome]:
    """Train torch's FSDP with a step for each of `grad_outcomes`, in which each rank scales its inputs by a factor."""
    seeding.seed_all()
    half = MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float16)
    model = FullyShardedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3)),
        device_id=rank.device,
        use_orig_params=True,
        mixed_precision=half if low_precision else None,
    )
    scaler = load_library(library).find(SCALER)(rank.device.type, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    outcomes: list[Outcome] = []
    for step, factors in enumerate(grad_outcomes):
        inputs = torch.randn(4, 5, generator=seeding.generator(100 * step + rank.rank)).to(rank.device)
        factor = factors[rank.rank]
        optimizer.zero_grad()
        loss = model(inputs if factor is None else inputs * factor).mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        outcomes.append(observe(scaler.step, optimizer, watch=list(model.parameters())))
        outcomes.append(observe(lambda: (scaler.update(), entries(scaler))))
    return outcomes
