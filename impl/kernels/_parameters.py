"""Tensors that an update writes, and their division into work for the CPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import torch
from torch import Tensor

from impl.kernels._native.fused_step import UpdateMemory
from impl.kernels._storage_order import flat_view

# Longer parameters are updated in pieces, shorter ones in batches with concatenated gradients.
_LONG = 1 << 14
# Elements of a batch.
LONGEST_RUN = 1 << 17
# Elements of a piece for each thread.
_PIECE = 1 << 16


@dataclass(frozen=True)
class Parameters:
    """Tensors that an update writes: dense, on one device. Entries of one index have one layout."""

    params: Sequence[Tensor]  # tensors of one dtype
    # A list for each state of the rule, as long as `params`. All states have the parameters' dtype, or all have
    # `NARROW_STATES` beside f32 parameters.
    states: Sequence[Sequence[Tensor]]
    # Step counters, f32 and 0-dim, on that device. Empty if the rule has none.
    steps: Sequence[Tensor] = ()
    low_precision_params: Sequence[Tensor] = ()  # copies that get the new values, or empty

    @cached_property
    def memory(self) -> UpdateMemory:
        return UpdateMemory(self.params, self.states, self.low_precision_params, self.steps)

    def refresh_addresses(self) -> bool:
        """Look up the addresses. Return whether one has changed since the last call."""
        return self.memory.refresh_addresses()

    def written(self) -> list[Tensor]:
        return [*chain(self.params, *self.states, self.low_precision_params)]

    def count_write(self) -> None:
        """Increment the version counters of tensors that autograd may have saved, which are not states."""
        torch.autograd.graph.increment_version([*self.params, *self.low_precision_params])

    def at(self, *indices: int) -> Parameters:
        """Return the parameters at `indices` with all that belongs to them."""

        def select(tensors: Sequence[Tensor]) -> list[Tensor]:
            return [tensors[index] for index in indices] if tensors else []

        return Parameters(
            select(self.params),
            [select(state) for state in self.states],
            select(self.steps),
            select(self.low_precision_params),
        )

    def work_items(self) -> list[SmallParamBatch | LargeParam]:
        """Return the division into batches and large parameters. It is cached while addresses stay the same."""
        items = self._work_items
        if any(isinstance(item, LargeParam) and item.has_moved(self) for item in items):
            del self.__dict__["_work_items"]
            items = self._work_items
        return items

    @cached_property
    def _work_items(self) -> list[SmallParamBatch | LargeParam]:
        return list(_work_items(self))


@dataclass(frozen=True)
class SmallParamBatch:
    """Small parameters that one call of the operator updates."""

    indices: Sequence[int]
    params: list[Tensor]
    states: list[list[Tensor]]
    steps: list[Tensor]
    low_precision_params: list[Tensor]
    numels: list[int]


@dataclass(frozen=True)
class ParamPiece:
    start: int
    stop: int
    param: Tensor
    states: list[list[Tensor]]
    copy: Tensor | None


@dataclass(frozen=True)
class LargeParam:
    """A large parameter, in pieces in the order of memory."""

    index: int
    steps: list[Tensor]
    pieces: list[ParamPiece]
    addresses: list[int]  # addresses of the tensors that the pieces view
    width: int  # elements of a piece, which depend on the number of threads

    def has_moved(self, parameters: Parameters) -> bool:
        return self.width != piece_width() or self.addresses != _addresses(parameters, self.index)


def flat(tensor: Tensor) -> Tensor:
    view = flat_view(tensor)
    assert view is not None, "a tensor to update has gaps"
    return view


def _work_items(parameters: Parameters) -> Iterable[SmallParamBatch | LargeParam]:
    batch: list[int] = []
    filled = 0
    for index, param in enumerate(parameters.params):
        numel = param.numel()
        if numel > _LONG or not _are_contiguous(parameters, index):
            yield _large_param(parameters, index)
        elif numel:
            if filled + numel > LONGEST_RUN:
                yield _small_param_batch(parameters, batch)
                batch, filled = [], 0
            batch.append(index)
            filled += numel
    if batch:
        yield _small_param_batch(parameters, batch)


def _are_contiguous(parameters: Parameters, index: int) -> bool:
    return parameters.params[index].is_contiguous() and (
        not parameters.low_precision_params or parameters.low_precision_params[index].is_contiguous()
    )


def _small_param_batch(parameters: Parameters, indices: Sequence[int]) -> SmallParamBatch:
    def select(tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensors[index] for index in indices] if tensors else []

    params = select(parameters.params)
    return SmallParamBatch(
        indices,
        params,
        [select(state) for state in parameters.states],
        select(parameters.steps),
        select(parameters.low_precision_params),
        [param.numel() for param in params],
    )


def _large_param(parameters: Parameters, index: int) -> LargeParam:
    width = piece_width()
    params = flat(parameters.params[index]).split(width)
    states = [flat(state[index]).split(width) for state in parameters.states]
    copies = parameters.low_precision_params
    copy = flat(copies[index]).split(width) if copies else [None] * len(params)
    pieces = [
        ParamPiece(i * width, i * width + len(piece), piece, [[state[i]] for state in states], copy[i])
        for i, piece in enumerate(params)
    ]
    steps = [parameters.steps[index]] if parameters.steps else []
    return LargeParam(index, steps, pieces, _addresses(parameters, index), width)


def piece_width() -> int:
    return _PIECE * torch.get_num_threads()


def _addresses(parameters: Parameters, index: int) -> list[int]:
    copies = parameters.low_precision_params
    lists = (parameters.params, *parameters.states, *([copies] if copies else []))
    return [tensors[index].data_ptr() for tensors in lists]
