"""Which transport serves a tensor."""

from __future__ import annotations

from impl.distributed.fsdp._transport.collectives import GroupCollectives
from impl.distributed.fsdp._transport.same_host import same_host_peers_in
from impl.distributed.fsdp._transport.transport import Complete, Transport

LEAST_BYTES = 1 << 19  # of all ranks' parts together, that reading them from memory pays for


def transport_for(collectives: GroupCollectives, nbytes: int, on_host: bool, complete: Complete) -> Transport:
    """What exchanges tensors of all ranks' parts, so many bytes: asked on every rank of the group, with one answer.

    Collectives: two, of a few numbers, at the first call for a group over gloo.
    """
    if nbytes >= LEAST_BYTES and on_host and collectives.is_over_gloo:
        peers = same_host_peers_in(collectives.group, complete)
        if peers is not None:
            return peers
    return collectives
