"""Triton's interpreter, made to convert between float32 and bfloat16 as GPUs and torch do.

By itself (Triton 3.6 to 3.9) it cuts float32 off where they round to nearest, ties to even, and misplaces the bits of
subnormals. The kernels stay as they are: what the interpreter runs is what a GPU runs, and that a GPU rounds is read
from the code compiled for it, in `test_machine_code`.

As a plugin of pytest (`-p conformance.gpu.interpreter_rounding`) it mends the interpreter of that process.
"""

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter


def mend() -> None:
    """Let torch convert; every other pair of types stays the interpreter's own affair."""
    theirs = interpreter._convert_float

    def convert(values: Any, given: tl.dtype, expected: tl.dtype, rounding: Any) -> Any:
        """The bits of `values`, which stand in NumPy's float32 or as the bits of bfloat16, in the type asked for."""
        match given, expected:
            case tl.float32, tl.bfloat16:
                return torch.from_numpy(np.array(values)).bfloat16().view(torch.uint16).numpy()
            case tl.bfloat16, tl.float32:
                return torch.from_numpy(np.array(values)).view(torch.bfloat16).float().numpy()
            case _:
                return theirs(values, given, expected, rounding)

    interpreter._convert_float = convert


def pytest_configure() -> None:
    mend()
