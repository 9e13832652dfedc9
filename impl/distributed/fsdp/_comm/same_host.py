"""Transport for ranks of one host that read one another's memory, so that data is copied once.

gloo sends through sockets, also to a process of the same host: into the kernel and out of it again, by threads that
take the processor from those that compute. Linux lets a process read the memory of another process of the same user
(`process_vm_readv`), unless a security module like Yama reserves that for debuggers. If every rank of a group can read
the memory of all others, each publishes the address of its data, reads the others' data, and continues when all have
read. If one rank cannot, no rank does.

Small all-reduces over gloo synchronise the ranks: no rank reads before all have published, and no rank overwrites its
data before all have read. If there is little data, this takes longer than sending it.
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

_CHUNK_BYTES = 1 << 18  # bytes summed at once, which stay in the cache
# Process ids by rank of the group, or None if memory cannot be read.
_processes: weakref.WeakKeyDictionary[dist.ProcessGroup, tuple[int, ...] | None] = weakref.WeakKeyDictionary()


class _Span(ctypes.Structure):
    _fields_ = (("start", c_void_p), ("nbytes", c_size_t))


@dataclass(frozen=True)
class SameHostPeers:
    """Transport for a group whose ranks can read the memory of one another."""

    group: dist.ProcessGroup
    pids: tuple[int, ...]

    @property
    def rank(self) -> int:
        return self.group.rank()

    def all_gather(self, output: Tensor, shard: Tensor, complete: Complete) -> None:
        rows = output.view(len(self.pids), -1)
        rows[self.rank].copy_(shard)
        self.all_gather_rows([rows], complete)

    def all_gather_rows(self, outputs: Sequence[Tensor], complete: Complete) -> None:
        with self._offering([output[self.rank] for output in outputs], complete) as addresses:
            for peer in self._peers():
                for address, output in zip(addresses[peer], outputs, strict=True):
                    self._read(peer, address, output[peer])

    def reduce_scatter(self, shard: Tensor, buffer: Tensor, complete: Complete) -> None:
        local = buffer.view(len(self.pids), -1)[self.rank]
        length = _CHUNK_BYTES // shard.itemsize
        terms = shard.new_empty(len(self.pids), min(length, shard.numel()))
        with self._offering([buffer], complete) as addresses:
            for start in range(0, shard.numel(), length):
                total = shard[start : start + length]
                peer_terms = terms[:, : total.numel()]
                offset = self.rank * shard.nbytes + start * shard.itemsize
                for peer in self._peers():
                    self._read(peer, addresses[peer][0] + offset, peer_terms[peer])
                _add_up(peer_terms, self.rank, local[start : start + length], total)

    def _peers(self) -> Iterator[int]:
        """Return the other ranks, from the next rank on, so that not all read the same memory at once."""
        size = len(self.pids)
        return ((self.rank + distance) % size for distance in range(1, size))

    @contextmanager
    def _offering(self, offered: Sequence[Tensor], complete: Complete) -> Generator[list[list[int]]]:
        """Context manager that yields the addresses of each rank's tensors, and exits when all ranks have read."""
        addresses, nbytes = (
            [tensor.data_ptr() for tensor in offered],
            sum(tensor.nbytes for tensor in offered),
        )
        rows = _exchange_numbers(self.group, [nbytes, *addresses], complete)
        for peer, (peer_bytes, *_) in enumerate(rows):
            if peer_bytes != nbytes:
                raise OwnFault(f"rank {peer} of the group offers {peer_bytes} bytes, this one {nbytes}")
        yield [row[1:] for row in rows]
        _exchange_numbers(self.group, [0], complete)

    def _read(self, peer: int, address: int, into: Tensor) -> None:
        if not _copy_memory(self.pids[peer], address, into):
            reason = (
                os.strerror(ctypes.get_errno()) if ctypes.get_errno() else "it ends before the offered data"
            )
            # Not an OwnFault: the rank has ended or given up, and the monitors name the lost rank.
            raise RuntimeError(f"the memory of rank {peer} of the group cannot be read: {reason}")


def same_host_peers_in(group: dist.ProcessGroup, complete: Complete) -> SameHostPeers | None:
    """Return the peers of a group, or None if a rank cannot read another's memory.

    Collectives: two, of a few numbers, at the first call for a group.
    """
    if group not in _processes:
        _processes[group] = _probe(group, complete)
    pids = _processes[group]
    return None if pids is None else SameHostPeers(group, pids)


def has_same_host_peers(group: dist.ProcessGroup) -> bool:
    """Return whether the first `same_host_peers_in` call found peers. False before that call."""
    return _processes.get(group) is not None


def _probe(group: dist.ProcessGroup, complete: Complete) -> tuple[int, ...] | None:
    """Return all process ids, or None if a rank cannot or must not read the memory of every other rank."""
    here = _kernel_id()
    token = torch.tensor([secrets.randbits(62)], device="cpu")
    rows = _exchange_numbers(group, [here, os.getpid(), token.data_ptr(), int(token)], complete)
    copy = torch.zeros_like(token)
    # From torch 2.15 on, this variable makes a group check for nan what its own collectives send.
    must_send = os.environ.get("TORCH_DIST_NAN_CHECK") == "1"
    reads_all = (
        not must_send
        and _process_vm_readv() is not None
        and all(
            kernel == here and _copy_memory(pid, address, copy) and int(copy) == number
            for kernel, pid, address, number in rows
        )
    )
    if [0] in _exchange_numbers(group, [int(reads_all)], complete):
        return None
    return tuple(pid for _, pid, _, _ in rows)


def _exchange_numbers(
    group: dist.ProcessGroup, numbers: Sequence[int], complete: Complete
) -> list[list[int]]:
    """Return the numbers of each rank."""
    rows = torch.zeros(group.size(), len(numbers), dtype=torch.int64, device="cpu")
    rows[group.rank()] = torch.tensor(numbers, device="cpu")
    complete(all_reduce, group, [rows])
    return rows.tolist()


def _add_up(terms: Tensor, rank: int, local: Tensor, total: Tensor) -> None:
    """Sum `terms` [ranks, numel] into `total`, with `local` as this rank's term. Round low precision once."""
    if len(terms) == 2:
        torch.add(local, terms[1 - rank], out=total)
    else:
        terms[rank].copy_(local)
        torch.sum(terms, 0, out=total)


def _kernel_id() -> int:
    """Return a number that is equal for all processes that share a kernel and a process namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        identity = boot + os.readlink("/proc/self/ns/pid")
    except OSError:
        identity = secrets.token_hex()
    return int.from_bytes(hashlib.blake2b(identity.encode(), digest_size=7).digest(), "big")


@functools.cache
def _process_vm_readv() -> Callable[..., int] | None:
    """Return Linux's `process_vm_readv`, which leaves its error in `ctypes.get_errno()`."""
    if sys.platform != "linux":
        return None
    of_process = ctypes.CFUNCTYPE(
        c_ssize_t, c_int, c_void_p, c_ulong, c_void_p, c_ulong, c_ulong, use_errno=True
    )
    try:
        return of_process(("process_vm_readv", ctypes.CDLL(None)))
    except AttributeError:
        return None


def _copy_memory(pid: int, address: int, into: Tensor) -> bool:
    """Copy another process's memory into a tensor. Return False if that fails."""
    reader = _process_vm_readv()
    assert reader is not None
    copied, total = 0, into.nbytes
    while copied < total:
        here, there = (_Span(start + copied, total - copied) for start in (into.data_ptr(), address))
        count = reader(pid, byref(here), 1, byref(there), 1, 0)
        if count <= 0:
            return False
        copied += count
    return True
