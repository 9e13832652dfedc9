"""The tests that `--ranks nccl` judges: where NCCL differs from gloo, and few because each collective takes 10 ms.

Two ranks share one GPU and talk over sockets of the loopback. Unlike gloo, NCCL lets the host run on, works on a
stream of its own, averages itself, keeps its inputs in use, and has no backend for CPU tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

# Number of tests of each file, 60 in all. Values matter most, so trainings come first.
SAMPLE = {
    "test_fully_shard.py": 5,  # real streams, asynchronous gathers and reductions
    "test_fsdp_training.py": 6,
    "test_fully_shard_calls.py": 8,  # order of gathers, inputs of reductions that wait
    "test_fully_shard_precision.py": 5,  # averages in other dtypes
    "test_fsdp_mixed_precision.py": 6,
    "test_fsdp_no_sync.py": 4,
    "test_fsdp_collectives.py": 3,  # the collectives themselves, beside torch's
    "test_fsdp_clip.py": 5,  # norms over ranks
    "test_clip_grad_dtensor.py": 4,
    "test_sharded_grad_scaler_fused_step.py": 4,  # flags over ranks
    "test_sharded_grad_scaler.py": 3,
    "test_fsdp_state_dict.py": 4,  # CPU values of ranks that have no CPU backend
    "test_fsdp_optim_state.py": 3,
}


def sample_of(nodeids: Sequence[str]) -> set[str]:
    """Choose from the tests with two CUDA ranks: one case of each function in a file, then a second case."""
    chosen: set[str] = set()
    for file, most in SAMPLE.items():
        cases: dict[str, list[str]] = {}
        for nodeid in nodeids:
            path, _, function = nodeid.partition("::")
            if path.rpartition("/")[2] == file:
                cases.setdefault(function.partition("[")[0], []).append(nodeid)
        by_turns = sorted(
            (turn, place, nodeid)
            for place, of_function in enumerate(cases.values())
            for turn, nodeid in enumerate(of_function)
        )
        chosen.update(nodeid for _, _, nodeid in by_turns[:most])
    return chosen
