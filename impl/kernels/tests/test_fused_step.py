"""The kernels that update: against torch's fused operators in float64, within the roundings of their own arithmetic."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.gpu.update_bounds import EACH, OTHERS, rules, states_of, update
from impl import kernels
from impl.kernels import RULES, Rule, TensorList
from impl.kernels._table import CHUNK
from impl.kernels.rules import SGDRule
from impl.kernels.tests.interpreter import the_interpreter
from impl.kernels.tests.native import the_library
from impl.kernels.tests.updates import Lists, ParamSpec, UpdateSpec, lists_of, updated, updated_lists

_NARROW = (torch.float16, torch.bfloat16)
_DTYPES = (torch.float32, *_NARROW)
_EDGES = (0, 1, 5, 1023, 1024, 1025, CHUNK - 1, CHUNK, CHUNK + 1)
few = settings(max_examples=15, deadline=None)
many = settings(max_examples=25, deadline=None)


@st.composite
def described(draw: st.DrawFn) -> UpdateSpec:
    rule = draw(rules)
    places = st.builds(
        ParamSpec, st.sampled_from(_EDGES), st.sampled_from(["contiguous", "contiguous", "misaligned", "transposed"]),
        st.sampled_from(["alike", "alike", "contiguous", "misaligned"]), st.sampled_from([*_DTYPES, torch.float64]),
        st.integers(0, 99),
    )  # fmt: skip
    dtype, narrow_states = draw(
        st.sampled_from([*((dtype, False) for dtype in _DTYPES), (torch.float32, True)])
    )
    return UpdateSpec(
        rule, states_of(rule), dtype, draw(st.sampled_from([None, *_NARROW])),
        draw(st.lists(places, min_size=1, max_size=4)),
        draw(st.sampled_from([1.0, 2.0, 1000.0, 1e6])) if rule.COUNTS else 0.0,
        draw(st.sampled_from([1.0, 2.0**-10, 0.37])), draw(st.sampled_from([None, 0.0])), narrow_states,
    )  # fmt: skip


def one(rule: Rule, **changed: object) -> UpdateSpec:
    """A float32 parameter longer than a chunk, a short one; gradients in float32."""
    places = [ParamSpec(numel, "contiguous", "alike", torch.float32, numel) for numel in (CHUNK + 5, 7)]
    counts = 3.0 if rule.COUNTS else 0.0
    return UpdateSpec(rule, states_of(rule), torch.float32, None, places, counts, 0.25, None)._replace(
        **changed
    )


each_backend = pytest.mark.parametrize("backend", ["triton", "native"])
each_rule = pytest.mark.parametrize("rule", EACH, ids=lambda rule: type(rule).__name__)


def by(backend: str, spec: UpdateSpec, *lists: Lists) -> Lists:
    """Return the update of `lists`, or of those that `spec` describes."""
    function = updated_lists if lists else updated
    if backend == "triton":
        return the_interpreter().call(function, backend, spec, *lists)
    if backend == "native":
        the_library()
    return function(backend, spec, *lists)


def in_f64(spec: UpdateSpec) -> Lists:
    """Return the update of torch's operators in float64, whose roundings are negligible."""
    before, _ = lists_of(spec)
    # Contiguous tensors, because torch's operators walk the memory of tensors that have the same layout.
    params, grads, *wide = (
        [tensor.double().contiguous() for tensor in tensors]
        for tensors in (before.params, before.grads, *before.states)
    )
    factor = torch.tensor(spec.factor).double()
    rule = replace(spec.rule, lr=float(spec.rule.lr))
    rule.apply_(params, [grad * factor for grad in grads], wide, before.steps)
    return Lists(params, before.grads, wide, before.low_precision_params, before.steps)


def assert_within_roundings(backend: str, spec: UpdateSpec) -> None:
    before, _ = lists_of(spec)
    expected, actual = in_f64(spec), by(backend, spec)
    assert actual.outside, "memory beside a tensor was written"
    assert all(map(torch.equal, actual.grads, before.grads)), "gradients were written"
    assert all(map(torch.equal, actual.steps, before.steps)), "counters were written"
    for place in range(len(spec.places)):
        old = [before.params[place], *(state[place] for state in before.states)]
        bounds = update(
            spec.rule, old[0], before.grads[place], old[1:], spec.step, float(torch.tensor(spec.factor))
        )
        new, right = (
            [lists.params[place], *(state[place] for state in lists.states)] for lists in (actual, expected)
        )
        for number, (bound, actual_tensor, torchs) in enumerate(zip(bounds, new, right, strict=True)):
            assert actual_tensor.dtype is (spec.stored if number else spec.dtype)
            excess = (actual_tensor.double() - torchs).abs() - bound.stored(actual_tensor.dtype).error
            assert not actual_tensor.isnan().any()
            assert (excess <= 0).all(), (place, number, float(excess.max()))


def test_every_rule_is_tried() -> None:
    assert {type(rule) for rule in EACH} == set(RULES)


@few
@given(described())
def test_triton_updates_are_right_but_for_the_roundings(spec: UpdateSpec) -> None:
    assert_within_roundings("triton", spec)


@many
@given(described(), st.sampled_from(_DTYPES))
def test_native_updates_are_right_but_for_the_roundings(spec: UpdateSpec, dtype: torch.dtype) -> None:
    """The gradients have one dtype and are on the CPU, and no found_inf can skip the step."""
    places = [place._replace(grad_dtype=dtype) for place in spec.places]
    assert_within_roundings("native", spec._replace(places=places, found_inf=None))


@each_backend
@each_rule
@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_every_rule_in_every_dtype(backend: str, rule: Rule, dtype: torch.dtype) -> None:
    assert_within_roundings(backend, one(rule, dtype=dtype))


@pytest.mark.parametrize("backend", ["triton", "native", "cpu_blocked", "torch"])
@each_rule
def test_narrow_states_beside_float32_parameters(backend: str, rule: Rule) -> None:
    """The update is that of float32 states with the same values, which are rounded afterwards, to the bit."""
    spec = one(rule, narrow_states=True)
    lists, _ = lists_of(spec)
    wide_lists = lists_of(spec)[0]._replace(
        states=[[*map(torch.Tensor.float, state)] for state in lists.states]
    )
    actual, wide = by(backend, spec, lists), by(backend, spec, wide_lists)
    assert all(map(torch.equal, actual.params, wide.params))
    for state, wide_state in zip(chain(*actual.states), chain(*wide.states), strict=True):
        assert torch.equal(state, wide_state.bfloat16())


@each_backend
@pytest.mark.parametrize("rule", OTHERS, ids=lambda rule: type(rule).__name__)
def test_other_settings(backend: str, rule: Rule) -> None:
    """The gradients have two dtypes, which take a launch each."""
    spec = one(rule)
    mixed = [place._replace(grad_dtype=torch.bfloat16) for place in spec.places]
    assert_within_roundings(
        backend, spec if backend == "native" else spec._replace(places=[*spec.places, *mixed])
    )


@each_backend
@each_rule
@pytest.mark.parametrize("dtype", _NARROW, ids=str)
def test_copies_are_the_new_parameters_rounded_once(backend: str, rule: Rule, dtype: torch.dtype) -> None:
    actual = by(backend, one(rule, low_precision=dtype))
    assert [copy.dtype for copy in actual.low_precision_params] == [dtype, dtype]
    assert all(
        torch.equal(copy, param.to(dtype))
        for copy, param in zip(actual.low_precision_params, actual.params, strict=True)
    )


@each_rule
def test_nothing_is_done_where_the_flag_is_set(rule: Rule) -> None:
    spec = one(rule, found_inf=1.0, low_precision=torch.bfloat16)
    before, _ = lists_of(spec)
    actual = by("triton", spec)
    for old, new in zip(every(before), every(actual), strict=True):
        assert torch.equal(old, new)


@pytest.mark.parametrize("backend", ["torch", "cpu_blocked"])
def test_gradients_in_another_order_of_memory(backend: str) -> None:
    """torch's operators read such gradients as if they had the parameters' layout."""
    param, grad = torch.zeros(3, 4), torch.arange(12.0).view(4, 3).t()
    rule = SGDRule(1.0, 0.0, 0.0, 0.0, nesterov=False, maximize=False, is_first_step=False)
    with kernels.backend(backend):
        kernels.fused_step_(rule, kernels.Parameters([param], []), TensorList([grad]), torch.tensor(1.0))
    assert torch.equal(param, -grad)


def every(lists: Lists) -> list[torch.Tensor]:
    return [*lists.params, *lists.grads, *chain(*lists.states), *lists.low_precision_params, *lists.steps]
