"""The second form of impl's graphs: on the CPU it keeps operators instead of running them, and runs them in replays.

As CUDA does, it keeps them with the numbers they were given and the memory that their tensors had then, whatever the
tensors do later. The log says what was asked for, in which stream.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from impl.optim import _graphed_update

Call = tuple[OpOverload, Any, Any]


class Tape(TorchDispatchMode):
    """While it is entered nothing runs."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        assert func._schema.is_mutable, f"{func} makes something anew, which a replay would not"
        self.calls.append((func, *tree_map_only(Tensor, _same_memory, (args, kwargs or {}))))
        return args[0] if func._schema.returns else None


def _same_memory(tensor: Tensor) -> Tensor:
    kept = torch.empty(0, dtype=tensor.dtype)
    return kept.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


@dataclass(eq=False)
class RecordedGraph:
    graphs: RecordingGraphs
    calls: list[Call]

    def replay(self) -> None:
        self.graphs.log.append(("replay", self.graphs.current_stream()))
        for func, args, kwargs in self.calls:
            func(*args, **kwargs)


@dataclass
class RecordingGraphs:
    """Answers to the calls of `impl.optim._graphs.Graphs`. A stream is its name."""

    current: str = "current"
    others_capture: bool = False
    log: list[tuple[str, ...]] = field(default_factory=list)
    operators: list[str] = field(default_factory=list)  # of the last capture

    def is_capturing(self) -> bool:
        return self.others_capture

    def current_stream(self) -> str:
        return self.current

    def side_stream(self) -> str:
        return "side"

    def wait(self, stream: str, other: str) -> None:
        self.log.append(("wait", stream, other))

    def capture(self, stream: str, work: Callable[[], None]) -> RecordedGraph:
        self.log.append(("capture", stream))
        before, self.current = self.current, stream
        with Tape() as tape:
            work()
        self.current = before
        self.operators = [func._schema.name for func, _, _ in tape.calls]
        return RecordedGraph(self, tape.calls)


@contextlib.contextmanager
def recorded() -> Generator[RecordingGraphs]:
    """Inside, updates find these graphs on the CPU; what is filled and run without a graph is logged too."""
    graphs = RecordingGraphs()

    def reported(name: str, owner: Any, method: str) -> None:
        real = getattr(owner, method)

        def tell(*args: Any) -> Any:
            graphs.log.append((name, graphs.current))
            return real(*args)

        patch.setattr(owner, method, tell)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_graphed_update, "graphs_for", mock.Mock(return_value=graphs))
        reported("fill", _graphed_update.Settings, "fill")
        reported("update", _graphed_update, "step_bucket")
        yield graphs
