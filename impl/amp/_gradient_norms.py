"""Norms of single gradients, which a fused step keeps on request, by parameter or by module."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from impl import kernels
from impl.amp._gradients import named_params
from impl.kernels import TensorList, to_device
from impl.optim._shards import Sharding


class GradientNorms:
    """Norms of this rank's gradients: f64, 0-dim, one for each parameter of an optimizer."""

    def __init__(self, params: Sequence[Tensor], norm_type: float, device: torch.device) -> None:
        self._params = params
        self._order = norm_type
        self._device = device
        self._by_grad: dict[int, Tensor] = {}
        self._by_param: dict[int, Tensor] = {}

    @functools.cached_property
    def _none(self) -> Tensor:
        """Norm of no elements."""
        return torch.full((), math.inf if self._order < 0 else 0.0, dtype=torch.float64, device=self._device)

    def room_for(self, grads: TensorList) -> Tensor:
        """Return a vector [T] f64 for T gradients on one device. The numbers that are written to it are their norms."""
        norm_T = torch.empty(len(grads.tensors), dtype=torch.float64, device=grads.tensors[0].device)
        self._by_grad.update(zip(map(id, grads.tensors), norm_T.unbind(), strict=True))
        return norm_T

    def assign(self, params_and_grads: Iterable[tuple[Sequence[Tensor], TensorList]]) -> None:
        """Give each parameter the norm of its gradient. Gradients without elements have none."""
        for params, grads in params_and_grads:
            for param, grad in zip(params, grads.tensors, strict=True):
                if id(grad) in self._by_grad:
                    self.set(param, self._by_grad[id(grad)])

    def set(self, param: Tensor, norm: Tensor) -> None:
        self._by_param[id(param)] = to_device(norm, self._device, torch.float64)

    def of_params(self) -> list[Tensor]:
        """Return the norms in the optimizer's order."""
        norms = [self._by_param.get(id(param)) for param in self._params]
        return [self._none if norm is None else norm for norm in norms]

    def vectors(
        self, shardings: Iterable[Sharding], sharding_of: Mapping[int, Sharding]
    ) -> dict[Sharding, Tensor]:
        """Return a vector over all parameters for each sharding, in which the others have the norm of no elements."""
        norms = [*zip(self._params, self.of_params(), strict=True)]
        return {
            sharding: torch.stack(
                [norm if sharding_of[id(param)] == sharding else self._none for param, norm in norms]
            )
            for sharding in shardings
        }

    def joint(self, norm_P: Tensor) -> Tensor:
        """Return the norm of all P parameters."""
        return _joined(norm_P, self._order)


def named_norms(
    optimizer: torch.optim.Optimizer,
    norms: Sequence[Tensor],
    norm_type: float,
    per: Literal["parameter", "module"],
) -> dict[str, Tensor]:
    """Return the norms by name of the parameter, or joined by name of the module that owns the parameters.

    Raises:
        ValueError: `per` is neither; or the parameters have no names, so that their modules are unknown; or two
            parameters have the same name; or the number of parameters differs.
    """
    if per not in ("parameter", "module"):
        raise ValueError(f"per is {per!r}; pass 'parameter' or 'module'")
    names = [name for name, _ in named_params(optimizer)]
    if len(names) != len(norms):
        raise ValueError(
            f"the last fused_step kept the norms of {len(norms)} parameters, and the optimizer has {len(names)} now; "
            "call gradient_norms(optimizer) before its parameters change"
        )
    if len(set(names)) < len(names):
        name = next(name for name in names if names.count(name) > 1)
        raise ValueError(
            f"two parameters of the optimizer have the name {name}; create it from named_parameters() of one module "
            "that contains both"
        )
    if per == "parameter":
        return dict(zip(names, norms, strict=True))
    if not all(group.get("param_names") for group in optimizer.param_groups):
        raise ValueError(
            "the optimizer does not know the names of its parameters; create it from model.named_parameters(), or pass "
            "per='parameter'"
        )
    by_module: dict[str, list[Tensor]] = {}
    for name, norm in zip(names, norms, strict=True):
        by_module.setdefault(name.rpartition(".")[0], []).append(norm)
    return {module: _joined(torch.stack(of_module), norm_type) for module, of_module in by_module.items()}


def _joined(norm_P: Tensor, norm_type: float) -> Tensor:
    # Norms of order 0 are counts, so add them.
    return kernels.total_norm(TensorList([norm_P]), norm_type or 1.0)
