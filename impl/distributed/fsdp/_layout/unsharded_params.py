"""The unsharded parameters of a group of DTensors: one storage that comes and goes, and how gathers fill it.

W = ranks that the group is sharded over, n = elements of a rank's part of one parameter, padding included.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from impl.distributed.fsdp._layout.gather_extension import GatherExtension
from impl.distributed.fsdp._layout.grad_dtypes import FOLLOWS_PARAM, has_grad_dtype, is_wider
from impl.distributed.fsdp._layout.sharded_param import ShardedParam, beginning_of, offsets

_ALIGNMENT = 16  # bytes, so that any dtype may begin there
_Held = tuple[list[Tensor], list[int], list[int]]


class Packing:
    """The buffer in which what is gathered from `ranks` ranks travels; its memory comes and goes.

    Args:
        runs: what will be filled from it, [ranks * n] each.
        device: where it is computed with.
    """

    def __init__(self, runs: Sequence[Tensor], ranks: int, device: torch.device) -> None:
        dtypes = {run.dtype for run in runs}
        self.is_bytes = len(dtypes) > 1
        self.dtype = torch.uint8 if self.is_bytes else dtypes.pop()
        self.sizes = [run.nbytes // ranks // self.dtype.itemsize for run in runs]  # of a rank's part of each
        self.total = sum(self.sizes)
        self.rows = [run.view(self.dtype).view(ranks, -1) for run in runs]
        self.output = torch.empty(ranks * self.total, dtype=self.dtype, device=device)
        self.nbytes = self.output.nbytes
        self._pieces: list[Tensor] = []  # of this rank's part of it, by what goes there
        self._shapes: list[torch.Size] = []  # that they have
        self.free()

    def allocate(self) -> None:
        storage = self.output.untyped_storage()
        if storage.nbytes() != self.nbytes:
            storage.resize_(self.nbytes)

    def free(self) -> None:
        self.output.untyped_storage().resize_(0)

    def pieces(self, mine: Tensor, given: Sequence[Tensor], *, is_own: bool) -> list[Tensor]:
        """Where in this rank's part of what travels the tensors go; behind each may lie padding.

        Args:
            is_own: it is a part of `output`, so that this is the same in every gather.
        """
        shapes = [one.shape for one in given]
        if is_own and self._shapes == shapes:
            return self._pieces
        pairs = zip(mine.split(self.sizes), shapes, strict=True)
        found = [beginning_of(piece, shape) for piece, shape in pairs]
        if is_own:
            self._pieces, self._shapes = found, shapes
        return found


class UnshardedParams:
    """All parameters of a group; of the runs that are gathered one makes one parameter, unless it has an extension.

    Args:
        params: in their order.
        dtypes: to compute in, of each.
        device: to compute with.
        extensions: of those that say themselves what is gathered of them; None for others.
        grad_dtypes: to accumulate gradients in, of each; None for any.
    """

    aliases_shard = False
    is_given_up = False  # for another, since parameters were cast

    def __init__(
        self,
        params: Sequence[ShardedParam],
        dtypes: Sequence[torch.dtype],
        device: torch.device,
        extensions: Sequence[GatherExtension | None],
        grad_dtypes: Sequence[torch.dtype | None],
    ) -> None:
        self.dtypes = list(dtypes)
        self._params = params
        self._device = device
        self._has_columns = any(param.dim for param in params)
        self._is_parallel = any(param.info.parallel is not None for param in params)
        self._extensions = extensions
        plain = [extension is None for extension in extensions]
        self._is_extended = not all(plain)
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
        self._columns: list[
            tuple[ShardedParam, Tensor, Tensor]
        ] = []  # being gathered, where to, and where they go then
        self._filled_from: _Held = ([], [], [])
        self.trainable: list[Tensor] = []
        self.has_frozen = False
        self.grad_dtypes: list[torch.dtype | None] = []
        self._view_grad_dtypes: list[torch.dtype | None] = []  # that autograd leaves them in
        self._wider_grads: list[int] = []  # indices of views with gradients wider than they are
        self.use_grad_dtypes(grad_dtypes)
        self.free()

    def use_grad_dtypes(self, grad_dtypes: Sequence[torch.dtype | None]) -> None:
        self.grad_dtypes = list(grad_dtypes)
        triples = zip(self._params, grad_dtypes, self.dtypes, strict=True)
        self._view_grad_dtypes = [
            grad_dtype if FOLLOWS_PARAM or has_grad_dtype(param.sharded) else dtype
            for param, grad_dtype, dtype in triples
        ]
        triples = zip(self._params, self._view_grad_dtypes, self.dtypes, strict=True)
        self._wider_grads = [
            index
            for index, (param, grad_dtype, dtype) in enumerate(triples)
            # Tensor parallelism may sum a gradient over its own ranks, which must have the wider dtype too.
            if is_wider(grad_dtype, dtype) and param.info.parallel is None
        ]
        for view, grad_dtype in zip(self.views, self._view_grad_dtypes, strict=True):
            _set_grad_dtype(view, grad_dtype)

    def take_gradients_as_computed(self) -> None:
        """Have autograd leave wider gradients uncast in this backward: whatever adds or reduces them casts them."""
        for index in self._wider_grads:
            self.views[index].grad_dtype = None

    def take_gradients_as_shown(self) -> None:
        for index in self._wider_grads:
            _set_grad_dtype(self.views[index], self._view_grad_dtypes[index])

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
        if not self._is_extended:
            return [param.sharded._local_tensor for param in self._params]
        found: list[Tensor] = []
        for param, extension in zip(self._params, self._extensions, strict=True):
            found += [param.local] if extension is None else extension.inputs()
        return found

    def packing(self, ranks: int) -> Packing:
        if ranks not in self._packings:
            with torch.inference_mode(False), torch.no_grad():
                self._packings[ranks] = Packing([run for _, run in self.runs], ranks, self._device)
        return self._packings[ranks]

    def rows(self, ranks: int, *, is_split: bool) -> list[Tensor]:
        """What is filled with a row [n] of each of `ranks` ranks, for each run.

        Args:
            is_split: they give parts of runs, rather than of parameters.
        """
        packing = self.packing(ranks)
        if is_split or not self._has_columns:
            return packing.rows
        self._columns = []  # a gather may have failed
        rows = list(packing.rows)
        for index, (param, run) in enumerate(self.runs):
            if param.dim:
                parts = torch.empty_like(run)
                rows[index] = parts.view(packing.dtype).view(ranks, -1)
                self._columns.append((param, parts, run))
        return rows

    def take(self, gathered: Tensor, ranks: int, *, is_split: bool) -> None:
        """Fill the rows with what the ranks gave, one behind the other."""
        rows = self.rows(ranks, is_split=is_split)
        torch.split_with_sizes_copy(gathered.view(ranks, -1), self.packing(ranks).sizes, dim=1, out=rows)

    def complete(self) -> None:
        """Parameters that are cut by columns are put together, and extensions make theirs of what was gathered."""
        columns, self._columns = self._columns, []
        for param, parts, run in columns:
            param.copy_out(parts, run)
        for index, extension in enumerate(self._extensions) if self._is_extended else ():
            if extension is not None:
                self.views[index] = extension.unsharded(self.dtypes[index])
                _set_grad_dtype(self.views[index], self._view_grad_dtypes[index])

    def follow_requires_grad(self) -> None:
        wanted = [param.sharded.requires_grad for param in self._params]
        if wanted != [view.requires_grad for view in self.views]:
            for view, requires_grad in zip(self.views, wanted, strict=True):
                view.requires_grad = requires_grad
        self.trainable = [*itertools.compress(self.views, wanted)]
        self.has_frozen = not all(wanted)

    def note_filled(self) -> list[int]:
        """It has what the parameters hold now: to graphs made of what they held before these are changed in place.

        Returns:
            Which they are.
        """
        before, self._filled_from = self._filled_from, self._held()
        now_and_before = zip(*self._filled_from, *before, strict=False)  # nothing before at first
        written = [
            i
            for i, (part, version, own, old_part, old_version, old_own) in enumerate(now_and_before)
            if part is not old_part or version != old_version or own != old_own
        ]
        torch.autograd.graph.increment_version([self.views[i] for i in written])
        return written

    def is_filled(self) -> bool:
        """Whether it has what the parameters hold now; a part may be another tensor."""
        (before, *versions), (now, *versions_now) = self._filled_from, self._held()
        return versions == versions_now and all(map(operator.is_, before, now))

    def has_other_parts(self) -> bool:
        """Whether parameters were given other parts since it was filled."""
        before = self._filled_from[0]
        return any(param.local is not part for param, part in zip(self._params, before, strict=False))

    def _held(self) -> _Held:
        """The parts, and numbers of them that are others whenever they may have been written to."""
        sharded = [param.sharded for param in self._params]
        parts: list[Tensor] = [one._local_tensor for one in sharded]
        return parts, [one._version for one in sharded], [part._version for part in parts]

    def allocate(self) -> None:
        if self._storage.nbytes() != self._nbytes:
            self._storage.resize_(self._nbytes)

    def free(self) -> None:
        self._storage.resize_(0)
        for extension in self._extensions if self._is_extended else ():
            if extension is not None:
                extension.free()

    def take_gradients(self) -> list[Tensor | None]:
        grads = [view.grad for view in self.views]
        for view in self.views:
            view.grad = None
        self.take_gradients_as_shown()
        if not self._is_parallel:
            return grads
        return [param.info.local_part(grad) for param, grad in zip(self._params, grads, strict=True)]

    def changed(self) -> None:
        """Changes in place during a forward are the module's own, as in torch."""


def _set_grad_dtype(view: nn.Parameter, grad_dtype: torch.dtype | None) -> None:
    if view.grad is None and view.grad_dtype is not grad_dtype:
        view.grad_dtype = grad_dtype
