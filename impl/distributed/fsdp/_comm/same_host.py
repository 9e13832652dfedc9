"""Ranks of one host that read one another's memory, so that what they exchange is copied once.

gloo sends through sockets, to a process of the same host too: into the kernel and out of it again, by threads that take
the processor from those that compute. Linux lets a process read the memory of another of the same user
(`process_vm_readv`), unless a security module like Yama keeps that to debuggers. Where every rank of a group can read
all others, each tells where its part lies, reads what it needs of theirs, and goes on when all have read. Where one
rank cannot, none does.

Rows of numbers that go over gloo pace this: no rank reads before all have told, and none touches what it offered before
all have read. For little data that takes longer than sending it.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import secrets
import sys
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from ctypes import byref, c_int, c_size_t, c_ssize_t, c_ulong, c_void_p
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from impl.distributed.fsdp._comm.group_collectives import all_reduce
from impl.distributed.fsdp._comm.transport import Complete, OwnFault

_CHUNK_BYTES = 1 << 18  # of what is summed at once: it stays in the cache
# By their numbers in the group; None where they cannot.
_processes: weakref.WeakKeyDictionary[dist.ProcessGroup, tuple[int, ...] | None] = weakref.WeakKeyDictionary()


class _Span(ctypes.Structure):
    _fields_ = (("start", c_void_p), ("nbytes", c_size_t))


@dataclass(frozen=True)
class SameHostPeers:
    """The ranks of a group, each of which can read the memory of the others; a transport."""

    group: dist.ProcessGroup
    pids: tuple[int, ...]

    @property
    def rank(self) -> int:
        return self.group.rank()

    def all_gather(self, output: Tensor, mine: Tensor, complete: Complete) -> None:
        parts = output.view(len(self.pids), -1)
        parts[self.rank].copy_(mine)
        self.all_gather_rows([parts], complete)

    def all_gather_rows(self, outputs: Sequence[Tensor], complete: Complete) -> None:
        with self._offered([output[self.rank] for output in outputs], complete) as addresses:
            for peer in self._peers():
                for address, output in zip(addresses[peer], outputs, strict=True):
                    self._read(peer, address, output[peer])

    def reduce_scatter(self, shard: Tensor, buffer: Tensor, complete: Complete) -> None:
        mine = buffer.view(len(self.pids), -1)[self.rank]
        length = _CHUNK_BYTES // shard.itemsize
        terms = shard.new_empty(len(self.pids), min(length, shard.numel()))
        with self._offered([buffer], complete) as addresses:
            for start in range(0, shard.numel(), length):
                total = shard[start : start + length]
                now = terms[:, : total.numel()]
                offset = self.rank * shard.nbytes + start * shard.itemsize
                for peer in self._peers():
                    self._read(peer, addresses[peer][0] + offset, now[peer])
                _add_up(now, self.rank, mine[start : start + length], total)

    def _peers(self) -> Iterator[int]:
        """From the next rank on, so that not all read the same memory at once."""
        size = len(self.pids)
        return ((self.rank + distance) % size for distance in range(1, size))

    @contextmanager
    def _offered(self, offered: Sequence[Tensor], complete: Complete) -> Generator[list[list[int]]]:
        """Where lies what each rank offers; left when all have read."""
        addresses, nbytes = [each.data_ptr() for each in offered], sum(each.nbytes for each in offered)
        rows = _exchanged(self.group, [nbytes, *addresses], complete)
        for peer, (theirs, *_) in enumerate(rows):
            if theirs != nbytes:
                raise OwnFault(f"rank {peer} of the group offers {theirs} bytes, this one {nbytes}")
        yield [row[1:] for row in rows]
        _exchanged(self.group, [0], complete)

    def _read(self, peer: int, address: int, into: Tensor) -> None:
        if not _is_read(self.pids[peer], address, into):
            why = os.strerror(ctypes.get_errno()) if ctypes.get_errno() else "it ends before what was offered"
            # Not its own fault: the rank has ended or given up, and the monitors name the one that is lost.
            raise RuntimeError(f"the memory of rank {peer} of the group cannot be read: {why}")


def same_host_peers_in(group: dist.ProcessGroup, complete: Complete) -> SameHostPeers | None:
    """None where a rank of the group cannot read another's memory.

    Collectives: two, of a few numbers, at the first call for a group.
    """
    if group not in _processes:
        _processes[group] = _probe(group, complete)
    pids = _processes[group]
    return None if pids is None else SameHostPeers(group, pids)


def has_same_host_peers(group: dist.ProcessGroup) -> bool:
    """What the first call of `same_host_peers_in` has found; False before it."""
    return _processes.get(group) is not None


def _probe(group: dist.ProcessGroup, complete: Complete) -> tuple[int, ...] | None:
    """Each rank shows a number in its memory, and tries to read those of the others."""
    here = _kernel_id()
    token = torch.tensor([secrets.randbits(62)], device="cpu")
    rows = _exchanged(group, [here, os.getpid(), token.data_ptr(), int(token)], complete)
    seen = torch.zeros_like(token)
    reads_all = _reader() is not None and all(
        kernel == here and _is_read(pid, address, seen) and int(seen) == number
        for kernel, pid, address, number in rows
    )
    if [0] in _exchanged(group, [int(reads_all)], complete):
        return None
    return tuple(pid for _, pid, _, _ in rows)


def _exchanged(group: dist.ProcessGroup, numbers: Sequence[int], complete: Complete) -> list[list[int]]:
    """The numbers that each rank tells."""
    rows = torch.zeros(group.size(), len(numbers), dtype=torch.int64, device="cpu")
    rows[group.rank()] = torch.tensor(numbers, device="cpu")
    complete(all_reduce, group, [rows])
    return rows.tolist()


def _add_up(terms: Tensor, rank: int, mine: Tensor, total: Tensor) -> None:
    """Sum `terms` [ranks, numel], of which this rank's is `mine`; rounded once where the dtype is a low precision."""
    if len(terms) == 2:
        torch.add(mine, terms[1 - rank], out=total)
    else:
        terms[rank].copy_(mine)
        torch.sum(terms, 0, out=total)


def _kernel_id() -> int:
    """The same on all processes that know each other by their numbers."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        identity = boot + os.readlink("/proc/self/ns/pid")
    except OSError:
        identity = secrets.token_hex()
    return int.from_bytes(hashlib.blake2b(identity.encode(), digest_size=7).digest(), "big")


@functools.cache
def _reader() -> Callable[..., int] | None:
    """Linux's `process_vm_readv`, which leaves its error in `ctypes.get_errno()`."""
    if sys.platform != "linux":
        return None
    of_process = ctypes.CFUNCTYPE(
        c_ssize_t, c_int, c_void_p, c_ulong, c_void_p, c_ulong, c_ulong, use_errno=True
    )
    try:
        return of_process(("process_vm_readv", ctypes.CDLL(None)))
    except AttributeError:
        return None


def _is_read(pid: int, address: int, into: Tensor) -> bool:
    """Copy as much of a process's memory as `into` takes; False where that fails."""
    reader = _reader()
    assert reader is not None
    done, total = 0, into.nbytes
    while done < total:
        here, there = (_Span(start + done, total - done) for start in (into.data_ptr(), address))
        count = reader(pid, byref(here), 1, byref(there), 1, 0)
        if count <= 0:
            return False
        done += count
    return True
