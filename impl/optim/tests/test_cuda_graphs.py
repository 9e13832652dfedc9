"""What `impl.optim._graphs` asks of `torch.cuda`, call by call; where there is CUDA, its own graphs run elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from impl.optim._graphs import CudaGraphs, captured, graphs_for

pytestmark = pytest.mark.deadline(120)

DEVICE = torch.device("cuda", 1)  # not the current one


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> mock.MagicMock:
    """What torch.cuda is asked for, by calls that torch's signatures take."""
    asked = mock.MagicMock()
    for name in ("CUDAGraph", "Stream", "current_stream", "stream", "device", "is_current_stream_capturing"):
        asked.attach_mock(mock.create_autospec(getattr(torch.cuda, name)), name)
        monkeypatch.setattr(torch.cuda, name, getattr(asked, name))
    return asked


def test_a_capture_is_asked_for_in_torchs_own_words(asked: mock.MagicMock) -> None:
    graphs = graphs_for(DEVICE)
    assert graphs is not None
    captured(graphs, asked.work)
    current, side = asked.current_stream.return_value, asked.Stream.return_value
    assert asked.mock_calls == [
        mock.call.current_stream(DEVICE),
        mock.call.Stream(DEVICE),
        mock.call.Stream().wait_stream(current),
        mock.call.CUDAGraph(),
        mock.call.stream(side),
        mock.call.stream().__enter__(),
        mock.call.CUDAGraph().capture_begin(capture_error_mode="thread_local"),
        mock.call.work(),
        mock.call.CUDAGraph().capture_end(),
        mock.call.stream().__exit__(None, None, None),
        mock.call.current_stream().wait_stream(side),
    ]


def test_a_device_is_asked_whether_somebody_captures_on_it(asked: mock.MagicMock) -> None:
    graphs = graphs_for(DEVICE)
    assert graphs is not None
    assert graphs.is_capturing() is asked.is_current_stream_capturing.return_value
    assert asked.mock_calls == [
        mock.call.device(DEVICE),
        mock.call.device().__enter__(),
        mock.call.is_current_stream_capturing(),
        mock.call.device().__exit__(None, None, None),
    ]


def test_a_capture_whose_work_fails_is_ended(asked: mock.MagicMock) -> None:
    asked.work.side_effect = ArithmeticError
    graphs = graphs_for(DEVICE)
    assert graphs is not None
    with pytest.raises(ArithmeticError):
        captured(graphs, asked.work)
    assert mock.call.CUDAGraph().capture_end() in asked.mock_calls


def test_only_cuda_has_graphs() -> None:
    assert [graphs_for(torch.device(kind)) for kind in ("cpu", "meta", "mps")] == [None] * 3


FAULTS: dict[str, Callable[..., Any]] = {
    "current_stream": lambda self: torch.cuda.current_stream(),
    "side_stream": lambda self: torch.cuda.Stream(),
    "wait": lambda self, stream, other: stream.wait_stream(stream),
    "is_capturing": lambda self: torch.cuda.is_current_stream_capturing(),
}


@pytest.mark.parametrize("name", list(FAULTS))
def test_a_call_that_says_too_little_is_noticed(
    name: str, asked: mock.MagicMock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CudaGraphs, name, FAULTS[name])
    judging = (
        test_a_device_is_asked_whether_somebody_captures_on_it
        if name == "is_capturing"
        else test_a_capture_is_asked_for_in_torchs_own_words
    )
    with pytest.raises(AssertionError):
        judging(asked)
