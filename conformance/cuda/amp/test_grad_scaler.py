"""torch.cuda.amp.GradScaler, an older spelling."""

from __future__ import annotations

import pytest
import torch

from conformance.judge.clauses import clause
from conformance.judge.library import Library
from conformance.strategies.older_scalers import ARGUMENTS, OlderScaler


@pytest.fixture
def older(subject: Library, reference: Library) -> OlderScaler:
    return OlderScaler("cuda", subject, reference)


@clause("cuda.amp.grad_scaler.older_spelling.is_the_scaler")
@pytest.mark.parametrize("cuda_is_there", [True, False])
@pytest.mark.parametrize("arguments", list(ARGUMENTS))
def test_older_spelling_scales_as_torchs(
    older: OlderScaler, monkeypatch: pytest.MonkeyPatch, device: str, arguments: str, cuda_is_there: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda_is_there)
    older.assert_scales_as_torchs_and_as_newer_class(arguments, device)


@clause("cuda.amp.grad_scaler.older_spelling.is_the_scaler")
def test_device_argument_raises(older: OlderScaler) -> None:
    older.assert_takes_no_device()


@clause("cuda.amp.grad_scaler.older_spelling.warns")
def test_constructor_warns_of_deprecation(older: OlderScaler) -> None:
    older.assert_warns()


@clause("cuda.amp.grad_scaler.older_spelling.warns")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_class_derives_from_newer_scaler(
    older: OlderScaler, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    older.assert_is_a_subclass(device)
