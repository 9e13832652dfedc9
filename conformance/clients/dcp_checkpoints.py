"""Checkpoints that one side writes with torch.distributed.checkpoint (DCP) and the other reads and trains on from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from conformance.clients import tiny
from conformance.ranks import Rank


class _Training:
    def __init__(self, rank: Rank, *, full: bool, use_orig_params: bool) -> None:
        self._rank, self._options = rank, StateDictOptions(full_state_dict=full)
        self.model = FullyShardedDataParallel(
            tiny.layers(),
            auto_wrap_policy=ModuleWrapPolicy({tiny.MLP}),
            use_orig_params=use_orig_params,
            device_id=torch.device("cpu"),
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **tiny.ADAM)

    def losses(self, batches: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        losses = []
        for batch in batches:
            loss = tiny.loss_of(self.model, batch)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.detach())
        return losses

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer, options=self._options)
        return {"model": model, "optimizer": optimizer}

    def goes_on(self) -> dict[str, Any]:
        return {
            "losses": self.losses(tiny.tokens(self._rank.rank, 6)[3:]),
            "weights": tiny.unsharded(self.model),
        }

    def load(self, folder: str) -> None:
        state = self.state()
        dcp.load(state, checkpoint_id=folder)
        states = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(self.model, self.optimizer, **states, options=self._options)


def write(rank: Rank, *, folder: str, **way: bool) -> dict[str, Any]:
    """Save in the middle of a training, and go on."""
    training = _Training(rank, **way)
    training.losses(tiny.tokens(rank.rank, 6)[:3])
    dcp.save(training.state(), checkpoint_id=folder)
    return training.goes_on()


def read(rank: Rank, *, folder: str, **way: bool) -> dict[str, Any]:
    """Load what was saved, and go on."""
    training = _Training(rank, **way)
    training.load(folder)
    return training.goes_on()
