"""Trainings with Lightning: by Fabric, with a user-defined loop, and by its Trainer."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import lightning
import torch
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.fabric.strategies import FSDPStrategy as FabricStrategy
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import FSDPStrategy as TrainerStrategy
from torch.distributed.fsdp import FullyShardedDataParallel

from conformance.clients import tiny
from conformance.clients.adapters import lightning_on_the_cpu
from conformance.ranks import Rank


# Lightning rejects the classes of these strategies on CPUs, but not subclasses.
class FabricOnTheCPU(FabricStrategy):
    pass


class TrainerOnTheCPU(TrainerStrategy):
    pass


def _arguments(rank: Rank, strategy: Any) -> dict[str, Any]:
    devices = {"accelerator": "cpu", "devices": rank.world_size, "plugins": [TorchElasticEnvironment()]}
    return {**devices, "strategy": strategy, "precision": "bf16-mixed"}


@lightning_on_the_cpu()
def fabric(rank: Rank, *, folder: str, state_dict_type: str) -> dict[str, Any]:
    """Train in bfloat16, with clipping and two batches a step. Save half way and load after further steps."""
    strategy = FabricOnTheCPU(auto_wrap_policy={tiny.MLP}, state_dict_type=state_dict_type)
    fabric = lightning.Fabric(**_arguments(rank, strategy))
    fabric.launch()
    model = fabric.setup_module(tiny.layers())
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), **tiny.ADAM))
    losses, norms = [], []

    def steps(batches: Iterable[torch.Tensor]) -> None:
        for number, batch in enumerate(batches):
            waits = number % 2 == 0
            with fabric.no_backward_sync(model, enabled=waits):
                loss = tiny.loss_of(model, batch)
                fabric.backward(loss)
            losses.append(loss.detach())
            if not waits:
                norms.append(fabric.clip_gradients(model, optimizer, max_norm=tiny.MAX_NORM))
                optimizer.step()
                optimizer.zero_grad()

    data, path = tiny.tokens(rank.rank, 8), os.path.join(folder, "saved")
    steps(data[:4])
    fabric.save(path, {"model": model, "optimizer": optimizer, "step": 4})
    steps(data[4:6])
    state = {"model": model, "optimizer": optimizer, "step": 0}
    fabric.load(path, state)
    steps(data[4:])
    sharded = model._forward_module
    return {
        "sharded": isinstance(sharded, FullyShardedDataParallel),
        "losses": losses,
        "norms": norms,
        "step": state["step"],
        "weights": tiny.unsharded(sharded),
    }


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = tiny.layers()
        self.losses: list[torch.Tensor] = []

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        loss = tiny.loss_of(self.layers, batch)
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), **tiny.ADAM)


@lightning_on_the_cpu()
def trainer(rank: Rank, *, folder: str, state_dict_type: str) -> dict[str, Any]:
    """Train in bfloat16 with two batches a step, then resume from its checkpoint in a new trainer."""

    def trained(steps: int, checkpoint: str | None = None) -> dict[str, Any]:
        module = Module()
        strategy = TrainerOnTheCPU(auto_wrap_policy={tiny.MLP}, state_dict_type=state_dict_type)
        saving = ModelCheckpoint(dirpath=folder, every_n_train_steps=2, save_top_k=-1, filename="{step}")
        quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
        trainer = lightning.Trainer(
            **_arguments(rank, strategy),
            **quiet,
            max_steps=steps,
            accumulate_grad_batches=2,
            callbacks=[saving],
            use_distributed_sampler=False,
            default_root_dir=folder,
        )
        batches = torch.utils.data.DataLoader(tiny.tokens(rank.rank, 8), batch_size=None)
        trainer.fit(module, batches, ckpt_path=checkpoint)
        sharded = trainer.strategy.model
        return {
            "sharded": isinstance(sharded, FullyShardedDataParallel),
            "losses": module.losses,
            "weights": tiny.unsharded(sharded),
        }

    first = trained(3)
    return {"first": first, "resumed": trained(4, os.path.join(folder, "step=2.ckpt"))}
