"""The choice of a backend: by name, by the environment, by what Triton can launch, and in compiled code."""

import math
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from impl import kernels
from impl.kernels import TensorList, _dispatch


@pytest.mark.parametrize("p", [2.0, math.inf])
def test_compiled_code_takes_torchs_operators(p):
    def norm_of(tensors):
        return kernels.total_norm(TensorList(tensors), p)

    compiled = torch.compile(norm_of, fullgraph=True, backend="eager")
    tensors = [torch.randn(5), torch.randn(3)]
    assert torch.equal(compiled(tensors), torch.nn.utils.get_total_norm(tensors, p))


def test_unknown_backend_raises():
    with pytest.raises(ValueError, match="no kernel backend 'fast'"), kernels.backend("fast"):
        pass


def test_failing_triton_falls_back_to_torch_with_one_warning():
    """Triton fails at its first launch, like on a machine without a C compiler. A meta tensor has no memory."""
    pytest.importorskip("triton")
    tensor = SimpleNamespace(device=torch.device("meta"), is_cuda=True, is_cpu=False)
    _dispatch._warn_without_triton.cache_clear()
    with pytest.warns(
        UserWarning, match="Triton cannot launch a kernel on meta .*; it needs a driver"
    ) as warned:
        assert [_dispatch._fastest("auto", tensor)[0] for _ in range(3)] == ["torch"] * 3
    assert len(warned) == 1
    with pytest.raises(RuntimeError, match="'triton' but Triton cannot launch a kernel on meta"):
        _dispatch._fastest("triton", tensor)


@pytest.mark.parametrize("error", [RuntimeError("Failed to find C compiler"), FileNotFoundError("gcc")])
def test_failure_text_names_error_of_first_launch(monkeypatch, error):
    def launch_scale(*_):
        raise error

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setitem(sys.modules, "impl.kernels._triton.scale", SimpleNamespace(launch_scale=launch_scale))
    why_not = _dispatch._failure_of_a_launch.__wrapped__(torch.device("cpu"))
    assert f"({type(error).__name__}: {error})" in why_not


def test_out_of_memory_launch_is_retried(monkeypatch):
    failing = Mock(side_effect=[RuntimeError("Triton Error [CUDA]: out of memory"), True])
    monkeypatch.setitem(sys.modules, "impl.kernels._triton.scale", SimpleNamespace(launch_scale=failing))
    monkeypatch.setattr(_dispatch, "_failure_of_a_launch", cache(_dispatch._failure_of_a_launch.__wrapped__))
    monkeypatch.setattr(_dispatch, "_has_triton", lambda: True)
    with pytest.raises(RuntimeError, match="out of memory"):
        _dispatch._reason_against_triton(torch.device("meta"))
    assert _dispatch._reason_against_triton(torch.device("meta")) is None


def test_triton_on_the_cpu_wants_the_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1"), kernels.backend("triton"):
        kernels.scale_(TensorList([torch.ones(2)]), torch.tensor(2.0))


def test_environment_variable_sets_backend():
    program = (
        "import torch; from impl.kernels import TensorList; from impl.kernels._dispatch import dispatch_for as of; "
        "print(of(TensorList([torch.ones(1)])).backend)"
    )
    for name, backend in (("torch", "torch"), ("cpu_blocked", "cpu_blocked"), ("auto", "cpu_blocked")):
        done = subprocess.run(
            [sys.executable, "-c", program], env={**os.environ, "TANDEM_KERNELS": name}, text=True,
            capture_output=True, timeout=120, check=True, cwd=Path(__file__).parents[3],
        )  # fmt: skip
        assert done.stdout.strip() == backend
