"""Faults in what clients read of units, and set on them, by names that are private in torch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from conformance.faults.fault import register_fault, subclass
from conformance.faults.handmade.distributed_fsdp import FSDP, broken


@register_fault(
    "fully_sharded.all_have_params",
    FSDP,
    says="units without parameters say that they have some",
    on_ranks=True,
)
def all_have_params(original: type) -> type:
    return subclass(original, {"_has_params": property(lambda _: True)})


@register_fault(
    "fully_sharded.dtype_of_the_handle_unheeded",
    FSDP,
    says="the dtype that is set on a unit's handle goes nowhere",
    on_ranks=True,
)
def dtype_of_the_handle_unheeded(original: type) -> type:
    stand_in = property(lambda _: SimpleNamespace(_orig_param_dtype=torch.float32), lambda *_: None)
    return subclass(original, {"_handle": stand_in})


@broken("modules_unmarked", "__init__", "modules inside units do not say that they are sharded", about="")
def modules_unmarked(original: Any, self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
    original(self, module, *args, **kwargs)
    for one in module.modules() if isinstance(module, nn.Module) else ():
        vars(one).pop("_is_fsdp_managed_module", None)
