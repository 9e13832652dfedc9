"""Sharded runs that train, save and load with impl.distributed.fsdp.checkpoint, or are killed, as cases of a pool."""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import signal
import threading
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import numpy as np
import torch
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint import state_dict as helpers
from torch.utils._pytree import tree_map

from conformance.ranks import Rank
from impl import drop_in
from impl.amp import GradScaler
from impl.distributed.fsdp import FullyShardedDataParallel, checkpoint, fully_shard
from impl.distributed.fsdp.wrap import ModuleWrapPolicy

# "compiled" is fully_shard with a part that torch.compile has wrapped.
Wrapping = Literal["flat", "original", "fully_shard", "compiled"]


class CheckpointedRun:
    """A model, its optimizer, a scheduler and a scaler; `seed` is all that two runs of one kind differ in."""

    def __init__(self, rank: Rank, seed: int = 0, wrapping: Wrapping = "flat", width: int = 5) -> None:
        torch.manual_seed(seed)
        inner = nn.Sequential(nn.Linear(width, 3), nn.Linear(3, 2, bias=False))
        # Two ranks have nothing of the last weight, and three not each a row of it.
        # Without momentum all ranks have the same statistics, and count batches.
        part = torch.compile(inner, backend="eager") if wrapping == "compiled" else inner
        plain = nn.Sequential(nn.Linear(7, width), nn.BatchNorm1d(width, momentum=0.0), part)
        self.model: nn.Module
        if wrapping in ("fully_shard", "compiled"):
            fully_shard(inner)
            self.model = fully_shard(plain)
        else:
            self.model = FullyShardedDataParallel(
                plain,
                auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}),
                device_id=torch.device("cpu"),
                use_orig_params=wrapping == "original",
            )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01 * (1 + seed))
        scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.9)
        self.others: dict[str, Any] = {
            "scheduler": scheduler,
            "scaler": GradScaler("cpu", init_scale=2.0, growth_interval=2),
        }
        self._rank = rank

    def train(self, steps: Sequence[int]) -> None:
        for step in steps:
            x = torch.linspace(-1, 1 + step + self._rank.rank, 28).view(4, 7)
            scaler: Any = self.others["scaler"]
            scaler.scale(self.model(x).square().mean()).backward()
            scaler.step(self.optimizer)
            scaler.update()
            self.optimizer.zero_grad()
            self.others["scheduler"].step()

    def save(self, path: Path) -> None:
        checkpoint.save(path, self.model, self.optimizer, others=self.others)

    def load(self, path: Path) -> None:
        checkpoint.load(path, self.model, self.optimizer, others=self.others)

    def state(self) -> dict[str, Any]:
        model, optimizer = self._full_states()
        state = {
            "model": model,
            "optimizer": optimizer,
            "others": {name: other.state_dict() for name, other in self.others.items()},
        }
        return copy.deepcopy(state)

    def _full_states(self) -> tuple[dict[str, Any], dict[str, Any]]:
        if not isinstance(self.model, FullyShardedDataParallel):
            options = helpers.StateDictOptions(full_state_dict=True)
            return helpers.get_state_dict(self.model, self.optimizer, options=options)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            optimizer = FullyShardedDataParallel.full_optim_state_dict(
                self.model, self.optimizer, rank0_only=False
            )
        with FullyShardedDataParallel.summon_full_params(self.model):
            return copy.deepcopy(dict(self.model.module.state_dict())), optimizer


def trained_and_saved(rank: Rank, *, path: Path, wrapping: Wrapping = "flat", steps: int = 3) -> Any:
    """Return the saved state, the state after more training, and the time that saving took."""
    run = CheckpointedRun(rank, wrapping=wrapping)
    run.train(range(steps))
    began = time.monotonic()
    run.save(path)
    took_s = time.monotonic() - began
    saved = run.state()
    run.train(range(steps, steps + 2))
    return saved, run.state(), took_s


def resumed(rank: Rank, *, paths: Sequence[Path], wrapping: Wrapping = "flat", steps: int = 3) -> Any:
    """Return for each checkpoint the state that another run has loaded, and its state after more training."""
    run = CheckpointedRun(rank, seed=1, wrapping=wrapping)
    run.train(range(1))  # creates a state to be overwritten
    outcomes: list[Any] = []
    for path in paths:
        run.load(path)
        loaded = run.state()
        run.train(range(steps, steps + 2))
        outcomes.append((loaded, run.state()))
    return outcomes


def latest_loaded(rank: Rank, *, folder: Path) -> Any:
    run = CheckpointedRun(rank, seed=1)
    path = checkpoint.latest(folder)
    assert path is not None
    run.load(path)
    return run.state()


def killed_while_saving(
    rank: Rank, *, path: Path, over: Path, victims: Sequence[int], after_s: float, once_written: bool = False
) -> None:
    """Load what is there, train on and save to `over`, in which the victims end after so many seconds.

    Args:
        once_written: they are counted from the first file that any rank has begun.
    """
    run = CheckpointedRun(rank)
    run.load(path)
    run.train(range(3, 5))
    if rank.rank in victims:
        threading.Thread(target=_die, args=(over if once_written else None, after_s), daemon=True).start()
    run.save(over)
    if rank.rank in victims:
        time.sleep(60)


def _die(over: Path | None, after_s: float) -> None:
    while over is not None and not any(over.parent.glob(f".{over.name}.*.writing/*")):
        time.sleep(0.0005)
    time.sleep(after_s)
    os.kill(os.getpid(), signal.SIGKILL)


def refused(rank: Rank, *, path: Path, width: int = 5, by_scaler: bool = False) -> Any:
    """Return the error of a load on this rank, and the states before and after."""
    run = CheckpointedRun(rank, seed=1, width=width)
    run.train(range(1))
    before = run.state()
    if by_scaler:  # loaded after the scheduler
        run.others["scaler"].load_state_dict = mock.Mock(side_effect=ValueError("the scaler refuses"))
    try:
        run.load(path)
    except Exception as error:
        return str(error), before, run.state()
    return None, before, run.state()


def kept_otherwise(rank: Rank, *, path: Path) -> Any:
    """Return the saved and loaded states with unusual names, numpy's numbers, and a tensor."""
    run, other = CheckpointedRun(rank), CheckpointedRun(rank, seed=1)
    run.others["tensor"], other.others["tensor"] = (
        StatefulValue(rank, torch.arange(3)),
        StatefulValue(rank, None),
    )
    for saved_run, milestones in ((run, [1, 3]), (other, [2])):
        saved_run.others["steps"] = torch.optim.lr_scheduler.MultiStepLR(saved_run.optimizer, milestones)
    run.train(range(1))
    for parameter, state in run.optimizer.state.items():
        state["mean.of.rows"] = parameter.detach().clone()
        state["count"] = np.int64(3)
    run.optimizer.param_groups[0]["lr"] = np.float64(0.25)
    run.save(path)
    other.load(path)
    return run.state(), other.state(), type(other.optimizer.param_groups[0]["lr"]).__name__


class StatefulValue:
    """Stateful object that returns any state, or raises an error on the last rank."""

    def __init__(self, rank: Rank, state: Any) -> None:
        self._rank = rank
        self._state = state

    def state_dict(self) -> Any:
        if not isinstance(self._state, Exception):
            return self._state
        if self._rank.rank == self._rank.world_size - 1:
            raise self._state
        return {}

    def load_state_dict(self, state_dict: Any) -> None:
        self._state = state_dict


class WithExtraState(nn.Module):
    def __init__(self, extra_state: Any) -> None:
        super().__init__()
        self._extra_state = extra_state

    def get_extra_state(self) -> Any:
        return self._extra_state


def refused_to_save(rank: Rank, *, path: Path, kind: str) -> str | None:
    """Return the error of saving a value on this rank that could not be loaded."""
    run = CheckpointedRun(rank)
    run.train(range(1))
    values = {"an error": KeyError("injected"), "an object": [path], "a function": {"key": print}}
    if kind in values:
        run.others["mine"] = StatefulValue(rank, values[kind])
    elif kind == "a group":
        run.optimizer.param_groups[0]["of"] = Path("somewhere")
    elif kind == "an extra state":
        run.model.module.add_module("extra", WithExtraState(path))
    else:
        next(iter(run.optimizer.state.values()))[0] = 1.0
    try:
        run.save(path)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


class Payload:
    """Writes a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> Any:
        return os.system, (f"touch '{self._file}'",)


def with_payload(data: bytes, file: Path) -> bytes:
    """Metadata that carries one, and is right but for that."""
    metadata = pickle.loads(data)
    metadata.planner_data = Payload(file)
    return pickle.dumps(metadata)


def taken_by_torch(rank: Rank, *, how: str, use_orig_params: bool) -> Any:
    """Return the states that torch.distributed.checkpoint.state_dict returns of a sharded model, sharded and full.

    The states are then set on a model that was trained further. Its states are the last of the result.
    """
    collected: list[Any] = []
    with drop_in.installed() if how == "dropped in" else contextlib.nullcontext():
        fsdp = FullyShardedDataParallel if how == "impl" else torch.distributed.fsdp.FullyShardedDataParallel
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(7, 5), nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2)))
        policy = torch.distributed.fsdp.wrap.ModuleWrapPolicy({nn.Sequential})
        cpu = torch.device("cpu")
        model = fsdp(plain, auto_wrap_policy=policy, device_id=cpu, use_orig_params=use_orig_params)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

        def train() -> None:
            model(torch.linspace(-1, 1 + rank.rank, 28).view(4, 7)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        train()
        for options in (helpers.StateDictOptions(), helpers.StateDictOptions(full_state_dict=True)):
            states = helpers.get_state_dict(model, optimizer, options=options)
            collected.append(_plain(states))
            train()
            helpers.set_state_dict(
                model, optimizer, model_state_dict=states[0], optim_state_dict=states[1], options=options
            )
        train()
        collected.append(_plain(helpers.get_state_dict(model, optimizer)))
    return collected


def _plain(states: Any) -> Any:
    """Return the states with this rank's rows instead of sharded tensors."""

    def rows(value: Any) -> Any:
        if isinstance(value, ShardedTensor):
            return [shard.tensor.clone() for shard in value.local_shards()]
        return copy.deepcopy(value)

    return tree_map(rows, states)
