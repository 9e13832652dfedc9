"""Cases of state dicts and memory: peak and traffic of saving and loading, devices of saved tensors, lifetime."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from conformance.distributed.fsdp.lab import Lab
from conformance.distributed.fsdp.optim_state_cases import Optimized, StateDictMethod
from conformance.distributed.fsdp.state_dict_cases import Form, on_demand, rank_of, set_form


class PeakBytes(TorchDispatchMode):
    """Mode that records the peak bytes of tensors that operators return, without the storages of `old`."""

    def __init__(self, old: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._old = {tensor.untyped_storage()._cdata for tensor in old}
        self._returned: list[weakref.ref[torch.Tensor]] = []
        self.most_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self._returned.append(weakref.ref(result))
        living = [(ref, tensor) for ref in self._returned if (tensor := ref()) is not None]
        self._returned = [ref for ref, _ in living]
        storages = {
            tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for _, tensor in living
        }
        held = sum(size for key, size in storages.items() if key not in self._old)
        self.most_bytes = max(self.most_bytes, held)
        return result


def held_while_saving(lab: Lab) -> tuple[int, float]:
    """Return the bytes of one large unit's state dict on this rank, and the peak memory as a multiple of the model."""
    torch.manual_seed(1)
    body = nn.Sequential(*(nn.Linear(640, 640) for _ in range(5)))
    model_bytes = sum(parameter.nbytes for parameter in body.parameters())
    model = lab.wrap(body)
    config = lab.api.FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    lab.fsdp.set_state_dict_type(model, lab.api.StateDictType.FULL_STATE_DICT, config)
    with PeakBytes(model.parameters()) as held:
        state_dict = model.state_dict()
    return sum(value.nbytes for value in state_dict.values()), held.most_bytes / model_bytes


def held_while_loading(lab: Lab) -> float:
    """Return the peak memory, as a multiple of the model, while many units load a dict that is read on demand."""
    torch.manual_seed(1)
    body = nn.Sequential(*(nn.Linear(256, 256) for _ in range(10)))
    model_bytes = sum(parameter.nbytes for parameter in body.parameters())
    state_dict = on_demand({key: value.clone() for key, value in body.state_dict().items()})
    model = lab.wrap(body, units=[nn.Linear])
    with PeakBytes(model.parameters()) as held:
        model.load_state_dict(state_dict)
    return held.most_bytes / model_bytes


def shard_placements(lab: Lab, *, form: Form) -> list[tuple[bool, bool]]:
    set_form(lab.library, lab.model, form)
    return _placements(lab, lab.model.state_dict(), offloads=form.config.get("offload_to_cpu", False))


def state_placements(lab: Lab, *, way: StateDictMethod) -> list[tuple[bool, bool]]:
    return _placements(lab, way.save(lab, Optimized().stepped(lab.model)), offloads=way.offloads)


def _placements(lab: Lab, saved: Mapping[str, Any], *, offloads: bool) -> list[tuple[bool, bool]]:
    """Return, for each shard of this rank, whether the shard and its metadata are on the requested device."""
    device = torch.device("cpu") if offloads else lab.rank.device
    placements: list[tuple[bool, bool]] = []
    for value in tree_leaves(saved):
        if isinstance(value, ShardedTensor):
            own_metadata = [
                shard for shard in value.metadata().shards_metadata if rank_of(shard) == lab.rank.rank
            ]
            for shard, shard_metadata in zip(value.local_shards(), own_metadata, strict=True):
                placements.append(
                    (shard.tensor.device == device, shard_metadata.placement.device() == device)
                )
    return placements


def devices_of_states(lab: Lab, *, way: StateDictMethod) -> set[str]:
    """Return the device types of the saved states, or of their local shards."""
    saved = tree_leaves(way.save(lab, Optimized("momentum").stepped(lab.model))["state"])
    parts = (
        [shard.tensor for shard in value.local_shards()] if isinstance(value, ShardedTensor) else [value]
        for value in saved
    )
    return {part.device.type for part in itertools.chain(*parts)}


def outlived(lab: Lab, *, form: Form) -> list[str]:
    """Return the keys whose tensors survive the state dict. Buffers are left out, because the model owns them."""
    set_form(lab.library, lab.model, form)
    own = {id(buffer) for buffer in lab.model.buffers()}
    state_dict = lab.model.state_dict()
    held = {key: weakref.ref(value) for key, value in state_dict.items() if id(value) not in own}
    del state_dict
    gc.collect()
    return [key for key, ref in held.items() if ref() is not None]


class Received(TorchDispatchMode):
    """Mode that counts the bytes of tensors that collectives leave on this rank.

    Objects by which ranks agree are not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            received = [tensor for tensor in tree_leaves(args[0]) if isinstance(tensor, torch.Tensor)]
            is_exchange = func.__name__.startswith("alltoall")
            self.bytes += sum(
                tensor.nbytes for tensor in received if is_exchange or tensor.is_floating_point()
            )
        return func(*args, **(kwargs or {}))


def traffic(lab: Lab) -> dict[str, int]:
    """Return the bytes that saving and loading SHARDED_STATE_DICT leave on this rank."""
    set_form(lab.library, lab.model, Form("SHARDED"))
    with Received() as saving:
        state_dict = lab.model.state_dict()
    with Received() as loading:
        lab.model.load_state_dict(state_dict)
    return {"saving": saving.bytes, "loading": loading.bytes}
