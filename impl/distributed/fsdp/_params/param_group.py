"""Protocols between the engine and the layouts of parameters that a unit gathers and reduces together.

A layout is a file in `_layout/` whose groups implement these protocols. Units, their root and the collectives use
nothing else of a layout. W is the number of ranks that a group is sharded over, S the number of elements of a rank's
shard in a collective.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from impl._names import describe_names
from impl.distributed.fsdp._comm.collectives import Reduction
from impl.distributed.fsdp._comm.groups import Groups
from impl.distributed.fsdp._params.param_registration import ParamInfo
from impl.distributed.fsdp._params.policies import ParamPrecision
from impl.optim._held_gradients import HeldGradients

ViewsOf = Callable[[Tensor], list[Tensor]]
# Returns memory for a reduction, and the layout's views of it. Called with the number of elements, dtype and `ViewsOf`.
NewBuffer = Callable[[int, torch.dtype, ViewsOf], tuple[Tensor, list[Tensor]]]


class Unsharded(Protocol):
    """Unsharded parameters of a group in one dtype, which graphs are built from.

    Their memory is freed and allocated again.
    """

    aliases_shard: bool  # uses the shards' memory, which is not freed
    # Set once the shards were moved or cast. A graph of these parameters can no longer be differentiated.
    is_invalidated: bool

    @property
    def views(self) -> Sequence[Tensor]:
        """Tensors that modules see, one for each of the group's names."""
        ...

    trainable: list[Tensor]  # parameters whose `.grad` autograd fills
    has_frozen: bool

    @property
    def memory(self) -> Collection[int]:
        """Addresses of the storages. Module outputs that alias them are copied."""
        ...

    def lacks_gradients(self) -> bool:
        """Return whether a graph may still read trainable parameters, because some have no gradient."""
        ...

    def take_gradients(self) -> list[Tensor | None]:
        """Return every parameter's gradient and clear `.grad`.

        The current stream reads their memory, which may be that of another stream.
        """
        ...

    def take_written(self) -> str | None:
        """Return the name of a parameter that was written to since the last call, or None."""
        ...


class AllGatherRequest(NamedTuple):
    """Request of one all-gather: fill `output` [W * S] from every rank's `shard` [S], or fill `rows`."""

    over: dist.ProcessGroup
    output: Tensor
    shard: Tensor
    # Indices of the parameters that were written to since the last all-gather.
    written: Sequence[int]
    # Tensors [W, n] that contain this rank's row and are filled instead of `output`.
    rows: Sequence[Tensor] = ()


class BackwardJournal:
    """Changes of a running backward to gradients that are not published. They are undone if the backward raises."""

    def __init__(self) -> None:
        self._undos: list[Callable[[], None]] = []

    def record(self, undo: Callable[[], None]) -> None:
        """Record a change by the function that undoes it."""
        self._undos.append(undo)

    def close(self) -> None:
        """Keep the changes, because the backward has ended or its gradients are published."""
        self._undos.clear()

    def restore(self) -> None:
        """Undo the changes, the last one first. Earlier gradients are as before, or marked as incomplete."""
        while self._undos:
            self._undos.pop()()


class Gradients(Protocol):
    """`.grad` of the parameters that the optimizer steps."""

    journal: BackwardJournal

    def check_optimizers(self) -> None:
        """Raise a RuntimeError if a hook would step a parameter in backward that cannot be stepped there."""

    def exist_on_any_rank(self) -> bool:
        """Return whether any rank has gradients to step with."""
        ...

    def update_unreduced(self) -> bool:
        """Apply the user's changes to gradients of earlier backwards that are still unreduced.

        Return whether there are any.
        """
        ...

    def unsynchronized(self) -> Sequence[tuple[str, nn.Parameter]]:
        """Return the stepped parameters whose gradients are not yet synchronised, with the names of the gradients."""
        ...

    def must_reduce_zeros(self) -> bool:
        """Return whether unused parameters must be reduced as zeros, because other ranks may have used them."""
        ...

    def forget_if_cleared(self) -> None:
        """Free the memory of gradients that the user has set to None."""

    def begin_backward(self) -> None:
        """Prepare for a backward whose gradients are added to those of earlier backwards."""

    def accumulate_unreduced(self, grads: Sequence[Tensor | None]) -> None:
        """Add the gradients of all parameters to the input of the next synchronising backward."""

    def reduce_input(
        self, grads: Sequence[Tensor | None], dtype: torch.dtype | None, new_buffer: NewBuffer
    ) -> Tensor:
        """Return all unreduced gradients with `grads` added, [W * S]. The caller may overwrite the result.

        It has `dtype`, or the dtype that the group reduces in.
        """
        ...

    def add(self, reduced: Tensor) -> Sequence[tuple[Tensor, Tensor]]:
        """Add the reduced result [S] of the last `reduce_input` to the gradients of this backward and earlier ones.

        Return stepped parameters with gradients on the host that will be their `.grad`, unless more are added.
        """
        ...

    def end_backward(self, synced: bool) -> None:
        """Publish the gradients of this backward in `.grad`."""

    def begin_microbatch(self) -> HeldGradients:
        """Take all gradients. The next `reduce_input` includes unreduced ones nevertheless."""
        ...

    def end_microbatch(self) -> tuple[HeldGradients, list[Hashable]]:
        """Take all gradients. Return also the keys of `begin_microbatch` whose gradients are included in them."""
        ...

    def put(self, tensors: Mapping[Hashable, Tensor]) -> None:
        """Hold these gradients, by the keys of the methods above, instead of any others."""


class ParamGroup(Protocol):
    """Parameters of a unit that are gathered and reduced together."""

    process_groups: Groups
    device: torch.device  # compute device
    offloads: bool  # keeps the shards on the CPU
    pins: bool  # keeps the shards in pinned memory
    syncs: bool  # a backward reduces its gradients
    is_tracked: bool  # registers its parameters for write tracking and norms

    @property
    def reduction(self) -> Reduction: ...
    @property
    def gradients(self) -> Gradients: ...
    @property
    def names(self) -> Sequence[str]: ...
    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the parameters, in which the optimizer steps."""
        ...

    @property
    def compute_dtype(self) -> torch.dtype: ...
    @property
    def reduce_dtype(self) -> torch.dtype: ...
    def precision_of(self, index: int) -> ParamPrecision:
        """Return the dtypes that the parameter with this index really has."""
        ...

    @property
    def param_infos(self) -> Sequence[ParamInfo]: ...
    @property
    def stepped(self) -> Sequence[nn.Parameter]:
        """Parameters that the optimizer steps."""
        ...

    def keeps_after_forward(self, is_outermost: bool, awaits_backward: bool) -> bool:
        """Return whether the group stays unsharded after a forward of the outermost unit or of another one."""
        ...

    def frees_in_backward(self) -> bool:
        """Return whether the group is resharded once this backward has computed its gradients."""
        ...

    def check_device(self, compute_device: torch.device) -> None:
        """Raise a RuntimeError if the parameters are on a device from which they cannot be gathered."""

    def write_back_changes(self) -> bool:
        """Take over tensors that the user assigned to a parameter or to its `.data`. Return whether there were any."""
        ...

    def is_up_to_date(self, dtype: torch.dtype) -> bool:
        """Return whether the unsharded parameters equal the current shards."""
        ...

    def cast_shards(self, params: Collection[int]) -> dict[int, Tensor]:
        """Return the memory for casts of its shards, as `ShardedHolder`."""
        ...

    def record_cast_shards(self, params: Collection[int]) -> None:
        """Record that this memory has the current values of the parameters with these ids."""

    def begin_gather(self, dtype: torch.dtype, *, reads_casts: bool) -> AllGatherRequest | None:
        """Allocate the unsharded parameters and the communicated memory.

        Return None if they have their values already.

        Args:
            reads_casts: read casts of shards instead of shards, if they are current.
        """
        ...

    def end_gather(self, request: AllGatherRequest) -> None:
        """Fill the unsharded parameters from the gathered memory."""

    def use_unsharded_views(self, dtype: torch.dtype) -> Unsharded:
        """Register the unsharded parameters in the modules."""
        ...

    def use_sharded_views(self, *, after_forward: bool = False) -> None:
        """Register the shards or placeholders in the modules, or after a forward the post-forward shards.

        These are larger shards, which the few ranks of `reshard_after_forward=int` gather for the backward.
        """

    def discard_post_forward_shards(self) -> None:
        """Register the shards in the modules, not post-forward ones, so that the next gather reads them."""

    def use_kept_views(self) -> None:
        """Register in the modules a group that stays unsharded after a forward or backward."""

    def swap_unsharded(self, other: Any) -> Any:
        """Replace the unsharded parameters, by new ones if `other` is None. Return the previous ones."""

    def free(self) -> None:
        """Free the memory of the unsharded parameters in every dtype."""


def sharding_groups(group: ParamGroup) -> list[tuple[dist.ProcessGroup, ...]]:
    """Return for each parameter the groups whose ranks have different elements of it."""
    shard = () if group.process_groups.shard is None else (group.process_groups.shard,)
    return [(*shard, *(info.parallel.sharding_groups if info.parallel else ())) for info in group.param_infos]


def incomplete_gradients(names: Sequence[str], cure: str) -> RuntimeError:
    """Return the error for accumulated gradients that include only some gradients of a failed backward."""
    return RuntimeError(
        "a backward without synchronisation raised after it had added some of its gradients to those of earlier "
        f"backwards, of {describe_names(names, 3)}; {cure} before the next backward"
    )


def describe_dtypes(group: ParamGroup) -> list[str]:
    """Return the dtypes of the group that are not the defaults, as text."""
    parts: list[str] = []
    if group.dtype is not torch.float32:
        parts.append(f"parameters of {group.dtype}")
    if group.compute_dtype is not group.dtype:
        parts.append(f"param_dtype={group.compute_dtype}")
    if group.reduce_dtype is not group.compute_dtype:
        parts.append(f"reduce_dtype={group.reduce_dtype}")
    return parts
