"""The unsharded parameters of a group of DTensors: one storage that comes and goes, and how gathers fill it.

W = ranks that the group is sharded over, n = elements of a rank's part of one parameter, padding included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from impl.distributed.fsdp._layout.gather_extension import GatherExtension
from impl.distributed.fsdp._layout.sharded_param import ShardedParam, offsets

_ALIGNMENT = 16  # bytes, so that any dtype may begin there


@dataclass(frozen=True)
class Packing:
    """How what is gathered from `ranks` ranks lies in the buffer that travels."""

    ranks: int
    dtype: torch.dtype
    is_bytes: bool  # as the runs have several dtypes
    sizes: Sequence[int]  # of a rank's part of each run
    total: int


class UnshardedParams:
    """All parameters of a group; of the runs that are gathered one makes one parameter, unless it has an extension.

    Args:
        params: in their order.
        dtypes: to compute in, of each.
        device: to compute with.
        extensions: of those that say themselves what is gathered of them; None for others.
    """

    aliases_shard = False
    is_given_up = False

    def __init__(
        self,
        params: Sequence[ShardedParam],
        dtypes: Sequence[torch.dtype],
        device: torch.device,
        extensions: Sequence[GatherExtension | None],
    ) -> None:
        self.dtypes = list(dtypes)
        self._params = params
        self._extensions = extensions
        plain = [extension is None for extension in extensions]
        numels = [
            is_plain * one.world * one.padded_numel for one, is_plain in zip(params, plain, strict=True)
        ]
        nbytes = [numel * dtype.itemsize for numel, dtype in zip(numels, dtypes, strict=True)]
        starts = offsets([-(-each // _ALIGNMENT) * _ALIGNMENT for each in nbytes])
        self._nbytes = starts[-1]
        self._storage = torch.empty(self._nbytes, dtype=torch.uint8, device=device).untyped_storage()
        self._runs: list[Tensor | None] = []  # [W * n]; of an extension None
        self.views: list[nn.Parameter] = []
        for param, numel, dtype, start, is_plain in zip(params, numels, dtypes, starts, plain, strict=False):
            first = start // dtype.itemsize
            run, view = (torch.empty(0, dtype=dtype, device=device) for _ in range(2))
            self._runs.append(run.set_(self._storage, first, (numel,), (1,)) if is_plain else None)
            if is_plain:
                view.set_(self._storage, first, param.shape, param.stride)
            # What an extension makes takes its place once it is gathered.
            shown = param.info.shown(view)
            self.views.append(nn.Parameter(shown, requires_grad=param.sharded.requires_grad))
        self._packings: dict[int, Packing] = {}
        self._filled_from: tuple[list[Tensor], list[Any]] = ([], [])
        self.trainable: list[Tensor] = []
        self.has_frozen = False
        self.free()

    @property
    def memory(self) -> set[int]:
        own = {self._storage._cdata}
        return own.union(*(one.memory for one in self._extensions if one is not None))

    @property
    def runs(self) -> list[tuple[ShardedParam, Tensor]]:
        """What gathers fill, each with its parameter: [W * n], several of one that has an extension."""
        found: list[tuple[ShardedParam, Tensor]] = []
        for param, run, extension in zip(self._params, self._runs, self._extensions, strict=True):
            found += [
                (param, each)
                for each in ([run] if extension is None else extension.outputs)
                if each is not None
            ]
        return found

    def inputs(self) -> list[Tensor]:
        """What this rank gives to a gather of shards, for each run."""
        found: list[Tensor] = []
        for param, extension in zip(self._params, self._extensions, strict=True):
            found += [param.local] if extension is None else extension.inputs()
        return found

    def packing(self, ranks: int) -> Packing:
        if ranks not in self._packings:
            runs = [run for _, run in self.runs]
            dtypes = {run.dtype for run in runs}
            is_bytes = len(dtypes) > 1
            dtype = torch.uint8 if is_bytes else dtypes.pop()
            sizes = [run.nbytes // ranks // dtype.itemsize for run in runs]
            self._packings[ranks] = Packing(ranks, dtype, is_bytes, sizes, sum(sizes))
        return self._packings[ranks]

    def take(self, gathered: Tensor, ranks: int, *, is_split: bool) -> None:
        """Fill the runs with what `ranks` ranks gave, one behind the other.

        Args:
            is_split: they gave parts of runs, rather than of parameters.
        """
        rows = gathered.view(ranks, -1)
        outs: list[Tensor] = []
        later: list[tuple[ShardedParam, Tensor, Tensor]] = []  # and where from, and where to
        for param, run in self.runs:
            into = run if param.dim == 0 or is_split else torch.empty_like(run)
            if into is not run:
                later.append((param, into, run))
            outs.append(into.view(rows.dtype).view(ranks, -1))
        torch.split_with_sizes_copy(rows, list(self.packing(ranks).sizes), dim=1, out=outs)
        for param, parts, run in later:
            param.copy_out(parts, run)

    def complete(self) -> None:
        """Extensions make their parameters of what was gathered."""
        for index, extension in enumerate(self._extensions):
            if extension is not None:
                self.views[index] = extension.unsharded(self.dtypes[index])

    def follow_requires_grad(self) -> None:
        for param, view in zip(self._params, self.views, strict=True):
            if view.requires_grad != param.sharded.requires_grad:
                view.requires_grad = param.sharded.requires_grad
        self.trainable = [view for view in self.views if view.requires_grad]
        self.has_frozen = len(self.trainable) < len(self.views)

    def note_filled(self) -> None:
        """It has what the parameters hold now."""
        self._filled_from = [param.local for param in self._params], [param.version for param in self._params]

    def is_filled(self) -> bool:
        """Whether it has what the parameters hold now; a part may be another tensor."""
        parts, versions = self._filled_from
        return versions == [param.version for param in self._params] and all(
            part is param.local for part, param in zip(parts, self._params, strict=True)
        )

    def allocate(self) -> None:
        if self._storage.nbytes() != self._nbytes:
            self._storage.resize_(self._nbytes)

    def free(self) -> None:
        self._storage.resize_(0)
        for extension in self._extensions:
            if extension is not None:
                extension.free()

    def take_gradients(self) -> list[Tensor | None]:
        grads = [view.grad for view in self.views]
        for view in self.views:
            view.grad = None
        forms = [param.info.parallel for param in self._params]
        return [
            grad if grad is None or form is None else form.local_part(grad)
            for grad, form in zip(grads, forms, strict=True)
        ]

    def changed(self) -> None:
        """Changes in place during a forward are the module's own, as in torch."""
