"""The scene of a test program on ranks: a rank, a library, and a small model that the library shards.

A program is a function `program(scene, **arguments)` at the top level of a test module, beside the test that uses it.
The parent process gets an `Outcome` from each rank. The unsharded reference is the same program in the parent process,
with `ShardsNothing` as the library and the data of all ranks.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from conformance.distributed.fsdp.scenes.fsdp_training import (
    FSDP,
    Setup,
    gathered_gradients,
    gathered_parameters,
    wrapped,
)
from conformance.distributed.fsdp.scenes.fully_shard_training import FULLY_SHARD, values_and_gradients
from conformance.distributed.fsdp.scenes.module_trees import (
    Batch,
    Leaf,
    ModuleGroup,
    ModuleTree,
    call,
    loss_of,
)
from conformance.judge.library import Library, LookupFailed, NotProvided, load_library
from conformance.judge.outcome import Outcome, observe
from conformance.ranks import Rank

# Wrapped leaf by leaf, the model has units in a chain that is not a unit, buffers, and a unit with fewer elements than
# three ranks.
_LOOKED_UP = Leaf("lookup", 3)
TREE = ModuleTree(
    ModuleGroup(
        (Leaf("affine", 4), ModuleGroup((_LOOKED_UP, Leaf("batched")), form="tuple"), Leaf("scaled"))
    ),
    dtype=torch.float32,
    seed=3,
)
# The same without batch statistics, which need more precision than low-precision dtypes have.
SIMPLE = replace(
    TREE, body=ModuleGroup((Leaf("affine", 4), ModuleGroup((_LOOKED_UP,), form="tuple"), Leaf("scaled")))
)

# Four units in a sequence for fully_shard. The second one has fewer elements than three ranks, and the last one
# contains a module that is never called.
FOUR_UNITS = ModuleTree(ModuleGroup((Leaf("affine", 4), Leaf("scaled"), Leaf("affine", 2), Leaf("idle"))))

ONE_UNIT = Setup()


class ShardsNothing:
    """Library of the unsharded reference. Its APIs return the module, with the methods of sharded modules."""

    distributed = torch.distributed  # enums and policies
    nn = torch.nn

    @staticmethod
    def find(path: str) -> Any:
        return {FSDP: _NotWrapped, FULLY_SHARD: _not_sharded}[path]


class _NotSharded:
    """Methods of sharded modules that do nothing, or what an unsharded module needs."""

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def unshard(self, async_op: bool = False) -> Any:
        return SimpleNamespace(wait=lambda: None)

    def reshard(self) -> None: ...

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        model: Any = self
        return nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("set_"):
            return lambda *args, **kwargs: None
        return super().__getattr__(name)  # pyright: ignore[reportAttributeAccessIssue]


def _not_sharded(module: Any, **_: Any) -> Any:
    if isinstance(module, nn.Module):
        kind: Any = type(module)
        module.__class__ = type(kind.__name__, (_NotSharded, kind), {})
    return module


class _NotWrapped:
    def __new__(cls, module: nn.Module, **_: Any) -> Any:
        return _not_sharded(module)

    @staticmethod
    def summon_full_params(module: nn.Module, **_: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class _OnlyProcess(Rank):
    """A rank of an unsharded training, which needs no mesh."""

    def mesh(self, *sizes: int, names: tuple[str, ...] | None = None) -> Any:
        return None


class Scene:
    """A rank with a library and a model of `tree`.

    `plain` is the model as built. `model` is the same model, wrapped by `setup`. Without a setup it is not sharded yet,
    and the program shards it. `ranks` are the ranks whose data the model gets: those of all ranks without sharding.
    """

    def __init__(
        self,
        rank: Rank,
        library: Library,
        setup: Setup | None = ONE_UNIT,
        tree: ModuleTree = TREE,
        model: Any = None,
    ) -> None:
        self.rank, self.library, self.setup, self.tree = rank, library, setup, tree
        self.ranks: Sequence[int] = [rank.rank]
        if model is not None:
            self.model = model

    @classmethod
    def unsharded(cls, rank: int, world_size: int, tree: ModuleTree = TREE, device: str = "cpu") -> Scene:
        """Return the scene of the unsharded reference, whose losses are means over the data of all ranks."""
        library: Any = ShardsNothing()
        scene = cls(_OnlyProcess(rank, world_size, torch.device(device)), library, None, tree)
        scene.ranks = range(world_size)
        return scene

    def without_sharding(self) -> Scene:
        """Return the scene of the unsharded reference on this rank's device."""
        return Scene.unsharded(self.rank.rank, self.rank.world_size, self.tree, str(self.rank.device))

    @property
    def shards(self) -> bool:
        return not isinstance(self.library, ShardsNothing)

    def mean(self, loss_of: Callable[[int], torch.Tensor]) -> torch.Tensor:
        """Return the mean of `loss_of` over the ranks whose data the model gets."""
        return torch.stack([loss_of(rank) for rank in self.ranks]).mean()

    @functools.cached_property
    def plain(self) -> Any:
        return self.tree.build()

    @functools.cached_property
    def model(self) -> Any:
        return self.wrapped(self.plain) if self.setup else self.plain

    def wrapped(self, model: nn.Module, setup: Setup | None = None) -> Any:
        setup = setup or self.setup
        assert setup is not None, "the scene has no setup, and the program gives none"
        return wrapped(self.rank, self.library, model, setup)

    def wrap(self, module: Any, *, strategy: str = "", units: Collection[type] = (), **arguments: Any) -> Any:
        """Wrap `module` by calling the constructor. Submodules of the classes in `units` become units."""
        arguments.setdefault("device_id", self.rank.device)
        if strategy:
            arguments["sharding_strategy"] = self.api.ShardingStrategy[strategy]
        if units:
            arguments["auto_wrap_policy"] = self.api.wrap.ModuleWrapPolicy(set(units))
        return self.fsdp(module, **arguments)

    @property
    def api(self) -> Any:
        return self.library.distributed.fsdp

    @property
    def fsdp(self) -> Any:
        return self.library.find(FSDP)

    @property
    def units(self) -> list[Any]:
        return self.fsdp.fsdp_modules(self.model)

    def mesh(self, *sizes: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
        """Return a mesh with all ranks in its last dimension. `sizes` are the dimensions before it."""
        return self.rank.mesh(*sizes, self.rank.world_size, names=names)

    def shard(self, module: Any = None, **arguments: Any) -> Any:
        """Call `fully_shard` for `module`, by default the model."""
        return self.library.find(FULLY_SHARD)(self.model if module is None else module, **arguments)

    def shard_children(self, model: Any, **arguments: Any) -> Any:
        """Shard each child as a unit, and the model as the root."""
        for child in model.children():
            self.shard(child, **arguments)
        return self.shard(model, **arguments)

    def leaf_by_leaf(self, **arguments: Any) -> Any:
        for part in self.model.body.parts:
            self.shard(part, **arguments)
        return self.shard(**arguments)

    def batch(self, number: int = 0) -> Batch:
        """Return this rank's input of forward `number`."""
        batch = self.tree.batch(number, self.rank.rank)
        # The root moves no tensors of user objects to the device.
        return batch.on(self.rank.device) if self.tree.takes == "dataclass" else batch

    def forward(self, number: int = 0) -> Any:
        return call(self.model, self.tree, self.batch(number))

    def loss(self, number: int = 0) -> torch.Tensor:
        return loss_of(self.forward(number))

    def backward(self, number: int = 0) -> torch.Tensor:
        loss = self.loss(number)
        loss.backward()
        return loss.detach()

    def train(self, model: nn.Module | None = None) -> dict[str, Any]:
        """Run a step of SGD. Return the loss, the gradients before the step and the parameters after it."""
        model = self.model if model is None else model
        # Without foreach, which does not mix plain tensors with DTensors.
        optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=False)
        loss = self.backward()
        gradients = values_and_gradients(model)
        optimizer.step()
        return {"loss": loss, "gradients": gradients, "after": values_and_gradients(model)}

    def gradients(self) -> dict[str, torch.Tensor | None]:
        return {name: parameter.grad for name, parameter in self.model.named_parameters()}

    def whole_gradients(self, model: nn.Module | None = None) -> dict[str, torch.Tensor]:
        return gathered_gradients(self.library, self.model if model is None else model)

    def whole_parameters(self, model: nn.Module | None = None) -> dict[str, torch.Tensor]:
        return gathered_parameters(self.library, self.model if model is None else model)


Program = Callable[..., Any]


def run(
    rank: Rank,
    *,
    library: str,
    program: Program,
    setup: Setup | None,
    tree: ModuleTree,
    arguments: Mapping[str, Any],
) -> Outcome:
    """Run a program on this rank. Return its outcome."""
    scene = Scene(rank, load_library(library), setup, tree)
    return observe(lambda: program(scene, **arguments))


def tried(call: Callable[[], Any]) -> Any:
    """Return the result of `call`, or the type and text of the error that it raised.

    Use it for calls after which the program continues.
    """
    try:
        return call()
    except (NotProvided, LookupFailed):
        raise
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def named(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def raise_in_backward(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
    """Make the backward of `output` raise. This is a forward hook."""
    del module, inputs

    def fail(grad: torch.Tensor) -> None:
        raise KeyError("amid the backward")

    output.register_hook(fail)


def survivors(refs: Mapping[str, weakref.ref[Any]]) -> list[str]:
    """Return the names of the objects that still exist after a garbage collection."""
    assert refs, "no object is watched"
    gc.collect()
    return [name for name, ref in refs.items() if ref() is not None]


def fill_freed_memory(numel: int, device: torch.device, value: float) -> None:
    """Fill memory with `value` and free it, so that new float32 tensors of `numel` elements contain that value."""
    used = [torch.full((numel,), value, device=device) for _ in range(64)]
    del used


def filled(module: nn.Module) -> Any:
    """Fill the parameters with numbers from -1 to 1, with different values for each parameter."""
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            values = torch.linspace(-1, 1, parameter.numel() + number, dtype=torch.float64)[number:]
            parameter.copy_(values.view(parameter.shape))
    return module
