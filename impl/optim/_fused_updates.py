"""Fused updates of an optimizer: rules from its groups, and lists from its list cache.

Optimizers with a fused update are recognised by their exact type, because a subclass may override `step`. Their
settings `foreach`, `fused` and `capturable` do not matter.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, repeat
from operator import is_
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from impl._names import optimizer_name
from impl.kernels import (
    KERNEL_DTYPES,
    NARROW_STATES,
    PLAIN_TYPES,
    RULES,
    Parameters,
    Rule,
    TensorList,
    UpdateBackend,
    flag_if_free_to_read,
    fused_step_,
    is_plain_strided,
    is_profiled,
    to_device,
)
from impl.optim._joined_buckets import JoinedBucket, JoinedBuckets
from impl.optim._list_cache import Bucket, ListCache
from impl.optim._param_norms import UpdateMeter
from impl.optim._prepared_updates import Prepared, PreparedShards
from impl.optim._shards import is_distributed, local_part, local_parts
from impl.optim._step_checks import call_between_hooks, has_step_pre_hooks
from impl.optim._updates_ahead import UpdatesAhead

_TORCH_OPTIM_FOLDER = str(Path(torch.optim.__file__).parent)


_RULE_OF: dict[type[Optimizer], type[Rule]] = {cls: rule for rule in RULES for cls in rule.OPTIMIZERS}


class NoFusedUpdate(Exception):
    """Raised if an optimizer, or one of its tensors, has no fused update. The message is the reason."""

    def __init__(
        self, reason: str, is_of_this_rank: bool = True, by_param: Mapping[int, str] | None = None
    ) -> None:
        super().__init__(reason)
        self.by_param = by_param or {}  # reasons by `id` of a parameter, if they are in parameters
        # Whether the reason is in this rank's shards, so that other ranks may have a fused update.
        self.is_of_this_rank = is_of_this_rank


class Served(NamedTuple):
    """Parameters that one backend has updated."""

    params: Sequence[Tensor]  # the optimizer's own tensors
    backend: str  # name of an `UpdateBackend`, or "optimizer" for its `step`
    reason: str  # reason for a slower backend, or ""


@dataclass(frozen=True)
class Update:
    """Update of parameters of one dtype and device, with equal settings, all of them with states or all without."""

    rule: type[Rule]
    group: dict[str, Any]  # the first of their groups
    params: list[Tensor]  # the optimizer's own tensors
    parameters: Parameters
    grads: TensorList  # local tensors
    bucket: Bucket
    # Momenta that become states in this first update, of the parameters' types, with the memory of `parameters.states`.
    first_momenta: Sequence[Tensor] = ()

    def apply(  # noqa: PLR0913  the numbers of a step, and what else happens in it
        self,
        optimizer: Optimizer,
        factor: Tensor,
        found_inf: Tensor | None,
        taken: Tensor | None,
        ahead: UpdatesAhead | None,
        meter: UpdateMeter | None,
    ) -> UpdateBackend | None:
        """Step with gradients times `factor`, unless `found_inf` is 1.0. None means that it is known to be 0.0.

        Args:
            optimizer: owns the parameters.
            factor, found_inf: on any device.
            taken: 1 - `found_inf`, if the caller has it: f32, 0-dim, on the parameters' device.
            ahead: the updates that were applied before the norm was known.
            meter: takes the norms of weights and updates.

        Returns:
            The backend, or None if the host has found out that the step is skipped.
        Sync: one in the first step of momentum with `dampening`, if only the device knows whether it is taken.
        """
        factor = to_device(factor, self.bucket.device)
        found_inf = None if found_inf is None else to_device(found_inf, self.bucket.device)
        if found_inf is not None and flag_if_free_to_read(found_inf) is not None:
            # The host has waited for the flag.
            if found_inf:
                return None
            found_inf = None
        is_flag_enough = found_inf is None or not self.group.get("dampening")
        if self.first_momenta and not is_flag_enough:
            assert found_inf is not None
            if found_inf.item():
                return None
            found_inf = None
        # Without dampening, momentum of zeros becomes the gradient, or stays zeros if the step is skipped.
        settings = self.rule.settings_of(self.group)
        if self.first_momenta and found_inf is None:
            settings["is_first_step"] = True
        rule = self.rule(**settings)
        counters = self.bucket.counters
        counters.advance(taken)
        if ahead is not None and found_inf is None and self.bucket.device.type == "cpu":
            backend = ahead.finish(self, rule, factor)
        elif meter is not None:
            backend = self._measured(meter, rule, factor, found_inf)
        else:
            backend = fused_step_(rule, self.parameters, self.grads, factor, found_inf)
        if found_inf is not None and taken is None:
            counters.undo_advance(found_inf)
        for param, momentum in zip(self.params, self.first_momenta, strict=False):
            optimizer.state[param][self.rule.LATE_STATE] = momentum
        return backend

    def _measured(
        self, meter: UpdateMeter, rule: Rule, factor: Tensor, found_inf: Tensor | None
    ) -> UpdateBackend:
        """Update batch by batch, because the norms need copies of the parameters."""
        backends: list[UpdateBackend] = []
        for batch in meter.batches(self.parameters.params):
            parameters = self.parameters.at(*batch)
            with meter.measuring([self.params[index] for index in batch], parameters.params):
                grads = TensorList([self.grads.tensors[index] for index in batch])
                backends.append(fused_step_(rule, parameters, grads, factor, found_inf))
        return backends[0]


def rule_of(optimizer: Optimizer) -> type[Rule] | None:
    """Return the rule of the optimizer's fused update, or None if it has none."""
    return _RULE_OF[type(optimizer)] if has_fused_update(optimizer) else None


def has_fused_update(optimizer: Optimizer) -> bool:
    """Return whether the optimizer has a fused update for some parameters. The result is the same on all ranks."""
    return _objection_to(optimizer) is None


def _objection_to(optimizer: Optimizer) -> str | None:
    if type(optimizer) not in _RULE_OF:
        return f"{optimizer_name(type(optimizer))} has no fused update"
    if any(group["differentiable"] for group in optimizer.param_groups):
        return "its steps are differentiable"
    if any(isinstance(beta, Tensor) for group in optimizer.param_groups for beta in group.get("betas", ())):
        return "its betas are tensors"
    if has_step_pre_hooks(optimizer):
        return "hooks before its step may read and replace unscaled gradients"
    if not _steps_as_torch(optimizer):
        return "a replacement of its step may do the same"
    return None


@contextmanager
def updates_of(optimizer: Optimizer, copies: Mapping[int, Tensor]) -> Generator[list[Update]]:
    """Context manager that yields the updates of one step. Their lists are cached, without the gradients.

    Args:
        copies: low-precision copies of parameters, by `id` of the parameter.

    Raises:
        NoFusedUpdate: the optimizer or a tensor has none. Nothing was changed, but states may have been initialised.
    """
    objection = _objection_to(optimizer)
    if objection is not None:
        raise NoFusedUpdate(objection, is_of_this_rank=False)
    lists = _lists_of.get(optimizer)
    if lists is None:
        lists = _lists_of[optimizer] = _Lists(optimizer)
    try:
        yield lists.collect(optimizer, copies)
    finally:
        lists.release()


def step_by(  # noqa: PLR0913  an optimizer and the numbers of its step
    optimizer: Optimizer,
    updates: Sequence[Update],
    factor: Tensor,
    found_inf: Tensor | None,
    taken: Tensor | None,
    ahead: UpdatesAhead | None,
    meter: UpdateMeter | None,
) -> list[Served]:
    """Call `optimizer.step()`, which only applies the updates, so that hooks and schedulers see a step.

    On the CPU, the hooks are called without it unless a scheduler or a profiler sees the call, because torch's wrappers
    of `step` take as long as the update of a small tensor.

    Returns:
        The backend of each update. An update that the host has skipped is left out.
    """
    served: list[Served] = []
    by_group: dict[int, list[Update]] = {}
    for update in updates:
        by_group.setdefault(id(update.group), []).append(update)

    def update_group(group: dict[str, Any], *lists: list[object]) -> object:
        """Apply the group's updates instead of `_init_group`, and leave `step` nothing to do."""
        for update in by_group.get(id(group), ()):
            backend = update.apply(optimizer, factor, found_inf, taken, ahead, meter)
            if backend is not None:
                served.append(Served(update.params, *backend))
        return _RULE_OF[type(optimizer)].NOTHING_LEFT

    def update_groups() -> None:
        for group in optimizer.param_groups:
            update_group(group)

    is_on_cpu = all(update.bucket.device.type == "cpu" for update in updates)
    if is_on_cpu and "step" not in vars(optimizer) and not is_profiled():
        call_between_hooks(optimizer, update_groups)
        return served
    attributes: Any = optimizer
    previous = vars(optimizer).get("_init_group")
    attributes._init_group = update_group
    try:
        optimizer.step()
    finally:
        if previous is None:
            del attributes._init_group
        else:
            attributes._init_group = previous
    return served


def served_by_optimizer(params: Sequence[Tensor], error: NoFusedUpdate) -> list[Served]:
    """Return that `optimizer.step()` updates all parameters, each with its own reason or else the first one."""
    params = [param for param in params if param.grad is not None]
    if not error.by_param:
        return [Served(params, "optimizer", str(error))]
    others = f"another parameter has no fused update: {error}"
    return [Served([param], "optimizer", error.by_param.get(id(param), others)) for param in params]


def _steps_as_torch(optimizer: Optimizer) -> bool:
    """Return whether `step` only runs code of `torch.optim`: the method, and a scheduler's wrapper."""
    step: Any = optimizer.step
    while step is not None:
        code = getattr(step, "__code__", None)
        if code is None or not code.co_filename.startswith(_TORCH_OPTIM_FOLDER):
            return False
        step = getattr(step, "__wrapped__", None)
    return True


class _Lists:
    """The updates of one optimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._rule = _RULE_OF[type(optimizer)]
        self.list_cache = ListCache(optimizer, with_layouts=True)
        self._joined = JoinedBuckets(self._rule)
        self._prepared: dict[Bucket, Prepared | PreparedShards] = {}

    def collect(self, optimizer: Optimizer, copies: Mapping[int, Tensor]) -> list[Update]:
        groups = self.list_cache.groups()
        new_buckets = [b for lists in groups if not lists.guards_have_held for b in lists.buckets]
        if sum(_place_counters(optimizer, bucket) for bucket in new_buckets):
            groups = self.list_cache.groups()
        runs = self._joined.collect(groups, copies)
        self._pack_counters(runs)
        previous, self._prepared = self._prepared, {}
        return [update for run in runs for update in self._of_run(run, previous.get(run.bucket), copies)]

    def release(self) -> None:
        """Drop gradients and local tensors, or they would live through the next forward."""
        self.list_cache.release_gradients()
        self._joined.release_gradients()
        for prepared in self._prepared.values():
            prepared.release()

    def _pack_counters(self, runs: Sequence[JoinedBucket]) -> None:
        buckets = [run.bucket for run in runs if run.guards_have_held]
        # Join all of them before the check: a counter in two buckets moves from the first buffer to the second.
        if sum(bucket.counters.pack() for bucket in buckets):
            for bucket in buckets:
                bucket.counters.unpack_if_moved()

    def _of_run(
        self,
        run: JoinedBucket,
        prepared: Prepared | PreparedShards | None,
        copies: Mapping[int, Tensor],
    ) -> list[Update]:
        group, bucket = run.group, run.bucket
        low_precision_params = _low_precision_params(bucket.params, copies)
        current = None if prepared is None else prepared.current(bucket, low_precision_params)
        is_cacheable = True
        if prepared is None or current is None:
            grads = _local_gradients(bucket)
            names = [name for name in self._rule.STATES if bucket[name]]
            states = [bucket[name] for name in names]
            if self._rule.LATE_STATE is not None and states and any(map(is_, states[0], repeat(None))):
                return self._of_unfilled(group, bucket, grads, copies)
            current = _prepare(bucket.params, states, bucket, grads, low_precision_params), grads
            tensors = chain(bucket.params, bucket.grads, *states)
            if not low_precision_params and all(is_distributed(t) and hasattr(t, "_spec") for t in tensors):
                prepared = PreparedShards.of(bucket, names, *current)
            else:
                prepared = Prepared.of(*current)
                is_cacheable = PLAIN_TYPES.issuperset(map(type, chain(bucket.params, bucket.grads)))
        parameters, grads = current
        if is_cacheable:
            self._prepared[bucket] = prepared
        known_grads = TensorList([*grads], prepared.layout)
        return [Update(self._rule, group, bucket.params, parameters, known_grads, bucket)]

    def _of_unfilled(
        self, group: dict[str, Any], bucket: Bucket, grads: list[Tensor], copies: Mapping[int, Tensor]
    ) -> list[Update]:
        """Return the updates of first steps with momentum. Parameters may have their first step at different times."""
        momenta = bucket[self._rule.STATES[0]]
        updates: list[Update] = []
        for unfilled in (False, True):
            indices = [i for i, momentum in enumerate(momenta) if (momentum is None) is unfilled]
            if indices:
                params = [bucket.params[i] for i in indices]
                new = [*map(torch.zeros_like, params)] if unfilled else []
                states = new or [momenta[i] for i in indices]
                selected_grads = [grads[i] for i in indices]
                low_precision_params = _low_precision_params(params, copies)
                parameters = _prepare(params, [states], bucket, selected_grads, low_precision_params)
                updates.append(
                    Update(self._rule, group, params, parameters, TensorList(selected_grads), bucket, new)
                )
        return updates


_lists_of: WeakKeyDictionary[Optimizer, _Lists] = WeakKeyDictionary()


def _place_counters(optimizer: Optimizer, bucket: Bucket) -> bool:
    """Move step counters to the device and dtype of fused updates. Return whether one was moved."""
    steps: list[Any] = bucket.steps
    _check_params(
        (param, None if isinstance(step, Tensor) else "its step counter is a number, not a tensor")
        for param, step in zip(bucket.params, steps, strict=False)
    )
    misplaced = [
        param
        for param, step in zip(bucket.params, bucket.steps, strict=False)
        if step.dtype is not torch.float32 or step.device != bucket.device
    ]
    for param in misplaced:
        state = optimizer.state[param]
        state["step"] = to_device(state["step"], bucket.device, torch.float32)
    return bool(misplaced)


def _local_gradients(bucket: Bucket) -> list[Tensor]:
    if type(bucket.params[0]) in PLAIN_TYPES and PLAIN_TYPES.issuperset(map(type, bucket.grads)):
        return [*bucket.grads]
    _check_params(
        (
            param,
            None
            if getattr(param, "placements", None) == getattr(grad, "placements", None)
            else "its gradient is sharded differently",
        )
        for param, grad in zip(bucket.params, bucket.grads, strict=True)
    )
    return local_parts(bucket.grads)


def _check_params(objections: Iterable[tuple[Tensor, str | None]]) -> None:
    """Raise NoFusedUpdate with all objections, if there is one to a parameter."""
    by_param = {id(param): objection for param, objection in objections if objection is not None}
    if by_param:
        raise NoFusedUpdate(next(iter(by_param.values())), by_param=by_param)


def _low_precision_params(params: Sequence[Tensor], copies: Mapping[int, Tensor]) -> list[Tensor]:
    return [local_part(copies[id(param)]) for param in params] if copies else []


def _prepare(
    params: Sequence[Tensor],
    states: Sequence[Sequence[Tensor]],
    bucket: Bucket,
    grads: Sequence[Tensor],
    copies: list[Tensor],
) -> Parameters:
    parameters = Parameters(
        local_parts(params),
        [local_parts(state) for state in states],
        bucket.counters.steps,
        copies,
    )
    _check_params(
        (
            param,
            _objection_to_memory(
                [parameters.params[index], *(state[index] for state in parameters.states)],
                grads[index],
                copies[index] if copies else None,
                parameters.states[0][0].dtype if parameters.states else None,
            ),
        )
        for index, param in enumerate(params)
    )
    return parameters


def _objection_to_memory(
    param_and_states: list[Tensor], grad: Tensor, copy: Tensor | None, states_dtype: torch.dtype | None
) -> str | None:
    """Return why the update's kernels, which use addresses, would read or write a tensor wrongly, or None.

    Args:
        states_dtype: dtype of the first parameter's first state, which all states have, or None.
    """
    param = param_and_states[0]
    for tensor in (*param_and_states, grad, *([] if copy is None else [copy])):
        if not is_plain_strided(tensor):
            kind = f"nested {type(tensor).__name__}" if tensor.is_nested else type(tensor).__name__
            return f"it holds a {kind} with layout {tensor.layout}"
        if tensor.device != param.device:
            return f"a tensor on {tensor.device} belongs to a parameter on {param.device}"
        if tensor.dtype not in KERNEL_DTYPES:
            return f"it holds a tensor of {tensor.dtype}"
        if tensor is not grad and tensor.is_neg():
            return "it holds a view with its negative bit set"
        if tensor.shape != param.shape:
            return f"a tensor of shape {tuple(tensor.shape)} belongs to a parameter of {tuple(param.shape)}"
    if not torch.ops.aten.is_non_overlapping_and_dense(param):
        return "a parameter has gaps, or elements that share memory"
    for tensor in (*param_and_states[1:], *([] if copy is None else [copy])):
        if tensor.stride() != param.stride() and not (tensor.is_contiguous() and param.is_contiguous()):
            return "a state has another memory layout than its parameter"
    dtypes = {state.dtype for state in param_and_states[1:]} or {param.dtype}
    if dtypes != {param.dtype} and not (dtypes == {NARROW_STATES} and param.dtype is torch.float32):
        return "a state has another dtype than its parameter"
    if states_dtype not in (None, *dtypes):
        return "its states have another dtype than those of another parameter"
    return None
