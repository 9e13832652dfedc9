"""The clauses of clipping and of the scaler, judged again with each other kernel backend of `impl`.

`torch` means torch's operators. `triton` takes CPU tensors through launcher, table and cache into Triton's
interpreter, which must be chosen before Triton is imported, so each backend is a separate run of pytest.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

from conformance.judge.clauses import HERE
from conformance.judge.judgement import unavailable
from conformance.judge.library import Library

_SCALER = HERE / "amp" / "test_grad_scaler.py"


def _scaler(name: str) -> str:
    return str(_SCALER.with_stem(f"{_SCALER.stem}_{name}"))


_FUSED = (
    "norms_of_every_order", "unscaled_gradients_are_not_unscaled_again",
    "momentum_that_begins_with_a_skipped_step", "gradients_stay_as_they_are",
    "disabled_scaler_clips_and_steps",
)  # fmt: skip
# Tests that find faults of kernels. Tests with ranks, which start Triton again, find no more.
_JUDGES = [
    *(str(file) for file in sorted((HERE / "nn" / "utils").glob("test_*.py")) if "dtensor" not in file.name),
    _scaler("unscale"),
    _scaler("update"),
    _scaler("machine"),
    f"{_scaler('step')}::test_iterations_of_every_dtype",
    f"{_scaler('step')}::test_changed_gradients_keep_decision_of_unscale",
    *(f"{_scaler('fused_step')}::test_{name}" for name in _FUSED),
    f"{_scaler('fused_precision')}::test_copies_in_lower_precision",
    f"{_scaler('fused_precision')}::test_parameters_of_every_dtype",
]
_BY_TRITON = [
    *("-p", "conformance.gpu.interpreter_rounding", "-p", "impl.kernels.tests.interpreter_nesting"),
    *_JUDGES,
    # The tensors of this test are on the meta device, for which no backend can be selected.
    *("-k", "not test_nothing_waits_for_the_device"),
]
# Half of the interpreter's time: the same kernels with other dtypes and numbers.
_SLOW = (
    "test_any_sequence_of_calls and not float64",  # lists of both dtypes
    "test_iterations_of_every_dtype and not (True and torch.float32)",
    "test_new_scale_replaces_scale",
    "test_scale_stays_above_zero_and_warns",
    "test_setters_match_torch",
    "test_changed_gradients_keep_decision_of_unscale",
)
_WORDS = {
    "torch": _JUDGES,
    "a sample by triton": [*_BY_TRITON[:-1], f"{_BY_TRITON[-1]} and not ({' or '.join(_SLOW)})"],
    "triton": _BY_TRITON,
    # With streams: a launch is work of one, and what a table addresses may be gone, or not there yet.
    "triton on sim": [*_BY_TRITON, "--device=sim", "-p", "impl.kernels.tests.on_simulator"],
}


@pytest.mark.deadline(900)
@pytest.mark.parametrize(
    "backend",
    [
        words if "sample" in words else pytest.param(words, marks=pytest.mark.profile("full"))
        for words in _WORDS
    ],
)
def test_clauses_hold_on_backend(subject: Library, backend: str, tmp_path: Path) -> None:
    if subject.package != "impl":
        return  # other subjects have no backends
    if "triton" in backend and importlib.metadata.version("triton").startswith("3.6."):
        unavailable("Triton 3.7 or newer, because the interpreter of 3.6 gives numpy's deprecation warnings")
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider"]
    environment = os.environ | {
        "TANDEM_KERNELS": "triton" if "triton" in backend else backend,
        "TRITON_INTERPRET": str(int("triton" in backend)),
    }
    environment = {name: value for name, value in environment.items() if not name.startswith("PYTEST_")}
    log = tmp_path / "log"
    with log.open("w") as output:
        ended = subprocess.run(
            [*words, "--profile=quick", f"--subject={subject.spec}", *_WORDS[backend]],
            env=environment,
            cwd=HERE.parent,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=870,
            check=False,
        )
    assert ended.returncode == 0, log.read_text()[-6000:]
