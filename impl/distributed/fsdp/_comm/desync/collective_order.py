"""Check that the ranks of a process group issue the same collectives in the same order.

Collectives have no names. If ranks issue them in another order, equal sizes give silently wrong numbers, and unequal
sizes hang or end the process. So each rank records what it issues, `gathered 'blocks.1'`, and for reductions the
missing gradients, `reduced 'blocks.1' without blocks.1.bias`. The ranks compare the records through the group's store.
No collective is added. The first gather and the first reduction of a unit also name the sharding settings that are not
defaults.

- *After each step* a thread, the monitor, compares a digest of the step's collectives with the digest of the rank that
  arrived first. A step does not end before this rank has compared the previous step. So a rank that
  finds a difference raises at most one step late. The others raise at their next collective, which they do not enter.
- *Before a collective* that never followed its predecessor before, the ranks compare at once, if waiting for
  collectives blocks the host (over gloo, also for tensors of an accelerator). This happens in the first step, at any
  change of order, and in the second step of units that named their settings in the first. A difference is detected
  before anything is sent. If the predecessor was once followed by another collective, this rank waits until all ranks
  have reported their next one, 10 s at most.
- *In a collective* that takes longer than 5 s, the monitors compare the step so far. A rank whose host waits in a
  user's collective for a rank that waits here is named. If a collective fails or reaches the group's time-out,
  the monitors are called: a rank that does not answer has ended or is stopped, and is named.

The first difference is the verdict. The monitors read the store every 0.25 s, so every rank gets it. It is raised
from a collective that waits, or else at the next collective or at the end of the step. A group with a verdict trains
no more. Before they raise, ranks complete the collectives that only some of them have entered
(`entered_collectives.py`), so that the user's own collectives over the group keep working, and those that save the
model (`allow_saving`). These are not compared any more.

With nccl the host does not wait in collectives. The verdict is logged too, because a host that waits for the device
cannot be interrupted. A rank that died is detected by nccl's own watchdog, which does not name it. Orders that change
in the same way on all ranks are accepted. If ranks diverge at a collective after which each branch has been seen
before, only the digests detect it.

The check is always on because it is cheap. For a step of 12 units on two ranks over gloo (36 collectives), recording
takes 0.2 to 0.3 ms of CPU and the monitor 0.1 to 0.2 ms, of 22 ms (Linear(64, 64)) to 86 ms (Linear(768, 768)) in all.
If there is no usable store, or it is gone while collectives succeed, nothing is compared. If rank 0 of the group kept
the store, a collective that still waits 5 s after the store is gone is abandoned. Its peer may have raised without
ending its process.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import weakref
from collections.abc import Callable, Generator
from contextvars import ContextVar
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from impl.distributed.fsdp._comm.desync.group_store import STORE_IS_GONE, group_store_of
from impl.distributed.fsdp._comm.desync.monitor import CollectiveHistory, DesyncMonitor
from impl.distributed.fsdp._comm.group_collectives import blocks_host
from impl.distributed.fsdp._comm.transport import Complete, OwnFault, issue_and_wait

_WAIT_SLICE = timedelta(seconds=0.25)
_RENDEZVOUS_S = 10.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1e-4, 0.05
# The collectives that followed a collective, each with the collectives that followed it.
_Followers = dict[str, "_Followers"]


_order_checkers: weakref.WeakKeyDictionary[dist.ProcessGroup, CollectiveOrderChecker] = (
    weakref.WeakKeyDictionary()
)


_is_saving: ContextVar[bool] = ContextVar("_is_saving", default=False)


@contextlib.contextmanager
def allow_saving() -> Generator[None]:
    """Context manager in which collectives run although the ranks have differed, so that a user can save the model.

    They wait for the other ranks until the time-out of their group.
    """
    token = _is_saving.set(True)
    try:
        yield
    finally:
        _is_saving.reset(token)


class CollectiveOrderChecker:
    """Check of one process group on this rank. The first collective opens it."""

    def __init__(self) -> None:
        self._history = CollectiveHistory()
        self._monitor: DesyncMonitor | None = None
        self._is_open = False
        self._group: Callable[[], dist.ProcessGroup | None] = lambda: None
        self._blocking_devices: dict[str, bool] = {}  # device type -> whether a wait blocks the host
        self._followers_of: dict[str, _Followers] = {}
        self._followers_of_last: _Followers = {}

    def run(
        self, entry: str, collective: Callable[..., dist.Work], group: dist.ProcessGroup, *arguments: Any
    ) -> None:
        """Record a collective, issue it, and wait for it as its backend does.

        Args:
            entry: text that names the collective in errors.
            arguments: of the collective. The first is a tensor or a list of tensors.
        """
        device = (arguments[0][0] if type(arguments[0]) is list else arguments[0]).device
        self.exchange(entry, group, device, lambda complete: complete(collective, group, *arguments))

    def exchange(
        self, entry: str, group: dist.ProcessGroup, device: torch.device, steps: Callable[[Complete], None]
    ) -> None:
        """Record an operation and let `steps` issue its collectives. Each must complete before the next one.

        Args:
            device: the device of their tensors.
        """
        self.note(entry, group, device)
        monitor = self._monitor
        # `note` let a settled group pass, which only saves. A verdict that arrives after `note` is no permission.
        if monitor is None or monitor.has_completed_pending or not self._blocks_host(group, device):
            steps(issue_and_wait)
            return
        try:
            steps(functools.partial(_complete, monitor))
        except OwnFault:
            raise
        except RuntimeError as error:
            raise RuntimeError(monitor.explain_failure(entry)) from error

    def note(
        self, entry: str, group: dist.ProcessGroup, device: torch.device, *, awaits_all: bool = False
    ) -> None:
        """Record what this rank does. Compare it with the other ranks first if the backend blocks the host.

        Args:
            device: the device of the collective's tensors.
            awaits_all: first wait up to 10 s for all ranks, because what follows cannot be interrupted.

        Raises:
            RuntimeError: the ranks issue different collectives, now or earlier.
        """
        if not self._is_open:
            self._open(entry, group, device)
        monitor = self._monitor
        if monitor is None:
            return
        if monitor.verdict:
            if _is_saving.get() and monitor.has_completed_pending:
                return
            raise monitor.refusal(group)
        followers = self._followers_of_last.get(entry)
        if (followers is None or awaits_all) and self._blocks_host(group, device):
            self._compare_at_once(entry, monitor, group, awaits_all)
        if followers is None:
            followers = self._followers_of_last[entry] = self._followers_of.setdefault(entry, {})
        self._history.thread = threading.get_ident()
        self._history.now.entries.append(entry)
        self._followers_of_last = followers

    def end_step(self) -> None:
        """Send the collectives since the last call to the monitor, which compares them.

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
                f"rank {rank} {entry} without success; the store does not answer, so {STORE_IS_GONE}"
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
            # Stop at exit too. A thread that is inside the store when the interpreter ends would abort the process.
            weakref.finalize(group, self._monitor.stop)

    def _compare_at_once(
        self, entry: str, monitor: DesyncMonitor, group: dist.ProcessGroup, awaits_all: bool
    ) -> None:
        """Compare before anything is sent. Wait for the other ranks if they may know a follower and not come here."""
        number = self._history.now.stop
        store = monitor.store
        try:
            rank, first = store.claim(f"at/{number}", entry)
            if first != entry:
                monitor.report_difference(entry, rank, first)
            elif self._followers_of_last or awaits_all:
                self._history.rendezvous.add(number)
                store.count_up(f"met/{number}")
                if rank == store.rank:
                    monitor.announce_rendezvous(number, entry)
                self._wait_for_all(number, monitor)
        # Without a store, continue without the check.
        except dist.DistError:
            return
        if monitor.verdict:
            raise monitor.refusal(group)

    def _wait_for_all(self, number: int, monitor: DesyncMonitor) -> None:
        end = time.monotonic() + _RENDEZVOUS_S
        pause_s = _FIRST_PAUSE_S
        while not monitor.verdict and time.monotonic() < end:
            if monitor.store.counted(f"met/{number}") >= monitor.store.size:
                return
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def named_ranks(group: dist.ProcessGroup) -> list[int]:
    """Return the group's ranks as numbers of the default group, or of the group itself if torch does not know it."""
    try:
        return dist.get_process_group_ranks(group)
    except KeyError:
        return [*range(group.size())]


def order_checker_of(group: dist.ProcessGroup) -> CollectiveOrderChecker:
    """Return the checker that all units over `group` share."""
    return _order_checkers.setdefault(group, CollectiveOrderChecker())


def _complete(
    monitor: DesyncMonitor, collective: Callable[..., dist.Work], group: dist.ProcessGroup, *arguments: object
) -> None:
    """Issue a collective and wait for it in slices. Raise the verdict, or the error of the collective."""
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
        work.wait(_WAIT_SLICE)
        return
    except RuntimeError:
        pass
    until = float("inf")
    while not work.is_completed() and time.monotonic() < until:
        if monitor.has_lost_store or (monitor.verdict and not monitor.peers_complete_collectives):
            raise RuntimeError(monitor.verdict)
        if monitor.verdict:
            until = min(until, time.monotonic() + _RENDEZVOUS_S)
        with contextlib.suppress(RuntimeError):
            work.wait(_WAIT_SLICE)
    if not work.is_completed():
        raise RuntimeError(monitor.verdict)
    work.wait()
