"""Questions to a gradient scaler after a step: what it did, why, and to which parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from impl.amp import _gradients
from impl.amp._explanation import FusedStepExplanation, explanation_of
from impl.amp._gradients import NonfiniteGradient
from impl.amp._microbatch import SkippedMicrobatch
from impl.amp._named_norms import named_norms, named_ratios
from impl.amp._opt_state import KeptResults
from impl.kernels import to_device
from impl.optim._optimizers import check_has_param_groups, params_of

_Optimizer = torch.optim.Optimizer


class StepReports:
    """Methods of a `GradScaler` that read the results of steps and change nothing."""

    _enabled: bool
    _check_results: KeptResults

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def _reporting_groups(self, params: Sequence[Tensor]) -> list[dist.ProcessGroup | None]:
        raise NotImplementedError

    def found_inf(self, optimizer: _Optimizer) -> Tensor:
        """Return whether the last check of `optimizer`, by `unscale_` or `step`, found inf or nan.

        Returns:
            f32, 0-dim, on the scale's device: 1.0 for inf or nan, else 0.0. A disabled scaler returns 0.0.
        Raises:
            RuntimeError: this scaler has not checked the optimizer yet.
        Sync: none, so that metrics and captured graphs can use it.
        """
        if not self._enabled:
            params = params_of(optimizer)
            return torch.zeros((), device=next((param.device for param in params), None))
        found_inf_per_device = self._check_results.of(optimizer).last_check()
        scale, _ = self._check_scale_growth_tracker("found_inf")
        flags = [to_device(flag, scale.device) for flag in found_inf_per_device.values()]
        return torch.stack([torch.zeros_like(scale), *flags]).amax()

    def step_was_taken(self, optimizer: _Optimizer) -> bool:
        """Return whether the last `step` of `optimizer` was taken rather than skipped. Valid after `update`, too.

        The result is that of the check, even if a subclass's `_maybe_opt_step` decides otherwise. A disabled scaler
        returns True.

        Raises:
            RuntimeError: the optimizer has not stepped yet, or its step checked no gradients.
        Sync: one, or none if `step` has synchronised already.
        """
        return self._check_results.of(optimizer).step_was_taken() if self._enabled else True

    def explain(self, optimizer: _Optimizer) -> FusedStepExplanation:
        """Return which backend has updated each parameter in the last `fused_step`, and the reason for a slower one.

        `print` shows one line for each reason. Steps that the host has skipped are ignored.

        Returns:
            `parameters`: name, backend and reason of each parameter of this rank, in the optimizer's order. `is_fused`:
            whether no parameter was left to `optimizer.step()`.
        Raises:
            TypeError: `optimizer` has no `param_groups`.
            RuntimeError: this scaler has taken no fused step of the optimizer yet.
        Sync: none. Collectives: none.

        >>> import impl.amp
        >>> layer = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.RMSprop(layer.named_parameters(), lr=0.5)
        >>> scaler = impl.amp.GradScaler("cpu")
        >>> scaler.scale(layer(torch.ones(2)).sum()).backward()
        >>> norm = scaler.fused_step(optimizer)
        >>> print(scaler.explain(optimizer))
        optimizer: weight, bias, because RMSprop has no fused update
        """
        check_has_param_groups(optimizer)
        served = self._check_results.of(optimizer).served
        if not served:
            raise RuntimeError(
                "this scaler has taken no fused step of this optimizer; call fused_step(optimizer) before "
                "explain(optimizer)"
            )
        return explanation_of(optimizer, served)

    def nonfinite_parameters(self, optimizer: _Optimizer) -> list[NonfiniteGradient]:
        """Return the parameters whose gradients hold inf or nan, with the rank and the number of such elements.

        Call it after `unscale_` or `step`, before the gradients are cleared or clipped. If parameters are sharded, call
        it on all their ranks, for example after `step_was_taken` returned False. It returns the same on each of them.

        Returns:
            One `name`, `rank` and number of `elements` for each parameter and rank with such elements, in the
            optimizer's order. Names are from `param_names` if the optimizer was made from `named_parameters()`, else
            group, index and shape. A plain `GradScaler` reports plain parameters for this process only.
        Raises:
            TypeError: `optimizer` has no `param_groups`.
            ValueError: the meshes of DTensors have different ranks, which are not all ranks of the default group.
            RuntimeError: the last check found inf or nan, but those gradients no longer exist; or another rank raised.
        Sync: one for each device, and another if no gradient on this rank holds inf or nan. The gradients are read
            again, so that training without this call costs nothing.
        Collectives: one `all_gather_object` for each process group that parameters are sharded or replicated over (FSDP
            and DTensors), or one over the default group if some ranks are not in a mesh. None for plain parameters.

        >>> import impl.amp
        >>> layer = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(layer.named_parameters(), lr=0.5)
        >>> scaler = impl.amp.GradScaler("cpu")
        >>> scaler.scale(layer(torch.tensor([1.0, torch.inf])).sum()).backward()
        >>> scaler.unscale_(optimizer)
        >>> scaler.nonfinite_parameters(optimizer)
        [NonfiniteGradient(name='weight', rank=0, elements=1)]
        """
        check_has_param_groups(optimizer)
        check_results = self._check_results.of(optimizer)
        return _gradients.nonfinite_parameters(
            optimizer,
            check_results.low_precision_params,
            check_results.local_found_inf or {},
            self._reporting_groups(params_of(optimizer)),
        )

    def gradient_norms(
        self, optimizer: _Optimizer, per: Literal["parameter", "module"] = "parameter"
    ) -> dict[str, Tensor]:
        """Return the norm of each gradient of the last `fused_step`, which was called with `keep_norms=True`.

        Args:
            optimizer: its parameters without a gradient have the norm 0.
            per: "module" joins the norms of the parameters that one module owns. Its submodules have their own.
        Returns:
            0-dim float64 norms of the unscaled gradients before clipping, by name, on the device of the joint norm.
            They are of the order `norm_type`. If parameters are sharded, they are those of the unsharded model, the
            same on each rank. Parameters have the names of `nonfinite_parameters`, the root module has the name "".
        Raises:
            TypeError: `optimizer` has no `param_groups`.
            RuntimeError: the last `fused_step` did not keep its norms, or there was none.
            ValueError: `per` is neither; or "module", and the optimizer was not made from `named_parameters()`; or two
                parameters have the same name; or parameters were added since the `fused_step`.
        Sync: none. Collectives: none.

        >>> import impl.amp
        >>> layer = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(layer.named_parameters(), lr=0.5)
        >>> scaler = impl.amp.GradScaler("cpu")
        >>> scaler.scale(layer(torch.tensor([3.0, 4.0])).sum()).backward()
        >>> norm = scaler.fused_step(optimizer, keep_norms=True)
        >>> scaler.gradient_norms(optimizer)
        {'weight': tensor(5., dtype=torch.float64), 'bias': tensor(1., dtype=torch.float64)}
        """
        check_has_param_groups(optimizer)
        check_results = self._check_results.of(optimizer)
        if check_results.norms is None:
            raise RuntimeError(
                "the last step of this optimizer kept no norms; call fused_step(optimizer, keep_norms=True) before "
                "gradient_norms(optimizer)"
            )
        return named_norms(optimizer, check_results.norms, check_results.norm_type, per)

    def update_ratios(
        self, optimizer: _Optimizer, per: Literal["parameter", "module"] = "parameter"
    ) -> dict[str, Tensor]:
        """Return the L2 norm of each update of the last `fused_step`, divided by that of the weights before it.

        The step was called with `keep_update_norms=True`. If parameters are sharded, call this on all their ranks.

        Args:
            optimizer: its parameters without a gradient have the ratio 0.
            per: "module" joins the parameters that one module owns and the step has changed.
        Returns:
            0-dim float64 ratios by name, like `gradient_norms`, and those of the unsharded model if parameters are
            sharded. 0 if nothing has changed, as in a skipped step. inf if the weights were all zeros.
        Raises:
            TypeError: `optimizer` has no `param_groups`.
            RuntimeError: the last `fused_step` did not keep these norms, or there was none.
            ValueError: as `gradient_norms`.
        Sync: none.
        Collectives: none for plain parameters. For sharded ones an all-gather for each process group, once a step.

        >>> import impl.amp
        >>> layer = torch.nn.Linear(2, 1)
        >>> with torch.no_grad():
        ...     _ = layer.weight.copy_(torch.tensor([[3.0, 4.0]])), layer.bias.fill_(2.0)
        >>> optimizer = torch.optim.SGD(layer.named_parameters(), lr=0.5)
        >>> scaler = impl.amp.GradScaler("cpu")
        >>> scaler.scale(layer(torch.tensor([3.0, 4.0])).sum()).backward()
        >>> norm = scaler.fused_step(optimizer, keep_update_norms=True)
        >>> scaler.update_ratios(optimizer)
        {'weight': tensor(0.5000, dtype=torch.float64), 'bias': tensor(0.2500, dtype=torch.float64)}
        """
        check_has_param_groups(optimizer)
        norms = self._check_results.of(optimizer).update_norms
        if norms is None:
            raise RuntimeError(
                "the last step of this optimizer kept no norms of updates; call fused_step(optimizer, "
                "keep_update_norms=True) before update_ratios(optimizer)"
            )
        return named_ratios(optimizer, norms, per)

    def skipped_microbatches(self, optimizer: _Optimizer) -> list[SkippedMicrobatch]:
        """Return the microbatches of the last step that were left out, with the ranks and parameters at fault.

        The next `microbatch` after `update` begins a new list. Call it on all ranks that decide together.

        Returns:
            One `position`, `rank` and tuple of `names` for each microbatch and rank that had inf or nan, or that called
            `skip()`, which has no names. Names are those of `nonfinite_parameters`. A disabled scaler returns none.
        Raises:
            RuntimeError: this scaler has run no `microbatch` of the optimizer, or keeps no record because the optimizer
                takes no weak references.
        Sync: one for each microbatch.
        Collectives: those of `nonfinite_parameters`.

        >>> import impl.amp
        >>> layer = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(layer.named_parameters(), lr=0.5)
        >>> scaler = impl.amp.GradScaler("cpu")
        >>> for value in (1.0, torch.inf):
        ...     with scaler.microbatch(optimizer):
        ...         scaler.scale(layer(torch.tensor([1.0, value])).sum()).backward()
        >>> print(*scaler.skipped_microbatches(optimizer))
        microbatch 1: inf or nan in weight on rank 0
        """
        if not self._enabled:
            return []
        accumulation = self._check_results.of(optimizer).accumulation
        if accumulation is None:
            raise RuntimeError(
                "this scaler has run no microbatch of this optimizer; call skipped_microbatches(optimizer) after "
                "microbatch(optimizer)"
            )
        return accumulation.skipped(self._reporting_groups(params_of(optimizer)))
