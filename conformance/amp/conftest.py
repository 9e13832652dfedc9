"""The fixture `fused`, which judges the fused step."""

from __future__ import annotations

import pytest

from conformance.judge.deviations import DeviationJudge
from conformance.judge.library import Library
from conformance.strategies.fused_steps import FusedStep


@pytest.fixture
def fused(deviation: DeviationJudge, reference: Library, device: str) -> FusedStep:
    """Judge of the subject's fused step, for tests that name `TORCH_HAS_NO_FUSED_STEP`."""
    return FusedStep(deviation, reference, device)
