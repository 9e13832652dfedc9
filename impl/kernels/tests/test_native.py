"""The CPU library: sums of squares, threads, what it leaves to others, its absence; updates in test_fused_step.py."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Literal
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from conformance.judge.sandbox.global_state import default_dtype
from impl import kernels
from impl.kernels import Parameters, TensorList, _dispatch, _native, fused_step
from impl.kernels._native import NATIVE_CODES, SHORT_CHUNK
from impl.kernels._native.norm import sum_of_squares
from impl.kernels.rules import AdamRule, SGDRule
from impl.kernels.tests.calls import Spec, assert_same_bits, build, every_pattern_of_bits
from impl.kernels.tests.native import the_library

ADAMW = AdamRule(0.01, 0.9, 0.999, 1e-8, 0.1, amsgrad=False, maximize=False, decoupled=True)
specs = st.lists(
    st.builds(
        Spec,
        numel=st.sampled_from([0, 1, 15, 16, 17, 511, 513, SHORT_CHUNK - 1, SHORT_CHUNK, SHORT_CHUNK + 1]),
        dtype=st.shared(st.sampled_from(list(NATIVE_CODES)), key="dtype"),
        layout=st.sampled_from(["contiguous", "misaligned", "transposed"]),
        seed=st.integers(0, 99),
    ),
    min_size=1,
    max_size=5,
)


@pytest.fixture
def library() -> _native.NativeLibrary:
    return the_library()


@settings(max_examples=40, deadline=None)
@given(specs)
def test_squares_are_summed_in_f64(specs: list[Spec]) -> None:
    library = the_library()
    tensors = [build(spec)[0] for spec in specs]
    square_T = torch.full((len(tensors),), math.nan, dtype=torch.float64)
    actual = sum_of_squares(library, TensorList(tensors), square_T)
    exact = [math.fsum(float(x) for x in t.double().square().flatten()) for t in tensors]
    # A square of an f32 is exact in f64, and a sum of as many terms loses a few bits of 53.
    assert actual == pytest.approx(math.fsum(exact), rel=1e-13, abs=0.0)
    assert square_T.tolist() == pytest.approx(exact, rel=1e-13, abs=0.0)
    assert sum_of_squares(library, TensorList(tensors)) == actual


@pytest.mark.parametrize("dtype", list(NATIVE_CODES), ids=str)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("place", [0, SHORT_CHUNK - 1, SHORT_CHUNK, SHORT_CHUNK + 16])
def test_single_nonfinite_element_is_found(
    library: _native.NativeLibrary, dtype: torch.dtype, bad: float, place: int
) -> None:
    tensor = torch.zeros(SHORT_CHUNK + 17, dtype=dtype)
    tensor[place] = bad
    assert not math.isfinite(sum_of_squares(library, TensorList([torch.zeros(3, dtype=dtype), tensor])))
    largest = torch.full((SHORT_CHUNK + 17,), torch.finfo(dtype).max, dtype=dtype)
    assert math.isfinite(sum_of_squares(library, TensorList([largest])))


LONG = 1 << 22  # elements, so that threads take longer chunks


@pytest.mark.parametrize("dtype", list(NATIVE_CODES), ids=str)
def test_lists_so_long_that_chunks_are_longer(library: _native.NativeLibrary, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(numel, generator=draw).to(dtype) for numel in (3, LONG + 5, 0, 3 * SHORT_CHUNK + 1)
    ]
    want = [(tensor.float() * 0.7).to(dtype).clamp(-1.0, 0.5) for tensor in tensors]
    squares = sum(float(tensor.double().square().sum()) for tensor in tensors)
    assert sum_of_squares(library, TensorList(tensors)) == pytest.approx(squares, rel=1e-13, abs=0.0)
    with kernels.backend("native"):
        kernels.scale_(TensorList(tensors), torch.tensor(0.7))
        kernels.clamp_(TensorList(tensors), -1.0, 0.5)
    assert all(map(torch.equal, want, tensors))
    for place in (0, LONG // 2, LONG + 4):
        tensors[1][place] = math.inf
        assert sum_of_squares(library, TensorList(tensors)) == math.inf
        tensors[1][place] = 0.0


def updated(threads: int, longest: int) -> list[Tensor]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        draw = torch.Generator().manual_seed(0)
        params, grads, means, squares = (
            [torch.rand(numel, generator=draw) for numel in (5, longest, 0, SHORT_CHUNK, 1)] for _ in range(4)
        )
        steps = [torch.tensor(2.0) for _ in params]
        with kernels.backend("native"):
            norm, _ = kernels.checked_norm(TensorList(grads), 2.0)
            kernels.fused_step_(
                ADAMW, Parameters(params, [means, squares], steps), TensorList(grads), norm.reciprocal()
            )
        return [norm, *params, *means, *squares]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("longest", [3 * SHORT_CHUNK + 1, LONG + 1])
def test_threads_do_not_show(library: _native.NativeLibrary, longest: int) -> None:
    for single, threaded in zip(updated(1, longest), updated(5, longest), strict=True):
        assert torch.equal(single, threaded)


def test_mean_equals_gradient_if_beta1_is_zero(library: _native.NativeLibrary) -> None:
    mean, grad = torch.tensor([1e8]), torch.tensor([1.0])
    rule = AdamRule(0.01, 0.0, 0.999, 1e-8, 0.0, amsgrad=False, maximize=False, decoupled=True)
    lists = Parameters([torch.ones(1)], [[mean], [torch.ones(1)]], [torch.tensor(1.0)])
    with kernels.backend("native"):
        kernels.fused_step_(rule, lists, TensorList([grad]), torch.tensor(1.0))
    assert mean.item() == 1.0


SGD = SGDRule(1.0, 0.0, 0.0, 0.0, nesterov=False, maximize=False, is_first_step=False)


def stepped(params: list[Tensor], grads: list[Tensor], lists: Parameters | None = None) -> None:
    with kernels.backend("native"):
        kernels.fused_step_(SGD, lists or Parameters(params, []), TensorList(grads), torch.tensor(1.0))


def test_torchs_operators_go_by_the_threads_of_now() -> None:
    before = torch.get_num_threads()
    param = torch.zeros(300_000, dtype=torch.bfloat16)
    lists = Parameters([param], [])
    try:
        for threads in (4, 1, 3):
            torch.set_num_threads(threads)
            with kernels.backend("cpu_blocked"):
                kernels.fused_step_(SGD, lists, TensorList([torch.ones_like(param)]), torch.tensor(1.0))
    finally:
        torch.set_num_threads(before)
    assert param.unique().numel() == 1


def test_memory_that_has_moved_is_found_again(library: _native.NativeLibrary) -> None:
    param = torch.zeros(3)
    lists = Parameters([param], [])
    stepped([], [torch.ones(3)], lists)
    param.set_(torch.full((3,), 5.0))
    stepped([], [torch.ones(3)], lists)
    assert param.tolist() == [4.0] * 3


def test_autograd_hears_of_it(library: _native.NativeLibrary) -> None:
    param, grad = torch.zeros(3), torch.ones(3)
    stepped([param], [grad])
    assert (param._version, grad._version) == (1, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: kernels.clamp_(TensorList(tensors), -0.3, 0.7),
        lambda tensors: kernels.scale_(TensorList(tensors), torch.tensor(0.3)),
    ],
)
def test_changes_in_place_are_torchs_bit_by_bit(
    library: _native.NativeLibrary, change: Callable[[list[Tensor]], None], dtype: torch.dtype
) -> None:
    """The sizes are larger than the share of one thread, and smaller than one vector instruction."""
    draw = torch.Generator().manual_seed(1)
    changed = [torch.randn(size, generator=draw).to(dtype) for size in (50_000, 7, 1, 513)]
    torchs = [tensor.clone() for tensor in changed]
    with kernels.backend("native"):
        change(changed)
    with kernels.backend("torch"):
        change(torchs)
    assert all(map(torch.equal, changed, torchs))
    assert [tensor._version for tensor in changed] == [1] * len(changed)  # autograd hears of it


# The processor's instructions take eight at a time.
@pytest.mark.parametrize("length", [1 << 13, 7], ids=["by instructions", "by integers"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("factor", [1.0, 1 / 3, 1e-6, 7.77, math.inf, math.nan, 0.0, -1.0])
def test_halves_are_read_exactly_and_rounded_once(
    library: _native.NativeLibrary, length: int, dtype: torch.dtype, factor: float
) -> None:
    grads = every_pattern_of_bits(dtype)
    # The new parameters are the products.
    params, copies = torch.full_like(grads, -0.0, dtype=torch.float32), torch.ones_like(grads)
    lists = Parameters(list(params.split(length)), [], low_precision_params=list(copies.split(length)))
    rule = replace(SGD, lr=-1.0)
    with kernels.backend("native"):
        kernels.fused_step_(rule, lists, TensorList(list(grads.split(length))), torch.tensor(factor))
    assert_same_bits(params, grads.float() * torch.tensor(factor))
    assert_same_bits(copies, params.to(dtype))


def halves_of_one() -> list[Tensor]:
    memory = torch.arange(12.0)
    return [memory[:8], memory[4:]]


LEFT = {
    "gaps": lambda: ([torch.ones(3, 2).t()[:, ::2].t()], [torch.ones(2, 2)]),
    "opposites": lambda: ([torch.ones(3)], [torch._neg_view(torch.ones(3))]),
    "overlapping": lambda: (halves_of_one(), [torch.ones(8), torch.ones(8)]),
    "a parameter as gradient": lambda: ([param := torch.ones(8), torch.ones(8)], [torch.ones(8), param]),
    "float64": lambda: ([torch.ones(3, dtype=torch.float64)], [torch.ones(3, dtype=torch.float64)]),
    "two dtypes": lambda: ([torch.ones(3), torch.ones(2)], [torch.ones(3), torch.ones(2).bfloat16()]),
}


@pytest.mark.parametrize("case", list(LEFT))
def test_unsupported_lists_are_left_to_torch(library: _native.NativeLibrary, case: str) -> None:
    params, grads = LEFT[case]()
    with mock.patch.object(fused_step, "_step_cpu_blocked") as others:
        stepped(params, grads)
    assert others.call_count == 1


@pytest.mark.parametrize("backend", ["cpu_blocked", "native"])
def test_default_device_and_dtype_do_not_matter(
    library: _native.NativeLibrary, backend: Literal["cpu_blocked", "native"]
) -> None:
    grads = [torch.full((3,), 2.0) for _ in range(12)]
    with kernels.backend(backend), torch.device("meta"):
        norm, flag = kernels.checked_norm(TensorList(grads), 2.0)
        kernels.scale_(TensorList(grads), kernels.total_norm(TensorList(grads), 2.0).reciprocal())
    assert (norm.item(), flag.item()) == (12.0, 0.0)
    assert torch.equal(grads[0], torch.full((3,), 2.0) * torch.tensor(12.0).reciprocal())
    with kernels.backend(backend), default_dtype(torch.float64):
        norm, flag = kernels.checked_norm(TensorList(grads), 2.0)
    assert (norm.dtype, flag.dtype) == (torch.float32, torch.float32)


def test_another_interface_is_not_called() -> None:
    program = "from impl.kernels import _native as n; n.INTERFACE += 1; assert n.library() is None"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_missing_library_raises_only_for_native_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_dispatch, "library", lambda: None)
    param = torch.zeros(3)
    kernels.fused_step_(SGD, Parameters([param], []), TensorList([torch.ones(3)]), torch.tensor(1.0))
    assert param.tolist() == [-1.0] * 3
    with pytest.raises(RuntimeError, match="install the package with a C compiler at hand"):
        stepped([param], [torch.ones(3)])
    assert param.tolist() == [-1.0] * 3
