"""Trainings with accelerate and libraries built on it: transformers' Trainer and peft's adapters."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import peft
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers import Trainer, TrainingArguments
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

from conformance.clients import tiny
from conformance.clients.adapters import accelerate_on_the_cpu
from conformance.ranks import Rank

_BY_BLOCK = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["GPT2Block"]}


@accelerate_on_the_cpu()
def train(
    rank: Rank, *, folder: str, state_dict_type: str, use_orig_params: bool, dtype: torch.dtype, lora: bool
) -> dict[str, Any]:
    """Train with FullyShardedDataParallel in bfloat16, with clipping and two batches a step.

    The checkpoint is saved half way and loaded after further steps.
    """
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=1,
        reshard_after_forward="FULL_SHARD",
        use_orig_params=use_orig_params,
        **_BY_BLOCK,
        state_dict_type=state_dict_type,
    )
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2, fsdp_plugin=plugin)
    base_model = tiny.lora() if lora else tiny.gpt2(dtype)
    if lora:
        plugin.auto_wrap_policy = peft.utils.other.fsdp_auto_wrap_policy(base_model)
    model = accelerator.prepare(base_model)
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), **tiny.ADAM))
    outcome = _trained(rank, accelerator, model, optimizer, folder)
    return {
        "sharded": isinstance(model, FullyShardedDataParallel),
        "weights": tiny.unsharded(model),
        **outcome,
    }


@accelerate_on_the_cpu()
def train_version_2(
    rank: Rank, *, folder: str, state_dict_type: str, lora: bool, from_the_first_rank: bool
) -> dict[str, Any]:
    """Train like `train`, but with fully_shard and upcast parameters.

    With `from_the_first_rank`, rank 0's weights are broadcast and blocks are recomputed in backward.
    """
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=True,
        **_BY_BLOCK,
        state_dict_type=state_dict_type,
        cpu_ram_efficient_loading=from_the_first_rank,
        activation_checkpointing=from_the_first_rank,
    )
    base_model = tiny.lora() if lora else tiny.gpt2(torch.bfloat16)
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2, fsdp_plugin=plugin)
    model, optimizer = accelerator.prepare(
        base_model, torch.optim.AdamW(base_model.parameters(), **tiny.ADAM)
    )
    outcome = _trained(rank, accelerator, model, optimizer, folder)
    return {
        "sharded": isinstance(model, FSDPModule),
        "weights": tiny.gathered(dict(model.named_parameters())),
        **outcome,
    }


def _trained(rank: Rank, accelerator: Accelerator, model: Any, optimizer: Any, folder: str) -> dict[str, Any]:
    losses, norms = [], []

    def steps(batches: Iterable[torch.Tensor]) -> None:
        for batch in batches:
            with accelerator.accumulate(model):
                loss = model(input_ids=batch, labels=batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(
                        tiny.gathered(accelerator.clip_grad_norm_(model.parameters(), tiny.MAX_NORM))
                    )
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())

    data = tiny.tokens(rank.rank, 8)
    steps(data[:4])
    accelerator.save_state(folder)
    steps(data[4:6])
    accelerator.load_state(folder)
    steps(data[4:])
    saved = accelerator.get_state_dict(model)  # whole on the first rank, empty on others
    return {"losses": losses, "norms": norms, "saved": saved}


@accelerate_on_the_cpu()
def trainer(rank: Rank, *, folder: str, state_dict_type: str) -> dict[str, Any]:
    """Train with transformers' Trainer in bfloat16, two batches a step. Resume from its checkpoint in a new Trainer."""
    rows = tiny.tokens(0, 8).flatten(0, 1)
    data = [{"input_ids": row, "labels": row} for row in rows]

    def made(steps: int) -> Trainer:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            bf16=True,
            fsdp=True,
            fsdp_config={
                "version": 1,
                "transformer_layer_cls_to_wrap": ["GPT2Block"],
                "state_dict_type": state_dict_type,
                "sync_module_states": False,
            },
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            max_grad_norm=tiny.MAX_NORM,
            learning_rate=tiny.ADAM["lr"],
            adam_epsilon=tiny.ADAM["eps"],
            lr_scheduler_type="constant",
            max_steps=steps,
            save_steps=2,
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
        )
        return Trainer(model=tiny.gpt2(), args=arguments, train_dataset=data)

    def seen(trainer: Trainer) -> dict[str, Any]:
        log = [entry for entry in trainer.state.log_history if "loss" in entry]
        return {
            "sharded": isinstance(trainer.model_wrapped, FullyShardedDataParallel),
            "losses": [torch.tensor(entry["loss"]) for entry in log],
            "norms": [torch.tensor(entry["grad_norm"]) for entry in log],
            "weights": tiny.unsharded(trainer.model_wrapped),
        }

    first, resumed = made(4), made(6)
    first.train()
    resumed.train(resume_from_checkpoint=os.path.join(folder, "checkpoint-2"))
    return {"first": seen(first), "resumed": seen(resumed)}


def generate(rank: Rank, *, recurse: bool) -> dict[str, Any]:
    """Generate text after each step, with all units unsharded or only the outermost one, as transformers documents."""
    model = FullyShardedDataParallel(
        tiny.gpt2(),
        auto_wrap_policy=ModuleWrapPolicy({GPT2Block}),
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )
    optimizer = torch.optim.AdamW(model.parameters(), **tiny.ADAM)
    outcome: dict[str, Any] = {"losses": [], "generated": []}
    for batch in tiny.tokens(rank.rank, 2):
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        outcome["losses"].append(loss.detach())
        with FullyShardedDataParallel.summon_full_params(model, recurse=recurse, writeback=False):
            generated = model.module.generate(batch[:, :4], max_new_tokens=4, do_sample=False, pad_token_id=0)
        outcome["generated"].append(generated)
    return outcome
