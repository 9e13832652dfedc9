"""One update of many parameters from gradients that are still scaled, in one pass over memory."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from impl.kernels._native import CODES, STATES, Column, List, NativeLibrary, NativeUpdate, Settings
from impl.kernels._native.memory import Addresses, KnownLayoutList, Tensors, memory_of, tensors_to_read
from impl.kernels._storage_order import laid_out_as
from impl.kernels._table import lie_apart, on_host
from impl.kernels.rules import FLAGS, NUMBERS, Rule

_SETTINGS = frozenset((*NUMBERS, *FLAGS)) - {"lr"}


@dataclass(frozen=True)
class _Places:
    """Where tensors lie that an update writes, and its counters."""

    numels: Column
    params: Column
    states: list[Column]
    low_precision_params: Column | None
    steps: Column | None
    starts: frozenset[int]  # of what is written
    are_contiguous: bool
    _beside: list[Column]  # the addresses that were last found to begin nothing that is written

    def are_read_beside(self, read: Tensors) -> bool:
        """Whether these gradients are as many and as long as what is written, and none begins where one of it does."""
        if read.form.numels.numbers != self.numels.numbers:
            return False
        if self._beside[0].numbers != read.addresses.numbers:
            if not self.starts.isdisjoint(read.addresses.numbers):
                return False
            self._beside[0] = read.addresses
        return True


class UpdateMemory:
    """The tensors that an update writes, as the library finds them."""

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
        self.lists = [params, *self._states, *([copies] if copies else [])]  # as long as each other
        self._lists = [*self.lists, *([steps] if steps else [])]
        self._addresses: Addresses | None = None
        self._places: _Places | None = None
        self._is_known = False  # whether `_places` was looked for since they moved

    def have_moved(self) -> bool:
        """Whether one has other memory than when this was last asked; True the first time."""
        if self._addresses is None:
            self._addresses = Addresses(chain.from_iterable(self._lists))
        elif not self._addresses.have_moved():
            return False
        self._is_known = False
        return True

    def columns(self) -> tuple[list[bytes], bytes]:
        """Return each list's addresses, and the counters', of when `have_moved` was last asked."""
        if self._addresses is None:
            self.have_moved()
        assert self._addresses is not None
        numbers, count = self._addresses.column.numbers, len(self.params)
        starts = range(0, count * len(self.lists), count)
        return [numbers[start : start + count].tobytes() for start in starts], numbers[
            count * len(self.lists) :
        ].tobytes()

    def places(self) -> _Places | None:
        """Where they lay when `have_moved` was last asked; None if the library cannot take them."""
        if not self._is_known:
            self.have_moved()
            self._places = self._look() if self._has_known_dtypes() else None
            self._is_known = True
        return self._places

    def _has_known_dtypes(self) -> bool:
        own = self.params[0].dtype
        return (
            own in CODES
            and all(tensor.dtype is own for state in self._states for tensor in state)
            and len(kinds := {copy.dtype for copy in self.low_precision_params}) <= 1
            and kinds <= CODES.keys()
            and all(step.dtype is torch.float32 for step in self.steps)
            and all(tensor.is_cpu for tensors in self._lists for tensor in tensors)
        )

    def _look(self) -> _Places | None:
        lists = self.lists
        columns = [column for tensors in lists if (column := memory_of(tensors)) is not None]
        if len(columns) < len(lists):
            return None
        numels = [param.numel() for param in self.params]
        if any([tensor.numel() for tensor in tensors] != numels for tensors in lists):
            return None
        written = [tensor for tensors in lists for tensor in tensors]
        addresses = [address for column in columns for address in column.numbers]
        starts = on_host(addresses)
        if not lie_apart(starts, starts + on_host([tensor.nbytes for tensor in written])):
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
            [Column(())],
        )


def fused_step(
    library: NativeLibrary, rule: Rule, memory: UpdateMemory, grads: Sequence[Tensor], factor: Tensor
) -> bool:
    """Update what `memory` holds by `rule` from gradients times `factor`, as `impl.kernels.fused_step_`.

    Args:
        grads: if they are `KnownLayoutList`, each of them is laid out as its parameter, and `memory` has not moved
            since it was asked.

    Returns:
        False if the library cannot take these tensors; nothing is changed then.
    Sync: none, but for a learning rate or factor on another device.
    """
    if not isinstance(grads, KnownLayoutList):
        memory.have_moved()
    places = memory.places()
    if places is None:
        return False
    if not isinstance(grads, KnownLayoutList) and not (
        places.are_contiguous and all(map(Tensor.is_contiguous, grads))
    ):
        grads = list(map(laid_out_as, memory.params, grads))
    read = tensors_to_read(grads)
    if read is None or not places.are_read_beside(read):
        return False
    own = CODES[memory.params[0].dtype]
    states = (List * STATES)(*[List(column.address, own) for column in places.states])
    copies = List()
    if places.low_precision_params is not None:
        copies = List(places.low_precision_params.address, CODES[memory.low_precision_params[0].dtype])
    update = NativeUpdate(
        _settings_of(rule),
        float(factor),
        List(places.params.address, own),
        read.list,
        states,
        copies,
        None if places.steps is None else places.steps.address,
    )
    library.fused_step(*library.lists(places.numels), byref(update))
    # For autograd, which saves parameters and their copies, and has never seen the states.
    torch.autograd.graph.increment_version([*memory.params, *memory.low_precision_params])
    return True


def _settings_of(rule: Rule) -> Settings:
    settings = Settings(rule=rule.KERNELS.native)
    for name, value in vars(rule).items():
        if name in _SETTINGS:
            setattr(settings, name, value)
    settings.lr = float(rule.lr)
    return settings
