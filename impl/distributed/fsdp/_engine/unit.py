"""Hooks of one wrapped module, which unshard its parameters and reduce its gradients.

A unit is a state machine with the states of `Phase`. Forward: the parameters are all-gathered, and the module's
forward sees views of them. They are resharded unless they are kept for backward. Backward: a hook on the forward's
outputs gathers them again. A hook on its inputs checks whether every view has its gradient, so that nothing in the
graph will read the views again. Then the gradients are copied into one buffer and averaged, and this rank's shard
becomes the parameters' `.grad`.

At the end of the backward, `complete_backward` reduces the remaining gradients: of units whose inputs need no gradient,
and of unused parameters. If the user finalizes backwards, `leave_backward_open` leaves that to `finalize_backward`.
After a failure `abandon_backward` drops the gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from impl.distributed.fsdp._engine.gradient_reduction import (
    gradients_are_complete,
    record_unreduced,
    reduce_gradients,
)
from impl.distributed.fsdp._engine.graph_edges import (
    BackwardState,
    backward_entries,
    clone_outputs,
    hook_gradient_in_backward,
)
from impl.distributed.fsdp._engine.interfaces import SummonedParams
from impl.distributed.fsdp._engine.phase import BACKWARDS, FORWARDS, Move, Phase, next_phase
from impl.distributed.fsdp._engine.streams import StreamRole
from impl.distributed.fsdp._engine.unit_params import Group_co, UnitParams
from impl.distributed.fsdp._params.autograd import (
    differentiable_levels,
    is_linearized,
    next_node,
    outside_transforms,
)
from impl.distributed.fsdp._params.config import UnitOptions
from impl.distributed.fsdp._params.nested import Inputs, alias_leaves, cast_inputs
from impl.distributed.fsdp._params.param_group import ParamGroup
from impl.distributed.fsdp.api import BackwardPrefetch
from impl.kernels import no_grad_fast, span


class Unit(UnitParams[Group_co]):
    """Hooks of one module, and of its parameters that are unsharded together."""

    def __init__(self, module: nn.Module, param_groups: Sequence[Group_co], options: UnitOptions) -> None:
        super().__init__(module, param_groups, options)
        self.phase = Phase.IDLE
        self.prefetches_in_forward: Sequence[Unit[ParamGroup]] = ()  # added to the previous iteration's order
        self.prefetches_in_backward: Sequence[Unit[ParamGroup]] = ()  # replaces the order of forwards
        self.unshards_in_backward = True  # whether gradients are computed from the parameters
        self.param_owners: list[Unit[ParamGroup]] = []  # units whose parameters this unit's modules share
        self._sharers: list[Unit[ParamGroup]] = []
        self._depth = 0  # nested calls of the module in its own forward
        self._first_forward_node = 0  # first autograd node of the forward's graph
        self._backward = BackwardState()
        self._hooked_inputs = WeakTensorKeyDictionary()  # leaf inputs with a hook

    def share_params_of(self, owner: Unit[ParamGroup]) -> None:
        """Use `owner`'s parameters in every forward and backward of this unit.

        The owner reduces their gradients once, at the end of backward.
        """
        if owner not in self.param_owners:
            self.param_owners.append(owner)
            owner._sharers.append(self)

    def is_used_by_sharers(self) -> bool:
        return any(unit.phase in FORWARDS for unit in self._sharers)

    @property
    def awaits_backward(self) -> bool:
        return self._backward.is_awaited

    def begin_summoning(self, summoned: Sequence[SummonedParams], by_all: bool) -> None:
        """Enter the summoned phase: on all ranks if `by_all`, else on the first rank."""
        move = Move.SUMMON if by_all else Move.SUMMON_ON_FIRST_RANK
        self._move(move if self.param_groups else Move.SUMMON_NOTHING)
        self.summoned = summoned

    def end_summoning(self) -> None:
        self._move(Move.END_SUMMON)
        self.summoned = ()

    def _move(self, move: Move) -> None:
        self.phase = next_phase(self.phase, move, self.name)

    # Forward

    def _cast_inputs(self, args: tuple[object, ...], kwargs: dict[str, object]) -> Inputs:
        casts = self.param_groups and not self.is_in_full_precision()
        return cast_inputs(args, kwargs, self.options.input_dtype if casts else None)

    def before_forward(self, args: tuple[object, ...], kwargs: dict[str, object]) -> Inputs:
        """Unshard the parameters and register them in the modules.

        Return the inputs, cast if mixed precision requests it.
        """
        self.root.handle_failed_backward()
        if self.phase in BACKWARDS:  # recomputed for backward: the parameters are unsharded
            return self._cast_inputs(args, kwargs)
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
            self._prefetch_for_forward()
            args, kwargs = self._cast_inputs(args, kwargs)
            if self.param_groups and torch.is_grad_enabled():
                stream = self.root.streams.current()
                if stream is not None and stream not in self._backward.forward_streams:
                    self._backward.forward_streams.append(stream)
                # A node that reads a frozen view may lead to another tensor than an input, and run after a leaf's hook.
                if any(unsharded.has_frozen for unsharded in self._in_graph):
                    args, kwargs = alias_leaves(args, kwargs)
                for tensor in self._backward.inputs.watch((args, kwargs), self.reduce_if_complete):
                    self._hook_gradients_of(tensor)
            self._first_forward_node = next_node()
            return args, kwargs

    def after_forward(self, outputs: object) -> Any:
        """Register hooks on the outputs' gradients, and reshard parameters that are not kept for them.

        Outputs that alias parameters are copied.
        """
        units = (self, *self.param_owners)
        outputs, held = clone_outputs(outputs, [params for unit in units for params in unit._in_graph])
        if self.phase in BACKWARDS:
            return outputs
        self._depth -= 1
        if self._depth > 0:
            return outputs
        with span("FSDP::post_forward", self.name):
            self.root.exit_forward(self)
            self._move(Move.END_FORWARD)
            entries = (
                backward_entries(outputs, held, self._first_forward_node) if torch.is_grad_enabled() else []
            )
            for output in entries:
                output.register_hook(self.before_backward)
            self._backward.is_awaited |= bool(entries)
            self._backward.inputs.end()
            self.check_unchanged()
            for unit in units:
                unit._end_use(awaits_backward=bool(entries))
            self.root.reshard_after_evaluation()
            return outputs

    def _end_use(self, *, awaits_backward: bool) -> None:
        """Reshard the unit after its last forward use, unless it stays unsharded for backward."""
        if self.phase in FORWARDS or self.is_used_by_sharers():
            return
        if is_linearized() and not self.summoned:
            self.reshard()
            return
        if self.keeps_after_forward(awaits_backward=awaits_backward):
            self.use_kept_views()
        else:
            self.reshard(after_forward=True)

    def keeps_after_forward(self, *, awaits_backward: bool) -> bool:
        is_root = self.root.is_root(self)
        return all(group.keeps_after_forward(is_root, awaits_backward) for group in self.param_groups)

    def abandon_forward(self) -> None:
        """Undo a forward that raised, as if it had not been called."""
        self._depth -= self.phase in FORWARDS
        if self.phase in FORWARDS and self._depth == 0:  # otherwise an outer forward may catch the exception
            self._move(Move.END_FORWARD)
            self.root.abandon_forward(self)
            self._backward.inputs.abandon()
            if not self.is_used_by_sharers():
                self.reshard()
            for owner in self.param_owners:
                owner._end_use(awaits_backward=False)

    # Unsharding and resharding

    def unshard(self) -> None:
        """Register the unsharded parameters in the modules. Gather them first if needed, and let COMPUTE wait."""
        if not self.param_groups:
            return
        self._backward.may_have_gradients = True
        if not self.summoned:
            is_in_backward = self.phase in BACKWARDS
            if not is_in_backward and is_linearized():
                self.set_graph_aside()
            self.gather()
            if is_in_backward:
                self.check_graph()
        self.use_unsharded_views()

    def reshard_unused(self) -> None:
        """Reshard parameters that were prefetched for a forward that did not run, because the shards may change.

        Parameters of a pending backward are kept for it, and gathered again there if the shards have changed.
        """
        if self._gathered is not None and self._gathered.was_prefetched:
            self._gathered.was_prefetched = False
            if not self.awaits_backward:
                self.reshard()

    def reshard_after_evaluation(self) -> None:
        """Reshard, unless the user keeps the parameters. If a backward reads them first, it gathers them again.

        Otherwise a later write to shards might go unnoticed, since a write to `.data`, or by a foreach operator to
        DTensors, increments no version counter. And parameters that the user lists would be unsharded: what is written
        to them is lost, and an optimizer made of them steps nothing.
        """
        if self.awaits_backward:
            self.gather_again_if_used()
        elif self._gathered is None:
            for group in self.param_groups:
                group.discard_post_forward_shards()
        elif not self._gathered.is_kept_by_user:
            self.reshard()

    def _prefetch_for_forward(self) -> None:
        if self.options.forward_prefetch:
            self._prefetch(self.root.order.next_in_forward(self))
        for named in self.prefetches_in_forward:
            self._prefetch(named)

    def _prefetch_for_backward(self) -> None:
        if self.prefetches_in_backward:
            for named in self.prefetches_in_backward:
                self._prefetch(named)
            return
        unit = self.root.order.next_in_backward(self)
        if unit is not None and unit.awaits_backward and unit.unshards_in_backward:
            self._prefetch(unit)

    def _prefetch(self, unit: Unit[ParamGroup] | None) -> None:
        for prefetched in () if unit is None else (unit, *unit.param_owners):
            # The first forward of another model creates the root of its units.
            if prefetched.phase is Phase.IDLE and prefetched.root_or_none is not None:
                prefetched.prefetch()

    # Backward

    def before_backward(self, gradient: Tensor | None) -> None:
        """Unshard the parameters for the gradients that are about to be computed.

        `gradient` is None if the output shares its node with others and has no gradient.
        """
        self.hook_gradient(gradient)
        self.root.handle_failed_backward()
        # A unit in its forward is unsharded already. A gradient that the forward computes comes here if the input is
        # an earlier output of the unit.
        if self.phase in FORWARDS:
            return
        if self.phase in BACKWARDS:
            # The graph of another forward may be on another stream than the one that has waited.
            for unit in (self, *self.param_owners):
                unit.wait_for_gather()
            return
        with span("FSDP::pre_backward", self.name):
            for unit in (self, *self.param_owners):
                if unit.phase in FORWARDS:
                    continue
                if unit.phase not in BACKWARDS:
                    unit._begin_backward(unshards=self.unshards_in_backward or unit.unshards_in_backward)
                elif self.unshards_in_backward:  # the owner's own setting may differ
                    unit.unshard()
            if self.options.backward_prefetch is BackwardPrefetch.BACKWARD_PRE:
                self._prefetch_for_backward()

    def _begin_backward(self, *, unshards: bool) -> None:
        new_phase = next_phase(self.phase, Move.BEGIN_BACKWARD, self.name)
        self.check_graph()
        for summoned in self.summoned:
            summoned.check_backward(self.name)
        self.root.begin_backward()
        self.phase = new_phase
        self._backward.has_begun, self._backward.is_awaited = True, False
        self._backward.first_node = next_node()
        if not self.param_groups:
            return
        if unshards:
            self.unshard()
        for group in self.param_groups:
            group.gradients.begin_backward()

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
        self.before_backward(gradient)
        self._backward.is_differentiated = True

    def reduce_if_complete(self, is_leaf: bool) -> None:
        """Reduce and reshard if no remaining graph node reads the unsharded views.

        Called when an input gets its gradient, with whether the input is a leaf.
        """
        state = self._backward
        if self.phase not in BACKWARDS or state.is_differentiated or self._sharers:
            return
        # autograd runs a leaf's hook before other nodes that are ready. If checkpointing is reentrant, a view may have
        # only gradients of a backward inside this backward.
        if is_leaf and state.has_recorded_nodes and not state.inputs.are_complete:
            return
        if gradients_are_complete(self.param_groups, self._in_graph, state.inputs.are_complete):
            self.reduce_and_reshard()
        elif state.inputs.are_complete:
            record_unreduced(self.param_groups, self._in_graph, self.name)

    @outside_transforms
    def reduce_and_reshard(self) -> None:
        """Reduce the gradients and reshard the parameters. A second call reduces the gradients that arrived since."""
        if self.phase in BACKWARDS:
            self._move(Move.END_BACKWARD)
        streams = self.root.streams
        others = [stream for stream in self._backward.forward_streams if stream != streams.current()]
        for stream in others:
            streams.wait(StreamRole.COMPUTE, streams.record_in(stream))
        grads = [unsharded.take_gradients() for unsharded in self._in_graph]
        with span("FSDP::post_backward_reshard", self.name):
            if self._is_freed_in_backward():
                self.reshard()
            elif self.is_unsharded:
                self.use_kept_views()
        if self.options.backward_prefetch is BackwardPrefetch.BACKWARD_POST:
            self._prefetch_for_backward()
        for group, group_grads in zip(self.param_groups, grads, strict=False):
            if any(grad is not None for grad in group_grads) or group.gradients.must_reduce_zeros():
                reduce_gradients(self, group, group_grads)

    def _is_freed_in_backward(self) -> bool:
        return all(group.frees_in_backward() for group in self.param_groups)

    def abandon_backward(self) -> None:
        """Drop gradients that a failed backward has not published to `.grad`.

        Run no collective, because other ranks may have moved on.
        """
        if self.phase in BACKWARDS:
            self._move(Move.END_BACKWARD)
        # Otherwise the gradients belong to an earlier backward.
        if self._backward.has_begun:
            self.drop_gradients()
        self.reshard()
        self._forget_backward()
        for group in self.param_groups:
            group.gradients.journal.restore()

    # End of backward

    def complete_backward(self) -> None:
        """Reduce the remaining gradients and reshard, at the end of the backward."""
        self._backward.is_awaited = False  # a unit that ran twice in a row is not prefetched for itself
        if self.phase in BACKWARDS or self.has_gradients():
            self.reduce_and_reshard()
        elif self.is_prefetched or self._is_freed_in_backward():
            self.reshard()  # prefetched, but not needed
        for group in self.param_groups:
            if group.syncs and group.gradients.update_unreduced():
                reduce_gradients(self, group, [None] * len(group.names))
        self.awaits_reduction = not all(group.syncs for group in self.param_groups)
        self._forget_backward()

    def leave_backward_open(self) -> None:
        """End the backward, but leave the gradients that it has not reduced to `finalize_backward`."""
        state, is_in_backward = self._backward, self.phase in BACKWARDS
        synchronises = all(group.syncs for group in self.param_groups)
        if not synchronises or (is_in_backward and state.inputs.have_come):
            self.complete_backward()
            return
        was_reduced = state.has_begun and not is_in_backward
        self.awaits_reduction = self.has_gradients() or not was_reduced
        if is_in_backward:
            self._move(Move.END_BACKWARD)
            if self.is_unsharded:
                self.use_kept_views()
        elif self.is_prefetched:
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
            self.complete_backward()
        elif self._is_freed_in_backward():
            self.reshard()

    def publish_gradients(self) -> None:
        """Publish the gradients of this backward in `.grad`."""
        for group in self.param_groups:
            group.gradients.end_backward(synced=group.syncs)

    def drop_unseen_gradients(self) -> bool:
        """Drop the gradients of a backward that did not reach this unit. Return whether there were any."""
        if self.awaits_reduction or not self._backward.may_have_gradients or not self.has_gradients():
            return False
        for params in self._in_graph:
            params.take_gradients()
        return True

    def _forget_backward(self) -> None:
        self._backward.inputs.remove_hooks()
        self._backward = BackwardState()
