"""What `autocast` tells torch's tracers: nodes for a pre-dispatch graph, and for Dynamo that it exists."""

import importlib

import torch
from torch.fx.experimental.proxy_tensor import PreDispatchTorchFunctionMode
from torch.overrides import _get_current_function_mode_stack


def record_enter(device: str, dtype: torch.dtype, enabled: bool, cache_enabled: bool) -> None:
    """Write a region's start into the graph that pre-dispatch tracing is recording, if it is."""
    _record(torch.amp._enter_autocast, (device, dtype, enabled, cache_enabled))


def record_exit() -> None:
    """Write the end of the region that `record_enter` began last."""
    _record(torch.amp._exit_autocast, ())


# The two targets are torch's own functions, named here and nowhere else: the tracer, the export verifier and
# the pass that turns a region into `wrap_with_autocast` compare a node's target with them by identity, and
# refuse any other. They are handed over as values and never called from here.
def _record(target: object, args: tuple[object, ...]) -> None:
    for mode in _get_current_function_mode_stack():
        if isinstance(mode, PreDispatchTorchFunctionMode):
            mode.__torch_function__(target, (), args)  # pyright: ignore[reportArgumentType]
            return


def introduce_to_dynamo(cls: type) -> None:
    """Register `cls` with Dynamo, which is inlining its code because it does not know the class yet.

    `impl.dynamo` is found by name and only now, because it imports Dynamo (two seconds). A program that never
    compiles never pays, and one that does needs no import hook: Dynamo itself comes by, once a process.
    """
    importlib.import_module("impl.dynamo.autocast").introduce(cls)


# Dynamo reads this and calls the function for real in the middle of a trace.
introduce_to_dynamo._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
