"""FullyShardedDataParallel inside `torch.compile`: its runtime runs between the graphs and is never traced.

Dynamo skips torch's own files, but would inline ours, with guards on collectives, hooks and phases. The wrapped module
of each unit is compiled to one graph. Dynamo does trace the hooks on modules inside a unit, which do nothing then,
because skipping them would break the graph at each hook.
"""

import pkgutil
from collections.abc import Iterable, Iterator
from importlib import import_module

from torch._dynamo import trace_rules

from impl.distributed import fsdp

_TRACED = "impl.distributed.fsdp._fsdp1.contained"


def _skipped_modules(path: Iterable[str], package: str) -> Iterator[str]:
    """Yield the modules and packages that together are all of `package` but the traced module."""
    for _, name, _ in pkgutil.iter_modules(path, f"{package}."):
        if _TRACED.startswith(f"{name}."):
            yield from _skipped_modules(import_module(name).__path__, name)
        elif name != _TRACED:
            yield name


for name in _skipped_modules(fsdp.__path__, fsdp.__name__):
    trace_rules.add(name)
