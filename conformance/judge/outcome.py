"""Outcomes of calls, in a form in which the calls of two libraries can be compared.

An `Outcome` has the result, the later state of the watched tensors, which tensors share memory, the exception (type and
text) and the warnings (category, text, and whether they point at the caller). `assert_same_outcome` names every
difference.
"""

from __future__ import annotations

import dataclasses
import math
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from conformance.judge.library import LookupFailed, NotProvided
from conformance.judge.sandbox import global_state
from conformance.judge.surface import torch_version
from conformance.judge.tolerances import EXACT, Tolerance


@dataclass(frozen=True)
class TensorState:
    """The observable state of a tensor, independent of the library that made it."""

    values: torch.Tensor
    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None
    layout: torch.layout
    requires_grad: bool
    is_leaf: bool
    # The names of the watched tensor that this is, and of the one that it shares storage with, or None.
    is_watched: str | None
    shares_storage_with: str | None

    def __repr__(self) -> str:
        return f"{self.values} as {self.dtype} of shape {self.shape} on {self.device}"


_CALLERS = Path(__file__).parents[1]
_DESCRIPTION = tuple(field.name for field in dataclasses.fields(TensorState) if field.name != "values")


@dataclass(frozen=True)
class Raised:
    kind: type[BaseException]
    text: str

    def __str__(self) -> str:
        return f"{self.kind.__name__}: {self.text}"


@dataclass(frozen=True)
class Outcome:
    value: Any = None
    watched: Any = None
    raised: Raised | None = None
    warned: tuple[tuple[str, str], ...] = field(default=())
    # Settings and random generators of the user that the call left changed, with a description of the change.
    left_changed: Mapping[str, str] = field(default_factory=dict)
    # The warnings that point at a line of the caller, where the caller's filters apply.
    at_the_caller: frozenset[tuple[str, str]] = frozenset()


def observe(call: Callable[..., Any], *args: Any, watch: Any = None, **kwargs: Any) -> Outcome:
    """Run `call` and return its outcome, which includes the later state of `watch`, a nesting of tensors.

    torch's settings are restored, so that a change is attributed to the call that made it.

    Raises:
        NotProvided: the subject lacks a name that `call` uses. There is no outcome to compare.
        LookupFailed: the module of such a name cannot be imported.
    """
    named = _named(watch)
    value, raised = None, None
    settings, generators = global_state.read(global_state.SETTINGS), global_state.RandomStates()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # Dynamo's warnings about the interpreter (the second in Python 3.14), and warnings that Dynamo, autograd and
        # the compiler's imports give once for each process, do not depend on the library.
        warnings.filterwarnings("ignore", r"Guards may run slower on Python 3\.13\.0", RuntimeWarning)
        warnings.filterwarnings("ignore", "'_UnionGenericAlias' is deprecated", DeprecationWarning)
        warnings.filterwarnings("ignore", "The AccumulateGrad node's stream does not match", UserWarning)
        warnings.filterwarnings("ignore", r"`torch\.jit\.script_method` is deprecated", DeprecationWarning)
        try:
            value = call(*args, **kwargs)
        except (NotProvided, LookupFailed):
            raise
        except Exception as error:
            raised = Raised(type(error), _text_of(error))
    moved = dict.fromkeys(generators.moved(), "moved")
    changed = global_state.put_back(global_state.SETTINGS, settings)
    names = _Names(named)
    warned = tuple((warning.category.__name__, plain_text(warning.message)) for warning in caught)
    return Outcome(
        value=_snapshot(value, names),
        watched=_snapshot(watch, names),
        raised=raised,
        warned=warned,
        at_the_caller=frozenset(
            message for message, warning in zip(warned, caught, strict=True) if _is_callers(warning.filename)
        ),
        left_changed=moved | {name: f"{was} before, {now} after" for name, (was, now) in changed.items()},
    )


def _is_callers(file: str) -> bool:
    """Return whether a file belongs to the suite, which calls both libraries."""
    return Path(file).is_relative_to(_CALLERS)


def plain_text(message: object) -> str:
    """Return the text of a message without memory addresses, which differ from run to run."""
    try:
        text = str(message)
    except Exception as error:
        text = f"none: asking for it raises {type(error).__name__}"
    return re.sub(r"0x[0-9a-f]{6,}", "0x…", text)


def _text_of(error: Exception) -> str:
    """Return the text of an exception. torch 2.11 passes some sentences separately, which later versions join."""
    is_several = len(error.args) > 1 and all(isinstance(argument, str) for argument in error.args)
    return plain_text(" ".join(error.args) if is_several and torch_version() == "2.11" else error)


def assert_same_outcome(reference: Outcome, subject: Outcome, tolerance: Tolerance = EXACT) -> None:
    """Fail with every difference between the outcomes of the reference and of the subject."""
    if sentences := list(differences(reference, subject, tolerance)):
        lines = "\n".join(f"  - {sentence}" for sentence in sentences)
        raise AssertionError(f"the subject's outcome differs from the reference's:\n{lines}")


def differences(reference: Outcome, subject: Outcome, tolerance: Tolerance = EXACT) -> Iterable[str]:
    yield from _raised_differences(reference.raised, subject.raised)
    if reference.warned != subject.warned:
        yield f"warned {list(subject.warned)}, expected {list(reference.warned)}"
    for kind, text in (reference.at_the_caller - subject.at_the_caller) & {*subject.warned}:
        yield f"warned {(kind, text)} at a line of its own, expected it at the caller's (stacklevel)"
    for name in subject.left_changed.keys() - reference.left_changed.keys():
        yield f"left {name} changed ({subject.left_changed[name]})"
    yield from _differences("value", reference.value, subject.value, tolerance)
    yield from _differences("watched", reference.watched, subject.watched, tolerance)


def _raised_differences(expected: Raised | None, actual: Raised | None) -> Iterable[str]:
    if expected is None and actual is None:
        return
    if expected is None:
        yield f"raised {actual}, expected no exception"
    elif actual is None:
        yield f"raised nothing, expected {expected}"
    else:
        # Code that catches torch's exception also catches a subclass.
        if not issubclass(actual.kind, expected.kind):
            yield f"raised {actual.kind.__name__}, expected {expected.kind.__name__} ({expected.text})"
        if actual.text != expected.text:
            yield f"raised the text {actual.text!r}, expected {expected.text!r}"


def _differences(path: str, expected: Any, actual: Any, tolerance: Tolerance) -> Iterable[str]:
    if isinstance(expected, TensorState) and isinstance(actual, TensorState):
        yield from _tensor_differences(path, expected, actual, tolerance)
    elif _kind(expected) != _kind(actual):
        yield f"{path}: got a {_kind(actual)} ({actual!r}), expected a {_kind(expected)} ({expected!r})"
    elif isinstance(expected, Mapping):
        if list(expected) != list(actual):
            yield f"{path}: keys {list(actual)}, expected {list(expected)}"
        for key in expected.keys() & actual.keys():
            yield from _differences(f"{path}[{key!r}]", expected[key], actual[key], tolerance)
    elif isinstance(expected, (list, tuple)):
        if len(expected) != len(actual):
            yield f"{path}: {len(actual)} items, expected {len(expected)}"
        for index, (expected_item, actual_item) in enumerate(zip(expected, actual, strict=False)):
            yield from _differences(f"{path}[{index}]", expected_item, actual_item, tolerance)
    elif isinstance(expected, float):
        if not (expected == actual or (math.isnan(expected) and math.isnan(actual))):
            yield f"{path}: got {actual!r}, expected {expected!r}"
    elif expected != actual:
        yield f"{path}: got {actual!r}, expected {expected!r}"


def _kind(value: Any) -> str:
    return type(value).__name__


def _tensor_differences(
    path: str, expected: TensorState, actual: TensorState, tolerance: Tolerance
) -> Iterable[str]:
    for name in _DESCRIPTION:
        expected_value, actual_value = getattr(expected, name), getattr(actual, name)
        if expected_value != actual_value:
            yield f"{path}.{name}: got {actual_value}, expected {expected_value}"
    if expected.shape == actual.shape and expected.dtype == actual.dtype:
        worst = tolerance.excess(expected.values, actual.values)
        if worst is not None:
            yield f"{path}: {worst}"


def _named(watch: Any) -> dict[str, torch.Tensor]:
    """Return the watched tensors and their gradients by name, as they are before the call."""
    named: dict[str, torch.Tensor] = {}

    def visit(path: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            named[path] = value
            if value.is_leaf and value.grad is not None:
                named[f"{path}.grad"] = value.grad
        elif isinstance(value, Mapping):
            for key, item in value.items():
                visit(f"{path}[{key!r}]", item)
        elif isinstance(value, (list, tuple)):
            for index, item in enumerate(value):
                visit(f"{path}[{index}]", item)

    visit("watch", watch)
    return named


class _Names:
    """Names of watched tensors, by tensor and by storage. If there are several names, the first counts."""

    def __init__(self, named: Mapping[str, torch.Tensor]) -> None:
        self._of_tensors: dict[int, str] = {}
        self._of_storages: dict[int, str] = {}
        for name, tensor in named.items():
            self._of_tensors.setdefault(id(tensor), name)
            if tensor.layout is torch.strided and (address := _address(tensor)):
                self._of_storages.setdefault(address, name)

    def of(self, tensor: torch.Tensor) -> str | None:
        return self._of_tensors.get(id(tensor))

    def of_storage(self, tensor: torch.Tensor) -> str | None:
        """Return the name of a watched tensor that shares storage with `tensor`, or None.

        A tensor that is not strided shares storage only with itself.
        """
        if tensor.layout is not torch.strided:
            return self.of(tensor)
        return self._of_storages.get(_address(tensor))


def _address(tensor: torch.Tensor) -> int:
    """Return the address of the tensor's storage, or 0 if it was freed."""
    return tensor.untyped_storage().data_ptr()


def _snapshot(value: Any, names: _Names) -> Any:
    if isinstance(value, torch.Tensor):
        state = _tensor_state(value, names)
        if value.is_leaf and value.grad is not None:
            return {"data": state, "grad": _tensor_state(value.grad, names)}
        return state
    if isinstance(value, Mapping):
        return {key: _snapshot(item, names) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_snapshot(item, names) for item in value]
        return items if isinstance(value, list) else _as_tuple(value, items)
    return value


def _as_tuple(original: tuple[Any, ...], items: list[Any]) -> tuple[Any, ...]:
    return type(original)(*items) if hasattr(original, "_fields") else tuple(items)


def _tensor_state(tensor: torch.Tensor, names: _Names) -> TensorState:
    detached = tensor.detach()
    values = detached.to_dense() if detached.layout is not torch.strided else detached
    return TensorState(
        values=values.clone() if values.device.type == "cpu" else values.cpu(),
        dtype=tensor.dtype,
        device=tensor.device,
        shape=tuple(tensor.shape),
        stride=tuple(tensor.stride()) if tensor.layout is torch.strided else None,
        layout=tensor.layout,
        requires_grad=tensor.requires_grad,
        is_leaf=tensor.is_leaf,
        is_watched=names.of(tensor),
        shares_storage_with=names.of_storage(tensor),
    )
