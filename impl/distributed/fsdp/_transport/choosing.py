"""Which transport serves a tensor."""

from __future__ import annotations

import weakref

import torch
import torch.distributed as dist
from torch import Tensor

from impl.distributed.fsdp._transport.collectives import GroupCollectives
from impl.distributed.fsdp._transport.same_host import same_host_peers_in
from impl.distributed.fsdp._transport.transport import Complete, Transport

LEAST_BYTES = 1 << 19  # of all ranks' parts together, that reading them from memory pays for
_is_gloo: weakref.WeakKeyDictionary[dist.ProcessGroup, bool] = weakref.WeakKeyDictionary()


def transport_for(group: dist.ProcessGroup, tensor: Tensor, complete: Complete) -> Transport:
    """What exchanges a tensor of all ranks' parts: asked on every rank of the group, with the same answer.

    Collectives: two, of a few numbers, at the first call for a group over gloo.
    """
    is_over_gloo = tensor.is_cpu and _is_over_gloo(group)
    if is_over_gloo and tensor.nbytes >= LEAST_BYTES:
        peers = same_host_peers_in(group, complete)
        if peers is not None:
            return peers
    return GroupCollectives(group, is_over_gloo)


def _is_over_gloo(group: dist.ProcessGroup) -> bool:
    found = _is_gloo.get(group)
    if found is None:
        try:
            found = group._get_backend(torch.device("cpu")).name() == "gloo"
        except (RuntimeError, AttributeError):
            found = False  # it has no backend for the CPU, or is one itself, or names none
        _is_gloo[group] = found
    return found
