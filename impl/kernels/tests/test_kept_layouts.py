"""Kept layouts are found in lists with the same layout, and in no other lists."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from impl.kernels import TensorList, _kept_layouts, keep_layout, recognize_layout
from impl.nn.utils import clip_grad


@pytest.fixture(autouse=True)
def _no_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_kept_layouts, "_kept", {})


def _gradients() -> list[Tensor]:
    return [torch.randn(3, 4), torch.randn(5), torch.randn(4, 6).t()]


def _made_in_inference_mode() -> Tensor:
    with torch.inference_mode():
        return torch.randn(5)


def test_recognized_list_has_the_kept_layout_and_its_own_addresses() -> None:
    layout, others = keep_layout(_gradients()), _gradients()
    assert layout is not None
    assert recognize_layout(others) is layout
    memory = TensorList(others, layout).memory
    assert memory is not None
    assert list(memory.addresses.numbers) == [tensor.data_ptr() for tensor in others]


OTHERS: dict[str, Callable[[], Tensor]] = {
    "shape": lambda: torch.randn(6),
    "dimensions": lambda: torch.randn(5, 1),
    "gaps": lambda: torch.randn(10)[::2],
    "dtype": lambda: torch.randn(5).double(),
    "device": lambda: torch.randn(5, device="meta"),
    "type": lambda: torch.nn.Parameter(torch.randn(5)),
    "sparse": lambda: torch.randn(5).to_sparse(),
    "negates": lambda: torch._neg_view(torch.randn(5)),
    "no memory": lambda: torch._efficientzerotensor((5,)),
    "inference": _made_in_inference_mode,
    "nested": lambda: torch.nested.nested_tensor([torch.randn(3), torch.randn(2)]),
}


@pytest.mark.parametrize("other", OTHERS)
def test_list_with_another_tensor_is_not_recognized(other: str) -> None:
    keep_layout(_gradients())
    changed = _gradients()
    assert recognize_layout(changed) is not None
    changed[1] = OTHERS[other]()
    assert recognize_layout(changed) is None


def test_other_lists_are_not_recognized() -> None:
    keep_layout(tensors := _gradients())
    for changed in ([], tensors[:2], [*tensors, tensors[0]], tensors[::-1]):
        assert recognize_layout(changed) is None
    keep_layout(alike := [torch.randn(2), torch.randn(2)])
    assert recognize_layout([alike[0], alike[0]]) is None
    with torch.inference_mode():
        assert recognize_layout(tensors) is None
    assert recognize_layout(tensors) is not None


@pytest.mark.parametrize("other", [torch.randn(5, device="meta"), torch.randn(0), torch.randn(5).half()])
def test_layout_is_not_kept_of_unsuitable_lists(other: Tensor) -> None:
    assert keep_layout([torch.randn(5), other]) is None
    assert keep_layout([other, torch.randn(5)]) is None
    assert not _kept_layouts._kept


def test_layouts_are_bounded_and_hold_no_tensor() -> None:
    reference = weakref.ref(first := torch.randn(2))
    for count in range(1, _kept_layouts._MOST_LISTS + 2):
        keep_layout([first, *(torch.randn(2) for _ in range(count - 1))])
    assert recognize_layout([first]) is None
    assert recognize_layout([first, torch.randn(2)]) is not None
    assert len(_kept_layouts._kept) == _kept_layouts._MOST_LISTS
    del first
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize("other", ["shape", "dimensions", "gaps", "dtype", "same"])
def test_clipping_of_a_replaced_gradient_matches_torch(other: str) -> None:
    # If the allocator reuses memory, all these gradients have the same address.
    for kind in ("same", "same", other, "same"):
        gradients = [torch.randn(3, 4), OTHERS.get(kind, lambda: torch.randn(5))()]
        copies = [gradient.resolve_neg().clone() for gradient in gradients]
        norm, expected = _clip(clip_grad, gradients), _clip(torch.nn.utils, copies)
        torch.testing.assert_close([norm, *gradients], [expected, *copies])


def _clip(module: Any, gradients: list[Tensor]) -> Tensor:
    params = [torch.zeros_like(gradient, requires_grad=True) for gradient in gradients]
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = gradient
    module.clip_grad_value_(params, 0.5)
    return module.clip_grad_norm_(params, 1.0)
