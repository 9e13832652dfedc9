"""Every Triton kernel compiles for GPUs of three generations, keeps its registers, reads 128 bits at a time, rounds."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from conformance.gpu.update_bounds import EACH

# Sixteen elements a thread need two wide reads in f16, two in bf16, four in f32, eight in f64.
_WIDE = {"bfloat16": 2, "float32": 4}
_WIDE_MIXED = 2 + 2 + 4 + 8
_READ = ("unscale", "unscale_by", "scale", "clip", "clamp", "norm_two")
_WRITTEN = ("unscale", "unscale_by", "scale", "clip", "clamp")
# 128-bit loads and stores of the updates, whose threads take eight elements a turn: for each list, one in half
# precision and two in f32. Twice as many would be a second pass.
_A_TURN = {
    "adamw_copies": (7, 7), "adamw_narrow_states": (6, 4), "adam_halves": (5, 4), "momentum": (6, 4), "adagrad": (5, 4),
}  # fmt: skip
# Sixty-four thousand registers hold at least four blocks of 128 threads at this many each.
_MOST_REGISTERS = 128
# For lists of one dtype: at least six blocks, and five on sm_80.
_MOST_REGISTERS_OF_ONE_DTYPE = {80: 96, 90: 80, 100: 80}


needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


def printed_by(program, *words):
    """The JSON that a program prints in whose process Triton compiles."""
    environment = {k: v for k, v in os.environ.items() if k not in {"TRITON_INTERPRET", "TANDEM_KERNELS"}}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", program, *words],
        check=False, capture_output=True, text=True, timeout=300, env=environment, cwd=Path(__file__).parents[3],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@needs_triton
@pytest.mark.deadline(300)
def test_launched_kernels_compile_once():
    """The interpreter takes arguments of any type; a GPU's compiler does not."""
    norm = ["partial_norm_kernel", "finish_norm_kernel"]
    step = ["partial_norm_kernel", "finish_step_kernel"]
    printed = printed_by("impl.kernels.tests.as_launched")
    assert printed["compiled_again"] == 0, "another learning rate or setting compiles another kernel"
    assert printed["launched"] == [
        "unscale_kernel", "unscale_kernel", "scale_kernel", "clip_kernel", "clamp_kernel",
        *norm, *norm, "tensor_norms_kernel", *step, "tensor_norms_kernel",
        "adam_kernel", "sgd_kernel", "adagrad_kernel", *(rule.KERNELS.triton for rule in EACH),
    ]  # fmt: skip


@needs_triton
@pytest.mark.deadline(300)
def test_launch_runs_the_kernel_that_triton_specialises():
    """The launch runs the kernel that Triton finds, and searches for it only if Triton has to."""
    cases = printed_by("impl.kernels.tests.as_kept")
    for name, case in cases.items():
        assert len(set(case["functions"])) == 1, (name, case)
    assert {name for name, case in cases.items() if case["was_searched"]} == {"a truth value", "under a hook"}
    functions = {name: case["functions"][0] for name, case in cases.items()}
    same = ("aligned", "another address", "another number of its form", "a parameter", "aligned again")
    assert len({functions.pop(name) for name in same}) == 1
    del functions["under a hook"]  # kernel of the other device
    assert len(set(functions.values())) == len(functions)


@needs_triton
@pytest.mark.deadline(900)
@pytest.mark.parametrize(
    "capability",
    [90, *(pytest.param(other, marks=pytest.mark.profile("full")) for other in (80, 100))],
)
def test_kernels_compile_without_spills_and_with_wide_loads(capability):
    kernels = printed_by("conformance.gpu.ahead_of_time", str(capability))
    assert {name: k["spilled"] for name, k in kernels.items()} == dict.fromkeys(kernels, 0)
    assert all(k["registers"] <= _MOST_REGISTERS for k in kernels.values()), kernels
    for name in _READ:
        assert kernels[name]["wide_loads"] >= _WIDE_MIXED, (name, kernels[name])
        for dtype, wide in _WIDE.items() if name != "clamp" else ():
            kernel = kernels[f"{name} {dtype}"]
            assert kernel["wide_loads"] >= wide, (name, dtype, kernel)
            assert kernel["wide_stores"] >= (wide if name in _WRITTEN else 0), (name, dtype, kernel)
            assert kernel["registers"] <= _MOST_REGISTERS_OF_ONE_DTYPE[capability], (name, dtype, kernel)
    for name in _WRITTEN:
        assert kernels[name]["wide_stores"] >= _WIDE_MIXED, (name, kernels[name])
        # To nearest even, as torch does: what the interpreter is mended to do has to be what a GPU does.
        assert kernels[name]["roundings"] == ["rn"], (name, kernels[name])
    for name, (read, written) in _A_TURN.items():
        turns = kernels[name]["wide_loads"] // read  # more than one where the loop is unrolled
        assert turns >= 1, (name, kernels[name])
        assert kernels[name]["wide_loads"] == turns * read, (name, kernels[name])
        assert kernels[name]["wide_stores"] == turns * written, (name, kernels[name])
        # As the interpreter computes, to the bit: no sum is fused but by name, quotients and roots are to nearest.
        assert kernels[name]["loose"] == [], (name, kernels[name])
    for name in ("tensor_norms", "finish_step *fp32", "finish_step *bf16"):
        assert kernels[name]["loose"] == [], (name, kernels[name])
    for name in ("adamw_copies", "adamw_narrow_states", "adam_halves"):
        assert kernels[name]["roundings"] == ["rn"], (name, kernels[name])
