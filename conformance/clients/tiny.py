"""The models and the data that libraries train: from a configuration and fixed seeds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import peft
import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from transformers import GPT2Config, GPT2LMHeadModel

_VOCABULARY, LENGTH = 64, 16
# The eps is large, so that no element's step depends on the last bits of a tiny gradient.
ADAM: Mapping[str, float] = {"lr": 1e-2, "eps": 1e-3}
MAX_NORM = 0.05  # below all norms


def tokens(rank: int, batches: int) -> torch.Tensor:
    """Return batches of four rows. Each rank has its own."""
    drawn = torch.Generator().manual_seed(1 + rank)
    return torch.randint(0, _VOCABULARY, (batches, 4, LENGTH), generator=drawn)


def gpt2(dtype: torch.dtype = torch.float32) -> Any:
    """Return a model of two blocks with tied weights, and without dropout, because its draws are not compared."""
    torch.manual_seed(0)
    sizes = {"n_positions": LENGTH, "n_embd": 16, "n_layer": 2, "n_head": 2}
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=_VOCABULARY, **sizes, **dropouts)).to(dtype)


def lora() -> Any:
    """Return the same model, frozen, with adapters."""
    model = gpt2()
    torch.manual_seed(1)
    adapted = ["c_attn", "c_proj"]
    return peft.get_peft_model(
        model, peft.LoraConfig(r=4, target_modules=adapted, fan_in_fan_out=True, init_lora_weights="gaussian")
    )


def layers() -> torch.nn.Sequential:
    """Return a model with two inner units, `MLP`s."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Embedding(_VOCABULARY, 16), MLP(), MLP(), torch.nn.Linear(16, _VOCABULARY)
    )


class MLP(torch.nn.Sequential):
    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 16))


def sharded_layers(use_orig_params: bool) -> FullyShardedDataParallel:
    """Return `layers`, wrapped like each `MLP` in them."""
    return FullyShardedDataParallel(
        layers(),
        auto_wrap_policy=ModuleWrapPolicy({MLP}),
        use_orig_params=use_orig_params,
        device_id=torch.device("cpu"),
    )


def train_layers(
    model: Any, optimizer: torch.optim.Optimizer, batches: Iterable[torch.Tensor]
) -> list[torch.Tensor]:
    """Train a model of `layers` with a step for each batch. Return the losses."""
    losses = []
    for batch in batches:
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def loss_of(model: Any, batch: torch.Tensor) -> torch.Tensor:
    """Return the loss of predicting the next token with a model of `layers`."""
    logits = model(batch)[:, :-1].float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def unsharded(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return every parameter of a sharded model, on every rank."""
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        return {name: value.detach().clone() for name, value in model.named_parameters()}


def gathered(value: Any) -> Any:
    """Return `value` with its DTensors replaced by full tensors, also inside dictionaries and lists."""
    if isinstance(value, Mapping):
        return {name: gathered(item) for name, item in value.items()}
    if isinstance(value, list):
        return [gathered(item) for item in value]
    return value.detach().full_tensor() if isinstance(value, DTensor) else value
