"""A byte-level GPT in plain torch: pre-norm blocks, learned positions, a head tied to the embedding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

BYTES = 256


@dataclass(frozen=True)
class Shape:
    layers: int
    heads: int
    width: int
    context: int  # bytes a window holds


# B = windows in a batch, T = bytes in a window, D = width, H = heads
class GPTBlock(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm_attention = nn.LayerNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.attention_out = nn.Linear(shape.width, shape.width)
        self.norm_mlp = nn.LayerNorm(shape.width)
        self.mlp_in = nn.Linear(shape.width, 4 * shape.width)
        self.mlp_out = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        x_BTD = x_BTD + self._attend(self.norm_attention(x_BTD))
        hidden = F.gelu(self.mlp_in(self.norm_mlp(x_BTD)))
        return x_BTD + self.mlp_out(hidden)

    def _attend(self, x_BTD: torch.Tensor) -> torch.Tensor:
        B, T, D = x_BTD.shape
        q, k, v = self.qkv(x_BTD).view(B, T, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        mixed_BHT = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.attention_out(mixed_BHT.transpose(1, 2).reshape(B, T, D))


class GPT(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, shape.width)
        self.position = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(GPTBlock(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                # The residual stream adds 2 * layers terms, whose sum should be as small as one term.
                is_residual = name.endswith(("attention_out.weight", "mlp_out.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * shape.layers) ** 0.5 if is_residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, window_BT: torch.Tensor) -> torch.Tensor:
        """Return the logits [B, T, 256] of the byte that follows each byte."""
        x_BTD = self.embedding(window_BT) + self.position.weight[: window_BT.shape[1]]
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return F.linear(self.norm(x_BTD), self.embedding.weight)

    def loss(self, window_BT: torch.Tensor) -> torch.Tensor:
        """Return the mean cross entropy, in nats per byte, of all bytes but the first of each window."""
        logits = self(window_BT[:, :-1])
        # Autocast on the CPU runs log_softmax in half precision, which is too coarse to compare curves.
        return F.cross_entropy(logits.float().flatten(0, 1), window_BT[:, 1:].flatten())
