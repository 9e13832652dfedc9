"""What the engine knows of parameters that a unit gathers and reduces together, however they lie on the ranks.

A layout is a folder file in `_layout/` whose groups do what the protocols here say; units, their root and the
collectives know no other name of it. W is the number of ranks that a group is sharded over, S the elements of one
rank's part of what travels.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from impl.distributed.fsdp._comm.collectives import Reduction, all_gather_into, all_gather_rows
from impl.distributed.fsdp._comm.desync.monitor import GATHERED, GATHERED_AGAIN, WITHOUT
from impl.distributed.fsdp._comm.groups import Groups
from impl.distributed.fsdp._params.autograd import outside_transforms
from impl.distributed.fsdp._params.param_registration import ParamInfo
from impl.distributed.fsdp._params.policies import ParamPrecision
from impl.kernels import no_grad_fast

ViewsOf = Callable[[Tensor], list[Tensor]]
# Memory for what is reduced: of so many elements and a dtype, with the views that a layout makes of it, made once.
NewBuffer = Callable[[int, torch.dtype, ViewsOf], tuple[Tensor, list[Tensor]]]


class Unsharded(Protocol):
    """Unsharded parameters of a group in one dtype, which graphs are built from; their memory comes and goes."""

    aliases_shard: bool  # the memory of the shards serves, and is not freed
    is_given_up: bool  # since the shards were moved or cast: a graph made of it cannot be differentiated

    @property
    def views(self) -> Sequence[Tensor]:
        """As modules see them, one for each of the group's names."""
        ...

    trainable: list[Tensor]  # those in whose `.grad` autograd leaves a gradient
    has_frozen: bool

    @property
    def memory(self) -> Collection[int]:
        """The addresses of its storages: what a module returns of them is copied."""
        ...

    def take_gradients(self) -> list[Tensor | None]:
        """Those of all parameters, which lose them."""
        ...

    def changed(self) -> str | None:
        """The name of a parameter that was written to since it was made, or since the last answer."""
        ...


class Gathering(NamedTuple):
    """One all-gather: fills `output` [W * S] from every rank's `mine` [S], or rows."""

    over: dist.ProcessGroup
    output: Tensor
    mine: Tensor
    written: Sequence[int]  # numbers of the parameters that were written to since the last one
    rows: Sequence[Tensor] = ()  # [W, n] each, with this rank's row, which are filled instead


class Gradients(Protocol):
    """`.grad` of what the optimizer steps."""

    def refuse_optimizers(self) -> None:
        """Raises a RuntimeError where a hook is to step what cannot be stepped in backward."""

    def are_there(self) -> bool:
        """Whether any rank has some to step by."""
        ...

    def still_wait(self) -> bool:
        """Whether some are left of backwards that did not synchronise, where the one that does has not come by."""
        ...

    def waiting(self) -> Sequence[tuple[str, nn.Parameter]]:
        """What the optimizer steps by gradients that are yet to be synchronised, by the names of these."""
        ...

    def owes_zeros(self) -> bool:
        """Whether this backward has to reduce zeros for what it did not use, as other ranks may have used it."""
        ...

    def forget_if_cleared(self) -> None:
        """Let go of memory that `.grad` was made of until a user set it to None."""

    def begin_backward(self) -> None:
        """Take aside what `.grad` holds, so that this backward is added to it."""

    def abandon_backward(self) -> None:
        """It raised: what earlier ones have left stays as it is, and counts."""

    def accumulate_unreduced(self, grads: Sequence[Tensor | None]) -> None:
        """Add those of all parameters to what a backward that synchronises will reduce."""

    def reduce_input(
        self, grads: Sequence[Tensor | None], dtype: torch.dtype | None, new_buffer: NewBuffer
    ) -> Tensor:
        """Return all that has not been reduced, with `grads` added, [W * S]; it may be overwritten.

        It has `dtype`, or the dtype that the group reduces in.
        """
        ...

    def add(self, reduced: Tensor) -> None:
        """Add what was made of the last `reduce_input`, [S], to those of this backward and before."""

    def end_backward(self, synced: bool) -> None:
        """Show what this backward left."""


class ParamGroup(Protocol):
    """Parameters of a unit that are gathered and reduced together."""

    groups: Groups  # of ranks
    device: torch.device  # where it is computed with
    offloads: bool  # its shards lie on the CPU
    pins: bool  # in memory that is copied from, and to, while the host goes on
    syncs: bool  # a backward reduces its gradients
    is_tracked: bool  # optimizers are told of the group, and the group of their steps

    @property
    def reduction(self) -> Reduction: ...
    @property
    def gradients(self) -> Gradients: ...
    @property
    def names(self) -> Sequence[str]: ...
    @property
    def dtype(self) -> torch.dtype:
        """The parameters' own, in which the optimizer steps."""
        ...

    @property
    def compute_dtype(self) -> torch.dtype: ...
    @property
    def reduce_dtype(self) -> torch.dtype: ...
    def precision_of(self, index: int) -> ParamPrecision:
        """The dtypes that one of the parameters really has."""
        ...

    @property
    def param_infos(self) -> Sequence[ParamInfo]: ...
    @property
    def stepped(self) -> Sequence[nn.Parameter]:
        """What the optimizer steps."""
        ...

    def keeps_after_forward(self, is_outermost: bool, awaits_backward: bool) -> bool:
        """Whether it stays unsharded behind a forward, of the outermost unit or another."""
        ...

    def frees_in_backward(self) -> bool:
        """Whether it is resharded once this backward has computed its gradients."""
        ...

    def check_device(self, compute_device: torch.device) -> None:
        """Raises a RuntimeError where the parameters were moved to where they cannot be gathered from."""

    def write_back_changes(self) -> bool:
        """Take in what a user put in a parameter's place, or in the place of its data; was there any?"""
        ...

    def is_up_to_date(self, dtype: torch.dtype) -> bool:
        """Whether what is unsharded has what the shards hold now."""
        ...

    def unsharded(self, dtype: torch.dtype) -> Unsharded:
        """The one that there is in a dtype, whether its memory is there or not."""
        ...

    def begin_gather(self, dtype: torch.dtype) -> Gathering | None:
        """Allocate what is unsharded, and what travels; None if nothing has to: it has its values already."""
        ...

    def end_gather(self, gathering: Gathering) -> None:
        """What is unsharded takes its values out of what was gathered."""

    def use_unsharded_views(self, dtype: torch.dtype) -> Unsharded:
        """Have the modules see what is unsharded."""
        ...

    def use_sharded_views(self, *, behind_forward: bool = False) -> None:
        """Have the modules see the shards, or what stands for them; behind a forward, what is kept for a backward."""

    def show_kept(self) -> None:
        """Show the modules a group that stays unsharded after a forward or backward."""

    def leave_unsharded(self) -> None:
        """Keep the unsharded parameters for the graph that has them. The next gather fills others."""

    def free(self) -> None:
        """Free the memory of what is unsharded, in every dtype."""


def describe_names(names: Sequence[str], most: int = 4) -> str:
    """Return the first `most` names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


def dtypes_of(group: ParamGroup) -> list[str]:
    """What the policy comes to, in words, where that is not the default."""
    found: list[str] = []
    if group.dtype is not torch.float32:
        found.append(f"parameters of {group.dtype}")
    if group.compute_dtype is not group.dtype:
        found.append(f"param_dtype={group.compute_dtype}")
    if group.reduce_dtype is not group.compute_dtype:
        found.append(f"reduce_dtype={group.reduce_dtype}")
    return found


@outside_transforms
@no_grad_fast
def gather(group: ParamGroup, dtype: torch.dtype, name: str, *, is_kept: bool = False) -> None:
    """Unshard a group of the unit `name`; anew, if it `is_kept` unsharded and its shards were written to.

    Collectives: one all-gather over the ranks that it is sharded over, or what paces `SameHostPeers`; none if it is
        not sharded.
    """
    gathering = group.begin_gather(dtype)
    if gathering is None:
        return
    entry = group.reduction.entry(GATHERED_AGAIN if is_kept else GATHERED, name)
    try:
        if gathering.rows:
            all_gather_rows(gathering.rows, group.groups, gathering.over, entry)
        else:
            all_gather_into(gathering.output, gathering.mine, group.groups, gathering.over, entry)
    except RuntimeError as error:
        if is_kept and gathering.written:
            names = ", ".join(group.names[index] for index in gathering.written)
            error.add_note(f"This rank gathers {name} anew since {names} of it was written to.")
        raise
    group.end_gather(gathering)


def have_all_gradients(
    groups: Iterable[ParamGroup], in_graph: Sequence[Unsharded], have_inputs_theirs: bool
) -> bool:
    """Every node that reads a trainable view leads to its gradient; those that read frozen ones lead to inputs.

    Where zeros stand for what is not used, all ranks go by their inputs.
    """
    if have_inputs_theirs and any(group.gradients.owes_zeros() for group in groups):
        return True
    if any(view.grad is None for unsharded in in_graph for view in unsharded.trainable):
        return False
    return have_inputs_theirs or not any(unsharded.has_frozen for unsharded in in_graph)


def note_unreduced(groups: Iterable[ParamGroup], in_graph: Iterable[Unsharded], name: str) -> None:
    """Gradients of the unit `name` that this rank has to wait for until the end of its backward, others may reduce now.

    Collectives: none.
    """
    for group, unsharded in zip(groups, in_graph, strict=False):
        pairs = zip(group.names, unsharded.views, strict=True)
        missing = [one for one, view in pairs if view.requires_grad and view.grad is None]
        if missing and group.syncs:
            entry = f"left '{name}' for the end of backward{WITHOUT}{', '.join(missing)}"
            group.reduction.note(entry, group.device)
