"""Save and load the state of a training: model, optimizer, and other stateful objects.

In the checkpoint everything has the name that it has in the unwrapped model: `model.<name>`,
`optimizer.state.<name>.<key>`, `optimizer.param_groups`, `others.<name>`.
"""

from __future__ import annotations

import copy
import os
import shutil
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.optim import Optimizer

from impl.distributed.fsdp._state_dict.consensus import gather_reports
from impl.distributed.fsdp._state_dict.methods import wrappers_in
from impl.distributed.fsdp._state_dict.optim_keys import OptimStateKeyType
from impl.distributed.fsdp._state_dict.optim_load import load_on_all_ranks
from impl.distributed.fsdp._state_dict.packing import shape_of
from impl.distributed.fsdp.api import StateDictType
from impl.distributed.fsdp.checkpoint.folders import begin, commit, resolve_checkpoint
from impl.distributed.fsdp.checkpoint.reading import LoadPlanner, Reader
from impl.distributed.fsdp.checkpoint.values import as_data, check_readable, optimizer_values_of
from impl.distributed.fsdp.fully_sharded_data_parallel import FullyShardedDataParallel

_Group = dist.ProcessGroup | None
_Entries = dict[str, Any]
_GROUPS = "optimizer.param_groups"
_STATES = "optimizer.state."
_COMPILED = "_orig_mod"  # attribute of torch.compile's wrapper for the wrapped module


class Stateful(Protocol):
    """Object that can be saved with the model, such as a GradScaler, a scheduler or a sampler."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: object, /) -> Any: ...


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    others: Mapping[str, Stateful] | None = None,
    process_group: _Group = None,
) -> None:
    """Write a checkpoint. It is complete or absent, whenever a rank is killed.

    An older checkpoint at `path` is kept until the new one is complete. Call this on all ranks with the same arguments;
    only one save of a name may run at a time.

    Args:
        path: a folder that all ranks can access, or a link to one. It must be a checkpoint or not exist.
        model: a model sharded by FullyShardedDataParallel or by `fully_shard`. Tensors that are not sharded are saved
            from the first rank, also if they differ between ranks like the buffers of BatchNorm. Extra states of
            modules may contain what `others` may contain.
        others: objects by names of your choice. Their states must be equal on all ranks, and contain only numbers,
            strings, tensors and containers of them.
        process_group: the ranks that take part, by default all.

    Raises:
        FileExistsError: `path` exists and is not a checkpoint.
        TypeError: a value could not be loaded again; see `others`.
        Exception: this rank's problem; on the others a RuntimeError that names it. `path` is unchanged.
    Collectives: those of sharded state dicts; of DCP, over objects; five of objects.
    """
    path, is_first = Path(path), dist.get_rank(process_group) == 0
    with _raise_on_all_ranks("save a checkpoint", process_group):
        states = {f"others.{name}": as_data(other.state_dict()) for name, other in (others or {}).items()}
        optimizer_values = {} if optimizer is None else as_data(optimizer_values_of(optimizer))
        check_readable(states | optimizer_values)
    with _raise_on_all_ranks("begin a checkpoint", process_group) as reported:
        reported.value = begin(path) if is_first else None
    folder = reported.by_rank[0]
    try:
        entries = _entries(model, optimizer, process_group) | states
        with _raise_on_all_ranks("save a checkpoint", process_group):
            check_readable({name: value for name, value in entries.items() if _is_extra_state(name, value)})
        with _explain_dcp_errors("write a checkpoint"):
            dcp.save(
                entries,
                storage_writer=dcp.FileSystemWriter(folder),
                # Flattening would turn every mapping into a dict, and its keys into strings.
                planner=dcp.DefaultSavePlanner(
                    flatten_state_dict=False, flatten_sharded_tensors=False, dedup_save_to_lowest_rank=True
                ),
                process_group=process_group,
            )
        with _raise_on_all_ranks("complete a checkpoint", process_group):
            if is_first:
                commit(folder, path)
    except BaseException:
        # Only this rank knows whether the error is its own. Others might remove a folder that is being renamed.
        if is_first:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    others: Mapping[str, Stateful] | None = None,
    process_group: _Group = None,
) -> None:
    """Load a checkpoint of `save`, on any number of ranks: into all objects, or into none.

    Args:
        path: the path that was passed to `save`, or a result of `latest`.
        model: a model with the same parameters. Other wrapping, also by torch.compile, or the other API, is allowed.
        optimizer: an optimizer of the same class and parameter groups. Without one, its saved state is not loaded.
        others: objects to load by name. Other saved names are not loaded.

    Raises:
        FileNotFoundError: there is no complete checkpoint.
        pickle.UnpicklingError: the checkpoint contains more than data; see `Reader`.
        RuntimeError, ValueError: wrong names or shapes, or a damaged file, on the rank that detects it; on the others a
            RuntimeError that names that rank. Nothing is changed on any rank.
    Collectives: those of sharded state dicts; of DCP, over objects; some of objects.
    """
    group, others = process_group, others or {}
    with _raise_on_all_ranks("find a checkpoint", group) as reported:
        reported.value = resolve_checkpoint(Path(path)) if dist.get_rank(group) == 0 else None
    reader = Reader(reported.by_rank[0])
    with _sharded_state_dicts(model):
        state = model.state_dict()
        names = {_unwrapped(name): name for name in state}
        parameters = {name: state[names[name]] for name in names}
        with _raise_on_all_ranks("read a checkpoint", group):
            metadata = reader.read_metadata()
            expected = _expected(metadata.state_dict_metadata, parameters, optimizer is not None, others)
        with _explain_dcp_errors("read a checkpoint"):
            dcp.load(
                expected,
                storage_reader=_ReaderWithMetadata(reader.path, metadata),
                planner=LoadPlanner(flatten_state_dict=False),
                process_group=group,
            )
        with _undone_on_error() as undo:
            for name, other in others.items():
                with _raise_on_all_ranks(f"load {name!r} of a checkpoint", group):
                    undo(other.load_state_dict, copy.deepcopy(other.state_dict()))
                    other.load_state_dict(expected[f"others.{name}"])
            if optimizer is not None:
                values = _optimizer_state(expected, parameters)
                values = _renamed(values, lambda name: names.get(name, name))
                # `load_state_dict` replaces these dicts.
                undo(
                    vars(optimizer).update, {"state": optimizer.state, "param_groups": optimizer.param_groups}
                )
                _load_optimizer(model, optimizer, values, group)
            # The last, because it changes everything or nothing, and so needs no undo.
            model.load_state_dict({names[name]: expected[f"model.{name}"] for name in names})


# Contents to write


def _entries(model: nn.Module, optimizer: Optimizer | None, group: _Group) -> _Entries:
    with _sharded_state_dicts(model):
        entries = {f"model.{_unwrapped(name)}": as_data(value) for name, value in model.state_dict().items()}
        if optimizer is not None:
            saved = _renamed(_state_by_name(model, optimizer, group), _unwrapped)
            for name, state in saved["state"].items():
                entries |= {f"{_STATES}{name}.{key}": as_data(value) for key, value in state.items()}
            entries[_GROUPS] = as_data(saved["param_groups"])
    return entries


def _unwrapped(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != _COMPILED)


def _renamed(state: _Entries, rename: Callable[[str], str]) -> _Entries:
    """Return an optimizer's state with other names of parameters."""
    return {
        "state": {rename(name): values for name, values in state["state"].items()},
        "param_groups": [
            {**group, "params": [rename(name) for name in group["params"]]} for group in state["param_groups"]
        ],
    }


def _is_extra_state(name: str, value: object) -> bool:
    return name.startswith("model.") and not isinstance(value, Tensor)


def _state_by_name(model: nn.Module, optimizer: Optimizer, group: _Group) -> _Entries:
    if wrappers_in(model):
        return FullyShardedDataParallel.optim_state_dict(model, optimizer, group=group)
    # The states of `fully_shard` are DTensors, which DCP saves as they are.
    return FullyShardedDataParallel.rekey_optim_state_dict(
        optimizer.state_dict(), OptimStateKeyType.PARAM_NAME, model, optim=optimizer
    )


def _load_optimizer(model: nn.Module, optimizer: Optimizer, state: _Entries, group: _Group) -> None:
    if wrappers_in(model):
        FullyShardedDataParallel.optim_state_dict_to_load(
            model, optimizer, state, load_directly=True, group=group
        )
        return
    numbered = FullyShardedDataParallel.rekey_optim_state_dict(
        state, OptimStateKeyType.PARAM_ID, model, optim=optimizer
    )
    load_on_all_ranks(optimizer, numbered, group)


# Contents to read


class _ReaderWithMetadata(Reader):
    """Reader that has read the metadata, which DCP requests on every rank."""

    def __init__(self, path: str | os.PathLike[str], metadata: Metadata) -> None:
        super().__init__(path)
        self._metadata = metadata

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        return self._metadata


def _expected(
    saved: Mapping[str, Any], parameters: _Entries, with_optimizer: bool, others: Mapping[str, Stateful]
) -> _Entries:
    """Return memory for all values to read, sharded like the model.

    Raises:
        RuntimeError: names that only the checkpoint or only the model has.
        ValueError: tensors of other shapes.
    """
    expected = {f"model.{name}": value for name, value in parameters.items()}
    needed = [*expected, *(f"others.{name}" for name in others), *([_GROUPS] if with_optimizer else [])]
    missing = [name for name in needed if name not in saved]
    unexpected = [name for name in saved if name.startswith("model.") and name not in expected]
    if missing or unexpected:
        raise RuntimeError(
            f"the checkpoint does not fit the model: it lacks {missing} and has the unexpected {unexpected}; load into "
            "the same model"
        )
    for name, value in expected.items():
        size = getattr(saved[name], "size", None)
        if isinstance(value, Tensor) and size != shape_of(value):
            raise ValueError(f"{name} was saved with the shape {size}, and the model's is {shape_of(value)}")
        expected[name] = _memory_for(saved[name], value)
    for name, metadata in saved.items():
        if with_optimizer and name.startswith("optimizer."):
            expected[name] = _memory_for(metadata, parameters.get(_place_of(name, parameters)[0]))
    return expected | {(key := f"others.{name}"): _memory_for(saved[key], None) for name in others}


def _memory_for(saved: object, parameter: object) -> Any:
    if not isinstance(saved, TensorStorageMetadata):
        return None  # the planner stores the value there
    dtype = saved.properties.dtype
    if not isinstance(parameter, Tensor) or saved.size != shape_of(parameter):
        return torch.empty(saved.size, dtype=dtype, device="cpu")
    if not isinstance(parameter, ShardedTensor):
        return torch.empty_like(parameter, dtype=dtype)
    shards = [
        Shard(torch.empty_like(shard.tensor, dtype=dtype), shard.metadata)
        for shard in parameter.local_shards()
    ]
    described = parameter.metadata()
    properties = replace(described.tensor_properties, dtype=dtype)
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        shards,
        sharded_tensor_metadata=replace(described, tensor_properties=properties),
        process_group=parameter._process_group,
    )


def _optimizer_state(entries: _Entries, parameters: _Entries) -> _Entries:
    state: dict[str, _Entries] = {}
    for name, value in entries.items():
        if name.startswith(_STATES):
            parameter, key = _place_of(name, parameters)
            state.setdefault(parameter, {})[key] = value
    return {"state": state, "param_groups": entries[_GROUPS]}


def _place_of(entry: str, parameters: _Entries) -> tuple[str, str]:
    """Return the parameter and the key of an entry of the optimizer's state. The key may contain dots."""
    words = entry.removeprefix(_STATES).split(".")
    ends = range(1, len(words))
    end = next((end for end in ends if ".".join(words[:end]) in parameters), len(words) - 1)
    return ".".join(words[:end]), ".".join(words[end:])


# All ranks or none


class _Reports:
    """Report of this rank at the end of a block, and then the reports of all ranks."""

    value: Any = None
    by_rank: list[Any]


@contextmanager
def _raise_on_all_ranks(action: str, group: _Group) -> Generator[_Reports]:
    """Raise on all ranks of the group if the block raises on one of them."""
    reported = _Reports()
    problem: Exception | None = None
    try:
        yield reported
    except Exception as error:
        problem = error
    reported.by_rank = gather_reports(problem, group, reported.value, action)


@contextmanager
def _explain_dcp_errors(action: str) -> Generator[None]:
    """Raise a RuntimeError that explains DCP's error, which is not an Exception and names no cause."""
    try:
        yield
    except dcp.CheckpointException as error:
        rank, (problem, _) = min(error.failures.items())
        raise RuntimeError(
            f"rank {rank} cannot {action}: {type(problem).__name__}: {problem}. Nothing was changed on any rank"
        ) from error


@contextmanager
def _undone_on_error() -> Generator[Callable[..., Any]]:
    with ExitStack() as stack:
        yield stack.callback
        stack.pop_all()


@contextmanager
def _sharded_state_dicts(model: nn.Module) -> Generator[None]:
    with warnings.catch_warnings():
        # Ignore torch's deprecation warnings, and its warning that units without sharding have unsharded tensors.
        warnings.filterwarnings(
            "ignore", message=r"FSDP\.state_dict_type|Please use DTensor|When using ``NO_SHARD``"
        )
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            yield
