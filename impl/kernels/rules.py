"""The update rules: of every optimizer that has a fused update its states, hyperparameters, arithmetic and kernels.

`RULES` is the table. A rule says all of itself, and the rest reads it: `impl.optim` which optimizers have it, which
lists it updates and what their groups make of it; the CPU library and Triton's launcher which numbers a kernel is
given; the tests what there is to try. Its arithmetic stands here as torch's operator, the reference of every backend.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from impl.kernels._lists import HALVES

# Settings of all rules as the CPU library has them: in the order of `struct settings` in fused_step.c.
NUMBERS = ("lr", "weight_decay", "eps", "beta1", "beta2", "momentum", "dampening", "lr_decay")
FLAGS = ("maximize", "decoupled", "nesterov", "is_first_step")
# As `tandem_interface` gives it there: raised with these, and with arguments and structures of the library's others.
INTERFACE = 5


_States = Sequence[list[Tensor]]


class Kernels(NamedTuple):
    """Where a rule's arithmetic stands besides, and which of its attributes Triton's kernel is given."""

    native: int  # in `enum rule` of fused_step.c
    triton: str  # in `_triton/rules.py`
    settings: tuple[str, ...]  # after the learning rate, in the kernel's order
    flags: tuple[str, ...]  # by which it is compiled; there in capitals


@dataclass(frozen=True)
class Rule:
    """One update of the parameters of a group: a row of the table, with the group's hyperparameters."""

    OPTIMIZERS: ClassVar[tuple[type[Optimizer], ...]]
    STATES: ClassVar[tuple[str, ...]]  # lists, as `_init_group` names them and in the operator's order
    KERNELS: ClassVar[Kernels]
    COUNTS: ClassVar[bool] = True  # whether it has step counters
    LATE_STATE: ClassVar[str | None] = (
        None  # what the first list is called that is None before the first update
    )
    NOTHING_LEFT: ClassVar[Any] = False  # `_init_group` returns it where `step` has no more to do

    lr: float | Tensor

    @staticmethod
    def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
        """The rule's hyperparameters, from a parameter group."""
        raise NotImplementedError

    @staticmethod
    def operator(
        params: list[Tensor], grads: list[Tensor], states: _States, steps: list[Tensor], more: dict[str, Any]
    ) -> None:
        """Call torch's fused operator.

        Args:
            states: one list for each of `STATES`, empty where there is none.
            more: the settings; and `grad_scale`, by which gradients are divided in place, and `found_inf`: f32, one
                element, on that device, or None. Nothing is changed where `found_inf` is 1.0. The call keeps it.
        """
        raise NotImplementedError

    def apply_(  # noqa: PLR0913  what torch's operators take
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: Sequence[Sequence[Tensor]],
        steps: Sequence[Tensor],
        divisor: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> None:
        """Update lists of one dtype on one device; `steps` stand at this update already."""
        all_states = [[*state] for state in states] + [[] for _ in self.STATES[len(states) :]]
        more = {"grad_scale": divisor, "found_inf": found_inf, **vars(self)}
        self.operator([*params], [*grads], all_states, [*steps], more)


@dataclass(frozen=True)
class AdamRule(Rule):
    OPTIMIZERS = (Adam, AdamW)
    STATES = ("exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs")  # the last with `amsgrad`
    KERNELS = Kernels(
        0, "adam_kernel", ("beta1", "beta2", "eps", "weight_decay"), ("amsgrad", "maximize", "decay")
    )

    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    amsgrad: bool
    maximize: bool
    decoupled: bool  # weight decay beside the gradient, as AdamW

    @property
    def decay(self) -> str:
        return "none" if self.weight_decay == 0 else "decoupled" if self.decoupled else "gradient"

    @staticmethod
    def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
        beta1, beta2 = group["betas"]
        return {
            "lr": group["lr"],
            "beta1": beta1,
            "beta2": beta2,
            "eps": group["eps"],
            "weight_decay": group["weight_decay"],
            "amsgrad": group["amsgrad"],
            "maximize": group["maximize"],
            "decoupled": group["decoupled_weight_decay"],
        }

    @staticmethod
    def operator(
        params: list[Tensor], grads: list[Tensor], states: _States, steps: list[Tensor], more: dict[str, Any]
    ) -> None:
        update: Any = torch._fused_adamw_ if more.pop("decoupled") else torch._fused_adam_
        update(params, grads, *states, steps, **more)


@dataclass(frozen=True)
class SGDRule(Rule):
    OPTIMIZERS = (SGD,)
    STATES = ("momentum_buffer_list",)  # with `momentum`
    KERNELS = Kernels(
        1,
        "sgd_kernel",
        ("momentum", "dampening", "weight_decay"),
        ("momentum_phase", "nesterov", "maximize", "decays"),
    )
    COUNTS = False
    LATE_STATE = "momentum_buffer"

    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool
    maximize: bool
    is_first_step: bool = False  # the momentum is to be the gradient, whatever its memory holds

    @property
    def momentum_phase(self) -> str:
        return "none" if self.momentum == 0 else "begins" if self.is_first_step else "goes_on"

    @property
    def decays(self) -> bool:
        return self.weight_decay != 0

    @staticmethod
    def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "lr": group["lr"],
            "momentum": group["momentum"],
            "dampening": group["dampening"],
            "weight_decay": group["weight_decay"],
            "nesterov": group["nesterov"],
            "maximize": group["maximize"],
            "is_first_step": False,
        }

    @staticmethod
    def operator(
        params: list[Tensor], grads: list[Tensor], states: _States, steps: list[Tensor], more: dict[str, Any]
    ) -> None:
        torch._fused_sgd_(params, grads, states[0], **more)

    def apply_(  # noqa: PLR0913  as above
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: Sequence[Sequence[Tensor]],
        steps: Sequence[Tensor],
        divisor: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> None:
        if not params[0].is_cpu or params[0].dtype not in HALVES:
            super().apply_(params, grads, states, steps, divisor, found_inf)
            return
        # By copies in float32: torch's operator for the CPU leaves most elements of halves as they were.
        narrow = (params, *states)
        wide = [[tensor.float() for tensor in tensors] for tensors in narrow]
        super().apply_(wide[0], [grad.float() for grad in grads], wide[1:], steps, divisor, found_inf)
        for kept, new in zip(narrow, wide, strict=True):
            torch._foreach_copy_([*kept], new)


@dataclass(frozen=True)
class AdagradRule(Rule):
    OPTIMIZERS = (Adagrad,)
    STATES = ("state_sums",)
    KERNELS = Kernels(2, "adagrad_kernel", ("lr_decay", "eps", "weight_decay"), ("maximize", "decays"))
    NOTHING_LEFT = (False, False)

    lr_decay: float
    eps: float
    weight_decay: float
    maximize: bool

    @property
    def decays(self) -> bool:
        return self.weight_decay != 0

    @staticmethod
    def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "lr": group["lr"],
            "lr_decay": group["lr_decay"],
            "eps": group["eps"],
            "weight_decay": group["weight_decay"],
            "maximize": group["maximize"],
        }

    @staticmethod
    def operator(
        params: list[Tensor], grads: list[Tensor], states: _States, steps: list[Tensor], more: dict[str, Any]
    ) -> None:
        torch._fused_adagrad_(params, grads, states[0], steps, **more)


RULES: tuple[type[Rule], ...] = (AdamRule, SGDRule, AdagradRule)
