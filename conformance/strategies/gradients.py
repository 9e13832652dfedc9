"""Lists of parameters with gradients: sizes, dtypes, memory layouts, missing and non-finite ones.

A case is a plain value. `case.parameters(device)` builds fresh tensors from it, the same each time, so that the subject
and the reference never share memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from conformance.judge.sandbox import seeding

LAYOUTS = ("contiguous", "transposed", "sliced", "offset")

# The beginning of torch's error for a written tensor whose elements share memory.
REFUSED_OVERLAP = "RuntimeError: unsupported operation: more than one element of the written-to tensor"


@dataclass(frozen=True)
class Gradient:
    """A parameter and its gradient. There is no gradient if `dtype` is None."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None = torch.float32
    seed: int = 0
    scale: float = 1.0
    layout: str = "contiguous"
    # The value that replaces the last element, or None.
    last: float | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def parameter(self, device: str) -> torch.nn.Parameter:
        dtype = self.dtype or torch.float32
        parameter = torch.nn.Parameter(torch.zeros(self.shape, dtype=dtype, device=device))
        if self.dtype is not None:
            parameter.grad = laid_out(self.values().to(device=device, dtype=dtype), self.layout)
        return parameter

    def values(self) -> torch.Tensor:
        """Return the values in float64, before they are rounded to `dtype`."""
        generator = seeding.generator(self.seed)
        values = torch.randn(self.shape, generator=generator, dtype=torch.float64) * self.scale
        if self.last is not None and self.numel:
            values.view(-1)[-1] = self.last
        return values


@dataclass(frozen=True)
class GradientList:
    gradients: tuple[Gradient, ...]

    @property
    def numel(self) -> int:
        return sum(gradient.numel for gradient in self.gradients)

    def parameters(self, device: str) -> list[torch.nn.Parameter]:
        return [gradient.parameter(device) for gradient in self.gradients]

    def norm(self, norm_type: float) -> float:
        """Return the joint norm in float64 of the values as rounded to their dtypes."""
        rounded = [g.values().to(g.dtype).double().reshape(-1) for g in self.gradients if g.dtype is not None]
        return float(torch.linalg.vector_norm(torch.cat(rounded), norm_type)) if rounded else 0.0


def laid_out(values: torch.Tensor, layout: str) -> torch.Tensor:
    """Return a tensor equal to `values` with another memory layout."""
    if layout == "transposed" and values.dim() >= 2:
        return values.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "sliced":
        wide = values.new_full((*values.shape, 2), 7.0)
        wide[..., 0] = values
        return wide[..., 0]
    if layout == "offset":  # shifted by an element from an aligned address
        flat = values.new_full((values.numel() + 1,), 7.0)
        flat[1:] = values.reshape(-1)
        return flat[1:].view(values.shape)
    return values.contiguous()


_NOTHING = st.none()
shapes = st.one_of(
    st.just(()),
    st.tuples(st.integers(0, 40)),
    st.tuples(st.integers(1, 9), st.integers(0, 9)),
    st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4)),
    st.sampled_from([(1023,), (1025,), (70, 70)]),
)


@st.composite
def gradient_lists(
    draw: st.DrawFn,
    *,
    dtypes: tuple[torch.dtype, ...] = (torch.float32,),
    min_size: int = 1,
    max_size: int = 6,
    missing: bool = True,
    last: st.SearchStrategy[float | None] = _NOTHING,
) -> GradientList:
    """Draw lists whose norms are far from overflow and underflow.

    `last` replaces the last element of the last gradient.
    """
    size = draw(st.integers(min_size, max_size))
    choices: tuple[torch.dtype | None, ...] = (*dtypes, None) if missing else dtypes
    gradients = [
        Gradient(
            shape=draw(shapes),
            dtype=draw(st.sampled_from(choices)),
            seed=draw(st.integers(0, 2**16)),
            scale=draw(st.sampled_from([1e-3, 0.1, 1.0, 30.0])),
            layout=draw(st.sampled_from(LAYOUTS)),
        )
        for _ in range(size)
    ]
    final = draw(last)
    if final is not None:
        gradients.append(Gradient((draw(st.integers(1, 1100)),), draw(st.sampled_from(dtypes)), last=final))
    return GradientList(tuple(gradients))
