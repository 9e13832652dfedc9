"""Ways to wrap a model that are refused or that warn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from conformance.distributed.fsdp.scenes.fsdp_training import mesh_of
from conformance.distributed.fsdp.scenes.module_trees import LEAVES, loss_of
from conformance.distributed.fsdp.scenes.scene import Scene


def construct(scene: Scene, *, way: str) -> dict[str, Any]:
    """Wrap with a function of `WAYS` or `USED_UP`.

    Return the strategy, the identity of the module and this rank's shapes.
    """
    unit = (WAYS | USED_UP)[way](scene)
    return {
        "strategy": unit.sharding_strategy.name,
        "wraps what it was given": unit.module is scene.plain,
        "parameters": {
            name: [tuple(parameter.shape), parameter.requires_grad]
            for name, parameter in unit.named_parameters()
        },
    }


def _with_a_scalar(scene: Scene) -> nn.Module:
    scene.plain.scalar = nn.Parameter(torch.tensor(1.0))
    return scene.plain


def _wrapped_twice(scene: Scene) -> Any:
    scene.plain.head = scene.wrap(scene.plain.head)
    return scene.wrap(scene.plain, units=LEAVES)


def _hybrid(**arguments: Callable[[Scene], Any]) -> Callable[[Scene], Any]:
    return lambda scene: scene.wrap(
        scene.plain,
        strategy="HYBRID_SHARD",
        units=LEAVES,
        **{name: value(scene) for name, value in arguments.items()},
    )


THE_ROOT_IGNORED = "the root ignored"
WAYS: dict[str, Callable[[Scene], Any]] = {
    "group and mesh": lambda scene: scene.wrap(
        scene.plain, process_group=dist.group.WORLD, device_mesh=scene.mesh()
    ),
    "modules and states ignored": lambda scene: scene.wrap(
        scene.plain, ignored_modules=[scene.plain.head], ignored_states=[scene.plain.head]
    ),
    "ignored states of two kinds": lambda scene: scene.wrap(
        scene.plain, ignored_states=[scene.plain.head, scene.plain.head.weight]
    ),
    "ignored modules that are none": lambda scene: scene.wrap(
        scene.plain, ignored_modules=[scene.plain.head.weight]
    ),
    "ignored modules of which one is none": lambda scene: scene.wrap(
        scene.plain, ignored_modules=[scene.plain.head, scene.plain.head.weight]
    ),
    "ignored states that are none": lambda scene: scene.wrap(scene.plain, ignored_states=[1, 2]),
    "ignored modules that do not iterate": lambda scene: scene.wrap(
        scene.plain, ignored_modules=scene.plain.head
    ),
    THE_ROOT_IGNORED: lambda scene: scene.wrap(scene.plain, ignored_modules=[scene.plain]),
    "a unit ignored": lambda scene: scene.wrap(scene.plain, ignored_modules=[scene.wrap(scene.plain.head)]),
    "hybrid without groups": lambda scene: scene.wrap(scene.plain, strategy="HYBRID_SHARD"),
    "hybrid with one group": _hybrid(process_group=lambda _: dist.group.WORLD),
    "hybrid with a mesh of one dimension": _hybrid(device_mesh=Scene.mesh),
    "a mesh of two dimensions that is not hybrid": lambda scene: scene.wrap(
        scene.plain, device_mesh=mesh_of(scene.rank, 1)
    ),
    "a scalar parameter": lambda scene: scene.wrap(_with_a_scalar(scene)),
    "a lazy module": lambda scene: scene.wrap(nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2))),
    "no sharding": lambda scene: scene.wrap(scene.plain, strategy="NO_SHARD"),
    "a container": lambda scene: scene.wrap(nn.ModuleList([nn.Linear(2, 2)])),
    "wrapped inside already": _wrapped_twice,
    "no parameters": lambda scene: scene.wrap(nn.Tanh()),
    "no module": lambda scene: scene.wrap("a word"),
    "an init function that is none": lambda scene: scene.wrap(scene.plain, param_init_fn="no function"),
    "a policy that is none": lambda scene: scene.wrap(scene.plain, auto_wrap_policy="no policy"),
    "a device by name": lambda scene: scene.wrap(scene.plain, device_id="cpu"),
    "empty arguments": lambda scene: scene.wrap(scene.plain, ignored_modules=[], ignored_states=None),
}
# Arguments that can be iterated only once.
USED_UP: dict[str, Callable[[Scene], Any]] = {
    "ignored modules from a generator": lambda scene: scene.wrap(
        scene.plain, ignored_modules=(module for module in [scene.plain.head])
    ),
}


def moved_away(scene: Scene, *, returns: bool = False) -> torch.Tensor:
    """Run a forward after the parameters were moved to the meta device, and back from it if `returns`."""
    scene.model.to("meta")
    if returns:
        scene.model.to_empty(device=scene.rank.device)
        for parameter in scene.model.parameters():
            parameter.data.fill_(0.5)
    return loss_of(scene.forward()).detach()
