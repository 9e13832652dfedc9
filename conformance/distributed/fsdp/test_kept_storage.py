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
    kept = values_of(sites.of_subject(kept_storage, keep=True, recurse=recurse))
    freed = values_of(sites.of_subject(kept_storage, keep=False, recurse=recurse))
    for one, other in zip(kept, freed, strict=True):
        assert one["allocated"] == [[recurse, True]] * 2
        assert other["allocated"] == [[False, False]] * 2
        assert one["same addresses"] == ([True, True] if recurse else None)
        assert one["taken back"] == [False, False]
        assert one["after"] == other["after"]
