"""Gradient scaling over ranks with sharded gradients: either all ranks take a step, or none does.

`ShardedGradScaler` is the scaler of `impl.amp` with check results that are shared by all ranks. Whatever a rank's
gradients are, a check is one all-reduce of one number, so no rank waits for a collective that others do not issue.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import math
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from impl.amp._fused_step import combine_found_inf
from impl.amp._loss_scale import SMALLEST_SCALE
from impl.amp._opt_state import stage_of
from impl.amp.grad_scaler import GradScaler, OptState
from impl.kernels import to_device
from impl.optim._fused_updates import has_fused_update
from impl.optim._optimizers import optimizers_in, params_of
from impl.optim._shards import UNSHARDED, Norms, shardings_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

_Optimizer = torch.optim.Optimizer

# Check result of a rank. The largest one counts, and 0.0 means that all gradients are finite.
_NONFINITE = 1.0
_NOT_CHECKED = 2.0


class _NoGroup(enum.Enum):
    """Replacement for a process group that does not exist."""

    NOT_PICKLED = "groups are not kept when a scaler is pickled or copied"


class ShardedGradScaler(GradScaler):
    """A `GradScaler` that skips a step on every rank if any rank found inf or nan. Weights and scales stay equal.

    Use it like a `GradScaler` on all ranks of `process_group`. Each calls `unscale_` and `step` for the same optimizers
    in the same order. A rank whose gradients are empty, or that has none, takes part too. Float16 gradients are
    unscaled here, because a model sharded in float16 has no others.

    `found_inf` and `step_was_taken` hold for all ranks. `nonfinite_parameters` names parameters of all ranks, by one
    `all_gather_object` over `process_group`.

    If a check fails on one rank (in `unscale_` or `step`, by any exception but an interrupt), the rank reports it to
    its peers, then raises. Peers whose scale is on the CPU raise too. On an accelerator, where that would cost a
    synchronisation, they skip the step. Then clear the gradients on all ranks, because peers have unscaled theirs.
    Peers wait until the group's time-out if a rank omits a call, dies or is interrupted. Two optimizers that one rank
    checks in another order get each other's check result.

    Args:
        device: as for `GradScaler`. Check results are reduced on it, also those of gradients on the CPU.
        init_scale, backoff_factor, growth_factor, growth_interval, enabled, min_scale, error_if_stuck,
            max_skipped_steps: as for `GradScaler`; equal on all ranks.
        process_group: the ranks that decide together; None: the default group at the time of a check. Groups are not
            pickled or copied. The default group is used again; assign another one (`scaler.process_group = group`)
            before the next check.

    Raises:
        AssertionError, ValueError: as for `GradScaler`.
    Sync: as for `GradScaler`; a backend such as gloo waits for the peers in its collective.
    Collectives: one all-reduce of one f32 for each `unscale_`, and for each `step` without an `unscale_` before it;
        none if disabled. Those of `GradScaler` come first for DTensors with ranks outside the group.
    Source: torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler 2.13; differences: those of `GradScaler`, so
        the scale does not overflow; float16 and bfloat16 losses are scaled in float32; check results are reduced for
        optimizers that skip steps themselves too, in one all-reduce for all devices, and stay 1.0 if several ranks
        found inf; losses may be on any device; failed checks are reported to the peers; pickling with a group works.

    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> optimizer = torch.optim.Adam([weight], lr=0.5, fused=True)
    >>> scaler = ShardedGradScaler("cpu", init_scale=1024.0)
    >>> scaler.scale(weight.sum() * torch.inf).backward()
    >>> scaler.step(optimizer)
    >>> scaler.update()
    >>> weight.detach(), scaler.step_was_taken(optimizer), scaler.get_scale()
    (tensor([1., 1.]), False, 512.0)
    >>> dist.destroy_process_group()
    """

    process_group: ProcessGroup | Literal[_NoGroup.NOT_PICKLED] | None = None

    # Class attributes of `GradScaler`.
    _frames_above = 1
    _has_peers = True
    _unscales_fp16 = True
    # Reports of a failure, one for each collective in which peers still wait for this rank's check result.
    _reports: Sequence[Callable[[], None]] = ()

    def __init__(  # noqa: PLR0913  torch's seven arguments
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: ProcessGroup | None = None,
        *,
        min_scale: float = SMALLEST_SCALE,
        error_if_stuck: bool = False,
        max_skipped_steps: int | None = None,
    ) -> None:
        super().__init__(
            device,
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            enabled=enabled,
            min_scale=min_scale,
            error_if_stuck=error_if_stuck,
            max_skipped_steps=max_skipped_steps,
        )
        self.process_group = process_group

    def unscale_(self, optimizer: _Optimizer) -> None:
        """Divide this rank's gradients of `optimizer` by the scale, in place, and check the gradients of all ranks.

        Args:
            optimizer: its parameters may have no gradients. Uncoalesced sparse float16 gradients become coalesced.

        Raises:
            RuntimeError: as `GradScaler.unscale_`; or another rank's check failed; or the group was not pickled.
            AssertionError: there is no scale yet.
            ValueError: one gradient belongs to two parameters; no process group is up; this rank is not in it.
        Collectives: one all-reduce.
        Source: ShardedGradScaler.unscale_ 2.13; differences: the class's.
        """
        with self._reporting_failure(optimizer):
            super().unscale_(optimizer)

    def step(self, optimizer: _Optimizer, *args: object, **kwargs: object) -> float | None:
        """Call `optimizer.step(*args, **kwargs)` on unscaled gradients, unless some rank's hold inf or nan.

        An optimizer whose `_step_supports_amp_scaling` is true is always called, and gets `found_inf` of all ranks.

        Args:
            optimizer: its parameters may have no gradients.
            args, kwargs: for `optimizer.step`.

        Returns:
            The result of `optimizer.step`; None for a skipped step.

        Raises:
            RuntimeError: as `GradScaler.step`; or another rank's check failed; or the group was not pickled.
            AssertionError: there is no scale yet.
            ValueError: as `unscale_`.
        Sync: one; none if the optimizer skips steps itself.
        Collectives: one all-reduce, unless `unscale_` was called.
        Source: GradScaler.step 2.13; differences: theirs; and without gradients the step is taken, as with torch's
            ShardedGradScaler.
        """
        with self._reporting_failure(optimizer):
            return super().step(optimizer, *args, **kwargs)

    def fused_step(  # noqa: PLR0913  settings of four calls
        self,
        optimizer: _Optimizer | Sequence[_Optimizer],
        max_norm: float = math.inf,
        norm_type: float = 2.0,
        *,
        low_precision_params: Iterable[Tensor] = (),
        update: bool = True,
        keep_norms: bool = False,
        keep_update_norms: bool = False,
    ) -> Tensor:
        """Unscale and clip the gradients of all ranks, step and update, with the same decision on all ranks.

        Args:
            optimizer: has the same parameters on every rank, unsharded or sharded, which may have no gradients. Or
                several optimizers, in the same order on every rank.
            max_norm, norm_type, low_precision_params, update, keep_norms, keep_update_norms: as for
                `GradScaler.fused_step`. `keep_norms` is the same on all ranks.

        Returns:
            The norm of all ranks' gradients, each element counted once; as `GradScaler.fused_step`.

        Raises:
            TypeError: `optimizer` has no `param_groups`; peers with an optimizer wait.
            RuntimeError: as `GradScaler.fused_step`; or another rank's check failed; or the group was not pickled; or a
                parameter is sharded over ranks outside the group; or this rank's gradients allow no fused
                update of an optimizer that has one.
            AssertionError: there is no scale yet.
            ValueError: as `GradScaler.fused_step`; no process group is up; this rank is not in it.
        Sync: as `GradScaler.fused_step`.
        Collectives: one all-gather of a few numbers per rank. One more for each process group of parameters that are
            sharded over several groups. The all-reduce of `unscale_` comes first, for a single optimizer without a
            fused update. With `keep_norms` there is a number for each parameter.
        """
        with self._reporting_failure(*optimizers_in(optimizer), takes_norm=True, keeps_norms=keep_norms):
            return super().fused_step(
                optimizer,
                max_norm,
                norm_type,
                low_precision_params=low_precision_params,
                update=update,
                keep_norms=keep_norms,
                keep_update_norms=keep_update_norms,
            )

    def _agree(
        self, norms: Norms, found_inf_per_device: dict[torch.device, Tensor]
    ) -> tuple[Tensor, dict[torch.device, Tensor]]:
        """Return the norm and the check result of all ranks."""
        if not self._enabled and not norms.are_sharded:
            return norms.replicated, found_inf_per_device
        self._reports = self._reports[1:]
        device = norms.replicated.device
        norms, check_result = norms.gathered(self._group, combine_found_inf(found_inf_per_device, device))
        # On the CPU this raises if a rank's check failed. Such a rank takes part in the first all-gather only.
        found_inf = self._checked_result(check_result.float())
        norm, _ = norms.joint()
        return norm, found_inf

    def _norm_device(self, params: Sequence[Tensor]) -> torch.device:
        return self._collective_device() if self._enabled else super()._norm_device(params)

    def _reporting_groups(self, params: Sequence[Tensor]) -> list[ProcessGroup | None]:
        if not self._enabled:
            return super()._reporting_groups(params)
        self._check_group()
        return [self._group]

    def _reduce_found_inf(
        self, found_inf_per_device: dict[torch.device, Tensor]
    ) -> dict[torch.device, Tensor]:
        """Return one check result for all ranks and devices: f32, 0-dim, 0.0 or 1.0.

        Fused optimizers skip only at 1.0.
        """
        device = self._collective_device()
        flags = [to_device(flag, device).reshape(()) for flag in found_inf_per_device.values()]
        check_result = torch.stack(flags).any().float() if flags else torch.zeros((), device=device)
        self._reports = self._reports[1:]
        dist.all_reduce(check_result, op=dist.ReduceOp.MAX, group=self.process_group)
        return self._checked_result(check_result)

    def _combines_ranks_of(self, mesh: DeviceMesh) -> bool:
        try:
            ranks = dist.get_process_group_ranks(self._group)
        except KeyError:
            return False  # a group that torch does not know
        return {*mesh.mesh.flatten().tolist()} <= {*ranks}

    def _checked_result(self, check_result: Tensor) -> dict[torch.device, Tensor]:
        """Return the check result. Raise if a rank reports that its check failed."""
        if check_result.is_cpu and check_result.item() == _NOT_CHECKED:
            self._reports = ()  # all ranks raise
            raise RuntimeError(
                "another rank of the process group failed to check its gradients, and raises the reason; this rank has "
                "checked, and may have unscaled, its own: clear them on all ranks before the next backward"
            )
        return {check_result.device: check_result.clamp(max=_NONFINITE)}

    def __getstate__(self) -> dict[str, Any]:
        default = self.process_group is None or self.process_group is dist.group.WORLD
        return super().__getstate__() | {"process_group": None if default else _NoGroup.NOT_PICKLED}

    @property
    def _group(self) -> ProcessGroup | None:
        group = self.process_group
        assert not isinstance(group, _NoGroup)  # checked on entry
        return group

    def _collective_device(self) -> torch.device:
        """Return the device for collectives. Its type is the same on all ranks, wherever gradients and losses are."""
        scale = self._scale
        if scale is not None and scale.device.type == self._device:
            return scale.device
        return torch.device(self._device)

    @contextlib.contextmanager
    def _reporting_failure(
        self, *optimizers: _Optimizer, takes_norm: bool = False, keeps_norms: bool = False
    ) -> Generator[None]:
        if not self._enabled or self._reports:
            # A failed `unscale_` inside of `fused_step` is reported by the latter.
            yield
            return
        self._check_group()
        stages = {stage_of(self._per_optimizer_states, optimizer) for optimizer in optimizers}
        is_fused = takes_norm and (len(optimizers) != 1 or has_fused_update(optimizers[0]))
        if OptState.READY in stages and not is_fused:
            self._reports = [self._report_in_check]
        try:
            are_combined = is_fused or (takes_norm and shardings_of(params_of(*optimizers)))
            if are_combined and stages - {OptState.STEPPED}:
                report_in_norm = functools.partial(self._report_in_norm, optimizers, keeps_norms)
                self._reports = [*self._reports, report_in_norm]
            yield
        except Exception:
            for report in self._reports:
                report()
                if self._collective_device().type == "cpu":
                    break  # peers have raised
            raise
        finally:
            self._reports = ()

    def _report_in_check(self) -> None:
        check_result = torch.full((), _NOT_CHECKED, device=self._collective_device())
        dist.all_reduce(check_result, op=dist.ReduceOp.MAX, group=self.process_group)

    def _report_in_norm(self, optimizers: Sequence[_Optimizer], keeps_norms: bool) -> None:
        device = self._collective_device()
        check_result = torch.full((), _NOT_CHECKED, device=device)
        params = params_of(*optimizers)
        shardings = shardings_of(params)
        shape = (len(params),) if keeps_norms and shardings else ()
        zero = torch.zeros(shape, dtype=torch.float64, device=device)
        norms, _ = Norms(2.0, dict.fromkeys([UNSHARDED, *shardings], zero)).gathered(
            self._group, check_result
        )
        if not check_result.is_cpu:
            # Peers do not read the report on an accelerator, and continue.
            norms.joint()

    def _check_group(self) -> None:
        if self.process_group is _NoGroup.NOT_PICKLED:
            raise RuntimeError(
                f"this ShardedGradScaler has no process group: {_NoGroup.NOT_PICKLED.value}; assign the one that "
                "decides with it: scaler.process_group = group"
            )
        if self.process_group is None:
            dist.get_rank(None)  # raises without a default group
        non_member: Any = dist.GroupMember.NON_GROUP_MEMBER
        if self.process_group is non_member:
            raise ValueError(
                f"rank {dist.get_rank()} is not in the process_group of this ShardedGradScaler; pass each rank the "
                "group that it belongs to"
            )
