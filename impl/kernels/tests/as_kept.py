"""Launch one kernel in all its specialisations, by `launch` and by Triton, over a driver that runs nothing.

Run as a program, in a process where TRITON_INTERPRET is not set; prints for each case, as one JSON list, which compiled
kernels Triton and two launches in succession ran, and whether Triton searched for that of the second.
"""

import json
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from impl.kernels._triton.launch import launch


@triton.jit
def _kernel(out_ptr, flag_ptr, number, factor: tl.float64, BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    offsets = tl.arange(0, BLOCK) + number
    values = (tl.full([BLOCK], factor, tl.float64)).to(DTYPE)
    if flag_ptr is not None:
        values += tl.load(flag_ptr).to(DTYPE)
    tl.store(out_ptr + offsets, values.to(out_ptr.dtype.element_ty))


class _Run(NamedTuple):
    function: int
    device: int
    was_searched: bool
    arguments: tuple[Any, ...]


class _Driver:
    def __init__(self) -> None:
        self.device, self.runs, self._functions = 0, list[_Run](), 0
        self.utils = SimpleNamespace(
            load_binary=self._load, get_device_properties=lambda _: {"max_shared_mem": 1 << 18}
        )

    def _load(self, *_: Any) -> tuple[int, int, int, int, int]:
        self._functions += 1
        return 1, self._functions, 0, 0, 1024

    def launcher_cls(self, *_: Any) -> Callable[..., None]:
        def run(x: int, y: int, z: int, stream: int, function: int, *others: Any) -> None:
            assert (x, y, z, stream) == (3, 1, 1, 7 + self.device)
            self.runs.append(_Run(function, self.device, others[2] is not None, others[4:]))

        return run

    def get_current_device(self) -> int:
        return self.device

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_stream(self, device: int) -> int:
        return 7 + device


def _compared(stand_in: _Driver, *args: Any, block: int = 16, dtype: tl.dtype = tl.float32) -> dict[str, Any]:
    constants: dict[str, Any] = {"BLOCK": block, "DTYPE": dtype, "num_warps": 4}
    launch(_kernel, (3,), *args, **constants)
    launch(_kernel, (3,), *args, **constants)
    _kernel[(3,)](*args, **constants)
    first, second, by_triton = stand_in.runs[-3:]
    assert all(
        own_argument is tritons_argument
        for own_argument, tritons_argument in zip(second.arguments, by_triton.arguments, strict=True)
    )
    assert first.device == second.device == stand_in.device
    return {
        "functions": [by_triton.function, first.function, second.function],
        "was_searched": second.was_searched,
    }


def main() -> None:
    stand_in = _Driver()
    driver.set_active(stand_in)
    out, flag = torch.zeros(64), torch.zeros(1)
    cases = {
        "aligned": _compared(stand_in, out, flag, 32, 0.5),
        "another address": _compared(stand_in, out[16:], flag, 32, 0.5),
        "another number of its form": _compared(stand_in, out, flag, 48, 0.25),
        "a parameter": _compared(stand_in, torch.nn.Parameter(out), flag, 32, 0.5),
        "unaligned": _compared(stand_in, out[1:], flag, 32, 0.5),
        "aligned again": _compared(stand_in, out, flag, 32, 0.5),
        "an unaligned flag": _compared(stand_in, out, out[1:], 32, 0.5),
        "another dtype": _compared(stand_in, out.double(), flag, 32, 0.5),
        "None": _compared(stand_in, out, None, 32, 0.5),
        "an odd number": _compared(stand_in, out, flag, 33, 0.5),
        "one": _compared(stand_in, out, flag, 1, 0.5),
        "a wide number": _compared(stand_in, out, flag, 1 << 40, 0.5),
        "another constant": _compared(stand_in, out, flag, 32, 0.5, block=32),
        "a constant of another dtype": _compared(stand_in, out, flag, 32, 0.5, dtype=tl.float64),
        "a truth value": _compared(stand_in, out, flag, True, 0.5),
    }
    stand_in.device = 1
    cases["another device"] = _compared(stand_in, out, flag, 32, 0.5)
    hooked: list[Any] = []
    knobs.runtime.launch_enter_hook.add(hooked.append)
    cases["under a hook"] = _compared(stand_in, out, flag, 32, 0.5)
    json.dump(cases, sys.stdout)


if __name__ == "__main__":
    main()
