"""Bandwidth of kernels with other chunk sizes, block sizes and numbers of warps.

The norm's second kernel, which combines the partials of all chunks in one program, has other block sizes and warps.

It runs only if it is named, because it takes minutes and changes the kernels of its process.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec

from torch import Tensor

from benchmarks.common import TrainingTensors
from conformance.gpu.bandwidth import bandwidth_in_words, calls_on, device_seconds
from conformance.gpu.phase_rows import PhaseTask, Rows, in_words, serve
from impl import kernels

Launch = tuple[int, int, int]  # elements of a chunk, elements of a block, warps
CALLS = ("unscale_", "total_norm 2", "fused_step_ AdamW")
FINISH = "finish of total_norm 2"  # the time is that of both kernels
_SHAPES, _DTYPES = "gpt2", ("float32", "bfloat16")
_CHUNKS, _BLOCKS, _WARPS = (8_192, 32_768), (1_024, 2_048, 4_096), (4, 8)
_FINISHES = ((1_024, 4), (4_096, 8), (4_096, 16), (8_192, 16), (8_192, 32), (16_384, 32))


def work(task: PhaseTask, rows: Rows) -> None:
    todo = list(itertools.product(_DTYPES, _CHUNKS))
    rows.plan(name_of(call, dtype, launch) for dtype, chunk in todo for call, launch in _measured(chunk))
    # Tables are cached by address, so each chunk size needs its own tensors, which stay alive here.
    held: list[Tensor] = []
    for dtype, chunk in todo:
        if rows.left_s <= 0:
            return
        if task.device != "cuda" or find_spec("triton") is None:
            for call, launch in _measured(chunk):
                rows.add(name_of(call, dtype, launch), "not available", "needs CUDA and Triton")
            continue
        params = TrainingTensors(_SHAPES, dtype, task.device).parameters
        grads = [param.grad for param in params if param.grad is not None]
        held += grads
        _measure(rows, grads, dtype, chunk)


def _measured(chunk: int) -> list[tuple[str, Launch]]:
    measured = [(call, (chunk, *launch)) for launch in itertools.product(_BLOCKS, _WARPS) for call in CALLS]
    return [*measured, *((FINISH, (chunk, *launch)) for launch in _FINISHES)]


def name_of(call: str, dtype: str, launch: Launch) -> str:
    chunk, block, warps = launch
    return f"{call} {dtype}, chunk {chunk}, block {block}, {warps} warps"


def _measure(rows: Rows, grads: Sequence[Tensor], dtype: str, chunk: int) -> None:
    calls, once = calls_on(list(grads)), sum(grad.nbytes for grad in grads)
    calls[FINISH] = calls["total_norm 2"]
    for call, launch in _measured(chunk):
        if rows.left_s <= 0:
            return
        times, function = calls[call]
        about = {"call": call, "dtype": dtype, "launch": launch, "bytes": times * once}
        try:
            with launched_by(*launch, is_finish=call == FINISH), kernels.backend("triton"):
                took_s = device_seconds(function, "cuda")
        except Exception as error:  # a block may be too large for the device
            rows.add(name_of(call, dtype, launch), "not available", in_words(error), **about)
        else:
            says = bandwidth_in_words(times * once, took_s)
            rows.add(name_of(call, dtype, launch), "measured", says, seconds=took_s, **about)


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
