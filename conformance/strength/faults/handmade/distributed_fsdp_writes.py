"""Faults in FullyShardedDataParallel after users have written to parameters."""

from __future__ import annotations

from typing import Any

import torch

from conformance.strength.faults.fault import in_methods, register_fault
from conformance.strength.faults.handmade.distributed_fsdp import FSDP, broken


@broken("forward")
def writes_before_backward_unnoticed(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Writes between forward and backward are not noticed."""
    output = original(self, *args, **kwargs)
    if not (torch.is_grad_enabled() and self.check_is_root() and isinstance(output, torch.Tensor)):
        return output
    versions = tuple(parameter._version for parameter in self.parameters())
    last = output.clone()  # a node whose hook runs before the model's
    last.register_hook(
        lambda _: torch._C._autograd._unsafe_set_version_counter(tuple(self.parameters()), versions)
    )
    return last


def _wrap_with_shapes(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    self._faulty_shapes = [parameter.shape for parameter in self.parameters()]


def _cut_larger_memory(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    for parameter, shape in zip(self.parameters(), vars(self).get("_faulty_shapes", ()), strict=False):
        if parameter.numel() > shape.numel() > 0:
            parameter.data = parameter.data.flatten()[: shape.numel()].view(shape)
    return original(self, *args, **kwargs)


register_fault(
    "fully_sharded.larger_memory_cut",
    FSDP,
    in_methods({"__init__": _wrap_with_shapes, "forward": _cut_larger_memory}),
    says="Memory that is larger than its parameter is truncated.",
    part=f"{FSDP}(use_orig_params)",
    on_ranks=True,
)
