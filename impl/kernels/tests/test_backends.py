"""The backends agree: "torch" is torch's operators, "cpu_blocked" and "triton" are held to it within derived bounds."""

import itertools
import math
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from impl import kernels
from impl.kernels import TensorList
from impl.kernels._table import CHUNK
from impl.kernels.tests.calls import (
    VIEWS,
    CallResult,
    Spec,
    address_reuse,
    assert_same_bits,
    build,
    call,
    checked_norm_by,
    clamped_by,
    clipped_by,
    every_pattern_of_bits,
    norm_by,
    norm_elsewhere_by_default,
    norm_of_partials,
    on_views,
    scaled_by,
    scaled_elsewhere_by_default,
    step_numbers_by,
    tensor_norms_by,
    unscaled_by,
    unscaled_by_scale,
    updated_by,
)
from impl.kernels.tests.interpreter import the_interpreter
from impl.kernels.tests.native import the_library

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
BACKENDS = ("torch", "cpu_blocked", "native", "triton")
EDGES = (0, 1, 5, 1023, 1024, 1025, CHUNK - 1, CHUNK, CHUNK + 1)
specs = st.lists(
    st.builds(
        Spec,
        numel=st.sampled_from(EDGES),
        dtype=st.sampled_from(DTYPES),
        layout=st.sampled_from(("contiguous", "contiguous", "misaligned", "transposed", "gaps")),
        seed=st.integers(0, 99),
    ),
    min_size=1,
    max_size=5,
)
# Interpreted kernels take about a second for the largest lists.
few = settings(max_examples=12, deadline=None)
many = settings(max_examples=2 * settings.default.max_examples, deadline=None)


def by(backend, function, *arguments):
    """`function(backend, ...)`, in the interpreter's process where the backend is Triton's."""
    if backend == "triton":
        return the_interpreter().call(function, backend, *arguments)
    if backend == "native":
        the_library()
    return function(backend, *arguments)


def listed(backend, specs):
    """The CPU library takes lists of one dtype."""
    return [spec._replace(dtype=specs[0].dtype) for spec in specs] if backend == "native" else specs


def assert_same_elements(actual: CallResult, want: CallResult) -> None:
    assert actual.outside, "memory beside a tensor was written"
    for index, (actual_tensor, expected_tensor) in enumerate(zip(actual.tensors, want.tensors, strict=True)):
        torch.testing.assert_close(
            actual_tensor,
            expected_tensor,
            rtol=0.0,
            atol=0.0,
            equal_nan=True,
            msg=lambda m, i=index: f"tensor {i}: {m}",
        )
    if want.value is not None:
        torch.testing.assert_close(actual.value, want.value, rtol=0.0, atol=0.0)


@many
@given(specs, st.sampled_from([1.0, 0.37, 2.0**-16, 3e4]))
def test_cpu_blocked_scales_as_torch_does(specs, factor):
    want = call("torch", "scale_", specs, torch.tensor(factor))
    assert_same_elements(call("cpu_blocked", "scale_", specs, torch.tensor(factor)), want)


@few
@given(specs, st.sampled_from([1.0, 0.37, 2.0**-16, 3e4]))
def test_triton_scales_as_torch_does(specs, factor):
    want = call("torch", "scale_", specs, torch.tensor(factor))
    assert_same_elements(by("triton", call, "scale_", specs, torch.tensor(factor)), want)


@pytest.mark.parametrize("backend", ["cpu_blocked", "triton"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("factor", [1 / 3, 1e-6, 7.77, math.inf, math.nan, 0.0, -1.0])
def test_scaling_is_exact_for_every_pattern_of_bits(backend, dtype, factor):
    patterns = every_pattern_of_bits(dtype)
    # The list is long enough for what is not torch's product on the CPU.
    actual = torch.cat(by(backend, scaled_by, list(patterns.clone().split(1 << 13)), factor))
    torchs = patterns.mul(torch.tensor(factor))
    assert_same_bits(actual, torchs)


@pytest.mark.parametrize("backend", ["cpu_blocked", "triton"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_clipping_scales_by_the_coefficient_of_torchs_operators(backend, dtype):
    numbers = [
        0.0,
        1e-40,
        3e-7,
        0.1,
        0.5,
        1.0,
        1.0078125,
        3.3,
        771.7,
        6e4,
        1e30,
        math.inf,
        -math.inf,
        math.nan,
    ]
    norms = [torch.tensor(number, dtype=dtype) for number in (*numbers, torch.finfo(dtype).tiny, 2.5)]
    max_norms = [1.0, 0.1, 1 / 3, 7.0, 0.0, -2.0, 1e-30, 1e30, math.inf]
    pairs = by(backend, clipped_by, norms, max_norms)
    assert len({clipped.item() for clipped, _ in pairs}) > 30
    for clipped, scaled in pairs:
        assert torch.equal(clipped, scaled) or (clipped.isnan() and scaled.isnan()), (clipped, scaled)


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("norm_dtype", [None, torch.float32], ids=str)
def test_triton_makes_numbers_of_step_like_torchs_operators(dtype, norm_dtype):
    factors = set()
    values = (0.0, 3e-7, 0.37, 771.7, 6e4, 1e30, math.inf, math.nan)
    for value, scale, max_norm in itertools.product(
        values, (1.0, 3.0, 6.1, 65536.0), (math.inf, 1.0, 1 / 3, -2.0)
    ):
        gradients = [torch.full((3,), value).to(dtype), torch.full((1500,), value / 7).to(dtype)]
        numbers = by("triton", step_numbers_by, gradients, scale, max_norm, norm_dtype)
        tritons, torchs = numbers[:5], numbers[5:]
        for name, actual, want in zip(kernels.StepNumbers._fields, tritons, torchs, strict=True):
            assert actual.dtype is want.dtype, name
            assert torch.equal(actual, want) or (actual.isnan() and want.isnan()), (
                name,
                value,
                scale,
                max_norm,
            )
        factors.add(tritons[3].item())
    assert len(factors) > 30


@many
@given(specs, st.sampled_from([1.0, 0.37, 2.0**-16]), st.sampled_from([0.0, 1.0]))
def test_cpu_blocked_unscales_as_torch_does(specs, inv_scale, found_inf):
    arguments = torch.tensor(inv_scale), torch.full((1,), found_inf)
    want = call("torch", "unscale_", specs, *arguments)
    assert_same_elements(call("cpu_blocked", "unscale_", specs, *arguments), want)


@few
@given(specs, st.sampled_from([1.0, 0.37, 2.0**-16]), st.sampled_from([0.0, 1.0]))
def test_triton_unscales_as_torch_does(specs, inv_scale, found_inf):
    arguments = torch.tensor(inv_scale), torch.full((1,), found_inf)
    want = call("torch", "unscale_", specs, *arguments)
    assert_same_elements(by("triton", call, "unscale_", specs, *arguments), want)


def test_torchs_unscale_operator_gets_no_dtype_that_its_cuda_kernel_lacks(monkeypatch):
    operator = torch._amp_foreach_non_finite_check_and_unscale_
    recorded = Mock(side_effect=operator)
    monkeypatch.setattr(torch, operator.__name__, recorded)
    grads = [torch.ones(3, dtype=dtype, device="meta") for dtype in DTYPES]
    kernels.unscale_(TensorList(grads), torch.tensor(0.5, device="meta"), torch.zeros(1, device="meta"))
    dtypes = [{grad.dtype for grad in arguments.args[0]} for arguments in recorded.call_args_list]
    # The kernel lacks bfloat16, and checks float64 in float32.
    assert dtypes.count({torch.float16}) == 1
    assert dtypes.count({torch.float32}) == 3
    assert len(dtypes) == 4


@pytest.mark.parametrize("backend", ["cpu_blocked", "triton"])
@pytest.mark.parametrize("bad", [None, math.inf])
def test_unscaling_by_a_scale_multiplies_by_its_nearest_reciprocal(backend, bad):
    tiny, largest = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
    for scale in (tiny, 1e-30, 1 / 3, 1.0, 3.0, 6.1, 2.0**16, 49152.7, 2.0**126, 2.0**127, 3e38, largest):
        grads = [torch.linspace(-3, 3, 1500).to(dtype) for dtype in DTYPES]
        if bad is not None:
            grads[1][-1] = bad
        inv_scale = (1.0 / torch.tensor(scale).double()).float()
        want = by("torch", unscaled_by, [grad.clone() for grad in grads], inv_scale.item(), 0.0)
        actual_grads = by(backend, unscaled_by_scale, grads, scale, 0.0)
        assert all(map(torch.equal, actual_grads[0], want[0])), scale
        assert actual_grads[1] == want[1] == (bad is not None)


bounds = st.tuples(st.sampled_from([-math.inf, -0.5, 0.1, 1.0]), st.sampled_from([-0.7, 0.1, 0.6, math.inf]))


@many
@given(specs, bounds)
def test_cpu_blocked_clamps_as_torch_does(specs, bounds):
    want = call("torch", "clamp_", specs, *bounds)
    assert_same_elements(call("cpu_blocked", "clamp_", specs, *bounds), want)


@few
@given(specs, bounds)
def test_triton_clamps_as_torch_does(specs, bounds):
    want = call("torch", "clamp_", specs, *bounds)
    assert_same_elements(by("triton", call, "clamp_", specs, *bounds), want)


@pytest.mark.parametrize("backend", BACKENDS)
def test_clamping_to_zero_keeps_the_sign(backend):
    clamped = by(backend, clamped_by, [torch.tensor([-2.0, 3.0, -0.0, 0.0])], -0.0, 0.0)[0]
    assert clamped.tolist() == [0.0] * 4
    assert clamped.signbit().tolist() == [True, False, True, False]


@pytest.mark.parametrize("backend", BACKENDS)
def test_clamping_keeps_nan_and_refuses_what_torch_refuses(backend):
    clamped = by(backend, clamped_by, [torch.tensor([math.nan, 3.0, -math.inf])], -1.0, 1.0)[0]
    assert clamped[0].isnan()
    assert clamped[1:].tolist() == [1.0, -1.0]
    assert by(backend, clamped_by, [torch.tensor([1.0])], -1.0, math.nan)[0].isnan().all()
    with pytest.raises((RuntimeError, AssertionError), match="without overflow"):
        by(backend, clamped_by, [torch.ones(3, dtype=torch.float16)], -1e6, 1e6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_every_position_of_a_bad_element_is_seen(backend, bad):
    for victim, place in itertools.product(range(4), (0, 1024, -1)):
        grads = [torch.ones(1500, dtype=dtype) for dtype in DTYPES]
        assert by(backend, unscaled_by, [g.clone() for g in grads], 0.5, 0.0)[1] == 0.0
        grads[victim][place] = bad
        assert by(backend, unscaled_by, grads, 0.5, 0.0)[1] == 1.0, (backend, victim, place)
        with kernels.backend("torch"):
            assert kernels.nonfinite_counts(grads).tolist() == [int(i == victim) for i in range(4)]


def exact_norm(tensors, p: float) -> float:
    elements = torch.cat([t.double().reshape(-1) for t in tensors])
    return torch.linalg.vector_norm(elements, p).item()


def norm_bound(tensors) -> float:
    """Relative error of a two-norm: any order of n sums in f32, then roundings of parts and of the whole to bf16."""
    numel = sum(t.numel() for t in tensors)
    rounded = 3 * 2.0**-8 if any(t.dtype is torch.bfloat16 for t in tensors) else 0.0
    return numel * 2.0**-24 + 2.0**-22 + rounded


@many
@given(specs, st.sampled_from(["torch", "cpu_blocked", "native"]))
def test_two_norm_is_near_the_exact_one(specs, backend):
    tensors = [build(spec)[0] for spec in listed(backend, specs)]
    norm = by(backend, norm_by, tensors, 2.0)
    assert norm.dim() == 0
    assert norm.item() == pytest.approx(exact_norm(tensors, 2.0), rel=norm_bound(tensors), abs=0.0)


@few
@given(specs, st.sampled_from([2.0, 1.0, 3.0, 0.5, math.inf, -math.inf, -1.0]))
def test_triton_norm_is_the_exact_one_rounded_once(specs, p):
    tensors = [build(spec)[0] for spec in specs if spec.numel or (p > 0 and p != math.inf)]
    if not tensors:
        return
    norm = the_interpreter().call(norm_by, "triton", tensors, p)
    assert norm.dtype is norm_by("torch", [t[:1] for t in tensors], 2.0).dtype
    if all(t.is_contiguous() or t.t().is_contiguous() for t in tensors):
        # The sum in f64; exp2(log2(x) * p) loses about as many bits as the exponent has; then the result's dtype.
        unit = {torch.float64: 0.0, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}[norm.dtype]
        bound = unit + 2.0**-38
    else:
        bound = max(
            norm_bound(tensors) * 2 * max(1.0, abs(1 / p)), 2.0**-7 if norm.dtype is torch.bfloat16 else 0.0
        )
    assert norm.item() == pytest.approx(exact_norm(tensors, p), rel=bound, abs=0.0)


@few
@given(specs, st.sampled_from([2.0, 1.0, 3.0, math.inf, 0.0]), st.sampled_from(BACKENDS))
def test_norm_of_each_tensor_is_near_the_exact_one(specs, p, backend):
    tensors = [build(spec)[0] for spec in listed(backend, specs) if spec.numel or p != math.inf]
    if not tensors:
        return
    norms = by(backend, tensor_norms_by, tensors, p).tolist()
    exact = [exact_norm([t], p) if p else float(t.any()) for t in tensors]
    bounds = [2 * norm_bound([t]) for t in tensors]
    assert norms == [
        pytest.approx(norm, rel=bound, abs=0.0) for norm, bound in zip(exact, bounds, strict=True)
    ]


def test_triton_divides_norm_of_each_tensor_by_scale():
    tensors = [torch.full((numel,), 2.0).to(dtype) for numel in (3, 20_000) for dtype in DTYPES[:3]]
    norms = by("triton", tensor_norms_by, tensors, 2.0, 3.0).tolist()
    assert norms == pytest.approx([2.0 * t.numel() ** 0.5 / 3.0 for t in tensors], rel=1e-7)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("p", [0.0, 1.0, 2.0, math.inf])
def test_norm_has_the_dtype_of_torch_but_f32_for_f16(backend, p):
    for dtypes in itertools.chain(itertools.combinations(DTYPES, 1), itertools.combinations(DTYPES, 2)):
        tensors = [torch.ones(3, dtype=dtype) for dtype in dtypes]
        torchs = torch.nn.utils.get_total_norm(tensors, p)
        want = torch.float32 if dtypes == (torch.float16,) else torchs.dtype
        norm = by(backend, norm_by, tensors, p)
        assert norm.dtype is want
        assert norm.item() == pytest.approx(torchs.item(), rel=2.0**-7)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("p", [math.inf, -math.inf, -1.0])
def test_empty_tensors_are_refused_where_torch_refuses_them(backend, p):
    tensors = [torch.ones(3), torch.ones(0)]
    with pytest.raises((RuntimeError, IndexError)) as torchs:
        torch.nn.utils.get_total_norm(tensors, p)
    with pytest.raises((RuntimeError, IndexError, AssertionError)) as raised:
        by(backend, norm_by, tensors, p)
    assert str(torchs.value) in str(raised.value)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (torch.float32, 1e20), (torch.float32, 1e-25), (torch.float32, 1e-42), (torch.bfloat16, 1e20),
        (torch.bfloat16, 1e-25), (torch.float16, 6e4), (torch.float16, 6e-8), (torch.float32, 0.0),
    ],
)  # fmt: skip
def test_two_norm_neither_overflows_nor_underflows(backend, dtype, value):
    tensors = [torch.full((n,), value, dtype=dtype) for n in (1, 40000, 17)]
    norm = by(backend, norm_by, tensors, 2.0).item()
    assert norm == pytest.approx(exact_norm(tensors, 2.0), rel=norm_bound(tensors), abs=0.0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bad", [None, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_overflowing_norm_does_not_set_found_inf(backend, bad, p, dtype):
    """The flag depends on each element. The norm of finite elements may be too large for f32."""
    tensors = [torch.full((size,), torch.finfo(dtype).max, dtype=dtype) for size in (3, 1500)]
    if bad is not None:
        tensors[1][-1] = bad
    norm, found_inf = by(backend, checked_norm_by, tensors, p)
    assert found_inf == float(bad is not None)
    expected = torch.linalg.vector_norm(torch.cat(tensors).double(), p).float().item()
    for actual in (norm, by(backend, norm_by, tensors, p).item()):
        assert actual == pytest.approx(expected, rel=norm_bound(tensors), nan_ok=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_norms_of_bad_elements(backend):
    for bad, p in itertools.product((math.inf, math.nan), (1.0, 2.0, math.inf)):
        norm = by(backend, norm_by, [torch.ones(5), torch.tensor([1.0, bad])], p).item()
        assert norm == pytest.approx(bad, nan_ok=True), (bad, p)
    assert by(backend, norm_by, [torch.ones(5), torch.tensor([1.0, math.nan])], -math.inf).isnan()


def next_scale(scale, tracker, found_inf, growth, backoff, interval, floor):
    """Return the scale that torch documents, computed in Python, limited by the floor."""
    f32 = torch.tensor
    if found_inf:
        scale, tracker = f32(scale * backoff, dtype=torch.float64).float().item(), 0
    elif tracker + 1 == interval:
        grown = f32(scale * growth, dtype=torch.float64).float().item()
        scale, tracker = (grown if math.isfinite(grown) else scale), 0
    else:
        tracker += 1
    return (scale if not scale < f32(floor).item() else f32(floor).item()), tracker


scales = st.floats(width=32, min_value=0.0, allow_subnormal=False) | st.sampled_from(
    [3e38, 2.0**-126, 65536.0]
)


@many
@given(
    st.sampled_from(BACKENDS), scales.map(lambda s: torch.tensor(s).item()), st.integers(0, 3),
    st.sampled_from([0.0, 1.0]), st.sampled_from([2.0, 1.1]), st.sampled_from([0.5, 0.3]), st.integers(1, 4),
    st.sampled_from([None, 0.0, 2.0**-126, 1.5]),
)  # fmt: skip
def test_scale_update_follows_the_rule(backend, scale, tracker, found_inf, growth, backoff, interval, floor):
    rest = tracker, found_inf, growth, backoff, interval, floor
    assert by(backend, updated_by, scale, *rest) == (*next_scale(scale, *rest[:-1], floor or 0.0), found_inf)


@pytest.mark.parametrize("backend", BACKENDS)
def test_scale_stays_finite_and_above_min_scale(backend):
    large = torch.tensor(3e38).item()
    assert by(backend, updated_by, large, 0, 0.0, 2.0, 0.5, 1, 1.0) == (large, 0, 0.0)
    assert by(backend, updated_by, 2.0**-126, 0, 1.0, 2.0, 0.5, 1, 2.0**-126) == (2.0**-126, 0, 1.0)
    assert by(backend, updated_by, 0.25, 0, 0.0, 2.0, 0.5, 2, 1.5) == (1.5, 1, 0.0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_reused_address_gets_new_size_and_dtype(backend):
    sizes = [
        (1000, torch.float32),
        (2000, torch.float16),
        (10, torch.float32),
        (1000, torch.float64),
        (1000, torch.float32),
    ]
    assert by(backend, address_reuse, sizes) == [True] * len(sizes)


@pytest.mark.parametrize("backend", BACKENDS)
def test_default_device_does_not_matter(backend):
    [scaled] = by(backend, scaled_elsewhere_by_default, [torch.ones(CHUNK + 1)], 2.0)
    assert scaled.eq(2.0).all()
    for small in by(backend, scaled_elsewhere_by_default, [torch.ones(9, dtype=torch.bfloat16)] * 20, 2.0):
        assert small.eq(2.0**20).all()
    # Elements whose squares underflow, no elements, and one tensor with overlapping memory.
    for tensors, norm in (
        ([torch.full((4,), 1e-30)], 2e-30),
        ([torch.ones(0)], 0.0),
        ([torch.full((4,), 2.0).expand(3, 4)], 48**0.5),
    ):
        assert by(backend, norm_elsewhere_by_default, tensors) == pytest.approx(norm, rel=1e-6)


@pytest.mark.parametrize("chunks", [1, 8191, 8192, 8193, 30_000])
def test_partials_of_many_chunks_are_combined_by_one_program(chunks):
    partials = torch.rand(chunks, generator=torch.Generator().manual_seed(chunks), dtype=torch.float64)
    partials[-1] = 2.0
    combined = {2.0: math.sqrt(partials.sum()), 3.0: partials.sum().item() ** (1 / 3), math.inf: 2.0}
    for p, norm in combined.items():
        assert the_interpreter().call(norm_of_partials, partials, p) == (pytest.approx(norm, rel=1e-13), 0.0)
    partials[-1] = math.nan
    for p in combined:
        assert math.isnan(the_interpreter().call(norm_of_partials, partials, p)[0])
    assert the_interpreter().call(norm_of_partials, partials.nan_to_num(math.inf), 2.0) == (math.inf, 1.0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_tensor_listed_twice_is_scaled_twice(backend):
    tensor = torch.ones(5)
    pair, _ = by(backend, unscaled_by, [tensor, tensor], 0.5, 0.0)
    assert pair[0].tolist() == [0.25] * 5


@pytest.mark.parametrize("operation", ["unscale_", "scale_", "clamp_", "total_norm"])
@pytest.mark.parametrize("view", list(VIEWS))
def test_views_whose_memory_holds_other_numbers(view, operation):
    """An address is not enough to read them by: they go to torch's operators, which take or refuse them."""
    assert by("triton", on_views, view, operation) == on_views("torch", view, operation)


class UnreadableTensor(torch.Tensor):
    """Raises where its value would be read on the host, as a synchronisation on CUDA would."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in (torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.__bool__, torch.Tensor.__float__):
            raise AssertionError(f"{func.__name__} reads a tensor on the host")
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("backend", ["auto", "torch", "cpu_blocked"])
def test_shared_code_never_reads_on_host(backend):
    def guarded(*values, **options):
        return torch.tensor(*values, **options).as_subclass(UnreadableTensor)

    with pytest.raises(AssertionError, match="on the host"):
        guarded(1.0).item()
    grads = [guarded([1.0, 2.0]), guarded([3.0])]
    with kernels.backend(backend):
        kernels.unscale_(TensorList(grads), guarded(0.5), guarded([0.0]))
        norm = kernels.total_norm(TensorList(grads), 2.0)
        kernels.scale_(TensorList(grads), norm)
        kernels.clamp_(TensorList(grads), -1.0, 1.0)
        kernels.nonfinite_counts(grads)
        kernels.update_scale_(
            guarded([2.0]), guarded([0], dtype=torch.int32), guarded([0.0]), 2.0, 0.5, 3, 1.0
        )
    assert [g.as_subclass(torch.Tensor).tolist() for g in grads] == [[pytest.approx(0.9354143), 1.0], [1.0]]
