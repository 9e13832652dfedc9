"""A model and its optimizer written by torch.distributed.checkpoint (DCP), and read into others."""

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
    """A model of other values for each `seed`, and an optimizer that has stepped it."""

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
        """Parameters, buffers and states by name, as each rank sees them."""
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
    """The optimizer's rows by a function of DCP's, which reads what has one element whole on every rank."""
    from impl.distributed.fsdp.checkpoint import LoadPlanner  # noqa: PLC0415  cases bring no subject along

    trained = _Trained(lab, StateDictMethod("SHARDED"), seed=1)
    state = trained.state()
    dcp.load({"model": state["model"]}, checkpoint_id=path, planner=LoadPlanner())
    found = load_sharded_optimizer_state_dict(
        state["model"], optimizer_key="optimizer", storage_reader=dcp.FileSystemReader(path)
    )
    trained.load({"model": state["model"], "optimizer": found["optimizer"]})
    return trained.unsharded()


def written_meanwhile(lab: Lab, *, path: str, way: StateDictMethod) -> Any:
    """What it was when writing began; it is trained on while a thread writes."""
    trained = _Trained(lab, way)
    expected = trained.unsharded()
    # What stages by default asks ShardedTensor for its address, which has none.
    stager = BlockingAsyncStager() if way.name == "SHARDED" and lab.setup.ranks != "mesh" else None
    group = dist.new_group(backend="gloo")
    begun: Any = dcp.async_save(trained.state(), checkpoint_id=path, process_group=group, async_stager=stager)
    step(trained.model, trained.optimizer)
    getattr(begun, "upload_completion", begun).result()
    return expected


def read_in_part(lab: Lab, *, path: str, planner: Any) -> Any:
    """Into a model that has more than was written: what was, what is after, and what should have been read."""
    way = StateDictMethod("SHARDED", offloads=False)
    written, target = _Trained(lab, way), _Trained(lab, way, seed=1)
    some = {name: value for name, value in written.state()["model"].items() if name.startswith("body.")}
    dcp.save({"model": some}, checkpoint_id=path)
    before, state = target.unsharded(), target.state()
    dcp.load({"model": state["model"]}, checkpoint_id=path, planner=planner(allow_partial_load=True))
    target.load(state)
    return {"before": before, "after": target.unsharded(), "written": written.unsharded()}


def named(lab: Lab, *, path: str) -> Any:
    """The states of two of torch's `_NamedOptimizer`, of which the second has read what the first has written."""
    first, second = _Named(lab, 0), _Named(lab, 1)
    dcp.save(first.saved(), checkpoint_id=path)
    state = second.saved()
    dcp.load(state, checkpoint_id=path)
    second.load(state)
    return [first.own_state(), second.own_state()]


def named_by_itself(lab: Lab, *, path: str) -> Any:
    """A rank's states of torch's `_NamedOptimizer`, and what DCP reads of them if it is given them as they are."""
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
            found = self._lab.fsdp.optim_state_dict_to_load(
                self._lab.model, self._optimizer, state, is_named_optimizer=True
            )
        self._optimizer.load_state_dict(found)

    def own_state(self) -> dict[str, Any]:
        """Of what the rank steps any of."""
        states = self._optimizer.state_dict()["state"]
        owned = {name for name, parameter in self._lab.model.named_parameters() if parameter.numel()}
        return copied({name: states[name] for name in owned})
