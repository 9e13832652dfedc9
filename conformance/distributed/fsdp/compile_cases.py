"""Cases that record the graphs which Dynamo compiles for sharded modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from conformance.distributed.fsdp.lab import Lab

WIDTH, BLOCKS, STEPS = 4, 2, 3


class FeedForwardBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.relu(self.first(self.norm(x))))


_FINDS_A_STREAM = "get_external_object_by_index"  # call that computes nothing, only on accelerators


class Noted:
    """Backend that records the operations of each graph and runs the graph unchanged."""

    def __init__(self) -> None:
        self.graphs: list[list[str]] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        del inputs
        names = [_name_of(node.target) for node in graph.graph.nodes if node.op.startswith("call_")]
        if set(names) != {_FINDS_A_STREAM}:
            self.graphs.append(names)
        return graph.forward


def _name_of(target: Any) -> str:
    return getattr(target, "__name__", str(target))


def graphs_of_steps(lab: Lab, *, use_orig_params: bool) -> list[list[list[str]]]:
    """Train a compiled sharded model. Return the graphs that each step compiled."""
    torch._dynamo.reset()
    blocks = (lab.wrap(FeedForwardBlock(), use_orig_params=use_orig_params) for _ in range(BLOCKS))
    model = lab.wrap(nn.Sequential(*blocks), use_orig_params=use_orig_params)
    backend, compiled = Noted(), []
    model.compile(backend=backend)
    for _ in range(STEPS):
        before = len(backend.graphs)
        model(torch.ones(2, WIDTH, device=lab.rank.device, requires_grad=True)).sum().backward()
        compiled.append(backend.graphs[before:])
    return compiled


def graph_of_a_block() -> list[str]:
    """Return the operations in the graph of one unsharded block."""
    backend = Noted()
    torch._dynamo.reset()
    torch.compile(FeedForwardBlock(), backend=backend)(torch.ones(2, WIDTH, requires_grad=True))
    [graph] = backend.graphs
    return graph
