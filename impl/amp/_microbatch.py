"""Microbatches that are left out of the accumulated gradients if their own are not finite.

Where the sum is
    The gradients that earlier microbatches have accumulated are set aside while a microbatch runs, so that autograd
    stores its gradients without adding them. Once they are checked, they are added to the sum, or not. So a microbatch
    costs one more pass that reads its gradients, and the sum is never affected by a microbatch that is left out. On
    devices other than the CPU the flag stays on the device and decides in the addition.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import compress
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from impl import kernels
from impl.amp._gradients import named_params, rank_in, values_of
from impl.amp._replicas import replicated_modules
from impl.kernels import TensorList, to_device
from impl.optim._held_gradients import GradientHolder, HeldGradient, HeldGradients, holders_of
from impl.optim._shards import all_gather_numbers, local_part, redistribute_like

# Gradients by their holder and its key.
_Key = tuple[int, Hashable]
_Grads = dict[_Key, Tensor]
# Gradients, or parts of them, with the names of their parameters.
_Named = list[tuple[str, Tensor]]


class SkippedMicrobatch(NamedTuple):
    """A microbatch that one rank has left out, or for which it has found inf or nan. `print` shows it in one line."""

    position: int  # number among the microbatches of the step, from 0
    rank: int  # rank of the default group
    names: tuple[str, ...]  # parameters with inf or nan, none after `skip()`

    def __str__(self) -> str:
        why = f"inf or nan in {', '.join(self.names)}" if self.names else "skipped by the caller"
        return f"microbatch {self.position}: {why} on rank {self.rank}"


class Microbatch:
    """The running microbatch of a `GradScaler.microbatch` region."""

    def __init__(
        self,
        params: Sequence[Tensor],
        holders: Sequence[GradientHolder] | None,
        *,
        has_unknown_peers: bool = False,
    ) -> None:
        self._params = params
        # A disabled scaler passes None.
        self._holders = holders
        self._has_unknown_peers = has_unknown_peers
        self.is_skipped = False

    def skip(self) -> None:
        """Replace this rank's gradients of the microbatch by zeros. Call it before the backward.

        The gradients are averaged over the ranks that did not skip. If the model is sharded, or in
        DistributedDataParallel, the rank runs the forward and backward nevertheless, on inputs of any value, because
        the other ranks wait for its collectives. Ranks that share a batch (tensor parallelism) skip it together.

        Raises:
            RuntimeError: the microbatch has gradients already; or the scaler is disabled; or it is a `GradScaler` and
                the model is in DistributedDataParallel, so that other ranks would not know.
        Sync: none. Collectives: none.
        """
        if self._holders is None:
            raise RuntimeError(
                "skip() of a disabled GradScaler would be ignored; enable the scaler, with init_scale=1.0 if the loss "
                "needs no scaling"
            )
        if self._has_unknown_peers:
            raise RuntimeError(
                "skip() of a GradScaler is unknown to the other ranks of DistributedDataParallel, which would average "
                "over all; use a ShardedGradScaler"
            )
        if any(param.grad is not None for param in self._params):
            raise RuntimeError(
                "skip() was called after a backward of this microbatch, whose gradients other ranks may have; call it "
                "before the backward"
            )
        self.is_skipped = True
        for holder in self._holders:
            holder.skip_microbatch()


@dataclass(frozen=True)
class _Outcome:
    """Result of one microbatch."""

    share: Tensor  # f32, 0-dim: share of the ranks that took part, or 0.0
    is_bad: Tensor  # f32, 0-dim: 1.0 if a rank has found inf or nan
    begins_sum: Tensor  # f32, 0-dim: 1.0 if the sum before it was dropped
    is_skipped: bool  # whether this rank has called `skip`
    # Names of this rank's parameters, and whether their gradients hold inf or nan, as bool [names].
    nonfinite: Sequence[tuple[Sequence[str], Tensor]]


@dataclass
class Accumulation:
    """Microbatches of one optimizer since the last `update`.

    A rank that holds no gradients cannot see that the user has dropped a sum. So it keeps the outcomes of that sum,
    which do not count.
    """

    outcomes: list[_Outcome] = field(default_factory=list[_Outcome])
    is_open: bool = False
    has_sum: bool = False  # whether this rank holds gradients of these microbatches

    def __bool__(self) -> bool:
        """Return whether a microbatch has ended or is running."""
        return self.is_open or bool(self.outcomes)

    def check_closed(self, call: str) -> None:
        if self.is_open:
            raise RuntimeError(
                f"{call}() was called inside of microbatch(), where .grad is that of one microbatch; leave the region "
                "first"
            )

    def _in_sum(self, device: torch.device) -> Tensor:
        """Return 1.0 for each microbatch of the current sum, and 0.0 for those before it, f32 [microbatches]."""
        begun = torch.stack([to_device(outcome.begins_sum, device) for outcome in self.outcomes]).cumsum(0)
        return (begun == begun[-1]).float()

    def _taken(self, in_sum: Tensor) -> Tensor:
        return (
            torch.stack([to_device(outcome.share, in_sum.device) for outcome in self.outcomes]) * in_sum
        ).sum()

    def scaled(self, scale: Tensor) -> Tensor:
        """Return the scale of gradients that are the sum over those who took part, and must be divided for them."""
        in_sum = self._in_sum(scale.device)
        taken = self._taken(in_sum)
        return scale * torch.where(taken > 0, taken / in_sum.sum(), 1.0)

    def is_empty(self, device: torch.device) -> Tensor:
        """Return 1.0 if no rank took part in a microbatch that was taken, else 0.0."""
        return (self._taken(self._in_sum(device)) == 0).float()

    def scale_flags(self, step_flags: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        """Return flags, one of which is set if a microbatch overflowed, or the sum of those taken did.

        Args:
            step_flags: flags of the optimizer's step, on `device`. They are set too if no microbatch was taken.
            device: device of the results.
        """
        in_sum = self._in_sum(device)
        are_bad = torch.stack([to_device(outcome.is_bad, device) for outcome in self.outcomes])
        has_taken = self._taken(in_sum) > 0
        return [(are_bad * in_sum).amax(), *(torch.where(has_taken, flag, 0.0) for flag in step_flags)]

    def skipped(self, groups: Sequence[dist.ProcessGroup | None]) -> list[SkippedMicrobatch]:
        """Return what ranks have left out.

        Sync: one, and one for each microbatch. Collectives: one for each group.
        """
        rank = rank_in(groups)
        skipped: list[SkippedMicrobatch] = []
        in_sum = self._in_sum(self.outcomes[0].share.device).tolist() if self.outcomes else []
        for index, outcome in enumerate(compress(self.outcomes, in_sum)):
            if outcome.is_skipped:
                skipped.append(SkippedMicrobatch(index, rank, ()))
            elif outcome.is_bad.item():
                flags = [
                    pair
                    for names, are_nonfinite in outcome.nonfinite
                    for pair in zip(names, are_nonfinite.tolist(), strict=True)
                ]
                names = tuple(dict.fromkeys(name for name, is_nonfinite in flags if is_nonfinite))
                skipped += [SkippedMicrobatch(index, rank, names)] if names else []
        for group in groups:
            by_rank: list[list[SkippedMicrobatch]] = [[]] * dist.get_world_size(group)
            dist.all_gather_object(by_rank, skipped, group=group)
            skipped = list(dict.fromkeys(entry for entries in by_rank for entry in entries))
        return sorted(skipped)


class _PlainGradients:
    """`.grad` of parameters that no sharded unit has."""

    def __init__(self, optimizer: torch.optim.Optimizer, params: Sequence[Tensor]) -> None:
        self.stepped = params
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self.replicas = replicated_modules(optimizer, params)

    def begin_microbatch(self) -> HeldGradients:
        if not all(module.require_backward_grad_sync for module in self.replicas):
            raise _no_unsynchronised_replicas()
        return self._take()

    def _take(self) -> HeldGradients:
        held: HeldGradients = {}
        for index, param in enumerate(self.stepped):
            if param.grad is not None:
                held[index] = HeldGradient(param.grad, [(param, param.grad)])
                param.grad = None
        return held

    def skip_microbatch(self) -> None:
        # Hooks run before those of DistributedDataParallel, which reduce the gradients.
        params = [param for param in self.stepped if param.requires_grad]
        self._hooks = self._hooks or [param.register_hook(torch.zeros_like) for param in params]

    def end_microbatch(self) -> tuple[HeldGradients, list[Hashable]]:
        held = self._take()
        # The last forward with gradients has set this attribute.
        if held and not all(module.require_forward_param_sync for module in self.replicas):
            raise _no_unsynchronised_replicas()
        return held, []

    def put_gradients(self, tensors: Mapping[Hashable, Tensor]) -> None:
        for hook in self._hooks:
            hook.remove()
        for index, param in enumerate(self.stepped):
            param.grad = tensors.get(index)

    def reduce_held(self) -> None: ...


def _no_unsynchronised_replicas() -> NotImplementedError:
    return NotImplementedError(
        "microbatch() does not support no_sync() of DistributedDataParallel, which would never reduce the gradients "
        "that are set aside; synchronise every microbatch"
    )


class _Region:
    """Gradients of all holders of one optimizer's parameters, in a region of `microbatch`."""

    def __init__(self, optimizer: torch.optim.Optimizer, has_peers: bool) -> None:
        named = named_params(optimizer)
        params = [param for _, param in named]
        sharded = holders_of(params)
        sharded_params = {id(param) for holder in sharded for param in holder.stepped}
        plain = _PlainGradients(optimizer, [param for param in params if id(param) not in sharded_params])
        self.holders: list[GradientHolder] = [*sharded, plain]
        self.microbatch = Microbatch(
            params, self.holders, has_unknown_peers=bool(plain.replicas) and not has_peers
        )
        self._names = {id(param): name for name, param in named}

    def begin(self) -> _Grads:
        """Take the accumulated gradients."""
        held: _Grads = {}
        begun: list[GradientHolder] = []
        try:
            for number, holder in enumerate(self.holders):
                held |= {(number, key): grad.tensor for key, grad in holder.begin_microbatch().items()}
                begun.append(holder)
        except BaseException:
            self.holders = begun
            self.put(held)
            raise
        return held

    def end(self) -> tuple[dict[_Key, HeldGradient], set[_Key]]:
        """Take the gradients of the microbatch. Return also the keys of earlier ones that were reduced with them."""
        held: dict[_Key, HeldGradient] = {}
        earlier: set[_Key] = set()
        for number, holder in enumerate(self.holders):
            grads, keys = holder.end_microbatch()
            held |= {(number, key): grad for key, grad in grads.items()}
            earlier |= {(number, key) for key in keys}
        return held, earlier

    def put(self, grads: _Grads) -> None:
        """Hold these gradients instead of any others."""
        for number, holder in enumerate(self.holders):
            holder.put_gradients({key: grads[n, key] for n, key in grads if n == number})

    def named(self, grads: Sequence[HeldGradient]) -> _Named:
        return [
            (self._names.get(id(param), "a parameter"), part) for grad in grads for param, part in grad.parts
        ]


@contextmanager
def run_microbatch(
    optimizer: torch.optim.Optimizer,
    accumulation: Accumulation,
    device_of: Callable[[], torch.device],
    groups: Sequence[dist.ProcessGroup | None],
    has_peers: bool,
) -> Generator[Microbatch]:
    """Context manager that adds the gradients of one microbatch to the accumulated ones if all ranks' are finite.

    Args:
        optimizer: owns the parameters.
        accumulation: gets the outcome.
        device_of: returns the device on which flags are combined.
        groups: groups over which ranks decide together, in turn.
        has_peers: whether they include the ranks that repeat plain parameters.
    """
    region = _Region(optimizer, has_peers)
    earlier = region.begin()
    begins_sum = accumulation.has_sum and not earlier
    if begins_sum:
        # The user has dropped the sum, and begins a new one.
        accumulation.outcomes.clear()
    accumulation.is_open = True
    try:
        yield region.microbatch
        with torch.no_grad():
            held, reduced_again = region.end()
            checks = _check(region.named(list(held.values())))
            is_skipped = region.microbatch.is_skipped
            outcome = _combine(checks, is_skipped, device_of(), groups, begins_sum=begins_sum)
            grads = {key: grad.tensor for key, grad in held.items()}
            _check_apart(earlier, grads)
            # A reduction has mixed this microbatch with earlier ones. If it was bad, they are reduced without it.
            must_reduce = bool(reduced_again) and bool(outcome.is_bad.item())
            if not must_reduce:
                sums = {key: grad for key, grad in earlier.items() if key not in reduced_again}
                earlier = _add(sums, held, outcome.is_bad)
    except BaseException:
        region.put(earlier)
        raise
    finally:
        accumulation.is_open = False
    region.put(earlier)
    for number, holder in enumerate(region.holders):
        if must_reduce and any(number == n for n, _ in reduced_again):
            holder.reduce_held()
    accumulation.outcomes.append(outcome)
    accumulation.has_sum = bool(earlier)


class _Check(NamedTuple):
    """Result of the check of one device's gradients."""

    found_inf: Tensor  # f32, 0-dim
    names: Sequence[str]  # empty on the CPU if all gradients are finite
    are_nonfinite: Tensor  # bool [len(names)]


def _check(grads: _Named) -> list[_Check]:
    """Check gradients in one pass, on the device that each is on. Sync: none. Collectives: none."""
    by_device: dict[torch.device, dict[torch.dtype, _Named]] = {}
    for name, grad in grads:
        values = values_of(grad)
        if values.numel():
            by_device.setdefault(values.device, {}).setdefault(values.dtype, []).append((name, values))
    return [_check_device(list(by_dtype.values())) for by_dtype in by_device.values()]


def _check_device(by_dtype: Sequence[_Named]) -> _Check:
    names = [name for batch in by_dtype for name, _ in batch]
    batches = [[values for _, values in batch] for batch in by_dtype]
    if not batches[0][0].is_cpu:
        maxima = [torch.stack(torch._foreach_norm(batch, math.inf)) for batch in batches]
        are_nonfinite = torch.cat([batch.isfinite().logical_not() for batch in maxima])
        return _Check(are_nonfinite.any().float(), names, are_nonfinite)
    values = [grad for batch in batches for grad in batch]
    _, found_inf = kernels.checked_norm(TensorList(values), math.inf)
    if not found_inf:
        return _Check(found_inf, (), torch.zeros(0, dtype=torch.bool, device="cpu"))
    return _Check(found_inf, names, kernels.nonfinite_counts(values) != 0)


def _combine(
    checks: Sequence[_Check],
    is_skipped: bool,
    device: torch.device,
    groups: Sequence[dist.ProcessGroup | None],
    *,
    begins_sum: bool,
) -> _Outcome:
    """Return the outcome for all ranks. Sync: none on one device. Collectives: one all-gather for each group."""
    flags = [to_device(check.found_inf, device) for check in checks]
    found_inf = torch.stack(flags).amax() if flags else torch.zeros((), device=device)
    share, begins = (torch.full((), float(flag), device=device) for flag in (not is_skipped, begins_sum))
    if groups:
        numbers = torch.stack([found_inf, share, begins, torch.ones((), device=device)])
        for group in groups:
            numbers = all_gather_numbers(numbers, group).sum(0)
        bad_ranks, participants, beginning_ranks, ranks = numbers.unbind()
        found_inf, share = (bad_ranks > 0).float(), participants / ranks
        begins = (beginning_ranks > 0).float()
    nonfinite = [(check.names, check.are_nonfinite) for check in checks]
    return _Outcome(torch.where(found_inf > 0, 0.0, share), found_inf, begins, is_skipped, nonfinite)


def _check_apart(sums: _Grads, grads: _Grads) -> None:
    """Raise if the backward has written its gradients to the memory of the accumulated ones."""
    for key in sums.keys() & grads.keys():
        sum_, grad = local_part(sums[key]), local_part(grads[key])
        if (
            sum_.layout is grad.layout is torch.strided
            and grad.numel()
            and sum_.data_ptr() == grad.data_ptr()
        ):
            raise RuntimeError(
                f"the gradient of shape {tuple(grad.shape)} was written to the memory of the accumulated one, which is "
                "lost; build DistributedDataParallel with gradient_as_bucket_view=False to use microbatch()"
            )


def _add(sums: _Grads, held: Mapping[_Key, HeldGradient], found_inf: Tensor) -> _Grads:
    """Return `sums`, changed in place where possible, with the gradients added if the 0-dim `found_inf` is 0.

    Sync: one for each sparse gradient on an accelerator. Collectives: those of `redistribute_like` for each sum and its
    gradient if their placements differ.
    """
    is_bad = kernels.flag_if_free_to_read(found_inf)
    if is_bad:
        return sums
    pairs: list[tuple[Tensor, Tensor]] = []
    result = dict(sums)
    for index, (grad, parts) in held.items():
        if local_part(grad).layout is not torch.strided or (
            index in sums and local_part(sums[index]).layout is not torch.strided
        ):
            if is_bad is False or not found_inf.item():
                result[index] = sums[index] + grad if index in sums else grad
        elif index not in sums and is_bad is False:
            result[index] = grad
        else:
            sum_ = sums[index] if index in sums else torch.zeros_like(grad)
            addend = grad
            if getattr(sum_, "placements", None) != getattr(grad, "placements", None):
                # Only gradients of no unit have placements of their own, and each is that of one parameter.
                [(param, _)] = parts
                sum_, addend = redistribute_like(sum_, param), redistribute_like(grad, param)
            result[index] = sum_
            pairs.append((local_part(sum_), local_part(addend)))
    if not pairs:
        return result
    if is_bad is False:
        torch._foreach_add_([sum_ for sum_, _ in pairs], [grad for _, grad in pairs])
    else:
        _add_on_device(pairs, found_inf)
    kernels.keep_for_current_stream(grad for _, grad in pairs)
    return result


def _add_on_device(pairs: Sequence[tuple[Tensor, Tensor]], found_inf: Tensor) -> None:
    """Add to the first tensor of each pair the second one, unless the flag on the device is set."""
    by_type: dict[tuple[torch.device, torch.dtype], list[tuple[Tensor, Tensor]]] = {}
    for sum_, grad in pairs:
        is_fused = (
            sum_.device.type in _get_fused_kernels_supported_devices()
            and sum_.dtype is grad.dtype
            and sum_.is_floating_point()
            and sum_.is_contiguous()
            and grad.is_contiguous()
        )
        if is_fused:
            by_type.setdefault((sum_.device, sum_.dtype), []).append((sum_, grad))
        else:
            sum_.copy_(torch.where(to_device(found_inf, sum_.device) > 0, sum_, sum_ + grad))
    for (device, _), batch in by_type.items():
        # A step of SGD with a rate of -1 adds the gradients. No other multi-tensor operator reads a flag.
        torch._fused_sgd_(
            [sum_ for sum_, _ in batch], [grad for _, grad in batch], [],
            weight_decay=0.0, momentum=0.0, lr=-1.0, dampening=0.0, nesterov=False, maximize=False,
            is_first_step=False, found_inf=to_device(found_inf, device),
        )  # fmt: skip
