"""What `autocast` tells torch's tracers: nodes for a pre-dispatch graph, and for Dynamo that it exists.

Note on the import hook. Dynamo must know our classes before it traces the first function that enters a region. To
import it here would cost every program two seconds, and nothing that Dynamo reads while tracing leads it to us: it
inlines the constructor of a class it does not know, but refuses an instance made earlier before running any code of
it. So the classes wait on `sys.meta_path` until somebody imports Dynamo.
"""

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import FunctionType, ModuleType
from typing import TypeVar

import torch
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch.fx.experimental.proxy_tensor import PreDispatchTorchFunctionMode
from torch.overrides import _get_current_function_mode_stack

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


def introduce_to_dynamo(cls: type) -> None:
    """Have Dynamo trace the regions of `cls`: now where it is loaded, else as soon as it is (see the note on top)."""
    if "torch._dynamo" in sys.modules:
        importlib.import_module("impl.dynamo.autocast").introduce(cls)
        return
    if _dynamo_import not in sys.meta_path:
        sys.meta_path.insert(0, _dynamo_import)
    _dynamo_import.waiting.append(cls)


class _DynamoImport(MetaPathFinder):
    """Finds `torch._dynamo` as Python would, and introduces the waiting classes when it has been executed."""

    def __init__(self) -> None:
        self.waiting: list[type] = []

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torch._dynamo":
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_introduce(module: ModuleType) -> None:
            execute(module)
            sys.meta_path.remove(self)
            for cls in self.waiting:
                introduce_to_dynamo(cls)

        spec.loader.exec_module = execute_and_introduce
        return spec


_dynamo_import = _DynamoImport()
