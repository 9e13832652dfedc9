"""Bandwidth of kernels with other chunk sizes, block sizes and numbers of warps.

The norm's second kernel, which combines the partials of all chunks in one program, has other block sizes and warps.

It runs only if it is named, because it takes minutes and changes the kernels of its process.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from importlib.util import find_spec

from torch import Tensor

from benchmarks.common import TrainingTensors
from conformance.gpu.bandwidth import bandwidth_in_words, calls_on, device_seconds
from conformance.gpu.phase_rows import PhaseTask, Result, Rows, in_words, serve
from impl import kernels

Launch = tuple[int, int, int]  # elements of a chunk, elements of a block, warps
CALLS = ("unscale_", "total_norm 2", "fused_step_ AdamW")
FINISH = "finish of total_norm 2"  # the time is that of both kernels
_SHAPES, _DTYPES = "gpt2", ("float32", "bfloat16")
_CHUNKS, _BLOCKS, _WARPS = (8_192, 32_768), (1_024, 2_048, 4_096), (4, 8)
_FINISHES = ((1_024, 4), (4_096, 8), (4_096, 16), (8_192, 16), (8_192, 32), (16_384, 32))
# Calls with the block size and the number of warps of each launch.
_LAUNCHES = [
    *((call, launch) for launch in itertools.product(_BLOCKS, _WARPS) for call in CALLS),
    *((FINISH, launch) for launch in _FINISHES),
]


def work(task: PhaseTask, rows: Rows) -> None:
    rows.run(
        {
            f"{call} {dtype}, chunk {chunk}, block {block}, {warps} warps": partial(
                _measured, call, dtype, (chunk, block, warps), task.device
            )
            for dtype, chunk in itertools.product(_DTYPES, _CHUNKS)
            for call, (block, warps) in _LAUNCHES
        }
    )


def _measured(call: str, dtype: str, launch: Launch, device: str) -> Result:
    if device != "cuda" or find_spec("triton") is None:
        raise NotImplementedError("needs CUDA and Triton")
    chunk, block, warps = launch
    grads = _grads(dtype, chunk)
    times, function = calls_on(grads)["total_norm 2" if call == FINISH else call]
    try:
        with launched_by(chunk, block, warps, is_finish=call == FINISH), kernels.backend("triton"):
            took_s = device_seconds(function, device)
    except Exception as error:
        raise NotImplementedError(in_words(error)) from error  # a block may be too large for the device
    moved_bytes = times * sum(grad.nbytes for grad in grads)
    about = {"call": call, "dtype": dtype, "launch": launch, "bytes": moved_bytes, "seconds": took_s}
    return "measured", bandwidth_in_words(moved_bytes, took_s), about


@cache
def _grads(dtype: str, chunk: int) -> list[Tensor]:
    """Return tensors that stay alive, because tables are cached by address and each chunk size needs its own."""
    parameters = TrainingTensors(_SHAPES, dtype, "cuda").parameters
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


@contextmanager
def launched_by(chunk: int, block: int, warps: int, *, is_finish: bool = False) -> Iterator[None]:
    """Context manager that launches kernels over a table with other chunks, blocks and numbers of warps.

    If `is_finish`, block and warps are those of the norm's second kernel.
    """
    from impl.kernels import _table  # noqa: PLC0415  the kernels need Triton
    from impl.kernels._triton import chunk as chunk_kernels  # noqa: PLC0415
    from impl.kernels._triton import norm as norm_kernels  # noqa: PLC0415
    from impl.kernels._triton import update as update_kernels  # noqa: PLC0415

    changed = {"CHUNK": chunk, "BLOCK": block, "num_warps": warps}
    options = [chunk_kernels.LAUNCH, update_kernels.LAUNCH]
    if is_finish:
        options = [norm_kernels.FINISH_SHAPE, norm_kernels.FINISH_OPTIONS]
    options_before, chunk_before = [dict(launch_options) for launch_options in options], _table.CHUNK
    _table.CHUNK = chunk
    for launch_options in options:
        launch_options.update({name: value for name, value in changed.items() if name in launch_options})
    try:
        yield
    finally:
        _table.CHUNK = chunk_before
        for launch_options, before in zip(options, options_before, strict=True):
            launch_options.update(before)


if __name__ == "__main__":
    serve(work)
