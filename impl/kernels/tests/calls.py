"""A call of a kernel with one backend, on tensors built from a description that can be sent to another process."""

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from impl import kernels
from impl.kernels import TensorList


class Spec(NamedTuple):
    """Description of a tensor. `seed` determines its values, and `layout` its memory."""

    numel: int
    dtype: torch.dtype
    layout: str  # contiguous, misaligned, transposed or gaps
    seed: int


class CallResult(NamedTuple):
    tensors: list[Tensor]  # afterwards
    value: Tensor | None
    outside: bool  # whether memory around the tensors is as it was


_SENTINEL = 77.0


def build(spec: Spec) -> tuple[Tensor, Tensor]:
    """The tensor, and the buffer around it that holds a sentinel everywhere else."""
    generator = torch.Generator().manual_seed(spec.seed)
    numel = spec.numel
    buffer = torch.full((2 * numel + 8,), _SENTINEL, dtype=spec.dtype)
    match spec.layout:
        case "misaligned":
            tensor = buffer[1 : 1 + numel]
        case "transposed":
            tensor = buffer[:numel].view(-1, math.gcd(numel, 6) or 1).t()
        case "gaps":
            tensor = buffer[: 2 * numel : 2]
        case _:
            tensor = buffer[:numel]
    tensor.copy_(torch.randn(tensor.shape, generator=generator, dtype=torch.float64))
    return tensor, buffer


def every_pattern_of_bits(dtype: torch.dtype) -> Tensor:
    """Each number that a half can be."""
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    """But for those of a nan."""
    assert torch.equal(actual.isnan(), expected.isnan())
    numbers = ~actual.isnan()
    whole = torch.int32 if actual.dtype is torch.float32 else torch.int16
    assert torch.equal(actual[numbers].view(whole), expected[numbers].view(whole))


def call(backend: str, operation: str, specs: list[Spec], *arguments: Any) -> CallResult:
    """Run `operation` on freshly built tensors; Tensor arguments are copied first."""
    built = [build(spec) for spec in specs]
    tensors = [tensor for tensor, _ in built]
    arguments = tuple(a.clone() if isinstance(a, Tensor) else a for a in arguments)
    with kernels.backend(backend):
        value = getattr(kernels, operation)(TensorList(tensors), *arguments)
    found_inf = arguments[1] if operation == "unscale_" else None
    untouched = all(is_intact(tensor, buffer) for tensor, buffer in built)
    return CallResult([t.clone() for t in tensors], found_inf if value is None else value, untouched)


def is_intact(tensor: Tensor, buffer: Tensor) -> bool:
    """Whether `buffer` holds the sentinel wherever `tensor`, which was built with it, does not lie."""
    mask = torch.ones_like(buffer, dtype=torch.bool)
    mask.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).fill_(False)
    return bool((buffer[mask] == _SENTINEL).all())


def norm_by(backend: str, tensors: list[Tensor], p: float) -> Tensor:
    with kernels.backend(backend):
        return kernels.total_norm(TensorList(tensors), p)


def norm_of_partials(partials: Tensor, p: float) -> tuple[float, float]:
    """Return the norm from the partials of its chunks by Triton's kernel, in float64, and its check for inf and nan."""
    from impl.kernels._triton.norm import _finish, finish_norm_kernel  # noqa: PLC0415  only where Triton is installed

    norm, found_inf = torch.empty((), dtype=torch.float64), torch.empty(())
    _finish(finish_norm_kernel, partials, p, norm, found_inf)
    return norm.item(), found_inf.item()


def checked_norm_by(backend: str, tensors: list[Tensor], p: float) -> tuple[float, float]:
    with kernels.backend(backend):
        norm, found_inf = kernels.checked_norm(TensorList(tensors), p)
    return norm.item(), found_inf.item()


def tensor_norms_by(backend: str, tensors: list[Tensor], p: float, scale: float | None = None) -> Tensor:
    """Return the norm of each tensor by `checked_norm`, or by `step_numbers` divided by the scale."""
    norm_T = torch.full((len(tensors),), math.nan, dtype=torch.float64)
    with kernels.backend(backend):
        if scale is None:
            kernels.checked_norm(TensorList(tensors), p, None, norm_T)
        else:
            kernels.step_numbers(TensorList(tensors), p, torch.tensor(scale), math.inf, None, norm_T)
    return norm_T


def step_numbers_by(
    backend: str, gradients: list[Tensor], scale: float, max_norm: float, dtype: torch.dtype | None = None
) -> list[Tensor | None]:
    """Return the numbers of a step, and the same by torch's operators from the checked norm."""
    wide = torch.tensor(scale)
    with kernels.backend(backend):
        numbers = kernels.step_numbers(TensorList(gradients), 2.0, wide, max_norm, dtype)
        scaled_norm, found_inf = kernels.checked_norm(TensorList(gradients), 2.0, dtype)
    assert numbers is not None
    inv_scale = kernels.inverse(wide)
    norm = (scaled_norm * inv_scale).to(scaled_norm.dtype)
    factor = inv_scale if max_norm == math.inf else inv_scale * kernels.clip_coefficient(max_norm, norm)
    return [*numbers, scaled_norm, found_inf, norm, factor, 1 - found_inf]


def scaled_by(backend: str, tensors: list[Tensor], factor: float) -> list[Tensor]:
    with kernels.backend(backend):
        kernels.scale_(TensorList(tensors), torch.tensor(factor))
    return tensors


def clipped_by(backend: str, norms: list[Tensor], max_norms: list[float]) -> list[tuple[Tensor, Tensor]]:
    """Return ones, clipped by `clip_` for each norm and limit, and ones scaled by torch's clip coefficient."""
    pairs: list[tuple[Tensor, Tensor]] = []
    with kernels.backend(backend):
        for norm, max_norm in itertools.product(norms, max_norms):
            clipped, scaled = torch.ones(2, dtype=norm.dtype)
            kernels.clip_(TensorList([clipped]), max_norm, norm)
            kernels.scale_(TensorList([scaled]), kernels.clip_coefficient(max_norm, norm))
            pairs.append((clipped, scaled))
    return pairs


def scaled_elsewhere_by_default(backend: str, tensors: list[Tensor], factor: float) -> list[Tensor]:
    """Scale while new tensors are on another device by default."""
    on_device = torch.tensor(factor)
    with kernels.backend(backend), torch.device("meta"):
        kernels.scale_(TensorList(tensors), on_device)
    return tensors


def norm_elsewhere_by_default(backend: str, tensors: list[Tensor]) -> float:
    with kernels.backend(backend), torch.device("meta"):
        return kernels.total_norm(TensorList(tensors), 2.0).item()


def unscaled_by(
    backend: str, grads: list[Tensor], inv_scale: float, found_inf: float
) -> tuple[list[Tensor], float]:
    flag = torch.full((1,), found_inf)
    with kernels.backend(backend):
        kernels.unscale_(TensorList(grads), torch.tensor(inv_scale), flag)
    return grads, flag.item()


def unscaled_by_scale(
    backend: str, grads: list[Tensor], scale: float, found_inf: float
) -> tuple[list[Tensor], float]:
    flag = torch.full((), found_inf)
    with kernels.backend(backend):
        kernels.unscale_by_(TensorList(grads), torch.tensor(scale), flag)
    return grads, flag.item()


def clamped_by(backend: str, tensors: list[Tensor], low: float, high: float) -> list[Tensor]:
    with kernels.backend(backend):
        kernels.clamp_(TensorList(tensors), low, high)
    return tensors


def updated_by(
    backend: str, scale: float, tracker: int, found_inf: float, *settings: Any
) -> tuple[float, int, float]:
    """All three tensors afterwards; others may read the last one, too."""
    state = torch.full((1,), scale), torch.full((1,), tracker, dtype=torch.int32), torch.full((1,), found_inf)
    with kernels.backend(backend):
        kernels.update_scale_(*state, *settings)
    return state[0].item(), int(state[1].item()), state[2].item()


# Type, dtype, strides and address are ordinary, but the memory at the address differs from the values.
VIEWS: dict[str, Callable[[], Tensor]] = {
    "negated": lambda: torch._neg_view(torch.tensor([3.0, -0.5, 0.25])),
    "imaginary part of a conjugate": lambda: torch.tensor([2.0 + 3.0j]).conj().imag,
    "zero without memory": lambda: torch._efficientzerotensor((3,)),
}
_ARGUMENTS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "unscale_": lambda: (torch.tensor(0.5), torch.zeros(1)),
    "scale_": lambda: (torch.tensor(0.5),),
    "clamp_": lambda: (-0.375, 1.0),
    "total_norm": lambda: (2.0,),
}


def on_views(backend: str, view: str, operation: str) -> list[Any]:
    """Run an operation on a view among ordinary tensors. Return all values, the result and the error, if any."""
    tensors = [torch.tensor([2.0, -2.0]), VIEWS[view]()]
    value, error = None, None
    with kernels.backend(backend):
        try:
            value = getattr(kernels, operation)(TensorList(tensors), *_ARGUMENTS[operation]())
        except RuntimeError as caught:
            error = str(caught)
    # A sum has memory of its own, whatever its terms have.
    return [*((tensor + 0.0).tolist() for tensor in tensors), None if value is None else value.item(), error]


def address_reuse(backend: str, sizes: list[tuple[int, torch.dtype]]) -> list[bool]:
    """Whether each of several tensors, all at one address one after the other, was scaled exactly and alone."""
    storage = torch.zeros(1 << 16, dtype=torch.uint8)
    right: list[bool] = []
    for numel, dtype in sizes:
        storage.fill_(0)
        tensor = storage.view(dtype)[:numel].fill_(3.0)
        with kernels.backend(backend):
            kernels.scale_(TensorList([tensor]), torch.tensor(2.0))
        rest = storage.view(dtype)[numel:]
        right.append(bool((tensor == 6.0).all()) and not rest.any())
    return right
