"""Thread that compares this rank's collectives with those of other ranks while the main thread computes.

`collective_order.py` says when ranks compare, this file how. Ranks compare *spans* of their collectives. The rank that
ends a step first publishes its span. The others compare its digest with theirs, and read the span if they differ.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import queue
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from impl.distributed.fsdp._comm.desync.entered_collectives import EnteredCollectives
from impl.distributed.fsdp._comm.desync.foreign_collective import ForeignCollective, foreign_collective
from impl.distributed.fsdp._comm.desync.group_store import STORE_IS_GONE, GroupStore

_log = logging.getLogger(__name__)

# Start of an all-gather's entry. torch has an error text for ranks that differ in these.
GATHERED = "gathered"
REDUCED = "reduced"
OF_STATES = "of a state dict"  # replacement for the unit in an entry
# Follows the unit the first time, before its sharding settings that are not defaults.
WITH = " with "
DIVIDED = " divided by "  # prefix of the user's divide factor
# Follows a reduced unit, before its parameters that have no gradients on this rank.
WITHOUT = " without "
# Entry of a unit whose parameters were kept unsharded and written to since.
GATHERED_AGAIN = "gathered again, since its shard was written to,"

_POLL_S = 0.25  # pause between reads of the store
# Limit for all ranks of a group together, because one process serves the store.
_POLLS_A_SECOND = 256
_ANSWER_S = 3.0  # time for an answer of a live rank, also on a busy machine
_STUCK_S = 1.0  # shortest time in a user's collective that counts as waiting
_LONG_S = 5.0  # limit of a collective, and of a comparison
_VERDICT_POLL_S = 0.01
_KEPT_SPANS = 64
_KEPT_STEPS = 8  # steps kept in the store by the rank that ended them first
_MOST_NAMED_RANKS = 4


@dataclass(frozen=True)
class CollectiveSpan:
    """Collectives in the order in which a rank issued them; `start` counts those before."""

    start: int
    entries: list[str] = field(default_factory=list)

    @property
    def stop(self) -> int:
        return self.start + len(self.entries)

    def digest(self) -> str:
        text = "\n".join([str(self.start), *self.entries])
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


class CollectiveHistory:
    """The last spans of this rank. The thread that issues collectives writes, the monitor reads."""

    def __init__(self) -> None:
        self.now = CollectiveSpan(0)
        self.thread = 0  # id of the thread that issued the last collective
        # Collectives before which this rank itself reports to the others that it has arrived.
        self.rendezvous: set[int] = set()
        self._kept = deque([self.now], maxlen=_KEPT_SPANS)

    def close(self) -> CollectiveSpan:
        closed = self.now
        self.now = CollectiveSpan(closed.stop)
        self._kept.append(self.now)
        return closed

    def difference(self, other: CollectiveSpan) -> tuple[str, str] | None:
        """Return this rank's and the other's first different entries, or None."""
        for span in list(self._kept):
            for number in range(max(span.start, other.start), min(span.stop, other.stop)):
                entry, other_entry = span.entries[number - span.start], other.entries[number - other.start]
                if entry != other_entry:
                    return entry, other_entry
        return None


class DesyncMonitor:
    """Comparison of the collectives of one process group.

    Args:
        ranks: the group's ranks, as numbers of the default group.
        host_may_wait_unseen: no verdict can be raised in the main thread while it waits.
    """

    def __init__(
        self, store: GroupStore, history: CollectiveHistory, ranks: list[int], host_may_wait_unseen: bool
    ) -> None:
        self.store = store
        self.verdict = ""  # reason to refuse this group's collectives from now on
        # The verdict names a difference between live ranks, all of which will raise.
        self.peers_complete_collectives = False
        self.has_lost_store = False  # a pending collective will never complete
        self.entered = EnteredCollectives()
        # Number of the message that every rank answers with its pending collective.
        self._verdict_number = 0
        self._has_refused = False  # raised the verdict on this rank
        self.has_completed_pending = False  # pending collectives of other ranks were completed
        self._history = history
        self._ranks = ranks
        self._logs_verdict = host_may_wait_unseen
        self._poll_s = max(_POLL_S, store.size / _POLLS_A_SECOND)
        # Spans of ended steps. A None stops the thread.
        self._to_compare: queue.SimpleQueue[CollectiveSpan | None] = queue.SimpleQueue()
        self._may_compare = threading.Semaphore(1)  # free once the previous span is compared
        self._has_ended = False  # whether the thread has
        self._steps = 0
        self._published: deque[int] = deque()
        self._unreached: list[Any] = []  # messages with spans that this rank has not reached yet
        self._position = (0, 0.0)  # number of issued collectives, and since when
        # The user's collective in which the host waits, and since when.
        self._foreign_wait: tuple[ForeignCollective | None, float] = (None, 0.0)
        self._thread = threading.Thread(target=self._run, name="FSDP's order of collectives", daemon=True)
        self._thread.start()

    # Called by the thread that issues collectives

    def compare(self, span: CollectiveSpan) -> None:
        """Compare in the background, after the previous span is compared."""
        if not self._has_ended:
            self._may_compare.acquire(timeout=_LONG_S)
            self._to_compare.put(span)

    def stop(self) -> None:
        self._to_compare.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(_ANSWER_S)

    def announce_rendezvous(self, number: int, entry: str) -> None:
        """Ask the monitors of ranks that issue another collective at this number to report it."""
        self._post("rendezvous", start=number, entries=[entry])

    def report_difference(self, entry: str, rank: int, other_entry: str) -> None:
        problem, cure = describe_difference(entry, other_entry)
        self._publish_verdict(
            f"{problem}: rank {self._ranks[self.store.rank]} {entry} where rank {self._ranks[rank]} {other_entry}; "
            f"{cure}",
            is_difference=True,
        )

    def refusal(self, group: dist.ProcessGroup) -> RuntimeError:
        """Return the error of the verdict. The first call completes collectives that only other ranks have entered.

        The errors of later calls name the cure, because another model may have used the group before.
        """
        if self.peers_complete_collectives and not self.has_completed_pending:
            self.has_completed_pending = True
            with contextlib.suppress(RuntimeError):  # the verdict matters, not that a peer is gone
                self._complete_pending(group)
        is_repeated, self._has_refused = self._has_refused, True
        cure = "\nThis process group shards no more models; make a new one by torch.distributed.new_group()"
        return RuntimeError(f"{self.verdict}{cure if is_repeated else ''}")

    def _complete_pending(self, group: dist.ProcessGroup) -> None:
        end = time.monotonic() + _LONG_S
        while not self._verdict_number and not self._has_ended and time.monotonic() < end:
            time.sleep(_VERDICT_POLL_S)
        if self._verdict_number:
            descriptions = self.store.collect_replies(self._verdict_number, within_s=_LONG_S)
            if len(descriptions) == self.store.size:
                self.entered.complete_pending([*descriptions.values()], group)

    def explain_failure(self, entry: str) -> str:
        """Return the verdict about a collective that failed or was waiting for a verdict."""
        if self.verdict:
            return self.verdict
        failed = f"rank {self._ranks[self.store.rank]} {entry} without success"
        try:
            now = self._history.now
            self._post("span", start=now.start, entries=now.entries)
            answers = self.store.collect_replies(
                self._post("call"), within_s=max(_ANSWER_S, 3 * self._poll_s)
            )
            if not self.verdict:
                self._publish_verdict(f"{failed}; {self._whereabouts(answers)}")
        except dist.DistError:
            return f"{failed}; the store does not answer either, so {STORE_IS_GONE}"
        return self.verdict

    # The thread

    def _run(self) -> None:
        try:
            while True:
                try:
                    awaits_answers = self.peers_complete_collectives and not self._verdict_number
                    span = self._to_compare.get(timeout=_VERDICT_POLL_S if awaits_answers else self._poll_s)
                except queue.Empty:
                    self._publish_if_stuck()
                    self._read_messages()
                    continue
                if span is None:
                    return
                self._compare(span)
                self._read_messages()
                self._may_compare.release()
        except dist.DistError as error:
            _log.debug("the order of collectives is not compared any more: %s", error)
            if isinstance(error, dist.DistNetworkError) and self.store.is_kept_by_rank_0 and 0 in self._ranks:
                self._wait_for_last_spans()
                self.has_lost_store = True
        finally:
            self._has_ended = True
            self._may_compare.release()

    def _wait_for_last_spans(self) -> None:
        """Wait for the last collectives of a rank that ended normally, which may still be in transit."""
        end = time.monotonic() + _LONG_S
        with contextlib.suppress(queue.Empty):
            while self._to_compare.get(timeout=max(0.0, end - time.monotonic())) is not None:
                self._may_compare.release()

    def _compare(self, span: CollectiveSpan) -> None:
        step, self._steps = self._steps, self._steps + 1
        digest = span.digest()
        rank, first = self.store.claim(f"step/{step}", digest)
        if rank == self.store.rank:
            self._publish(step, span)
        elif first != digest:
            self._compare_with(rank, CollectiveSpan(**json.loads(self.store.get(f"span/{step}"))))

    def _publish(self, step: int, span: CollectiveSpan) -> None:
        self.store.set(f"span/{step}", json.dumps({"start": span.start, "entries": span.entries}))
        self._published.append(step)
        if len(self._published) > _KEPT_STEPS:
            old = self._published.popleft()
            self.store.delete(f"step/{old}")
            self.store.delete(f"span/{old}")

    def _compare_with(self, rank: int, other: CollectiveSpan) -> bool:
        """Return whether another rank's span equals this rank's, as far as both have come."""
        difference = self._history.difference(other)
        if difference is not None:
            self.report_difference(difference[0], rank, difference[1])
        return difference is None

    def _publish_if_stuck(self) -> None:
        """Publish a step that does not make progress."""
        now, (position, since_s) = self._history.now, self._position
        if now.stop != position:
            self._position = (now.stop, time.monotonic())
        elif now.entries and time.monotonic() - since_s > _LONG_S:
            self._post("span", start=now.start, entries=now.entries)
            self._position = (position, float("inf"))

    def _read_messages(self) -> None:
        messages = [*self._unreached, *self.store.new_messages()]
        self._unreached = [message for message in messages if not self._has_handled(*message)]

    def _has_handled(self, number: int, message: Any) -> bool:
        rank = message["rank"]
        match message["kind"]:
            case "verdict":
                self._set_verdict(message["text"], is_difference=message["is_difference"])
                if self.peers_complete_collectives and not self._verdict_number:
                    self.store.answer(number, self.entered.describe_pending())
                    self._verdict_number = number
            case "call":
                entries = self._history.now.entries
                last = f"last {entries[-1]}" if entries else "is between two steps"
                self.store.answer(number, f"{self._history.now.stop} {last}")
            case kind if rank != self.store.rank:
                other = CollectiveSpan(message["start"], message["entries"])
                # Read this first, because this rank goes on meanwhile.
                has_come_to_it = self._history.now.stop >= other.stop
                is_same = self._compare_with(rank, other)
                if not has_come_to_it:
                    return not is_same or self._report_foreign_wait(rank, other)
                if kind == "rendezvous" and is_same and other.start not in self._history.rendezvous:
                    self.store.count_up(f"met/{other.start}")
            case _:
                pass
        return True

    def _report_foreign_wait(self, rank: int, other: CollectiveSpan) -> bool:
        """Report this rank if it waits in a user's collective for a rank that waits for it. Return whether it does."""
        now_s, (earlier, since_s) = time.monotonic(), self._foreign_wait
        current = None if self._logs_verdict else foreign_collective(self._history.thread)
        if current is None or current != earlier:
            self._foreign_wait = (current, now_s)
            return False
        waits_for_it = self._ranks[rank] in current.ranks and now_s - since_s >= max(_STUCK_S, self._poll_s)
        if not waits_for_it or self._history.now.stop >= other.stop:
            return False
        self._publish_verdict(
            f"a rank waits in a user's collective for ranks that wait for it: rank "
            f"{self._ranks[self.store.rank]} waits in torch.distributed.{current.name}() where rank "
            f"{self._ranks[rank]} {other.entries[-1]}; call it, and the model, on every rank in the same order"
        )
        _log.error("%s", self.verdict)  # logged, because nothing can be raised there
        return True

    def _post(self, kind: str, **content: Any) -> int:
        return self.store.post({"kind": kind, "rank": self.store.rank, **content})

    def _publish_verdict(self, verdict: str, *, is_difference: bool = False) -> None:
        self._set_verdict(verdict, is_difference=is_difference)
        self._post("verdict", text=verdict, is_difference=is_difference)

    def _set_verdict(self, verdict: str, *, is_difference: bool) -> None:
        if not self.verdict:
            self.peers_complete_collectives = is_difference and not self._logs_verdict
            self.verdict = verdict
            self.entered.close()
            if self._logs_verdict:
                _log.error("%s", verdict)

    def _whereabouts(self, answers: dict[int, str]) -> str:
        """Describe the ranks that do not answer, or else those that have not come as far."""
        unanswered = [rank for rank in range(self.store.size) if rank not in answers]
        if unanswered:
            return f"{self._named(unanswered)}: no answer, so ended or stopped"
        counts = {rank: int(answer.partition(" ")[0]) for rank, answer in answers.items()}
        late = [rank for rank, count in counts.items() if count < max(counts.values())]
        reported = "; ".join(
            f"{self._named([rank])} {answers[rank].partition(' ')[2]}" for rank in late[:_MOST_NAMED_RANKS]
        )
        return reported or "all ranks answer"

    def _named(self, ranks: list[int]) -> str:
        shown = ", ".join(str(self._ranks[rank]) for rank in ranks[:_MOST_NAMED_RANKS])
        more = f" and {len(ranks) - _MOST_NAMED_RANKS} more" if len(ranks) > _MOST_NAMED_RANKS else ""
        return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


def describe_difference(*entries: str) -> tuple[str, str]:
    """Return the problem of two ranks with these entries, and its cure."""
    if any(entry.startswith(GATHERED_AGAIN) for entry in entries):
        return (
            "parameters that were kept unsharded were written to on some ranks only",
            "write to them on every rank or on none, and between a forward and its backward on none",
        )
    units = {entry.partition("'")[2].partition("'")[0] for entry in entries}
    if len(units) == 1 and len({entry.partition(WITHOUT)[2] for entry in entries}) > 1:
        return (
            "the ranks have gradients of different parameters",
            "every rank must freeze the same parameters, and use the same ones; with fully_shard, "
            "set_reduce_scatter_unused_params(True) reduces zeros for those that a rank does not use",
        )
    if len(units) == len({entry.partition(" ")[0] for entry in entries}) == 1:
        if len({entry.partition(DIVIDED)[2].partition(WITHOUT)[0] for entry in entries}) > 1:
            return (
                "the ranks divide gradients by different factors",
                "call set_gradient_divide_factor() with the same one on every rank",
            )
        if any(WITH in entry for entry in entries):
            return (
                "the ranks have sharded a module differently",
                "every rank must compute and reduce it in the same dtypes, by mp_policy or mixed_precision, and give "
                "it the same placements, and parameters of the same dtype",
            )
    if sum(OF_STATES in entry for entry in entries) == 1:
        return (
            "only some ranks ask for a state dict",
            "call the function that returns it on every rank, also if only one rank writes it",
        )
    gathers = all(entry.startswith(GATHERED) for entry in entries)
    problem = "Forward order differs across ranks" if gathers else "the ranks issue different collectives"
    return problem, "every rank must run the same wrapped modules in the same order, with the same settings"
