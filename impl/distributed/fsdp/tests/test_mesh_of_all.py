"""Which devices `fully_shard` takes where it is given no mesh."""

from __future__ import annotations

import pytest
import torch

from impl.distributed.fsdp._fully_shard_init import mesh_of_all
from impl.distributed.fsdp.tests.streamed import world_of


def test_what_torch_was_built_for_and_is_not_there_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """As pip's wheel of torch on a machine without a GPU, which names cuda all the same."""
    monkeypatch.setattr(torch._C, "_accelerator_getAccelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with world_of(1):
        assert mesh_of_all().device_type == "cpu"
