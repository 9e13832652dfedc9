"""Norms of single parameters: of their gradients, and of their weights and updates."""

from __future__ import annotations

import functools
import math
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from impl import kernels
from impl.kernels import TensorList, to_device
from impl.optim._shards import UNSHARDED, Sharding, combine_norms, local_parts

# Elements that are copied together to take the norms of updates. Copies on the host stay in its caches.
_LONGEST_ON_HOST, _LONGEST = 1 << 20, 1 << 26


class ParamNorms:
    """Norms of this rank's part of something of each parameter, such as its gradient: f64, 0-dim."""

    def __init__(self, params: Sequence[Tensor], norm_type: float, device: torch.device) -> None:
        self._params = params
        self._order = norm_type
        self._device = device
        self._by_grad: dict[int, Tensor] = {}
        self._by_param: dict[int, Tensor] = {}

    @functools.cached_property
    def _empty_norm(self) -> Tensor:
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
        # Another tensor may have the id later.
        self._by_grad.clear()

    def measure(self, params: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        """Give each parameter the norm of its tensor. The tensors may be on several devices."""
        real = TensorList(
            [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]
        )
        filled = TensorList([tensor for tensor in real.tensors if tensor.numel()])
        for batch in filled.by_device().values():
            kernels.checked_norm(batch, self._order, norm_T=self.room_for(batch))
        self.assign([(params, real)])

    def set(self, param: Tensor, norm: Tensor) -> None:
        self._by_param[id(param)] = to_device(norm, self._device, torch.float64)

    def has(self, param: Tensor) -> bool:
        return id(param) in self._by_param

    def of_params(self) -> list[Tensor]:
        """Return the norms in the optimizer's order."""
        norms = [self._by_param.get(id(param)) for param in self._params]
        return [self._empty_norm if norm is None else norm for norm in norms]

    def vectors(self, order: Iterable[Sharding], shardings: Sequence[Sharding]) -> dict[Sharding, Tensor]:
        """Return `vectors_by_sharding` of the norms. `shardings` has one for each parameter."""
        return vectors_by_sharding(self.of_params(), self._empty_norm, order, shardings)

    def joint(self, norm_P: Tensor) -> Tensor:
        """Return the norm of all P parameters."""
        return join_norms(norm_P, self._order)


def join_norms(norm_P: Tensor, norm_type: float) -> Tensor:
    """Return the norm of numbers that are themselves norms of this order."""
    # Norms of order 0 are counts, so add them.
    return kernels.total_norm(TensorList([norm_P]), norm_type or 1.0)


def vectors_by_sharding(
    norms: Sequence[Tensor], empty_norm: Tensor, order: Iterable[Sharding], shardings: Sequence[Sharding]
) -> dict[Sharding, Tensor]:
    """Return a vector over all norms for each sharding in `order`, with `empty_norm` for those of another sharding."""
    pairs = [*zip(norms, shardings, strict=True)]
    return {
        sharding: torch.stack([norm if own == sharding else empty_norm for norm, own in pairs])
        for sharding in order
    }


class UpdateMeter:
    """L2 norms of an optimizer's parameters before a step, and of their changes.

    Parameters that the step leaves alone have the change 0, and as weights the norm 0 unless parameters are sharded.
    """

    def __init__(self, params: Sequence[Tensor], device: torch.device) -> None:
        self._params = params
        self._weights, self._changes = (ParamNorms(params, 2.0, device) for _ in range(2))

    @contextmanager
    def measuring(self, params: Sequence[Tensor], local_params: Sequence[Tensor]) -> Generator[None]:
        """Context manager that takes the norms of parameters, and of their changes inside. It copies them.

        Args:
            params: the optimizer's own tensors.
            local_params: their local tensors.
        """
        # The change of a low-precision parameter may have more bits than its dtype.
        copies = [
            local.to(torch.promote_types(local.dtype, torch.float32), copy=True) for local in local_params
        ]
        self._weights.measure(params, copies)
        yield
        if copies:
            torch._foreach_sub_(copies, [*local_params])
        self._changes.measure(params, copies)

    def batches(self, local_params: Sequence[Tensor]) -> Generator[list[int]]:
        """Yield the indices of parameters to change together, so that their copies take little memory."""
        longest = _LONGEST_ON_HOST if local_params[0].is_cpu else _LONGEST
        batch: list[int] = []
        numel = 0
        for index, param in enumerate(local_params):
            if batch and numel + param.numel() > longest:
                yield batch
                batch, numel = [], 0
            batch.append(index)
            numel += param.numel()
        yield batch

    def norms(self, shardings: Sequence[Sharding]) -> UpdateNorms:
        """Return the norms. `shardings` has one for each parameter, or is empty if none is sharded."""
        if shardings:
            self._measure_unchanged_weights()
        return UpdateNorms(self._weights.of_params(), self._changes.of_params(), shardings)

    def _measure_unchanged_weights(self) -> None:
        """Take the norms of weights that have no gradient here. Other ranks may have updated their shards of them."""
        params = [param for param in self._params if param.requires_grad and not self._weights.has(param)]
        self._weights.measure(params, local_parts(params))


@dataclass(frozen=True)
class UpdateNorms:
    """Norms of this rank's parts of parameters and their changes: f64, 0-dim. It refers to no parameter."""

    weights: Sequence[Tensor]
    changes: Sequence[Tensor]
    shardings: Sequence[Sharding]

    @functools.cached_property
    def unsharded(self) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """The norms of weights and changes of the unsharded model, the same on every rank.

        Collectives: those of `combine_norms` if parameters are sharded.
        """
        if not self.shardings:
            return self.weights, self.changes
        vectors = vectors_by_sharding(
            [*self.weights, *self.changes],
            torch.zeros_like(self.weights[0]),
            dict.fromkeys([UNSHARDED, *self.shardings]),
            [*self.shardings] * 2,
        )
        norm_2P, _ = combine_norms(vectors, 2.0)
        weight_P, change_P = norm_2P.chunk(2)
        return weight_P.unbind(), change_P.unbind()
