"""The Triton kernels run, on the GPU or in its interpreter, beside float64 arithmetic; and what they compiled to."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from conformance.gpu.phase_rows import PhaseTask, Rows, in_words, serve
from conformance.gpu.update_bounds import EACH, OTHERS, states_of, update
from conformance.judge.tolerances import EXACT, Tolerance, norm_of
from impl import kernels

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_SIZES = (1, 3, 1000, 4097)
_LARGE = 1_000_003  # for a GPU alone: the interpreter takes a second a million elements
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_FACTOR = 0.37
_LIMITS = -0.5, 0.25
_NORMS = (1.0, 2.0, 3.0, math.inf)
_NARROW = (torch.float16, torch.bfloat16)
_STEP, _INV_SCALE = 3.0, 0.125
_PRODUCT = Tolerance(1, "a product that is rounded to float32 and then to the dtype, beside one rounded once")


def unscale_(tensors: list[Tensor]) -> None:
    device = tensors[0].device
    factor, found = torch.tensor(_FACTOR, device=device), torch.zeros(1, device=device)
    _scaled(tensors, factor, lambda: kernels.unscale_(tensors, factor, found))
    assert found.item() == 0.0, "found inf where there is none"
    tensors[-1].view(-1)[-1] = math.inf
    kernels.unscale_(tensors, factor, found)
    assert found.item() == 1.0, "overlooked an inf in the last element"


def scale_(tensors: list[Tensor]) -> None:
    factor = torch.tensor(_FACTOR, device=tensors[0].device)
    _scaled(tensors, factor, lambda: kernels.scale_(tensors, factor))


def _scaled(tensors: list[Tensor], factor: Tensor, call: Callable[[], None]) -> None:
    expected = [(tensor.double() * factor.double()).to(tensor.dtype) for tensor in tensors]
    call()
    _assert_same(expected, tensors, _PRODUCT)


def clamp_(tensors: list[Tensor]) -> None:
    expected = [tensor.clamp(*_LIMITS) for tensor in tensors]
    kernels.clamp_(tensors, *_LIMITS)
    _assert_same(expected, tensors, EXACT)


def total_norm(tensors: list[Tensor]) -> None:
    whole = torch.cat([tensor.double().view(-1) for tensor in tensors])
    for p in _NORMS:
        actual = kernels.total_norm(tensors, p)
        expected = torch.linalg.vector_norm(whole, p).to(actual.dtype)
        _assert_same([expected], [actual], norm_of(whole.numel(), len(tensors), p))


def update_scale_(device: str) -> None:
    for found in (0.0, 1.0):
        state = [
            (torch.full((1,), 8.0, device=device), torch.full((1,), 1, dtype=torch.int32, device=device))
            for _ in "ab"
        ]
        flag = torch.full((1,), found, device=device)
        kernels.update_scale_(*state[0], flag, 2.0, 0.5, 2, 0.0)
        torch._amp_update_scale_(*state[1], flag, 2.0, 0.5, 2)
        _assert_same(state[1], state[0], EXACT)


def fused_step_(rule: kernels.Rule, params: list[Tensor]) -> None:
    """Within the roundings of the update, as they add up element by element."""
    device = params[0].device
    grads = [param.flip(0) / _INV_SCALE for param in params]
    lists = [[param.abs() / (2 + number) for param in params] for number in range(states_of(rule))]
    before = [[tensor.cpu().clone() for tensor in tensors] for tensors in (params, *lists)]
    steps = [torch.tensor(_STEP, device=device) for _ in params]
    factor, found = torch.tensor(_INV_SCALE, device=device), torch.ones((), device=device)
    parameters = kernels.Parameters(params, lists, steps)
    kernels.fused_step_(rule, parameters, grads, factor, found)
    assert all(torch.equal(old, param.cpu()) for old, param in zip(before[0], params, strict=True)), (
        "not skipped"
    )
    kernels.fused_step_(rule, parameters, grads, factor, torch.zeros_like(found))
    for place, grad in enumerate(grads):
        old, *old_states = (tensors[place] for tensors in before)
        bounds = update(rule, old, grad.cpu(), old_states, _STEP, _INV_SCALE)
        for bound, actual in zip(bounds, (tensors[place].cpu() for tensors in (params, *lists)), strict=True):
            excess = (actual.double() - bound.value).abs() - bound.stored(actual.dtype).error
            assert not excess.gt(0).any(), f"parameter {place}: {excess.max():.3e} beyond the roundings"


def _assert_same(expected: Sequence[Tensor], actual: Sequence[Tensor], tolerance: Tolerance) -> None:
    for index, (want, have) in enumerate(zip(expected, actual, strict=True)):
        excess = tolerance.excess(want, have)
        assert excess is None, f"tensor {index} of {len(expected)}, {want.numel()} × {want.dtype}: {excess}"


OPERATIONS = (unscale_, scale_, clamp_, total_norm)


def work(task: PhaseTask, rows: Rows) -> None:
    if _INTERPRETED and find_spec("triton"):
        from conformance.gpu.interpreter_rounding import mend  # noqa: PLC0415  needs Triton

        mend()
    todo: dict[str, Callable[[], None]] = {}
    for operation in OPERATIONS:
        for dtypes in (*((dtype,) for dtype in _DTYPES), _DTYPES):
            word = str(dtypes[0]).removeprefix("torch.") if len(dtypes) == 1 else "mixed"
            todo[f"{operation.__name__} {word}"] = lambda do=operation, of=dtypes: do(_drawn(of, task.device))
    todo["update_scale_"] = lambda: update_scale_(task.device)
    for rule in (*EACH, *(other for other in OTHERS if other.maximize)):
        name = rule.OPTIMIZERS[0].__name__ + (" maximize" if rule.maximize else "")
        for dtype in (torch.float32, *_NARROW):
            word = f"fused_step_ {name} {str(dtype).removeprefix('torch.')}"
            todo[word] = lambda of=rule, dtype=dtype: fused_step_(of, _drawn((dtype,), task.device))
    compiled = _kernels() if task.device == "cuda" and find_spec("triton") else {}
    rows.plan([*todo, *compiled])
    for name, call in todo.items():
        if rows.left_s <= 0:
            return
        rows.add(name, *_outcome(call))
    for name, kernel in compiled.items():
        binaries = [binary for cache in kernel.device_caches.values() for binary in cache[0].values()]
        about = {
            "registers": [getattr(binary, "n_regs", None) for binary in binaries],
            "spilled": [getattr(binary, "n_spills", None) for binary in binaries],
        }
        if binaries:
            says = f"as {len(binaries)} binaries, registers {about['registers']}, spilled {about['spilled']}"
            rows.add(name, "ran", says, **about)
        else:
            rows.add(name, "failed", "never launched: torch's operators took its place", **about)


def _outcome(call: Callable[[], None]) -> tuple[str, str]:
    if find_spec("triton") is None:
        return "unavailable", "Triton is not installed"
    try:
        with kernels.backend("triton"):
            call()
    except Exception as error:  # the others are still worth running
        return "failed", in_words(error)
    return "agrees", "in the interpreter" if _INTERPRETED else ""


def _drawn(dtypes: tuple[torch.dtype, ...], device: str) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    sizes = [*_SIZES, *([_LARGE] if device == "cuda" else [])]
    return [
        torch.randn(size, generator=draw, dtype=torch.float64).to(device, dtypes[i % len(dtypes)])
        for i, size in enumerate(sizes)
    ]


def _kernels() -> dict[str, Any]:
    from conformance.gpu.ahead_of_time import CASES  # noqa: PLC0415  needs Triton

    return {f"compiled {case.kernel.__name__}": case.kernel for case in CASES}


if __name__ == "__main__":
    serve(work)
