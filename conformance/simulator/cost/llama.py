"""Llama 3.1 as torchtitan trains it, with selective checkpointing by operator."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from conformance.simulator.cost.fused import Gate, Norm, Rotate

aten = torch.ops.aten


@dataclass(frozen=True)
class LlamaConfig:
    layers: int = 32
    width: int = 4096
    heads: int = 32
    key_value_heads: int = 8
    hidden: int = 14336
    vocabulary: int = 128256
    fused: bool = False  # blocks as `torch.compile` is assumed to compile them

    @property
    def head_width(self) -> int:
        return self.width // self.heads


class RMSNorm(nn.Module):
    """Compute in float32 and operator by operator, as torch did when the published figures were measured."""

    def __init__(self, width: int, fused: bool = False) -> None:
        super().__init__()
        self.fused = fused
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fused:
            return Norm.apply(x, self.weight)
        wide = x.float()
        inverse = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return (wide * inverse).type_as(x) * self.weight


def rotated(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns).flatten(-2).type_as(x)


def gated(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.silu(a) * b


class Attention(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.rotated = Rotate.apply if config.fused else rotated
        width, key_width = config.width, config.key_value_heads * config.head_width
        self.wq = nn.Linear(width, width, bias=False)
        self.wk = nn.Linear(width, key_width, bias=False)
        self.wv = nn.Linear(width, key_width, bias=False)
        self.wo = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (-1, self.config.head_width)) for layer in (self.wq, self.wk, self.wv)
        )
        repeats = self.config.heads // self.config.key_value_heads
        query, key = self.rotated(query, turns), self.rotated(key, turns)
        key, value = (heads.repeat_interleave(repeats, 2) for heads in (key, value))
        # Called by name, because torch would choose the attention that stores all scores on this device.
        out = aten._scaled_dot_product_flash_attention(
            *(heads.transpose(1, 2) for heads in (query, key, value)), is_causal=True
        )[0]
        return self.wo(out.transpose(1, 2).flatten(2))


class LlamaBlock(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gated = Gate.apply if config.fused else gated
        self.attention_norm, self.ffn_norm = (RMSNorm(config.width, config.fused) for _ in range(2))
        self.attention = Attention(config)
        self.w1 = nn.Linear(config.width, config.hidden, bias=False)
        self.w2 = nn.Linear(config.hidden, config.width, bias=False)
        self.w3 = nn.Linear(config.width, config.hidden, bias=False)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        options = {"preserve_rng_state": False, "context_fn": kept_by_operator}
        return checkpoint(self.body, x, turns, use_reentrant=False, **options)

    def body(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        h = x + self.attention(self.attention_norm(x), turns)
        normed = self.ffn_norm(h)
        return h + self.w2(self.gated(self.w1(normed), self.w3(normed)))


class Llama(nn.Module):
    """Logits of `[batch, length]` tokens."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList(LlamaBlock(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.width)
        self.output = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        half = self.config.head_width // 2
        turns = torch.empty(tokens.shape[1], 1, half, dtype=torch.complex64, device=tokens.device)
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, turns)
        return self.output(self.norm(x))


def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def kept_by_operator() -> Any:
    """Return contexts that keep every other matrix product and the attention for backward, and recompute the rest."""
    return create_selective_checkpoint_contexts(functools.partial(_policy, {True: 0, False: 0}))


def _policy(products: dict[bool, int], context: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
    is_kept = operator is aten._scaled_dot_product_flash_attention.default
    if operator is aten.mm.default:
        products[context.is_recompute] += 1
        is_kept = products[context.is_recompute] % 2 == 1
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE
