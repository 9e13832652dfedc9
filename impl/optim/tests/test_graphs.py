"""Calls of `impl.optim._graphs` to `torch.cuda` and to the generic accelerator API."""

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
def cuda_calls(monkeypatch: pytest.MonkeyPatch) -> mock.MagicMock:
    """Mock of torch.cuda that records calls and checks them against torch's signatures."""
    cuda_calls = mock.MagicMock()
    for name in ("CUDAGraph", "Stream", "current_stream", "stream", "device", "is_current_stream_capturing"):
        cuda_calls.attach_mock(mock.create_autospec(getattr(torch.cuda, name)), name)
        monkeypatch.setattr(torch.cuda, name, getattr(cuda_calls, name))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return cuda_calls


def test_capture_calls_torch_cuda(cuda_calls: mock.MagicMock) -> None:
    graphs = graphs_for(CUDA)
    assert graphs is not None
    capture_graph(graphs, cuda_calls.work)
    current, side = cuda_calls.current_stream.return_value, cuda_calls.Stream.return_value
    assert cuda_calls.mock_calls == [
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
def accelerator_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[mock.MagicMock]:
    """Mock of torch.accelerator for a device type other than CUDA. torch has its graphs since 2.13."""
    calls = mock.MagicMock()
    calls.current_accelerator.return_value = torch.device(OTHER.type)
    for name in ("Graph", "current_stream", "current_accelerator"):
        monkeypatch.setattr(torch.accelerator, name, getattr(calls, name), raising=False)
    monkeypatch.setattr(torch, "Stream", calls.Stream)
    _graphs._has_accelerator_graphs.cache_clear()
    yield calls
    _graphs._has_accelerator_graphs.cache_clear()


def test_capture_calls_generic_accelerator_api(accelerator_calls: mock.MagicMock) -> None:
    graphs, calls = graphs_for(OTHER), accelerator_calls
    assert graphs is not None
    calls.reset_mock()
    capture_graph(graphs, calls.work)
    current, side = calls.current_stream.return_value, calls.Stream.return_value
    assert calls.mock_calls == [
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


def test_capture_query_asks_the_device(
    cuda_calls: mock.MagicMock, accelerator_calls: mock.MagicMock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_copies, "_HAS_STREAM_QUERY", True)
    assert is_capturing(OTHER) is accelerator_calls.current_stream.return_value.is_capturing.return_value
    accelerator_calls.current_stream.assert_called_once_with(OTHER)
    assert not is_capturing(torch.device("cpu"))
    monkeypatch.setattr(_copies, "_HAS_STREAM_QUERY", False)
    assert not is_capturing(OTHER)
    assert is_capturing(CUDA) is cuda_calls.is_current_stream_capturing.return_value
    assert cuda_calls.mock_calls == [
        mock.call.device(CUDA),
        mock.call.device().__enter__(),
        mock.call.is_current_stream_capturing(),
        mock.call.device().__exit__(None, None, None),
    ]


def test_capture_query_enters_no_device_if_it_is_the_current_one(
    cuda_calls: mock.MagicMock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_copies, "_HAS_STREAM_QUERY", False)
    assert is_capturing(torch.device("cuda", 0)) is cuda_calls.is_current_stream_capturing.return_value
    assert cuda_calls.mock_calls == [mock.call.is_current_stream_capturing()]


def test_failed_capture_is_ended(cuda_calls: mock.MagicMock, accelerator_calls: mock.MagicMock) -> None:
    for device, graph in ((CUDA, cuda_calls.CUDAGraph), (OTHER, accelerator_calls.Graph)):
        graphs, work = graphs_for(device), mock.Mock(side_effect=ArithmeticError)
        assert graphs is not None
        with pytest.raises(ArithmeticError):
            capture_graph(graphs, work)
        graph.return_value.capture_end.assert_called_once_with()


def test_devices_without_graphs_have_none(
    accelerator_calls: mock.MagicMock, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [graphs_for(torch.device(kind)) for kind in ("cpu", "meta", "mps")] == [None] * 3
    _graphs._has_accelerator_graphs.cache_clear()
    accelerator_calls.Graph.side_effect = RuntimeError("none for this device")
    assert graphs_for(OTHER) is None
    _graphs._has_accelerator_graphs.cache_clear()
    monkeypatch.delattr(torch.accelerator, "Graph")  # like torch 2.12 and earlier
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
def test_incomplete_call_is_detected(
    name: str, cuda_calls: mock.MagicMock, accelerator_calls: mock.MagicMock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CudaGraphs, name, FAULTS[name])
    monkeypatch.setattr(AcceleratorGraphs, name, FAULTS_OF_ANY[name])
    with pytest.raises(AssertionError):
        test_capture_calls_torch_cuda(cuda_calls)
    with pytest.raises(AssertionError):
        test_capture_calls_generic_accelerator_api(accelerator_calls)
