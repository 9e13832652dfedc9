"""Update rules: states, hyperparameters, arithmetic and kernels of every optimizer with a fused update.

`RULES` lists them. `impl.optim` reads a rule's optimizers, lists and settings, and the CPU library and Triton's
launcher read the numbers that a kernel gets. The arithmetic is torch's operator, which is the reference of every
backend.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from impl.kernels._lists import HALVES

# Settings of all rules, in the order of `struct settings` in fused_step.c.
NUMBERS = ("lr", "weight_decay", "eps", "beta1", "beta2", "momentum", "dampening", "lr_decay")
FLAGS = ("maximize", "decoupled", "nesterov", "is_first_step")
# Result of `tandem_interface` in fused_step.c. Raise it with these, and with the arguments of any library function.
INTERFACE = 7


# Dtype that all states of f32 parameters may have instead of f32. They are computed in f32 and rounded when stored.
NARROW_STATES = torch.bfloat16

_States = Sequence[list[Tensor]]
_Keywords = dict[str, Any]


class RuleKernels(NamedTuple):
    """A rule's kernels, and the attributes that Triton's kernel gets."""

    native: int  # member of `enum rule` in fused_step.c
    triton: str  # name in `_triton/rules.py`
    settings: tuple[str, ...]  # scalar arguments after the learning rate, in order
    flags: tuple[str, ...]  # compile-time constants, upper case in the kernel


@dataclass(frozen=True)
class Rule:
    """Update of the parameters of a group, with the group's hyperparameters."""

    OPTIMIZERS: ClassVar[tuple[type[Optimizer], ...]]
    STATES: ClassVar[tuple[str, ...]]  # list names of `_init_group`, in the operator's order
    KERNELS: ClassVar[RuleKernels]
    COUNTS: ClassVar[bool] = True  # whether it has step counters
    # Name of the state in the first list that is None before the first update.
    LATE_STATE: ClassVar[str | None] = None
    NOTHING_LEFT: ClassVar[object] = False  # result of `_init_group` that leaves `step` nothing to do

    lr: float | Tensor

    @staticmethod
    def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
        """Return the rule's hyperparameters, from a parameter group."""
        raise NotImplementedError

    @staticmethod
    def state_keys(group: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the keys of a parameter's states in `optimizer.state`, in the order of `STATES`."""
        raise NotImplementedError

    @staticmethod
    def operator(
        params: list[Tensor], grads: list[Tensor], states: _States, steps: list[Tensor], keywords: _Keywords
    ) -> None:
        """Call torch's fused operator.

        Args:
            states: one list for each of `STATES`, or an empty one.
            keywords: the settings, `grad_scale`, which gradients are divided by in place, and `found_inf`. These two
                are f32, one element, on that device, or None. If `found_inf` is 1.0, nothing is changed. The dict may
                be modified.
        """
        raise NotImplementedError

    def apply_(  # noqa: PLR0913  arguments of torch's operators
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: Sequence[Sequence[Tensor]],
        steps: Sequence[Tensor],
        divisor: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> None:
        """Update lists on one device, of one dtype except narrow states. `steps` already count this update."""
        all_states = [[*state] for state in states] + [[] for _ in self.STATES[len(states) :]]
        keywords = {"grad_scale": divisor, "found_inf": found_inf, **vars(self)}
        if not states or states[0][0].dtype is params[0].dtype:
            self.operator([*params], [*grads], all_states, [*steps], keywords)
            return
        # torch's operators take narrow states on CUDA only, from torch 2.15 on.
        wide = [[tensor.to(params[0].dtype) for tensor in state] for state in all_states]
        self.operator([*params], [*grads], wide, [*steps], keywords)
        for state, new in zip(states, wide, strict=False):
            torch._foreach_copy_([*state], new)


@dataclass(frozen=True)
class AdamRule(Rule):
    OPTIMIZERS = (Adam, AdamW)
    STATES = ("exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs")  # the last only if `amsgrad`
    KERNELS = RuleKernels(
        0, "adam_kernel", ("beta1", "beta2", "eps", "weight_decay"), ("amsgrad", "maximize", "decay")
    )

    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    amsgrad: bool
    maximize: bool
    decoupled: bool  # decoupled weight decay, like AdamW

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
    def state_keys(group: Mapping[str, Any]) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else []))

    @staticmethod
    def operator(
        params: list[Tensor], grads: list[Tensor], states: _States, steps: list[Tensor], keywords: _Keywords
    ) -> None:
        update: Any = torch._fused_adamw_ if keywords.pop("decoupled") else torch._fused_adam_
        update(params, grads, *states, steps, **keywords)


@dataclass(frozen=True)
class SGDRule(Rule):
    OPTIMIZERS = (SGD,)
    STATES = ("momentum_buffer_list",)  # filled if `momentum` is not 0
    KERNELS = RuleKernels(
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
    # If set, the momentum becomes the gradient, for any contents of its memory.
    is_first_step: bool = False

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
    def state_keys(group: Mapping[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] else ()

    @staticmethod
    def operator(
        params: list[Tensor], grads: list[Tensor], states: _States, steps: list[Tensor], keywords: _Keywords
    ) -> None:
        torch._fused_sgd_(params, grads, states[0], **keywords)

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
        # Use float32 copies, because torch's CPU operator does not update most elements of halves.
        narrow = (params, *states)
        wide = [[tensor.float() for tensor in tensors] for tensors in narrow]
        super().apply_(wide[0], [grad.float() for grad in grads], wide[1:], steps, divisor, found_inf)
        for tensors, new in zip(narrow, wide, strict=True):
            torch._foreach_copy_([*tensors], new)


@dataclass(frozen=True)
class AdagradRule(Rule):
    OPTIMIZERS = (Adagrad,)
    STATES = ("state_sums",)
    KERNELS = RuleKernels(2, "adagrad_kernel", ("lr_decay", "eps", "weight_decay"), ("maximize", "decays"))
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
    def state_keys(group: Mapping[str, Any]) -> tuple[str, ...]:
        del group
        return ("sum",)

    @staticmethod
    def operator(
        params: list[Tensor], grads: list[Tensor], states: _States, steps: list[Tensor], keywords: _Keywords
    ) -> None:
        torch._fused_adagrad_(params, grads, states[0], steps, **keywords)


RULES: tuple[type[Rule], ...] = (AdamRule, SGDRule, AdagradRule)
