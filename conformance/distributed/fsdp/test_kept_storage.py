"""Memory of unsharded parameters that stays allocated after they are resharded."""

from __future__ import annotations

import pytest

from conformance.distributed.fsdp.fully_shard_judging import Sites
from conformance.distributed.fsdp.kept_storage_cases import kept_storage
from conformance.distributed.fsdp.twins import values_of
from conformance.judge.clauses import clause


@clause("distributed.fsdp.fully_shard.kept_storage")
@pytest.mark.parametrize("recurse", [False, True], ids=["one unit", "all units"])
def test_unsharded_storage_is_kept(sites: Sites, recurse: bool) -> None:
    kept_values = values_of(sites.of_subject(kept_storage, keep=True, recurse=recurse))
    freed = values_of(sites.of_subject(kept_storage, keep=False, recurse=recurse))
    for kept_value, freed_value in zip(kept_values, freed, strict=True):
        assert kept_value["allocated"] == [[recurse, True]] * 2
        assert freed_value["allocated"] == [[False, False]] * 2
        assert kept_value["same addresses"] == ([True, True] if recurse else None)
        assert kept_value["taken back"] == [False, False]
        assert kept_value["after"] == freed_value["after"]
