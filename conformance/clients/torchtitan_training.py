"""Trainings with torchtitan's sharding of its decoders, the only part that needs no accelerator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
from torchtitan.distributed.utils import clip_grad_norm_
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import Llama3Model, llama3_configs

from conformance.clients import tiny
from conformance.ranks import Rank

# The limit is above all norms, because scaling bfloat16 weights would amplify the last bits of a norm.
_MAX_NORM = 100.0


def train(
    rank: Rank, *, dtype: torch.dtype, reshards: str, is_tied: bool, is_chunked: bool, recomputes: bool
) -> dict[str, Any]:
    """Train two blocks of torchtitan's debug model, created on the meta device.

    The chunked loss runs one backward for each chunk.
    """
    with torch.device("meta"):
        model: Any = _config(is_tied).build()
    if recomputes:
        FullAC.Config().build(dump_folder="").apply(model)
    mesh = rank.mesh(rank.world_size, names=("fsdp",))
    apply_fsdp_to_decoder(
        model, mesh, dtype, torch.float32, pp_enabled=False, reshard_after_forward_policy=reshards
    )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(
                True
            )  # torch multiplies in the collective, which gloo does not
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_states()
    loss_of: Any = (
        ChunkedLossWrapper.Config(num_chunks=4) if is_chunked else CrossEntropyLoss.Config()
    ).build()
    if is_chunked:
        loss_of.set_lm_head(model.lm_head)
        model._skip_lm_head = True
    optimizer = torch.optim.AdamW(model.parameters(), **tiny.ADAM)
    losses, norms = [], []
    for batch in tiny.tokens(rank.rank, 4):
        labels = torch.roll(batch, -1, 1)
        loss, _ = loss_of(model(batch), labels, torch.tensor(batch.numel() * rank.world_size))
        loss.backward()
        norms.append(clip_grad_norm_(list(model.parameters()), _MAX_NORM))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return {
        "sharded": isinstance(model, FSDPModule),
        "losses": losses,
        "norms": tiny.gathered(norms),
        "weights": tiny.gathered(dict(model.named_parameters())),
    }


def _config(is_tied: bool) -> Llama3Model.Config:
    """Return the config of the debug model with causal attention.

    Its own masks need compiled attention, which has no backward on a CPU.
    """
    config = llama3_configs["debugmodel"]("flex")
    attention = config.layers[0].attention
    attention = replace(
        attention,
        inner_attention=ScaledDotProductAttention.Config(),
        rope=replace(attention.rope, max_seq_len=tiny.LENGTH),
    )
    return replace(
        config,
        layers=[replace(layer, attention=attention) for layer in config.layers[:2]],
        enable_weight_tying=is_tied,
    )
