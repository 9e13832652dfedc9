"""Gradient clipping by norm and by value, in place, without reading a tensor on the host.

`_clip_routes.py` has the routes that gradients take: kernels, local shards or torch's operators.
"""

from __future__ import annotations

import math
import types
import warnings
from collections.abc import Iterable

from torch import Tensor

from impl.kernels import no_grad_fast
from impl.nn.utils._clip_routes import Route, route_for
from impl.optim._shards import gradients_of

__all__ = ["clip_grad_norm", "clip_grad_norm_", "clip_grad_value_"]


@no_grad_fast
def get_total_norm(
    tensors: Tensor | Iterable[Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Return the norm of all `tensors`, as if concatenated into one vector.

    Args:
        tensors: floating-point or complex tensors of any shape, dtype and device. None is not allowed.
        norm_type: any float, or `"inf"`. 0 counts the tensors that hold a non-zero element, like torch.
        error_if_nonfinite: raise instead of returning nan or inf.
        foreach: True raises if torch has no foreach operators for the device; otherwise only a hint.

    Returns:
        0-dim norm on the first tensor's device. Its dtype is the promotion of the tensors' dtypes, but float32 for
        float16. `tensor(0.)` if there are no tensors, and a replicated DTensor if all are DTensors on one mesh.

    Raises:
        RuntimeError: the norm is nan or inf and `error_if_nonfinite` is set.
    Sync: none, unless `error_if_nonfinite`. Collectives: for DTensors, one all-gather of a few numbers for each sharded
        dimension of each mesh, and one over the default group if some ranks are not in one of several meshes. Norms of
        order 0 or less and partial DTensors take the collectives of DTensor's operators.
    Source: torch.nn.utils.get_total_norm 2.13; differences: the two-norm of finite tensors does not overflow or
        underflow in intermediate squares, and float16 tensors give a float32 norm. DTensors may be on several meshes or
        among plain tensors, which count as equal on all ranks (torch raises). The infinity norm of DTensors is
        replicated (torch returns an unreduced one), also if a rank's shard is empty (torch hangs).

    >>> import torch
    >>> get_total_norm([torch.tensor([3e20]), torch.tensor([4e20])])
    tensor(5.0000e+20)
    """
    listed = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    return _total_norm(route_for(listed, foreach), float(norm_type), error_if_nonfinite)


@no_grad_fast
def clip_grads_with_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    total_norm: Tensor,
    foreach: bool | None = None,
) -> None:
    """Scale gradients in place by `max_norm / (total_norm + 1e-6)` if that is below 1.

    Args:
        parameters: tensors of any shape. Those with `grad is None` are skipped, except unsharded parameters of
            `fully_shard`. The gradients of the corresponding sharded parameters are used.
        max_norm: same unit as `total_norm`. A negative value reverses the gradients, like torch.
        total_norm: 0-dim norm, on any device.
        foreach: as in `get_total_norm`.

    Raises:
        ValueError: `max_norm` is nan or -inf.
        RuntimeError: elements of a gradient share memory.
    Sync: none if `total_norm` is on the gradients' device. Collectives: none, unless `total_norm` is a DTensor that is
        not replicated, like torch's infinity norm.
    Source: torch.nn.utils.clip_grads_with_norm_ 2.13; differences: the ValueError (torch overwrites every gradient
        with nan); if one gradient raises, no plain gradient is changed; and gradients of unsharded parameters.

    >>> import torch
    >>> weight = torch.zeros(2, requires_grad=True)
    >>> weight.grad = torch.tensor([3.0, 4.0])
    >>> clip_grads_with_norm_(weight, 1.0, torch.tensor(5.0))
    >>> weight.grad
    tensor([0.6000, 0.8000])
    """
    _scale_(route_for(_gradients_of(parameters), foreach), float(max_norm), total_norm)


@no_grad_fast
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale gradients in place so that their joint norm is at most `max_norm`.

    Args:
        parameters: tensors of any shape. Those with `grad is None` are skipped, except unsharded parameters of
            `fully_shard`. The gradients of the corresponding sharded parameters are used. A parameter listed twice
            counts twice and is scaled twice, like torch.
        max_norm: same unit as the gradients. A negative value reverses the gradients, like torch.
        norm_type: as in `get_total_norm`.
        error_if_nonfinite: raise, before anything is changed, if the norm is nan or inf. Otherwise such a norm scales
            the gradients by nan or 0.
        foreach: as in `get_total_norm`.

    Returns:
        0-dim norm before clipping, as in `get_total_norm`. `f"{norm:.3f}"` works for DTensors too (torch raises).

    Raises:
        RuntimeError: the norm is nan or inf and `error_if_nonfinite` is set; or elements of a gradient share memory.
        ValueError: `max_norm` is nan or -inf, or `norm_type` is nan, and there are gradients.
    Sync: none, unless `error_if_nonfinite`. Collectives: as `get_total_norm`.
    Source: torch.nn.utils.clip_grad_norm_ 2.13; differences: those of `get_total_norm` (finite float32 gradients of
        1e20 are clipped, while torch sets all of them to 0) and of `clip_grads_with_norm_`.

    >>> import torch
    >>> weight = torch.zeros(2, requires_grad=True)
    >>> weight.grad = torch.tensor([3.0, 4.0])
    >>> clip_grad_norm_([weight], max_norm=1.0)
    tensor(5.)
    >>> weight.grad
    tensor([0.6000, 0.8000])
    """
    if not isinstance(parameters, Tensor):
        is_generator = isinstance(parameters, types.GeneratorType)
        parameters = list(parameters)
        if is_generator and not parameters:
            # There are two frames up to the caller: this one and that of `no_grad_fast`.
            warnings.warn(
                "`parameters` is an empty generator, no gradient clipping will occur.", stacklevel=3
            )
    route = route_for(_gradients_of(parameters), foreach)
    norm_type = float(norm_type)
    total_norm = _total_norm(route, norm_type, error_if_nonfinite)
    max_norm = float(max_norm)
    if math.isnan(norm_type) and route.tensors:
        raise ValueError(
            "norm_type is nan, which would overwrite every gradient with nan; pass a number or inf"
        )
    _scale_(route, max_norm, total_norm)
    return total_norm


def clip_grad_norm(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Call `clip_grad_norm_` with a FutureWarning. This spelling is deprecated.

    Sync, collectives, returns, raises: as `clip_grad_norm_`.
    Source: torch.nn.utils.clip_grad_norm 2.13; differences: those of `clip_grad_norm_`.
    """
    warnings.warn(
        "`torch.nn.utils.clip_grad_norm` is now deprecated in favor of `torch.nn.utils.clip_grad_norm_`.",
        FutureWarning,
        stacklevel=2,
    )
    return clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, foreach)


@no_grad_fast
def clip_grad_value_(
    parameters: Tensor | Iterable[Tensor],
    clip_value: float,
    foreach: bool | None = None,
) -> None:
    """Clamp every element of every gradient to [-clip_value, clip_value] in place. NaN stays NaN.

    Args:
        parameters: tensors of any shape. Those with `grad is None` are skipped, except unsharded parameters of
            `fully_shard`. The gradients of the corresponding sharded parameters are used.
        clip_value: not negative.
        foreach: as in `get_total_norm`.

    Raises:
        RuntimeError: there are no gradients, or a gradient's dtype cannot hold `clip_value`, as in torch; or elements
            of a gradient share memory.
        ValueError: `clip_value` is nan or negative.
    Sync: none. Collectives: none.
    Source: torch.nn.utils.clip_grad_value_ 2.13; differences: the ValueError (torch overwrites every gradient, with
        nan or with the negative value); if one gradient raises, no plain gradient is changed; and gradients of
        unsharded parameters.

    >>> import torch
    >>> weight = torch.zeros(2, requires_grad=True)
    >>> weight.grad = torch.tensor([-3.0, 0.25])
    >>> clip_grad_value_(weight, 0.5)
    >>> weight.grad
    tensor([-0.5000,  0.2500])
    """
    high = float(clip_value)
    route = route_for(_gradients_of(parameters), foreach)
    if not high >= 0.0:
        raise ValueError(
            f"clip_value is {high}, which would overwrite every gradient; pass a number not below 0"
        )
    route.clamp_(high)


def _gradients_of(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    return gradients_of([parameters] if isinstance(parameters, Tensor) else list(parameters))


def _total_norm(route: Route, norm_type: float, error_if_nonfinite: bool) -> Tensor:
    total_norm = route.total_norm(norm_type)
    if error_if_nonfinite:
        check_finite(total_norm, norm_type)
    return total_norm


def check_finite(total_norm: Tensor, norm_type: float) -> None:
    """Raise torch's error if the norm is inf or nan. Sync: one."""
    if not total_norm.isfinite():
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be "
            "clipped. To disable this error and scale the gradients by the non-finite norm anyway, "
            "set `error_if_nonfinite=False`"
        )


def _scale_(route: Route, max_norm: float, total_norm: Tensor) -> None:
    if not route.tensors:
        return
    if not max_norm > -math.inf:
        raise ValueError(
            f"max_norm is {max_norm}, which would overwrite every gradient; pass a number or inf"
        )
    route.scale_(max_norm, total_norm)
