"""Cases that save a model and its optimizer with torch.distributed.checkpoint (DCP) and load them into other models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.optim import _NamedOptimizer

from conformance.distributed.fsdp.fsdp_cases import clean, gathered_parameters
from conformance.distributed.fsdp.lab import Lab
from conformance.distributed.fsdp.optim_state_cases import Optimized, StateDictMethod, copied, plain, step

_GATHERED = StateDictMethod("FULL", offloads=False)


class _Trained:
    """Model whose initial values depend on `seed`, with an optimizer that has stepped."""

    def __init__(self, lab: Lab, way: StateDictMethod, seed: int = 0) -> None:
        self.lab, self.way = _lab_of(lab, seed), way
        self.model = self.lab.model
        self.optimizer = Optimized(steps=1 + seed).stepped(self.model)

    def state(self) -> dict[str, Any]:
        with self.way.set_on(self.lab):
            model = self.model.state_dict()
        return {"model": model, "optimizer": self.way.save(self.lab, self.optimizer)}

    def load(self, state: Mapping[str, Any]) -> None:
        with self.way.set_on(self.lab):
            self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(self.way.load(self.lab, self.optimizer, state["optimizer"]))

    def unsharded(self) -> dict[str, Any]:
        """Return the full parameters, the buffers and the full optimizer states by name."""
        states = _GATHERED.save(self.lab, self.optimizer)["state"]
        return copied(
            {
                "parameters": gathered_parameters(self.lab.library, self.model),
                "buffers": {clean(name): buffer for name, buffer in self.model.named_buffers()},
                "states": plain(states),
            }
        )


def _lab_of(lab: Lab, seed: int) -> Lab:
    return Lab(lab.rank, lab.library, lab.setup, lab.tree, lab.wrapped(lab.tree.build(seed)))


def written(lab: Lab, *, path: str, way: StateDictMethod) -> Any:
    trained = _Trained(lab, way)
    dcp.save(trained.state(), checkpoint_id=path)
    return trained.unsharded()


def read(lab: Lab, *, path: str, way: StateDictMethod, planner: Any = DefaultLoadPlanner) -> Any:
    trained = _Trained(lab, way, seed=1)
    state = trained.state()
    dcp.load(state, checkpoint_id=path, planner=planner())
    trained.load(state)
    return trained.unsharded()


def read_by_torchs_helper(lab: Lab, *, path: str) -> Any:
    """Load the optimizer's rows with DCP's own helper, which reads one-element tensors in full on every rank."""
    from impl.distributed.fsdp.checkpoint import LoadPlanner  # noqa: PLC0415  importing the cases must not import a subject

    trained = _Trained(lab, StateDictMethod("SHARDED"), seed=1)
    state = trained.state()
    dcp.load({"model": state["model"]}, checkpoint_id=path, planner=LoadPlanner())
    loaded = load_sharded_optimizer_state_dict(
        state["model"], optimizer_key="optimizer", storage_reader=dcp.FileSystemReader(path)
    )
    trained.load({"model": state["model"], "optimizer": loaded["optimizer"]})
    return trained.unsharded()


def written_meanwhile(lab: Lab, *, path: str, way: StateDictMethod) -> Any:
    """Save with `async_save` while training goes on. Return the values from the time when the save began."""
    trained = _Trained(lab, way)
    expected = trained.unsharded()
    # The default stager asks each tensor for its data pointer, and a ShardedTensor has none.
    stager = BlockingAsyncStager() if way.name == "SHARDED" and lab.setup.ranks != "mesh" else None
    group = dist.new_group(backend="gloo")
    begun: Any = dcp.async_save(trained.state(), checkpoint_id=path, process_group=group, async_stager=stager)
    step(trained.model, trained.optimizer)
    getattr(begun, "upload_completion", begun).result()
    return expected


def read_in_part(lab: Lab, *, path: str, planner: Any) -> Any:
    """Load a checkpoint of the body only. Return the target's values before and after, and the saved model's values."""
    way = StateDictMethod("SHARDED", offloads=False)
    written, target = _Trained(lab, way), _Trained(lab, way, seed=1)
    body = {name: value for name, value in written.state()["model"].items() if name.startswith("body.")}
    dcp.save({"model": body}, checkpoint_id=path)
    before, state = target.unsharded(), target.state()
    dcp.load({"model": state["model"]}, checkpoint_id=path, planner=planner(allow_partial_load=True))
    target.load(state)
    return {"before": before, "after": target.unsharded(), "written": written.unsharded()}


def named(lab: Lab, *, path: str) -> Any:
    """Save the states of one `_NamedOptimizer` of torch and load them into another. Return the states of both."""
    first, second = _Named(lab, 0), _Named(lab, 1)
    dcp.save(first.saved(), checkpoint_id=path)
    state = second.saved()
    dcp.load(state, checkpoint_id=path)
    second.load(state)
    return [first.own_state(), second.own_state()]


def named_by_itself(lab: Lab, *, path: str) -> Any:
    """Pass states of torch's `_NamedOptimizer` to DCP directly. Return this rank's states and the loaded states."""
    first, second = _Named(lab, 0), _Named(lab, 1)
    dcp.save(first.own_state(), checkpoint_id=path)
    state = second.own_state()
    dcp.load(state, checkpoint_id=path)
    return [first.own_state(), state]


class _Named:
    def __init__(self, lab: Lab, seed: int) -> None:
        self._lab = _lab_of(lab, seed)
        model = self._lab.model
        optimizer: Any = _NamedOptimizer(dict(model.named_parameters()), torch.optim.Adam)  # pyright: ignore[reportArgumentType]
        optimizer.init_state()
        for _ in range(1 + seed):
            for parameter in model.parameters():
                parameter.grad = parameter.detach() * 0.5
            optimizer.step()
        self._optimizer = optimizer

    def saved(self) -> dict[str, Any]:
        with _GATHERED.set_on(self._lab):
            return self._lab.fsdp.optim_state_dict(
                self._lab.model, self._optimizer, self._optimizer.state_dict()
            )

    def load(self, state: dict[str, Any]) -> None:
        with _GATHERED.set_on(self._lab):
            loaded = self._lab.fsdp.optim_state_dict_to_load(
                self._lab.model, self._optimizer, state, is_named_optimizer=True
            )
        self._optimizer.load_state_dict(loaded)

    def own_state(self) -> dict[str, Any]:
        """Return the states of the parameters of which this rank has elements."""
        states = self._optimizer.state_dict()["state"]
        owned = {name for name, parameter in self._lab.model.named_parameters() if parameter.numel()}
        return copied({name: states[name] for name in owned})
