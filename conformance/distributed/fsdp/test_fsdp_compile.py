"""Sharded modules under `torch.compile`."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

from conformance.distributed.fsdp.scenes.fsdp_training import Setup, Step, Training
from conformance.distributed.fsdp.scenes.fully_shard_training import full_parameters
from conformance.distributed.fsdp.scenes.module_trees import Leaf, ModuleGroup, ModuleTree
from conformance.distributed.fsdp.scenes.residual_blocks import ResidualBlock
from conformance.distributed.fsdp.scenes.scene import Scene, filled
from conformance.distributed.fsdp.scenes.twins import FULL_PROFILE, Twins, raises
from conformance.judge.clauses import clause

TREE = ModuleTree(ModuleGroup((Leaf("affine", 4), Leaf("tied"))))
DEADLINE_S, OF_A_CASE_S = 300, 130  # Dynamo takes seconds on each rank


@clause("distributed.fsdp.fully_sharded_data_parallel.compiled.trains")
@pytest.mark.deadline(DEADLINE_S)
@pytest.mark.parametrize(
    ("strategy", "compiled", "use_orig_params"),
    [
        ("FULL_SHARD", "around", True),
        pytest.param("FULL_SHARD", "parts", False, marks=FULL_PROFILE),
        pytest.param("SHARD_GRAD_OP", "around", False, marks=FULL_PROFILE),
        pytest.param("SHARD_GRAD_OP", "parts", True, marks=FULL_PROFILE),
        pytest.param("NO_SHARD", "parts", True, marks=FULL_PROFILE),
    ],
)
def test_compiled_model_trains_like_torch_and_unsharded(
    twins: Twins, strategy: str, compiled: str, use_orig_params: bool
) -> None:
    """Compile the wrapped root ("around") or the parts before they are wrapped ("parts"), with aot_eager.

    Every rank trains like torch's and like one unsharded process.
    """
    setup = Setup(strategy, wrap="manual", arguments={"use_orig_params": use_orig_params}, compiled=compiled)
    schedule = (Step(), Step(forwards=2, order="no_sync"))
    twins.agree_on_training(Training(TREE, setup, schedule), deadline_s=OF_A_CASE_S)


WIDTH, BLOCKS, STEPS = 4, 2, 3


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


def graphs_of_steps(scene: Scene, *, use_orig_params: bool) -> list[list[list[str]]]:
    """Train a compiled sharded model. Return the graphs that each step compiled."""
    torch._dynamo.reset()
    blocks = (scene.wrap(ResidualBlock(WIDTH), use_orig_params=use_orig_params) for _ in range(BLOCKS))
    model = scene.wrap(nn.Sequential(*blocks), use_orig_params=use_orig_params)
    backend, compiled = Noted(), []
    model.compile(backend=backend)
    for _ in range(STEPS):
        before = len(backend.graphs)
        model(torch.ones(2, WIDTH, device=scene.rank.device, requires_grad=True)).sum().backward()
        compiled.append(backend.graphs[before:])
    return compiled


def graph_of_a_block() -> list[str]:
    """Return the operations in the graph of one unsharded block."""
    backend = Noted()
    torch._dynamo.reset()
    torch.compile(ResidualBlock(WIDTH), backend=backend)(torch.ones(2, WIDTH, requires_grad=True))
    [graph] = backend.graphs
    return graph


@pytest.mark.deadline(DEADLINE_S)
@pytest.mark.parametrize(
    "use_orig_params",
    [
        pytest.param(True, marks=clause("distributed.fsdp.fully_sharded_data_parallel.compiled.graphs")),
        pytest.param(
            False,
            marks=[
                FULL_PROFILE,
                clause("distributed.fsdp.fsdp_torch_limit_removed.graphs_of_flat_parameters"),
            ],
        ),
    ],
)
def test_wrapped_module_is_one_graph(twins: Twins, use_orig_params: bool) -> None:
    """Dynamo traces no collective and no hook of the runtime, and a repeated step compiles nothing."""
    block = graph_of_a_block()
    arguments = {"use_orig_params": use_orig_params, "deadline_s": OF_A_CASE_S}
    for first, *later in twins.values(graphs_of_steps, **arguments):
        assert block in first
        assert all(graph == block for graph in first)
        assert len(first) <= BLOCKS
        assert not any(later)


def parameters_after_compiled_autograd(scene: Scene, *, api: str) -> dict[str, torch.Tensor]:
    """Run two steps whose backwards are run by compiled autograd. Return the full parameters."""
    torch._dynamo.reset()
    model: Any = filled(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)))
    if api == "fully_shard":
        scene.shard_children(model)
    else:
        model = scene.wrap(model, units=[nn.Linear], use_orig_params=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.125)
    x = torch.linspace(-1, 1, 6).view(2, 3)
    for _ in range(2):
        with torch._dynamo.compiled_autograd._enable(functools.partial(torch.compile, backend="eager")):
            scene.mean(lambda rank: model(x + rank).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return full_parameters(model) if api == "fully_shard" else scene.whole_parameters(model)


@clause("distributed.fsdp.failures.compiled_autograd")
@pytest.mark.deviation("fsdp.compiled_autograd")
@pytest.mark.deadline(DEADLINE_S)
@pytest.mark.world_sizes(fewest=2)
@pytest.mark.parametrize("api", ["fully_shard", pytest.param("FSDP1", marks=FULL_PROFILE)])
def test_compiled_autograd_trains_or_raises(cpu_twins: Twins, api: str) -> None:
    """torch's fully_shard silently never trains the first layer, and FSDP1 raises an error of Dynamo."""
    program = parameters_after_compiled_autograd
    is_named, is_trained = (
        raises(RuntimeError, "ompiled autograd"),
        cpu_twins.like_unsharded(program, api=api),
    )
    cpu_twins.deviate(program, we_do=lambda outcomes: is_named(outcomes) or is_trained(outcomes), api=api)
