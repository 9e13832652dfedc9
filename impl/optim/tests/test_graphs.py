"""What `impl.optim._graphs` asks of torch, call by call: of `torch.cuda`, and of what any accelerator has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from impl.kernels import _copies, is_capturing
from impl.optim import _graphs
from impl.optim._graphs import AcceleratorGraphs, CudaGraphs, capture_graph, graphs_for

pytestmark = pytest.mark.deadline(120)

CUDA, OTHER = torch.device("cuda", 1), torch.device("xpu", 1)  # not the current ones


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> mock.MagicMock:
    """What torch.cuda is asked for, by calls that torch's signatures take."""
    asked = mock.MagicMock()
    for name in ("CUDAGraph", "Stream", "current_stream", "stream", "device", "is_current_stream_capturing"):
        asked.attach_mock(mock.create_autospec(getattr(torch.cuda, name)), name)
        monkeypatch.setattr(torch.cuda, name, getattr(asked, name))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return asked


def test_a_capture_is_asked_for_in_torchs_own_words(asked: mock.MagicMock) -> None:
    graphs = graphs_for(CUDA)
    assert graphs is not None
    capture_graph(graphs, asked.work)
    current, side = asked.current_stream.return_value, asked.Stream.return_value
    assert asked.mock_calls == [
        mock.call.current_stream(CUDA),
        mock.call.Stream(CUDA),
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


@pytest.fixture
def asked_of_any(monkeypatch: pytest.MonkeyPatch) -> Iterator[mock.MagicMock]:
    """What is asked of an accelerator that is not CUDA, since torch 2.13."""
    asked = mock.MagicMock()
    asked.current_accelerator.return_value = torch.device(OTHER.type)
    for name in ("Graph", "current_stream", "current_accelerator"):
        monkeypatch.setattr(torch.accelerator, name, getattr(asked, name), raising=False)
    monkeypatch.setattr(torch, "Stream", asked.Stream)
    _graphs._has_accelerator_graphs.cache_clear()
    yield asked
    _graphs._has_accelerator_graphs.cache_clear()


def test_a_capture_is_asked_for_in_generic_words(asked_of_any: mock.MagicMock) -> None:
    graphs, asked = graphs_for(OTHER), asked_of_any
    assert graphs is not None
    asked.reset_mock()
    capture_graph(graphs, asked.work)
    current, side = asked.current_stream.return_value, asked.Stream.return_value
    assert asked.mock_calls == [
        mock.call.current_stream(OTHER),
        mock.call.Stream(OTHER),
        mock.call.Stream().wait_stream(current),
        mock.call.Graph(capture_error_mode="thread_local"),
        mock.call.Stream().__enter__(),
        mock.call.Graph().capture_begin(),
        mock.call.work(),
        mock.call.Graph().capture_end(),
        mock.call.Stream().__exit__(None, None, None),
        mock.call.current_stream().wait_stream(side),
    ]


def test_a_device_is_asked_whether_somebody_captures_on_it(
    asked: mock.MagicMock, asked_of_any: mock.MagicMock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_copies, "_HAS_STREAM_QUERY", True)
    assert is_capturing(OTHER) is asked_of_any.current_stream.return_value.is_capturing.return_value
    asked_of_any.current_stream.assert_called_once_with(OTHER)
    assert not is_capturing(torch.device("cpu"))
    monkeypatch.setattr(_copies, "_HAS_STREAM_QUERY", False)
    assert not is_capturing(OTHER)
    assert is_capturing(CUDA) is asked.is_current_stream_capturing.return_value
    assert asked.mock_calls == [
        mock.call.device(CUDA),
        mock.call.device().__enter__(),
        mock.call.is_current_stream_capturing(),
        mock.call.device().__exit__(None, None, None),
    ]


def test_capture_query_enters_no_device_if_it_is_the_current_one(
    asked: mock.MagicMock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_copies, "_HAS_STREAM_QUERY", False)
    assert is_capturing(torch.device("cuda", 0)) is asked.is_current_stream_capturing.return_value
    assert asked.mock_calls == [mock.call.is_current_stream_capturing()]


def test_a_capture_whose_work_fails_is_ended(asked: mock.MagicMock, asked_of_any: mock.MagicMock) -> None:
    for device, graph in ((CUDA, asked.CUDAGraph), (OTHER, asked_of_any.Graph)):
        graphs, work = graphs_for(device), mock.Mock(side_effect=ArithmeticError)
        assert graphs is not None
        with pytest.raises(ArithmeticError):
            capture_graph(graphs, work)
        graph.return_value.capture_end.assert_called_once_with()


def test_what_has_no_graphs(asked_of_any: mock.MagicMock, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [graphs_for(torch.device(kind)) for kind in ("cpu", "meta", "mps")] == [None] * 3
    _graphs._has_accelerator_graphs.cache_clear()
    asked_of_any.Graph.side_effect = RuntimeError("none for this device")
    assert graphs_for(OTHER) is None
    _graphs._has_accelerator_graphs.cache_clear()
    monkeypatch.delattr(torch.accelerator, "Graph")  # before torch 2.13
    assert graphs_for(OTHER) is None


FAULTS: dict[str, Callable[..., Any]] = {
    "current_stream": lambda self: torch.cuda.current_stream(),
    "side_stream": lambda self: torch.cuda.Stream(),
    "wait": lambda self, stream, other: stream.wait_stream(stream),
}
FAULTS_OF_ANY: dict[str, Callable[..., Any]] = {
    "current_stream": lambda self: torch.accelerator.current_stream(),
    "side_stream": lambda self: torch.Stream(),
    "wait": lambda self, stream, other: stream.wait_stream(stream),
}


@pytest.mark.parametrize("name", list(FAULTS))
def test_a_call_that_says_too_little_is_noticed(
    name: str, asked: mock.MagicMock, asked_of_any: mock.MagicMock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CudaGraphs, name, FAULTS[name])
    monkeypatch.setattr(AcceleratorGraphs, name, FAULTS_OF_ANY[name])
    with pytest.raises(AssertionError):
        test_a_capture_is_asked_for_in_torchs_own_words(asked)
    with pytest.raises(AssertionError):
        test_a_capture_is_asked_for_in_generic_words(asked_of_any)
