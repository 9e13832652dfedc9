"""One call of torch's fused operator for a bucket, of each optimizer that has one.

As in torch's own functions, all numbers are read before the step counters are advanced: where one is missing, nothing
has changed.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, Optimizer

from impl.kernels import PLAIN_TYPES, placed
from impl.optim._list_cache import Bucket, GroupLists

Update = Callable[[Bucket, dict[str, Any], Tensor | None, Tensor | None], None]


def _adam(bucket: Bucket, group: dict[str, Any], grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
    operator = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
    beta1, beta2 = group["betas"]
    lr, eps, weight_decay = group["lr"], group["eps"], group["weight_decay"]
    amsgrad, maximize = group["amsgrad"], group["maximize"]
    bucket.counters.advance()
    operator(
        bucket.params,
        bucket.grads,
        bucket["exp_avgs"],
        bucket["exp_avg_sqs"],
        bucket["max_exp_avg_sqs"],
        bucket["state_steps"],
        amsgrad=amsgrad,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        eps=eps,
        maximize=maximize,
        grad_scale=grad_scale,
        found_inf=found_inf,
    )


def _sgd(bucket: Bucket, group: dict[str, Any], grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
    torch._fused_sgd_(
        bucket.params,
        bucket.grads,
        bucket["momentum_buffer_list"],
        weight_decay=group["weight_decay"],
        momentum=group["momentum"],
        lr=group["lr"],
        dampening=group["dampening"],
        nesterov=group["nesterov"],
        maximize=group["maximize"],
        is_first_step=False,
        grad_scale=grad_scale,
        found_inf=found_inf,
    )


def _adagrad(
    bucket: Bucket, group: dict[str, Any], grad_scale: Tensor | None, found_inf: Tensor | None
) -> None:
    lr, lr_decay, eps = group["lr"], group["lr_decay"], group["eps"]
    weight_decay, maximize = group["weight_decay"], group["maximize"]
    bucket.counters.advance()
    torch._fused_adagrad_(
        bucket.params,
        bucket.grads,
        bucket["state_sums"],
        bucket["state_steps"],
        lr=lr,
        lr_decay=lr_decay,
        weight_decay=weight_decay,
        eps=eps,
        maximize=maximize,
        grad_scale=grad_scale,
        found_inf=found_inf,
    )


_UPDATES: dict[type[Optimizer], Update] = {Adam: _adam, SGD: _sgd, Adagrad: _adagrad}


def update_for(optimizer: Optimizer, group_lists: GroupLists) -> Update | None:
    """What updates a bucket of this group by the fused operator; None where torch's own function has to do it."""
    group = group_lists.group
    if not group.get("fused") or group["foreach"] or _has_tensors_for_numbers(group):
        return None
    tensors = chain.from_iterable(group_lists.lists)
    if not all(map(_is_plain, tensors)):
        return None
    update = next((update for kind, update in _UPDATES.items() if isinstance(optimizer, kind)), None)
    if update is not None and group_lists.params:
        # For what it raises: torch groups before it updates anything.
        Optimizer._group_tensors_by_device_and_dtype(group_lists.lists)
    return update


def step_bucket(
    update: Update,
    bucket: Bucket,
    group: dict[str, Any],
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    """Advance the counters and update, unless `found_inf` is 1."""
    found_there = _at(found_inf, bucket.device)
    update(bucket, group, _at(grad_scale, bucket.device), found_there)
    if found_there is not None:
        bucket.counters.take_back(found_there)


def _at(value: Tensor | None, device: torch.device) -> Tensor | None:
    return None if value is None else placed(value, device)


def _is_plain(tensor: Any) -> bool:
    # Others may do something else in an operator's place, a buffer that is not there yet is None, and a counter that
    # was loaded may be a number.
    return type(tensor) in PLAIN_TYPES and tensor.layout is torch.strided and not tensor.is_complex()


def _has_tensors_for_numbers(group: dict[str, Any]) -> bool:
    return any(_is_on_device(value) for name, value in group.items() if name != "params")


def _is_on_device(value: Any) -> bool:
    """A hyperparameter that is a tensor, or a pair of them."""
    return isinstance(value, Tensor) or (isinstance(value, (tuple, list)) and any(map(_is_on_device, value)))
