"""Reader of DCP's files. A pickle in them may only name the classes of a checkpoint."""

from __future__ import annotations

import io
import os
import pathlib
import pickle
import zipfile
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, Metadata
from torch.distributed.checkpoint import filesystem as files
from torch.distributed.checkpoint import metadata as records
from torch.distributed.checkpoint.planner import ReadItem

_RECORDS = (
    records.BytesStorageMetadata,
    records.ChunkStorageMetadata,
    records.Metadata,
    records.MetadataIndex,
    records.StorageMeta,
    records.TensorProperties,
    records.TensorStorageMetadata,
    records._MEM_FORMAT_ENCODING,
    files._StorageInfo,
)


class _UnsupportedMetadata(pickle.UnpicklingError):
    """Raised for valid metadata that names a class which no checkpoint contains."""


def _member(of: object, name: str) -> records._MEM_FORMAT_ENCODING:
    """Return a member of an enumeration, which Python 3.11.0 to 3.11.3 write as a call of `getattr`."""
    if of is not records._MEM_FORMAT_ENCODING:
        raise _UnsupportedMetadata(
            f"the checkpoint's metadata refers to {name} of {of}, which checkpoints never contain; no code was executed"
        )
    return records._MEM_FORMAT_ENCODING[name]


_ALLOWED: dict[tuple[str, str], Any] = {
    (record.__module__, record.__qualname__): record for record in _RECORDS
} | {
    ("builtins", "getattr"): _member,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    # A path is only a name. The place of a file that is read is checked.
    ("pathlib", "PosixPath"): pathlib.PurePosixPath,
    ("pathlib", "WindowsPath"): pathlib.PureWindowsPath,
    ("pathlib._local", "PosixPath"): pathlib.PurePosixPath,
    ("pathlib._local", "WindowsPath"): pathlib.PureWindowsPath,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        allowed = _ALLOWED.get((module, name))
        dtype = getattr(torch, name, None) if module == "torch" else None
        if allowed is None and not isinstance(dtype, torch.dtype):
            raise _UnsupportedMetadata(
                f"the checkpoint's metadata refers to {module}.{name}, which checkpoints never contain; no code was "
                "executed. If you trust its author, torch.distributed.checkpoint.load would execute it"
            )
        return allowed or dtype


class Reader(FileSystemReader):
    """StorageReader for a folder that DCP has written.

    Raises, when it is read:
        pickle.UnpicklingError: the metadata is invalid, or names other classes than those of metadata.
        ValueError: the metadata refers to a file outside the folder, or a value has another checksum than was written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        self._intact: set[tuple[str, int]] = set()  # files and offsets that were found intact

    def read_metadata(self, *args: object, **kwargs: Any) -> Metadata:
        path = self._get_metadata_path(kwargs.get("rank"))
        with self.fs.create_stream(path, "rb") as stream:
            metadata = _unpickled(stream.read(), path)
        for place in metadata.storage_data.values():
            name = pathlib.PurePath(place.relative_path)
            if name.is_absolute() or ".." in name.parts:
                raise ValueError(f"{path} refers to {name}, which is outside the checkpoint")
        metadata.storage_meta = metadata.storage_meta or records.StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def _slice_file(self, file: Any, sinfo: files._StorageInfo) -> Any:
        place = (sinfo.relative_path, sinfo.offset)
        if place in self._intact or sinfo.transform_descriptors:
            return super()._slice_file(file, sinfo)
        file.seek(sinfo.offset)
        value = io.BytesIO(file.read(sinfo.length))
        _check_sums(value, f"{self.path}/{sinfo.relative_path}, from byte {sinfo.offset} on,")
        self._intact.add(place)
        return value


def _check_sums(value: io.BytesIO, place: str) -> None:
    """Check the checksums that `torch.save` has written, which `torch.load` ignores."""
    try:
        with zipfile.ZipFile(value) as written:
            damaged = written.testzip()
    except zipfile.BadZipFile as error:
        raise ValueError(f"{place} is cut off or damaged: {error}") from error
    if damaged is not None:
        raise ValueError(f"{place} is damaged, or was written without checksums: see {damaged} in it")
    value.seek(0)


def _unpickled(data: bytes, path: object) -> Metadata:
    try:
        metadata = _Unpickler(io.BytesIO(data)).load()
    except _UnsupportedMetadata:
        raise
    except Exception as error:  # pickle documents that damage may raise anything
        raise pickle.UnpicklingError(f"{path} is cut off or damaged: {error}") from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise pickle.UnpicklingError(f"{path} holds a {type(metadata).__name__}, no metadata of a checkpoint")
    return metadata


class LoadPlanner(DefaultLoadPlanner):
    """DCP's planner, which loads values other than tensors with `weights_only`.

    A rank may have no rows of a ShardedTensor, like ranks beyond a parameter's last row. With
    `flatten_sharded_tensors`, which is for nested ShardedTensors, DCP loses such tensors and misses other keys.
    """

    def __init__(
        self,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = False,
        allow_partial_load: bool = False,
    ) -> None:
        super().__init__(flatten_state_dict, flatten_sharded_tensors, allow_partial_load)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Load a value other than a tensor.

        Raises:
            pickle.UnpicklingError: the value contains more than numbers, strings, tensors and containers of them.
        """
        # Check the value first, because DCP loads the same bytes without a check.
        torch.load(value, weights_only=True)
        value.seek(0)
        super().load_bytes(read_item, value)
