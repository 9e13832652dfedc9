"""GradScaler.scale: results for tensors, nested iterables and objects that are neither."""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.judge.clauses import clause
from conformance.judge.comparing import Compare
from conformance.judge.deviations import DeviationJudge
from conformance.judge.library import Library
from conformance.judge.outcome import Outcome, observe
from conformance.strategies.gradients import Gradient, shapes
from conformance.strategies.scaling import Harness

SCALES = st.sampled_from([1.0, 3.0, 2.0**16, 1e5 / 3, 2.0**-10, 0.1])
Pair = namedtuple("Pair", ["one", "other"])


def scaled(library: Library, device: str, outputs: Any, **options: Any) -> Outcome:
    scaler = library.amp.GradScaler(device, **options)
    return observe(scaler.scale, outputs, watch=[outputs])


@clause("amp.grad_scaler.scale.multiplies")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@given(
    shape=shapes, seed=st.integers(0, 99), init_scale=SCALES, layout=st.sampled_from(["transposed", "sliced"])
)
def test_multiplies_by_the_scale(
    compare: Compare,
    device: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    seed: int,
    init_scale: float,
    layout: str,
) -> None:
    # A later test covers vectors of a 16-bit dtype, because torch rounds the product back to that dtype.
    gradient = Gradient(() if dtype.itemsize == 2 else shape, dtype, seed=seed, layout=layout)
    loss = gradient.parameter(device).grad
    assert loss is not None
    compare(lambda library: scaled(library, device, loss, init_scale=init_scale))


@clause("amp.grad_scaler.scale.multiplies")
@given(init_scale=SCALES, factors=st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=4))
def test_gradients_flow_through(
    compare: Compare, device: str, init_scale: float, factors: list[float]
) -> None:
    def gradients(library: Library) -> Outcome:
        weight = torch.nn.Parameter(torch.tensor(factors, device=device))
        scaler = library.amp.GradScaler(device, init_scale=init_scale)
        return observe(lambda: scaler.scale((weight * weight).sum()).backward(), watch=[weight])

    compare(gradients)


@clause("amp.grad_scaler.scale.multiplies")
@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64], ids=str
)
@pytest.mark.parametrize("shape", [(), (3,)])
def test_other_number_types(
    compare: Compare, device: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    values = torch.ones(shape, dtype=dtype, device=device)
    compare(lambda library: scaled(library, device, values))


@clause("amp.grad_scaler.scale.multiplies")
@pytest.mark.parametrize("kind", ["sparse", "expanded", "empty", "nan", "inf"])
def test_odd_tensors(compare: Compare, device: str, kind: str) -> None:
    outputs = {
        "sparse": torch.eye(3, device=device).to_sparse(),
        "expanded": torch.ones(1, device=device).expand(4),
        "empty": torch.zeros(0, 3, device=device),
        "nan": torch.tensor([math.nan, 1.0], device=device),
        "inf": torch.tensor([1.0, -math.inf], device=device),
    }[kind]
    compare(lambda library: scaled(library, device, outputs))


CONTAINERS: dict[str, Callable[[list[torch.Tensor]], Any]] = {
    "list": list,
    "tuple": tuple,
    "generator": lambda tensors: (tensor for tensor in tensors),
    "iterator": iter,
    "set": set,
    "values of a dict": lambda tensors: dict(enumerate(tensors)).values(),
    "nested": lambda tensors: [tensors, (tensors[0], [tensors[-1]])],
    "nested lazily": lambda tensors: [tensors[0], (tensor for tensor in tensors)],
    "empty in between": lambda tensors: [[], tensors[0], ()],
    "named tuple": lambda tensors: Pair(tensors[0], tensors[-1]),
    "rows of a tensor in a list": lambda tensors: [tensors[0].reshape(1, -1), tensors[-1]],
}


def unrolled(value: Any) -> Any:
    """Replace lazy iterables by lists that begin with "lazy"."""
    if isinstance(value, (list, tuple)):
        return type(value)(unrolled(item) for item in value)
    if isinstance(value, torch.Tensor):
        return value
    return ["lazy", *(unrolled(item) for item in value)]


@clause("amp.grad_scaler.scale.iterables")
@pytest.mark.parametrize("container", list(CONTAINERS))
@given(seeds=st.lists(st.integers(0, 99), min_size=1, max_size=4), init_scale=SCALES)
def test_scaled_containers_match_torch(
    compare: Compare, device: str, container: str, seeds: list[int], init_scale: float
) -> None:
    tensors = [Gradient((index + 1,), seed=seed).parameter(device).grad for index, seed in enumerate(seeds)]

    def scaled_whole(library: Library) -> Outcome:
        scaler = library.amp.GradScaler(device, init_scale=init_scale)
        # The order of a set is unspecified, so both libraries get the same set.
        return observe(lambda: unrolled(scaler.scale(CONTAINERS[container](tensors))), watch=tensors)

    compare(scaled_whole)


@clause("amp.grad_scaler.scale.iterables")
def test_generator_is_consumed_lazily(subject: Library, device: str) -> None:
    """A user who scales micro-batches lazily computes one loss at a time."""
    events: list[str] = []

    def losses() -> Any:
        for index in range(2):
            events.append(f"made {index}")
            yield torch.ones((), device=device)

    for index, _ in enumerate(subject.amp.GradScaler(device).scale(losses())):
        events.append(f"used {index}")
    assert events == ["made 0", "used 0", "made 1", "used 1"]


@clause("amp.grad_scaler.scale.several_devices")
def test_outputs_on_two_devices(subject: Library, device: str) -> None:
    devices = [device, "meta" if device == "cpu" else "cpu", device]
    scaled = subject.amp.GradScaler(device).scale([torch.ones(2, device=name) for name in devices])
    assert [(out.device.type, out.dtype) for out in scaled] == [(name, torch.float32) for name in devices]


@clause("amp.grad_scaler.scale.first_use")
@pytest.mark.parametrize("outputs", [[], (), [[], ()]], ids=repr)
def test_scale_of_no_tensor_does_not_initialize_scale(compare: Compare, device: str, outputs: Any) -> None:
    def scenario(library: Library) -> Iterator[Outcome]:
        harness = Harness(library, device, init_scale=8.0)
        yield harness.did(harness.scaler.scale, outputs)
        yield harness.did(harness.scaler.unscale_, harness.optimizer)

    assert "_scale is None" in str(compare(scenario)[1].raised)


@clause("amp.grad_scaler.scale.first_use")
def test_scale_is_constant_until_update(subject: Library, device: str) -> None:
    scaler = subject.amp.GradScaler(device, init_scale=12.0)
    for _ in range(3):
        assert float(scaler.scale(torch.tensor(2.0, device=device))) == 24.0
        assert [float(out) for out in scaler.scale([torch.tensor(3.0, device=device)] * 2)] == [36.0, 36.0]


@clause("amp.grad_scaler.scale.bad_outputs")
@pytest.mark.parametrize("outputs", [None, 3, 1.5, [1], [None], (2.0,), {1: 2}, object, b"loss"], ids=repr)
def test_unscalable_outputs_raise(compare: Compare, device: str, outputs: Any) -> None:
    """The scaler can be used after the errors for such outputs and for no argument."""

    def scenario(library: Library) -> Iterator[Outcome]:
        harness = Harness(library, device)

        def scale() -> Any:
            result = harness.scaler.scale(outputs)
            return result if isinstance(result, (list, tuple)) else list(result)

        yield harness.did(scale)
        yield harness.did(harness.scaler.scale)
        yield harness.did(harness.scaler.scale, torch.ones((), device=device))

    refused, without_outputs, scaled = compare(scenario)
    assert "outputs must be a Tensor or an iterable of Tensors" in str(refused.raised)
    assert "missing 1 required positional argument" in str(without_outputs.raised)
    assert scaled.raised is None


@clause("amp.grad_scaler.scale.low_precision_losses")
@pytest.mark.deviation("grad_scaler.low_precision_losses")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("nest", [lambda loss: loss, lambda loss: [[loss]]], ids=["tensor", "nested"])
def test_half_precision_vectors(
    deviation: DeviationJudge, device: str, dtype: torch.dtype, nest: Callable[[Any], Any]
) -> None:
    def probe(library: Library) -> tuple[torch.dtype, list[float], list[float]]:
        losses = torch.tensor([1.0, 3.0], dtype=dtype, device=device, requires_grad=True)
        result = library.amp.GradScaler(device).scale(nest(losses))
        result = result if isinstance(result, torch.Tensor) else result[0][0]
        result.sum().backward()
        return result.dtype, result.tolist(), losses.grad.tolist()

    torchs = [math.inf, math.inf] if dtype == torch.float16 else [65536.0, 196608.0]
    deviation.judge(
        probe,
        torch_does=lambda outcome: outcome == (dtype, torchs, torchs[:1] * 2),
        we_do=lambda outcome: outcome == (torch.float32, [65536.0, 196608.0], torchs[:1] * 2),
    )


@clause("amp.grad_scaler.scale.low_precision_losses")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@given(value=st.floats(-4, 4, width=16), init_scale=SCALES)
def test_half_precision_losses_come_back_in_float32(
    compare: Compare, device: str, dtype: torch.dtype, value: float, init_scale: float
) -> None:
    loss = torch.tensor(value, dtype=dtype, device=device)
    [actual] = compare(lambda library: scaled(library, device, loss, init_scale=init_scale))
    assert actual.value.dtype == torch.float32
