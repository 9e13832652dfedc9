"""Whether the ranks of a process group issue the same collectives in the same order.

Collectives have no names: when ranks issue them in another order, equal sizes give wrong numbers in silence and unequal
ones a hang or the end of a process. So each rank notes what it issues, `gathered 'blocks.1'`, and of gradients what it
lacks, `reduced 'blocks.1' without blocks.1.bias`; the ranks compare through the group's store. No collective is added.
The first gather and the first reduction of a unit say what its sharding comes to, where that is not the default.

- *After each step* a thread, the monitor, compares a digest of the step's collectives with that of the rank that was
  first there. A step does not end before this rank has compared the step before it: the rank that finds a difference
  raises at most one step late, and the others in their next collective, which it does not enter.
- *Before a collective* that never came after its predecessor yet, where waiting for collectives blocks the host: over
  gloo, for tensors of an accelerator too. That is the first step, any change of order, and the second step of units
  that said in the first how they are sharded. A difference is found before anything is sent. Where the predecessor was
  once followed by another collective, this rank waits until all have said what they do now, 10 s at most.
- *In a collective* that takes longer than 5 s, the monitors compare the step so far, and a rank whose host waits in a
  collective of the user's own for one that waits here is named. One that fails, or reaches the
  group's time-out, has the monitors called: a rank that does not answer has ended or is stopped, and is named.

The first difference is the verdict. The monitors, which look once a second, carry it to all ranks, where it is raised
from a collective that waits, else at the next one or at the end of the step; a group that differed stays refused.
Before they raise, ranks complete what only some of them have entered (`entered_collectives.py`), so that the user's
own collectives over the group go on working.
With nccl the host does not wait in collectives. The verdict is logged too, since a host that waits for the device
cannot be interrupted. A rank that died is found by nccl's own watchdog, which does not name it.
Orders that change in the same way on all ranks are right. Where ranks part at a collective after which all of them have
gone either way before, the digests alone tell.
It is always on, for what it costs: of a step of 12 units on two ranks over gloo, 36 collectives, noting them takes
0.2 to 0.3 ms of CPU and the monitor 0.1 to 0.2, beside 22 (Linear(64, 64)) to 86 (Linear(768, 768)) in all.
Where the store cannot serve, or is gone while collectives go well, nothing is compared. Where rank 0, if it is of the
group, kept the store, a collective that still waits 5 s after the store is gone is given up: the neighbour that it
waits for may have raised and live on.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from impl.distributed.fsdp._comm.desync.group_store import STORE_IS_GONE, group_store_of
from impl.distributed.fsdp._comm.desync.monitor import CollectiveHistory, DesyncMonitor
from impl.distributed.fsdp._comm.group_collectives import blocks_host
from impl.distributed.fsdp._comm.transport import Complete, OwnFault, issue_and_wait

_SLICE = timedelta(seconds=1)
_MEETING_S = 10.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1e-4, 0.05
# What has come after a collective, and what has come after that.
_Followers = dict[str, "_Followers"]


_order_checkers: weakref.WeakKeyDictionary[dist.ProcessGroup, CollectiveOrderChecker] = (
    weakref.WeakKeyDictionary()
)


class CollectiveOrderChecker:
    """What one rank holds of it for one process group; opened by the first collective."""

    def __init__(self) -> None:
        self._history = CollectiveHistory()
        self._monitor: DesyncMonitor | None = None
        self._is_open = False
        self._group: Callable[[], dist.ProcessGroup | None] = lambda: None
        self._blocking_devices: dict[str, bool] = {}  # by device type, whether a wait blocks the host
        self._followers: dict[str, _Followers] = {}
        self._known: _Followers = {}  # what has come after the last collective

    def run(
        self, entry: str, collective: Callable[..., dist.Work], group: dist.ProcessGroup, *arguments: Any
    ) -> None:
        """Note a collective, issue it, and wait for it as its backend does.

        Args:
            entry: what this rank did, as an error shall say it.
            arguments: of the collective. The first is a tensor or a list of tensors.
        """
        device = (arguments[0][0] if type(arguments[0]) is list else arguments[0]).device
        self.exchange(entry, group, device, lambda complete: complete(collective, group, *arguments))

    def exchange(
        self, entry: str, group: dist.ProcessGroup, device: torch.device, steps: Callable[[Complete], None]
    ) -> None:
        """Note an operation and have `steps` issue its collectives. Each must complete before the next one.

        Args:
            device: that of their tensors.
        """
        self.note(entry, group, device)
        monitor = self._monitor
        if monitor is None or not self._blocks_host(group, device):
            steps(issue_and_wait)
            return
        try:
            steps(functools.partial(_complete, monitor))
        except OwnFault:
            raise
        except RuntimeError as error:
            raise RuntimeError(monitor.explained(entry)) from error

    def note(
        self, entry: str, group: dist.ProcessGroup, device: torch.device, *, awaits_all: bool = False
    ) -> None:
        """Note what this rank does. Compare it with the other ranks first if the backend blocks the host.

        Args:
            device: that of the tensors of the collective.
            awaits_all: what follows cannot be interrupted, so all ranks are to be here first, or 10 s have gone by.

        Raises:
            RuntimeError: the ranks issue different collectives, now or earlier.
        """
        if not self._is_open:
            self._open(entry, group, device)
        monitor = self._monitor
        if monitor is None:
            return
        if monitor.verdict:
            raise monitor.refusal(group)
        known = self._known.get(entry)
        if (known is None or awaits_all) and self._blocks_host(group, device):
            self._meet(entry, monitor, group, awaits_all)
        if known is None:
            known = self._known[entry] = self._followers.setdefault(entry, {})
        self._history.thread = threading.get_ident()
        self._history.now.entries.append(entry)
        self._known = known

    def end_step(self) -> None:
        """Have the monitor compare what came since the last end.

        Raises:
            RuntimeError: the ranks issue different collectives.
        """
        monitor = self._monitor
        if monitor is not None:
            if self._history.now.entries:
                monitor.compare(self._history.close())
            group = self._group()
            if monitor.verdict and group is not None:
                raise monitor.refusal(group)

    def _blocks_host(self, group: dist.ProcessGroup, device: torch.device) -> bool:
        blocks = self._blocking_devices.get(device.type)
        if blocks is None:
            blocks = self._blocking_devices[device.type] = blocks_host(group, device)
        return blocks

    def _open(self, entry: str, group: dist.ProcessGroup, device: torch.device) -> None:
        try:
            store = group_store_of(group)
        except dist.DistError as error:
            rank = named_ranks(group)[group.rank()]
            raise RuntimeError(
                f"rank {rank} {entry} in vain; the store does not answer, so {STORE_IS_GONE}"
            ) from error
        self._is_open = True
        self._group = weakref.ref(group)
        if store is not None:
            self._monitor = DesyncMonitor(
                store,
                self._history,
                named_ranks(group),
                host_may_wait_unseen=not self._blocks_host(group, device),
            )
            # Also at exit: a thread that is inside the store when the interpreter ends would take the process down.
            weakref.finalize(group, self._monitor.stop)

    def _meet(self, entry: str, monitor: DesyncMonitor, group: dist.ProcessGroup, awaits_all: bool) -> None:
        """Compare before anything is sent. Where no rank knows a follower yet, all of them come here and claim."""
        number = self._history.now.stop
        store = monitor.store
        try:
            rank, first = store.claim(f"at/{number}", entry)
            if first != entry:
                monitor.tell_difference(entry, rank, first)
            elif self._known or awaits_all:
                self._history.meetings.add(number)
                store.count_up(f"met/{number}")
                if rank == store.rank:
                    monitor.announce_meeting(number, entry)
                self._wait_for_all(number, monitor)
        except dist.DistError:  # without a store, go on as without any check
            return
        if monitor.verdict:
            raise monitor.refusal(group)

    def _wait_for_all(self, number: int, monitor: DesyncMonitor) -> None:
        end = time.monotonic() + _MEETING_S
        pause_s = _FIRST_PAUSE_S
        while not monitor.verdict and time.monotonic() < end:
            if monitor.store.counted(f"met/{number}") >= monitor.store.size:
                return
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def named_ranks(group: dist.ProcessGroup) -> list[int]:
    """By their numbers in the default group; by those in their own, if torch was not told of it."""
    try:
        return dist.get_process_group_ranks(group)
    except KeyError:
        return [*range(group.size())]


def order_checker_of(group: dist.ProcessGroup) -> CollectiveOrderChecker:
    """The one that all units over a group have."""
    return _order_checkers.setdefault(group, CollectiveOrderChecker())


def _complete(
    monitor: DesyncMonitor, collective: Callable[..., dist.Work], group: dist.ProcessGroup, *arguments: Any
) -> None:
    """Issue a collective and wait slice by slice. Raise when there is a verdict, or what the collective failed with."""
    if not monitor.entered.enter(collective, arguments):
        raise monitor.refusal(group)
    try:
        _wait(monitor, collective(group, *arguments))
    finally:
        monitor.entered.leave()
    if monitor.verdict:  # another rank may have entered it with zeros
        raise monitor.refusal(group)


def _wait(monitor: DesyncMonitor, work: dist.Work) -> None:
    try:
        work.wait(_SLICE)
        return
    except RuntimeError:
        pass
    until = float("inf")
    while not work.is_completed() and time.monotonic() < until:
        if monitor.has_lost_the_keeper or (monitor.verdict and not monitor.peers_complete_collectives):
            raise RuntimeError(monitor.verdict)
        if monitor.verdict:
            until = min(until, time.monotonic() + _MEETING_S)
        with contextlib.suppress(RuntimeError):
            work.wait(_SLICE)
    if not work.is_completed():
        raise RuntimeError(monitor.verdict)
    work.wait()
