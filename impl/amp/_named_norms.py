"""Norms of single parameters' gradients, weights and updates, by name of the parameter or of its module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from impl.amp._gradients import named_params
from impl.optim._param_norms import UpdateNorms, join_norms


def named_norms(
    optimizer: torch.optim.Optimizer,
    norms: Sequence[Tensor],
    norm_type: float,
    per: Literal["parameter", "module"],
) -> dict[str, Tensor]:
    """Return the norms by name of the parameter, or joined by name of the module that owns the parameters.

    Raises:
        ValueError: `per` is neither; or the parameters have no names, so that their modules are unknown; or two
            parameters have the same name; or the number of parameters differs.
    """
    if per not in ("parameter", "module"):
        raise ValueError(f"per is {per!r}; pass 'parameter' or 'module'")
    names = [name for name, _ in named_params(optimizer)]
    if len(names) != len(norms):
        raise ValueError(
            f"the last fused_step kept the norms of {len(norms)} parameters, and the optimizer has {len(names)} now; "
            "read them before its parameters change"
        )
    if len(set(names)) < len(names):
        name = next(name for name in names if names.count(name) > 1)
        raise ValueError(
            f"two parameters of the optimizer have the name {name}; create it from named_parameters() of one module "
            "that contains both"
        )
    if per == "parameter":
        return dict(zip(names, norms, strict=True))
    if not all(group.get("param_names") for group in optimizer.param_groups):
        raise ValueError(
            "the optimizer does not know the names of its parameters; create it from model.named_parameters(), or pass "
            "per='parameter'"
        )
    by_module: dict[str, list[Tensor]] = {}
    for name, norm in zip(names, norms, strict=True):
        by_module.setdefault(name.rpartition(".")[0], []).append(norm)
    return {module: join_norms(torch.stack(of_module), norm_type) for module, of_module in by_module.items()}


def named_ratios(
    optimizer: torch.optim.Optimizer, norms: UpdateNorms, per: Literal["parameter", "module"]
) -> dict[str, Tensor]:
    """Return the norm of each update divided by that of its weights, or 0 for weights that did not change.

    Raises:
        ValueError: as `named_norms`.
    """
    weights, changes = norms.unsharded
    if per == "module":
        # Sharded weights have a norm even if no rank has changed them. Leave those out, as without shards.
        pairs = zip(weights, changes, strict=True)
        weights = [torch.where(change == 0, change, weight) for weight, change in pairs]
    weight_of, change_of = (named_norms(optimizer, values, 2.0, per) for values in (weights, changes))
    return {
        name: torch.where(change == 0, change, change / weight_of[name]) for name, change in change_of.items()
    }
