"""FullyShardedDataParallel inside `torch.compile`: its runtime is run between the graphs, never traced.

torch's own files are treated so, and ours would be inlined: collectives, hooks and phases, each with guards. What a
unit wraps is compiled, a graph a unit. The hooks on the modules inside a unit are left to Dynamo, which sees there that
they have nothing to do: a graph would otherwise break at each of them.
"""

import pkgutil

from torch._dynamo import trace_rules

from impl.distributed import fsdp

_TRACED = "impl.distributed.fsdp._contained"

for _, name, _ in pkgutil.iter_modules(fsdp.__path__, f"{fsdp.__name__}."):
    if name != _TRACED:
        trace_rules.add(name)
