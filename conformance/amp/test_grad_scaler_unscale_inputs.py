"""GradScaler.unscale_ with unusual inputs: sparse, shared and frozen gradients, and inputs that raise."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from conformance.judge.clauses import clause
from conformance.judge.comparing import Compare
from conformance.judge.deviations import DeviationJudge
from conformance.judge.judgement import unavailable
from conformance.judge.library import Library
from conformance.judge.outcome import Outcome, observe
from conformance.ranks import Rank, RankPool, RankRaised
from conformance.ranks.fixtures import require_simulator
from conformance.simulator import NAME
from conformance.strategies.clipping import nested_parameter
from conformance.strategies.gradients import REFUSED_OVERLAP, Gradient
from conformance.strategies.scaling import FOUR, MEASURED_DTYPES, Harness, Scenario


class BareOptimizer:
    """An object with only param_groups and step, which is enough for the scaler."""

    def __init__(self, param_groups: list[dict[str, Any]]) -> None:
        self.param_groups = param_groups
        self.steps = 0

    def step(self) -> int:
        self.steps += 1
        return self.steps


@clause("amp.grad_scaler.unscale_.each_gradient_once")
@pytest.mark.deviation("grad_scaler.each_gradient_once")
@pytest.mark.parametrize("kind", ["twice in a group", "in two groups", "one gradient of two parameters"])
def test_gradient_listed_twice_is_rejected(deviation: DeviationJudge, device: str, kind: str) -> None:
    def probe(library: Library) -> tuple[bool, list[float]]:
        harness = Harness(library, device, (Gradient((2,)), Gradient((2,))), init_scale=4.0).used()
        first, second = harness.parameters
        for parameter in harness.parameters:
            parameter.grad.fill_(16.0)
        groups = [[second, first], [first]] if kind == "in two groups" else [[second], [first, first]]
        if kind == "one gradient of two parameters":
            groups, second.grad = [[second], [first]], first.grad
        outcome = harness.did(harness.scaler.unscale_, BareOptimizer([{"params": group} for group in groups]))
        refused = outcome.raised is not None and outcome.raised.kind is ValueError
        return refused, [float(parameter.grad[0]) for parameter in harness.parameters]

    shared = kind == "one gradient of two parameters"
    deviation.judge(
        probe,
        torch_does=lambda outcome: outcome == (False, [1.0, 1.0 if shared else 4.0]),
        we_do=lambda outcome: outcome == (True, [16.0, 16.0]),
    )


@clause("amp.grad_scaler.unscale_.parameters")
@pytest.mark.parametrize("kind", ["frozen", "no leaf"])
def test_odd_parameters(compare: Compare, device: str, kind: str) -> None:
    """A frozen parameter's gradient counts."""

    def scenario(library: Library) -> Iterator[Outcome]:
        harness = Harness(library, device, FOUR, init_scale=4.0).used()
        first, _, third, last = harness.parameters
        groups = [{"params": [first, third]}, {"params": [last]}]
        if kind == "frozen":
            last.requires_grad_(False)
            last.grad.view(-1)[-1] = math.inf
        else:
            groups[1]["params"] = [third * 2]
        harness.optimizer = BareOptimizer(groups)
        yield from harness.calls("unscale_", "step", "update")

    assert compare(scenario)[-1].watched["scaler"]["scale"] == (2.0 if kind == "frozen" else 4.0)


@clause("amp.grad_scaler.unscale_.parameters")
@pytest.mark.deviation("clip_grad.shared_memory_in_turn")
def test_memory_shared_by_gradients_is_divided_for_each(deviation: DeviationJudge, device: str) -> None:
    """torch's operator on CUDA may read an element for both gradients before it writes it."""

    def probe(library: Library) -> tuple[bool, list[float]]:
        harness = Harness(
            library, device, (Gradient((5,)), Gradient((3,)), Gradient((7,))), init_scale=4.0
        ).used()
        first, second, last = harness.parameters
        second.grad.fill_(16.0)
        buffer = torch.full((9,), 16.0, device=device)
        first.grad, last.grad = buffer[:5], buffer[2:]
        outcomes = [
            harness.did(getattr(harness.scaler, name), harness.optimizer) for name in ("unscale_", "step")
        ]
        return any(outcome.raised for outcome in outcomes), [*buffer.tolist(), *second.grad.tolist()]

    def is_divided(numbers: list[float], shared: set[float]) -> bool:
        return {*numbers[2:5]} <= shared and [*numbers[:2], *numbers[5:]] == [4.0] * 9

    deviation.judge(
        probe,
        torch_does=lambda outcome: not outcome[0] and is_divided(outcome[1], {1.0, 4.0}),
        we_do=lambda outcome: not outcome[0] and is_divided(outcome[1], {1.0}),
        may_agree=True,
    )


@clause("amp.grad_scaler.unscale_.parameters")
@pytest.mark.parametrize("groups", [None, [], [{"params": []}], [{"params": []}, {"params": []}]], ids=repr)
def test_no_gradients_at_all(compare: Compare, device: str, groups: list[dict[str, Any]] | None) -> None:
    """Step without parameters, or, if `groups` is None, with two parameters without gradients."""

    def scenario(library: Library) -> Iterator[Outcome]:
        harness = Harness(library, device, (Gradient((2,), None),) * 2).used()
        if groups is not None:
            harness.optimizer.param_groups[:] = groups
        yield from harness.calls("unscale_", "step", "update", "step")

    unscaled, *others = compare(scenario)
    assert unscaled.raised is None
    assert all("No inf checks" in str(outcome.raised) for outcome in others)


@clause("amp.grad_scaler.unscale_.parameters")
def test_gradients_of_a_graph(compare: Compare, device: str) -> None:
    """A gradient that belongs to a graph is divided without being recorded."""

    def scenario(library: Library) -> Iterator[Outcome]:
        harness = Harness(library, device, FOUR[:1], init_scale=4.0).used()
        harness.parameters[0].grad = (harness.parameters[0] * 3.0 + 1.0) * torch.ones(5, device=device)
        yield harness.did(harness.scaler.unscale_, harness.optimizer)
        harness.parameters[0].grad = None  # breaks a reference cycle

    compare(scenario)


def sparse_gradient(device: str, dtype: torch.dtype, coalesced: bool, value: float = 1.0) -> torch.Tensor:
    """Return a [5, 2] gradient with rows 1, 3 and 1. `value` is in both entries of the doubled row."""
    rows = torch.tensor([[1, 3, 1]], device=device)
    values = torch.tensor([[2.0, value], [3.0, 4.0], [5.0, value]], dtype=dtype, device=device)
    gradient = torch.sparse_coo_tensor(rows, values, (5, 2))
    return gradient.coalesce() if coalesced else gradient


def sparse_on_a_rank(rank: Rank) -> None:
    sparse_gradient(str(rank.device), torch.float32, coalesced=True)


@clause("amp.grad_scaler.unscale_.sparse")
@pytest.mark.profile("full")
@pytest.mark.reference_limit("sim.sparse_tensors")
def test_simulated_device_rejects_sparse_tensors() -> None:
    """Run in a separate process, which keeps the simulated device until it ends."""
    require_simulator()
    with RankPool(1, device=NAME) as pool, pytest.raises(RankRaised, match="Sparsesim"):
        pool.run(sparse_on_a_rank)


def sparse_scenario(device: str, gradient: Callable[[], torch.Tensor], optimizer: str = "sgd") -> Scenario:
    def scenario(library: Library) -> Iterator[Outcome]:
        harness = Harness(library, device, FOUR, optimizer=optimizer, init_scale=4.0).used()
        dtype = gradient().dtype
        embedding = torch.nn.Parameter(torch.zeros(5, 2, dtype=dtype, device=device))
        embedding.grad = gradient()
        harness.parameters.append(embedding)
        harness.optimizer.add_param_group({"params": [embedding]})
        if optimizer == "sgd":
            yield harness.did(harness.scaler.unscale_, harness.optimizer)
        yield from harness.calls("step", "update")
        yield harness.did(embedding.grad.is_coalesced)

    return scenario


@clause("amp.grad_scaler.unscale_.sparse")
@pytest.mark.parametrize("dtype", MEASURED_DTYPES, ids=str)
@pytest.mark.parametrize("coalesced", [True, False])
@pytest.mark.parametrize("value", [1.0, math.inf, math.nan])
def test_sparse_gradients(
    compare: Compare, device: str, dtype: torch.dtype, coalesced: bool, value: float
) -> None:
    scenario = sparse_scenario(device, lambda: sparse_gradient(device, dtype, coalesced, value))
    compare(scenario)


@clause("amp.grad_scaler.unscale_.sparse")
@pytest.mark.parametrize("coalesced", [True, False])
@pytest.mark.parametrize("value", [40000.0, 1.0, math.inf])
@pytest.mark.parametrize("dtype", [torch.float16], ids=str)
def test_half_precision_duplicates_are_summed_first(
    compare: Compare, device: str, coalesced: bool, value: float, dtype: torch.dtype
) -> None:
    """Two finite entries of one row whose sum overflows are an overflow.

    Only optimizers that unscale themselves may have float16 gradients.
    """
    scenario = sparse_scenario(device, lambda: sparse_gradient(device, dtype, coalesced, value), "aware")
    assert compare(scenario)[1].watched["scaler"]["scale"] == (4.0 if value == 1.0 else 2.0)


@clause("amp.grad_scaler.unscale_.refuses_float16")
@pytest.mark.parametrize("dtype", [torch.float16], ids=str)
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("where", [0, 3])
@pytest.mark.parametrize("call", ["unscale_", "step"])
def test_float16_gradient_raises_and_changes_nothing(
    compare: Compare, device: str, dtype: torch.dtype, sparse: bool, where: int, call: str
) -> None:
    def scenario(library: Library) -> Iterator[Outcome]:
        harness = Harness(library, device, init_scale=4.0)
        half = torch.nn.Parameter(torch.zeros(5, 2, dtype=dtype, device=device))
        half.grad = sparse_gradient(device, dtype, coalesced=False) if sparse else torch.ones_like(half)
        harness.parameters.insert(where, half)
        harness.optimizer = torch.optim.SGD(harness.parameters, lr=0.125)
        for attempt in range(3):
            yield harness.used().did(getattr(harness.scaler, call), harness.optimizer)
            yield harness.did(harness.scaler.update)
            if attempt == 1:  # valid gradients from the next attempt on
                half.grad = None

    assert [outcome.raised is None for outcome in compare(scenario)[::2]] == [False, False, True]


def unfit(device: str, kind: str) -> torch.nn.Parameter:
    dtype = {"integer": torch.int32, "complex": torch.complex64, "bool": torch.bool}.get(kind, torch.float32)
    parameter = torch.nn.Parameter(torch.zeros(4, dtype=dtype, device=device), requires_grad=False)
    parameter.grad = torch.ones(4, dtype=dtype, device=device)
    if kind == "overlapping":
        parameter.grad = torch.ones(1, device=device).expand(4)
    return parameter


@clause("amp.grad_scaler.unscale_.refuses_whole")
@pytest.mark.deviation("grad_scaler.refusal_is_whole")
@pytest.mark.parametrize("kind", ["integer", "complex", "bool", "overlapping"])
def test_unsupported_gradient_leaves_all_unchanged(deviation: DeviationJudge, device: str, kind: str) -> None:
    """The error is torch's. torch has divided some gradients before it, and Tandem changes none."""
    if device != "cpu":
        unavailable("torch's kernels for other devices take other dtypes")

    def probe(library: Library) -> tuple[str, str, list[float], float]:
        harness = Harness(
            library, device, (Gradient((3,)), Gradient((2,), torch.float64)), init_scale=4.0
        ).used()
        for parameter in harness.parameters:
            parameter.grad.fill_(8.0)
        harness.parameters.append(unfit(device, kind))
        harness.optimizer.add_param_group({"params": harness.parameters[-1:]})
        outcome = harness.did(harness.scaler.unscale_, harness.optimizer)
        return (
            str(outcome.raised.kind.__name__),
            outcome.raised.text,
            [float(parameter.grad[0]) for parameter in harness.parameters[:2]],
            harness.scaler.get_scale(),
        )

    divided = probe(deviation.reference)
    expected = divided[:2]
    deviation.judge(
        probe,
        torch_does=lambda outcome: (
            outcome[0] == expected[0] and outcome[2] in ([2.0, 2.0], [8.0, 2.0], [2.0, 8.0])
        ),
        we_do=lambda outcome: outcome == (*expected, [8.0, 8.0], 4.0),
    )


@clause("amp.grad_scaler.unscale_.bad_optimizers")
@pytest.mark.parametrize("optimizer", [None, 3, "sgd", [], object, torch.zeros(2)], ids=repr)
@pytest.mark.parametrize("method", ["unscale_", "step"])
def test_non_optimizer_raises(compare: Compare, device: str, optimizer: Any, method: str) -> None:
    def scenario(library: Library) -> Iterator[Outcome]:
        harness = Harness(library, device).used()
        yield harness.did(getattr(harness.scaler, method), optimizer)
        yield from harness.calls("step", "update")

    assert [outcome.raised is None for outcome in compare(scenario)] == [False, True, True]


@clause("amp.grad_scaler.unscale_.bad_optimizers")
@pytest.mark.parametrize("stranger", [None, 3, "weight", [torch.zeros(2)]], ids=repr)
def test_parameter_that_is_no_tensor_raises(compare: Compare, device: str, stranger: Any) -> None:
    def scenario(library: Library) -> Iterator[Outcome]:
        harness = Harness(library, device).used()
        harness.optimizer.param_groups[-1]["params"].append(stranger)
        yield harness.did(harness.scaler.unscale_, harness.optimizer)
        harness.optimizer.param_groups[-1]["params"].pop()
        yield harness.did(harness.scaler.unscale_, harness.optimizer)

    assert [outcome.raised is None for outcome in compare(scenario)] == [False, True]


@clause("amp.grad_scaler.unscale_.refuses_whole")
@pytest.mark.parametrize("method", ["unscale_", "step"])
def test_nested_gradient_raises(compare: Compare, method: str) -> None:
    """A nested gradient lacks the shape and strides by which a list may be recognised. Plain ones came before it."""

    def outcome(library: Library) -> Outcome:
        plain, nested = Gradient((2, 3, 4)).parameter("cpu"), nested_parameter()
        scaler = library.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.ones(()))
        for _ in range(2):
            scaler.step(torch.optim.SGD([plain], lr=0.5))
            scaler.update()
        optimizer = torch.optim.SGD([nested], lr=0.5, foreach=False)
        return observe(getattr(scaler, method), optimizer)

    [outcome_of_nested] = compare(outcome)
    assert outcome_of_nested.raised.kind is NotImplementedError


@clause("amp.grad_scaler.unscale_.refuses_whole")
@pytest.mark.deviation("grad_scaler.hidden_overlap")
def test_gradient_of_overlapping_windows_is_rejected(deviation: DeviationJudge, device: str) -> None:
    """The rows are [0, 1, 2], [1, 2, 3] and [2, 3, 4] of one buffer."""

    def probe(library: Library) -> tuple[str, list[float], float]:
        harness = Harness(library, device, (Gradient((3,)), Gradient((3, 3))), init_scale=4.0).used()
        first, second = harness.parameters
        first.grad.fill_(8.0)
        buffer = torch.full((5,), 64.0, device=device)
        second.grad = buffer.as_strided((3, 3), (1, 1))
        outcome = harness.did(harness.scaler.unscale_, harness.optimizer)
        return str(outcome.raised), buffer.tolist(), float(first.grad[0])

    deviation.judge(
        probe,
        torch_does=lambda outcome: outcome == ("None", [16.0, 4.0, 1.0, 4.0, 16.0], 2.0),
        we_do=lambda outcome: outcome[0].startswith(REFUSED_OVERLAP) and outcome[1:] == ([64.0] * 5, 8.0),
    )
