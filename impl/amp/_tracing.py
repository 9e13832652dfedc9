"""What `autocast` tells torch's tracers: nodes for a pre-dispatch graph, and for Dynamo that it exists.

Dynamo must know our classes before it traces the first function that enters a region: it inlines the constructor of a
class it does not know, but refuses an instance made earlier before running any code of it.
"""

from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch.fx.experimental.proxy_tensor import PreDispatchTorchFunctionMode
from torch.overrides import _get_current_function_mode_stack

from impl._after_dynamo import import_after_dynamo

_Function = TypeVar("_Function", bound=FunctionType)


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


def uncompiled(function: _Function) -> _Function:
    """Decorator: where `function` runs by itself, between two graphs, Dynamo compiles neither it nor its callees.

    It still inlines the function into a graph. torch's own files are treated so wherever they are called from.
    """
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    set_code_exec_strategy(function.__code__, skip)
    return function


_classes: list[type] = []
_introduce: Callable[[Any], None] | None = None


def introduce_to_dynamo(cls: type) -> None:
    """Have Dynamo trace the regions of `cls`: now where it is loaded, else as soon as it is."""
    # Noted first: whoever sets `_introduce` in another thread meanwhile finds it there.
    _classes.append(cls)
    if _introduce is not None:
        _introduce(cls)
    else:
        import_after_dynamo("impl.dynamo.autocast")


def introduce_by(introduce: Callable[[Any], None]) -> None:
    """Hand each class to `introduce`, those defined so far and those to come; `impl.dynamo.autocast` calls this."""
    global _introduce  # noqa: PLW0603 Dynamo's tables are the process's, and so is who writes in them
    _introduce = introduce
    for cls in list(_classes):
        introduce(cls)
