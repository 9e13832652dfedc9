"""Parameters of one unit, and the gathers and reshards that move them."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from impl.distributed.fsdp._comm.collectives import all_gather_into, all_gather_rows
from impl.distributed.fsdp._comm.desync.monitor import GATHERED, GATHERED_AGAIN
from impl.distributed.fsdp._engine.interfaces import IterationEnd, RootContext, SummonedParams
from impl.distributed.fsdp._engine.optimizer_checks import note_sharding
from impl.distributed.fsdp._engine.optimizer_writes import track_optimizer_writes
from impl.distributed.fsdp._engine.streams import StreamRole
from impl.distributed.fsdp._params.autograd import outside_transforms
from impl.distributed.fsdp._params.config import UnitOptions
from impl.distributed.fsdp._params.param_group import ParamGroup, Unsharded, sharding_groups
from impl.kernels import no_grad_fast, span
from impl.optim._held_gradients import GradientReceiver, HeldGradients, register_holder
from impl.optim._shards import register_sharding

Group_co = TypeVar("Group_co", bound=ParamGroup, covariant=True)


@dataclass
class GatherState:
    """State of gathered parameters until they are resharded."""

    dtypes: list[torch.dtype]  # dtype of each group
    event: torch.Event | None  # end of the all-gathers, None on the CPU
    was_prefetched: bool = False  # no forward or backward has used the parameters yet
    # The root's own forward or backward has prefetched them, so no step comes before their use.
    is_of_running_pass: bool = False
    # The user has gathered the unit, and reshards it before writing to its parameters.
    is_kept_by_user: bool = False
    # An evaluation began or ended while the unit was unsharded. A write since the gather may be unnoticed.
    may_be_stale: bool = False
    # On a device, the streams that were COMPUTE in a use.
    readers: list[torch.Stream] = field(default_factory=list)


class UnitParams(Generic[Group_co]):
    """Parameters of one module that are unsharded together, in one or several groups."""

    def __init__(self, module: nn.Module, param_groups: Sequence[Group_co], options: UnitOptions) -> None:
        self.root_or_none: RootContext | None = None  # set by the root
        self._module = weakref.ref(module)
        self.param_groups: Sequence[Group_co] = list(param_groups)
        self.options = options
        self.name = type(module).__name__
        self.summoned: Sequence[SummonedParams] = ()  # the groups while they are summoned
        self._gathered: GatherState | None = None
        self._in_graph: list[Unsharded] = []  # parameters that the last graph was built from
        # While torch.func.linearize keeps a graph: the earlier `_in_graph`, and each group's unsharded parameters.
        self._set_aside: tuple[list[Unsharded], Sequence[Any]] | None = None
        self.awaits_reduction = False  # gradients of earlier backwards may be unreduced
        self.contributes_zeros = False  # whether this rank skips the running microbatch
        self.receiver: GradientReceiver | None = None  # steps optimizers while the backward runs
        note_sharding()
        self.register_params()
        register_holder(self)

    @property
    def root(self) -> RootContext:
        assert self.root_or_none is not None
        return self.root_or_none

    @property
    def stepped(self) -> list[nn.Parameter]:
        return [param for group in self.param_groups for param in group.stepped]

    @property
    def is_unsharded(self) -> bool:
        return self._gathered is not None or bool(self.summoned)

    @property
    def is_prefetched(self) -> bool:
        """Whether the parameters were gathered for a forward or backward that has not used them yet."""
        return self._gathered is not None and self._gathered.was_prefetched

    def register_params(self) -> None:
        """Register the current parameters for write tracking and shard-aware norms.

        Call again after they were moved or cast.
        """
        for group in self.param_groups:
            tracked = group.stepped if group.is_tracked else []
            track_optimizer_writes(tracked, group.gradients.exist_on_any_rank)
            groups_of_params = sharding_groups(group)
            if len(tracked) < len(groups_of_params):  # a flat parameter
                groups_of_params = [groups_of_params[0] if len(set(groups_of_params)) == 1 else None]
            for parameter, groups in zip(tracked, groups_of_params, strict=False):
                register_sharding(parameter, groups, group.process_groups.members)

    # Unsharding and resharding

    def gather_on_request(self) -> None:
        """Gather the parameters on the user's request, if they are not unsharded."""
        if not self.param_groups:
            return
        if not self.is_unsharded:
            self.gather()
        if self._gathered is not None:
            self._gathered.is_kept_by_user = True

    def prefetch(self) -> None:
        """Gather the parameters for a forward or backward that comes next, if they are sharded."""
        if self.param_groups and not self.is_unsharded:
            self.gather()
            assert self._gathered is not None
            self._gathered.was_prefetched = True
            self._gathered.is_of_running_pass = not self.root.is_idle()

    def gather(self) -> None:
        """Gather all groups on GATHER. Do nothing if they are unsharded with the current values of the shards.

        If the shards were written to since, graphs that read the views see a change in place, also if the views were
        kept for a backward.
        """
        root = self.root
        if self.receiver is not None:
            self.receiver.before_gather(self)
        changed = [group.write_back_changes() for group in self.param_groups]
        if any(changed):
            root.streams.wait_stream(StreamRole.GATHER, StreamRole.COMPUTE)
            self.register_params()
        dtypes = [self._dtype_now(group) for group in self.param_groups]
        if root.is_in_backward:
            self._wait_for_writes(dtypes)
        gathered, is_kept = self._gathered, False
        if gathered is not None:
            is_kept = gathered.dtypes == dtypes and not gathered.may_be_stale
            if is_kept and not any(changed) and self._shards_are_as_gathered(gathered):
                return
            self.reshard()
        self._wait_if_idle()
        root.memory.admit(self)
        # Users exchange weights for an evaluation, often without a change of the version counters.
        reads_casts = root.is_in_backward or torch.is_grad_enabled()
        with span("FSDP::all_gather", self.name, root.streams.on(StreamRole.GATHER)):
            for group, dtype in zip(self.param_groups, dtypes, strict=True):
                gather_group(group, dtype, self.name, is_kept=is_kept, reads_casts=reads_casts)
        event = root.streams.record(StreamRole.GATHER)
        is_kept_by_user = gathered is not None and gathered.is_kept_by_user
        self._gathered = GatherState(dtypes, event, is_kept_by_user=is_kept_by_user)

    def gather_again_if_used(self) -> None:
        """Make the next use gather the parameters again if they are unsharded, unless the user keeps them so.

        Called before and after an evaluation, because the user may exchange the weights for it.
        """
        if self._gathered is not None and not self._gathered.is_kept_by_user:
            self._gathered.may_be_stale = True

    def _wait_if_idle(self) -> None:
        """Make GATHER wait for COMPUTE, unless this root runs a forward or backward, which has already waited.

        Between them, the user or another root may gather the unit. The optimizer may step on another stream, with an
        event for the next forward.
        """
        root = self.root
        if root.is_idle():
            root.streams.wait_stream(StreamRole.GATHER, StreamRole.COMPUTE)
            root.streams.wait(StreamRole.GATHER, root.settings.post_optim_event)

    def _wait_for_writes(self, dtypes: Sequence[torch.dtype]) -> None:
        """Make GATHER wait for COMPUTE if shards were written to since they were last gathered, in the forward.

        Otherwise the gathers of a backward run concurrently with the end of the forward.
        """
        pairs = zip(self.param_groups, dtypes, strict=True)
        if not all(group.is_up_to_date(dtype) for group, dtype in pairs):
            self.root.streams.wait_stream(StreamRole.GATHER, StreamRole.COMPUTE)

    def _shards_are_as_gathered(self, gathered: GatherState) -> bool:
        pairs = zip(self.param_groups, gathered.dtypes, strict=True)
        is_unwritten = gathered.was_prefetched and gathered.is_of_running_pass
        return is_unwritten or all(group.is_up_to_date(dtype) for group, dtype in pairs)

    def wait_for_gather(self) -> None:
        """Make COMPUTE wait for a pending all-gather, even an unused one, because the shards may be written next."""
        if self._gathered is not None:
            self.root.streams.wait(StreamRole.COMPUTE, self._gathered.event)
            stream = self.root.streams.current()
            if stream is not None and stream not in self._gathered.readers:
                self._gathered.readers.append(stream)

    def use_unsharded_views(self) -> None:
        """Register the gathered or summoned parameters in the modules, and let COMPUTE wait for them."""
        gathered = self._gathered
        if self.summoned:
            dtypes = [self._dtype_now(group) for group in self.param_groups]
        else:
            assert gathered is not None
            self.wait_for_gather()
            gathered.was_prefetched = False
            dtypes = gathered.dtypes
        pairs = zip(self.summoned or self.param_groups, dtypes, strict=True)
        self._in_graph = [params.use_unsharded_views(dtype) for params, dtype in pairs]

    def use_kept_views(self) -> None:
        """Register in the modules the parameters that stay unsharded after a forward or backward."""
        for params in self.summoned or self.param_groups:
            params.use_kept_views()

    def set_graph_aside(self) -> None:
        """Make the next gather fill new memory, which the graph of torch.func.linearize keeps, until the next reshard.

        The unsharded parameters of earlier graphs are used again after that.
        """
        if self._set_aside is not None:
            return
        self.reshard()
        self.root.memory.admit(self)  # frees the earlier memory
        self._set_aside = self._in_graph, [group.swap_unsharded(None) for group in self.param_groups]

    def reshard(self, *, after_forward: bool = False) -> None:
        """Register the sharded views in the modules. Free the unsharded parameters that no linearized graph keeps."""
        if self.summoned:
            self.use_kept_views()
            return
        if self._gathered is not None:
            self.wait_for_gather()
            for group in self.param_groups:
                group.use_sharded_views(after_forward=after_forward)
            readers, self._gathered = self._gathered.readers, None
            if self._set_aside is None:
                self.root.memory.note_resharded(self, readers)
        # The gather of a linearized forward may have raised, so that nothing is gathered.
        if self._set_aside is not None:
            self._in_graph, unsharded = self._set_aside
            self._set_aside = None
            for group, earlier in zip(self.param_groups, unsharded, strict=True):
                group.swap_unsharded(earlier)

    def free(self) -> None:
        for group in self.param_groups:
            group.free()

    def is_in_full_precision(self) -> bool:
        if not self.options.full_precision_in_eval:
            return False
        module = self._module()
        return module is not None and not module.training

    def _dtype_now(self, group: ParamGroup) -> torch.dtype:
        return group.dtype if self.is_in_full_precision() else group.compute_dtype

    # Parameters in the last graph

    def check_unchanged(self) -> None:
        """Raise if the forward changed a view in place. The next gather would overwrite the change."""
        for unsharded in self._in_graph if self._gathered is not None else ():
            if (name := unsharded.take_written()) is not None:
                self.reshard()
                raise RuntimeError(
                    f"{name} of {self.name} was changed in place during the forward, where a change is lost when the "
                    "parameter is resharded; change it inside summon_full_params()"
                )

    def check_graph(self) -> None:
        """Raise if the parameters that a backward is about to differentiate were replaced."""
        if any(unsharded.is_invalidated for unsharded in self._in_graph):
            raise RuntimeError(
                f"{self.name} was moved or cast between its forward and its backward, whose graph contains the "
                "previous parameters; do it before the forward"
            )

    def has_gradients(self) -> bool:
        return any(view.grad is not None for unsharded in self._in_graph for view in unsharded.trainable)

    def drop_gradients(self) -> None:
        for unsharded in self._in_graph:
            for view in unsharded.trainable:
                view.grad = None

    # Microbatches of a scaler, as in `GradientHolder`

    def begin_microbatch(self) -> HeldGradients:
        for group in self.param_groups:
            if group.reduction.partial_sum is not None or (group.syncs and group.reduction.defers_all_reduce):
                raise _no_partial_sums()
        if self.root_or_none is not None and self.root_or_none.awaited_end is IterationEnd.USER:
            raise NotImplementedError(
                "microbatch() does not support set_manual_backward_finalization(True); let backward reduce the "
                "gradients"
            )
        self._settle_gradients()
        return self._held_of([group.gradients.begin_microbatch() for group in self.param_groups])

    def skip_microbatch(self) -> None:
        self.contributes_zeros = True

    def end_microbatch(self) -> tuple[HeldGradients, list[Hashable]]:
        self.contributes_zeros = False
        self._settle_gradients()
        if any(group.reduction.partial_sum is not None for group in self.param_groups):
            raise _no_partial_sums()
        results = [group.gradients.end_microbatch() for group in self.param_groups]
        earlier: list[Hashable] = [(number, key) for number, (_, keys) in enumerate(results) for key in keys]
        return self._held_of([held for held, _ in results]), earlier

    def put_gradients(self, tensors: Mapping[Hashable, Tensor]) -> None:
        self.contributes_zeros = False
        self._settle_gradients()
        by_group: list[dict[Hashable, Tensor]] = [{} for _ in self.param_groups]
        keys: Any = tensors
        for number, key in keys:
            by_group[number][key] = tensors[number, key]
        for group, group_tensors in zip(self.param_groups, by_group, strict=True):
            group.reduction.partial_sum = None
            group.gradients.put(group_tensors)
        self.awaits_reduction |= any(group.gradients.unsynchronized() for group in self.param_groups)

    def reduce_held(self) -> None:
        if self.awaits_reduction:
            self.root.finalize_backward()
            self.root.wait_for_gradients()

    @staticmethod
    def _held_of(by_group: Sequence[HeldGradients]) -> HeldGradients:
        return {(number, key): held[key] for number, held in enumerate(by_group) for key in held}

    def _settle_gradients(self) -> None:
        """Undo a backward that raised, and make COMPUTE wait for gradients that the last one left to REDUCE."""
        root = self.root_or_none
        if root is None:
            return
        # Later, this would undo changes of gradients that were set aside or put back since.
        root.handle_failed_backward()
        if root.streams.is_async:
            root.streams.wait_stream(StreamRole.COMPUTE, StreamRole.REDUCE)

    # Casts of shards, as in `ShardedHolder`

    def cast_shards(self, params: Collection[int]) -> dict[int, Tensor]:
        return {key: cast for group in self.param_groups for key, cast in group.cast_shards(params).items()}

    def record_cast_shards(self, params: Collection[int]) -> None:
        for group in self.param_groups:
            group.record_cast_shards(params)


@outside_transforms
@no_grad_fast
def gather_group(
    group: ParamGroup, dtype: torch.dtype, name: str, *, is_kept: bool = False, reads_casts: bool = False
) -> None:
    """Unshard a group of the unit `name`. Gather it again if it `is_kept` unsharded and its shards were written to.

    Args:
        reads_casts: as for `ParamGroup.begin_gather`.
    Collectives: one all-gather over the ranks that the group is sharded over, or the all-reduces that pace
        `SameHostPeers`; none if it is not sharded.
    """
    request = group.begin_gather(dtype, reads_casts=reads_casts)
    if request is None:
        return
    entry = group.reduction.entry(GATHERED_AGAIN if is_kept else GATHERED, name)
    try:
        if request.rows:
            all_gather_rows(request.rows, group.process_groups, request.over, entry)
        else:
            all_gather_into(request.output, request.shard, group.process_groups, request.over, entry)
    except RuntimeError as error:
        if is_kept and request.written:
            names = ", ".join(group.names[index] for index in request.written)
            error.add_note(f"This rank gathers {name} again because {names} of it was written to.")
        raise
    group.end_gather(request)


def _no_partial_sums() -> NotImplementedError:
    return NotImplementedError(
        "microbatch() does not support set_requires_all_reduce(False), whose partial sums cannot be taken back; use "
        "no_sync() or set_requires_gradient_sync(False)"
    )
