"""Which transport serves a tensor."""

from __future__ import annotations

from impl.distributed.fsdp._comm.group_collectives import GroupCollectives
from impl.distributed.fsdp._comm.same_host import has_same_host_peers, same_host_peers_in
from impl.distributed.fsdp._comm.transport import Complete, Transport

ROW_BYTES = 1 << 15  # of all ranks' rows, on average, that reading each by itself pays for
LEAST_BYTES = 1 << 19  # of all ranks' parts together, that reading them from memory pays for


def transport_for(collectives: GroupCollectives, nbytes: int, on_host: bool, complete: Complete) -> Transport:
    """What exchanges tensors of all ranks' parts, so many bytes: asked on every rank of the group, with one answer.

    Collectives: two, of a few numbers, at the first call for a group over gloo.
    """
    if _may_read_memory(collectives, nbytes, on_host):
        peers = same_host_peers_in(collectives.group, complete)
        if peers is not None:
            return peers
    return collectives


def fills_rows(collectives: GroupCollectives, nbytes: int, rows: int, on_host: bool) -> bool:
    """Whether so many rows are best handed to what `transport_for` will choose, which reads them to where they belong.

    The same on all ranks; False before it has chosen for the group.
    """
    may_read = _may_read_memory(collectives, nbytes, on_host) and nbytes >= rows * ROW_BYTES
    return may_read and has_same_host_peers(collectives.group)


def _may_read_memory(collectives: GroupCollectives, nbytes: int, on_host: bool) -> bool:
    return nbytes >= LEAST_BYTES and on_host and collectives.is_over_gloo
