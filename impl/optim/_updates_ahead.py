"""Updates of offloaded parameters that run on the host while the backward still runs on the device.

The norm of all gradients is known last, and with it the factor of the update. So each update assumes that no gradient
is inf or nan and that the norm does not exceed the limit, and saves what it overwrites. In the same pass it takes the
gradients' squares for the norm. If the factor turns out to be another one, the step repeats the updates from the saved
values. If the step is skipped, they are restored.

After a step that was clipped or skipped, the next step only takes the squares ahead, because the next one is likely to
be clipped or skipped too.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer

from impl import kernels
from impl.kernels import ChunkSquares, HostCopy, Parameters, Rule, TensorList, UpdateAhead, UpdateBackend
from impl.optim._held_gradients import ShardedHolder, holders_of_any
from impl.optim._optimizers import params_of
from impl.optim._shards import UNSHARDED, Sharding, local_part, shardings_of
from impl.optim._step_checks import register_step_check

# Units whose gradients are on their way, so that the device has work while the host updates an earlier unit.
_MOST_WAITING = 2

_open: WeakSet[Optimizer] = WeakSet()  # optimizers whose `UpdatesAhead` receives gradients

_Key = tuple[ShardedHolder, Hashable]  # a holder, and a part of its parameters


class AppliedUpdate(Protocol):
    """Update of a step, as `impl.optim._fused_updates.Update`."""

    @property
    def params(self) -> Sequence[Tensor]: ...
    @property
    def parameters(self) -> Parameters: ...
    @property
    def grads(self) -> TensorList: ...


@dataclass(frozen=True)
class _Kind:
    """Properties that parameters share if they are updated together."""

    group: int  # index
    dtype: torch.dtype
    grad_dtype: torch.dtype
    power: int  # the joint norm has chunks of 2**power elements
    cast_dtype: torch.dtype | None = None  # dtype in which the update stores the parameters too


_BatchKey = tuple[_Kind, tuple[int, ...]]  # ids of the parameters


class _Batch:
    """Parameters of one kind and one unit."""

    def __init__(
        self,
        params: list[Tensor],
        states: list[list[Tensor]],
        steps: list[Tensor],
        casts: list[Tensor],
        power: int,
    ) -> None:
        self.params = params
        self.casts = casts  # parameters in `cast_dtype`, or empty
        self.power = power
        self.grads = TensorList([])
        self._versions: list[int] = []
        self._writes: list[int] = []  # writes to each parameter before the update
        self._locals = [local_part(param) for param in params]
        self._states, self._steps = states, steps
        # T = parameters of the batch
        self._step_T = torch.zeros(len(steps), dtype=torch.float32, device="cpu")
        self.update = UpdateAhead(Parameters(self._locals, states, self._step_T.unbind(), casts))

    def has(
        self,
        params: Sequence[Tensor],
        states: Sequence[Sequence[Tensor]],
        steps: Sequence[Tensor],
        casts: Sequence[Tensor],
    ) -> bool:
        """Return whether these are still the tensors of the batch."""
        return _addresses([map(local_part, params), *states, steps, casts]) == _addresses(
            [self._locals, *self._states, self._steps, self.casts]
        )

    def take(self, grads: list[Tensor]) -> None:
        self.grads = TensorList(grads)
        self._versions = [grad._version for grad in grads]

    def apply(self, rule: Rule, factor: float) -> dict[int, ChunkSquares] | None:
        if self._steps:
            torch.stack(self._steps, out=self._step_T)
            self._step_T += 1
        self._writes = self._count_writes()
        return self.update.apply(rule, self.grads, factor, self.power)

    def gradients_are_unchanged(self) -> bool:
        """Return whether `.grad` still has the gradients that were taken."""
        triples = zip(self.params, self.grads.tensors, self._versions, strict=True)
        # Operators on a DTensor, which is new in `.grad`, count in its own version.
        return all(
            param.grad is not None
            and (now := local_part(param.grad)).data_ptr() == grad.data_ptr()
            and (now is param.grad or not param.grad._version)
            and now.numel() == grad.numel()
            and now._version == version
            for param, grad, version in triples
        )

    def casts_are_current(self) -> bool:
        """Return whether nothing but the step has written to the parameters, as a hook after it may have done."""
        # The step counts a write when it keeps the update, and a hook of FSDP after it another one.
        return self._count_writes() == [count + 2 for count in self._writes]

    def _count_writes(self) -> list[int]:
        pairs = zip(self.params, self._locals, strict=True)
        return [param._version + (local._version if local is not param else 0) for param, local in pairs]

    def matches(self, parameters: Parameters, indices: Sequence[int]) -> bool:
        """Return whether a step would update the same tensors, with counters of the same values."""
        now = [[tensors[index] for index in indices] for tensors in (parameters.params, *parameters.states)]
        steps = [parameters.steps[index] for index in indices] if parameters.steps else []
        return _addresses(now) == _addresses([self._locals, *self._states]) and torch.equal(
            torch.stack(steps) if steps else self._step_T, self._step_T
        )


def _addresses(lists: Sequence[Any]) -> list[list[int]]:
    return [[tensor.data_ptr() for tensor in tensors] for tensors in lists]


class _Record:
    """State of an optimizer between its steps."""

    def __init__(self) -> None:
        self.batches: dict[_BatchKey, _Batch] = {}
        self.is_confident = True  # whether the last step had the factor that was assumed

    def forget(self, key: _BatchKey) -> None:
        """Drop the batches that share a parameter with those of `key`, so that each value is saved at most once."""
        params = set(key[1])
        self.batches = {other: batch for other, batch in self.batches.items() if params.isdisjoint(other[1])}


_records: WeakKeyDictionary[Optimizer, _Record] = WeakKeyDictionary()


class UpdatesAhead:
    """Updates of one step of an optimizer, which receives gradients from `begin` to `end`.

    Args:
        optimizer: owns the parameters.
        rule: arithmetic of its fused update, or None if it has none.
        factor: the factor of scaled gradients that is assumed: a float, or a copy of it, or None if it is not known.
        max_norm: limit of the norm of unscaled gradients.
        casts_params: also store parameters in the dtype that they are gathered in, for the next gathers.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        rule: type[Rule] | None,
        factor: HostCopy | float | None,
        max_norm: float,
        *,
        casts_params: bool,
    ) -> None:
        self._optimizer = optimizer
        self._rule = rule
        self._assumed = factor
        self._factor: float | None = factor if isinstance(factor, float) else None
        self._max_norm = max_norm
        self._casts_params = casts_params
        self._record = _records.setdefault(optimizer, _Record())
        # A step that is not taken finds out nothing else.
        self._was_confident, self._record.is_confident = self._record.is_confident, False
        self._holders: list[ShardedHolder] = []
        self._queue: deque[tuple[_Key, Sequence[tuple[Tensor, Tensor]], Callable[[], None]]] = deque()
        self._batches: dict[_Key, list[_Batch]] = {}
        self._received: set[_Key] = set()
        self._gathered_again: set[_Key] = set()  # parameters that only the step may change
        self._groups = {
            id(param): number
            for number, group in enumerate(optimizer.param_groups)
            for param in group["params"]
        }
        self._powers: dict[int, int] = {}
        self._square = 0.0  # sum of the squares so far
        self._finished: set[_Batch] = set()  # batches whose update is that of the step
        self.squares: dict[int, ChunkSquares] = {}  # keys: addresses of gradients
        self.kept_numel = self.undone_numel = 0  # elements whose early update was kept or not

    def begin(self) -> None:
        """Receive gradients from now on.

        Raises:
            RuntimeError: the gradients of a parameter are received by another object.
            NotImplementedError, ValueError: as `shardings_of`.
        """
        params = params_of(self._optimizer)
        holders = holders_of_any(params)
        if self._optimizer in _open or any(holder.receiver is not None for holder in holders):
            raise RuntimeError(
                "overlapped_step() is being called inside of another overlapped_step() of the same parameters; leave "
                "that region first"
            )
        self._powers = _powers_of(params) if holders else {}
        register_step_check(check_closed)
        _open.add(self._optimizer)
        self._holders = holders
        for holder in holders:
            holder.receiver = self

    def end(self) -> None:
        """Receive no more gradients. Undo updates whose gradients have changed since."""
        self._close()
        while self._queue:
            self._handle_next()
        for batch in self._all_batches():
            if not batch.gradients_are_unchanged():
                self._undo(batch)

    def _all_batches(self) -> list[_Batch]:
        return [batch for batches in self._batches.values() for batch in batches]

    def _close(self) -> None:
        _open.discard(self._optimizer)
        for holder in self._holders:
            holder.receiver = None
        self._holders = []

    def receive(
        self,
        holder: ShardedHolder,
        part: Hashable,
        grads: Sequence[tuple[Tensor, Tensor]],
        wait: Callable[[], None],
    ) -> None:
        key = holder, part
        if key in self._received:
            self._drop(key)
            return
        self._received.add(key)
        self._queue.append((key, grads, wait))
        while len(self._queue) > _MOST_WAITING:
            self._handle_next()

    def _drop(self, key: _Key) -> None:
        """Leave parameters to the step, because their gradients are not those that were received."""
        self._queue = deque(waiting for waiting in self._queue if waiting[0] != key)
        for batch in self._batches.pop(key, ()):
            self._undo(batch)

    def before_gather(self, holder: ShardedHolder) -> None:
        keys = [key for key in self._received if key[0] is holder]
        self._gathered_again.update(keys)
        for batch in [batch for key in keys for batch in self._batches.get(key, ())]:
            if batch.update.is_applied:
                batch.update.undo()
                self.undone_numel += _numel(batch)

    def _handle_next(self) -> None:
        key, grads, wait = self._queue.popleft()
        wait()
        casts: Mapping[int, Tensor] = {}
        if self._casts_params and self._rule is not None:
            casts = key[0].cast_shards({id(param) for param, _ in grads})
        self._batches[key] = self._batches_of(grads, casts)
        for batch in self._batches[key]:
            self._handle(batch, may_update=key not in self._gathered_again)

    def _handle(self, batch: _Batch, *, may_update: bool) -> None:
        """Update a batch, or only take its squares if the step is likely to have another factor."""
        squares = None
        rule, factor = self._rule_of(batch), self._known_factor()
        if may_update and rule is not None and factor is not None and self._is_likely(factor):
            squares = batch.apply(rule, factor)
        if squares is None:
            squares = kernels.squares_of_chunks(batch.grads, batch.power)
        for address, tensor_squares in (squares or {}).items():
            self.squares[address] = tensor_squares
            self._square += sum(tensor_squares.sums)

    def _is_likely(self, factor: float) -> bool:
        """Return whether the step may have the assumed factor, as far as is known."""
        return self._was_confident and math.sqrt(self._square) * factor <= self._max_norm

    def _known_factor(self) -> float | None:
        if self._factor is None and isinstance(self._assumed, HostCopy):
            numbers = self._assumed.numbers()
            self._factor = None if numbers is None else numbers[0]
        return self._factor

    def _rule_of(self, batch: _Batch) -> Rule | None:
        group = self._optimizer.param_groups[self._groups[id(batch.params[0])]]
        if self._rule is None or isinstance(group["lr"], Tensor):
            return None
        return self._rule(**self._rule.settings_of(group))

    def _batches_of(
        self, grads: Sequence[tuple[Tensor, Tensor]], casts: Mapping[int, Tensor]
    ) -> list[_Batch]:
        by_kind: dict[_Kind, list[tuple[Tensor, Tensor]]] = {}
        for param, grad in grads:
            if id(param) in self._groups and grad.numel() and grad.is_cpu and id(param) in self._powers:
                cast_dtype = casts[id(param)].dtype if id(param) in casts else None
                group, power = self._groups[id(param)], self._powers[id(param)]
                kind = _Kind(group, param.dtype, grad.dtype, power, cast_dtype)
                by_kind.setdefault(kind, []).append((param, grad))
        batches: list[_Batch] = []
        for kind, pairs in by_kind.items():
            batch = self._batch_of(kind, [param for param, _ in pairs], casts)
            if batch is not None:
                batch.take([grad for _, grad in pairs])
                batches.append(batch)
        return batches

    def _batch_of(self, kind: _Kind, params: list[Tensor], casts: Mapping[int, Tensor]) -> _Batch | None:
        """Return the batch of these parameters, or None if they have no states yet."""
        group = self._optimizer.param_groups[kind.group]
        keys = () if self._rule is None else self._rule.state_keys(group)
        states: list[list[Any]] = [
            [self._optimizer.state.get(param, {}).get(key) for param in params] for key in keys
        ]
        counts = self._rule is not None and self._rule.COUNTS
        steps = [self._optimizer.state.get(param, {}).get("step") for param in params] if counts else []
        if not all(isinstance(value, Tensor) for values in (*states, steps) for value in values):
            return None
        if not all(step.is_cpu and step.dtype is torch.float32 for step in steps):
            return None
        local_states = [list(map(local_part, state)) for state in states]
        own_casts = [] if kind.cast_dtype is None else [casts[id(param)] for param in params]
        key = kind, tuple(map(id, params))
        batch = self._record.batches.get(key)
        if batch is None or not batch.has(params, local_states, steps, own_casts):
            self._record.forget(key)
            batch = _Batch(params, local_states, steps, own_casts, kind.power)
            self._record.batches[key] = batch
        return batch

    def finish(self, update: AppliedUpdate, rule: Rule, factor: Tensor) -> UpdateBackend:
        """Do the same as `impl.kernels.fused_step_`, for a step that is taken, with the updates so far."""
        indices = {id(param): index for index, param in enumerate(update.params)}
        is_rest = [True] * len(indices)
        number = float(factor)
        self._record.is_confident = number == self._known_factor()
        for batch in self._all_batches():
            if not batch.update.is_applied or id(batch.params[0]) not in indices:
                continue
            in_batch = [indices[id(param)] for param in batch.params if id(param) in indices]
            if len(in_batch) < len(batch.params) or not batch.matches(update.parameters, in_batch):
                self._undo(batch)
                continue
            if batch.update.is_by(rule, number):
                batch.update.keep()
                self.kept_numel += _numel(batch)
            else:
                batch.update.redo(rule, batch.grads, number)
                self.undone_numel += _numel(batch)
            self._finished.add(batch)
            for index in in_batch:
                is_rest[index] = False
        rest = [index for index, is_so in enumerate(is_rest) if is_so]
        if not rest:
            return kernels.NATIVE
        if len(rest) == len(indices):
            return kernels.fused_step_(rule, update.parameters, update.grads, factor, None)
        grads = TensorList([update.grads.tensors[index] for index in rest])
        return kernels.fused_step_(rule, update.parameters.at(*rest), grads, factor, None)

    def record_cast_params(self) -> None:
        """Make the next gathers read the casts of parameters that `finish` has updated. Call it after the step."""
        for (holder, _), batches in self._batches.items():
            current = [batch for batch in batches if batch in self._finished and batch.casts_are_current()]
            params = {id(param) for batch in current if batch.casts for param in batch.params}
            if params:
                holder.record_cast_shards(params)

    def undo(self) -> None:
        """Undo the updates that were not kept, and receive no more gradients."""
        self._close()
        self._queue.clear()
        for batch in self._all_batches():
            self._undo(batch)
        self._batches.clear()

    def _undo(self, batch: _Batch) -> None:
        for grad in batch.grads.tensors:
            self.squares.pop(grad.data_ptr(), None)
        if batch.update.is_applied:
            batch.update.undo()
            self.undone_numel += _numel(batch)
        batch.grads = TensorList([])


def _numel(batch: _Batch) -> int:
    return sum(grad.numel() for grad in batch.grads.tensors)


def _powers_of(params: Sequence[Tensor]) -> dict[int, int]:
    """Return for each parameter, by `id`, the `power` of its kind: the joint norm has chunks of 2**power elements.

    If all trained parameters get a gradient, `impl.kernels.checked_norm` has the same chunks and uses their squares.
    """
    shardings = shardings_of(params) or [UNSHARDED] * len(params)
    totals: dict[Sharding, int] = {}
    on_host = [
        (param, sharding)
        for param, sharding in zip(params, shardings, strict=True)
        if param.requires_grad and param.is_cpu
    ]
    for param, sharding in on_host:
        totals[sharding] = totals.get(sharding, 0) + local_part(param).numel()
    return {id(param): kernels.chunk_power(totals[sharding]) for param, sharding in on_host}


def check_closed(optimizer: Optimizer) -> None:
    """Raise RuntimeError if the optimizer's `UpdatesAhead` receives gradients."""
    if optimizer in _open:
        raise RuntimeError(
            "the optimizer was stepped inside of overlapped_step(), which steps it when the region ends; remove the "
            "other step"
        )
