"""Results and errors of operators, inside regions and outside."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch

from conformance.judge.library import Library
from conformance.judge.outcome import plain_text
from conformance.strategies.autocast_operators import CALLS
from conformance.strategies.operator_calls import spellings

Dtypes = Sequence[torch.dtype]
Region = Callable[[], contextlib.AbstractContextManager[Any]]

# These operators return three results and their workspace.
RECURRENT = ("mkldnn_rnn_layer", "_cudnn_rnn")


@functools.cache
def callable_spellings(device: str) -> dict[str, list[tuple[str, Callable[..., Any]]]]:
    """Return, for each operator, the names whose functions take its arguments in float32."""

    def takes(name: str, function: Callable[..., Any]) -> bool:
        if (
            name.endswith("_cpu_fallback") and device != "cpu"
        ):  # reads memory of a device as if it were the CPU's
            return False
        return ran(functools.partial(outcome_of, name, function, [torch.float32], device))

    with quiet():
        return {
            name: [spelling for spelling in spellings(name) if takes(name, spelling[1])] for name in CALLS
        }


@contextlib.contextmanager
def quiet() -> Generator[None]:
    """Context manager that hides warnings and uses one thread, because all operands are tiny."""
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
    """Run the operator. Return its result or error with its operands afterwards, or the operands' gradients."""
    try:
        call = CALLS[name].operands(dtypes, device)
        leaves = [tensor for tensor in flat(call.args) if tensor.is_floating_point()] if backward else []
        for leaf in leaves:
            leaf.requires_grad_()
        with region():
            value = function(*call.args, **call.kwargs)
        value = value if isinstance(value, (torch.Tensor, list)) else tuple_of(value)
        if backward:
            torch.autograd.backward(sum(tensor.abs().sum() for tensor in flat(value) if tensor.requires_grad))
            return {"gradients": [leaf.grad for leaf in leaves]}
    except Exception as error:
        return {"raised": (type(error).__name__, plain_text(error))}
    return {"value": value[:3] if name in RECURRENT else value, "operands": call.args}


def tuple_of(value: Any) -> Any:
    """Convert named tuples to plain tuples."""
    return tuple(value) if isinstance(value, tuple) else value


def flat(values: Any) -> list[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        return [values]
    return [item for value in values for item in flat(value)] if isinstance(values, (list, tuple)) else []


def region_of(library: Library, device: str, dtype: torch.dtype | None) -> Region:
    autocast = library.amp.autocast
    return lambda: autocast(device, dtype=dtype)
