"""Certificates of training runs: hashes of everything that a step changes, for comparison with other runs.

Each rank writes a file of JSON lines. A hash is a sum over elements, each mixed with its index in the unsharded tensor.
The hashes of shards therefore add up to that of the tensor, for any number of ranks and without communication. There is
also a sketch: a few random sums, from which the norm of the difference of two tensors can be estimated.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

SKETCH_SIZE = 16
_CHUNK = 1 << 22  # elements hashed at once
_WRAPPERS = {"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"}
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class RunRecorder:
    """Writes the certificate of a run. Every rank makes one and calls `record` at the same points.

    >>> import tempfile, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> recorder = RunRecorder(tempfile.mkdtemp(), model, optimizer)
    >>> model(torch.ones(1, 2)).sum().backward()
    >>> recorder.record("backward")
    >>> optimizer.step()
    >>> recorder.record("step")
    """

    def __init__(
        self,
        folder: str | Path,
        model: nn.Module,
        optimizers: Optimizer | Iterable[Optimizer] = (),
        scaler: Any = None,
        *,
        precision: torch.dtype | None = None,
        first_step: int = 0,
    ) -> None:
        """Start a certificate.

        Args:
            folder: one for each run. It may be shared by the ranks.
            model: plain, FullyShardedDataParallel or `fully_shard`, also compiled or with such modules inside. It names
                the parameters of the optimizers.
            scaler: anything with a `state_dict` of numbers.
            precision: lowest dtype in which the run computes, such as autocast's. A comparison uses it to decide
                whether rounding explains a difference. Default: the dtype of each tensor.
            first_step: number of the first step. A resumed run keeps the records of earlier steps in `folder`.
        """
        self._model = _unwrapped(model)
        # FullyShardedDataParallel of torch or another library, if the model or a module in it is one.
        self._sharded: Any = next(
            (m for m in self._model.modules() if hasattr(m, "summon_full_params")), None
        )
        self._optimizers = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
        self._scaler = scaler
        self._first_step = first_step
        self._steps: dict[str, int] = {}
        in_group = dist.is_initialized()
        rank = dist.get_rank() if in_group else 0
        header = {
            "world_size": dist.get_world_size() if in_group else 1,
            "precision": precision and str(precision).removeprefix("torch."),
            "torch": str(torch.__version__),
            "threads": torch.get_num_threads(),
            # Gradients of flat parameters have no names.
            "has_gradients": getattr(self._sharded, "_use_orig_params", True),
        }
        self._file = Path(folder) / f"rank-{rank}.jsonl"
        self._file.parent.mkdir(parents=True, exist_ok=True)
        earlier = self._file.read_text().splitlines()[1:] if first_step and self._file.exists() else []
        older = [line for line in earlier if line.endswith("}") and json.loads(line)["step"] < first_step]
        self._file.write_text("".join(f"{line}\n" for line in [json.dumps(header), *older]))

    def record(self, phase: str, **values: Tensor) -> None:
        """Record all parameters, gradients, states of optimizers, the scaler, random states and `values`.

        Args:
            phase: any name. The n-th call with a name belongs to step `first_step` + n, counted from 0.
            values: tensors of this rank, such as its loss. Other ranks may have different ones.

        Sync: the device. Collectives: for FullyShardedDataParallel, those of `summon_full_params` and
            `optim_state_dict`; for partial and strided DTensors, those of `full_tensor`; otherwise none.
        """
        step = self._steps.get(phase, self._first_step)
        self._steps[phase] = step + 1
        with torch.no_grad():
            tensors = {name: _described(value) for name, value in self._tensors()}
        own = {**_random_states(), **values}
        record = {
            "step": step,
            "phase": phase,
            "tensors": tensors,
            "of_rank": {name: _described(value) for name, value in own.items()},
            "scaler": {} if self._scaler is None else self._scaler.state_dict(),
        }
        with self._file.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        with contextlib.nullcontext() if self._sharded is None else self._unsharded():
            for name, parameter in self._model.named_parameters():
                yield f"parameter {_clean(name)}", parameter
                if parameter.grad is not None:
                    yield f"gradient of {_clean(name)}", parameter.grad
            for name, buffer in self._model.named_buffers():
                yield f"buffer {_clean(name)}", buffer
        names = {parameter: _clean(name) for name, parameter in self._model.named_parameters()}
        for number, optimizer in enumerate(self._optimizers):
            of = f" of optimizer {number}" if len(self._optimizers) > 1 else ""
            states = _states(optimizer, names) if self._sharded is None else self._unsharded_states(optimizer)
            for name, state in states:
                for key, value in state.items():
                    if isinstance(value, int | float | Tensor):
                        yield f"{key} of {name}{of}", torch.as_tensor(value)

    def _unsharded(self) -> contextlib.AbstractContextManager[Any]:
        has_gradients = self._sharded._use_orig_params
        return type(self._sharded).summon_full_params(self._model, writeback=False, with_grads=has_gradients)

    def _unsharded_states(self, optimizer: Optimizer) -> Iterable[tuple[str, Mapping[str, Any]]]:
        """Return the states of FullyShardedDataParallel, on rank 0."""
        return type(self._sharded).optim_state_dict(self._model, optimizer)["state"].items()


def _unwrapped(model: nn.Module) -> nn.Module:
    """Return the module in DistributedDataParallel and torch.compile."""
    while isinstance(model, DistributedDataParallel) or hasattr(model, "_orig_mod"):
        inner: Any = model.module if isinstance(model, DistributedDataParallel) else model._orig_mod
        model = inner
    return model


def _states(optimizer: Optimizer, names: Mapping[Tensor, str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    listed = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in enumerate(listed):
        yield names.get(parameter, f"parameter {number}"), optimizer.state.get(parameter, {})


def _random_states() -> dict[str, Tensor]:
    states = {"random state of the CPU": torch.get_rng_state()}
    if torch.accelerator.is_available():
        device = torch.get_device_module(torch.accelerator.current_accelerator())
        states["random state of the device"] = device.get_rng_state()
    return states


def _clean(name: str) -> str:
    """Return a parameter's name without the modules that wrappers insert."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _described(tensor: Tensor) -> dict[str, Any]:
    """Return the entry of a tensor in a record. For a DTensor it describes the local part."""
    tensor = tensor.detach()
    shape = list(tensor.shape)
    indices: list[Tensor] | None = None
    if isinstance(tensor, DTensor):
        if all(type(placement) in (Shard, Replicate) for placement in tensor.placements):
            indices = _indices(tensor)
            tensor = tensor.to_local()
        else:
            tensor = tensor.full_tensor()
    digest, sketch, nonfinite = summarize(tensor, shape, indices)
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": shape,
        "part": None if indices is None else [_ranges(index) for index in indices],
        "elements": tensor.numel(),
        "hash": f"{digest:016x}",
        "sketch": sketch,
        "nonfinite": nonfinite,
    }


def _indices(tensor: DTensor) -> list[Tensor]:
    """Return for each dimension which indices of the unsharded tensor this rank has."""
    indices = [torch.arange(size) for size in tensor.shape]
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return [index[:0] for index in indices]
    for place, size, placement in zip(coordinate, tensor.device_mesh.shape, tensor.placements, strict=True):
        if isinstance(placement, Shard):
            chunks = indices[placement.dim].chunk(size)
            indices[placement.dim] = chunks[place] if place < len(chunks) else indices[placement.dim][:0]
    return indices


def _ranges(index: Tensor) -> list[int]:
    """Return the first index and the number of indices. Chunks are contiguous."""
    return [int(index[0]) if len(index) else 0, len(index)]


def summarize(
    tensor: Tensor, shape: Iterable[int], indices: list[Tensor] | None = None
) -> tuple[int, list[float], int]:
    """Return the hash, the sketch and the number of nonfinite elements of a tensor or of a part of it.

    Args:
        shape: of the unsharded tensor.
        indices: for each dimension, which indices of the unsharded tensor the part has. None: all of them.
    """
    if tensor.device.type not in ("cpu", "cuda"):
        tensor = tensor.cpu()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    tensor = tensor.resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
        shape = [*shape, 2]
        indices = None if indices is None else [*indices, torch.arange(2)]
    flat = tensor.contiguous().flatten()
    positions = _positions(list(shape), indices, flat.device)
    digest, nonfinite = 0, 0
    sketch = torch.zeros(SKETCH_SIZE, dtype=torch.float64, device=flat.device)
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK]
        mixed = _mix(positions(start, part.numel()))
        bits = part.view(_INTEGERS[part.element_size()]).long()
        digest = (digest + int(_mix(bits ^ mixed).sum())) % 2**64
        values = part.double()
        nonfinite += part.numel() - int(values.isfinite().sum())
        values = values.nan_to_num(0.0, 0.0, 0.0)
        signs = 1.0 - 2.0 * ((mixed >> 8) & 1)
        sketch.index_add_(0, mixed & (SKETCH_SIZE - 1), signs * values)
    return digest, sketch.tolist(), nonfinite


def _positions(
    shape: list[int], indices: list[Tensor] | None, device: torch.device
) -> Callable[[int, int], Tensor]:
    """Return a function from a range of a part's elements to their positions in the unsharded tensor."""
    if indices is None:
        return lambda start, count: torch.arange(start, start + count, device=device)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    position = torch.zeros((), dtype=torch.int64, device=device)
    for index, stride in zip(indices, strides, strict=True):
        position = position.unsqueeze(-1) + index.to(device) * stride
    flat = position.flatten()
    return lambda start, count: flat[start : start + count]


def _mix(values: Tensor) -> Tensor:
    """Return a 64-bit hash of each integer. Products wrap around."""
    values = values * -7046029254386353131  # odd, about 2**64 divided by the golden ratio
    values = (values ^ _shifted(values, 30)) * -4658895280553007687
    values = (values ^ _shifted(values, 27)) * -7723592293110705685
    return values ^ _shifted(values, 31)


def _shifted(values: Tensor, by: int) -> Tensor:
    return (values >> by) & ((1 << (64 - by)) - 1)  # logical, not arithmetic
