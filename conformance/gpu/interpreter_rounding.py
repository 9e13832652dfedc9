"""Triton's interpreter, made to convert between float32 and bfloat16 as GPUs and torch do.

By default (Triton 3.6 to 3.9) it truncates float32, while GPUs and torch round to nearest, ties to even. It also
misplaces the bits of subnormals. The kernels do not change. `test_machine_code` checks that the code compiled for
GPUs rounds.

As a plugin of pytest (`-p conformance.gpu.interpreter_rounding`) it patches the interpreter of that process.
"""

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter


def patch_interpreter() -> None:
    """Make Triton's interpreter convert between float32 and bfloat16 with torch, which rounds like a GPU."""
    convert_by_triton = interpreter._convert_float

    def convert(values: Any, source: tl.dtype, expected: tl.dtype, rounding: Any) -> Any:
        """Return `values` in the expected type. NumPy stores them as float32 or as the bits of bfloat16."""
        match source, expected:
            case tl.float32, tl.bfloat16:
                return torch.from_numpy(np.array(values)).bfloat16().view(torch.uint16).numpy()
            case tl.bfloat16, tl.float32:
                return torch.from_numpy(np.array(values)).view(torch.bfloat16).float().numpy()
            case _:
                return convert_by_triton(values, source, expected, rounding)

    interpreter._convert_float = convert


def pytest_configure() -> None:
    patch_interpreter()
