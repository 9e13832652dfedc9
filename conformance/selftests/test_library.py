"""Access to a library: lookups, replacements, and missing names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from conformance.judge.library import Library, NotProvided
from conformance.selftests.misbehaving import write_files


def test_names_are_torchs_own() -> None:
    library = Library("torch")
    assert library.nn.utils.clip_grad_norm_ is torch.nn.utils.clip_grad_norm_
    assert library.provides("amp.GradScaler")


@pytest.mark.parametrize("path", ["amp.GradScaler", "decoder.JSONDecoder.nothing"])
def test_missing_name_is_reported_with_path(path: str) -> None:
    library = Library("json")
    assert not library.provides(path)
    with pytest.raises(NotProvided, match=f"^json does not provide {path}$"):
        library.find(path)


def test_replaced_class_is_replaced_under_each_spelling() -> None:
    library = Library("torch")
    library.replace("amp.autocast", lambda original: type("Other", (original,), {}))
    assert library.autocast is library.amp.autocast is library.amp.autocast_mode.autocast
    assert library.autocast.__name__ == "Other"
    library.replace("amp.autocast", lambda original: type("Another", (original,), {}))
    assert [cls.__name__ for cls in library.autocast.__mro__[:2]] == ["Another", "Other"]
    assert torch.amp.autocast.__name__ == "autocast"


def test_fsdp_arguments_are_torchs_if_subject_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Library("json").distributed.fsdp.ShardingStrategy is torch.distributed.fsdp.ShardingStrategy
    write_files(tmp_path, {"has_one_enum/distributed/fsdp/__init__.py": "class ShardingStrategy: ...\n"})
    monkeypatch.syspath_prepend(tmp_path)
    library = Library("has_one_enum")
    assert library.distributed.fsdp.ShardingStrategy.__module__ == "has_one_enum.distributed.fsdp"
    assert not library.provides("distributed.fsdp.StateDictType")
