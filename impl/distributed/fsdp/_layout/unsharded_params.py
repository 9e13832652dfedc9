"""Unsharded parameters of a group of DTensors: one storage that is freed and allocated again, and gathers into it.

W = ranks that the group is sharded over, n = elements of a rank's shard of one parameter, padding included. A *run* is
the memory [W * n] that gathers fill for one parameter, or for one of several tensors of an all-gather extension.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Generator, Hashable, Sequence

import torch
from torch import Tensor, nn

from impl.distributed.fsdp._layout.cast_shards import ShardVersions
from impl.distributed.fsdp._layout.gather_extension import GatherExtension
from impl.distributed.fsdp._layout.grad_dtypes import FOLLOWS_PARAM, has_grad_dtype, is_wider
from impl.distributed.fsdp._layout.sharded_param import ShardedParam, leading_view, offsets
from impl.distributed.fsdp._params.autograd import runs_backward
from impl.distributed.fsdp._params.param_registration import note_replaced
from impl.distributed.fsdp._params.tensor_parallel import local_of
from impl.kernels import keep_for_current_stream

_ALIGNMENT = 16  # alignment in bytes for any dtype


class Packing:
    """Buffer of a gather from `ranks` ranks, whose memory is freed and allocated again.

    Args:
        runs: tensors that are filled from the buffer, [ranks * n] each.
        device: compute device.
    """

    def __init__(self, runs: Sequence[Tensor], ranks: int, device: torch.device) -> None:
        dtypes = {run.dtype for run in runs}
        # Not all backends know the dtypes of one byte.
        self.is_bytes = len(dtypes) > 1 or min(dtype.itemsize for dtype in dtypes) == 1
        self.dtype = torch.uint8 if self.is_bytes else dtypes.pop()
        # Number of elements of a rank's shard of each run.
        self.sizes = [run.nbytes // ranks // self.dtype.itemsize for run in runs]
        self.total = sum(self.sizes)
        self.rows = [run.view(self.dtype).view(ranks, -1) for run in runs]
        self.output = torch.empty(ranks * self.total, dtype=self.dtype, device=device)
        self.nbytes = self.output.nbytes
        self._parts: tuple[list[Tensor], list[Tensor]] = [], []  # see `parts`
        self._shapes: list[torch.Size] = []  # shapes of the inputs
        self.free()

    def allocate(self) -> None:
        storage = self.output.untyped_storage()
        if storage.nbytes() != self.nbytes:
            storage.resize_(self.nbytes)

    def free(self) -> None:
        self.output.untyped_storage().resize_(0)

    def parts(
        self, section: Tensor, inputs: Sequence[Tensor], *, is_own: bool
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return the views of this rank's section that the inputs are copied to, and those of padding after them.

        Args:
            is_own: the section is in `output`, so that the views are the same in every gather.
        """
        shapes = [tensor.shape for tensor in inputs]
        if is_own and self._shapes == shapes:
            return self._parts
        pairs = list(zip(section.split(self.sizes), shapes, strict=True))
        tails = [piece[shape.numel() :] for piece, shape in pairs if piece.numel() > shape.numel()]
        parts = [leading_view(piece, shape) for piece, shape in pairs], tails
        if is_own:
            self._parts, self._shapes = parts, shapes
        return parts


class UnshardedParams:
    """Unsharded parameters of a group. They share the memory of the runs, except those of extensions.

    Args:
        params: sharded parameters, in order.
        dtypes: dtype to compute in, for each parameter.
        device: compute device.
        extensions: all-gather extension of each parameter, or None.
        grad_dtypes: dtype to accumulate gradients in, for each parameter; None: any.
    """

    aliases_shard = False
    is_invalidated = False  # see `Unsharded` in `_params/param_group.py`

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
            is_plain * param.world * param.padded_numel for param, is_plain in zip(params, plain, strict=True)
        ]
        nbytes = [numel * dtype.itemsize for numel, dtype in zip(numels, dtypes, strict=True)]
        starts = offsets([-(-size // _ALIGNMENT) * _ALIGNMENT for size in nbytes])
        self._nbytes = starts[-1]
        self._storage = torch.empty(self._nbytes, dtype=torch.uint8, device=device).untyped_storage()
        self._runs: list[Tensor | None] = []  # [W * n]; None for an extension
        self.views: list[nn.Parameter] = []
        for param, numel, dtype, start, is_plain in zip(params, numels, dtypes, starts, plain, strict=False):
            first = start // dtype.itemsize
            run, view = (torch.empty(0, dtype=dtype, device=device) for _ in range(2))
            self._runs.append(run.set_(self._storage, first, (numel,), (1,)) if is_plain else None)
            if is_plain:
                view.set_(self._storage, first, param.shape, param.stride)
            # The tensor of an extension replaces this view once it is gathered.
            tensor = param.info.wrap_local(view)
            self.views.append(nn.Parameter(tensor, requires_grad=param.sharded.requires_grad))
            note_replaced(self.views[-1], param.name, param)  # an optimizer must not step it
        # Last common settings of the sharded and the unsharded parameters.
        self._requires_grads = [param.sharded.requires_grad for param in params]
        self._packings: dict[int, Packing] = {}
        # Parameters that are sharded in another than the first dimension: gathered memory, and the run to copy it to.
        self._columns: list[tuple[ShardedParam, Tensor, Tensor]] = []
        self._filled_from = ShardVersions([], [])
        self._is_trainable: list[bool] = []
        self.trainable: list[Tensor] = []
        self.has_frozen = False
        self.grad_dtypes: list[torch.dtype | None] = []
        self._view_grad_dtypes: list[torch.dtype | None] = []  # dtypes in which autograd leaves gradients
        # The gradients will be added to others. So tensor parallelism sums them in the dtype of that sum.
        self.accumulates = False
        self._wider_grads: list[int] = []  # views whose gradients are wider than they are
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

    def allow_wider_gradients(self) -> None:
        """Disable autograd's cast of wider gradients in this backward. Additions and reductions cast them."""
        for index in self._wider_grads:
            self.views[index].grad_dtype = None

    def restore_grad_dtypes(self) -> None:
        for index in self._wider_grads:
            _set_grad_dtype(self.views[index], self._view_grad_dtypes[index])

    @property
    def memory(self) -> set[int]:
        own = {self._storage._cdata}
        return own.union(*(extension.memory for extension in self._extensions if extension is not None))

    @property
    def runs(self) -> list[tuple[ShardedParam, Tensor]]:
        """Tensors that gathers fill, with their parameters: [W * n], or several tensors for an extension."""
        runs: list[tuple[ShardedParam, Tensor]] = []
        for param, run, extension in zip(self._params, self._runs, self._extensions, strict=True):
            runs += [
                (param, run) for run in ([run] if extension is None else extension.outputs) if run is not None
            ]
        return runs

    def inputs(self) -> list[Tensor]:
        """Return this rank's inputs of a gather of shards, for each run."""
        if not self._is_extended:
            return [param.sharded._local_tensor for param in self._params]
        inputs: list[Tensor] = []
        for param, extension in zip(self._params, self._extensions, strict=True):
            inputs += [param.local] if extension is None else extension.inputs()
        return inputs

    def packing(self, ranks: int) -> Packing:
        if ranks not in self._packings:
            with torch.inference_mode(False), torch.no_grad():
                self._packings[ranks] = Packing([run for _, run in self.runs], ranks, self._device)
        return self._packings[ranks]

    def rows(self, ranks: int, *, is_post_forward: bool) -> list[Tensor]:
        """Return the tensors that are filled with a row [n] of each of `ranks` ranks, for each run.

        Args:
            is_post_forward: the ranks contribute post-forward shards of the runs, not shards of parameters.
        """
        packing = self.packing(ranks)
        if is_post_forward or not self._has_columns:
            return packing.rows
        self._columns = []  # a gather may have failed
        rows = list(packing.rows)
        for index, (param, run) in enumerate(self.runs):
            if param.dim:
                shards = torch.empty_like(run)
                rows[index] = shards.view(packing.dtype).view(ranks, -1)
                self._columns.append((param, shards, run))
        return rows

    def fill_rows(self, gathered: Tensor, ranks: int, *, is_post_forward: bool) -> None:
        """Fill the rows from the gathered ranks' inputs, which are concatenated."""
        rows = self.rows(ranks, is_post_forward=is_post_forward)
        torch.split_with_sizes_copy(gathered.view(ranks, -1), self.packing(ranks).sizes, dim=1, out=rows)

    def complete(self) -> None:
        """Copy column-sharded parameters into place, and create the parameters of extensions."""
        columns, self._columns = self._columns, []
        for param, shards, run in columns:
            param.copy_out(shards, run)
        for index, extension in enumerate(self._extensions) if self._is_extended else ():
            if extension is not None:
                self.views[index] = extension.unsharded(self.dtypes[index])
                note_replaced(self.views[index], self._params[index].name, self._params[index])
                _set_grad_dtype(self.views[index], self._view_grad_dtypes[index])

    def keep_extension_tensors(self) -> None:
        """Keep the tensors that extensions created beside the gathered ones until the current stream has read them."""
        for extension in self._extensions if self._is_extended else ():
            if extension is not None:
                extension.keep_for_current_stream()

    def share_requires_grad(self, post_forward_params: Sequence[nn.Parameter]) -> None:
        """Set `requires_grad` of all forms of a parameter to the setting of the form that the user has changed.

        This is the form that modules had at the time, or another form that the user had listed before.

        Args:
            post_forward_params: the forms that modules have beside post-forward shards, or none.
        """
        before = self._requires_grads
        forms = [[param.sharded for param in self._params], self.views]
        if post_forward_params:
            forms.append(list(post_forward_params))
        settings = [[param.requires_grad for param in params] for params in forms]
        if all(setting == before for setting in settings):
            return
        self._requires_grads = [
            last if all(setting is last for setting in by_form) else not last
            for last, *by_form in zip(before, *settings, strict=True)
        ]
        for params in forms:
            for param, requires_grad in zip(params, self._requires_grads, strict=True):
                # functorch's transforms refuse the method `requires_grad_`.
                param.requires_grad = requires_grad

    def record_trainable(self) -> None:
        """Record the trainable parameters for the next backward.

        A backward keeps those that were trainable in its forward, because nodes of the graph still read them.
        """
        trained = self._requires_grads
        if runs_backward() and self._is_trainable:
            trained = [now or before for now, before in zip(trained, self._is_trainable, strict=True)]
        self._is_trainable = trained
        self.trainable = [*itertools.compress(self.views, trained)]
        self.has_frozen = not all(trained)

    def record_filled(self) -> list[int]:
        """Record that a gather fills the parameters with the shards' current values. Return the indices of changes.

        Gathers write without autograd's knowledge. So increment the versions of changed parameters here, and a backward
        through a graph of earlier values raises.
        """
        before, self._filled_from = self._filled_from, versions_of(self._params)
        written = self._filled_from.changed_since(before)
        torch.autograd.graph.increment_version([self.views[i] for i in written])
        return written

    def is_filled(self) -> bool:
        """Return whether the parameters have the shards' current values, and no shard was replaced."""
        return versions_of(self._params).are_those(self._filled_from)

    @contextlib.contextmanager
    def following_moves(self) -> Generator[None]:
        """Context manager for moves and casts, after which shards in the same memory count as unchanged.

        Their tensors are new nevertheless.
        """
        before, places = versions_of(self._params), _places_of(self._params)
        yield
        changed = set(before.changed_since(self._filled_from))
        pairs = zip(places, _places_of(self._params), strict=True)
        changed.update(index for index, (old_place, place) in enumerate(pairs) if old_place != place)
        self._filled_from = self._filled_from.updated(versions_of(self._params), changed)

    def has_other_shards(self) -> bool:
        """Return whether shards were replaced since the parameters were filled."""
        before = self._filled_from.shards
        return any(param.local is not shard for param, shard in zip(self._params, before, strict=False))

    def allocate(self) -> None:
        if self._storage.nbytes() != self._nbytes:
            self._storage.resize_(self._nbytes)

    def free(self) -> None:
        self._storage.resize_(0)
        for extension in self._extensions if self._is_extended else ():
            if extension is not None:
                extension.free()

    def lacks_gradients(self) -> bool:
        return any(view.grad is None for view in self.trainable)

    def take_gradients(self) -> list[Tensor | None]:
        grads = [view.grad for view in self.views]
        keep_for_current_stream(map(local_of, grads) if self._is_parallel else grads)
        for view in self.views:
            view.grad = None
        self.restore_grad_dtypes()
        if not self._is_parallel:
            return grads
        if self.accumulates:
            pairs = zip(grads, self.grad_dtypes, strict=True)
            grads = [grad if grad is None or dtype is None else grad.to(dtype) for grad, dtype in pairs]
        return [param.info.local_part(grad) for param, grad in zip(self._params, grads, strict=True)]

    def take_written(self) -> None:
        """Return None, because changes in place during a forward are the module's own, like in torch."""


def versions_of(params: Sequence[ShardedParam]) -> ShardVersions:
    """Return this rank's shards, with the version counters of each and of its DTensor."""
    sharded = [param.sharded for param in params]
    shards: list[Tensor] = [param._local_tensor for param in sharded]
    pairs = zip(sharded, shards, strict=True)
    return ShardVersions(shards, [(param._version, shard._version) for param, shard in pairs])


def _places_of(params: Sequence[ShardedParam]) -> list[Hashable]:
    """Return the memory of this rank's shards, with the version counters of their DTensors."""
    return [(param.local.untyped_storage()._cdata, param.dtype, param.sharded._version) for param in params]


def _set_grad_dtype(view: nn.Parameter, grad_dtype: torch.dtype | None) -> None:
    if view.grad is None and view.grad_dtype is not grad_dtype:
        view.grad_dtype = grad_dtype
