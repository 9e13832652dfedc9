"""Meshes and placements of lists of tensors, looked up once for lists that stay the same.

Guard
    A result is returned again for a list of the same length, if each tensor has the same mesh object and the same tuple
    of placements as before, compared by identity. Kept results hold both, so that their ids are not reused, but no
    tensors. The tuples and placements are immutable. Process groups are not kept, because a mesh looks them up by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from threading import Lock
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from impl.optim._list_cache import same

_MOST_LISTS = 32

_spec_mesh, _spec_placements = attrgetter("_spec.mesh"), attrgetter("_spec.placements")


class MeshPlacements(NamedTuple):
    """Meshes and placements of a list of tensors. Both are None for a plain tensor."""

    meshes: list[DeviceMesh | None]
    placements: list[tuple[Any, ...] | None]
    # Index of the first tensor of each kind. Tensors of one kind have the same mesh and the same types of placements.
    firsts: list[int]
    kinds: list[int]  # index in `firsts` of each tensor's kind

    def representatives(self) -> list[tuple[DeviceMesh | None, tuple[Any, ...]]]:
        """Return the mesh of each kind, and the placements of its first tensor."""
        return [(self.meshes[first], self.placements[first] or ()) for first in self.firsts]


_kept: dict[int, MeshPlacements] = {}
_lock = Lock()


def meshes_and_placements(
    tensors: Sequence[Tensor],
) -> tuple[list[DeviceMesh | None], list[tuple[Any, ...] | None]]:
    """Return the mesh and the placements of each tensor. Both are None for a plain tensor."""
    try:
        # This needs no Python loop if all are DTensors.
        return list(map(_spec_mesh, tensors)), list(map(_spec_placements, tensors))
    except AttributeError:
        specs = [getattr(tensor, "_spec", None) for tensor in tensors]
        return (
            [None if spec is None else spec.mesh for spec in specs],
            [None if spec is None else spec.placements for spec in specs],
        )


def mesh_placements(tensors: Sequence[Tensor]) -> MeshPlacements:
    """Return the meshes and placements of DTensors and plain tensors."""
    meshes, placements = meshes_and_placements(tensors)
    previous = _kept.get(len(tensors))
    if previous is not None and same(meshes, previous.meshes) and same(placements, previous.placements):
        return previous
    result = MeshPlacements(meshes, placements, *_by_kind(meshes, placements))
    with _lock:
        _kept.pop(len(tensors), None)
        _kept[len(tensors)] = result
        if len(_kept) > _MOST_LISTS:
            del _kept[next(iter(_kept))]
    return result


def _by_kind(
    meshes: list[DeviceMesh | None], placements: list[tuple[Any, ...] | None]
) -> tuple[list[int], list[int]]:
    # Placements are compared by type, which is many times as fast as by value.
    kind_of: dict[tuple[Any, ...], int] = {}
    firsts: list[int] = []
    kinds: list[int] = []
    for index, (mesh, places) in enumerate(zip(meshes, placements, strict=True)):
        kind = kind_of.setdefault((id(mesh), *map(type, places or ())), len(kind_of))
        if kind == len(firsts):
            firsts.append(index)
        kinds.append(kind)
    return firsts, kinds
