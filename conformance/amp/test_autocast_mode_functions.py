"""custom_fwd and custom_bwd: the autocast state carried through a custom autograd Function."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from conformance.judge.clauses import clause
from conformance.judge.comparing import Compare
from conformance.judge.deviations import DeviationJudge
from conformance.judge.library import Library
from conformance.judge.outcome import Outcome, observe
from conformance.judge.sandbox import seeding
from conformance.strategies.regions import LOW, state

CASTS = [None, torch.float32, torch.bfloat16, torch.float64]


def function_of(library: Library, device: str, cast_inputs: torch.dtype | None, log: dict[str, Any]) -> type:
    """Return an autograd Function that multiplies, and records the state and the dtypes in forward and backward."""

    class Product(torch.autograd.Function):
        @staticmethod
        @library.amp.custom_fwd(device_type=device, cast_inputs=cast_inputs)
        def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor, others: Any = None) -> torch.Tensor:
            log["forward"] = (state(), a.dtype, b.dtype, others)
            ctx.save_for_backward(a, b)
            return a @ b

        @staticmethod
        @library.amp.custom_bwd(device_type=device)
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            a, b = ctx.saved_tensors
            log["backward"] = (state(), grad.dtype)
            return grad @ b.t(), a.t() @ grad, None

    return Product


def operands(device: str, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = seeding.generator(7)
    return [torch.randn(3, 3, generator=generator).to(device, dtype).requires_grad_() for _ in range(2)]


@clause("amp.autocast_mode.custom_fwd.keeps_state_for_backward")
@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("backward_inside", ["none", "enabled", "disabled"])
def test_backward_runs_in_forwards_state(
    compare: Compare, device: str, dtype: torch.dtype, enabled: bool, backward_inside: str
) -> None:
    def run(library: Library) -> Outcome:
        log: dict[str, Any] = {}
        product = function_of(library, device, None, log)
        a, b = operands(device)

        def both() -> Any:
            with library.amp.autocast(device, dtype=dtype, enabled=enabled):
                out = product.apply(a, b)
            if backward_inside == "none":
                out.sum().backward()
            else:
                other = torch.float16 if dtype == torch.bfloat16 else torch.bfloat16
                with library.amp.autocast(device, dtype=other, enabled=backward_inside == "enabled"):
                    out.sum().backward()
                    log["after"] = state()
            return out, log, state()

        return observe(both, watch=[a, b])

    [outcome] = compare(run)
    assert outcome.value[1]["backward"][0]["enabled"][device] is enabled


@clause("amp.autocast_mode.custom_fwd.casts_inputs")
@pytest.mark.parametrize("cast_inputs", CASTS, ids=str)
@pytest.mark.parametrize("region", ["none", "enabled", "disabled"])
@pytest.mark.parametrize("dtype", [torch.float32, *LOW, torch.float64], ids=str)
def test_casts_inputs(
    compare: Compare, device: str, cast_inputs: torch.dtype | None, region: str, dtype: torch.dtype
) -> None:
    def run(library: Library) -> Outcome:
        log: dict[str, Any] = {}
        product = function_of(library, device, cast_inputs, log)
        a, b = operands(device, dtype)

        def both() -> Any:
            if region == "none":
                out = product.apply(a, b)
            else:
                with library.amp.autocast(device, dtype=torch.bfloat16, enabled=region == "enabled"):
                    out = product.apply(a, b)
            out.float().sum().backward()
            return out, log

        return observe(both, watch=[a, b])

    compare(run)


NESTED: dict[str, Any] = {
    "list": lambda x: [x, [x, "text"], b"bytes"],
    "tuple": lambda x: (x, (x,), 3),
    "dict": lambda x: {"x": x, "inner": {"x": [x]}, 3: None},
    "keys": lambda x: {x: x, "inner": {(x, 3): [x]}},
    "float64": lambda x: [x.double()],
    "integers": lambda x: [x.int(), x.bool()],
    "other device": lambda x: [x.to("meta").dtype],
    "array": lambda x: [x.detach().cpu().numpy()],
}


@clause("amp.autocast_mode.custom_fwd.casts_inputs")
@pytest.mark.parametrize("kind", list(NESTED))
@pytest.mark.parametrize("cast_inputs", [torch.float16, torch.float32], ids=str)
def test_casts_nested_inputs(compare: Compare, device: str, kind: str, cast_inputs: torch.dtype) -> None:
    def dtypes(value: Any) -> Any:
        if isinstance(value, dict):
            return {dtypes(key): dtypes(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(dtypes(item) for item in value)
        return str(value.dtype) if hasattr(value, "dtype") else value

    def run(library: Library) -> Outcome:
        @library.amp.custom_fwd(device_type=device, cast_inputs=cast_inputs)
        def forward(ctx: Any, value: Any, *, keyword: Any) -> Any:
            return dtypes(value), dtypes(keyword), state()

        def inside() -> Any:
            value = NESTED[kind](torch.ones(2, device=device))
            context = SimpleNamespace()
            with library.amp.autocast(device, dtype=torch.bfloat16):
                return forward(context, value, keyword=value), forward(context, keyword=value, value=value)

        return observe(inside)

    compare(run)


@clause("amp.autocast_mode.custom_fwd.casts_inputs")
def test_casts_only_its_own_device(compare: Compare) -> None:
    """Tensors on another device than device_type keep their dtype."""

    def run(library: Library) -> Outcome:
        @library.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float16)
        def forward(ctx: Any, left: torch.Tensor, right: torch.Tensor) -> Any:
            return left.dtype, right.dtype

        def inside() -> Any:
            with library.amp.autocast("cpu"):
                return forward(SimpleNamespace(), torch.ones(2), torch.ones(2, device="meta"))

        return observe(inside)

    [outcome] = compare(run)
    assert outcome.value == (torch.float16, torch.float32)


@clause("amp.autocast_mode.custom_fwd.as_decorator_with_arguments")
@pytest.mark.parametrize("name", ["custom_fwd", "custom_bwd"])
@pytest.mark.parametrize("bare", [True, False])
def test_both_forms_of_decorating(compare: Compare, name: str, bare: bool) -> None:
    def run(library: Library) -> Outcome:
        decorator = getattr(library.amp, name)

        def original(ctx: Any, x: int) -> Any:
            """Add one."""
            return x + 1, state()

        def use() -> Any:
            decorated = (
                decorator(original, device_type="cpu") if bare else decorator(device_type="cpu")(original)
            )
            context = SimpleNamespace(_fwd_used_autocast=True, _dtype=torch.bfloat16)
            return decorated(context, 1), decorated.__name__, decorated.__doc__

        return observe(use)

    compare(run)


@clause("amp.autocast_mode.custom_fwd.bad_arguments")
@pytest.mark.parametrize("name", ["custom_fwd", "custom_bwd"])
@pytest.mark.parametrize(
    "arguments",
    [{}, {"device_type": None}, {"device_type": 3}, {"device_type": torch.device("cpu")}],
    ids=str,
)
def test_bad_device_types(compare: Compare, name: str, arguments: dict[str, Any]) -> None:
    def run(library: Library) -> Outcome:
        return observe(lambda: callable(getattr(library.amp, name)(lambda ctx: None, **arguments)))

    [outcome] = compare(run)
    assert "device_type" in str(outcome.raised)


@clause("amp.autocast_mode.custom_fwd.bad_arguments")
@pytest.mark.parametrize("device_type", ["tpu", "", "meta", "cpu:0", "xla"])
@pytest.mark.parametrize("cast_inputs", [None, torch.float16, "float16"], ids=str)
def test_device_types_without_autocast(compare: Compare, device_type: str, cast_inputs: Any) -> None:
    """Decorating succeeds. The call raises and sets nothing on the context, unless torch knows a default dtype."""

    def run(library: Library) -> Outcome:
        context = SimpleNamespace()
        decorated = library.amp.custom_fwd(
            lambda ctx, x: x.dtype, device_type=device_type, cast_inputs=cast_inputs
        )
        outcome = observe(decorated, context, torch.ones(2))
        return replace(outcome, value=(outcome.value, vars(context)))

    [outcome] = compare(run)
    assert (outcome.raised is None) == (device_type in ("cpu:0", "xla"))
    assert outcome.raised is None or outcome.value == (None, {})


@clause("amp.autocast_mode.custom_fwd.bad_arguments")
@pytest.mark.parametrize("cast_inputs", ["float16", 3, float, torch.int32], ids=str)
def test_unusual_cast_inputs_match_torch(compare: Compare, cast_inputs: Any) -> None:
    """`Tensor.to` accepts Python's float and integer dtypes. The state is as before."""

    def run(library: Library) -> Outcome:
        forward = library.amp.custom_fwd(lambda ctx, x: x.dtype, device_type="cpu", cast_inputs=cast_inputs)

        def inside() -> Any:
            with library.amp.autocast("cpu"):
                return forward(SimpleNamespace(), torch.ones(2))

        before = state()
        outcome = observe(inside)
        return replace(outcome, value=(outcome.value, state() == before))

    [outcome] = compare(run)
    assert (outcome.raised is None) == (cast_inputs in (float, torch.int32))
    assert outcome.value[1]


@clause("amp.autocast_mode.custom_fwd.bad_arguments")
def test_backward_without_custom_fwd(compare: Compare) -> None:
    def run(library: Library) -> Outcome:
        return observe(library.amp.custom_bwd(lambda ctx: None, device_type="cpu"), SimpleNamespace())

    [outcome] = compare(run)
    assert "_fwd_used_autocast" in str(outcome.raised)


@clause("amp.autocast_mode.custom_fwd.setup_context")
@pytest.mark.deviation("autocast.no_attributes_on_inputs")
def test_setup_context_leaves_no_attributes_on_inputs(deviation: DeviationJudge, device: str) -> None:
    def probe(library: Library) -> list[str]:
        """Return the attributes that remain on the first input of a forward without ctx."""

        class Double(torch.autograd.Function):
            @staticmethod
            @library.amp.custom_fwd(device_type=device)
            def forward(x: torch.Tensor) -> torch.Tensor:
                return x * 2

            @staticmethod
            def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
                pass

            @staticmethod
            def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
                return grad * 2

        x = torch.ones(2, device=device, requires_grad=True)
        Double.apply(x).sum().backward()
        assert torch.equal(x.grad, torch.full_like(x, 2.0))
        return [name for name in ("_dtype", "_fwd_used_autocast") if name in vars(x)]

    deviation.judge(
        probe,
        torch_does=lambda names: names == ["_dtype", "_fwd_used_autocast"],
        we_do=lambda names: names == [],
    )
