"""Unsharding of the parameters of one wrapped module, and reduction of its gradients.

A unit is a state machine with the states of `Phase`. Forward: the parameters are all-gathered, and the module's
forward sees views of them. They are resharded unless they are kept for backward. Backward: a hook on the forward's
outputs gathers them again. A hook on its inputs checks whether every view has its gradient, so that nothing in the
graph will read the views again. Then the gradients are copied into one buffer and averaged, and this rank's shard
becomes the parameters' `.grad`. The end of backward finishes what a graph leaves open: inputs that need no gradient,
and unused parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from impl.distributed.fsdp._engine.input_gradients import InputGradients, hook_gradient_in_backward
from impl.distributed.fsdp._engine.optimizer_writes import track_optimizer_writes
from impl.distributed.fsdp._engine.phase import BACKWARDS, FORWARDS, Move, Phase, next_phase
from impl.distributed.fsdp._engine.shared import RootContext, SummonedParams
from impl.distributed.fsdp._engine.streams import StreamRole, make_gather_wait_for_compute
from impl.distributed.fsdp._params.autograd import (
    differentiable_levels,
    is_linearized,
    next_node,
    outside_transforms,
)
from impl.distributed.fsdp._params.config import Config
from impl.distributed.fsdp._params.nested import (
    cast_floats,
    clone_aliases,
    clone_aliases_in_objects,
    map_tensors,
    tensors_in,
    tensors_in_objects,
)
from impl.distributed.fsdp._params.param_group import (
    ParamGroup,
    Unsharded,
    gather,
    gradients_are_complete,
    record_unreduced,
)
from impl.distributed.fsdp.api import BackwardPrefetch
from impl.kernels import no_grad_fast, span
from impl.optim._shards import register_shard_groups

_Group = TypeVar("_Group", bound=ParamGroup)


class Unit(Generic[_Group]):
    """Parameters of one module that are unsharded together, in one or several groups, and the module's hooks."""

    root: RootContext  # set by the root

    def __init__(self, module: nn.Module, param_groups: Sequence[_Group], config: Config) -> None:
        self._module = weakref.ref(module)
        self.param_groups = list(param_groups)
        self.config = config
        self.name = type(module).__name__
        self.phase = Phase.IDLE
        self.summoned: Sequence[SummonedParams] = ()  # the groups while they are summoned
        self.prefetches_in_forward: Sequence[Unit[Any]] = ()  # added to the previous iteration's order
        self.prefetches_in_backward: Sequence[Unit[Any]] = ()  # replaces the order of forwards
        self.unshards_in_backward = True  # whether gradients are computed from the parameters
        self.param_owners: list[Unit[Any]] = []  # units whose parameters this unit's modules share
        self._sharers: list[Unit[Any]] = []
        self._depth = 0  # nested calls of the module in its own forward
        self._first_node = 0  # first autograd node of the forward's graph
        self._dtypes: list[torch.dtype] | None = None  # dtype of each unsharded group, None while sharded
        self._gathered: Any = None  # the event of their gather
        self._was_prefetched = False
        # Kept after an evaluation, after which writes to shards may go unnoticed.
        self._may_be_stale = False
        # Unsharded by the user, who reshards it before such writes.
        self.is_kept_by_user = False
        self._in_graph: list[Unsharded] = []  # parameters that the last graph was built from
        self.awaits_backward = False
        self._inputs = InputGradients()
        self._hooked_inputs = WeakTensorKeyDictionary()  # leaf inputs with a hook
        # Finish at the end of the backward, not as soon as the gradients exist.
        self._finishes_at_end = False
        self._has_begun_backward = False
        self._may_have_gradients = False  # unsharded since the last backward
        self.awaits_reduction = False  # views may have gradients of earlier backwards
        self.register_params()

    def share_params_of(self, owner: Unit[Any]) -> None:
        """Use `owner`'s parameters in every forward and backward of this unit.

        The owner reduces their gradients once, at the end of backward.
        """
        if owner not in self.param_owners:
            self.param_owners.append(owner)
            owner._sharers.append(self)
            owner._finishes_at_end = True

    @property
    def is_unsharded(self) -> bool:
        return self._dtypes is not None or bool(self.summoned)

    def begin_summoning(self, summoned: Sequence[SummonedParams], by_all: bool) -> None:
        """Enter the summoned phase: on all ranks if `by_all`, else on the first rank."""
        shows = Move.SUMMON if by_all else Move.SUMMON_ON_FIRST_RANK
        self._move(shows if self.param_groups else Move.SUMMON_NOTHING)
        self.summoned = summoned

    def end_summoning(self) -> None:
        self._move(Move.END_SUMMON)
        self.summoned = ()

    def _move(self, move: Move) -> None:
        self.phase = next_phase(self.phase, move, self.name)

    def register_params(self) -> None:
        """Register the current parameters for write tracking and shard-aware norms.

        Call again after they were moved or cast.
        """
        for group in self.param_groups:
            tracked = group.stepped if group.is_tracked else []
            track_optimizer_writes(tracked, group.gradients.exist_on_any_rank)
            for parameter in tracked:
                register_shard_groups(parameter, *group.groups.holding)

    # Forward

    def inputs_of_root(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the inputs of the outermost unit on `device`, cast if its mixed precision requests it."""

        def moved(tensor: Tensor) -> Tensor:
            return tensor if tensor.device == device else tensor.to(device)

        args, kwargs = map_tensors(args, moved), map_tensors(kwargs, moved)
        mixed = self.config.precision
        if mixed.param_dtype is None or not mixed.cast_root_forward_inputs or self._is_in_full_precision():
            return args, kwargs
        return cast_floats(args, mixed.param_dtype), cast_floats(kwargs, mixed.param_dtype)

    def before_forward(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Unshard the parameters and register them in the modules.

        Return the inputs, cast if mixed precision requests it.
        """
        self.root.handle_failed_backward()
        if self.phase in BACKWARDS:  # recomputed for backward: the parameters are unsharded
            return self._cast(args, kwargs)
        if self._depth == 0:
            self._move(Move.BEGIN_FORWARD)
        self._depth += 1
        if self._depth > 1:
            return args, kwargs
        with span("FSDP::pre_forward", self.name):
            self.root.enter_forward(self)
            for group in self.param_groups:
                group.gradients.forget_if_cleared()
            for unit in (self, *self.param_owners):
                unit.unshard()
            if self.config.forward_prefetch:
                self._prefetch(self.root.order.after_in_forward(self))
            for named in self.prefetches_in_forward:
                self._prefetch(named)
            args, kwargs = self._cast(args, kwargs)
            if self.param_groups and torch.is_grad_enabled():
                for tensor in self._inputs.watch((args, kwargs), self.finish_if_complete):
                    self._hook_gradients_of(tensor)
            self._first_node = next_node()
            return args, kwargs

    def after_forward(self, outputs: Any) -> Any:
        """Register hooks on the outputs' gradients, and reshard parameters that are not kept for them.

        Outputs that alias parameters are copied.
        """
        in_graph = [unsharded for unit in (self, *self.param_owners) for unsharded in unit._in_graph]
        outputs = clone_aliases({address for unsharded in in_graph for address in unsharded.memory}, outputs)
        held: Sequence[Tensor] = ()
        if not isinstance(outputs, Tensor) and (objects := tensors_in_objects(outputs)):
            # Permanent memory belongs to the user, whose objects may keep it.
            temporary_memory = (unsharded.memory for unsharded in in_graph if not unsharded.aliases_shard)
            held = clone_aliases_in_objects(
                {address for memory in temporary_memory for address in memory}, objects
            )
        if self.phase in BACKWARDS:
            return outputs
        self._depth -= 1
        if self._depth > 0:
            return outputs
        with span("FSDP::post_forward", self.name):
            self.root.exit_forward(self)
            self._move(Move.END_FORWARD)
            watched = self._entries(outputs, held) if torch.is_grad_enabled() else []
            self._inputs.end()
            for output in watched:
                output.register_hook(self.before_backward)
            self.awaits_backward |= bool(watched)
            self._check_unchanged()
            for unit in (self, *self.param_owners):
                unit._end_use(awaits_backward=bool(watched))
            return outputs

    def is_used_by_sharers(self) -> bool:
        return any(unit.phase in FORWARDS for unit in self._sharers)

    def _end_use(self, *, awaits_backward: bool) -> None:
        """Reshard the unit after its last forward use, unless it stays unsharded for backward."""
        if self.phase in FORWARDS or self.is_used_by_sharers():
            return
        if is_linearized() and not self.summoned:
            self.reshard(frees=False)
            return
        conditions = self.root.is_root(self), awaits_backward
        if all(group.keeps_after_forward(*conditions) for group in self.param_groups):
            self._register_kept()
        else:
            self.reshard(after_forward=True)

    def _entries(self, outputs: Any, held: Sequence[Tensor]) -> list[Tensor]:
        """Return the output tensors whose gradient starts this unit's backward.

        A tensor inside a user object counts only if this forward created it.
        """
        entries = [
            level
            for output in tensors_in(outputs)
            for level in differentiable_levels(output)
            if not level.is_leaf
        ]
        for tensor in held:
            for level in differentiable_levels(tensor):
                if level.grad_fn is not None and level.grad_fn._sequence_nr() >= self._first_node:
                    entries.append(level)
        return entries

    def abandon_forward(self) -> None:
        """Undo a forward that raised, as if it had not been called."""
        self._depth -= self.phase in FORWARDS
        if self.phase in FORWARDS and self._depth == 0:  # otherwise an outer forward may catch the exception
            self._move(Move.END_FORWARD)
            self.root.abandon_forward()
            self._inputs.abandon()
            if not self.is_used_by_sharers():
                self.reshard()
            for owner in self.param_owners:
                owner._end_use(awaits_backward=False)

    # Backward

    def before_backward(self, gradient: Tensor | None) -> None:
        """Unshard the parameters for the gradients that are about to be computed.

        `gradient` is None if the output shares its node with others and has no gradient.
        """
        self.hook_gradient(gradient)
        self.root.handle_failed_backward()
        if self.phase in BACKWARDS:
            return
        with span("FSDP::pre_backward", self.name):
            for unit in (self, *self.param_owners):
                if unit.phase not in BACKWARDS:
                    unit._begin_backward(unshards=self.unshards_in_backward or unit.unshards_in_backward)
                elif self.unshards_in_backward:  # the owner's own setting may differ
                    unit.unshard()
            if self.config.backward_prefetch is BackwardPrefetch.BACKWARD_PRE:
                self._prefetch_for_backward()

    def _begin_backward(self, *, unshards: bool) -> None:
        new_phase = next_phase(self.phase, Move.BEGIN_BACKWARD, self.name)
        self._check_graph()
        for summoned in self.summoned:
            summoned.check_backward(self.name)
        self.root.begin_backward()
        self.phase = new_phase
        self._has_begun_backward = True
        self.awaits_backward = False
        if not self.param_groups:
            return
        if unshards:
            self.unshard()
        for group in self.param_groups:
            group.gradients.begin_backward()

    def _check_graph(self) -> None:
        if any(unsharded.is_invalidated for unsharded in self._in_graph):
            raise RuntimeError(
                f"{self.name} was moved or cast between its forward and its backward, whose graph contains the "
                "previous parameters; do it before the forward"
            )

    def hook_gradient(self, gradient: Tensor | None) -> None:
        """Register a hook on a differentiable gradient, because differentiating it reads the unsharded views again."""
        for level in () if gradient is None else differentiable_levels(gradient):
            if level.is_leaf:  # tensor that a backward was started with
                self._hook_gradients_of(level)
            else:
                level.register_hook(self.before_double_backward)

    def _hook_gradients_of(self, tensor: Tensor) -> None:
        """Register hooks on the gradients of `tensor`, of every order, for double backward."""
        if not tensor.is_leaf:
            tensor.register_hook(self.hook_gradient)
        elif tensor not in self._hooked_inputs:  # once, because it may come in every step
            self._hooked_inputs[tensor] = tensor.register_hook(
                partial(hook_gradient_in_backward, weakref.ref(self))
            )

    def before_double_backward(self, gradient: Tensor | None) -> None:
        """Prepare the differentiation of a gradient, whose graph reads the views until the end of the backward."""
        self._finishes_at_end = True
        self.before_backward(gradient)

    def finish_if_complete(self) -> None:
        """Finish the backward if no remaining graph node reads the unsharded views.

        Called when an input gets its gradient.
        """
        if self.phase not in BACKWARDS or self._finishes_at_end:
            return
        if gradients_are_complete(self.param_groups, self._in_graph, self._inputs.are_complete):
            self.finish_backward()
        elif self._inputs.are_complete:
            record_unreduced(self.param_groups, self._in_graph, self.name)

    @outside_transforms
    def finish_backward(self) -> None:
        """Reduce the gradients and reshard the parameters. A second call reduces the gradients that arrived since."""
        if self.phase in BACKWARDS:
            self._move(Move.END_BACKWARD)
        grads = [unsharded.take_gradients() for unsharded in self._in_graph]
        with span("FSDP::post_backward_reshard", self.name):
            if self._is_freed_in_backward():
                self.reshard()
            elif self.is_unsharded:
                self._register_kept()
        if self.config.backward_prefetch is BackwardPrefetch.BACKWARD_POST:
            self._prefetch_for_backward()
        for group, group_grads in zip(self.param_groups, grads, strict=False):
            if any(grad is not None for grad in group_grads) or group.gradients.must_reduce_zeros():
                self._reduce_gradients(group, group_grads)

    def abandon_backward(self) -> None:
        """Drop gradients that a failed backward has not published to `.grad`.

        Run no collective, because other ranks may have moved on.
        """
        if self.phase in BACKWARDS:
            self._move(Move.END_BACKWARD)
        self.awaits_backward = False
        # Otherwise the gradients belong to an earlier backward.
        for unsharded in self._in_graph if self._has_begun_backward else ():
            for view in unsharded.trainable:
                view.grad = None
        self.reshard()
        self._forget_backward()
        for group in self.param_groups:
            group.gradients.abandon_backward()

    def close_backward(self) -> None:
        """Finish this unit's backward if the autograd graph did not."""
        self.awaits_backward = False
        if self.phase in BACKWARDS or self._has_gradients():
            self.finish_backward()
        elif self._was_prefetched or self._is_freed_in_backward():
            self.reshard()  # prefetched, but not needed
        for group in self.param_groups:
            if group.syncs and group.gradients.has_unreduced():
                self._reduce_gradients(group, [None] * len(group.names))
        self.awaits_reduction = not all(group.syncs for group in self.param_groups)
        self._forget_backward()

    def leave_backward_open(self) -> None:
        """End the backward, but leave the gradients that it has not reduced to `finalize_backward`."""
        synchronises = all(group.syncs for group in self.param_groups)
        if not synchronises or (self.phase in BACKWARDS and self._inputs.have_come):
            self.close_backward()
            return
        self.awaits_backward = False
        was_reduced = self._has_begun_backward and self.phase not in BACKWARDS
        self.awaits_reduction = self._has_gradients() or not was_reduced
        if self.phase in BACKWARDS:
            self._move(Move.END_BACKWARD)
            if self.is_unsharded:
                self._register_kept()
        elif self._was_prefetched:
            self.reshard()
        self._keep_gradients()
        self._forget_backward()

    @no_grad_fast
    def _keep_gradients(self) -> None:
        """Add the gradients on the views to those that earlier backwards left there."""
        for group, unsharded in zip(self.param_groups, self._in_graph, strict=False):
            grads = unsharded.take_gradients()
            if any(grad is not None for grad in grads):
                group.gradients.accumulate_unreduced(grads)

    def finalize_backward(self) -> None:
        """Reduce the gradients that backwards left, and reshard."""
        if self.awaits_reduction:
            self.close_backward()
        elif self._is_freed_in_backward():
            self.reshard()

    def _has_gradients(self) -> bool:
        return any(view.grad is not None for unsharded in self._in_graph for view in unsharded.trainable)

    @property
    def stepped(self) -> list[nn.Parameter]:
        return [param for group in self.param_groups for param in group.stepped]

    def drop_unseen_gradients(self) -> bool:
        """Drop the gradients of a backward that did not reach this unit. Return whether there were any."""
        if self.awaits_reduction or not self._may_have_gradients:
            return False
        if not self._has_gradients():
            return False
        for params in self._in_graph:
            params.take_gradients()
        return True

    def _forget_backward(self) -> None:
        self._may_have_gradients = False
        self._inputs.forget()
        self._finishes_at_end = bool(self._sharers)
        self._has_begun_backward = False

    def show_gradients(self) -> None:
        """Publish the gradients of this backward in `.grad`."""
        for group in self.param_groups:
            group.gradients.end_backward(synced=group.syncs)

    # Unsharding and resharding

    def unshard(self) -> None:
        """Register the unsharded parameters in the modules. Gather them first if needed, and let COMPUTE wait."""
        if not self.param_groups:
            return
        self._may_have_gradients = True
        if self.summoned:
            pairs = zip(self.summoned, self.param_groups, strict=True)
            self._in_graph = [
                summoned.use_unsharded_views(self._dtype_now(group)) for summoned, group in pairs
            ]
            return
        self.gather()
        if self.phase in BACKWARDS:
            self._check_graph()
        self.root.streams.wait(StreamRole.COMPUTE, self._gathered)
        self._gathered = None
        self._was_prefetched = False
        pairs = zip(self.param_groups, self._dtypes or (), strict=True)
        self._in_graph = [group.use_unsharded_views(dtype) for group, dtype in pairs]

    def gather_on_request(self) -> None:
        """Gather the parameters on the user's request, if they are not unsharded."""
        if self.param_groups and (self._may_be_stale or not self.is_unsharded):
            if self.root.is_idle():  # a running forward or backward has already waited
                make_gather_wait_for_compute(self.root.streams)
            self.gather()

    def gather(self) -> None:
        """Gather all groups on GATHER. Do nothing if they are unsharded with the current values of the shards.

        If the shards were written to since, graphs that read the views see a change in place, also if the views were
        kept for a backward.
        """
        root = self.root
        changed = [group.write_back_changes() for group in self.param_groups]
        if any(changed):
            make_gather_wait_for_compute(root.streams)
            self.register_params()
        dtypes = [self._dtype_now(group) for group in self.param_groups]
        if root.is_in_backward:
            self._wait_for_writes(dtypes)
        is_kept = self._dtypes == dtypes
        if self._dtypes is not None:
            is_kept = is_kept and not self._may_be_stale
            if is_kept and not any(changed) and self._shards_are_as_gathered():
                return
            self.reshard()
        root.memory.admit(self)
        with span("FSDP::all_gather", self.name, root.streams.on(StreamRole.GATHER)):
            for group, dtype in zip(self.param_groups, dtypes, strict=True):
                gather(group, dtype, self.name, is_kept=is_kept)
        self._gathered = root.streams.record(StreamRole.GATHER)
        self._dtypes = dtypes

    def _wait_for_writes(self, dtypes: Sequence[torch.dtype]) -> None:
        """Make GATHER wait for COMPUTE if shards were written to since they were last gathered, in the forward.

        Otherwise the gathers of a backward run concurrently with the end of the forward.
        """
        pairs = zip(self.param_groups, dtypes, strict=True)
        if not all(group.is_up_to_date(dtype) for group, dtype in pairs):
            make_gather_wait_for_compute(self.root.streams)

    def reshard(self, *, after_forward: bool = False, frees: bool = True) -> None:
        """Register the sharded views in the modules. Free the unsharded parameters or leave them to the graph."""
        if not self.is_unsharded:
            return
        self._use_sharded_views(after_forward=after_forward)
        if self.summoned:
            return
        self._dtypes = None
        self._was_prefetched = self._may_be_stale = self.is_kept_by_user = False
        self.wait_for_gather()
        self._gathered = None
        if frees:
            self.root.memory.note_resharded(self)
            return
        for group in self.param_groups:
            group.leave_unsharded()

    def wait_for_gather(self) -> None:
        """Make COMPUTE wait for a pending all-gather, even an unused one, because the shards may be written next."""
        self.root.streams.wait(StreamRole.COMPUTE, self._gathered)

    def reshard_unused(self) -> None:
        """Reshard parameters that were prefetched for a forward that did not run, because the shards may change.

        Parameters of a pending backward are kept for it, and gathered again there if the shards have changed.
        """
        if self._was_prefetched and not self.awaits_backward:
            self.reshard()
        self._was_prefetched = False

    def gather_again_if_kept(self) -> None:
        """Make the next forward gather again, unless a backward reads the parameters first or the user keeps them.

        A write to `.data` of a shard, or by a foreach operator to DTensors, increments no version counter.
        """
        self._may_be_stale = self.is_unsharded and not (self.awaits_backward or self.is_kept_by_user)

    def free(self) -> None:
        for group in self.param_groups:
            group.free()

    def _use_sharded_views(self, *, after_forward: bool = False) -> None:
        for summoned in self.summoned:
            summoned.use_summoned_params()
        for group in () if self.summoned else self.param_groups:
            group.use_sharded_views(after_forward=after_forward)

    def _register_kept(self) -> None:
        if self.summoned:
            for params in self.summoned:
                params.use_summoned_params()
            return
        for group in self.param_groups:
            group.show_kept()

    def _prefetch_for_backward(self) -> None:
        if self.prefetches_in_backward:
            for named in self.prefetches_in_backward:
                self._prefetch(named)
            return
        unit = self.root.order.after_in_backward(self)
        if unit is not None and unit.awaits_backward and unit.unshards_in_backward:
            self._prefetch(unit)

    def _prefetch(self, unit: Unit[Any] | None) -> None:
        for prefetched in () if unit is None else (unit, *unit.param_owners):
            if not prefetched.is_unsharded and prefetched.phase is Phase.IDLE and prefetched.param_groups:
                prefetched.gather()
                prefetched._was_prefetched = True

    def _shards_are_as_gathered(self) -> bool:
        pairs = zip(self.param_groups, self._dtypes or (), strict=True)
        return self._was_prefetched or all(group.is_up_to_date(dtype) for group, dtype in pairs)

    def _is_freed_in_backward(self) -> bool:
        return all(group.frees_in_backward() for group in self.param_groups)

    def _dtype_now(self, group: _Group) -> torch.dtype:
        return group.dtype if self._is_in_full_precision() else group.compute_dtype

    def _is_in_full_precision(self) -> bool:
        module = self._module()
        return self.config.full_precision_in_eval and module is not None and not module.training

    def _cast(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        mixed = self.config.precision
        dtype = mixed.param_dtype if self.param_groups and mixed.cast_forward_inputs else None
        if dtype is None or self._is_in_full_precision():
            return args, kwargs
        return cast_floats(args, dtype), cast_floats(kwargs, dtype)

    # Gradients

    @no_grad_fast
    def _reduce_gradients(self, group: _Group, grads: list[Tensor | None]) -> None:
        root, gradients, reduction = self.root, group.gradients, group.reduction
        if not group.syncs:
            gradients.accumulate_unreduced(grads)
            return
        is_as_computed = reduction.casts_itself or self._is_in_full_precision()
        dtype = group.compute_dtype if is_as_computed else None
        # A user's hook may keep its argument, and the buffer becomes `.grad` if nothing is sharded.
        is_scratch = reduction.hook is None and group.groups.shard is not None
        buffer = gradients.reduce_input(grads, dtype, partial(root.memory.buffer, is_scratch=is_scratch))
        grads.clear()  # frees their memory for the collective
        root.streams.wait(StreamRole.REDUCE, root.streams.record(StreamRole.COMPUTE))
        with span("FSDP::post_backward_reduce", self.name):
            with root.streams.on(StreamRole.REDUCE):
                scattered = reduction.scatter(buffer, self.name)
            if scattered is not None:
                with root.streams.on(self._begin_all_reduce(group, scattered.output)):
                    reduced = reduction.finish(scattered)
                    gradients.add(
                        reduced.clone()
                        if reduced is buffer and root.accumulates_on_reduce_stream
                        else reduced
                    )
        root.memory.keep_until_reduced(buffer)

    def _begin_all_reduce(self, group: _Group, shard: Tensor) -> StreamRole:
        """Return the stream that reduces a scattered `shard` over replicas during the next reduce-scatter."""
        if not group.groups.are_hybrid:
            return StreamRole.REDUCE
        streams = self.root.streams
        streams.wait(StreamRole.ALL_REDUCE, streams.record(StreamRole.REDUCE))
        self.root.memory.keep_until_all_reduced(shard)
        return StreamRole.ALL_REDUCE

    def _check_unchanged(self) -> None:
        """Raise if the forward changed a view in place. The next gather would overwrite the change."""
        for unsharded in self._in_graph if self._dtypes is not None else ():
            if (name := unsharded.changed()) is not None:
                self.reshard()
                raise RuntimeError(
                    f"{name} of {self.name} was changed in place during the forward, where a change is lost when the "
                    "parameter is resharded; change it inside summon_full_params()"
                )
