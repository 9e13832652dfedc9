"""Tests of the check `imports`: a source that finds its names, and one for each way to miss them."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from benchmarks.tests.sample_results import CI


@pytest.fixture
def imports(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(CI))
    return importlib.import_module("_imports")


MODULES = {
    "impl/__init__.py": "",
    "impl/amp.py": "import math\nif math.pi:\n    def scale(): pass\nelse:\n    scale = None\nA = (B := 1)",
    "impl/lazy.py": "def __getattr__(name): return name",
    "ci/_runs.py": "PAGE = 1",
}


def complaints(imports: Any, root: Path, source: str) -> list[str]:
    for path, text in {**MODULES, "impl/nn/user.py": source}.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return imports.complaints(root)


@pytest.mark.parametrize(
    "source",
    [
        "from impl.amp import A, B, math, scale",
        "from impl import amp, nn\namp.scale, nn.user",
        "from impl.lazy import anything",
        "from ..amp import scale\nfrom . import user\nfrom impl.amp import *",
        "import impl.amp, torch.amp\nfrom torch import nothing",
        "import _runs\n_runs.PAGE",
        "from impl import amp\ndef f(amp):\n    return amp.gone",
        "from impl.amp import A\nA.real",
        "'impl.amp:scale'",
    ],
)
def test_existing_names_are_accepted(imports: Any, tmp_path: Path, source: str) -> None:
    assert complaints(imports, tmp_path, source) == []


@pytest.mark.parametrize(
    ("source", "missing"),
    [
        ("def f():\n    from impl.amp import gone", "2: impl.amp.gone"),
        ("from impl.gone import scale", "1: impl.gone.scale"),
        ("import impl.gone", "1: impl.gone"),
        ("import impl.amp as amp\namp.gone", "2: impl.amp.gone"),
        ("from .. import gone", "1: impl.gone"),
        ("import _runs\n_runs.gone", "2: _runs.gone"),
        ("'impl.amp:gone'", "1: impl.amp.gone"),
    ],
)
def test_missing_name_is_reported(imports: Any, tmp_path: Path, source: str, missing: str) -> None:
    assert complaints(imports, tmp_path, source) == [f"impl/nn/user.py:{missing} does not exist"]
