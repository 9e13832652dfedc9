"""Updates of a bucket by one call of torch's fused operator, for each optimizer that has a rule.

Like torch's own functions, they read all numbers before they advance the step counters, so that a missing number
changes nothing.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from impl.kernels import PLAIN_TYPES, RULES, Rule, to_device
from impl.optim._list_cache import Bucket
from impl.optim._shards import local_parts


def rule_for(optimizer: Optimizer, group: dict[str, Any], lists: list[list[Any]]) -> type[Rule] | None:
    """Return the rule whose fused operator updates this group, or None if torch's own function must do it.

    Args:
        lists: the lists that `_init_group` filled, or the local tensors of DTensors in them.
    """
    # torch's own function raises if `foreach` is set too, and moves a learning rate that is a tensor to each device.
    if not group.get("fused") or group["foreach"] or _has_tensor_hyperparameters(group):
        return None
    if not all(map(_is_plain, chain.from_iterable(lists))):
        return None
    matching = next((rule for rule in RULES if isinstance(optimizer, rule.OPTIMIZERS)), None)
    if matching is not None and lists[0]:
        # torch groups tensors before it updates any. The call raises if they do not match.
        Optimizer._group_tensors_by_device_and_dtype(lists)
    return matching


def step_bucket(  # noqa: PLR0913  a bucket, its update, and the numbers of a step
    rule: type[Rule],
    bucket: Bucket,
    group: dict[str, Any],
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    is_sharded: bool = False,
) -> None:
    """Advance the counters and update, unless `found_inf` is 1. If the bucket is sharded, update local tensors."""
    keywords = rule.settings_of(group)
    keywords["grad_scale"] = None if grad_scale is None else to_device(grad_scale, bucket.device)
    keywords["found_inf"] = None if found_inf is None else to_device(found_inf, bucket.device)
    bucket.counters.advance()
    params, grads, *states = (bucket.params, bucket.grads, *map(bucket.__getitem__, rule.STATES))
    if is_sharded:
        params, grads, *states = map(local_parts, (params, grads, *states))
    rule.operator(params, grads, states, bucket.counters.steps, keywords)
    if keywords["found_inf"] is not None:
        bucket.counters.undo_advance(keywords["found_inf"])


def _is_plain(tensor: Any) -> bool:
    # Subclasses may override an operator, a buffer that does not exist yet is None, and a loaded counter may be a
    # number.
    return type(tensor) in PLAIN_TYPES and tensor.layout is torch.strided and not tensor.is_complex()


def _has_tensor_hyperparameters(group: dict[str, Any]) -> bool:
    return any(_contains_tensor(value) for name, value in group.items() if name != "params")


def _contains_tensor(value: object) -> bool:
    return isinstance(value, Tensor) or (
        isinstance(value, (tuple, list)) and any(map(_contains_tensor, value))
    )
