"""Faults in what FullyShardedDataParallel makes of parameters that a user has written to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from conformance.strength.faults.fault import Substitute, in_methods, register_fault
from conformance.strength.faults.handmade.distributed_fsdp import FSDP, broken


def before_backward(
    fault_id: str, says: str
) -> Callable[[Callable[[Any, list[int]], None]], Callable[[Any, list[int]], None]]:
    """Enter `fault(model, version of each parameter at the end of its forward)`, called as the backward begins."""

    def enter(fault: Callable[[Any, list[int]], None]) -> Callable[[Any, list[int]], None]:
        def forward(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
            output = original(self, *args, **kwargs)
            if not (torch.is_grad_enabled() and self.check_is_root() and isinstance(output, torch.Tensor)):
                return output
            versions = [parameter._version for parameter in self.parameters()]
            last = output.clone()  # a node whose hook runs before the model's
            last.register_hook(lambda _: fault(self, versions))
            return last

        broken(fault_id, "forward", says)(forward)
        return fault

    return enter


@before_backward("written_between_unseen", "what was written between forward and backward is not seen")
def _(model: Any, versions: list[int]) -> None:
    torch._C._autograd._unsafe_set_version_counter(tuple(model.parameters()), tuple(versions))


def given_memory(fault_id: str, says: str) -> Callable[[Substitute], Substitute]:
    """Enter `fault(original, model, shapes, ...)`, in forward's place: `shapes` were the parameters' when wrapped."""

    def enter(fault: Substitute) -> Substitute:
        def wrapping(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            self._faulty_shapes = [parameter.shape for parameter in self.parameters()]

        def forward(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
            shapes = vars(self).get("_faulty_shapes", ())
            return fault(lambda: original(self, *args, **kwargs), self, shapes)

        register_fault(
            f"fully_sharded.{fault_id}", FSDP, says=says, part=f"{FSDP}(use_orig_params)", on_ranks=True
        )(in_methods({"__init__": wrapping, "forward": forward}))
        return fault

    return enter


@given_memory("larger_memory_cut", "of memory with more elements than a parameter has the first are taken")
def _(forward: Callable[[], Any], model: Any, shapes: list[torch.Size]) -> Any:
    for parameter, shape in zip(model.parameters(), shapes, strict=False):
        if parameter.numel() > shape.numel() > 0:
            parameter.data = parameter.data.flatten()[: shape.numel()].view(shape)
    return forward()
