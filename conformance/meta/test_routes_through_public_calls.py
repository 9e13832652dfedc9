"""The clipping clauses, and on `plain` those of AMP, once more with `impl`'s other kernels behind the public calls.

`plain` is torch's own operators. `triton` routes CPU tensors through launcher, table and cache into Triton's
interpreter, which must be chosen before Triton is imported: so each route is a run of pytest of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from conformance.clauses import HERE
from conformance.library import Library

# Triton's interpreter cuts float32 off where the GPU rounds it to bfloat16, which the scaler's clauses see to the bit.
_ASKED = {
    "plain": [HERE / "nn", *sorted((HERE / "amp").glob("test_grad_scaler*.py"))],
    "triton": [HERE / "nn"],
}


@pytest.mark.profile("full")
@pytest.mark.deadline(900)
@pytest.mark.parametrize("route", list(_ASKED))
def test_clauses_hold_on_route(subject: Library, route: str, tmp_path: Path) -> None:
    if subject.package != "impl":
        return  # other subjects have no routes
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:xdist",
        "-p",
        "no:cacheprovider",
        "--profile=quick",
    ]
    environment = os.environ | {
        "TANDEM_KERNELS": route,
        "TRITON_INTERPRET": "1" if route == "triton" else "0",
    }
    environment = {name: value for name, value in environment.items() if not name.startswith("PYTEST_")}
    log = tmp_path / "log"
    with log.open("w") as output:
        ended = subprocess.run(
            [*words, f"--subject={subject.spec}", *map(str, _ASKED[route])],
            env=environment,
            cwd=HERE.parent,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=870,
            check=False,
        )
    assert ended.returncode == 0, log.read_text()[-6000:]
