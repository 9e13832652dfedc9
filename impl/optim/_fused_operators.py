"""One call of torch's fused operator for a bucket, of each optimizer that has a rule.

As in torch's own functions, all numbers are read before the step counters are advanced: where one is missing, nothing
has changed.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from impl.kernels import PLAIN_TYPES, RULES, Rule, placed
from impl.optim._list_cache import Bucket, GroupLists


def rule_for(optimizer: Optimizer, group_lists: GroupLists) -> type[Rule] | None:
    """What updates a bucket of this group by the fused operator; None where torch's own function has to do it."""
    group = group_lists.group
    if not group.get("fused") or group["foreach"] or _has_tensors_for_numbers(group):
        return None
    tensors = chain.from_iterable(group_lists.lists)
    if not all(map(_is_plain, tensors)):
        return None
    found = next((rule for rule in RULES if isinstance(optimizer, rule.OPTIMIZERS)), None)
    if found is not None and group_lists.params:
        # For what it raises: torch groups before it updates anything.
        Optimizer._group_tensors_by_device_and_dtype(group_lists.lists)
    return found


def step_bucket(
    rule: type[Rule],
    bucket: Bucket,
    group: dict[str, Any],
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    """Advance the counters and update, unless `found_inf` is 1."""
    more = rule.settings_of(group)
    more["grad_scale"] = None if grad_scale is None else placed(grad_scale, bucket.device)
    more["found_inf"] = None if found_inf is None else placed(found_inf, bucket.device)
    bucket.counters.advance()
    states = [*map(bucket.__getitem__, rule.STATES)]
    rule.operator(bucket.params, bucket.grads, states, bucket.counters.steps, more)
    if more["found_inf"] is not None:
        bucket.counters.take_back(more["found_inf"])


def _is_plain(tensor: Any) -> bool:
    # Others may do something else in an operator's place, a buffer that is not there yet is None, and a counter that
    # was loaded may be a number.
    return type(tensor) in PLAIN_TYPES and tensor.layout is torch.strided and not tensor.is_complex()


def _has_tensors_for_numbers(group: dict[str, Any]) -> bool:
    return any(_is_on_device(value) for name, value in group.items() if name != "params")


def _is_on_device(value: Any) -> bool:
    """A hyperparameter that is a tensor, or a pair of them."""
    return isinstance(value, Tensor) or (isinstance(value, (tuple, list)) and any(map(_is_on_device, value)))
