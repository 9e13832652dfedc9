"""What the ranks of bench_fsdp.py do: each keeps its sharded models between calls, so that a call is one step."""

import functools
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.common import member

WIDTH, HEADS, LAYERS, WORDS = 512, 8, 6, 4096  # 21 million parameters
TOKENS, SEQUENCES = 64, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.before_mlp = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.before_attention(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(nn.functional.gelu(self.up(self.before_mlp(x))))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        for block in self.blocks:
            x = block(x)
        return nn.functional.linear(self.norm(x), self.words.weight)


@functools.cache
def sharded(subject: str, use_orig_params: bool) -> tuple[nn.Module, torch.optim.Optimizer, Tensor]:
    """The model, dealt; its optimizer; and this rank's words."""
    torch.manual_seed(0)
    wrapper = member(subject, "distributed.fsdp.FullyShardedDataParallel")
    policy = member(subject, "distributed.fsdp.wrap.ModuleWrapPolicy")({Block})
    with warnings.catch_warnings(action="ignore"):  # a world of one is told to be NO_SHARD
        model = wrapper(
            Transformer(),
            auto_wrap_policy=policy,
            device_id=torch.device("cpu"),
            use_orig_params=use_orig_params,
        )
    words = torch.randint(
        0, WORDS, (SEQUENCES, TOKENS), generator=torch.Generator().manual_seed(dist.get_rank())
    )
    return model, torch.optim.SGD(model.parameters(), lr=1e-3), words


def step(rank: Any, *, subject: str, use_orig_params: bool) -> None:
    model, optimizer, words = sharded(subject, use_orig_params)
    logits = model(words)
    nn.functional.cross_entropy(logits.flatten(0, 1), words.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()


def weights_after_a_step(rank: Any, *, subject: str, use_orig_params: bool) -> list[Tensor]:
    """This rank's parts, from the same beginning each time."""
    sharded.cache_clear()
    step(rank, subject=subject, use_orig_params=use_orig_params)
    model, _, _ = sharded(subject, use_orig_params)
    return [p.detach().flatten()[:1000].clone() for p in model.parameters()]
