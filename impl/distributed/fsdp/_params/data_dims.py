"""Dimensions that data parallelism uses, of the mesh that all parameters are DTensors on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from impl.distributed.fsdp._params.policies import DataParallelMeshDims


@dataclass(frozen=True)
class DataDims:
    """Dimensions of an SPMD mesh that data parallelism uses.

    Args:
        spmd_mesh: the mesh that parameters are DTensors on.
        shard: indices of the dimensions that parameters are sharded over.
        replicate: indices of the dimensions that shards are replicated over.
        mesh: these dimensions only, flattened by use: the replicating dimension, then the sharding one, or one of
            them.
    """

    spmd_mesh: DeviceMesh
    shard: tuple[int, ...]
    replicate: tuple[int, ...]
    mesh: DeviceMesh

    def check_placements(self, mesh: DeviceMesh, placements: Sequence[Placement]) -> None:
        """Check a parameter's mesh and placements.

        Raises:
            ValueError: a parameter is on another mesh, or is not replicated over these dimensions.
        """
        if mesh is not self.spmd_mesh:
            raise ValueError(
                "Expected param's DTensor mesh to be the same mesh passed to fully_shard, "
                "but got different mesh objects"
            )
        for kind, dims in (("shard", self.shard), ("replicate", self.replicate)):
            for mesh_dim in dims:
                if not isinstance(placements[mesh_dim], Replicate):
                    raise ValueError(
                        f"Expected Replicate() on DP {kind} dim '{_names_of(mesh)[mesh_dim]}' (index {mesh_dim}) "
                        f"but got {placements[mesh_dim]}"
                    )

    def reduced(self, of_grad: Sequence[Placement], of_param: Sequence[Placement]) -> tuple[Placement, ...]:
        """Return the placements to redistribute a gradient to. The unit itself sums over these dimensions."""
        own = {*self.shard, *self.replicate}
        pairs = enumerate(zip(of_grad, of_param, strict=True))
        return tuple(grad if mesh_dim in own else param for mesh_dim, (grad, param) in pairs)

    def spec(self, placements: Sequence[Placement], dim: int, meta: TensorMeta) -> DTensorSpec:
        """Return the DTensor spec of a parameter that is sharded in dimension `dim`."""
        sharded = list(placements)
        for mesh_dim in self.shard:
            # Number of shards that later mesh dimensions make of the same dimension of the parameter.
            finer = 1
            for later in range(mesh_dim + 1, self.spmd_mesh.ndim):
                if getattr(placements[later], "dim", None) == dim:
                    finer *= self.spmd_mesh.size(later)
            sharded[mesh_dim] = _StridedShard(dim, split_factor=finer) if finer > 1 else Shard(dim)
        if len(self.shard) <= 1:
            return DTensorSpec(self.spmd_mesh, tuple(sharded), tensor_meta=meta)
        return self._spec_of_one_dimension(sharded, meta)

    def _spec_of_one_dimension(self, sharded: Sequence[Placement], meta: TensorMeta) -> DTensorSpec:
        """Return the spec with the sharding dimensions flattened into one, at the place of the first of them."""
        meshes: list[DeviceMesh] = []
        combined: list[Placement] = []
        for mesh_dim, name in enumerate(_names_of(self.spmd_mesh)):
            if mesh_dim == min(self.shard):
                meshes.append(self.mesh)
                combined += [*((Replicate(),) if self.replicate else ()), sharded[mesh_dim]]
            elif mesh_dim not in (*self.shard, *self.replicate):
                meshes.append(self.spmd_mesh[name])
                combined.append(sharded[mesh_dim])
        return DTensorSpec(DeviceMesh._concatenate(meshes), tuple(combined), tensor_meta=meta)


def data_dims_of(spmd_mesh: DeviceMesh, dims: DataParallelMeshDims) -> DataDims:
    """Return the data-parallel dimensions of `spmd_mesh`.

    Collectives: creates a process group if several dimensions are named together.
    """
    shard, replicate = dims.shard_names, dims.replicate_names
    meshes = [_as_one(spmd_mesh, names) for names in (replicate, shard) if names]
    return DataDims(
        spmd_mesh,
        tuple(map(_names_of(spmd_mesh).index, shard)),
        tuple(map(_names_of(spmd_mesh).index, replicate)),
        meshes[0] if len(meshes) == 1 else DeviceMesh._concatenate(meshes),
    )


def _as_one(spmd_mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    return spmd_mesh[names[0]] if len(names) == 1 else spmd_mesh[names]._flatten("_".join(names))


def _names_of(mesh: DeviceMesh) -> tuple[str, ...]:
    names = mesh.mesh_dim_names
    assert names is not None
    return names
