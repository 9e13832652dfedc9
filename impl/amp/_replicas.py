"""DistributedDataParallel modules that have an optimizer's parameters.

torch records no way from a parameter to such a module, so all Python objects are searched, once for an optimizer.
"""

import contextlib
import gc
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

_known: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[weakref.ref[DistributedDataParallel]]]
_known = weakref.WeakKeyDictionary()


def replicated_modules(
    optimizer: torch.optim.Optimizer, params: Sequence[Tensor]
) -> list[DistributedDataParallel]:
    """Return the modules over several ranks that have some of these parameters of the optimizer."""
    if not params or not dist.is_available() or not dist.is_initialized():
        return []
    known = _known.get(optimizer)
    if known is None:
        ids = set(map(id, params))
        known = [
            weakref.ref(module)
            for module in gc.get_objects()
            if issubclass(type(module), DistributedDataParallel)
            and dist.get_world_size(module.process_group) > 1
            and not ids.isdisjoint(map(id, module.parameters()))
        ]
        # Not every optimizer takes weak references.
        with contextlib.suppress(TypeError):
            _known[optimizer] = known
    return [module for reference in known if (module := reference()) is not None]
