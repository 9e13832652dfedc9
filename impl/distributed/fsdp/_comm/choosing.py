"""Choice of the transport for a tensor."""

from __future__ import annotations

from impl.distributed.fsdp._comm.group_collectives import GroupCollectives
from impl.distributed.fsdp._comm.same_host import has_same_host_peers, same_host_peers_in
from impl.distributed.fsdp._comm.transport import Complete, Transport

# Least average size of a row, over all ranks' rows, at which reading each row by itself pays.
ROW_BYTES = 1 << 15
# Least size of all ranks' data together at which reading it from memory pays.
LEAST_BYTES = 1 << 19


def transport_for(collectives: GroupCollectives, nbytes: int, on_host: bool, complete: Complete) -> Transport:
    """Return the transport for an exchange of `nbytes`, counted over all ranks.

    Every rank of the group must call this, and all get the same transport.

    Collectives: two, of a few numbers, at the first call for a group over gloo.
    """
    if _may_read_memory(collectives, nbytes, on_host):
        peers = same_host_peers_in(collectives.group, complete)
        if peers is not None:
            return peers
    return collectives


def fills_rows(collectives: GroupCollectives, nbytes: int, rows: int, on_host: bool) -> bool:
    """Return whether the transport for these rows can write each one directly to its destination.

    The answer is the same on all ranks. It is False before `transport_for` has chosen for the group.
    """
    may_read = _may_read_memory(collectives, nbytes, on_host) and nbytes >= rows * ROW_BYTES
    return may_read and has_same_host_peers(collectives.group)


def _may_read_memory(collectives: GroupCollectives, nbytes: int, on_host: bool) -> bool:
    return nbytes >= LEAST_BYTES and on_host and collectives.is_over_gloo
