"""Update of the loss scale after a step."""

import torch
from torch import Tensor


def update_scale_(  # noqa: PLR0913  six arguments of torch's operator, and the minimum
    scale: Tensor,
    growth_tracker: Tensor,
    found_inf: Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    min_scale: float | None,
) -> None:
    """Back the loss scale off after a non-finite step, grow it after enough finite ones, in place.

    Args:
        scale: f32, one element.
        growth_tracker: number of consecutive finite steps: i32, one element, on the same device.
        found_inf: f32, one element, on the same device. Not zero if the step was not finite.
        growth_factor: multiplies the scale after `growth_interval` finite steps, unless that overflows f32.
        backoff_factor: multiplies the scale after a step that was not finite.
        growth_interval: consecutive finite steps before the scale grows.
        min_scale: lower bound of the scale, or None if this update cannot reach it, which saves a launch.

    Sync: none. Collectives: none.
    Source: torch._amp_update_scale_; differences: the lower bound.
    """
    torch._amp_update_scale_(scale, growth_tracker, found_inf, growth_factor, backoff_factor, growth_interval)
    if min_scale is not None:
        scale.clamp_(min=min_scale)
