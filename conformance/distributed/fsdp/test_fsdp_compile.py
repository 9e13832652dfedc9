"""Sharded modules under `torch.compile`."""

from __future__ import annotations

import pytest

from conformance.distributed.fsdp.compile_cases import BLOCKS, graph_of_a_block, graphs_of_steps
from conformance.distributed.fsdp.fsdp_cases import Setup, Step, Training
from conformance.distributed.fsdp.module_trees import Leaf, ModuleGroup, ModuleTree
from conformance.distributed.fsdp.twins import FULL, Twins
from conformance.judge.clauses import clause

TREE = ModuleTree(ModuleGroup((Leaf("affine", 4), Leaf("tied"))))
DEADLINE_S, OF_A_CASE_S = 300, 130  # Dynamo takes seconds on each rank


@clause("distributed.fsdp.fully_sharded_data_parallel.compiled.trains")
@pytest.mark.deadline(DEADLINE_S)
@pytest.mark.parametrize(
    ("strategy", "compiled", "use_orig_params"),
    [
        ("FULL_SHARD", "around", True),
        pytest.param("FULL_SHARD", "parts", False, marks=FULL),
        pytest.param("SHARD_GRAD_OP", "around", False, marks=FULL),
        pytest.param("SHARD_GRAD_OP", "parts", True, marks=FULL),
        pytest.param("NO_SHARD", "parts", True, marks=FULL),
    ],
)
def test_trains_compiled(twins: Twins, strategy: str, compiled: str, use_orig_params: bool) -> None:
    setup = Setup(strategy, wrap="manual", arguments={"use_orig_params": use_orig_params}, compiled=compiled)
    schedule = (Step(), Step(forwards=2, order="no_sync"))
    twins.train(Training(TREE, setup, schedule), deadline_s=OF_A_CASE_S)


@pytest.mark.deadline(DEADLINE_S)
@pytest.mark.parametrize(
    "use_orig_params",
    [
        pytest.param(True, marks=clause("distributed.fsdp.fully_sharded_data_parallel.compiled.graphs")),
        pytest.param(
            False, marks=[FULL, clause("distributed.fsdp.fsdp_torch_limit_removed.graphs_of_flat_parameters")]
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
