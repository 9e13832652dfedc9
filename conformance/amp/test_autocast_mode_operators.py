"""Which operators a region casts, and how: every one that the dispatcher has a rule for, and neighbours without one."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from conformance.clauses import clause
from conformance.library import Library
from conformance.outcome import Outcome, assert_same_outcome, observe, plain_text
from conformance.strategies.autocast_operators import CALLS, FACTORIZING
from conformance.strategies.operator_calls import spellings
from conformance.strategies.regions import LOW
from conformance.tolerances import EXACT, Tolerance

Dtypes = Sequence[torch.dtype]
Region = Callable[[], contextlib.AbstractContextManager[Any]]

# The operands' dtypes, in turn; None is the region's.
OPERANDS: dict[str, tuple[torch.dtype | None, ...]] = {
    "float32": (torch.float32,),
    "low": (None,),
    "mixed": (torch.float32, None),
    "mixed the other way": (None, torch.float32),
    "float64": (torch.float64,),
    "float64 among others": (torch.float32, torch.float64),
    "integers": (torch.int32,),
}
SOON = [*((torch.bfloat16, each) for each in ("float32", "low")), (torch.float16, "mixed"), (None, "float64")]
BY_LAPACK = Tolerance(64, "a factorization of three rows, and what is made of it", terms=4.0)
# These return, behind three results, their working memory.
RECURRENT = ("mkldnn_rnn_layer", "_cudnn_rnn")
# What torch is built with decides whether they run at all; names of dimensions are not implemented for the last.
NOT_EVERYWHERE = {*RECURRENT, "cudnn_convolution", "cudnn_convolution_transpose", "index_copy.dimname"}


@functools.cache
def callable_spellings(device: str) -> dict[str, list[tuple[str, Callable[..., Any]]]]:
    """Of each operator, by which it takes its arguments in float32."""

    def takes(name: str, function: Callable[..., Any]) -> bool:
        return ran(functools.partial(outcome_of, name, function, [torch.float32], device))

    with quiet():
        return {name: [each for each in spellings(name) if takes(name, each[1])] for name in CALLS}


@contextlib.contextmanager
def quiet() -> Generator[None]:
    """Some operators are deprecated, and torch says so of some once a process. One thread, as all are tiny."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads(threads)


def ran(run: Callable[[], Any]) -> bool:
    return "raised" not in run()


def outcome_of(
    name: str,
    function: Callable[..., Any],
    dtypes: Dtypes,
    device: str,
    region: Region = contextlib.nullcontext,
    backward: bool = False,
) -> dict[str, Any]:
    """What it returns or raises, and its operands afterwards; or their gradients."""
    try:
        call = CALLS[name].operands(dtypes, device)
        leaves = [each for each in flat(call.args) if each.is_floating_point()] if backward else []
        for each in leaves:
            each.requires_grad_()
        with region():
            value = function(*call.args, **call.kwargs)
        value = value if isinstance(value, (torch.Tensor, list)) else tuple_of(value)
        if backward:
            torch.autograd.backward(sum(each.abs().sum() for each in flat(value) if each.requires_grad))
            return {"gradients": [each.grad for each in leaves]}
    except Exception as error:
        return {"raised": (type(error).__name__, plain_text(error))}
    return {"value": value[:3] if name in RECURRENT else value, "operands": call.args}


def tuple_of(value: Any) -> Any:
    """What operators call by names of their own, without them."""
    return tuple(value) if isinstance(value, tuple) else value


def flat(values: Any) -> list[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        return [values]
    return [each for one in values for each in flat(one)] if isinstance(values, (list, tuple)) else []


def region_of(library: Library, device: str, dtype: torch.dtype | None) -> Region:
    autocast = library.amp.autocast
    return lambda: autocast(device, dtype=dtype)


def in_dtypes(operands: str, low: torch.dtype) -> list[torch.dtype]:
    return [low if each is None else each for each in OPERANDS[operands]]


def asked_of_all(
    library: Library, device: str, dtype: torch.dtype | None, operands: str, backward: bool = False
) -> Outcome:
    low = torch.get_autocast_dtype(device) if dtype is None else dtype
    region, dtypes = region_of(library, device, dtype), in_dtypes(operands, low)

    def run() -> dict[str, Any]:
        with quiet():
            return {
                f"{name}, as {spelling}": outcome_of(name, function, dtypes, device, region, backward)
                for name, found in callable_spellings(device).items()
                for spelling, function in found
            }

    found = observe(run)
    assert found.raised is None, found.raised
    return found


def assert_same_of_all(reference: Outcome, subject: Outcome) -> None:
    for tolerance, is_one in (EXACT, is_to_the_bit), (BY_LAPACK, lambda name: not is_to_the_bit(name)):
        assert_same_outcome(*(only(each, is_one) for each in (reference, subject)), tolerance)


def is_to_the_bit(name: str) -> bool:
    """LAPACK's results may depend on where its operands lie."""
    return name.partition(",")[0].partition(".")[0] not in FACTORIZING


def only(outcome: Outcome, is_one: Callable[[str], bool]) -> Outcome:
    return replace(outcome, value={name: each for name, each in outcome.value.items() if is_one(name)})


@clause("amp.autocast_mode.autocast.casts_by_operator")
@pytest.mark.parametrize(
    ("dtype", "operands"),
    [
        pytest.param(dtype, operands, marks=() if (dtype, operands) in SOON else pytest.mark.profile("full"))
        for dtype in (None, *LOW)
        for operands in OPERANDS
    ],
    ids=str,
)
def test_casts_by_operator(
    subject: Library, reference: Library, device: str, dtype: torch.dtype | None, operands: str
) -> None:
    assert_same_of_all(*(asked_of_all(each, device, dtype, operands) for each in (reference, subject)))


@clause("amp.autocast_mode.autocast.gradients")
@pytest.mark.parametrize(
    "operands",
    ["float32", *(pytest.param(each, marks=pytest.mark.profile("full")) for each in ("mixed", "low"))],
)
def test_gradients_by_operator(subject: Library, reference: Library, device: str, operands: str) -> None:
    """Of operands that are leaves, whose casts are kept."""
    outcomes = [asked_of_all(each, device, LOW[0], operands, backward=True) for each in (reference, subject)]
    assert_same_of_all(*outcomes)


# --- whether enough is asked, which torch's dispatcher tells


def operators_with_rules(device: str) -> set[str]:
    """Those for which autocast on that device has an entry of its own in the dispatcher."""
    key = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}[device]
    found = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return {name.removeprefix("aten::") for name in found if name.startswith("aten::")}


@clause("amp.autocast_mode.autocast.casts_by_operator")
@pytest.mark.parametrize("which", ["cpu", "cuda"])
def test_every_operator_with_a_rule_is_asked(which: str) -> None:
    rules = operators_with_rules(which)
    assert {"mm", "conv2d", "mse_loss"} <= rules, "the dispatcher is asked for something else"
    assert rules - CALLS.keys() == set()


@clause("amp.autocast_mode.autocast.casts_by_operator")
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_every_rule_shows(reference: Library, device: str, dtype: torch.dtype) -> None:
    """What is asked of an operator with a rule can tell it from one without."""
    region = region_of(reference, device, dtype)
    with quiet():
        showing = {name: rules_shown(name, device, dtype, region) for name in operators_with_rules(device)}
    assert {name for name, shown in showing.items() if not shown} <= NOT_EVERYWHERE
    assert set().union(*showing.values()) >= {"lower precision", "float32", "widest"}


def rules_shown(name: str, device: str, low: torch.dtype, region: Region) -> set[str]:
    """Which rules explain the dtypes that come of a spelling of an operator, in regions and without."""
    found = set()
    for _, function in callable_spellings(device)[name]:
        kinds = functools.partial(kinds_of, name, function, device=device)
        if kinds([torch.float32], region=region) == kinds([low]) != kinds([torch.float32]):
            found.add("lower precision")
        if kinds([low], region=region) == kinds([torch.float32]) != kinds([low]):
            found.add("float32")
        mixed = kinds([torch.float32, low], region=region), kinds([low, torch.float32], region=region)
        if set(mixed) == {kinds([torch.float32])} and kinds([low], region=region) == kinds([low]):
            found.add("widest")
        if not ran(functools.partial(outcome_of, name, function, [torch.float32], device, region)):
            found.add("refused")
    return found


def kinds_of(
    name: str,
    function: Callable[..., Any],
    dtypes: Dtypes,
    device: str,
    region: Region = contextlib.nullcontext,
) -> tuple[str, ...]:
    found = outcome_of(name, function, dtypes, device, region)
    return tuple(str(each.dtype) for each in flat(found.get("value", ()))) or ("raised",)
