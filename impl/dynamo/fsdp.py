"""FullyShardedDataParallel inside `torch.compile`: its runtime runs between the graphs and is never traced.

Dynamo skips torch's own files, but would inline ours, with guards on collectives, hooks and phases. The wrapped module
of each unit is compiled to one graph. Dynamo does trace the hooks on modules inside a unit, which do nothing then,
because skipping them would break the graph at each hook.
"""

import pkgutil

from torch._dynamo import trace_rules

from impl.distributed import fsdp

_TRACED = "impl.distributed.fsdp._fsdp1.contained"

for _, name, _ in pkgutil.iter_modules(fsdp.__path__, f"{fsdp.__name__}."):
    if name != _TRACED:
        trace_rules.add(name)
