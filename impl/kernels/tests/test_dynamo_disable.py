"""Functions that Dynamo does not see: the graph breaks there, and no frame below is compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from impl.kernels import dynamo_disable


@pytest.fixture
def operators() -> Iterator[list[list[str]]]:
    """Operators of each compiled graph."""
    torch.compiler.reset()
    yield []
    torch.compiler.reset()


def compiled(function: Callable[..., Any], operators: list[list[str]]) -> Callable[..., Any]:
    def backend(module: torch.fx.GraphModule, _: Any) -> Any:
        operators.append([node.name for node in module.graph.nodes if node.op.startswith("call")])
        return module

    return torch.compile(function, backend=backend)


def below(x: Tensor) -> Tensor:
    return x.sin()


def adding(number: float) -> Callable[[Tensor], Tensor]:
    @dynamo_disable
    def add(x: Tensor) -> Tensor:
        return below(x) + number

    return add


class Callee:
    @dynamo_disable
    def __call__(self, x: Tensor) -> Tensor:
        return below(x) + 1.0


@pytest.mark.parametrize("how", ["function", "second closure", "method"])
def test_graph_breaks_and_callees_run_eagerly(operators: list[list[str]], how: str) -> None:
    callee = Callee() if how == "method" else [adding(1.0), adding(1.0)][how == "second closure"]

    def whole(x: Tensor) -> Tensor:
        return callee(x * 2.0) - 3.0

    x = torch.linspace(0.0, 1.0, 5)
    run = compiled(whole, operators)
    for _ in range(2):
        assert torch.equal(run(x), (x * 2.0).sin() + 1.0 - 3.0)
    assert operators == [["mul"], ["sub"]]
    # The callee can be compiled when it is called elsewhere.
    assert torch.equal(compiled(below, operators)(x), x.sin())
    assert operators[2:] == [["sin"]]


def test_compiled_callee_stays_compiled(operators: list[list[str]]) -> None:
    inner = compiled(below, operators)

    @dynamo_disable
    def around(x: Tensor) -> Tensor:
        return inner(x) + 1.0

    x = torch.ones(2)
    assert torch.equal(compiled(lambda x: around(x) * 2.0, operators)(x), (x.sin() + 1.0) * 2.0)
    assert operators == [["sin"], ["mul"]]


def test_fullgraph_raises(operators: list[list[str]]) -> None:
    callee = adding(1.0)
    whole = torch.compile(lambda x: callee(x) * 2.0, backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="depends on what the host knows"):
        whole(torch.ones(1))
