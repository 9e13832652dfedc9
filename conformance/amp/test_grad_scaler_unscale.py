"""GradScaler.unscale_: division by the scale, the check for inf and nan, and gradients that raise."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.judge.clauses import clause
from conformance.judge.comparing import Compare
from conformance.judge.deviations import DeviationJudge
from conformance.judge.judgement import unavailable
from conformance.judge.library import Library
from conformance.judge.outcome import Outcome, observe
from conformance.ranks import Rank, RankPool, RankRaised
from conformance.simulator import NAME, Unavailable, ensure_built
from conformance.strategies.gradients import (
    LAYOUTS,
    REFUSED_OVERLAP,
    Gradient,
    GradientList,
    gradient_lists,
    laid_out,
)
from conformance.strategies.scaling import FOUR, MEASURED_DTYPES, Harness, Scenario

NONFINITE = st.sampled_from([math.inf, -math.inf, math.nan])
SCALES = st.sampled_from([1.0, 3.0, 2.0**16, 1e5 / 3, 2.0**-10, 0.1, 7.0])


def unscaling(case: GradientList, device: str, **options: Any) -> Scenario:
    """Return a scenario that unscales, steps and updates with existing gradients."""

    def scenario(library: Library) -> Iterator[Outcome]:
        harness = Harness(library, device, case.gradients, **options).used()
        yield from harness.calls("unscale_", "step", "update")

    return scenario


@clause("amp.grad_scaler.unscale_.divides")
@pytest.mark.parametrize("dtype", MEASURED_DTYPES, ids=str)
@given(data=st.data(), init_scale=SCALES)
def test_divides_in_place(
    compare: Compare, device: str, dtype: torch.dtype, data: st.DataObject, init_scale: float
) -> None:
    case = data.draw(gradient_lists(dtypes=(dtype,)))
    compare(unscaling(case, device, init_scale=init_scale))


@clause("amp.grad_scaler.unscale_.divides")
@given(init_scale=st.floats(1e-3, 1e6), seed=st.integers(0, 999))
def test_divides_by_the_true_reciprocal(subject: Library, device: str, init_scale: float, seed: int) -> None:
    """The reciprocal of the scale is rounded once, from float64. The expected value comes from no library."""
    harness = Harness(
        subject,
        device,
        (Gradient((9,), seed=seed), Gradient((3,), torch.float64, seed=seed)),
        init_scale=init_scale,
    )
    before = [parameter.grad.clone() for parameter in harness.parameters]
    scale = torch.tensor(init_scale, dtype=torch.float32)
    harness.used().scaler.unscale_(harness.optimizer)
    inverse = (1.0 / scale.double()).float()
    for grad, parameter in zip(before, harness.parameters, strict=True):
        assert torch.equal(parameter.grad.cpu(), grad.cpu() * inverse.to(grad.dtype))


@clause("amp.grad_scaler.unscale_.mixed_dtypes")
@given(
    case=gradient_lists(dtypes=(torch.float32, torch.bfloat16, torch.float64), min_size=2), init_scale=SCALES
)
def test_mixed_dtypes(compare: Compare, device: str, case: GradientList, init_scale: float) -> None:
    compare(unscaling(case, device, init_scale=init_scale))


@clause("amp.grad_scaler.unscale_.mixed_dtypes")
@pytest.mark.deviation("grad_scaler.bfloat16_on_cuda")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("last", [None, math.inf])
def test_bfloat16_gradients_are_unscaled_on_every_device(
    deviation: DeviationJudge, reference: Library, device: str, layout: str, last: float | None
) -> None:
    """The values match those of the same gradients on the CPU. Torch's operator is not replaced here."""

    def probe(library: Library, device: str = device) -> StepOutcomes:
        gradients = (
            Gradient((7,), torch.bfloat16, seed=1),
            Gradient((4, 5), torch.bfloat16, seed=2, layout=layout),
            Gradient((3,), seed=3),
            Gradient((5,), torch.bfloat16, seed=4, layout=layout, last=last),
        )
        harness = Harness(library, device, gradients, init_scale=24.0).used()
        calls = (
            (harness.scaler.unscale_, (harness.optimizer,)),
            (harness.scaler.step, (harness.optimizer,)),
            (harness.scaler.update, ()),
        )
        return [
            (str(observe(call, *args).raised), [numbers(parameter) for parameter in harness.parameters])
            for call, args in calls
        ]

    expected = probe(reference, "cpu")
    deviation.judge(
        probe,
        torch_does=lambda outcome: outcome[0][0].startswith("NotImplementedError: "),
        we_do=lambda outcome: outcome == expected,
    )


@clause("amp.grad_scaler.unscale_.finds_nonfinite")
@pytest.mark.parametrize("dtype", MEASURED_DTYPES, ids=str)
@given(data=st.data())
def test_finds_the_very_last_element(
    compare: Compare, device: str, dtype: torch.dtype, data: st.DataObject
) -> None:
    case = data.draw(gradient_lists(dtypes=(dtype,), last=NONFINITE, missing=False))
    compare(unscaling(case, device))


@clause("amp.grad_scaler.unscale_.finds_nonfinite")
@pytest.mark.parametrize("dtype", MEASURED_DTYPES, ids=str)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan], ids=repr)
@pytest.mark.parametrize("where", range(5))
def test_finds_it_wherever_it_lies(
    subject: Library, device: str, dtype: torch.dtype, value: float, where: int
) -> None:
    """The step is skipped no matter which gradient, group or dtype has the non-finite value."""
    gradients = [
        Gradient((3,), torch.float32, seed=1),
        Gradient((1025,), dtype, seed=2, layout="offset"),
        Gradient((4, 5), torch.float64, seed=3, layout="transposed"),
        Gradient((33,), dtype, seed=4, layout="sliced"),
        Gradient((), torch.bfloat16, seed=5),
    ]
    gradients[where] = dataclasses.replace(gradients[where], last=value)
    harness = Harness(subject, device, tuple(gradients), optimizer="recording", init_scale=8.0).used()
    assert [outcome.raised for outcome in harness.calls("step", "update")] == [None, None]
    assert harness.optimizer.calls == []
    assert harness.scaler.get_scale() == 4.0


def with_largest_gradients(library: Library, device: str, dtype: torch.dtype, init_scale: float) -> Harness:
    """Return a harness whose gradients are the largest and the smallest finite number."""
    harness = Harness(library, device, (Gradient((4,), dtype), Gradient((3,), dtype)), init_scale=init_scale)
    for sign, parameter in zip((1, -1), harness.used().parameters, strict=True):
        parameter.grad.fill_(sign * torch.finfo(dtype).max)
    return harness


@clause("amp.grad_scaler.unscale_.finds_nonfinite")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_large_finite_gradients_are_no_overflow(compare: Compare, device: str, dtype: torch.dtype) -> None:
    """The largest finite numbers are finite, even if their sum is not."""

    def scenario(library: Library) -> Iterator[Outcome]:
        for init_scale in (65536.0, 1.0):
            yield from with_largest_gradients(library, device, dtype, init_scale).calls(
                "unscale_", "step", "update"
            )

    compare(scenario)


@clause("amp.grad_scaler.unscale_.finds_nonfinite")
@pytest.mark.deviation("grad_scaler.large_float64_gradients")
@pytest.mark.parametrize("layout", ["contiguous", "sliced"])
@pytest.mark.parametrize("init_scale", [65536.0, 1.0])
def test_large_finite_float64_gradients_are_no_overflow(
    deviation: DeviationJudge, device: str, init_scale: float, layout: str
) -> None:
    def probe(library: Library) -> tuple[list[str], float]:
        harness = with_largest_gradients(library, device, torch.float64, init_scale)
        for parameter in harness.parameters:
            parameter.grad = laid_out(parameter.grad, layout)
        assert [outcome.raised for outcome in harness.calls("unscale_", "step", "update")] == [None] * 3
        return [
            text for parameter in harness.parameters for text in numbers(parameter)
        ], harness.scaler.get_scale()

    largest = torch.finfo(torch.float64).max / init_scale
    gradients = [[sign * largest] * size for sign, size in ((1, 4), (-1, 3))]
    stepped = [str(values) for grad in gradients for values in ([-0.125 * value for value in grad], grad)]
    skipped = [str(values) for grad in gradients for values in ([0.0] * len(grad), grad)]
    deviation.judge(
        probe,
        torch_does=lambda outcome: outcome == (skipped, init_scale / 2),
        we_do=lambda outcome: outcome == (stepped, init_scale),
    )


@clause("amp.grad_scaler.unscale_.divides_on_overflow_too")
@given(case=gradient_lists(last=NONFINITE, missing=False), init_scale=SCALES)
def test_finite_neighbours_are_divided_too(
    subject: Library, device: str, case: GradientList, init_scale: float
) -> None:
    harness = Harness(subject, device, case.gradients, init_scale=init_scale).used()
    before = [parameter.grad.clone() for parameter in harness.parameters]
    harness.scaler.step(harness.optimizer)
    inverse = (1.0 / torch.tensor(init_scale, dtype=torch.float32).double()).float().to(device)
    for grad, parameter in zip(before, harness.parameters, strict=True):
        expected = grad * inverse
        assert torch.equal(parameter.grad.nan_to_num(), expected.nan_to_num())


@clause("amp.grad_scaler.unscale_.same_tensors")
def test_gradients_stay_the_same_tensors(subject: Library, device: str) -> None:
    """A view of a gradient, such as a bucket or a flat buffer, sees the unscaled values."""
    harness = Harness(subject, device, FOUR, init_scale=4.0).used()
    flat = torch.full((6,), 8.0, device=device)
    harness.parameters[0].grad = flat[:5]
    held = [parameter.grad for parameter in harness.parameters]
    harness.scaler.unscale_(harness.optimizer)
    assert all(parameter.grad is grad for parameter, grad in zip(harness.parameters, held, strict=True))
    assert flat.tolist() == [2.0] * 5 + [8.0]
    assert harness.scaler.unscale_.__self__ is harness.scaler


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

    compare(scenario)


@clause("amp.grad_scaler.unscale_.parameters")
@pytest.mark.deviation("grad_scaler.shared_memory_in_turn")
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
@pytest.mark.parametrize("groups", [[], [{"params": []}], [{"params": []}, {"params": []}]], ids=repr)
@pytest.mark.parametrize("gradients", [0, 2])
def test_no_gradients_at_all(
    compare: Compare, device: str, groups: list[dict[str, Any]], gradients: int
) -> None:
    def scenario(library: Library) -> Iterator[Outcome]:
        harness = Harness(library, device, (Gradient((2,), None),) * 2).used()
        harness.optimizer.param_groups[:] = harness.optimizer.param_groups if gradients else groups
        yield from harness.calls("unscale_", "step", "update", "step")

    compare(scenario)


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
    try:
        ensure_built()
    except Unavailable as error:
        unavailable(str(error))
    with RankPool(1, device=NAME) as pool, pytest.raises(RankRaised, match="Sparsesim"):
        pool.run(f"{__name__}:sparse_on_a_rank")


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
    compare(scenario)


@clause("amp.grad_scaler.unscale_.refuses_float16")
@pytest.mark.parametrize("dtype", [torch.float16], ids=str)
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("where", [0, 3])
@pytest.mark.parametrize("call", ["unscale_", "step"])
def test_refuses_float16_and_leaves_all_alone(
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

    compare(scenario)


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


@clause("amp.grad_scaler.unscale_.several_devices")
@pytest.mark.deviation("grad_scaler.gradients_on_the_host")
@pytest.mark.parametrize("last", [None, math.inf])
def test_gradients_on_two_devices(
    deviation: DeviationJudge, device: str, last: float | None, reference: Library
) -> None:
    """The values match those of the same gradients on the CPU."""
    if device == "cpu":
        unavailable("one device type only")

    def probe(library: Library, device: str = device) -> StepOutcomes:
        harness = Harness(library, device, FOUR, init_scale=4.0).used()
        harness.parameters.append(Gradient((5,), seed=8, last=last).parameter("cpu"))
        harness.optimizer.add_param_group({"params": harness.parameters[-1:]})
        return [
            (outcome.raised and outcome.raised.text, [numbers(parameter) for parameter in harness.parameters])
            for outcome in harness.calls("unscale_", "step", "update")
        ]

    expected = probe(reference, "cpu")
    deviation.judge(
        probe,
        torch_does=lambda outcome: outcome != expected,
        we_do=lambda outcome: outcome == expected,
        may_agree=True,  # unless the copy ends after the host reads
    )


StepOutcomes = list[tuple[str | None, list[list[str]]]]


def numbers(parameter: torch.Tensor) -> list[str]:
    """Return the values of `parameter` and its gradient as text, so that nan equals nan."""
    return [
        str(tensor.detach().cpu().tolist()) for tensor in (parameter, parameter.grad) if tensor is not None
    ]


@clause("amp.grad_scaler.sync.none")
@pytest.mark.parametrize(
    "scaler_calls", [["scale", "unscale_"], ["scale", "unscale_", "update", "scale"]], ids=str
)
def test_nothing_waits_for_the_device(subject: Library, scaler_calls: list[str]) -> None:
    """Tensors on the meta device have no values, so reading one on the host raises."""
    harness = Harness(subject, "meta", init_scale=4.0)
    calls = {
        "scale": lambda: harness.scaler.scale(
            [torch.zeros(3, device="meta"), (torch.zeros((), device="meta"),)]
        ),
        "unscale_": lambda: harness.scaler.unscale_(harness.optimizer),
        "update": harness.scaler.update,
    }
    results = [calls[name]() for name in scaler_calls]
    assert results[0][0].device.type == "meta"


@clause("amp.grad_scaler.unscale_.bad_optimizers")
@pytest.mark.parametrize("optimizer", [None, 3, "sgd", [], object, torch.zeros(2)], ids=repr)
@pytest.mark.parametrize("method", ["unscale_", "step"])
def test_things_that_are_no_optimizers(compare: Compare, device: str, optimizer: Any, method: str) -> None:
    def scenario(library: Library) -> Iterator[Outcome]:
        harness = Harness(library, device).used()
        yield harness.did(getattr(harness.scaler, method), optimizer)
        yield from harness.calls("step", "update")

    compare(scenario)


@clause("amp.grad_scaler.unscale_.bad_optimizers")
@pytest.mark.parametrize("stranger", [None, 3, "weight", [torch.zeros(2)]], ids=repr)
def test_strangers_among_the_parameters(compare: Compare, device: str, stranger: Any) -> None:
    def scenario(library: Library) -> Iterator[Outcome]:
        harness = Harness(library, device).used()
        harness.optimizer.param_groups[-1]["params"].append(stranger)
        yield harness.did(harness.scaler.unscale_, harness.optimizer)
        harness.optimizer.param_groups[-1]["params"].pop()
        yield harness.did(harness.scaler.unscale_, harness.optimizer)

    compare(scenario)


@clause("amp.grad_scaler.unscale_.refuses_whole")
@pytest.mark.deviation("grad_scaler.hidden_overlap")
def test_windows_that_slide_over_one_memory(deviation: DeviationJudge, device: str) -> None:
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
