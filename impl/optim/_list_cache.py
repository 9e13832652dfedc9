"""Cache of the lists that an optimizer's `_init_group` builds in every step, with guards on their inputs.

    cache = ListCache(optimizer)     # if it is impossible, `reason_not_cacheable(optimizer)` is the reason
    for lists in cache.groups():     # one up-to-date `GroupLists` for each of `optimizer.param_groups`
        for bucket in lists.buckets:
            bucket.params, bucket.grads, bucket["exp_avgs"], bucket["state_steps"], bucket.counters
    cache.release_gradients()        # after the step, or they would live through the next forward

`groups()` (or `group(g)` for a single group, beginning with the first) checks the guards, rebuilds the lists whose
guard fails, and stores this step's gradients in them. A rebuild calls the optimizer's own `_init_group`, which
initialises state and may raise. `cache.builds` counts builds, and `cache.build_reason` is the reason for the last one.

The lists of a `GroupLists` are named like the parameters of `_init_group` (`params_with_grad`, `grads`, `exp_avgs`, …)
and only hold parameters with a gradient. Hyperparameters are not cached: read them from `lists.group` in each step.
A `Bucket` has the tensors of one device and dtype. Its `counters` are the step counters. Advance them by
`counters.advance()` before the update and call `counters.undo_advance(found_inf)` after it. If the group's
`guards_have_held` once and it `may_pack`, call `counters.pack()` first: it moves the counters into one buffer, while
`state["step"]` stays the same tensor object.

With `most_spares`, lists that do not fit this step's set of gradients are kept for a later step that they fit again.

Guards cover: the group's parameters and gradients (whether there is one; type, device, dtype, layout); the group's
values as far as the lists depend on them; the identity of the state's keys, of each parameter's dictionary and of its
values; and the addresses of joined counters. A cache `with_layouts` guards the states' tensors like gradients, and the
shapes and strides of all tensors. Other addresses are not guarded, because torch's operators query them in every call.
A caller that passes parameters and states by address must compare `data_ptr()` too.
"""

from __future__ import annotations

import inspect
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, repeat
from operator import attrgetter, is_
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from impl._names import optimizer_name
from impl.kernels import has_nested, tensor_guards
from impl.optim._counters import Counters

_gradient = attrgetter("grad")
_NONE = repeat(None)
# Appended to sequences that are compared item by item, so that a longer one differs from a shorter one.
_END = (object(),)


def reason_not_cacheable(optimizer: Optimizer) -> str | None:
    """Return the reason why the lists of this optimizer cannot be cached, or None if they can."""
    cls = type(optimizer)
    torch_class = next(
        (base for base in cls.__mro__ if f"{base.__module__}.".startswith("torch.optim.")), Optimizer
    )
    if not hasattr(cls, "_init_group"):
        return f"{optimizer_name(cls)} builds no lists: it has no _init_group"
    if torch_class is Optimizer:
        return f"{optimizer_name(cls)} is not of torch.optim: what its lists depend on is not known"
    for name in ("step", "_init_group"):
        if inspect.unwrap(getattr(cls, name)) is not inspect.unwrap(getattr(torch_class, name)):
            return f"{optimizer_name(cls)} has its own {name}: what its lists depend on is not known"
    return None


def list_names(cls: type[Optimizer]) -> tuple[str, ...]:
    """Return the names of the lists that `_init_group` fills, in its order: parameters and gradients come first."""
    return tuple(inspect.signature(cls._init_group).parameters)[2:]  # pyright: ignore[reportAttributeAccessIssue]


class Bucket:
    """Tensors of a group for one multi-tensor call, whose parameters have one device and dtype.

    `bucket["exp_avgs"]` is the list of that name. Lists that the optimizer does not fill are empty.
    """

    def __init__(self, names: tuple[str, ...], lists: list[list[Any]], places: list[int] | None) -> None:
        self.places = places  # indices in the group's lists, or None for all
        self._lists = dict(zip(names, map(self._own, lists), strict=True))
        self.params: list[Tensor]
        self.grads: list[Tensor]
        self.params, self.grads = (self._lists[name] for name in names[:2])
        self.device, self.dtype = self.params[0].device, self.params[0].dtype
        self.steps: list[Tensor] = self._lists.get("state_steps", [])
        self._counters: Counters | None = None

    @classmethod
    def join(cls, buckets: Sequence[Bucket]) -> Bucket:
        """Return a bucket with the tensors of several ones of the same optimizer, in their order."""
        names = tuple(buckets[0]._lists)
        return cls(
            names, [[*chain.from_iterable(bucket[name] for bucket in buckets)] for name in names], None
        )

    def __getitem__(self, name: str) -> list[Any]:
        return self._lists[name]

    @property
    def counters(self) -> Counters:
        if self._counters is None:
            self._counters = Counters(self.steps)
        return self._counters

    def has_moved_counters(self) -> bool:
        """Return whether a counter got other memory since `counters` was last used."""
        return self._counters is not None and self._counters.refresh_addresses()

    def take(self, grads: list[Tensor]) -> None:
        """Store the gradients of this bucket, out of those of the group."""
        self.grads[:] = self._own(grads)

    def tensors(self) -> Iterator[Any]:
        """Yield all tensors, list by list."""
        return chain.from_iterable(self._lists.values())

    def tensor_names(self) -> list[str]:
        return [f"{name}[{place}]" for name, tensors in self._lists.items() for place in range(len(tensors))]

    def _own(self, tensors: list[Any]) -> list[Any]:
        if self.places is None or not tensors:
            return tensors
        return [tensors[place] for place in self.places]


class GroupLists:
    """Lists of one group, as `_init_group` filled them."""

    def __init__(
        self, optimizer: Optimizer, group: dict[str, Any], names: tuple[str, ...], with_layouts: bool
    ) -> None:
        self.group = group
        self.lists: list[list[Any]] = [[] for _ in names]
        self.returned: Any = plain_init_group(optimizer)(group, *self.lists)
        self.params, self.grads = self.lists[:2]
        self.guards_have_held = False  # whether they have held in a step since
        # Number of consecutive steps in which the lists of this group have changed.
        self.consecutive_changes = 0
        # Data of the cache's user that is valid as long as these lists.
        self.attached: Any = None
        self._shape, self._last_values = list_guard_values(group), list(group.values())
        self._all_params: list[Tensor] = list(group["params"])
        self.absent = absent_gradients(self._all_params)
        # Whether no spare lists of the group need the counters where they are.
        self.may_pack = True
        self._without = [param for param in self._all_params if param.grad is None]
        self._places = [place for place, param in enumerate(self._all_params) if param.grad is not None]
        self.states: list[dict[str, Any] | None] = list(map(optimizer.state.get, self.params))
        self._filled = [state for state in self.states if state is not None]
        self._values = list(self._values_now())
        self._list_names = names
        if with_layouts:
            lists = self.params, *self.lists[2:]
            self._guarded = [tensor for tensor in chain.from_iterable(lists) if isinstance(tensor, Tensor)]
        else:
            # Buckets depend on dtypes, except for non-fused updates on the CPU, which go tensor by tensor.
            by_dtype = bool(group.get("fused"))
            self._guarded = [param for param in self.params if by_dtype or not param.is_cpu]
        guarded = [*self._guarded, *self.grads]
        # Guards end the process if they reach a nested tensor. A gradient is nested if and only if its parameter is.
        self._guards = None if has_nested(guarded) else tensor_guards(guarded, with_layouts=with_layouts)
        self.buckets = [
            Bucket(names, self.lists, places) for places in indices_by_device_and_dtype(self.params)
        ]

    def take_gradients(self) -> str | None:
        """Store this step's gradients, or return the reason why `_init_group` may return other lists."""
        if self._guards is None:
            return "a tensor of the group is nested"
        if (reason := self._changed_values()) is not None:
            return reason
        params = self.group["params"]
        if len(params) != len(self._all_params) or not same(params, self._all_params):
            return "the group has other parameters"
        if not same(self._values_now(), self._values):
            return "a parameter has other state"
        grads = list(map(_gradient, self.params))
        if not self._guards.check(*self._guarded, *grads):
            return self._objection_to(grads)
        if self._without and not same(map(_gradient, self._without), _NONE):
            return "a parameter that had no gradient has one"
        for bucket in self.buckets:
            if bucket.has_moved_counters():
                return "a step counter has other memory"
        self.grads[:] = grads
        for bucket in self.buckets:
            if bucket.places is not None:
                bucket.take(grads)
        self.guards_have_held = True
        return None

    def _values_now(self) -> Iterator[object]:
        return chain(chain.from_iterable(map(dict.values, self._filled)), _END)

    def _changed_values(self) -> str | None:
        values = list(self.group.values())
        if len(values) == len(self._last_values) and same(values, self._last_values):
            return None
        if (shape := list_guard_values(self.group)) != self._shape:
            return f"the group's {', '.join(changed(self._shape, shape))} changed"
        self._last_values = values
        return None

    def release_gradients(self) -> None:
        self.grads.clear()
        for bucket in self.buckets:
            bucket.grads.clear()

    def _objection_to(self, grads: list[Tensor | None]) -> str:
        for place, grad in zip(self._places, grads, strict=True):
            if grad is None:
                return f"the gradient of parameter {place} is None"
        names = [f"gradient of parameter {place}" for place in self._places]
        known = {
            id(tensor): f"{name}[{place}]"
            for name, tensors in zip(self._list_names, self.lists, strict=True)
            for place, tensor in enumerate(tensors)
        }
        known |= {id(param): f"parameter {place}" for place, param in enumerate(self._all_params)}
        names = [*(known[id(tensor)] for tensor in self._guarded), *names]
        assert self._guards is not None
        reported = self._guards.check_verbose(*self._guarded, *grads, tensor_check_names=names)
        return str(reported).splitlines()[0]


class ListCache:
    """Lists of an optimizer, group by group. The module's docstring has the details.

    Args:
        optimizer: held weakly.
        with_layouts: whether shapes and strides of all tensors are guarded.
    """

    def __init__(self, optimizer: Optimizer, with_layouts: bool = False) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._with_layouts = with_layouts
        self._names = list_names(type(optimizer))
        self._by_group: dict[int, GroupLists] = {}  # keys: ids of the groups, which `GroupLists` keeps alive
        # Number of further lists of each group that are kept, for other sets of parameters with a gradient.
        self.most_spares = 0
        # Spare lists of each group, by `GroupLists.absent`, in the order in which they were put away.
        self._spares: dict[int, dict[bytes, GroupLists]] = {}
        # Keys and values of `optimizer.state` at the last check in which all groups' states were unchanged.
        self._checked_state: tuple[list[object], list[object]] | None = None
        # Reasons of the next build: of a group without lists, and of any group while there are no lists at all.
        self._reason_if_missing = self._reason_if_empty = "it is the first step"
        self.builds = 0
        self.build_reason = "there was no step yet"

    def groups(self) -> list[GroupLists]:
        """Return every group's lists, up to date."""
        return [self.group(group) for group in self._alive().param_groups]

    def group(self, group: dict[str, Any]) -> GroupLists:
        """Return one group's lists, up to date. Call it for the first group first, which checks the whole state."""
        optimizer = self._alive()
        if group is optimizer.param_groups[0]:
            self._check_state(optimizer)
        group_lists = self._by_group.get(id(group))
        if group_lists is None:
            return self._build(optimizer, group, self._reason_if_missing)
        if (reason := group_lists.take_gradients()) is None:
            return group_lists
        return self._exchange(group, group_lists) or self._build(optimizer, group, reason)

    def kept(self) -> list[GroupLists]:
        """Return the cached lists without checking them."""
        return [*self._by_group.values()]

    def release_gradients(self) -> None:
        for group_lists in self._by_group.values():
            group_lists.release_gradients()

    def forget(self, reason: str) -> None:
        """Drop all lists. The next step builds new ones for this reason."""
        self._by_group.clear()
        self._spares.clear()
        if self.builds:
            self._reason_if_empty = reason

    def _exchange(self, group: dict[str, Any], group_lists: GroupLists) -> GroupLists | None:
        """Keep lists that do not fit as spares. Return the spares that fit, up to date, or None."""
        absent = absent_gradients(group["params"])
        spares = self._spares.pop(id(group), {})
        if absent == group_lists.absent or not self.most_spares:
            return None
        fitting = spares.pop(absent, None)
        spares[group_lists.absent] = group_lists
        if len(spares) > self.most_spares:
            del spares[next(iter(spares))]
        self._spares[id(group)] = spares
        if fitting is None or fitting.take_gradients() is not None:
            return None
        self._keep_lists(group, fitting)
        return fitting

    def _keep_lists(self, group: dict[str, Any], group_lists: GroupLists) -> None:
        self._by_group[id(group)] = group_lists
        # Lists with as many counters would move them back in turn.
        spares = self._spares.get(id(group), {}).values()
        group_lists.may_pack = all(len(spare.params) < len(group_lists.params) for spare in spares)

    def _build(self, optimizer: Optimizer, group: dict[str, Any], reason: str) -> GroupLists:
        previous = self._by_group.pop(id(group), None)
        self._checked_state = None
        self._reason_if_empty = reason  # reason of the next build if this one raises
        group_lists = GroupLists(optimizer, group, self._names, self._with_layouts)
        if previous is not None:
            changes_before = 0 if previous.guards_have_held else previous.consecutive_changes
            group_lists.consecutive_changes = changes_before + 1
        self._keep_lists(group, group_lists)
        self.builds += 1
        self.build_reason = reason
        return group_lists

    def _check_state(self, optimizer: Optimizer) -> None:
        """Drop the lists of removed groups, and of parameters whose state dictionary was replaced."""
        state = optimizer.state
        self._reason_if_missing = "a group was added" if self._by_group else self._reason_if_empty
        if len(self._by_group) > len(optimizer.param_groups):
            self._keep(set(map(id, optimizer.param_groups)), "there are fewer groups")
        if self._checked_state is not None:
            keys, values = self._checked_state
            if len(state) == len(keys) and same(state, keys) and same(state.values(), values):
                return
        unchanged = {
            key
            for key, group_lists in self._by_group.items()
            if all(
                same(map(state.get, lists.params), lists.states)
                for lists in (group_lists, *self._spares.get(key, {}).values())
            )
        }
        self._keep(unchanged, "a parameter's state was replaced")
        self._checked_state = list(state), list(state.values())

    def _keep(self, keys: set[int], reason: str) -> None:
        if keys != self._by_group.keys():
            self._by_group = {key: group_lists for key, group_lists in self._by_group.items() if key in keys}
            self._spares = {key: spares for key, spares in self._spares.items() if key in keys}
            self._reason_if_missing = reason

    def _alive(self) -> Optimizer:
        optimizer = self._optimizer()
        assert optimizer is not None, "the optimizer of this list cache no longer exists"
        return optimizer


def absent_gradients(params: Iterable[Tensor]) -> bytes:
    """Return for each parameter whether it has no gradient."""
    return bytes(map(is_, map(_gradient, params), _NONE))


def plain_init_group(optimizer: Optimizer) -> Callable[..., Any]:
    """Return the `_init_group` of the optimizer's class, even if the instance replaces it."""
    return types.MethodType(type(optimizer)._init_group, optimizer)  # pyright: ignore[reportAttributeAccessIssue]


def list_guard_values(group: dict[str, Any]) -> list[tuple[str, object]]:
    """Return the group's values that its lists depend on. For numbers, which schedules change, only type and sign."""
    return [
        (key, _guard_value(value)) for key, value in group.items() if key not in ("params", "param_names")
    ]


def _guard_value(value: object) -> object:
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, float)):
        return type(value), value > 0, value == 0
    if isinstance(value, (list, tuple)):
        return tuple(map(_guard_value, value))
    return type(value), getattr(value, "requires_grad", False)


def changed(before: list[tuple[str, object]], after: list[tuple[str, object]]) -> list[str]:
    """Return the keys of a group whose values differ, or that are in only one of the two."""
    old, new = dict(before), dict(after)
    return sorted(key for key in old.keys() | new.keys() if key not in old or old[key] != new.get(key))


def indices_by_device_and_dtype(params: list[Tensor]) -> list[list[int] | None]:
    """Return the indices of the parameters of each device and dtype, or [None] if all have the same.

    The order is torch's, so that the same parameters have been updated if a call raises.
    """
    if not params:
        return []
    grouped = Optimizer._group_tensors_by_device_and_dtype([params], with_indices=True)  # pyright: ignore[reportArgumentType]
    places = [indices for _, indices in grouped.values()]
    return [*places] if len(places) > 1 else [None]


def same(objects: Iterable[object], others: Iterable[object]) -> bool:
    """Return whether both have the same objects, up to the end of the shorter one."""
    return all(map(is_, objects, others))
