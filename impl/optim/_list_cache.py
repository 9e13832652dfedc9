"""The lists that an optimizer's `_init_group` builds anew in every step, kept, with guards on what they depend on.

    cache = ListCache(optimizer)     # holds it weakly; `cannot_cache_lists(optimizer)` says why not, where it cannot be
    for lists in cache.groups():     # one `GroupLists` for each of `optimizer.param_groups`, up to date, gradients too
        for bucket in lists.buckets:
            bucket.params, bucket.grads, bucket["exp_avgs"], bucket["state_steps"], bucket.counters
    cache.let_go_of_gradients()      # after the step: kept, they would live through the next forward

`groups()` (or `group(g)` for one of them, the first one first) checks the guards, builds again what a guard says has
changed, and puts this step's gradients in; a build calls the optimizer's own `_init_group`, which initialises state and
raises what it raises. `cache.builds` counts builds, `cache.because` says why the last one was made.

The lists of a `GroupLists` are named like the parameters of `_init_group` (`params_with_grad`, `grads`, `exp_avgs`, …);
only parameters with a gradient are in them. Hyperparameters are not kept: read them from `lists.group`, each time.
A `Bucket` is the part of them with one device and dtype. Its `counters` are the step counters, advanced together by
`counters.advance()` before the update and `counters.take_back(found_inf)` after it. Where the group `replays` (its
guards have held once), call `counters.join()` first: they are one buffer from then on, while `state["step"]` stays the
tensor object that it was.

Guarded: the group's parameters and gradients (which have one; type, device, dtype, layout), the values of the group as
far as they shape the lists, and the identity of the state: of its keys, of each parameter's dictionary and of what that
holds; for joined counters their addresses. A cache `with_forms` guards the states' tensors as it does gradients, and
the shapes and strides of all. The other addresses are not guarded: torch's operators ask each tensor for its own, in
every call. Where parameters and states are handed on by address, ask for forms and compare `data_ptr()` too.
"""

from __future__ import annotations

import inspect
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, repeat
from operator import attrgetter, is_
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from impl.kernels import tensor_guards
from impl.optim._counters import Counters
from impl.optim._refusals import name_of

_gradient = attrgetter("grad")
_NONE = repeat(None)
_END = (
    object(),
)  # after what is compared item by item: the one that goes on where the other ends differs too


def cannot_cache_lists(optimizer: Optimizer) -> str | None:
    """Why the lists of this optimizer cannot be kept; None if they can."""
    kind = type(optimizer)
    home = next(
        (base for base in kind.__mro__ if f"{base.__module__}.".startswith("torch.optim.")), Optimizer
    )
    if not hasattr(kind, "_init_group"):
        return f"{name_of(kind)} builds no lists: it has no _init_group"
    if home is Optimizer:
        return f"{name_of(kind)} is not of torch.optim: what its lists depend on is not known"
    for name in ("step", "_init_group"):
        if inspect.unwrap(getattr(kind, name)) is not inspect.unwrap(getattr(home, name)):
            return f"{name_of(kind)} has its own {name}: what its lists depend on is not known"
    return None


def list_names(kind: type[Optimizer]) -> tuple[str, ...]:
    """What the lists are called that `_init_group` fills, in its order: parameters and gradients come first."""
    return tuple(inspect.signature(kind._init_group).parameters)[2:]  # pyright: ignore[reportAttributeAccessIssue]


class Bucket:
    """The tensors of a group that one multi-tensor call takes: those of its parameters of one device and dtype.

    `bucket["exp_avgs"]` is the list of that name; one that the optimizer leaves empty is empty.
    """

    def __init__(self, names: tuple[str, ...], lists: list[list[Any]], places: list[int] | None) -> None:
        self.places = places  # which of the group's tensors these are; None for all of them
        self._lists = dict(zip(names, map(self._own, lists), strict=True))
        self.params: list[Tensor]
        self.grads: list[Tensor]
        self.params, self.grads = (self._lists[name] for name in names[:2])
        self.device, self.dtype = self.params[0].device, self.params[0].dtype
        self.counters = Counters(self._lists.get("state_steps", []))

    def __getitem__(self, name: str) -> list[Any]:
        return self._lists[name]

    def take(self, grads: list[Tensor]) -> None:
        """Put the group's gradients in."""
        self.grads[:] = self._own(grads)

    def tensors(self) -> Iterator[Any]:
        """All of them, one list after the other."""
        return chain.from_iterable(self._lists.values())

    def tensor_names(self) -> list[str]:
        return [f"{name}[{place}]" for name, tensors in self._lists.items() for place in range(len(tensors))]

    def _own(self, tensors: list[Any]) -> list[Any]:
        if self.places is None or not tensors:
            return tensors
        return [tensors[place] for place in self.places]


class GroupLists:
    """The lists of one group, as `_init_group` gave them."""

    def __init__(
        self, optimizer: Optimizer, group: dict[str, Any], names: tuple[str, ...], with_forms: bool
    ) -> None:
        self.group = group
        self.lists: list[list[Any]] = [[] for _ in names]
        self.returned: Any = plain_init_group(optimizer)(group, *self.lists)
        self.params, self.grads = self.lists[:2]
        self.replays = False  # whether the guards have held once since
        self.changes_in_a_row = 0  # in how many steps in succession the lists of this group have changed
        self.attached: Any = None  # for the cache's user: what follows from these lists and goes with them
        self._shape, self._seen = shape_of(group), list(group.values())
        self._all_params: list[Tensor] = list(group["params"])
        self._without = [param for param in self._all_params if param.grad is None]
        self._places = [place for place, param in enumerate(self._all_params) if param.grad is not None]
        self.states: list[dict[str, Any] | None] = list(map(optimizer.state.get, self.params))
        self._filled = [state for state in self.states if state is not None]
        self._values = list(self._values_now())
        self._list_names = names
        if with_forms:
            lists = self.params, *self.lists[2:]
            self._guarded = [tensor for tensor in chain.from_iterable(lists) if isinstance(tensor, Tensor)]
        else:
            # Elsewhere, and in fused updates, buckets go by dtype; the CPU's other operators take tensors one by one.
            by_dtype = bool(group.get("fused"))
            self._guarded = [param for param in self.params if by_dtype or not param.is_cpu]
        self._guards = tensor_guards([*self._guarded, *self.grads], with_forms, with_forms)
        self.buckets = [Bucket(names, self.lists, places) for places in places_by_kind(self.params)]

    def take_gradients(self) -> str | None:
        """Put this step's gradients in; or say why `_init_group` might give other lists than these."""
        if (why := self._changed_values()) is not None:
            return why
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
            if bucket.counters.have_moved():
                return "a step counter has other memory"
        self.grads[:] = grads
        for bucket in self.buckets:
            if bucket.places is not None:
                bucket.take(grads)
        self.replays = True
        return None

    def _values_now(self) -> Iterator[Any]:
        return chain(chain.from_iterable(map(dict.values, self._filled)), _END)

    def _changed_values(self) -> str | None:
        values = list(self.group.values())
        if len(values) == len(self._seen) and same(values, self._seen):
            return None
        if (shape := shape_of(self.group)) != self._shape:
            return f"the group's {', '.join(changed(self._shape, shape))} changed"
        self._seen = values
        return None

    def let_go_of_gradients(self) -> None:
        self.grads.clear()
        for bucket in self.buckets:
            bucket.grads.clear()

    def _objection_to(self, grads: list[Tensor | None]) -> str:
        names = [f"gradient of parameter {place}" for place in self._places]
        for name, grad in zip(names, grads, strict=True):
            if grad is None:
                return f"the {name} is None"
        known = {
            id(tensor): f"{name}[{place}]"
            for name, tensors in zip(self._list_names, self.lists, strict=True)
            for place, tensor in enumerate(tensors)
        }
        known |= {id(param): f"parameter {place}" for place, param in enumerate(self._all_params)}
        names = [*(known[id(tensor)] for tensor in self._guarded), *names]
        reported = self._guards.check_verbose(*self._guarded, *grads, tensor_check_names=names)
        return str(reported).splitlines()[0]


class ListCache:
    """The lists of an optimizer, group by group; see this file's head."""

    def __init__(self, optimizer: Optimizer, with_forms: bool = False) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._with_forms = with_forms
        self._names = list_names(type(optimizer))
        self._by_group: dict[int, GroupLists] = {}  # by the id of the group, which it keeps alive
        # The keys and values of `optimizer.state` when each group's part of it was last found to be the kept one.
        self._seen_state: tuple[list[Any], list[Any]] | None = None
        self._why_none = self._why_empty = "it is the first step"
        self.builds = 0
        self.because = "there was no step yet"

    def groups(self) -> list[GroupLists]:
        """Every group's lists, up to date."""
        return [self.group(group) for group in self._alive().param_groups]

    def group(self, group: dict[str, Any]) -> GroupLists:
        """One group's lists, up to date. Ask for the first group first: with it the state is looked at as a whole."""
        optimizer = self._alive()
        if group is optimizer.param_groups[0]:
            self._check_state(optimizer)
        group_lists = self._by_group.get(id(group))
        if group_lists is None:
            return self._build(optimizer, group, self._why_none)
        if (why := group_lists.take_gradients()) is not None:
            return self._build(optimizer, group, why)
        return group_lists

    def kept(self) -> list[GroupLists]:
        """The lists that are there, as they are."""
        return [*self._by_group.values()]

    def let_go_of_gradients(self) -> None:
        for group_lists in self._by_group.values():
            group_lists.let_go_of_gradients()

    def forget(self, why: str) -> None:
        """Let go of all lists; the next step builds new ones, for this reason."""
        self._by_group.clear()
        if self.builds:
            self._why_empty = why

    def _build(self, optimizer: Optimizer, group: dict[str, Any], why: str) -> GroupLists:
        before = self._by_group.pop(id(group), None)
        self._seen_state = None
        self._why_empty = why  # where this fails, the next step has the same reason
        group_lists = GroupLists(optimizer, group, self._names, self._with_forms)
        if before is not None:
            group_lists.changes_in_a_row = 1 if before.replays else before.changes_in_a_row + 1
        self._by_group[id(group)] = group_lists
        self.builds += 1
        self.because = why
        return group_lists

    def _check_state(self, optimizer: Optimizer) -> None:
        """Drop the lists of groups that are gone, and those of parameters whose state is another dictionary now."""
        state = optimizer.state
        self._why_none = "a group was added" if self._by_group else self._why_empty
        if len(self._by_group) > len(optimizer.param_groups):
            self._keep(set(map(id, optimizer.param_groups)), "there are fewer groups")
        if self._seen_state is not None:
            keys, values = self._seen_state
            if len(state) == len(keys) and same(state, keys) and same(state.values(), values):
                return
        held = {
            key
            for key, group_lists in self._by_group.items()
            if same(map(state.get, group_lists.params), group_lists.states)
        }
        self._keep(held, "a parameter's state was replaced")
        self._seen_state = list(state), list(state.values())

    def _keep(self, held: set[int], why: str) -> None:
        if held != self._by_group.keys():
            self._by_group = {key: group_lists for key, group_lists in self._by_group.items() if key in held}
            self._why_none = why

    def _alive(self) -> Optimizer:
        optimizer = self._optimizer()
        assert optimizer is not None, "the list cache of an optimizer that is gone was asked for"
        return optimizer


def plain_init_group(optimizer: Optimizer) -> Callable[..., Any]:
    """The `_init_group` of its class, whatever the instance has in its place."""
    return types.MethodType(type(optimizer)._init_group, optimizer)  # pyright: ignore[reportAttributeAccessIssue]


def shape_of(group: dict[str, Any]) -> list[tuple[str, Any]]:
    """What of a group's values may shape the lists; of a number only its type and its sign: schedules may move it."""
    return [(key, _shape_of(value)) for key, value in group.items() if key not in ("params", "param_names")]


def _shape_of(value: Any) -> Any:
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, float)):
        return type(value), value > 0, value == 0
    if isinstance(value, (list, tuple)):
        return tuple(map(_shape_of, value))
    return type(value), getattr(value, "requires_grad", False)


def changed(before: list[tuple[str, Any]], after: list[tuple[str, Any]]) -> list[str]:
    """The keys of a group whose values have another shape, or that are in one of the two alone."""
    one, other = dict(before), dict(after)
    return sorted(key for key in one.keys() | other.keys() if key not in one or one[key] != other.get(key))


def places_by_kind(params: list[Tensor]) -> list[list[int] | None]:
    """Where in the list the parameters of one device and dtype are, for each such kind; None for everywhere.

    The kinds come in torch's order: where a call raises, those before it have been updated.
    """
    if not params:
        return []
    grouped = Optimizer._group_tensors_by_device_and_dtype([params], with_indices=True)  # pyright: ignore[reportArgumentType]
    places = [indices for _, indices in grouped.values()]
    return [*places] if len(places) > 1 else [None]


def same(these: Iterable[Any], those: Iterable[Any]) -> bool:
    """Whether they are the same objects, as far as the shorter one goes."""
    return all(map(is_, these, those))
