"""Notes that say what helps, on errors whose texts are torch's."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from impl.distributed.fsdp import FullyShardedDataParallel, fully_shard

pytestmark = pytest.mark.usefixtures("fake_group")


def test_copy_of_sharded_model_says_how_to_copy() -> None:
    model = fully_shard(nn.Linear(2, 2))
    with pytest.raises(AssertionError) as caught:
        copy.deepcopy(model)
    (note,) = caught.value.__notes__
    assert all(words in note for words in ("before fully_shard", "AveragedModel", "state_dict()"))


def test_complex_flat_parameter_is_named() -> None:
    model = nn.Linear(2, 2, dtype=torch.complex64)
    with pytest.raises(ValueError, match="Cannot flatten integer dtype tensors") as caught:
        FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    (note,) = caught.value.__notes__
    assert note.startswith("weight has torch.complex64; pass it in ignored_states")
