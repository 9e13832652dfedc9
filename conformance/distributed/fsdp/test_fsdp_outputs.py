"""Units some or all of whose outputs get no gradient in backward."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from conformance.distributed.fsdp.scenes.fsdp_training import COMPILER, states_of
from conformance.distributed.fsdp.scenes.rank_judging import assert_ranks_agree, holds
from conformance.distributed.fsdp.scenes.scene import Scene, filled
from conformance.distributed.fsdp.scenes.twins import (
    FULL_PROFILE,
    RankOutcomes,
    Twins,
    TwinsOf,
    Wrapping,
    both_kinds,
    each_wrapping,
    raises,
)
from conformance.judge.clauses import clause
from conformance.judge.library import Library
from conformance.judge.tolerances import TRAINED

DEADLINE_S, OF_A_CASE_S = 300, 130  # Dynamo takes seconds on each rank
_WIDTH = 4


class _Twofold(torch.autograd.Function):
    """Function whose single node has two outputs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        return 2 * x, 3 * x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> torch.Tensor | None:
        scaled = [factor * grad for factor, grad in zip((2, 3), grads, strict=True) if grad is not None]
        return torch.stack(scaled).sum(0) if scaled else None


class _Silent(torch.autograd.Function):
    """Function without a gradient for its input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> None:
        return None


class _Forked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        return _Twofold.apply(self.inner(x))


class _Attentive(nn.Module):
    """Transformer block that also returns its attention. The compiled block is a single node with both outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mixed = nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, 3 * _WIDTH)
        self.out = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        query, key, value = self.mixed(self.norm(x)).chunk(3, -1)
        attention = (query @ key.transpose(-1, -2)).softmax(-1)
        return x + self.out(attention @ value), attention


class ForkedModel(nn.Module):
    """Model that uses one output of an inner unit, uses both, or lets no gradient through."""

    def __init__(self, uses: str) -> None:
        super().__init__()
        self.uses = uses
        self.first = _Attentive() if uses == "compiled" else _Forked()
        self.last = nn.Linear(_WIDTH, 2)
        filled(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.first(x)
        if self.uses == "both, one without gradient":
            first = first + _Silent.apply(second)
        if self.uses == "none":
            first = _Silent.apply(first)
        return self.last(first.detach() if self.uses == "detached" else first)


class TensorPair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


# Pairs of functions: one makes a module's output from its input and result, and one makes a tensor of that output.
_Makes, _Takes = Callable[[torch.Tensor, torch.Tensor], Any], Callable[[Any], torch.Tensor]
KINDS: dict[str, tuple[_Makes, _Takes]] = {
    "a named tuple": (lambda _, y: TensorPair(y, y * 2), lambda output: output.first + output.second),
    "an ordered dict": (
        lambda _, y: OrderedDict(one=y, other=y * 2),
        lambda output: output["one"] + output["other"],
    ),
    "nested": (
        lambda _, y: {"a": [y, (y * 2, {"b": y * 3})]},
        lambda output: output["a"][0] + output["a"][1][0] + output["a"][1][1]["b"],
    ),
    "a set": (lambda _, y: {y}, lambda output: next(iter(output))),
    "packed": (
        lambda _, y: pack_padded_sequence(y, torch.tensor([3, 2]), batch_first=True),
        lambda output: output.data,
    ),
    "the same twice": (lambda _, y: (y, y), lambda output: output[0] + output[1]),
    "a view beside": (lambda _, y: (y, y[..., :1]), lambda output: output[0] + output[1]),
    "its input beside": (lambda x, y: (x, y), lambda output: output[0] + output[1]),
    "its input alone": (lambda x, y: x, lambda output: output),
    "no tensors beside": (lambda _, y: (None, 3, "word", y), lambda output: output[3] * output[1]),
    "integers beside": (lambda _, y: (y.argmax(-1, keepdim=True), y), lambda output: output[0] + output[1]),
    "no gradient beside": (lambda _, y: (y.detach(), y), lambda output: output[0] + output[1]),
    "no elements beside": (lambda _, y: (y[:0], y), lambda output: output[0].sum() + output[1]),
    "one number": (lambda _, y: y.square().sum(), lambda output: output),
    "complex numbers": (lambda _, y: torch.complex(y, y * 2), lambda output: output.abs()),
}


# Outputs that the receiver doubles, in place and not in place.
DOUBLED: dict[str, tuple[_Makes, _Takes]] = {
    "doubled in place": (lambda _, y: y, lambda output: output.mul_(2)),
    "doubled": (lambda _, y: y, lambda output: output * 2),
}


class _Handing(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner, self.makes = nn.Linear(_WIDTH, _WIDTH), (KINDS | DOUBLED)[kind][0]

    def forward(self, x: torch.Tensor) -> Any:
        return self.makes(x, self.inner(x))


class ReturningUnits(nn.Module):
    """Model in which the `inner` or the `outermost` unit returns one of `KINDS`."""

    def __init__(self, kind: str, by: str) -> None:
        super().__init__()
        self.by = by
        self.makes, self.takes = (KINDS | DOUBLED)[kind]
        self.first = _Handing(kind) if by == "inner" else nn.Linear(_WIDTH, _WIDTH)
        self.last = nn.Linear(_WIDTH, _WIDTH)
        filled(self)

    def forward(self, x: torch.Tensor) -> Any:
        if self.by == "outermost":
            return self.makes(x, self.last(self.first(x)))
        return self.last(x) + self.takes(self.first(x)).square().mean()


def trained(
    scene: Scene, *, uses: str, strategy: str = "FULL_SHARD", use_orig_params: bool = False, by: str = ""
) -> dict[str, Any]:
    """Train for two steps. Return what this rank saw, and the full gradients.

    `by` names the unit that returns one of `KINDS`.
    """
    model = ReturningUnits(uses, by) if by else ForkedModel(uses)
    arguments = {"strategy": strategy, "use_orig_params": use_orig_params}
    if uses == "compiled":
        torch._dynamo.reset()
        model.first.compile(backend=COMPILER)
    model.first = scene.wrap(model.first, **arguments)
    whole = scene.wrap(model, **arguments)
    optimizer = torch.optim.SGD(whole.parameters(), 0.05)
    steps, gradients = [], {}
    for number in range(2):
        x = torch.linspace(-1, 1 + number, 2 * 3 * _WIDTH).view(2, 3, _WIDTH) - scene.rank.rank * 0.25
        x = x.to(scene.rank.device).requires_grad_()
        output = whole(x)
        loss = (model.takes(output) if by == "outermost" else output).square().sum()
        loss.backward()
        steps.append([loss.detach(), x.grad, states_of(whole)])
        gradients = scene.whole_gradients(whole)
        optimizer.step()
        optimizer.zero_grad()
    return {"steps": steps, "whole": gradients}


@clause("distributed.fsdp.fully_sharded_data_parallel.some_outputs")
@pytest.mark.parametrize("uses", ["one", "both, one without gradient"])
@each_wrapping
def test_unit_trains_by_some_outputs(twins: Twins, wrapping: Wrapping, uses: str) -> None:
    twins.agree(trained, tolerance=TRAINED, **wrapping, uses=uses)


@clause("distributed.fsdp.fully_sharded_data_parallel.some_outputs")
@pytest.mark.deadline(DEADLINE_S)
@pytest.mark.parametrize("use_orig_params", [pytest.param(False, marks=FULL_PROFILE), True])
def test_compiled_block_trains_by_some_outputs(twins: Twins, use_orig_params: bool) -> None:
    """A compiled block is a single node of the graph, with all of its outputs."""
    arguments = {"use_orig_params": use_orig_params, "uses": "compiled", "deadline_s": OF_A_CASE_S}
    twins.agree(trained, tolerance=TRAINED, **arguments)


@clause("distributed.fsdp.fully_sharded_data_parallel.outputs")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("by", ["inner", "outermost"])
@pytest.mark.parametrize(
    "strategy",
    [
        "FULL_SHARD",
        *(pytest.param(strategy, marks=FULL_PROFILE) for strategy in ("SHARD_GRAD_OP", "NO_SHARD")),
    ],
)
@pytest.mark.world_sizes(fewest=2)
def test_unit_returns_any_output_type(twins: Twins, strategy: str, by: str, kind: str) -> None:
    twins.agree(trained, tolerance=TRAINED, strategy=strategy, uses=kind, by=by)


@clause("distributed.fsdp.fsdp_torch_limit_removed.outputs_written_to")
@pytest.mark.deviation("fsdp.outputs_written_to")
@pytest.mark.parametrize("by", ["inner", "outermost"])
def test_unit_outputs_may_be_written_in_place(twins_of: TwinsOf, by: str) -> None:
    twins = twins_of(2)

    def in_place_and_not(library: Library) -> list[RankOutcomes]:
        return [twins.of(library, trained, uses=uses, by=by) for uses in DOUBLED]

    twins.judge(
        in_place_and_not,
        torch_does=lambda results: raises(ValueError, "expected to be in states")(results[0]),
        we_do=lambda results: holds(assert_ranks_agree, *results),
    )


@clause("distributed.fsdp.fsdp_torch_limit_removed.no_outputs")
@pytest.mark.deviation("fsdp.no_outputs")
@both_kinds
def test_unit_without_output_gradients_gets_none(twins: Twins, use_orig_params: bool) -> None:
    def silent_and_detached(library: Library) -> list[RankOutcomes]:
        return [
            twins.of(library, trained, uses=uses, use_orig_params=use_orig_params)
            for uses in ("none", "detached")
        ]

    twins.judge(
        silent_and_detached,
        torch_does=lambda results: raises(AssertionError, "_saved_grad_shard")(results[0]),
        we_do=lambda results: holds(assert_ranks_agree, *results),
        may_agree=True,
    )
