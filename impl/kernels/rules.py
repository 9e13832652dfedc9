"""The arithmetic of optimizers that have a fused update, with the settings of one parameter group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from impl.kernels._lists import HALVES


class Rule(Protocol):
    """By torch's operators, which are the reference of every other backend."""

    def apply_(  # noqa: PLR0913  what torch's operators take
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: Sequence[Sequence[Tensor]],
        steps: Sequence[Tensor],
        divisor: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> None:
        """Update lists of one dtype on one device.

        Args:
            params, states: overwritten.
            grads: divided by `divisor` in place, where one is given.
            steps: counters that stand at this update already.
            divisor, found_inf: f32, one element, on that device; nothing is changed where `found_inf` is 1.0.
        """
        ...


@dataclass(frozen=True)
class AdamRule:
    """States: first moments, second moments and, with `amsgrad`, the largest second moments."""

    lr: float | Tensor
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    amsgrad: bool
    maximize: bool
    decoupled: bool  # weight decay beside the gradient, as AdamW

    def apply_(  # noqa: PLR0913  as above
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: Sequence[Sequence[Tensor]],
        steps: Sequence[Tensor],
        divisor: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> None:
        update = torch._fused_adamw_ if self.decoupled else torch._fused_adam_
        update(
            [*params],
            [*grads],
            [*states[0]],
            [*states[1]],
            [*states[2]] if self.amsgrad else [],
            [*steps],
            lr=self.lr,
            beta1=self.beta1,
            beta2=self.beta2,
            weight_decay=self.weight_decay,
            eps=self.eps,
            amsgrad=self.amsgrad,
            maximize=self.maximize,
            grad_scale=divisor,
            found_inf=found_inf,
        )


@dataclass(frozen=True)
class SGDRule:
    """States: momentum, none without."""

    lr: float | Tensor
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool
    maximize: bool
    is_first_step: bool  # the momentum is to be the gradient, whatever its memory holds

    def apply_(  # noqa: PLR0913  as above
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: Sequence[Sequence[Tensor]],
        steps: Sequence[Tensor],
        divisor: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> None:
        if params[0].is_cpu and params[0].dtype in HALVES:
            self._apply_in_f32_(params, grads, states, divisor, found_inf)
            return
        torch._fused_sgd_(
            [*params],
            [*grads],
            [*states[0]] if states else [],
            lr=self.lr,
            momentum=self.momentum,
            dampening=self.dampening,
            weight_decay=self.weight_decay,
            nesterov=self.nesterov,
            maximize=self.maximize,
            is_first_step=self.is_first_step,
            grad_scale=divisor,
            found_inf=found_inf,
        )

    def _apply_in_f32_(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: Sequence[Sequence[Tensor]],
        divisor: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        """By copies: torch's operator for the CPU leaves most elements of halves as they were."""
        narrow = (params, *states)
        wide = [[tensor.float() for tensor in tensors] for tensors in narrow]
        self.apply_(wide[0], [grad.float() for grad in grads], wide[1:], (), divisor, found_inf)
        for kept, new in zip(narrow, wide, strict=True):
            torch._foreach_copy_([*kept], new)


@dataclass(frozen=True)
class AdagradRule:
    """States: sums of squares."""

    lr: float | Tensor
    lr_decay: float
    eps: float
    weight_decay: float
    maximize: bool

    def apply_(  # noqa: PLR0913  as above
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: Sequence[Sequence[Tensor]],
        steps: Sequence[Tensor],
        divisor: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> None:
        torch._fused_adagrad_(
            [*params],
            [*grads],
            [*states[0]],
            [*steps],
            lr=self.lr,
            lr_decay=self.lr_decay,
            weight_decay=self.weight_decay,
            eps=self.eps,
            maximize=self.maximize,
            grad_scale=divisor,
            found_inf=found_inf,
        )
