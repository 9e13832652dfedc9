"""Reduction of a group's gradients while the backward of other units goes on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from impl.distributed.fsdp._comm.desync.monitor import WITHOUT
from impl.distributed.fsdp._engine.interfaces import RootContext
from impl.distributed.fsdp._engine.streams import StreamRole
from impl.distributed.fsdp._engine.unit_params import UnitParams
from impl.distributed.fsdp._params.param_group import ParamGroup, Unsharded
from impl.kernels import no_grad_fast, span


def gradients_are_complete(
    groups: Iterable[ParamGroup], in_graph: Sequence[Unsharded], inputs_are_complete: bool
) -> bool:
    """Return whether no node of the graph still reads the group's views.

    Nodes that read trainable views lead to their gradients. Nodes that read frozen views run before those that compute
    the gradients of inputs, unless an input is a leaf.

    If unused parameters are reduced as zeros, all ranks decide by their inputs.
    """
    if inputs_are_complete and any(group.gradients.must_reduce_zeros() for group in groups):
        return True
    if any(unsharded.lacks_gradients() for unsharded in in_graph):
        return False
    return inputs_are_complete or not any(unsharded.has_frozen for unsharded in in_graph)


def record_unreduced(groups: Iterable[ParamGroup], in_graph: Iterable[Unsharded], name: str) -> None:
    """Record the unit's gradients that this rank only gets at the end of backward, while others may reduce now.

    Collectives: none.
    """
    for group, unsharded in zip(groups, in_graph, strict=False):
        pairs = zip(group.names, unsharded.views, strict=True)
        missing = [param_name for param_name, view in pairs if view.requires_grad and view.grad is None]
        if missing and group.syncs:
            entry = f"left '{name}' for the end of backward{WITHOUT}{', '.join(missing)}"
            group.reduction.note(entry, group.device)


@no_grad_fast
def reduce_gradients(unit: UnitParams[ParamGroup], group: ParamGroup, grads: list[Tensor | None]) -> None:
    """Reduce the gradients of a group of the unit, or add them to the unreduced ones. Clears `grads`.

    Collectives: a reduction over the ranks that the group is sharded over, and an all-reduce over its replicas; none
        if the group does not synchronise.
    """
    root = unit.root
    gradients, reduction = group.gradients, group.reduction
    if unit.contributes_zeros:
        grads[:] = [None if grad is None else torch.zeros_like(grad) for grad in grads]
    if not group.syncs:
        gradients.accumulate_unreduced(grads)
        return
    dtype = group.compute_dtype if reduction.casts_itself else None
    if unit.is_in_full_precision():
        dtype = group.dtype
    if reduction.custom_reduce_scatter is not None:
        # The user's reduce-scatter may allocate the same memory for every input.
        root.streams.wait_stream(StreamRole.COMPUTE, StreamRole.REDUCE)
    # A user's hook may keep its argument, and the buffer becomes `.grad` if nothing is sharded.
    is_scratch = reduction.comm_hook is None and group.process_groups.shard is not None
    buffer = gradients.reduce_input(grads, dtype, partial(root.memory.buffer, is_scratch=is_scratch))
    grads.clear()  # frees their memory for the collective
    root.streams.wait_stream(StreamRole.REDUCE, StreamRole.COMPUTE)
    with span("FSDP::post_backward_reduce", unit.name):
        with root.streams.on(StreamRole.REDUCE):
            scattered = reduction.scatter(buffer, unit.name)
        arrivals: Sequence[tuple[Tensor, Tensor]] = ()
        role = StreamRole.REDUCE
        if scattered is not None:
            role = _begin_all_reduce(group, scattered.output, root)
            with root.streams.on(role):
                reduced = reduction.finish(scattered)
                keeps_buffer = reduced is buffer and root.accumulates_on_reduce_stream
                arrivals = gradients.add(reduced.clone() if keeps_buffer else reduced)
    root.memory.keep_until_reduced(buffer)
    if unit.receiver is not None:
        # A gather that nothing has used may still read the shards.
        arrivals = () if unit.is_prefetched else arrivals
        wait = partial(root.streams.block, root.streams.record(role))
        unit.receiver.receive(unit, group, arrivals, wait)


def _begin_all_reduce(group: ParamGroup, shard: Tensor, root: RootContext) -> StreamRole:
    """Return the stream that reduces a scattered `shard` over replicas during the next reduce-scatter."""
    if not group.process_groups.are_hybrid:
        return StreamRole.REDUCE
    root.streams.wait_stream(StreamRole.ALL_REDUCE, StreamRole.REDUCE)
    root.memory.keep_until_all_reduced(shard)
    return StreamRole.ALL_REDUCE
