"""What a fused step of an optimizer works on: from its groups the rules, from its list cache the lists.

The optimizers of `torch.optim` that have a fused update are known here by their exact types, since a subclass may step
in its own way. How an optimizer was told to step (`foreach`, `fused`, `capturable`) does not matter.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, repeat
from operator import is_
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch._C._dynamo.guards import TensorGuards
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks

from impl.kernels import (
    KERNEL_DTYPES,
    PLAIN_TYPES,
    RULES,
    KnownLayoutList,
    ListLayout,
    Parameters,
    Rule,
    formed,
    fused_step_,
    laid_out_as,
    placed,
    tensor_guards,
)
from impl.optim._list_cache import Bucket, GroupLists, ListCache, cannot_cache_lists, same
from impl.optim._refusals import name_of
from impl.optim._shards import local_part

_TORCHS = str(Path(torch.optim.__file__).parent)


_RULE_OF: dict[type[Optimizer], type[Rule]] = {kind: rule for rule in RULES for kind in rule.OPTIMIZERS}


class NoFusedUpdate(Exception):
    """An optimizer, or what it holds, has no fused update; the message says why."""

    def __init__(self, why: str, is_of_this_rank: bool = True) -> None:
        super().__init__(why)
        self.is_of_this_rank = is_of_this_rank  # and other ranks, which hold other parts, may not have it


@dataclass(frozen=True)
class Update:
    """One update: parameters of one group, dtype and device, or those of them whose states hold nothing yet."""

    rule: type[Rule]
    group: dict[str, Any]
    params: list[Tensor]  # as the optimizer has them
    parameters: Parameters
    grads: list[Tensor]  # this rank's parts
    bucket: Bucket
    unfilled: bool

    def apply(
        self, optimizer: Optimizer, factor: Tensor, found_inf: Tensor | None, taken: Tensor | None
    ) -> None:
        """Step from gradients times `factor`, unless `found_inf` is 1.0; None: it is known to be 0.0.

        Args:
            optimizer: has the parameters.
            factor, found_inf: may be on another device.
            taken: f32, 0-dim, on the parameters' device: 1 - `found_inf`, if the caller has it.

        Sync: one where momentum begins with `dampening` and whether it does is known on the device alone.
        """
        factor = placed(factor, self.bucket.device)
        found_inf = None if found_inf is None else placed(found_inf, self.bucket.device)
        begins_by_itself = found_inf is None or not self.group.get("dampening")
        if self.unfilled and not begins_by_itself:
            assert found_inf is not None
            if found_inf.item():
                return
            found_inf = None
        # Momentum of zeros becomes the gradient where nothing dampens it, and stays zeros where the step is skipped.
        settings = self.rule.settings_of(self.group)
        if self.unfilled and found_inf is None:
            settings["is_first_step"] = True
        rule = self.rule(**settings)
        counters = self.bucket.counters
        counters.advance(taken)
        fused_step_(rule, self.parameters, self.grads, factor, found_inf)
        if found_inf is not None and taken is None:
            counters.take_back(found_inf)
        if self.unfilled:
            for param, momentum in zip(self.params, self.parameters.states[0], strict=True):
                optimizer.state[param][self.rule.LATE_STATE] = momentum


def has_fused_update(optimizer: Optimizer) -> bool:
    """Whether the optimizer has one, whatever its parameters are: all ranks get the same answer."""
    return _objection_to(optimizer) is None


def _objection_to(optimizer: Optimizer) -> str | None:
    if type(optimizer) not in _RULE_OF:
        return f"{name_of(type(optimizer))} has no fused update"
    if any(group["differentiable"] for group in optimizer.param_groups):
        return "its steps are differentiable"
    if any(isinstance(beta, Tensor) for group in optimizer.param_groups for beta in group.get("betas", ())):
        return "its betas are tensors"
    if optimizer._optimizer_step_pre_hooks or _global_optimizer_pre_hooks:
        return "hooks before its step may read and replace unscaled gradients"
    if not _steps_as_torch(optimizer):
        return "what stands in the place of its step may do the same"
    return cannot_cache_lists(optimizer)


@contextmanager
def updates_of(optimizer: Optimizer, copies: Mapping[int, Tensor]) -> Generator[list[Update]]:
    """The updates of one step; the lists behind them are kept from step to step, without the gradients.

    Args:
        copies: of parameters in lower precision, by `id` of the parameter.

    Raises:
        Unfused: nothing was changed then but that states were initialised.
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
        lists.list_cache.let_go_of_gradients()


def step_by(
    optimizer: Optimizer,
    updates: Sequence[Update],
    factor: Tensor,
    found_inf: Tensor | None,
    taken: Tensor | None = None,
) -> None:
    """Call `optimizer.step()`, which applies the updates and does nothing else: hooks and schedulers see a step."""

    def of_group(group: dict[str, Any], *lists: list[Any]) -> Any:
        """In the place of `_init_group`: does the group's updates, and returns lists that leave nothing to do."""
        for update in updates:
            if update.group is group:
                update.apply(optimizer, factor, found_inf, taken)
        return _RULE_OF[type(optimizer)].NOTHING_LEFT

    attributes: Any = optimizer
    before = vars(optimizer).get("_init_group")
    attributes._init_group = of_group
    try:
        optimizer.step()
    finally:
        if before is None:
            del attributes._init_group
        else:
            attributes._init_group = before


def _steps_as_torch(optimizer: Optimizer) -> bool:
    """Whether `step` runs code of `torch.optim` alone: the class's own, and what counts calls for a scheduler."""
    step: Any = optimizer.step
    while step is not None:
        code = getattr(step, "__code__", None)
        if code is None or not code.co_filename.startswith(_TORCHS):
            return False
        step = getattr(step, "__wrapped__", None)
    return True


@dataclass(frozen=True)
class _Prepared:
    """What an update of a bucket works on: it stands while guards hold, the list cache's too, and nothing moves."""

    parameters: Parameters
    form: ListLayout | None  # of the gradients, if they are laid out as their parameters
    low_precision_params: TensorGuards

    @classmethod
    def of(cls, parameters: Parameters, grads: list[Tensor]) -> _Prepared:
        parameters.have_moved()  # from here on it is known when they do
        in_order = all(map(is_, map(laid_out_as, parameters.params, grads), grads))
        known = formed(grads) if in_order else None
        copies = tensor_guards([*parameters.low_precision_params], with_shapes=True, with_strides=True)
        return cls(parameters, None if known is None else known.form, copies)

    def stands(self, copies: list[Tensor]) -> bool:
        """Asked where the list cache's guards have held: of tensors without memory their address cannot be asked."""
        return (
            len(copies) == len(self.parameters.low_precision_params)
            and same(copies, self.parameters.low_precision_params)
            and self.low_precision_params.check(*copies)
            and not self.parameters.have_moved()
        )


class _Lists:
    """The updates of one optimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._rule = _RULE_OF[type(optimizer)]
        self.list_cache = ListCache(
            optimizer, with_forms=True
        )  # attached to a group: its buckets' `_Prepared`

    def collect(self, optimizer: Optimizer, copies: Mapping[int, Tensor]) -> list[Update]:
        groups = self.list_cache.groups()
        built = [
            bucket for group_lists in groups if not group_lists.replays for bucket in group_lists.buckets
        ]
        if sum(_place_counters(optimizer, bucket) for bucket in built):
            groups = self.list_cache.groups()
        self._join_counters(groups)
        updates: list[Update] = []
        for group_lists in groups:
            for bucket in group_lists.buckets:
                updates += self._of_bucket(group_lists, bucket, copies)
        return updates

    def _join_counters(self, groups: Sequence[GroupLists]) -> None:
        buckets = [bucket for group_lists in groups if group_lists.replays for bucket in group_lists.buckets]
        # All of them are asked to join: one that two share leaves the buffer of the first for that of the second.
        if sum(bucket.counters.join() for bucket in buckets):
            for bucket in buckets:
                bucket.counters.part_if_moved()

    def _of_bucket(
        self, group_lists: GroupLists, bucket: Bucket, copies: Mapping[int, Tensor]
    ) -> list[Update]:
        group, mine = group_lists.group, _in_low_precision(bucket.params, copies)
        if group_lists.attached is None:
            group_lists.attached = {}
        prepared: _Prepared | None = group_lists.attached.pop(bucket, None)
        if prepared is not None and prepared.stands(mine):
            grads, is_plain = bucket.grads, True
        else:
            grads = _local_gradients(bucket)
            states = [bucket[name] for name in self._rule.STATES if bucket[name]]
            if self._rule.LATE_STATE is not None and states and any(map(is_, states[0], repeat(None))):
                return self._of_unfilled(group, bucket, grads, copies)
            prepared = _Prepared.of(_prepared(bucket.params, states, bucket, grads, mine), grads)
            is_plain = PLAIN_TYPES.issuperset(map(type, chain(bucket.params, bucket.grads)))
        if is_plain:  # what is not is looked through anew, since its part may lie elsewhere then
            group_lists.attached[bucket] = prepared
        some = [*grads] if prepared.form is None else KnownLayoutList(grads, prepared.form)
        return [Update(self._rule, group, bucket.params, prepared.parameters, some, bucket, False)]

    def _of_unfilled(
        self, group: dict[str, Any], bucket: Bucket, grads: list[Tensor], copies: Mapping[int, Tensor]
    ) -> list[Update]:
        """The first steps with momentum; parameters may begin at different times."""
        momenta = bucket[self._rule.STATES[0]]
        updates: list[Update] = []
        for unfilled in (False, True):
            places = [i for i, momentum in enumerate(momenta) if (momentum is None) is unfilled]
            if places:
                params = [bucket.params[i] for i in places]
                some = [momenta[i] for i in places] if not unfilled else [*map(torch.zeros_like, params)]
                some_grads = [grads[i] for i in places]
                mine = _in_low_precision(params, copies)
                parameters = _prepared(params, [some], bucket, some_grads, mine)
                updates.append(Update(self._rule, group, params, parameters, some_grads, bucket, unfilled))
        return updates


_lists_of: WeakKeyDictionary[Optimizer, _Lists] = WeakKeyDictionary()


def _place_counters(optimizer: Optimizer, bucket: Bucket) -> bool:
    """Put step counters where a fused update reads them; whether one lay elsewhere."""
    steps: list[Any] = bucket.counters.steps
    if not all(isinstance(step, Tensor) for step in steps):
        raise NoFusedUpdate("a step counter is a number and no tensor")
    misplaced = [
        param
        for param, step in zip(bucket.params, bucket.counters.steps, strict=False)
        if step.dtype is not torch.float32 or step.device != bucket.device
    ]
    for param in misplaced:
        state = optimizer.state[param]
        state["step"] = placed(state["step"], bucket.device, torch.float32)
    return bool(misplaced)


def _local_gradients(bucket: Bucket) -> list[Tensor]:
    if type(bucket.params[0]) in PLAIN_TYPES and PLAIN_TYPES.issuperset(map(type, bucket.grads)):
        return [*bucket.grads]
    for param, grad in zip(bucket.params, bucket.grads, strict=True):
        if getattr(param, "placements", None) != getattr(grad, "placements", None):
            raise NoFusedUpdate("a gradient is sharded otherwise than its parameter")
    return [local_part(grad) for grad in bucket.grads]


def _in_low_precision(params: Sequence[Tensor], copies: Mapping[int, Tensor]) -> list[Tensor]:
    return [local_part(copies[id(param)]) for param in params] if copies else []


def _prepared(
    params: Sequence[Tensor],
    states: Sequence[Sequence[Tensor]],
    bucket: Bucket,
    grads: Sequence[Tensor],
    copies: list[Tensor],
) -> Parameters:
    parameters = Parameters(
        [*map(local_part, params)],
        [[*map(local_part, state)] for state in states],
        bucket.counters.steps,
        copies,
    )
    for place, param in enumerate(parameters.params):
        alike = [param, *(state[place] for state in parameters.states)]
        _check_memory(alike, grads[place], copies[place] if copies else None)
    return parameters


def _check_memory(alike: list[Tensor], grad: Tensor, copy: Tensor | None) -> None:
    """Refuse what the update's operators would read or write by the address, and wrongly."""
    param = alike[0]
    for tensor in (*alike, grad, *([] if copy is None else [copy])):
        if type(tensor) not in PLAIN_TYPES or tensor.layout is not torch.strided:
            raise NoFusedUpdate(f"it holds a {type(tensor).__name__} with layout {tensor.layout}")
        if tensor.device != param.device:
            raise NoFusedUpdate(f"a tensor on {tensor.device} belongs to a parameter on {param.device}")
        if tensor.dtype not in KERNEL_DTYPES:
            raise NoFusedUpdate(f"it holds a tensor of {tensor.dtype}")
        if tensor is not grad and tensor.is_neg():
            raise NoFusedUpdate("it holds a view whose memory holds the opposites")
        if tensor.shape != param.shape:
            raise NoFusedUpdate(
                f"a tensor of shape {tuple(tensor.shape)} belongs to a parameter of {tuple(param.shape)}"
            )
    if not torch.ops.aten.is_non_overlapping_and_dense(param):
        raise NoFusedUpdate("a parameter has gaps, or elements that share memory")
    for tensor in (*alike[1:], *([] if copy is None else [copy])):
        if tensor.stride() != param.stride() and not (tensor.is_contiguous() and param.is_contiguous()):
            raise NoFusedUpdate("a state is laid out otherwise than its parameter")
    if any(tensor.dtype is not param.dtype for tensor in alike):
        raise NoFusedUpdate("a state has another dtype than its parameter")
