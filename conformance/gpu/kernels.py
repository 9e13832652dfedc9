"""The Triton kernels run, on the GPU or in its interpreter, beside float64 arithmetic; and what they compiled to."""

from __future__ import annotations

import concurrent.futures
import math
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from multiprocessing import get_context

import torch
from torch import Tensor

from conformance.gpu.phase_rows import PhaseTask, Rows, in_words, serve
from conformance.gpu.update_bounds import EACH, OTHERS, states_of, update
from conformance.judge.tolerances import EXACT, Tolerance, norm_of
from impl import kernels
from impl.kernels import TensorList

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_SIZES = (1, 3, 1000, 4097)
_LARGE = 1_000_003  # GPU only, because the interpreter takes a second for it
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_FACTOR = 0.37
_LIMITS = -0.5, 0.25
_NORMS = (1.0, 2.0, 3.0, math.inf)
_MOST_PROCESSES = 16
_NARROW = (torch.float16, torch.bfloat16)
_STEP, _INV_SCALE = 3.0, 0.125
_MAX_NORM = 1.0
_PRODUCT = Tolerance(1, "a product that is rounded to float32 and then to the dtype, beside one rounded once")
_CLIPPED = Tolerance(
    5, "sum, reciprocal and product of the coefficient, its cast, and the product", torch.float32
)

_ROUNDED_NORM = Tolerance(
    4, "a norm in float64 that is rounded to float32, to its dtype, and again when unscaled"
)


def _factor_from_norm(dtype: torch.dtype) -> Tolerance:
    return Tolerance(
        8, "a rounded norm, then sum, reciprocal and product, each rounded to the norm's dtype", dtype
    )


def unscale_(tensors: list[Tensor]) -> None:
    device = tensors[0].device
    factor, found_inf = torch.tensor(_FACTOR, device=device), torch.zeros(1, device=device)
    _scaled(tensors, factor, lambda: kernels.unscale_(TensorList(tensors), factor, found_inf))
    assert found_inf.item() == 0.0, "found inf where there is none"
    tensors[-1].view(-1)[-1] = math.inf
    kernels.unscale_(TensorList(tensors), factor, found_inf)
    assert found_inf.item() == 1.0, "overlooked an inf in the last element"


def scale_(tensors: list[Tensor]) -> None:
    factor = torch.tensor(_FACTOR, device=tensors[0].device)
    _scaled(tensors, factor, lambda: kernels.scale_(TensorList(tensors), factor))


def _scaled(tensors: list[Tensor], factor: Tensor, call: Callable[[], None]) -> None:
    expected = [(tensor.double() * factor.double()).to(tensor.dtype) for tensor in tensors]
    call()
    _assert_same(expected, tensors, _PRODUCT)


def clip_(tensors: list[Tensor]) -> None:
    """Check that tensors are scaled to the limit, and that a norm below the limit changes nothing."""
    norm = _exact_norm(tensors).float()
    factor = _MAX_NORM / (norm.double() + 1e-6)
    assert factor < 1.0, "nothing to clip"
    before = [tensor.clone() for tensor in tensors]
    kernels.clip_(TensorList(tensors), 2 * norm.item(), norm)
    _assert_same(before, tensors, EXACT)
    kernels.clip_(TensorList(tensors), _MAX_NORM, norm)
    _assert_same([(old.double() * factor).to(old.dtype) for old in before], tensors, _CLIPPED)


def step_numbers(tensors: list[Tensor]) -> None:
    """Check the numbers of a step with and without clipping, and the flag of an inf."""
    device = tensors[0].device
    scale, set_flag, no_flag = (torch.tensor(v, device=device) for v in (1 / _INV_SCALE, 1.0, 0.0))
    scaled = _exact_norm(tensors)
    norm = scaled * _INV_SCALE
    for max_norm in (_MAX_NORM, math.inf):
        actual = kernels.step_numbers(TensorList(tensors), 2.0, scale, max_norm)
        assert actual is not None, "torch's operators ran instead"
        factor = _INV_SCALE * (max_norm / (norm + 1e-6)).clamp(max=1.0)
        own = actual.norm.dtype
        _assert_same([scaled.to(own), norm.to(own)], [actual.scaled_norm, actual.norm], _ROUNDED_NORM)
        _assert_same([factor.float()], [actual.factor], _factor_from_norm(own))
        _assert_same([no_flag, set_flag], [actual.found_inf, actual.taken], EXACT)
    tensors[-1].view(-1)[-1] = math.inf
    actual = kernels.step_numbers(TensorList(tensors), 2.0, scale, _MAX_NORM)
    assert actual is not None, "torch's operators ran instead"
    _assert_same([set_flag, no_flag], [actual.found_inf, actual.taken], EXACT)


def clamp_(tensors: list[Tensor]) -> None:
    expected = [tensor.clamp(*_LIMITS) for tensor in tensors]
    kernels.clamp_(TensorList(tensors), *_LIMITS)
    _assert_same(expected, tensors, EXACT)


def total_norm(tensors: list[Tensor], p: float) -> None:
    actual = kernels.total_norm(TensorList(tensors), p)
    expected = _exact_norm(tensors, p).to(actual.dtype)
    _assert_same([expected], [actual], norm_of(_numel(tensors), len(tensors), p))


def tensor_norms(tensors: list[Tensor]) -> None:
    """Check the norm of each tensor, which the joint norm leaves in the same pass."""
    norm_T = torch.full((len(tensors),), math.nan, dtype=torch.float64, device=tensors[0].device)
    kernels.checked_norm(TensorList(tensors), 2.0, None, norm_T)
    for tensor, norm in zip(tensors, norm_T, strict=True):
        _assert_same([_exact_norm([tensor])], [norm], norm_of(tensor.numel(), 1, 2.0))


def _exact_norm(tensors: list[Tensor], p: float = 2.0) -> Tensor:
    """Return the joint norm in float64, 0-dim."""
    return torch.linalg.vector_norm(torch.cat([tensor.double().view(-1) for tensor in tensors]), p)


def _numel(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def fused_step_(rule: kernels.Rule, params: list[Tensor]) -> None:
    """Check that each element is within the accumulated roundings of its update, and that found_inf skips the step."""
    device = params[0].device
    grads = [param.flip(0) / _INV_SCALE for param in params]
    lists = [[param.abs() / (2 + number) for param in params] for number in range(states_of(rule))]
    before = [[tensor.cpu().clone() for tensor in tensors] for tensors in (params, *lists)]
    steps = [torch.tensor(_STEP, device=device) for _ in params]
    factor, found_inf = torch.tensor(_INV_SCALE, device=device), torch.ones((), device=device)
    parameters = kernels.Parameters(params, lists, steps)
    kernels.fused_step_(rule, parameters, TensorList(grads), factor, found_inf)
    assert all(torch.equal(old, param.cpu()) for old, param in zip(before[0], params, strict=True)), (
        "not skipped"
    )
    kernels.fused_step_(rule, parameters, TensorList(grads), factor, torch.zeros_like(found_inf))
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


OPERATIONS: dict[str, Callable[[list[Tensor]], None]] = {
    **{f"total_norm {p:g}": partial(total_norm, p=p) for p in _NORMS},
    "unscale_": unscale_,
    "scale_": scale_,
    "clip_": clip_,
    "clamp_": clamp_,
    "step_numbers": step_numbers,
    "tensor_norms": tensor_norms,
}
# Dtypes that a call's kernels do not support.
_UNSUPPORTED = {"step_numbers": {torch.float64}}


def checks(device: str) -> dict[str, Callable[[], None]]:
    """Return every check by its name. Those whose kernels take longest to compile come first."""
    check_by_name: dict[str, Callable[[], None]] = {}
    for rule in (*EACH, *(other for other in OTHERS if other.maximize)):
        name = rule.OPTIMIZERS[0].__name__ + (" maximize" if rule.maximize else "")
        for dtype in (torch.float32, *_NARROW):
            word = f"fused_step_ {name} {str(dtype).removeprefix('torch.')}"
            check_by_name[word] = lambda of=rule, dtype=dtype: fused_step_(of, _drawn((dtype,), device))
    for name, operation in OPERATIONS.items():
        supported = tuple(dtype for dtype in _DTYPES if dtype not in _UNSUPPORTED.get(name, ()))
        for dtypes in (*((dtype,) for dtype in supported), supported):
            word = str(dtypes[0]).removeprefix("torch.") if len(dtypes) == 1 else "mixed"
            check_by_name[f"{name} {word}"] = lambda do=operation, of=dtypes: do(_drawn(of, device))
    return check_by_name


@dataclass(frozen=True)
class Checked:
    """Outcome of a check, and the registers and spills of what was compiled for it, by kernel and binary."""

    outcome: str
    says: str
    binaries: dict[tuple[str, str], tuple[int, int]]


def work(task: PhaseTask, rows: Rows) -> None:
    names = list(checks(task.device))
    compiled = _kernels() if task.device == "cuda" and find_spec("triton") else {}
    rows.plan([*names, *compiled])
    processes = min(len(os.sched_getaffinity(0)), _MOST_PROCESSES)
    binaries: dict[tuple[str, str], tuple[int, int]] = {}
    # All processes compile at the same time, into the cache that later phases read.
    with concurrent.futures.ProcessPoolExecutor(processes, get_context("spawn"), _begin) as executor:
        running = {executor.submit(_checked, name, task): name for name in names}
        for future in concurrent.futures.as_completed(running):
            try:
                checked = future.result()
            except BrokenProcessPool as error:  # a kernel ended its process, which breaks the pool
                checked = Checked("failed", in_words(error), {})
            if checked is not None:
                rows.add(running[future], checked.outcome, checked.says)
                binaries |= checked.binaries
    if rows.left_s > 0:
        for name, kernel in compiled.items():
            binary_numbers = [numbers for (owner, _), numbers in binaries.items() if owner == kernel]
            rows.add(name, *_compiled(binary_numbers))


def _begin() -> None:
    """Use one thread in each process, because there are as many processes as cores."""
    torch.set_num_threads(1)
    if _INTERPRETED and find_spec("triton"):
        from conformance.gpu.interpreter_rounding import patch_interpreter  # noqa: PLC0415  needs Triton

        patch_interpreter()


def _checked(name: str, task: PhaseTask) -> Checked | None:
    if time.monotonic() > task.until:
        return None
    outcome, says = _outcome(checks(task.device)[name])
    on_cuda = task.device == "cuda" and find_spec("triton") is not None
    return Checked(outcome, says, _binaries() if on_cuda else {})


def _binaries() -> dict[tuple[str, str], tuple[int, int]]:
    """Return registers and spills of the kernels that this process has launched so far."""
    from conformance.gpu.ahead_of_time import CASES  # noqa: PLC0415  needs Triton

    kernels_here = {case.kernel.__name__: case.kernel for case in CASES}
    return {
        (name, binary.hash): (binary.n_regs, binary.n_spills)
        for name, kernel in kernels_here.items()
        for cache in kernel.device_caches.values()
        for binary in cache[0].values()
    }


def _compiled(binary_numbers: Sequence[tuple[int, int]]) -> tuple[str, str]:
    if not binary_numbers:
        return "failed", "never launched: torch's operators ran instead"
    registers, spilled = ([numbers[place] for numbers in binary_numbers] for place in (0, 1))
    return "ran", f"as {len(binary_numbers)} binaries, registers {registers}, spilled {spilled}"


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


def _kernels() -> dict[str, str]:
    from conformance.gpu.ahead_of_time import CASES  # noqa: PLC0415  needs Triton

    return {f"compiled {case.kernel.__name__}": case.kernel.__name__ for case in CASES}


if __name__ == "__main__":
    serve(work)
