"""A mesh that all parameters are DTensors on, and the dimensions of it that data parallelism is over."""

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
    """
    Args:
        whole: the mesh that parameters are DTensors on.
        shard: numbers of its dimensions that parameters are sharded over.
        replicate: numbers of those over which copies of the shards are kept.
        mesh: of these alone, those of a kind made one: to replicate, behind it to shard over, or one of the two.
    """

    whole: DeviceMesh
    shard: tuple[int, ...]
    replicate: tuple[int, ...]
    mesh: DeviceMesh

    def refuse_unfit(self, mesh: DeviceMesh, placements: Sequence[Placement]) -> None:
        """
        Raises:
            ValueError: a parameter lies on another mesh, or not as copies over these dimensions.
        """
        if mesh is not self.whole:
            raise ValueError(
                "Expected param's DTensor mesh to be the same mesh passed to fully_shard, "
                "but got different mesh objects"
            )
        for kind, numbers in (("shard", self.shard), ("replicate", self.replicate)):
            for number in numbers:
                if not isinstance(placements[number], Replicate):
                    raise ValueError(
                        f"Expected Replicate() on DP {kind} dim '{_names_of(mesh)[number]}' (index {number}) "
                        f"but got {placements[number]}"
                    )

    def reduced(self, of_grad: Sequence[Placement], of_param: Sequence[Placement]) -> tuple[Placement, ...]:
        """How a gradient has to lie where a unit takes the sums over these dimensions."""
        own = {*self.shard, *self.replicate}
        pairs = enumerate(zip(of_grad, of_param, strict=True))
        return tuple(grad if number in own else param for number, (grad, param) in pairs)

    def spec(self, placements: Sequence[Placement], dim: int, meta: TensorMeta) -> DTensorSpec:
        """How a parameter lies that is cut in `dim`."""
        cut = list(placements)
        for number in self.shard:
            finer = 1  # parts that dimensions behind this one make of the same dimension of the parameter
            for behind in range(number + 1, self.whole.ndim):
                if getattr(placements[behind], "dim", None) == dim:
                    finer *= self.whole.size(behind)
            cut[number] = _StridedShard(dim, split_factor=finer) if finer > 1 else Shard(dim)
        if len(self.shard) <= 1:
            return DTensorSpec(self.whole, tuple(cut), tensor_meta=meta)
        return self._spec_of_one_dimension(cut, meta)

    def _spec_of_one_dimension(self, cut: Sequence[Placement], meta: TensorMeta) -> DTensorSpec:
        """With the dimensions that it is sharded over as one, where the first of them was; before it the copies."""
        meshes: list[DeviceMesh] = []
        found: list[Placement] = []
        for number, name in enumerate(_names_of(self.whole)):
            if number == min(self.shard):
                meshes.append(self.mesh)
                found += [*((Replicate(),) if self.replicate else ()), cut[number]]
            elif number not in (*self.shard, *self.replicate):
                meshes.append(self.whole[name])
                found.append(cut[number])
        return DTensorSpec(DeviceMesh._concatenate(meshes), tuple(found), tensor_meta=meta)


def data_dims_of(whole: DeviceMesh, dims: DataParallelMeshDims) -> DataDims:
    """Collectives: makes a process group where several dimensions are named together."""
    shard, replicate = dims.shard_names, dims.replicate_names
    meshes = [_as_one(whole, names) for names in (replicate, shard) if names]
    return DataDims(
        whole,
        tuple(map(_names_of(whole).index, shard)),
        tuple(map(_names_of(whole).index, replicate)),
        meshes[0] if len(meshes) == 1 else DeviceMesh._concatenate(meshes),
    )


def _as_one(whole: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    return whole[names[0]] if len(names) == 1 else whole[names]._flatten("_".join(names))


def _names_of(mesh: DeviceMesh) -> tuple[str, ...]:
    names = mesh.mesh_dim_names
    assert names is not None
    return names
