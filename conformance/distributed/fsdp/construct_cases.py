"""Cases of wrapping: refused arguments, warnings, deferred initialisation, and module states synchronised by rank 0."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from conformance import simulator
from conformance.distributed.fsdp.fsdp_cases import clean, gathered_parameters, mesh_of
from conformance.distributed.fsdp.lab import Lab, filled, named
from conformance.distributed.fsdp.module_trees import LEAVES, Batch, call, loss_of
from conformance.distributed.fsdp.optim_state_cases import Optimized, StateDictMethod, copied, plain
from conformance.judge.sandbox.global_state import default_dtype


def construct(lab: Lab, *, way: str) -> dict[str, Any]:
    """Wrap with a function of `WAYS` or `USED_UP`.

    Return the strategy, the identity of the module and this rank's shapes.
    """
    unit = (WAYS | USED_UP)[way](lab)
    return {
        "strategy": unit.sharding_strategy.name,
        "wraps what it was given": unit.module is lab.plain,
        "parameters": {
            name: [tuple(parameter.shape), parameter.requires_grad]
            for name, parameter in unit.named_parameters()
        },
    }


def logged(lab: Lab) -> list[str]:
    """Return the log messages of level WARNING and above that wrapping and one step write.

    The case needs a process that has not used the library.
    """
    records: list[logging.LogRecord] = []
    with mock.patch.object(logging.Logger, "handle", lambda _, record: records.append(record)):
        lab.model = lab.wrap(lab.plain, use_orig_params=True)
        lab.backward()
    return [record.getMessage() for record in records if record.levelno >= logging.WARNING]


def _with_a_scalar(lab: Lab) -> nn.Module:
    lab.plain.scalar = nn.Parameter(torch.tensor(1.0))
    return lab.plain


def _wrapped_twice(lab: Lab) -> Any:
    lab.plain.head = lab.wrap(lab.plain.head)
    return lab.wrap(lab.plain, units=LEAVES)


def _hybrid(**arguments: Callable[[Lab], Any]) -> Callable[[Lab], Any]:
    return lambda lab: lab.wrap(
        lab.plain,
        strategy="HYBRID_SHARD",
        units=LEAVES,
        **{name: value(lab) for name, value in arguments.items()},
    )


def _mesh(lab: Lab) -> DeviceMesh:
    return lab.rank.mesh(lab.rank.world_size)


THE_ROOT_IGNORED = "the root ignored"
WAYS: dict[str, Callable[[Lab], Any]] = {
    "group and mesh": lambda lab: lab.wrap(lab.plain, process_group=dist.group.WORLD, device_mesh=_mesh(lab)),
    "modules and states ignored": lambda lab: lab.wrap(
        lab.plain, ignored_modules=[lab.plain.head], ignored_states=[lab.plain.head]
    ),
    "ignored states of two kinds": lambda lab: lab.wrap(
        lab.plain, ignored_states=[lab.plain.head, lab.plain.head.weight]
    ),
    "ignored modules that are none": lambda lab: lab.wrap(lab.plain, ignored_modules=[lab.plain.head.weight]),
    "ignored modules of which one is none": lambda lab: lab.wrap(
        lab.plain, ignored_modules=[lab.plain.head, lab.plain.head.weight]
    ),
    "ignored states that are none": lambda lab: lab.wrap(lab.plain, ignored_states=[1, 2]),
    "ignored modules that do not iterate": lambda lab: lab.wrap(lab.plain, ignored_modules=lab.plain.head),
    THE_ROOT_IGNORED: lambda lab: lab.wrap(lab.plain, ignored_modules=[lab.plain]),
    "a unit ignored": lambda lab: lab.wrap(lab.plain, ignored_modules=[lab.wrap(lab.plain.head)]),
    "hybrid without groups": lambda lab: lab.wrap(lab.plain, strategy="HYBRID_SHARD"),
    "hybrid with one group": _hybrid(process_group=lambda _: dist.group.WORLD),
    "hybrid with a mesh of one dimension": _hybrid(device_mesh=_mesh),
    "a mesh of two dimensions that is not hybrid": lambda lab: lab.wrap(
        lab.plain, device_mesh=mesh_of(lab.rank, 1)
    ),
    "a scalar parameter": lambda lab: lab.wrap(_with_a_scalar(lab)),
    "a lazy module": lambda lab: lab.wrap(nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2))),
    "no sharding": lambda lab: lab.wrap(lab.plain, strategy="NO_SHARD"),
    "a container": lambda lab: lab.wrap(nn.ModuleList([nn.Linear(2, 2)])),
    "wrapped inside already": _wrapped_twice,
    "no parameters": lambda lab: lab.wrap(nn.Tanh()),
    "no module": lambda lab: lab.wrap("a word"),
    "an init function that is none": lambda lab: lab.wrap(lab.plain, param_init_fn="no function"),
    "a policy that is none": lambda lab: lab.wrap(lab.plain, auto_wrap_policy="no policy"),
    "a device by name": lambda lab: lab.wrap(lab.plain, device_id="cpu"),
    "empty arguments": lambda lab: lab.wrap(lab.plain, ignored_modules=[], ignored_states=None),
}
# Arguments that can be iterated only once.
USED_UP: dict[str, Callable[[Lab], Any]] = {
    "ignored modules from a generator": lambda lab: lab.wrap(
        lab.plain, ignored_modules=(module for module in [lab.plain.head])
    ),
}


# -- modules with deferred initialisation


class _WithoutReset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, device="meta"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def materialised(lab: Lab, *, by: str, strategy: str) -> dict[str, Any]:
    """Wrap a module on the meta device and run a step.

    `by` is the method of initialisation. `function` passes a `param_init_fn`, and `no reset` adds a module that has no
    reset_parameters.
    """
    with torch.device("meta"):
        plain = nn.Sequential(nn.Linear(3, 5), nn.Sequential(nn.LayerNorm(5), nn.Linear(5, 2)))
    if by == "no reset":
        plain.append(_WithoutReset())
    torch.manual_seed(0)
    arguments = {"param_init_fn": _fill} if by == "function" else {}
    model = lab.wrap(plain, units=[nn.Linear], strategy=strategy, **arguments)
    loss = model(torch.ones(2, 3)).sum()
    loss.backward()
    return {"loss": loss.detach(), "whole": gathered_parameters(lab.library, model)}


def _fill(module: nn.Module) -> None:
    """Initialise only the module's own parameters, as a user's `param_init_fn` does."""
    module.to_empty(device="cpu", recurse=False)
    with torch.no_grad():
        for parameter in module.parameters(recurse=False):
            parameter.copy_(torch.arange(parameter.numel()).view(parameter.shape) * 0.1)


# -- modules with DTensor parameters


def tensor_parallel(lab: Lab, *, use_orig_params: bool, ignored: bool) -> dict[str, Any]:
    """Run a step of a model with one layer that is tensor parallel over another dimension of the mesh."""
    plain = filled(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
    mesh = lab.rank.mesh(lab.rank.world_size, 1, names=("sharded", "parallel"))
    parallelize_module(plain, mesh["parallel"], {"2": ColwiseParallel()})
    model = lab.wrap(
        plain,
        device_mesh=mesh["sharded"],
        use_orig_params=use_orig_params,
        ignored_states=list(plain[2].parameters()) if ignored else None,
    )
    loss = model(torch.ones(2, 3) * (1 + lab.rank.rank)).square().sum()
    loss.backward()
    return {"loss": loss.detach(), "gradients": [_local(p.grad) for p in model.parameters()]}


def _local(grad: torch.Tensor | None) -> torch.Tensor | None:
    return grad.to_local() if isinstance(grad, DTensor) else grad


# -- synchronised module states


def synchronised(lab: Lab) -> dict[str, Any]:
    """Wrap a module whose values differ between ranks. Return the parameters and buffers after wrapping."""
    plain = lab.tree.build(lab.rank.rank)
    with torch.no_grad():
        for buffer in plain.buffers():
            buffer.add_(lab.rank.rank + 1)
    model = lab.wrapped(plain)
    buffers = {clean(name): buffer.clone() for name, buffer in model.named_buffers()}
    return {"whole": gathered_parameters(lab.library, model), "buffers": buffers}


def moved_away(lab: Lab, *, returns: bool = False) -> torch.Tensor:
    """Run a forward after the parameters were moved to the meta device, and back from it if `returns`."""
    lab.model.to("meta")
    if returns:
        lab.model.to_empty(device=lab.rank.device)
        for parameter in lab.model.parameters():
            parameter.data.fill_(0.5)
    return loss_of(lab.forward()).detach()


# -- public interface of a wrapped module


def attributes(lab: Lab) -> dict[str, Any]:
    model = lab.model
    return {
        "module": type(model.module).__name__,
        "wrapped": model.module is model._fsdp_wrapped_module,
        "attribute": model.tree == lab.tree,
        "inner attribute": model.body.out_width,
        "missing": hasattr(model, "no_such_name"),
        "units": [type(unit.module).__name__ for unit in lab.units],
        "root only": [unit is model for unit in lab.fsdp.fsdp_modules(model, root_only=True)],
        "root of a part": len(lab.fsdp.fsdp_modules(model.body.parts[0])),
        "names": [name for name, _ in model.named_parameters()],
        "buffers": [name for name, _ in model.named_buffers()],
        "prefixed": [name for name, _ in model.named_parameters(prefix="a")],
        "own": [name for name, _ in model.named_parameters("a", False)],
        "prefixed buffers": [name for name, _ in model.named_buffers("a")],
        "buffers prefixed by keyword": [name for name, _ in model.named_buffers(prefix="a")],
        "own buffers": [name for name, _ in model.named_buffers("a", recurse=False)],
        "repr": repr(model),
    }


def roots(lab: Lab) -> dict[str, Any]:
    """Return which units are roots, before and after a call of `check_is_root`."""
    before = [unit._is_root for unit in lab.units]
    return {
        "before": before,
        "asked": lab.model.check_is_root(),
        "inner": [unit.check_is_root() for unit in lab.units[1:]],
        "root only": len(lab.fsdp.fsdp_modules(lab.model, root_only=True)),
        "by body": len(lab.fsdp.fsdp_modules(lab.model.body, root_only=True)),
    }


def differing(lab: Lab, *, argument: str) -> Any:
    """Give an inner unit and the root different values of an argument that must be the same for both."""
    lab.plain.head = lab.wrap(lab.plain.head, **{argument: True})
    return lab.wrap(lab.plain, **{argument: False}).check_is_root()


def indexed(lab: Lab) -> list[Any]:
    """Index a wrapped Sequential. Return the types of its modules."""
    model = lab.wrap(nn.Sequential(nn.Linear(2, 3), nn.Tanh()))
    return [type(model[0]).__name__, type(model[1]).__name__, len(list(model.named_modules()))]


def applied(lab: Lab) -> dict[str, Any]:
    """Call `apply` with a function that reads the shapes of parameters and writes to them, then run a step."""
    visits: list[Any] = []

    def visit(module: nn.Module) -> None:
        visits.append([type(module).__name__, [tuple(p.shape) for p in module.parameters(recurse=False)]])
        if isinstance(module, nn.Linear):
            with torch.no_grad():
                module.weight.fill_(0.5)

    returned = lab.model.apply(visit)
    return {
        "seen": visits,
        "is itself": returned is lab.model,
        "whole": gathered_parameters(lab.library, lab.model),
        "loss": lab.backward(),
    }


def converted(lab: Lab, *, how: str) -> dict[str, Any]:
    """Change the dtype or the device after wrapping and before the first step, then run a step."""
    conversions: dict[str, Callable[[nn.Module], Any]] = {
        "double": lambda model: model.double(),
        "to": lambda model: model.to(torch.float64),
        "cpu": lambda model: model.cpu(),
        "cpu and back": lambda model: model.cpu().to(lab.rank.device),
    }
    returned = conversions[how](lab.model)
    dtype = next(lab.model.parameters()).dtype
    batch = lab.tree.batch(0, lab.rank.rank)
    loss_of(call(lab.model, lab.tree, Batch(batch.x.detach().to(dtype), batch.ids))).backward()
    return {
        "is itself": returned is lab.model,
        "shards": named(lab.model),
        "gradients": lab.gradients(),
        "whole": gathered_parameters(lab.library, lab.model),
    }


def classes(lab: Lab) -> dict[str, bool]:
    """Return whether each parameter is exactly an `nn.Parameter`, the class that optimizers update in groups."""
    return {clean(name): type(parameter) is nn.Parameter for name, parameter in lab.model.named_parameters()}


def waits_for_offloaded(lab: Lab) -> list[int]:
    """Return how often the host waits for the device in a backward, with one unit and with one unit per leaf."""
    waits: list[int] = []
    for wrap in ("root", "leaves"):
        lab.model = lab.wrapped(lab.tree.build(), replace(lab.setup, wrap=wrap))
        lab.backward()
        batch = lab.tree.batch(1, lab.rank.rank)
        loss = loss_of(call(lab.model, lab.tree, Batch(batch.x.detach(), batch.ids)))
        simulator.take_host_waits()
        loss.backward()
        waits.append(sum(wait.count for wait in simulator.take_host_waits()))
    return waits


def ignored_inside(lab: Lab, *, by: str) -> dict[str, Any]:
    """Return the gradients if an inner unit gets the ignored modules or parameters, and the root does not."""
    kind = {"use_orig_params": lab.setup.uses_orig_params}
    part = lab.plain.body.parts[0]
    ignored = [part] if by == "ignored_modules" else list(part.parameters())
    lab.plain.body = lab.wrap(lab.plain.body, **{by: ignored}, **kind)
    lab.model = lab.wrap(lab.plain, **kind)
    return {"loss": lab.backward(), "gradients": lab.gradients()}


def moved_between(lab: Lab) -> dict[str, Any]:
    """Move the model to the device of its parameters between a forward and its backward."""
    loss = loss_of(lab.forward())
    lab.model.to(lab.rank.device)
    loss.backward()
    return {"gradients": lab.gradients(), "whole": gathered_parameters(lab.library, lab.model)}


def trained_under_defaults(lab: Lab, *, device: str, dtype: torch.dtype) -> dict[str, Any]:
    """Train, save and load while `device` is the default device and `dtype` the default dtype."""
    plain_model, batch = lab.plain, lab.tree.batch(0, lab.rank.rank)
    kinds = ("FULL", "SHARDED") if lab.setup.uses_orig_params else ("FULL", "SHARDED", "LOCAL")
    ways = [StateDictMethod(kind, offloads=False) for kind in kinds]
    with torch.device(device), default_dtype(dtype):
        model = lab.model = lab.wrapped(plain_model)
        loss = loss_of(call(model, lab.tree, batch))
        loss.backward()
        norms = [model.clip_grad_norm_(0.25, norm_type) for norm_type in (2.0, torch.inf)]
    optimizer = Optimized("momentum").optimizer(model)
    optimizer.step()
    with torch.device(device), default_dtype(dtype):
        saved = [way.save(lab, optimizer) for way in ways]
        loaded = [
            plain(way.load(lab, optimizer, saved_state)) for way, saved_state in zip(ways, saved, strict=True)
        ]
        states = []
        for way in ways:
            with way.set_on(lab):
                state = model.state_dict()
                states.append(copied(plain(state)))
                model.load_state_dict(state)
        with lab.fsdp.summon_full_params(model, with_grads=lab.setup.uses_orig_params):
            whole = named(model), lab.gradients()
    return {"loss": loss.detach(), "norms": norms, "states": [plain(saved), loaded, states], "whole": whole}
