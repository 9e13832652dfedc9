"""Support of `autocast` in torch's tracers: nodes for a pre-dispatch graph, and registration of classes with Dynamo.

Dynamo must know our classes before it traces the first function that enters a region. It inlines the constructor of an
unknown class, but refuses an instance that was created before tracing.
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
    """Record the start of a region if pre-dispatch tracing is recording a graph."""
    _record(torch.amp._enter_autocast, (device, dtype, enabled, cache_enabled))


def record_exit() -> None:
    """Record the end of the region that the last `record_enter` began."""
    _record(torch.amp._exit_autocast, ())


# The two targets are torch's own functions, and only used here. The tracer, the export verifier and the pass that
# turns a region into `wrap_with_autocast` compare a node's target with them by identity and refuse any other. They
# are passed as values and never called here.
def _record(target: object, args: tuple[object, ...]) -> None:
    for mode in _get_current_function_mode_stack():
        if isinstance(mode, PreDispatchTorchFunctionMode):
            mode.__torch_function__(target, (), args)  # pyright: ignore[reportArgumentType]
            return


def uncompiled(function: _Function) -> _Function:
    """Keep Dynamo from compiling `function` and its callees when it runs between two graphs.

    Dynamo still inlines it into a graph. It treats torch's own files the same way.
    """
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    set_code_exec_strategy(function.__code__, skip)
    return function


_classes: list[type] = []
_introduce: Callable[[Any], None] | None = None


def introduce_to_dynamo(cls: type) -> None:
    """Register `cls` with Dynamo now if Dynamo is loaded, else as soon as it is."""
    # Append first, so that a thread that sets `_introduce` meanwhile finds the class in the list.
    _classes.append(cls)
    if _introduce is not None:
        _introduce(cls)
    else:
        import_after_dynamo("impl.dynamo.autocast")


def introduce_by(introduce: Callable[[Any], None]) -> None:
    """Call `introduce` with each class, existing and future. `impl.dynamo.autocast` calls this function."""
    global _introduce  # noqa: PLW0603 Dynamo's tables are global to the process, and so is their writer
    _introduce = introduce
    for cls in list(_classes):
        introduce(cls)
