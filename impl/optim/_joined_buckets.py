"""Buckets of consecutive groups with equal settings, joined so that one call updates them.

The parameters stay in the optimizer's order, on which the last bits of their joint norm depend. Buckets that were apart
in a step stay apart until their lists are built again, because a change of the members costs as much as a first step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from impl.kernels import PLAIN_TYPES, Addresses, Rule, may_share_memory
from impl.optim._list_cache import Bucket, GroupLists

_NUMBERS = frozenset((bool, int, float))

_Member = tuple[GroupLists, Bucket]


class JoinedBucket(NamedTuple):
    """Bucket of one group, or of several groups with equal settings."""

    group: dict[str, Any]  # the first of the groups
    bucket: Bucket
    guards_have_held: bool  # whether the guards of all groups have held once


class _Entry(NamedTuple):
    bucket: Bucket
    members: list[Bucket]  # the buckets in it, in its order
    # Addresses of parameters and states, or None if the bucket is that of one group.
    addresses: Addresses | None

    def fits(self, members: Sequence[_Member]) -> bool:
        """Return whether these are the members, and no tensor that an update writes got other memory."""
        return (
            self.addresses is not None
            and self.members == [bucket for _, bucket in members]
            and not self.addresses.refresh()
            and not self.bucket.has_moved_counters()
        )


class JoinedBuckets:
    """Joined buckets of one optimizer, whose fused update has this rule."""

    def __init__(self, rule: type[Rule]) -> None:
        self._rule = rule
        self._by_member: dict[Bucket, _Entry] = {}
        self._previous: dict[Bucket, _Entry] = {}

    def collect(self, groups: Iterable[GroupLists], copies: Mapping[int, Tensor]) -> list[JoinedBucket]:
        """Return the buckets of all groups, joined, with the gradients of this step.

        Args:
            groups: lists of all groups, up to date, whose step counters are tensors.
            copies: low-precision copies of parameters, by `id` of the parameter.
        """
        self._previous, self._by_member = self._by_member, {}
        members = [(group_lists, bucket) for group_lists in groups for bucket in group_lists.buckets]
        if len(members) == 1:
            return [JoinedBucket(members[0][0].group, members[0][1], members[0][0].guards_have_held)]
        alike = [[*run] for _, run in groupby(members, lambda member: self._key(*member, copies))]
        runs = list(chain.from_iterable(map(self._join, alike)))
        self._previous = {}
        return runs

    def release_gradients(self) -> None:
        for bucket in {entry.bucket for entry in self._by_member.values()}:
            bucket.grads.clear()

    def _key(self, group_lists: GroupLists, bucket: Bucket, copies: Mapping[int, Tensor]) -> object:
        """Return an object that is equal for buckets that one call may update."""
        previous = self._previous.get(bucket)
        settings = self._rule.settings_of(group_lists.group).values()
        return (
            self._kind_of(bucket) if previous is None else previous.bucket,
            [setting if type(setting) in _NUMBERS else id(setting) for setting in settings],
            {copies[id(param)].dtype for param in bucket.params} if copies else None,
        )

    def _kind_of(self, bucket: Bucket) -> object:
        """Return the device and the dtypes of each list, or the bucket itself if it must not be joined."""
        lists: list[list[Any]] = [*self._written(bucket), bucket.grads]
        tensors = [tensor for tensor in chain.from_iterable(lists) if tensor is not None]
        if all(type(tensor) in PLAIN_TYPES and tensor.layout is torch.strided for tensor in tensors):
            return bucket.device, [
                {getattr(tensor, "dtype", None) for tensor in tensors} for tensors in lists
            ]
        return bucket

    def _join(self, members: Sequence[_Member]) -> list[JoinedBucket]:
        entry = self._previous.get(members[0][1])
        if len(members) > 1 and (entry is None or not entry.fits(members)):
            entry = self._entry_of([bucket for _, bucket in members])
        if len(members) == 1 or entry is None:
            self._by_member.update((bucket, _Entry(bucket, [bucket], None)) for _, bucket in members)
            return [
                JoinedBucket(group_lists.group, bucket, group_lists.guards_have_held)
                for group_lists, bucket in members
            ]
        self._by_member.update((bucket, entry) for _, bucket in members)
        entry.bucket.grads[:] = chain.from_iterable(bucket.grads for _, bucket in members)
        guards_have_held = all(group_lists.guards_have_held for group_lists, _ in members)
        return [JoinedBucket(members[0][0].group, entry.bucket, guards_have_held)]

    def _entry_of(self, buckets: list[Bucket]) -> _Entry | None:
        """Return the joined bucket, or None if two tensors may share memory, like a counter of several parameters."""
        bucket = Bucket.join(buckets)
        written = [tensor for tensor in chain.from_iterable(self._written(bucket)) if tensor is not None]
        if may_share_memory(written):
            return None
        return _Entry(bucket, buckets, Addresses(written[: len(written) - len(bucket.steps)]))

    def _written(self, bucket: Bucket) -> list[list[Any]]:
        return [bucket.params, *map(bucket.__getitem__, self._rule.STATES), bucket.steps]
