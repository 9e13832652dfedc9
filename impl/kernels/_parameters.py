"""What an update changes, and how the CPU walks it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from impl.kernels._native.fused_step import UpdateMemory
from impl.kernels._storage_order import flat_view

# Longer parameters are updated a piece at a time, shorter ones many at a time, their gradients joined.
_LONG = 1 << 14
# Elements joined at a time.
LONGEST_RUN = 1 << 17
# Elements of a piece for each thread.
_PIECE = 1 << 16


@dataclass(frozen=True)
class Parameters:
    """What an update changes: dense tensors of one dtype on one device; entries of one place have one layout."""

    params: Sequence[Tensor]
    states: Sequence[Sequence[Tensor]]  # as many lists as the rule asks for, each as long as `params`
    steps: Sequence[
        Tensor
    ] = ()  # f32, 0-dim, on that device: updates so far; empty if the rule does not count
    low_precision_params: Sequence[Tensor] = ()  # of the new parameters, in lower precision; or empty

    @cached_property
    def memory(self) -> UpdateMemory:
        return UpdateMemory(self.params, self.states, self.low_precision_params, self.steps)

    def have_moved(self) -> bool:
        """Whether one of these tensors has other memory than when this was last asked."""
        return self.memory.have_moved()

    def parts(self) -> list[Run | Long]:
        """How the CPU walks them, which takes longer to find out than to do: kept while memory stays where it is."""
        parts = self._parts
        if any(isinstance(part, Long) and part.has_moved(self) for part in parts):
            del self.__dict__["_parts"]
            parts = self._parts
        return parts

    @cached_property
    def _parts(self) -> list[Run | Long]:
        return list(_parts(self))


@dataclass(frozen=True)
class Run:
    """Short parameters, updated by one call of the operator."""

    places: Sequence[int]
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
class Long:
    """A long parameter in the order of memory."""

    place: int
    steps: list[Tensor]
    pieces: list[ParamPiece]
    addresses: list[int]  # of what the pieces are views of
    width: int  # of a piece, which goes by the number of threads

    def has_moved(self, parameters: Parameters) -> bool:
        return self.width != piece_width() or self.addresses != _addresses(parameters, self.place)


def flat(tensor: Tensor) -> Tensor:
    view = flat_view(tensor)
    assert view is not None, "a tensor that is to be updated has gaps"
    return view


def _parts(parameters: Parameters) -> Iterable[Run | Long]:
    run: list[int] = []
    filled = 0
    for place, param in enumerate(parameters.params):
        numel = param.numel()
        if numel > _LONG or not _are_contiguous(parameters, place):
            yield _long(parameters, place)
        elif numel:
            if filled + numel > LONGEST_RUN:
                yield _run(parameters, run)
                run, filled = [], 0
            run.append(place)
            filled += numel
    if run:
        yield _run(parameters, run)


def _are_contiguous(parameters: Parameters, place: int) -> bool:
    return parameters.params[place].is_contiguous() and (
        not parameters.low_precision_params or parameters.low_precision_params[place].is_contiguous()
    )


def _run(parameters: Parameters, places: Sequence[int]) -> Run:
    def picked(tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensors[place] for place in places] if tensors else []

    params = picked(parameters.params)
    return Run(
        places,
        params,
        [picked(state) for state in parameters.states],
        picked(parameters.steps),
        picked(parameters.low_precision_params),
        [param.numel() for param in params],
    )


def _long(parameters: Parameters, place: int) -> Long:
    width = piece_width()
    params = flat(parameters.params[place]).split(width)
    states = [flat(state[place]).split(width) for state in parameters.states]
    copies = parameters.low_precision_params
    copy = flat(copies[place]).split(width) if copies else [None] * len(params)
    pieces = [
        ParamPiece(i * width, i * width + len(piece), piece, [[state[i]] for state in states], copy[i])
        for i, piece in enumerate(params)
    ]
    steps = [parameters.steps[place]] if parameters.steps else []
    return Long(place, steps, pieces, _addresses(parameters, place), width)


def piece_width() -> int:
    return _PIECE * torch.get_num_threads()


def _addresses(parameters: Parameters, place: int) -> list[int]:
    copies = parameters.low_precision_params
    lists = (parameters.params, *parameters.states, *([copies] if copies else []))
    return [tensors[place].data_ptr() for tensors in lists]
