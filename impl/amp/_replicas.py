"""torch's distributed modules that have an optimizer's parameters.

torch records no way from a parameter to such a module, so all Python objects are searched, once for an optimizer.
"""

import contextlib
import gc
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

# Base classes of modules that torch has sharded, by name, because importing them takes long.
_SHARDED = {"FullyShardedDataParallel", "FSDPModule"}

_known: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[weakref.ref[DistributedDataParallel]]]
_known = weakref.WeakKeyDictionary()


def replicated_modules(
    optimizer: torch.optim.Optimizer, params: Sequence[Tensor]
) -> list[DistributedDataParallel]:
    """Return the DistributedDataParallel modules over several ranks that have some of these parameters.

    Raises:
        NotImplementedError: torch has sharded some of the parameters, whose unreduced gradients are out of reach.
    """
    if not params or not dist.is_available() or not dist.is_initialized():
        return []
    known = _known.get(optimizer)
    if known is None:
        ids = set(map(id, params))
        modules = [
            module
            for module in gc.get_objects()
            if issubclass(type(module), nn.Module)
            and (isinstance(module, DistributedDataParallel) or _is_sharded_by_torch(module))
            and not ids.isdisjoint(map(id, module.parameters()))
        ]
        if any(map(_is_sharded_by_torch, modules)):
            raise NotImplementedError(
                "microbatch() does not support modules that torch has sharded; shard them by impl.distributed.fsdp"
            )
        known = [weakref.ref(module) for module in modules if dist.get_world_size(module.process_group) > 1]
        # Not every optimizer takes weak references.
        with contextlib.suppress(TypeError):
            _known[optimizer] = known
    return [module for reference in known if (module := reference()) is not None]


def _is_sharded_by_torch(module: nn.Module) -> bool:
    bases = type(module).__mro__
    return any(base.__name__ in _SHARDED and base.__module__.startswith("torch.") for base in bases)
