"""Compile every Triton kernel for GPUs that need not be here, and report what the machine code holds.

Run as a program, in a process where TRITON_INTERPRET is not set; prints one JSON object.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from impl.kernels._triton import rules
from impl.kernels._triton.chunk import DTYPES, OPTIONS, SHAPE
from impl.kernels._triton.clamp import clamp_kernel
from impl.kernels._triton.norm import (
    FINISH_OPTIONS,
    FINISH_SHAPE,
    TENSOR_SHAPE,
    finish_norm_kernel,
    finish_step_kernel,
    partial_norm_kernel,
    tensor_norms_kernel,
)
from impl.kernels._triton.rules import adagrad_kernel, adam_kernel, sgd_kernel
from impl.kernels._triton.scale import clip_kernel, scale_kernel
from impl.kernels._triton.unscale import unscale_kernel
from impl.kernels._triton.update import LAUNCH as UPDATE
from impl.kernels._triton.update import SHAPE as UPDATE_SHAPE
from impl.kernels.rules import RULES

_BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class KernelVariant(NamedTuple):
    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, Any] = OPTIONS


_SETTINGS = {getattr(rules, rule.KERNELS.triton): rule.KERNELS.settings for rule in RULES}


def _update(
    name: str,
    kernel: Any,
    states: int,
    own: tl.dtype,
    grads: tl.dtype,
    copies: tl.dtype | None,
    stored: tl.dtype | None = None,
    **flags: Any,
) -> KernelVariant:
    arguments = dict.fromkeys(("lr", *_SETTINGS[kernel]), "fp64") | {
        "rows_ptr": "*i64",
        "factor_ptr": "*fp32",
    }
    dtypes = {
        "OWN": own, "GRADS": grads, "STORED": stored or own, "COPIES": copies or own,
        "LISTS": states + (3 if copies else 2),
    }  # fmt: skip
    options = {name: UPDATE[name] for name in UPDATE.keys() - UPDATE_SHAPE.keys()}
    return KernelVariant(
        name, kernel, {**arguments, "found_inf_ptr": "*fp32"},
        {**UPDATE_SHAPE, "lr_ptr": None, **dtypes, "STATES": states, "MAXIMIZE": False, **flags}, options,
    )  # fmt: skip


_FINISH = {"partial_ptr": "*fp64", "norm_ptr": "*fp32", "chunks": "i32", "p": "fp64"}
_UNSCALE = {"rows_ptr": "*i64", "scale_ptr": "*fp32", "found_inf_ptr": "*fp32"}
_PARTIAL = {"rows_ptr": "*i64", "partial_ptr": "*fp64", "p": "fp64"}
_WALKS: dict[str, tuple[Any, dict[str, str], dict[str, Any]]] = {
    "unscale": (unscale_kernel, _UNSCALE, {"IS_INVERSE": True}),
    "unscale_by": (unscale_kernel, _UNSCALE, {"IS_INVERSE": False}),
    "scale": (scale_kernel, {"rows_ptr": "*i64", "factor_ptr": "*fp32"}, {}),
    "clip": (clip_kernel, {"rows_ptr": "*i64", "norm_ptr": "*bf16", "max_norm": "fp64"}, {}),
    "clamp": (clamp_kernel, {"rows_ptr": "*i64", "low": "fp64", "high": "fp64"}, {}),
    "norm_two": (partial_norm_kernel, _PARTIAL, {"KIND": "two"}),
    "norm_largest": (partial_norm_kernel, _PARTIAL, {"KIND": "largest"}),
    "norm_power": (partial_norm_kernel, _PARTIAL, {"KIND": "power"}),
}
CASES = (
    *(
        KernelVariant(name, kernel, signature, {**SHAPE, **constants, "DTYPE": None})
        for name, (kernel, signature, constants) in _WALKS.items()
    ),
    *(
        KernelVariant(
            f"{name} {dtype}", kernel, signature, {**SHAPE, **constants, "DTYPE": DTYPES[getattr(torch, dtype)]}
        )
        for name, (kernel, signature, constants) in _WALKS.items()
        for dtype in ("bfloat16", "float32")
        if name in {"unscale", "unscale_by", "scale", "clip", "norm_two"}
    ),
    *(
        KernelVariant(
            name,
            finish_norm_kernel,
            {**_FINISH, **signature},
            {**FINISH_SHAPE, **constants},
            FINISH_OPTIONS,
        )
        for name, signature, constants in (
            ("finish_two", {"found_inf_ptr": "*fp32"}, {"KIND": "two"}),
            ("finish_two bfloat16", {"norm_ptr": "*bf16"}, {"KIND": "two", "found_inf_ptr": None}),
            ("finish_power", {}, {"KIND": "power", "found_inf_ptr": None}),
            ("finish_largest", {}, {"KIND": "largest", "found_inf_ptr": None}),
        )
    ),
    *(
        KernelVariant(
            f"finish_step {dtype}",
            finish_step_kernel,
            {
                "partial_ptr": "*fp64", "scale_ptr": "*fp32", "scaled_norm_ptr": dtype, "found_inf_ptr": "*fp32",
                "norm_ptr": dtype, "factor_ptr": "*fp32", "taken_ptr": "*fp32", "chunks": "i32", "p": "fp64",
                "max_norm": "fp64",
            },
            {**FINISH_SHAPE, "CLIPS": True, "KIND": "two"},
            {**FINISH_OPTIONS, "enable_fp_fusion": False},
        )
        for dtype in ("*fp32", "*bf16")
    ),
    KernelVariant(
        "tensor_norms",
        tensor_norms_kernel,
        {"partial_ptr": "*fp64", "first_ptr": "*i64", "norm_ptr": "*fp64", "scale_ptr": "*fp32", "p": "fp64"},
        {**TENSOR_SHAPE, "KIND": "two"},
    ),
    _update("adamw_copies", adam_kernel, 2, tl.float32, tl.bfloat16, tl.bfloat16, AMSGRAD=False, DECAY="decoupled"),
    _update(
        "adamw_narrow_states", adam_kernel, 2, tl.float32, tl.float32, None, tl.bfloat16,
        AMSGRAD=False, DECAY="decoupled",
    ),
    _update("adam_halves", adam_kernel, 3, tl.bfloat16, tl.bfloat16, None, AMSGRAD=True, DECAY="gradient"),
    _update(
        "momentum", sgd_kernel, 1, tl.float32, tl.float32, None, MOMENTUM_PHASE="goes_on", NESTEROV=True, DECAYS=True
    ),
    _update("adagrad", adagrad_kernel, 1, tl.float32, tl.float16, None, DECAYS=True),
)  # fmt: skip


def compiled(case: KernelVariant, capability: int) -> dict[str, Any]:
    """Return registers, spilled bytes, loads, stores and roundings of one kernel on one architecture."""
    names = case.kernel.arg_names
    source = ASTSource(
        fn=case.kernel,
        signature={n: case.signature.get(n, "constexpr") for n in names},
        constexprs={(names.index(n),): v for n, v in case.constants.items()},
        attrs={
            (i,): [["tt.divisibility", 16]]
            for i, n in enumerate(names)
            if case.signature.get(n, "").startswith("*")
        },
    )
    binary = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=case.options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(binary.asm["cubin"])
        cubin.flush()
        usage = _tool("--dump-resource-usage", cubin.name)
        sass = _tool("-sass", cubin.name)
    counted = re.search(r"REG:(\d+) STACK:(\d+).* LOCAL:(\d+)", usage)
    assert counted, usage
    return {
        "registers": int(counted[1]),
        "spilled": int(counted[3]) + len(re.findall(r"\b(?:LDL|STL)\b", sass)),
        "wide_loads": len(re.findall(r"\bLDG\.E[.\w]*\.128\b", sass)),
        "wide_stores": len(re.findall(r"\bSTG\.E[.\w]*\.128\b", sass)),
        # A product that the assembler may fuse into a sum, or a quotient or root that is not rounded to nearest.
        "loose": sorted(
            set(re.findall(r"\b(?:mul\.f32|(?:div|sqrt|rcp)\.(?!rn)[.\w]*f32)\b", binary.asm["ptx"]))
        ),
        "roundings": sorted(set(re.findall(r"\bcvt\.(\w+)[.\w]*\.bf16(?:x2)?\.f32\b", binary.asm["ptx"]))),
    }


def _tool(flag: str, path: str) -> str:
    return subprocess.run(
        [_BIN / "cuobjdump", flag, path], capture_output=True, text=True, check=True, timeout=60
    ).stdout


if __name__ == "__main__":
    capability = int(sys.argv[1])
    json.dump({case.name: compiled(case, capability) for case in CASES}, sys.stdout)
