"""The two halves of clip_grad_norm_: get_total_norm, and clip_grads_with_norm_ with a given norm."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.judge.clauses import clause
from conformance.judge.comparing import Compare
from conformance.judge.library import Library
from conformance.judge.outcome import Outcome, assert_same_outcome, differences, observe
from conformance.judge.tolerances import norm_of
from conformance.strategies.clipping import (
    DTYPES,
    NONFINITE,
    WITH_AND_WITHOUT_FOREACH,
    max_norms,
    sparse_parameter,
)
from conformance.strategies.gradients import Gradient, GradientList, gradient_lists


def tensors_of(case: GradientList, device: str) -> list[torch.Tensor]:
    return [p.grad for p in case.parameters(device) if p.grad is not None]


@clause("nn.utils.clip_grad.get_total_norm.joint_norm")
@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, math.inf], ids=repr)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(data=st.data())
def test_total_norm(
    compare: Compare, device: str, dtype: torch.dtype, norm_type: float, data: st.DataObject
) -> None:
    case = data.draw(
        gradient_lists(dtypes=(dtype,)).filter(
            lambda case: all(gradient.numel for gradient in case.gradients)
        )
    )

    def norm(library: Library) -> Outcome:
        tensors = tensors_of(case, device)
        return observe(library.nn.utils.get_total_norm, tensors, norm_type, watch=tensors)

    compare(norm, norm_of(case.numel, len(case.gradients), order=norm_type))


@clause("nn.utils.clip_grad.get_total_norm.joint_norm")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", [40, 4000])
def test_many_small_gradients_beside_a_large_one(
    compare: Compare, device: str, length: int, dtype: torch.dtype
) -> None:
    """The square of a small gradient is lost in a float32 sum with the large squares.

    The sum of the small squares is not.
    """

    def norm(library: Library) -> Outcome:
        large = torch.full((64,), 1024.0, dtype=dtype, device=device)
        small = torch.full((64, length), 0.25, dtype=dtype, device=device).unbind()
        return observe(library.nn.utils.get_total_norm, [large, *small])

    compare(norm, norm_of(64 * (1 + length), 65))


@clause("nn.utils.clip_grad.get_total_norm.joint_norm")
@pytest.mark.parametrize(
    "container",
    [list, tuple, iter, lambda tensors: (tensor for tensor in tensors)],
    ids=["list", "tuple", "iterator", "generator"],
)
def test_total_norm_reads_iterators_once(compare: Compare, device: str, container: Any) -> None:
    def norm(library: Library) -> Outcome:
        tensors = [torch.tensor([3.0], device=device), torch.tensor([[0.0, 4.0]], device=device)]
        return observe(library.nn.utils.get_total_norm, container(tensors))

    [outcome] = compare(norm)
    assert outcome.value.values == 5.0


@clause("nn.utils.clip_grad.get_total_norm.joint_norm")
@pytest.mark.parametrize("tensors", [[], (), torch.tensor([3.0, 4.0]), torch.tensor(-2.0)], ids=repr)
def test_total_norm_of_odd_containers(compare: Compare, tensors: Any) -> None:
    compare(lambda library: observe(library.nn.utils.get_total_norm, tensors), norm_of(2, 1))
    if not isinstance(tensors, torch.Tensor):
        compare(lambda library: observe(library.nn.utils.get_total_norm, iter(tensors)), norm_of(2, 1))


@clause("nn.utils.clip_grad.get_total_norm.error_if_nonfinite")
@pytest.mark.parametrize("error_if_nonfinite", [True, False])
@given(case=gradient_lists(last=NONFINITE, missing=False))
def test_total_norm_of_nonfinite(
    compare: Compare, device: str, error_if_nonfinite: bool, case: GradientList
) -> None:
    def norm(library: Library) -> Outcome:
        return observe(
            library.nn.utils.get_total_norm, tensors_of(case, device), error_if_nonfinite=error_if_nonfinite
        )

    [outcome] = compare(norm)
    assert (outcome.raised is not None) == error_if_nonfinite


@clause("nn.utils.clip_grad.get_total_norm.foreach")
@pytest.mark.parametrize("foreach", [True, False, None])
@pytest.mark.parametrize("where", ["meta", "meta cpu", "cpu meta"])
def test_total_norm_foreach(compare: Compare, where: str, foreach: bool | None) -> None:
    def norm(library: Library) -> Outcome:
        def run() -> Any:
            tensors = [torch.zeros(2, device=device) for device in where.split()]
            total = library.nn.utils.get_total_norm(tensors, foreach=foreach)
            return total.shape, total.dtype, total.device

        return observe(run)

    [outcome] = compare(norm)
    assert ("foreach" in str(outcome.raised)) == bool(foreach)


TRANSFORMS: dict[str, Callable[[Callable[..., Any], torch.Tensor], Any]] = {
    "vmap": lambda norm, rows: torch.func.vmap(norm)(rows),
    "vmap of vmap": lambda norm, rows: torch.func.vmap(torch.func.vmap(norm))(rows.unflatten(0, (2, 2))),
    "jvp": lambda norm, rows: torch.func.jvp(norm, (rows,), (torch.ones_like(rows),)),
    "jacfwd": lambda norm, rows: torch.func.jacfwd(norm)(rows),
    "vmap of jvp": lambda norm, rows: torch.func.vmap(lambda row: torch.func.jvp(norm, (row,), (row,)))(rows),
    "vmap of a gradient": lambda norm, rows: torch.func.vmap(
        lambda row: norm(torch.func.grad(lambda inputs: inputs.pow(2).sum())(row))
    )(rows),
    "vmap beside plain tensors": lambda norm, rows: torch.func.vmap(lambda row: norm(rows) * row)(rows),
}


@clause("nn.utils.clip_grad.get_total_norm.transforms")
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, math.inf], ids=repr)
def test_total_norm_inside_transforms_matches_torch(
    compare: Compare, device: str, norm_type: float, transform: str
) -> None:
    """DP-SGD clips the gradients of each sample, and so takes their norm inside vmap."""

    def outcome(library: Library) -> Outcome:
        def norm(row: torch.Tensor) -> torch.Tensor:
            return library.nn.utils.get_total_norm([row, 2 * row], norm_type, foreach=False)

        return observe(TRANSFORMS[transform], norm, rows)

    rows = torch.tensor([[3.0, 4.0], [0.5, -2.0], [1.0, 0.25], [-6.0, 8.0]], device=device)
    with warnings.catch_warnings():
        # The first transform with tangents in a process warns about a function of torch.
        warnings.simplefilter("ignore")
        TRANSFORMS[transform](torch.linalg.vector_norm, rows)
    [transformed] = compare(outcome, norm_of(16, 2, order=norm_type))
    assert transformed.raised is None


@clause("nn.utils.clip_grad.clip_grads_with_norm_.scales_by_given_norm")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_scales_long_gradients_among_short_ones(
    subject: Library, reference: Library, device: str, dtype: torch.dtype
) -> None:
    """Both methods scale if an implementation switches methods at some length.

    The float32 factor times a half is rounded once on the CPU. On CUDA, torch rounds the factor to the gradient's dtype
    first. Both products are right, each to the bit.
    """

    def outcome(library: Library, device: str) -> Outcome:
        lengths = [3, 20_000, 7, 1 << 17, 5, (1 << 17) + 1]
        parameters = [Gradient((length,), dtype, seed=length).parameter(device) for length in lengths]
        norm = torch.tensor(3.0, device=device)

        def scale() -> list[torch.Tensor]:
            library.nn.utils.clip_grads_with_norm_(parameters, 1.0, norm)
            return [parameter.grad.cpu() for parameter in parameters]

        return observe(scale)

    actual = outcome(subject, device)
    if any(differences(outcome(reference, "cpu"), actual)):
        assert_same_outcome(outcome(reference, device), actual)


@clause("nn.utils.clip_grad.clip_grads_with_norm_.scales_by_given_norm")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(data=st.data())
def test_scales_by_the_given_norm(
    compare: Compare, device: str, dtype: torch.dtype, data: st.DataObject
) -> None:
    case = data.draw(gradient_lists(dtypes=(dtype,), last=st.one_of(NONFINITE, st.none())))
    max_norm = data.draw(max_norms)
    norm = data.draw(st.sampled_from([0.0, 1e-7, 0.5, 3.0, 1e30, math.inf, math.nan]))

    def outcome(library: Library) -> Outcome:
        parameters, total_norm = case.parameters(device), torch.tensor(norm, dtype=dtype, device=device)
        watch = [*parameters, total_norm]
        return observe(library.nn.utils.clip_grads_with_norm_, parameters, max_norm, total_norm, watch=watch)

    # Both sides compute one quotient and one product, so results differ by at most one rounding.
    compare(outcome, norm_of(1, 1))


@clause("nn.utils.clip_grad.clip_grads_with_norm_.scales_by_given_norm")
@pytest.mark.parametrize("coalesced", [True, False])
@pytest.mark.parametrize("foreach", [None, False])
def test_scales_sparse_gradients(
    compare: Compare, device: str, coalesced: bool, foreach: bool | None
) -> None:
    def scaled(library: Library) -> Outcome:
        parameters = [sparse_parameter(device, coalesced), Gradient((3,)).parameter(device)]

        def scale() -> list[torch.Tensor]:
            library.nn.utils.clip_grads_with_norm_(parameters, 1.0, torch.tensor(4.0, device=device), foreach)
            return [parameter.grad.to_dense() for parameter in parameters]

        return observe(scale)

    compare(scaled)


@clause("nn.utils.clip_grad.clip_grads_with_norm_.foreach")
@WITH_AND_WITHOUT_FOREACH
@pytest.mark.parametrize("norm_on", ["cpu", "meta"])
def test_scaling_foreach(compare: Compare, where: str, foreach: bool | None, norm_on: str) -> None:
    def outcome(library: Library) -> Outcome:
        parameters = [Gradient((5,), scale=3.0).parameter(device) for device in where.split()]
        watch = [parameter for parameter in parameters if parameter.device.type == "cpu"]
        norm = torch.tensor(4.0, device=norm_on)
        return observe(
            library.nn.utils.clip_grads_with_norm_, parameters, 0.5, norm, foreach=foreach, watch=watch
        )

    [scaled] = compare(outcome, norm_of(1, 1))
    assert ("foreach" in str(scaled.raised)) == bool("meta" in where and foreach)


@clause("nn.utils.clip_grad.clip_grads_with_norm_.scales_by_given_norm")
@pytest.mark.parametrize("shape", [(), (1,), (5,), (2,), (1, 1)], ids=str)
@pytest.mark.parametrize("foreach", [True, False, None])
def test_scaling_one_parameter_by_norms_of_all_shapes(
    compare: Compare, device: str, shape: tuple[int, ...], foreach: bool | None
) -> None:
    def outcome(library: Library) -> Outcome:
        parameter = Gradient((5,), scale=3.0).parameter(device)
        norm = torch.arange(4.0, 4.0 + math.prod(shape), device=device).view(shape)
        return observe(
            library.nn.utils.clip_grads_with_norm_, parameter, 0.5, norm, foreach, watch=[parameter]
        )

    compare(outcome, norm_of(1, 1))


@clause("nn.utils.clip_grad.clip_grads_with_norm_.scales_by_given_norm")
@pytest.mark.parametrize("parameters", [[], (), None, 3], ids=repr)
def test_scaling_odd_containers(compare: Compare, parameters: Any) -> None:
    """Containers that can be empty are accepted."""
    norm = torch.tensor(2.0)
    [outcome] = compare(
        lambda library: observe(library.nn.utils.clip_grads_with_norm_, parameters, 1.0, norm)
    )
    assert (outcome.raised is None) == isinstance(parameters, (list, tuple))
