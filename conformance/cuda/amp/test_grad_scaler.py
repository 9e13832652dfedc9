"""torch.cuda.amp.GradScaler, an older spelling."""

from __future__ import annotations

import copy

import pytest
import torch

from conformance.clauses import clause
from conformance.library import Library
from conformance.outcome import assert_same_outcome, observe
from conformance.strategies.older_scalers import ARGUMENTS, older_story
from conformance.strategies.scaling import Rig, assert_same_story, pickled


@clause("cuda.amp.grad_scaler.older_spelling.is_the_scaler")
@pytest.mark.parametrize("cuda_is_there", [True, False])
@pytest.mark.parametrize("arguments", list(ARGUMENTS))
def test_scales_as_the_newer_one(
    subject: Library,
    reference: Library,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    arguments: str,
    cuda_is_there: bool,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda_is_there)
    assert_same_story(
        reference,
        subject,
        lambda library: older_story(library, library.cuda.amp.GradScaler, arguments, device),
    )


@clause("cuda.amp.grad_scaler.older_spelling.is_the_scaler")
def test_takes_no_device(subject: Library, reference: Library) -> None:
    # Whether the warning comes before the refusal is nobody's business.
    wanted, got = (
        observe(library.cuda.amp.GradScaler, device="cuda").raised for library in (reference, subject)
    )
    assert wanted == got


@clause("cuda.amp.grad_scaler.older_spelling.warns")
def test_warns(subject: Library, reference: Library) -> None:
    assert_same_outcome(
        observe(lambda: reference.cuda.amp.GradScaler(2.0).get_scale()),
        observe(lambda: subject.cuda.amp.GradScaler(2.0).get_scale()),
    )


@clause("cuda.amp.grad_scaler.older_spelling.warns")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_is_a_subclass(subject: Library, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Code that asks isinstance for the newer class takes it, and its copies stay what they are."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    scaler = subject.cuda.amp.GradScaler(init_scale=4.0)
    assert isinstance(scaler, subject.amp.GradScaler)
    rig = Rig(subject, device).used()
    rig.scaler = scaler
    rig.used()
    for copied in (pickled(scaler), copy.deepcopy(scaler)):
        assert type(copied) is type(scaler)
        assert copied.get_scale() == 4.0
