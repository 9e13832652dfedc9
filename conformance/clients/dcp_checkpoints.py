"""Checkpoints that one side writes with torch.distributed.checkpoint (DCP) and the other reads and trains on from."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from conformance.clients import tiny
from conformance.ranks import Rank


class _Training:
    def __init__(self, rank: Rank, *, full: bool, use_orig_params: bool) -> None:
        self.batches = tiny.tokens(rank.rank, 6)
        self.model = tiny.sharded_layers(use_orig_params)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **tiny.ADAM)
        self.options = StateDictOptions(full_state_dict=full)

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer, options=self.options)
        return {"model": model, "optimizer": optimizer}

    def train_second_half(self) -> dict[str, Any]:
        losses = tiny.train_layers(self.model, self.optimizer, self.batches[3:])
        return {"losses": losses, "weights": tiny.unsharded(self.model)}


def write(rank: Rank, *, folder: str, **options: bool) -> dict[str, Any]:
    """Save in the middle of a training, and continue."""
    training = _Training(rank, **options)
    tiny.train_layers(training.model, training.optimizer, training.batches[:3])
    dcp.save(training.state(), checkpoint_id=folder)
    return training.train_second_half()


def read(rank: Rank, *, folder: str, **options: bool) -> dict[str, Any]:
    """Load the saved training, and continue."""
    training = _Training(rank, **options)
    state = training.state()
    dcp.load(state, checkpoint_id=folder)
    states = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
    set_state_dict(training.model, training.optimizer, **states, options=training.options)
    return training.train_second_half()
