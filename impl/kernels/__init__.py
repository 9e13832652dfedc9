"""Multi-tensor kernels: unscale, norm, scale, clamp, an optimizer's update, scale update.

A `TensorList` is not empty and holds dense tensors on one device, of mixed sizes and dtypes. No function here tracks
gradients. Each file has one operation: the public function, torch's operators as the reference, and the CPU's fast
path. The Triton kernel and its launcher are in `_triton/` under the same name, so that Triton is only imported where it
runs. `_native/` has the CPU library.

The kernels were tested in Triton's interpreter, by the machine code compiled ahead of time for sm_80, sm_90 and sm_100,
and on one H100 (`docs/coverage.md`). While a CUDA graph is captured, torch's operators do all operations.

Cost for N f32 elements, launches counted on CUDA:

| | bytes an element | launches |
|---|---|---|
| `unscale_`, `unscale_by_` | 8 | 1 |
| `total_norm` | 4 | 2 |
| `checked_norm`, `step_numbers` | 4 | 2, and one more for the norm of each tensor |
| `scale_` | 8, or 0 if the factor is 1 | 1 |
| `clip_` | 8, or 0 if the factor is 1 | 1 |
| `clamp_` | 8 | 1 |
| `update_scale_` | 20 in all | 1 |
| `fused_step_` with AdamW | 28 on the CPU and by Triton, 36 elsewhere | 1; else torch's, and one to scale copies |
| `nonfinite_counts` | about 8, on demand | 4 a tensor |
"""

from impl.kernels._by_dtype import foreach_slices, may_share_memory
from impl.kernels._copies import (
    HostCopy,
    copy_into_,
    copy_to_host_async,
    has_host_copies,
    is_capturing,
    keep_for_current_stream,
    to_device,
)
from impl.kernels._decorators import dynamo_disable, no_grad_fast
from impl.kernels._dispatch import backend, flag_if_free_to_read, is_transformed
from impl.kernels._kept_layouts import keep_layout, recognize_layout, tensor_guards
from impl.kernels._lists import (
    KERNEL_DTYPES,
    PLAIN_TYPES,
    are_on,
    dtypes_of,
    has_nested,
    is_plain_strided,
    layouts_of,
)
from impl.kernels._native import chunk_power
from impl.kernels._native.fused_step import KnownPlaces
from impl.kernels._native.memory import Addresses, ListLayout, TensorList, concat, list_layout
from impl.kernels._native.norm import ChunkSquares
from impl.kernels._parameters import Parameters
from impl.kernels._spans import is_profiled, span
from impl.kernels._storage_order import OVERLAP, match_layout, overlaps_itself
from impl.kernels.checked_norm import StepNumbers, checked_norm, step_numbers
from impl.kernels.clamp import clamp_
from impl.kernels.fused_step import NATIVE, UpdateBackend, fused_step_
from impl.kernels.norm import total_norm
from impl.kernels.rules import NARROW_STATES, RULES, Rule
from impl.kernels.scale import clip_, clip_coefficient, scale_
from impl.kernels.scale_update import update_scale_
from impl.kernels.unscale import inverse, nonfinite_counts, unscale_, unscale_by_
from impl.kernels.update_ahead import UpdateAhead, squares_of_chunks

__all__ = [
    "KERNEL_DTYPES",
    "NARROW_STATES",
    "NATIVE",
    "OVERLAP",
    "PLAIN_TYPES",
    "RULES",
    "Addresses",
    "ChunkSquares",
    "HostCopy",
    "KnownPlaces",
    "ListLayout",
    "Parameters",
    "Rule",
    "StepNumbers",
    "TensorList",
    "UpdateAhead",
    "UpdateBackend",
    "are_on",
    "backend",
    "checked_norm",
    "chunk_power",
    "clamp_",
    "clip_",
    "clip_coefficient",
    "concat",
    "copy_into_",
    "copy_to_host_async",
    "dtypes_of",
    "dynamo_disable",
    "flag_if_free_to_read",
    "foreach_slices",
    "fused_step_",
    "has_host_copies",
    "has_nested",
    "inverse",
    "is_capturing",
    "is_plain_strided",
    "is_profiled",
    "is_transformed",
    "keep_for_current_stream",
    "keep_layout",
    "layouts_of",
    "list_layout",
    "match_layout",
    "may_share_memory",
    "no_grad_fast",
    "nonfinite_counts",
    "overlaps_itself",
    "recognize_layout",
    "scale_",
    "span",
    "squares_of_chunks",
    "step_numbers",
    "tensor_guards",
    "to_device",
    "total_norm",
    "unscale_",
    "unscale_by_",
    "update_scale_",
]
