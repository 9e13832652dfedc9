"""The order of tests on a GPU host: the most valuable first, because time may run out."""

from __future__ import annotations

import re

# Patterns of paths, most valuable first. A test belongs to the first one that it matches.
STAGES = (
    # Calls that use the kernels.
    r"/test_(sharded_)?grad_scaler_fused",
    r"/test_(clip_grad|fsdp_clip)",
    r"/test_grad_scaler_(unscale|step|update|groups|machine)",
    r"/dynamo/test_optimizer",
    # Trainings of FullyShardedDataParallel and fully_shard.
    r"/test_(fully_shard|fsdp_training|gpt)\.py",
    r"/test_(fsdp|fully_shard)_(\w*precision|collectives|no_sync|outputs|tensor_parallel|groups|tied|beside|calls)\.py",
    r"/test_(sharded_grad_scaler|fsdp_(hooks|double_backward|optimizer_in_backward|checkpointing))",
    # State dicts.
    r"/test_fsdp_(state_dict|optim_state|summon|distributed_checkpoint)",
)


def stage_of(nodeid: str, has_device: bool) -> int:
    """Return the stage of a test: lower stages run first. Tests that no device changes are in the last stage."""
    if not has_device:
        return len(STAGES) + 1
    path = nodeid.partition("::")[0]
    stages = (number for number, pattern in enumerate(STAGES) if re.search(pattern, path))
    return next(stages, len(STAGES))
