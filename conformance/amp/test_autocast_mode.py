"""Autocast regions: what they cast, how they nest, what they restore and what they keep."""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from torch.utils._python_dispatch import TorchDispatchMode

from conformance.clauses import clause
from conformance.deviations import DeviationJudge
from conformance.library import Library
from conformance.outcome import Outcome, assert_same_outcome, observe
from conformance.strategies.regions import Planned, Region, programs, state

LOW = [torch.bfloat16, torch.float16]

# One operator of each kind that the dispatcher tells apart, and some that it leaves alone.
OPERATORS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "mm": torch.mm,
    "linear": lambda a, b: torch.nn.functional.linear(a, b, b[0]),
    "matmul": lambda a, b: a @ b,
    "bmm": lambda a, b: torch.bmm(a[None], b[None]),
    "addmm": lambda a, b: torch.addmm(a, a, b),
    "conv1d": lambda a, b: torch.nn.functional.conv1d(a[None], b[:, :, None]),
    "mse_loss": torch.nn.functional.mse_loss,
    "cosine_similarity": torch.nn.functional.cosine_similarity,
    "cat, mixed dtypes": lambda a, b: torch.cat([a, b.to(torch.bfloat16)]),
    "stack, mixed dtypes": lambda a, b: torch.stack([a.half(), b]),
    "index_copy, mixed dtypes": lambda a, b: torch.index_copy(
        a, 0, torch.tensor([0, 1], device=a.device), b[:2]
    ),
    "add": torch.add,
    "softmax": lambda a, b: a.softmax(0),
    "float64 mm": lambda a, b: a.double() @ b.double(),
    "integer mm": lambda a, b: a.int() @ b.int() if a.device.type == "cpu" else a.int(),
    "sdpa": lambda a, b: torch.nn.functional.scaled_dot_product_attention(a[None], b[None], a[None]),
}


def operands(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    one, two = (torch.randn(4, 4, generator=generator).to(device) for _ in range(2))
    return one, two


@clause("amp.autocast_mode.autocast.casts_by_operator")
@pytest.mark.parametrize("operator", list(OPERATORS))
@pytest.mark.parametrize("dtype", [None, *LOW], ids=str)
def test_casts_by_operator(
    subject: Library, reference: Library, device: str, dtype: torch.dtype | None, operator: str
) -> None:
    def inside(library: Library) -> Outcome:
        a, b = operands(device)

        def run() -> Any:
            with library.amp.autocast(device, dtype=dtype):
                return OPERATORS[operator](a, b)

        return observe(run, watch=[a, b])

    assert_same_outcome(inside(reference), inside(subject))


@clause("amp.autocast_mode.autocast.casts_by_operator")
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_a_region_is_really_on(subject: Library, device: str, dtype: torch.dtype) -> None:
    a, b = operands(device)
    with subject.amp.autocast(device, dtype=dtype) as entered:
        assert torch.is_autocast_enabled(device)
        assert torch.get_autocast_dtype(device) == dtype
        assert (a @ b).dtype == dtype
        assert isinstance(entered, subject.amp.autocast)
    assert (a @ b).dtype == torch.float32


@clause("amp.autocast_mode.autocast.device_type")
@pytest.mark.parametrize(
    "name", ["cpu", "cuda", "mps", "xpu", "hpu", "mtia", "maia", "xla", "ipu", "privateuseone"]
)
@pytest.mark.parametrize("enabled", [True, False])
def test_each_device_type(subject: Library, reference: Library, name: str, enabled: bool) -> None:
    def inside(library: Library) -> Outcome:
        def run() -> Any:
            with library.amp.autocast(name, enabled=enabled):
                return state(), torch.is_autocast_enabled(name), torch.get_autocast_dtype(name)

        return observe(run)

    assert_same_outcome(inside(reference), inside(subject))


@clause("amp.autocast_mode.autocast.device_type")
@pytest.mark.parametrize("name", ["meta", "tpu", "", "CPU", "cpu:0"])
def test_device_types_without_autocast(subject: Library, reference: Library, name: str) -> None:
    assert_same_outcome(
        observe(lambda: reference.amp.autocast(name).device),
        observe(lambda: subject.amp.autocast(name).device),
    )


@clause("amp.autocast_mode.autocast.default_dtype")
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_default_dtype_is_asked_for(subject: Library, device: str, dtype: torch.dtype) -> None:
    before = torch.get_autocast_dtype(device)
    torch.set_autocast_dtype(device, dtype)
    try:
        region = subject.amp.autocast(device)
        torch.set_autocast_dtype(device, before)
        with region:
            assert torch.get_autocast_dtype(device) == dtype
        assert torch.get_autocast_dtype(device) == before
    finally:
        torch.set_autocast_dtype(device, before)


@clause("amp.autocast_mode.autocast.unsupported_dtype")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int8, torch.complex64], ids=str)
@pytest.mark.parametrize("enabled", [True, False])
def test_unsupported_dtype(
    subject: Library, reference: Library, device: str, dtype: torch.dtype, enabled: bool
) -> None:
    def inside(library: Library) -> Outcome:
        a, b = operands(device)

        def run() -> Any:
            with library.amp.autocast(device, dtype=dtype, enabled=enabled):
                return a @ b, state()

        return observe(run)

    assert_same_outcome(inside(reference), inside(subject))


@clause("amp.autocast_mode.autocast.enabled")
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_disabled_region_inside(subject: Library, device: str, dtype: torch.dtype) -> None:
    a, b = operands(device)
    with subject.amp.autocast(device, dtype=dtype):
        low = a @ b
        with subject.amp.autocast(device, enabled=False):
            assert (a @ b).dtype == torch.float32
            with pytest.raises(RuntimeError):
                _ = low @ b
            with subject.amp.autocast(device, dtype=dtype, enabled=True):
                assert (low @ b).dtype == dtype
        assert (low @ b).dtype == dtype


def trace_of(library: Library, program: Region) -> Outcome:
    """The state at each point of the program, and before and after it."""
    points: list[dict[str, Any]] = [state()]

    def run() -> None:
        with contextlib.suppress(Planned):
            program.run(library, lambda: points.append(state()))
        points.append(state())

    outcome = observe(run)
    return Outcome(points, outcome.watched, outcome.raised, outcome.warned)


@clause("amp.autocast_mode.autocast.nesting_restores")
@given(program=programs)
def test_any_program_of_regions(subject: Library, reference: Library, program: Region) -> None:
    wanted = trace_of(reference, program)
    assert wanted.value[0] == wanted.value[-1], "the reference itself does not restore its state"
    assert_same_outcome(wanted, trace_of(subject, program))


@clause("amp.autocast_mode.autocast.nesting_restores")
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, GeneratorExit, StopIteration])
def test_exceptions_pass(subject: Library, device: str, error: type[BaseException]) -> None:
    before = state()
    region = subject.amp.autocast(device, cache_enabled=False)
    with pytest.raises(error), region:
        raise error
    assert state() == before
    region.__enter__()
    assert region.__exit__(ValueError, ValueError(), None) is False
    assert state() == before


@clause("amp.autocast_mode.autocast.one_instance_many_regions")
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_one_instance_again_and_again(subject: Library, device: str, dtype: torch.dtype) -> None:
    a, b = operands(device)
    before = state()
    region = subject.amp.autocast(device, dtype=dtype)
    for _ in range(3):
        with region:
            assert (a @ b).dtype == dtype
        assert state() == before
    with subject.amp.autocast(device, enabled=False):
        inner = state()
        with region:
            assert (a @ b).dtype == dtype
        assert state() == inner


@clause("amp.autocast_mode.autocast.one_instance_in_itself")
@pytest.mark.deviation("autocast.one_instance_in_itself")
def test_one_instance_in_itself(deviation: DeviationJudge) -> None:
    def probe(library: Library) -> tuple[bool, bool]:
        """Whether the state after both exits is that of before, and whether it is still on between them."""
        before = state()
        region = library.amp.autocast("cpu")
        try:
            with region:
                with region:
                    pass
                between = torch.is_autocast_enabled("cpu")
            return state() == before, between
        finally:
            torch.set_autocast_enabled("cpu", before["enabled"]["cpu"])

    deviation.judge(
        probe, torch_does=lambda seen: seen == (False, True), we_do=lambda seen: seen == (True, True)
    )


@clause("amp.autocast_mode.autocast.exit_without_enter")
@pytest.mark.deviation("autocast.exit_without_enter")
@pytest.mark.parametrize("where", ["here", "another thread"])
def test_leaving_what_is_not_open(deviation: DeviationJudge, where: str) -> None:
    def probe(library: Library) -> tuple[str, bool]:
        """What leaving a region once too often says, and whether the thread that does so keeps its state."""
        region = library.amp.autocast("cpu", cache_enabled=False)
        seen: list[tuple[str, bool]] = []

        def leave() -> None:
            before = state()
            outcome = observe(region.__exit__, None, None, None)
            seen.append((str(outcome.raised), state() == before))
            while state()["depth"] < before["depth"]:
                torch.autocast_increment_nesting()
            torch.set_autocast_cache_enabled(before["cache"])

        with region:
            if where == "another thread":
                thread = threading.Thread(target=leave)
                thread.start()
                thread.join(10)
        if where == "here":
            leave()
        return seen[0]

    deviation.judge(
        probe,
        torch_does=lambda seen: seen == ("None", False),
        we_do=lambda seen: seen[0].startswith("AttributeError: ") and seen[1],
    )


@clause("amp.autocast_mode.autocast.bad_arguments")
@pytest.mark.deviation("autocast.failed_enter_changes_nothing")
@pytest.mark.parametrize("attribute", ["_cache_enabled", "fast_dtype"])
def test_entering_fails_half_way(deviation: DeviationJudge, attribute: str) -> None:
    def probe(library: Library) -> tuple[bool, bool]:
        """Whether entering raised, and whether the state is as before."""
        before = state()
        region = library.amp.autocast("cpu")
        setattr(region, attribute, "no")
        outcome = observe(region.__enter__)
        kept = state() == before
        torch.set_autocast_enabled("cpu", before["enabled"]["cpu"])
        while state()["depth"] > before["depth"]:
            torch.autocast_decrement_nesting()
        return outcome.raised is not None and outcome.raised.kind is TypeError, kept

    deviation.judge(
        probe, torch_does=lambda seen: seen == (True, False), we_do=lambda seen: seen == (True, True)
    )


@clause("amp.autocast_mode.autocast.threads")
def test_a_region_belongs_to_its_thread(subject: Library, device: str) -> None:
    seen: dict[str, Any] = {}

    def elsewhere() -> None:
        seen["outside"] = torch.is_autocast_enabled(device)
        with subject.amp.autocast(device, enabled=False):
            seen["inside"] = torch.is_autocast_enabled(device)
            inside.wait(10)

    inside = threading.Event()
    with subject.amp.autocast(device):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        assert torch.is_autocast_enabled(device)
        inside.set()
        thread.join(10)
        assert torch.is_autocast_enabled(device)
    assert seen == {"outside": False, "inside": False}


@clause("amp.autocast_mode.autocast.threads")
def test_one_instance_in_two_threads(subject: Library, device: str) -> None:
    """A decorated function is one instance, called from many threads."""
    a, b = operands(device)
    decorated = subject.amp.autocast(device, dtype=torch.bfloat16)(torch.mm)
    dtypes: list[torch.dtype] = []
    threads = [threading.Thread(target=lambda: dtypes.append(decorated(a, b).dtype)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert dtypes == [torch.bfloat16] * 4


class CastCounter(TorchDispatchMode):
    """Counts the casts of float32 tensors to a lower precision that really run."""

    def __init__(self) -> None:
        super().__init__()
        self.casts = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.casts += func is torch.ops.aten._to_copy.default
        return func(*args, **(kwargs or {}))


def casts_in(
    library: Library, device: str, cache_enabled: bool | None, leaf: bool, uses: int, regions: int
) -> int:
    weight = torch.ones(4, 4, device=device, requires_grad=True)
    used = weight if leaf else weight * 2
    x = torch.ones(4, 4, device=device, dtype=torch.bfloat16)
    with CastCounter() as counter:
        for _ in range(regions):
            with library.amp.autocast(device, dtype=torch.bfloat16, cache_enabled=cache_enabled):
                for _ in range(uses):
                    _ = x @ used
                with library.amp.autocast(device, dtype=torch.bfloat16, cache_enabled=cache_enabled):
                    _ = x @ used
                _ = x @ used
    return counter.casts


@clause("amp.autocast_mode.autocast.cache")
@pytest.mark.parametrize("cache_enabled", [None, True, False])
@pytest.mark.parametrize("leaf", [True, False])
def test_casts_are_kept(
    subject: Library, reference: Library, device: str, cache_enabled: bool | None, leaf: bool
) -> None:
    got = casts_in(subject, device, cache_enabled, leaf, uses=3, regions=2)
    assert got == casts_in(reference, device, cache_enabled, leaf, uses=3, regions=2)
    assert got == (2 if leaf and cache_enabled is not False else 10)


def product_after_update(
    library: Library, device: str, update: Callable[[torch.nn.Parameter], None]
) -> float:
    """What a region computes with a weight of 1 that becomes 3 between two regions."""
    weight = torch.nn.Parameter(torch.ones(2, 2, device=device))
    x = torch.ones(2, 2, device=device)
    with contextlib.suppress(Planned), library.amp.autocast(device, dtype=torch.bfloat16):
        _ = x @ weight
        raise Planned
    with torch.no_grad():
        update(weight)
    with library.amp.autocast(device, dtype=torch.bfloat16):
        return float((x @ weight)[0, 0])


@clause("amp.autocast_mode.autocast.cache_after_exception")
@pytest.mark.parametrize("update", [lambda w: w.fill_(3), lambda w: w.data.copy_(torch.full((2, 2), 3.0))])
def test_a_new_region_sees_new_weights(subject: Library, device: str, update: Callable[[Any], None]) -> None:
    assert product_after_update(subject, device, update) == 6.0


@clause("amp.autocast_mode.autocast.cache_sees_optimizer_steps")
@pytest.mark.deviation("autocast.cache_sees_optimizer_steps")
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize("depth", [1, 2])
def test_steps_inside_a_region(deviation: DeviationJudge, device: str, optimizer: str, depth: int) -> None:
    def probe(library: Library) -> bool:
        """Whether the product after the step is that of the new weight."""
        weight = torch.nn.Parameter(torch.ones(2, 2, device=device))
        x = torch.ones(2, 2, device=device)
        stepper = getattr(torch.optim, optimizer)([weight], lr=0.5)
        with contextlib.ExitStack() as stack:
            for _ in range(depth):
                stack.enter_context(library.amp.autocast(device, dtype=torch.bfloat16))
            (x @ weight).sum().backward()
            stepper.step()
            used = x @ weight
        wanted = x.bfloat16() @ weight.detach().bfloat16()
        return torch.equal(used, wanted)

    deviation.judge(probe, torch_does=lambda fresh: not fresh, we_do=lambda fresh: fresh)


@clause("amp.autocast_mode.autocast.cache_sees_optimizer_steps")
def test_clearing_the_cache_by_hand(subject: Library, device: str) -> None:
    weight = torch.nn.Parameter(torch.ones(2, 2, device=device))
    x = torch.ones(2, 2, device=device)
    with subject.amp.autocast(device, dtype=torch.bfloat16):
        _ = x @ weight
        weight.data.fill_(3)
        torch.clear_autocast_cache()
        assert float((x @ weight)[0, 0]) == 6.0


@clause("amp.autocast_mode.autocast.gradients")
@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("cache_enabled", [True, False])
def test_gradients(
    subject: Library, reference: Library, device: str, dtype: torch.dtype, cache_enabled: bool
) -> None:
    def trained(library: Library) -> Outcome:
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 2)).to(
            device
        )
        a, _ = operands(device)

        def run() -> torch.Tensor:
            with library.amp.autocast(device, dtype=dtype, cache_enabled=cache_enabled):
                loss = model(model[0].weight.sum() * a).float().pow(2).mean()
            loss.backward()
            return loss.detach()

        return observe(run, watch=list(model.parameters()))

    assert_same_outcome(trained(reference), trained(subject))


@clause("amp.autocast_mode.autocast.decorator")
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_decorator(subject: Library, reference: Library, device: str, dtype: torch.dtype) -> None:
    def decorated(library: Library) -> Outcome:
        @library.amp.autocast(device, dtype=dtype)
        def product(a: torch.Tensor, *, b: torch.Tensor) -> Any:
            """Multiply."""
            return a @ b, state()

        a, b = operands(device)
        seen = (product.__name__, product.__doc__, str(inspect.signature(product)), state())
        return observe(lambda: (product(a, b=b), product(a, b=b), seen, state()))

    assert_same_outcome(decorated(reference), decorated(subject))


@clause("amp.autocast_mode.autocast.decorator")
def test_decorated_method_that_raises_and_recurses(subject: Library, device: str) -> None:
    region = subject.amp.autocast(device)

    class Model:
        @region
        def forward(self, depth: int) -> list[bool]:
            if depth == 0:
                raise Planned
            with contextlib.suppress(Planned), subject.amp.autocast(device, enabled=False):
                self.forward(depth - 1)
            return [torch.is_autocast_enabled(device)]

    before = state()
    assert Model().forward(1) == [True]
    with pytest.raises(Planned):
        Model().forward(0)
    torch.set_autocast_enabled(
        device, before["enabled"][device]
    )  # torch's one saved state is lost in recursion


@clause("amp.autocast_mode.autocast.decorator")
@pytest.mark.parametrize("value", [None, 3, "f", torch.ones(2)], ids=repr)
def test_decorating_what_cannot_be_called(subject: Library, reference: Library, value: Any) -> None:
    wanted, got = (
        observe(lambda lib=lib: lib.amp.autocast("cpu")(value) and None) for lib in (reference, subject)
    )
    if wanted.raised is None and got.raised is not None:
        # torch 2.11 hands back a function that fails when it is called; later ones refuse at once, and so may we.
        assert got.raised.kind is TypeError
        assert got.raised.text.startswith("autocast()(func) requires a callable, but got")
    else:
        assert_same_outcome(wanted, got)


@clause("amp.autocast_mode.autocast.attributes")
@pytest.mark.parametrize("dtype", [None, *LOW, torch.float32], ids=str)
@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("cache_enabled", [None, True, False])
def test_attributes(
    subject: Library,
    reference: Library,
    device: str,
    dtype: torch.dtype | None,
    enabled: bool,
    cache_enabled: bool | None,
) -> None:
    def read(library: Library) -> Outcome:
        def attributes() -> tuple[Any, ...]:
            region = library.amp.autocast(device, dtype, enabled, cache_enabled)
            return region.device, region.fast_dtype, region._enabled, region._cache_enabled

        return observe(attributes)

    assert_same_outcome(read(reference), read(subject))


BAD: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "no device type": ((), {}),
    "a device": ((torch.device("cpu"),), {}),
    "None": ((None,), {}),
    "a number": ((0,), {}),
    "a dtype by name": (("cpu", "bfloat16"), {}),
    "an unknown keyword": (("cpu",), {"cached": True}),
    "enabled a string": (("cpu",), {"enabled": "no"}),
}


@clause("amp.autocast_mode.autocast.bad_arguments")
@pytest.mark.parametrize("call", list(BAD))
def test_bad_arguments(subject: Library, reference: Library, call: str) -> None:
    args, kwargs = BAD[call]

    def entered(library: Library) -> Outcome:
        before = state()

        def run() -> bool:
            with library.amp.autocast(*args, **kwargs):
                return True

        outcome = observe(run)
        torch.set_autocast_enabled(
            "cpu", before["enabled"]["cpu"]
        )  # torch leaves it on where entering fails half way
        return outcome

    wanted, got = entered(reference), entered(subject)
    if wanted.raised is not None and got.raised is not None and "set_autocast" in wanted.raised.text:
        # Raised by the dispatcher's own functions, whose text names where they were called from.
        assert issubclass(got.raised.kind, wanted.raised.kind)
    else:
        assert_same_outcome(wanted, got)


@clause("amp.autocast_mode.autocast_decorator.wraps")
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_autocast_decorator(subject: Library, reference: Library, device: str, dtype: torch.dtype) -> None:
    def decorated(library: Library) -> Outcome:
        a, b = operands(device)

        def run() -> Any:
            mm = library.amp.autocast_mode.autocast_decorator(
                library.amp.autocast(device, dtype=dtype), torch.mm
            )
            add = library.amp.autocast_mode.autocast_decorator(
                library.amp.autocast(device, enabled=False), torch.add
            )
            with library.amp.autocast(device, dtype=torch.bfloat16):
                return mm(a, b), add(a, b), mm.__name__, add.__name__

        return observe(run)

    assert_same_outcome(decorated(reference), decorated(subject))


@clause("amp.autocast_mode.is_autocast_available.answers")
@pytest.mark.parametrize(
    "name", ["cpu", "cuda", "mps", "xpu", "meta", "xla", "privateuseone", "tpu", "", 3, None], ids=repr
)
def test_is_autocast_available(subject: Library, reference: Library, name: Any) -> None:
    assert_same_outcome(
        observe(reference.amp.is_autocast_available, name), observe(subject.amp.is_autocast_available, name)
    )
