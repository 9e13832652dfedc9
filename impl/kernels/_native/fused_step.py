"""Update of many parameters from gradients that are still scaled, in one pass over memory."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from ctypes import byref
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from impl.kernels._native import NATIVE_CODES, STATES, Column, List, NativeLibrary, NativeUpdate, Settings
from impl.kernels._native.memory import Addresses, TensorList, Tensors, memory_of
from impl.kernels._native.norm import ChunkSquares
from impl.kernels._storage_order import match_layout
from impl.kernels._table import are_disjoint, host_int64
from impl.kernels.rules import FLAGS, NARROW_STATES, NUMBERS, Rule

_SETTINGS = frozenset((*NUMBERS, *FLAGS)) - {"lr"}


@dataclass
class _Places:
    """Addresses of the tensors that an update writes, and of its step counters. Only `checked` is assigned later."""

    numels: Column
    params: Column
    states: list[Column]
    low_precision_params: Column | None
    steps: Column | None
    starts: frozenset[int]  # addresses of all written tensors
    are_contiguous: bool
    # Addresses of the last gradients that passed the check.
    checked: Column = field(default_factory=lambda: Column(()))

    def are_disjoint_from(self, grads: Tensors) -> bool:
        """Return whether the gradients have the sizes of the parameters, and no address of a written tensor."""
        if grads.layout.numels.numbers != self.numels.numbers:
            return False
        if self.checked.numbers != grads.addresses.numbers:
            if not self.starts.isdisjoint(grads.addresses.numbers):
                return False
            self.checked = grads.addresses
        return True


class KnownPlaces(NamedTuple):
    """Result of `UpdateMemory.places`, without the tensors."""

    # Addresses of all tensors that an update writes, and of its step counters.
    addresses: array[int]
    places: _Places | None


class UpdateMemory:
    """Tensors that an update writes, with their addresses for the library."""

    def __init__(
        self,
        params: Sequence[Tensor],
        states: Sequence[Sequence[Tensor]],
        copies: Sequence[Tensor],
        steps: Sequence[Tensor],
    ) -> None:
        self.params = params
        self.low_precision_params = copies
        self._states = [state for state in states if state]
        self.steps = steps
        self.updated = [params, *self._states]  # lists of equal length
        self.lists = [*self.updated, *([copies] if copies else [])]
        self._lists = [*self.lists, *([steps] if steps else [])]
        self._addresses: Addresses | None = None
        self._places: _Places | None = None
        self._is_known = False  # whether `_places` is up to date

    @property
    def state_dtype(self) -> torch.dtype:
        """Dtype of all states, or of the parameters if there are no states."""
        return (self._states[0] if self._states else self.params)[0].dtype

    def refresh_addresses(self) -> bool:
        """Look up the addresses. Return whether one has changed since the last call. The first call returns True."""
        if self._addresses is None:
            self._addresses = Addresses(chain.from_iterable(self._lists))
        elif not self._addresses.refresh():
            return False
        self._is_known = False
        return True

    def columns(self) -> tuple[list[bytes], bytes]:
        """Return the addresses of each list and of the counters at the last call of `refresh_addresses`."""
        if self._addresses is None:
            self.refresh_addresses()
        assert self._addresses is not None
        numbers, count = self._addresses.column.numbers, len(self.params)
        starts = range(0, count * len(self.lists), count)
        return [numbers[start : start + count].tobytes() for start in starts], numbers[
            count * len(self.lists) :
        ].tobytes()

    def places(self) -> _Places | None:
        """Return the addresses at the last `refresh_addresses`, or None if the library does not support the tensors."""
        if not self._is_known:
            self.refresh_addresses()
            self._places = self._find_places() if self._has_known_dtypes() else None
            self._is_known = True
        return self._places

    def known_places(self) -> KnownPlaces | None:
        """Return the places if they were looked up, for `reuse`."""
        if self._addresses is None or not self._is_known:
            return None
        return KnownPlaces(self._addresses.column.numbers, self._places)

    def reuse(self, known: KnownPlaces) -> None:
        """Take over places of other tensors, with the same dtypes, shapes and strides, if the addresses are equal."""
        self.refresh_addresses()
        assert self._addresses is not None
        if self._addresses.column.numbers == known.addresses:
            self._places, self._is_known = known.places, True

    def _has_known_dtypes(self) -> bool:
        param_dtype, state_dtype = self.params[0].dtype, self.state_dtype
        return (
            param_dtype in NATIVE_CODES
            and (
                state_dtype is param_dtype or (state_dtype is NARROW_STATES and param_dtype is torch.float32)
            )
            and all(tensor.dtype is state_dtype for state in self._states for tensor in state)
            and len(copy_dtypes := {copy.dtype for copy in self.low_precision_params}) <= 1
            and copy_dtypes <= NATIVE_CODES.keys()
            and all(step.dtype is torch.float32 for step in self.steps)
            and all(tensor.is_cpu for tensors in self._lists for tensor in tensors)
        )

    def _find_places(self) -> _Places | None:
        lists = self.lists
        columns = [column for tensors in lists if (column := memory_of(tensors)) is not None]
        if len(columns) < len(lists):
            return None
        numels = [param.numel() for param in self.params]
        if any([tensor.numel() for tensor in tensors] != numels for tensors in lists):
            return None
        written = [tensor for tensors in lists for tensor in tensors]
        addresses = [address for column in columns for address in column.numbers]
        starts = host_int64(addresses)
        if not are_disjoint(starts, starts + host_int64([tensor.nbytes for tensor in written])):
            return None
        counted = 1 + len(self._states)
        return _Places(
            Column(numels),
            columns[0],
            columns[1:counted],
            columns[counted] if self.low_precision_params else None,
            Column([step.data_ptr() for step in self.steps]) if self.steps else None,
            frozenset(address for address, tensor in zip(addresses, written, strict=True) if tensor.numel()),
            all(map(Tensor.is_contiguous, self.params)),
        )


@dataclass(frozen=True)
class SavedTensors:
    """Memory for the contents of an update's parameters and states.

    Args:
        lists: tensors like those of `UpdateMemory.updated`.
    """

    lists: Sequence[Sequence[Tensor]]

    @cached_property
    def columns(self) -> list[Column]:
        return [Column(map(Tensor.data_ptr, tensors)) for tensors in self.lists]


@dataclass(frozen=True)
class UpdateExtras:
    """Additional work of an update."""

    saved: SavedTensors
    restores: bool = False  # begins from the saved contents, and saves nothing
    squares: ChunkSquares | None = None  # overwritten by those of the gradients


def fused_step(  # noqa: PLR0913  the optional argument is of one caller
    library: NativeLibrary,
    rule: Rule,
    memory: UpdateMemory,
    grads: TensorList,
    factor: Tensor | float,
    extras: UpdateExtras | None = None,
) -> bool:
    """Update the tensors of `memory` by `rule` from gradients times `factor`, like `impl.kernels.fused_step_`.

    The version counters of the parameters stay the same.

    Args:
        grads: if their layout is known, it is that of the parameters, and the addresses of `memory` have not changed
            since its `refresh_addresses` was called.

    Returns:
        False, without a change, if the library does not support the tensors.
    Sync: none, unless the learning rate or factor is on another device.
    """
    if grads.layout is None:
        memory.refresh_addresses()
    places = memory.places()
    if places is None:
        return False
    if grads.layout is None and not (places.are_contiguous and all(map(Tensor.is_contiguous, grads.tensors))):
        grads = TensorList(list(map(match_layout, memory.params, grads.tensors)))
    grads_memory = grads.memory
    if grads_memory is None or not places.are_disjoint_from(grads_memory):
        return False
    param_code, state_code = NATIVE_CODES[memory.params[0].dtype], NATIVE_CODES[memory.state_dtype]
    states = (List * STATES)(*[List(column.address, state_code) for column in places.states])
    copies = List()
    if places.low_precision_params is not None:
        copies = List(places.low_precision_params.address, NATIVE_CODES[memory.low_precision_params[0].dtype])
    update = NativeUpdate(
        _settings_of(rule),
        float(factor),
        List(places.params.address, param_code),
        grads_memory.list,
        states,
        copies,
        None if places.steps is None else places.steps.address,
    )
    if extras is not None:
        pairs = zip(extras.saved.columns, [param_code, *[state_code] * len(places.states)], strict=True)
        update.before = (List * (1 + STATES))(*[List(column.address, code) for column, code in pairs])
        update.restores = extras.restores
    power = None
    if extras is not None and extras.squares is not None:
        power, update.sums = extras.squares.power, extras.squares.sums.buffer_info()[0]
    library.fused_step(*library.lists(places.numels, power), byref(update))
    return True


def _settings_of(rule: Rule) -> Settings:
    settings = Settings(rule=rule.KERNELS.native)
    for name, value in vars(rule).items():
        if name in _SETTINGS:
            setattr(settings, name, value)
    settings.lr = float(rule.lr)
    return settings
