"""What Dynamo makes of sharded modules, as a rank sees it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from conformance.distributed.fsdp.fsdp_cases import FSDP
from conformance.judge.library import load_library
from conformance.judge.outcome import Outcome, observe
from conformance.ranks import Rank

WIDTH, BLOCKS, STEPS = 4, 2, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.relu(self.first(self.norm(x))))


class Noted:
    """A backend that runs what it is given, and keeps the operations of each graph."""

    def __init__(self) -> None:
        self.graphs: list[list[str]] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        del inputs
        nodes = graph.graph.nodes
        self.graphs.append([_name_of(node.target) for node in nodes if node.op.startswith("call_")])
        return graph.forward


def _name_of(target: Any) -> str:
    return getattr(target, "__name__", str(target))


def graphs_of_steps(rank: Rank, *, library: str, use_orig_params: bool) -> Outcome:
    """The outcome's value: for each step, the graphs that were compiled in it."""
    fsdp = load_library(library).find(FSDP)

    def run() -> list[list[list[str]]]:
        torch._dynamo.reset()
        given: dict[str, Any] = {"device_id": rank.device, "use_orig_params": use_orig_params}
        model = fsdp(nn.Sequential(*(fsdp(Block(), **given) for _ in range(BLOCKS))), **given)
        backend, compiled = Noted(), []
        model.compile(backend=backend)
        for _ in range(STEPS):
            before = len(backend.graphs)
            model(torch.ones(2, WIDTH, device=rank.device, requires_grad=True)).sum().backward()
            compiled.append(backend.graphs[before:])
        return compiled

    return observe(run)


def graph_of_a_block() -> list[str]:
    """Unsharded."""
    backend = Noted()
    torch._dynamo.reset()
    torch.compile(Block(), backend=backend)(torch.ones(2, WIDTH, requires_grad=True))
    [graph] = backend.graphs
    return graph
