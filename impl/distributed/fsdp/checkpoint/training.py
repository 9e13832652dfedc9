"""What a training is resumed from: the model's parameters and buffers, its optimizer's state, and whatever else.

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

from impl.distributed.fsdp._state_dict.agreeing import reported_by_all
from impl.distributed.fsdp._state_dict.packing import shape_of
from impl.distributed.fsdp.api import StateDictType
from impl.distributed.fsdp.checkpoint.folders import begin, commit, standing
from impl.distributed.fsdp.checkpoint.reading import LoadPlanner, Reader
from impl.distributed.fsdp.checkpoint.values import as_data, of_optimizer, refuse_unreadable
from impl.distributed.fsdp.fully_sharded_data_parallel import FullyShardedDataParallel

_Group = dist.ProcessGroup | None
_Entries = dict[str, Any]
_GROUPS = "optimizer.param_groups"
_STATES = "optimizer.state."


class Stateful(Protocol):
    """What can be saved beside the model: a GradScaler, a scheduler, a sampler."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    others: Mapping[str, Stateful] | None = None,
    process_group: _Group = None,
) -> None:
    """Write a checkpoint, which is complete or not there at whatever moment anybody is killed.

    An older checkpoint at `path` stands until the new one is complete. To be called on all ranks alike; one save of a
    name at a time.

    Args:
        path: a folder that all ranks see, or a link to one; what is there must be a checkpoint, or nothing.
        model: any module with FullyShardedDataParallel at or below it. Of buffers that differ by rank, as those of
            BatchNorm do, and of parameters that no unit manages, the first rank's are saved.
        others: by names of your own; what they have is the same on all ranks, made of numbers, strings, tensors and
            containers of them.
        process_group: the ranks that take part, by default all.

    Raises:
        FileExistsError: at `path` is something else.
        TypeError: something could not be loaded again; see `others`.
        Exception: this rank's problem; on the others a RuntimeError that names it. What stood at `path` still stands.
    Collectives: those of sharded state dicts; of DCP, over objects; four of objects.
    """
    path, is_first = Path(path), dist.get_rank(process_group) == 0
    with _together("save a checkpoint", process_group):
        states = {f"others.{name}": as_data(other.state_dict()) for name, other in (others or {}).items()}
        kept = {} if optimizer is None else as_data(of_optimizer(optimizer))
        refuse_unreadable(states | kept)
    with _together("begin a checkpoint", process_group) as reported:
        reported.value = begin(path) if is_first else None
    folder = reported.by_rank[0]
    try:
        entries = _entries(model, optimizer, process_group) | states
        with _by_dcp("write a checkpoint"):
            dcp.save(
                entries,
                storage_writer=dcp.FileSystemWriter(folder),
                # Flattening makes a dict of every mapping, and of its keys strings.
                planner=dcp.DefaultSavePlanner(
                    flatten_state_dict=False, flatten_sharded_tensors=False, dedup_save_to_lowest_rank=True
                ),
                process_group=process_group,
            )
        with _together("complete a checkpoint", process_group):
            if is_first:
                commit(folder, path)
    except BaseException:
        if is_first:  # whoever else knew of an error might take away what is being renamed
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
    """Load what `save` has written, on as many ranks as there are, into everything or into nothing.

    Args:
        path: as given to `save`, or found by `latest`.
        model: of the same parameters, wrapped in whatever way.
        optimizer: of the same kind, over the same groups of parameters; without one, what was saved of one is left.
        others: the names to load; what was saved under other names is left.

    Raises:
        FileNotFoundError: there is no complete checkpoint.
        pickle.UnpicklingError: it asks for more than data; see `Reader`.
        RuntimeError, ValueError: names, shapes or a damaged file, on the rank that sees it; on the others a
            RuntimeError that names that rank. Nothing is changed on any.
    Collectives: those of sharded state dicts; of DCP, over objects; some of objects.
    """
    group, others = process_group, others or {}
    with _together("find a checkpoint", group) as reported:
        reported.value = standing(Path(path)) if dist.get_rank(group) == 0 else None
    reader = Reader(reported.by_rank[0])
    with _sharded_state_dicts(model):
        parameters = model.state_dict()
        with _together("read a checkpoint", group):
            metadata = reader.read_metadata()
            expected = _expected(metadata.state_dict_metadata, parameters, optimizer is not None, others)
        with _by_dcp("read a checkpoint"):
            dcp.load(
                expected,
                storage_reader=_Acquainted(reader.path, metadata),
                planner=LoadPlanner(flatten_state_dict=False),
                process_group=group,
            )
        with _undone_on_error() as undo:
            for name, other in others.items():
                with _together(f"load {name!r} of a checkpoint", group):
                    undo(other.load_state_dict, copy.deepcopy(other.state_dict()))
                    other.load_state_dict(expected[f"others.{name}"])
            if optimizer is not None:
                given = _optimizer_state(expected, parameters)
                # Loading puts other dicts in the place of these.
                undo(
                    vars(optimizer).update, {"state": optimizer.state, "param_groups": optimizer.param_groups}
                )
                FullyShardedDataParallel.optim_state_dict_to_load(
                    model, optimizer, given, load_directly=True, group=group
                )
            model.load_state_dict({name: expected[f"model.{name}"] for name in parameters})


# What is written


def _entries(model: nn.Module, optimizer: Optimizer | None, group: _Group) -> _Entries:
    with _sharded_state_dicts(model):
        entries = {f"model.{name}": value for name, value in model.state_dict().items()}
        if optimizer is not None:
            saved = FullyShardedDataParallel.optim_state_dict(model, optimizer, group=group)
            for name, state in saved["state"].items():
                entries |= {f"{_STATES}{name}.{key}": as_data(value) for key, value in state.items()}
            entries[_GROUPS] = as_data(saved["param_groups"])
    return entries


# What is read


class _Acquainted(Reader):
    """Has read the metadata, for which DCP asks on every rank."""

    def __init__(self, path: str | os.PathLike[str], metadata: Metadata) -> None:
        super().__init__(path)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata


def _expected(
    saved: Mapping[str, Any], parameters: _Entries, with_optimizer: bool, others: Mapping[str, Stateful]
) -> _Entries:
    """Memory for all that shall be read, laid out on the ranks as the model is.

    Raises:
        RuntimeError: names that one side has and the other has not.
        ValueError: tensors of other shapes.
    """
    expected = {f"model.{name}": value for name, value in parameters.items()}
    needed = [*expected, *(f"others.{name}" for name in others), *([_GROUPS] if with_optimizer else [])]
    missing = [name for name in needed if name not in saved]
    unexpected = [name for name in saved if name.startswith("model.") and name not in expected]
    if missing or unexpected:
        raise RuntimeError(
            f"the checkpoint and the model are not alike: it lacks {missing}, and has {unexpected} beside; load into "
            "what was saved"
        )
    for name, value in expected.items():
        size = getattr(saved[name], "size", None)
        if isinstance(value, Tensor) and size != shape_of(value):
            raise ValueError(f"{name} was saved with the shape {size}, and the model's is {shape_of(value)}")
        expected[name] = _memory_for(saved[name], value)
    for name, what in saved.items():
        if with_optimizer and name.startswith("optimizer."):
            expected[name] = _memory_for(what, parameters.get(_place_of(name, parameters)[0]))
    return expected | {(key := f"others.{name}"): _memory_for(saved[key], None) for name in others}


def _memory_for(saved: Any, parameter: Any) -> Any:
    if not isinstance(saved, TensorStorageMetadata):
        return None  # the planner puts the value there
    dtype = saved.properties.dtype
    if not isinstance(parameter, Tensor) or saved.size != shape_of(parameter):
        return torch.empty(saved.size, dtype=dtype, device="cpu")
    if not isinstance(parameter, ShardedTensor):
        return torch.empty_like(parameter, dtype=dtype)
    shards = [
        Shard(torch.empty_like(one.tensor, dtype=dtype), one.metadata) for one in parameter.local_shards()
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
    """The parameter whose state an entry is of, and what the optimizer calls it, in which there may be dots too."""
    words = entry.removeprefix(_STATES).split(".")
    cuts = range(1, len(words))
    cut = next((cut for cut in cuts if ".".join(words[:cut]) in parameters), len(words) - 1)
    return ".".join(words[:cut]), ".".join(words[cut:])


# All ranks or none


class _Reports:
    """What this rank tells the others at the end of a block, and then what all of them told."""

    value: Any = None
    by_rank: list[Any]


@contextmanager
def _together(doing: str, group: _Group) -> Generator[_Reports]:
    """Raise on all ranks of the group if the block raises on one."""
    reported = _Reports()
    problem: Exception | None = None
    try:
        yield reported
    except Exception as error:
        problem = error
    reported.by_rank = reported_by_all(problem, group, reported.value, doing)


@contextmanager
def _by_dcp(doing: str) -> Generator[None]:
    """What DCP raises, on all ranks, is no Exception and does not say what happened."""
    try:
        yield
    except dcp.CheckpointException as error:
        rank, (problem, _) = min(error.failures.items())
        raise RuntimeError(
            f"rank {rank} cannot {doing}: {type(problem).__name__}: {problem}. Nothing was changed on any rank"
        ) from error


@contextmanager
def _undone_on_error() -> Generator[Callable[..., Any]]:
    with ExitStack() as stack:
        yield stack.callback
        stack.pop_all()


@contextmanager
def _sharded_state_dicts(model: nn.Module) -> Generator[None]:
    with warnings.catch_warnings():
        # Of what torch advises against, and that units without sharding have unsharded tensors.
        warnings.filterwarnings(
            "ignore", message=r"FSDP\.state_dict_type|Please use DTensor|When using ``NO_SHARD``"
        )
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            yield
