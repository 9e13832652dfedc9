"""The door to a library: what is looked up through it, replaced behind it, and missing there."""

from __future__ import annotations

import pytest
import torch

from conformance.judge.library import Library, NotProvided


def test_names_are_torchs_own() -> None:
    library = Library("torch")
    assert library.nn.utils.clip_grad_norm_ is torch.nn.utils.clip_grad_norm_
    assert library.provides("amp.GradScaler")


@pytest.mark.parametrize("path", ["amp.GradScaler", "decoder.JSONDecoder.nothing"])
def test_a_missing_name_is_reported_by_its_path(path: str) -> None:
    library = Library("json")
    assert not library.provides(path)
    with pytest.raises(NotProvided, match=f"^json does not provide {path}$"):
        library.find(path)


def test_a_replaced_class_is_replaced_under_each_spelling() -> None:
    library = Library("torch")
    library.replace("amp.autocast", lambda original: type("Other", (original,), {}))
    assert library.autocast is library.amp.autocast is library.amp.autocast_mode.autocast
    assert library.autocast.__name__ == "Other"
    library.replace("amp.autocast", lambda original: type("Another", (original,), {}))
    assert [made.__name__ for made in library.autocast.__mro__[:2]] == ["Another", "Other"]
    assert torch.amp.autocast.__name__ == "autocast"
