"""Messages between the ranks of a group, through the store that the group was created with.

A store serves one short request at a time over its own connection, so nothing here waits for a collective. Keys belong
to this group only: torch gives each group a prefix, and a group that is created again over the same store gets another
*generation*.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

# How long a message that was announced may take to arrive.
_ARRIVES = timedelta(seconds=5)
_LOOK_S = 0.01
STORE_IS_GONE = "the process that keeps it has ended: rank 0's, unless a launcher keeps it"


class GroupStore:
    """Store of one group, created by `group_store_of`. Every method raises a RuntimeError if the store is gone."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.is_kept_by_rank_0 = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        self._store = store
        self._read = 0  # number of messages

    def claim(self, name: str, value: str) -> tuple[int, str]:
        """Claim `name` with `value`. Return the first rank that claimed it, and that rank's value."""
        claim = f"{self.rank} {value}"
        rank, _, first = self._store.compare_set(name, "", claim).decode().partition(" ")
        return int(rank), first

    def set(self, name: str, value: str) -> None:
        self._store.set(name, value)

    def get(self, name: str) -> str:
        """Return a value that some rank has set or is about to set."""
        self._store.wait([name], _ARRIVES)
        return self._store.get(name).decode()

    def delete(self, name: str) -> None:
        self._store.delete_key(name)

    def count_up(self, name: str) -> None:
        self._store.add(name, 1)

    def counted(self, name: str) -> int:
        return self._store.add(name, 0)

    def post(self, message: Any) -> int:
        """Leave a message for all ranks and return its number."""
        number = self._store.add("posted", 1)
        self._store.set(f"message/{number}", json.dumps(message))
        return number

    def new_messages(self) -> list[tuple[int, Any]]:
        """Return the messages since the last call, including this rank's own."""
        messages: list[tuple[int, Any]] = []
        for number in range(self._read + 1, self.counted("posted") + 1):
            if not self._store.check([f"message/{number}"]):
                break  # announced, not arrived yet
            messages.append((number, json.loads(self._store.get(f"message/{number}"))))
            self._read = number
        return messages

    def answer(self, number: int, text: str) -> None:
        self._store.set(_answer(number, self.rank), text)

    def collect_replies(self, number: int, within_s: float) -> dict[int, str]:
        """Return the replies to a message by rank. Return early if all ranks have replied."""
        end = time.monotonic() + within_s
        ranks = range(self.size)
        while not self._store.check([_answer(number, rank) for rank in ranks]) and time.monotonic() < end:
            time.sleep(_LOOK_S)
        unanswered = self._unanswered(number, ranks)
        return {
            rank: self._store.get(_answer(number, rank)).decode() for rank in ranks if rank not in unanswered
        }

    def _unanswered(self, number: int, ranks: Sequence[int]) -> set[int]:
        """Return the ranks without a reply. Halve the list, because a store checks many keys at once."""
        if self._store.check([_answer(number, rank) for rank in ranks]):
            return set()
        if len(ranks) == 1:
            return set(ranks)
        half = len(ranks) // 2
        return self._unanswered(number, ranks[:half]) | self._unanswered(number, ranks[half:])


def _answer(number: int, rank: int) -> str:
    return f"answer/{number}/{rank}"


def group_store_of(group: dist.ProcessGroup) -> GroupStore | None:
    """Return the group's store, or None if the group is fake or its backend has no store.

    Raises:
        DistError: the store is gone, so the rank that keeps it is too.
    """
    try:
        store = group.get_group_store()
        # Count first. If the store is gone, this fails at once, but a clone would try to connect for minutes.
        generation = (store.add("impl.fsdp/joined", 1) - 1) // group.size()
        own = store.clone()  # pyright: ignore[reportAttributeAccessIssue]  torch has no stub for it
        # torch 2.14's store of a fake group lacks this method.
        own.compare_set("impl.fsdp/probe", "", "1")
    except dist.DistError:
        raise
    except (RuntimeError, NotImplementedError, AttributeError):
        return None
    return GroupStore(dist.PrefixStore(f"impl.fsdp/{generation}", own), group.rank(), group.size())
