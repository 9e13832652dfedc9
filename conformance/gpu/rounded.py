"""Float32 arithmetic with a bound on the accumulated rounding errors.

Each operation propagates the errors of its operands and adds the rounding of its result. A fused sum of products rounds
once less than is counted here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_UNIT = 2.0**-24
_SMALLEST = 2.0**-149


@dataclass(frozen=True)
class Rounded:
    value: Tensor  # f64
    error: Tensor  # f64: bound on the distance of the computed value

    @classmethod
    def exactly(cls, value: Tensor) -> Rounded:
        wide = value.double()
        return cls(wide, torch.zeros_like(wide))

    @classmethod
    def number(cls, value: float) -> Rounded:
        """Return `value`, computed in float64, rounded to float32."""
        return cls.exactly(torch.tensor(value, dtype=torch.float64))._rounded()

    def __neg__(self) -> Rounded:
        return Rounded(-self.value, self.error)

    def __add__(self, other: Rounded) -> Rounded:
        return Rounded(self.value + other.value, self.error + other.error)._rounded()

    def __sub__(self, other: Rounded) -> Rounded:
        return self + -other

    def __mul__(self, other: Rounded) -> Rounded:
        most = (self.value.abs() + self.error) * (other.value.abs() + other.error)
        product = self.value * other.value
        return Rounded(product, most - product.abs())._rounded()

    def __truediv__(self, other: Rounded) -> Rounded:
        quotient = self.value / other.value
        most = (self.value.abs() + self.error) / (other.value.abs() - other.error).clamp(min=0.0)
        return Rounded(quotient, most - quotient.abs())._rounded()

    def sqrt(self) -> Rounded:
        least = (self.value - self.error).clamp(min=0.0).sqrt()
        root = self.value.sqrt()
        return Rounded(root, torch.maximum((self.value + self.error).sqrt() - root, root - least))._rounded()

    def maximum(self, other: Rounded) -> Rounded:
        return Rounded(torch.maximum(self.value, other.value), torch.maximum(self.error, other.error))

    def stored(self, dtype: torch.dtype) -> Rounded:
        """Return the value rounded to `dtype`, if that is narrower than float32."""
        about = torch.finfo(dtype)
        if dtype is torch.float32:
            return self
        return Rounded(
            self.value,
            self.error + about.eps / 2 * (self.value.abs() + self.error) + about.smallest_normal * about.eps,
        )

    def _rounded(self) -> Rounded:
        return Rounded(self.value, self.error + _UNIT * (self.value.abs() + self.error) + _SMALLEST)
