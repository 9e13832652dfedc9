"""One update of many parameters from gradients that are still scaled; the gradients are read and left as they are.

torch's fused operators divide the gradients they are given, in place. Here they are given copies: on the CPU of one
piece after the other, each small enough to stay in the cache, so that memory is read and written no more often. The CPU
library and Triton's kernels read the gradients where they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from impl.kernels._dispatch import cpu_library, dispatch_for, one_of_each_kind
from impl.kernels._lists import HALVES
from impl.kernels._native.fused_step import Memory, fused_step
from impl.kernels._no_grad_fast import no_grad_fast
from impl.kernels._storage_order import flat_view, laid_out_as
from impl.kernels.rules import Rule

# Longer parameters are updated a piece at a time, shorter ones many at a time, their gradients joined.
_LONG = 1 << 14
# Elements joined at a time.
_RUN = 1 << 17
# Elements of a piece for each thread.
_PIECE = 1 << 16


@dataclass(frozen=True)
class Parameters:
    """What an update changes: dense tensors of one dtype on one device; entries of one place have one layout."""

    params: Sequence[Tensor]
    states: Sequence[Sequence[Tensor]]  # as many lists as the rule asks for, each as long as `params`
    steps: Sequence[
        Tensor
    ] = ()  # f32, 0-dim, on that device: updates so far; empty if the rule does not count
    copies: Sequence[Tensor] = ()  # of the new parameters, in lower precision; or empty

    @cached_property
    def memory(self) -> Memory:
        return Memory(self.params, self.states, self.copies, self.steps)

    def have_moved(self) -> bool:
        """Whether one of these tensors has other memory than when this was last asked."""
        return self.memory.have_moved()

    def parts(self) -> list[_Run | _Long]:
        """How the CPU walks them, which takes longer to find out than to do: kept while memory stays where it is."""
        parts = self._parts
        if any(isinstance(part, _Long) and part.has_moved(self) for part in parts):
            del self.__dict__["_parts"]
            parts = self._parts
        return parts

    @cached_property
    def _parts(self) -> list[_Run | _Long]:
        return list(_parts(self))


@dataclass(frozen=True)
class _Run:
    """Short parameters, updated by one call of the operator."""

    places: Sequence[int]
    params: list[Tensor]
    states: list[list[Tensor]]
    steps: list[Tensor]
    copies: list[Tensor]
    numels: list[int]


@dataclass(frozen=True)
class _Piece:
    start: int
    stop: int
    param: Tensor
    states: list[list[Tensor]]
    copy: Tensor | None


@dataclass(frozen=True)
class _Long:
    """A long parameter in the order of memory."""

    place: int
    steps: list[Tensor]
    pieces: list[_Piece]
    addresses: list[int]  # of what the pieces are views of
    width: int  # of a piece, which goes by the number of threads

    def has_moved(self, parameters: Parameters) -> bool:
        return self.width != _width() or self.addresses != _addresses(parameters, self.place)


@no_grad_fast
def fused_step_(
    rule: Rule,
    parameters: Parameters,
    grads: Sequence[Tensor],
    factor: Tensor,
    found_inf: Tensor | None = None,
) -> None:
    """Update parameters and states by `rule` from gradients times `factor`.

    Args:
        rule: the optimizer's arithmetic and settings.
        parameters: overwritten, but for the counters, which stand at this update already.
        grads: one for each parameter and of its shape, of any floating dtype; left as they are. For parameters in
            f16 and bf16 they are multiplied in f32 and not rounded again, for others in the parameter's dtype. Those
            that are `KnownLayoutList` lie in memory as their parameters do, which have not moved since `have_moved` was
            asked.
        factor: f32 or f64, 0-dim, on the parameters' device.
        found_inf: f32, 0-dim, there too; where it is 1.0 nothing is changed. None: it is known to be 0.0.

    Sync: none. Collectives: none.
    """
    backend = dispatch_for([parameters.params[0], *one_of_each_kind(grads)]).backend
    if backend == "triton":
        from impl.kernels._triton.fused_step import launch_fused_step  # noqa: PLC0415  optional, and slow to import

        if launch_fused_step(rule, parameters, grads, factor, found_inf):
            return
    if backend == "cached" and found_inf is None:
        library = cpu_library()
        if library is None or not fused_step(library, rule, parameters.memory, grads, factor):
            _step_cached(rule, parameters, grads, factor)
    else:
        _step_plain(rule, parameters, grads, factor, found_inf)


def _step_plain(
    rule: Rule, parameters: Parameters, grads: Sequence[Tensor], factor: Tensor, found_inf: Tensor | None
) -> None:
    own = parameters.params[0].dtype
    scaled, divisor = _scaled_for(own, list(map(laid_out_as, parameters.params, grads)), factor)
    rule.apply_(parameters.params, scaled, parameters.states, parameters.steps, divisor, found_inf)
    if parameters.copies:
        torch._foreach_copy_([*parameters.copies], [*parameters.params])


def _scaled_for(
    own: torch.dtype, grads: Sequence[Tensor], factor: Tensor
) -> tuple[list[Tensor], Tensor | None]:
    """Copies of the gradients, and by what the operator has still to divide them."""
    if own in HALVES:
        return [grad.to(own, copy=True) for grad in grads], factor.float().reciprocal()
    return list(torch._foreach_mul([grad.to(own) for grad in grads], factor.to(own))), None


def _step_cached(rule: Rule, parameters: Parameters, grads: Sequence[Tensor], factor: Tensor) -> None:
    scaling = _Scaling.by(factor, parameters.params[0].dtype)
    for part in parameters.parts():
        if isinstance(part, _Run):
            _step_run(rule, part, grads, scaling)
        else:
            grad = _flat(laid_out_as(parameters.params[part.place], grads[part.place]))
            _step_long(rule, part, grad, scaling)


@dataclass(frozen=True)
class _Scaling:
    """Gradients times a factor, in memory that is used again and again."""

    factor: Tensor
    divisor: Tensor | None  # for halves, which the operator multiplies in f32; it writes what it divides
    scratch: Tensor

    @classmethod
    def by(cls, factor: Tensor, dtype: torch.dtype) -> _Scaling:
        scratch = torch.empty(max(_RUN, _width()), dtype=dtype, device="cpu")
        return cls(factor, factor.float().reciprocal() if dtype in HALVES else None, scratch)

    def of(self, flat: Tensor) -> Tensor:
        """The next call overwrites it."""
        scaled = self.scratch[: flat.numel()]
        if self.divisor is not None:
            return scaled.copy_(flat)
        if scaled.dtype is flat.dtype:
            return torch.mul(flat, self.factor, out=scaled)
        return scaled.copy_(flat).mul_(self.factor)


def _step_run(rule: Rule, run: _Run, grads: Sequence[Tensor], scaling: _Scaling) -> None:
    scaled = scaling.of(_flatten_dense_tensors([grads[i] for i in run.places]))
    pieces = torch.split_with_sizes(scaled, run.numels)
    rule.apply_(run.params, pieces, run.states, run.steps, scaling.divisor)
    if run.copies:
        torch._foreach_copy_(run.copies, run.params)


def _step_long(rule: Rule, long: _Long, grad: Tensor, scaling: _Scaling) -> None:
    for piece in long.pieces:
        scaled = scaling.of(grad[piece.start : piece.stop])
        rule.apply_([piece.param], [scaled], piece.states, long.steps, scaling.divisor)
        if piece.copy is not None:
            piece.copy.copy_(piece.param)


def _flat(tensor: Tensor) -> Tensor:
    view = flat_view(tensor)
    assert view is not None, "a tensor that is to be updated has gaps"
    return view


def _parts(parameters: Parameters) -> Iterable[_Run | _Long]:
    run: list[int] = []
    filled = 0
    for place, param in enumerate(parameters.params):
        numel = param.numel()
        if numel > _LONG or not _are_contiguous(parameters, place):
            yield _long(parameters, place)
        elif numel:
            if filled + numel > _RUN:
                yield _run(parameters, run)
                run, filled = [], 0
            run.append(place)
            filled += numel
    if run:
        yield _run(parameters, run)


def _are_contiguous(parameters: Parameters, place: int) -> bool:
    return parameters.params[place].is_contiguous() and (
        not parameters.copies or parameters.copies[place].is_contiguous()
    )


def _run(parameters: Parameters, places: Sequence[int]) -> _Run:
    def picked(tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensors[place] for place in places] if tensors else []

    params = picked(parameters.params)
    return _Run(
        places,
        params,
        [picked(state) for state in parameters.states],
        picked(parameters.steps),
        picked(parameters.copies),
        [param.numel() for param in params],
    )


def _long(parameters: Parameters, place: int) -> _Long:
    width = _width()
    params = _flat(parameters.params[place]).split(width)
    states = [_flat(state[place]).split(width) for state in parameters.states]
    copies = _flat(parameters.copies[place]).split(width) if parameters.copies else [None] * len(params)
    pieces = [
        _Piece(i * width, i * width + len(piece), piece, [[state[i]] for state in states], copies[i])
        for i, piece in enumerate(params)
    ]
    steps = [parameters.steps[place]] if parameters.steps else []
    return _Long(place, steps, pieces, _addresses(parameters, place), width)


def _width() -> int:
    return _PIECE * torch.get_num_threads()


def _addresses(parameters: Parameters, place: int) -> list[int]:
    lists = (parameters.params, *parameters.states, *([parameters.copies] if parameters.copies else []))
    return [tensors[place].data_ptr() for tensors in lists]
