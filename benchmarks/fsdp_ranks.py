"""Cases for the ranks of bench_fsdp.py. Each rank keeps its sharded models between calls, so that a call is a step."""

import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks import process_memory
from benchmarks.common import member

WIDTH, HEADS, LAYERS, WORDS = 512, 8, 6, 4096  # 21 million parameters
TOKENS, SEQUENCES = 64, 2


class TransformerBlock(nn.Module):
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
        self.blocks = nn.ModuleList(TransformerBlock() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        for block in self.blocks:
            x = block(x)
        return nn.functional.linear(self.norm(x), self.words.weight)


@functools.lru_cache(maxsize=4)  # number of models timed together
def trained(subject: str, use_orig_params: bool) -> tuple[Callable[[], None], Tensor]:
    """Return a step of a sharded or replicated model, and the logits after its first step."""
    torch.manual_seed(0)
    with warnings.catch_warnings(action="ignore"):  # FSDP switches one rank to NO_SHARD
        model = _PEERS[subject]() if subject in _PEERS else flat_sharded(subject, use_orig_params)
    return stepping(model)


def stepping(model: nn.Module) -> tuple[Callable[[], None], Tensor]:
    """Return a step of `model`, and the logits after its first step, which has been taken."""
    words = torch.randint(
        0, WORDS, (SEQUENCES, TOKENS), generator=torch.Generator().manual_seed(dist.get_rank())
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def take_step() -> None:
        logits = model(words)
        nn.functional.cross_entropy(logits.flatten(0, 1), words.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    take_step()
    with torch.no_grad():
        return take_step, model(words)[0, 0]


def flat_sharded(subject: str, use_orig_params: bool, device: str = "cpu") -> nn.Module:
    return member(subject, "distributed.fsdp.FullyShardedDataParallel")(
        Transformer(),
        auto_wrap_policy=member(subject, "distributed.fsdp.wrap.ModuleWrapPolicy")({TransformerBlock}),
        device_id=torch.device(device),
        use_orig_params=use_orig_params,
    )


def fully_sharded(subject: str, device: str = "cpu") -> nn.Module:
    model, fully_shard = Transformer().to(device), member(subject, "distributed.fsdp.fully_shard")
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


_PEERS: dict[str, Callable[[], nn.Module]] = {
    "FSDP2": lambda: fully_sharded("torch"),
    "DDP": lambda: DistributedDataParallel(Transformer()),
}


def step(rank: Any, *, subject: str, use_orig_params: bool) -> None:
    trained(subject, use_orig_params)[0]()


def logits_after_a_step(rank: Any, *, subject: str, use_orig_params: bool) -> list[Tensor]:
    return [trained(subject, use_orig_params)[1]]


def peak_bytes(rank: Any, *, subject: str, use_orig_params: bool) -> int:
    return peak_of(functools.partial(step, rank, subject=subject, use_orig_params=use_orig_params))


def peak_of(take_step: Callable[[], None]) -> int:
    """Return the peak memory of this process in a step, above its memory before the model exists.

    The first call of `take_step` creates the model.
    """
    # A step of any model leaves memory of torch and the allocator, which does not count.
    local = Transformer()
    local(torch.zeros(SEQUENCES, TOKENS, dtype=torch.long)).sum().backward()
    del local
    process_memory.give_back_at_once()
    without = process_memory.resident_bytes()
    for _ in range(2):
        take_step()
    process_memory.forget_peak()
    take_step()
    return process_memory.peak_bytes() - without


def bytes_sent(rank: Any, *, subject: str, use_orig_params: bool) -> int:
    """Return the bytes sent over the loopback interface in a step, by all ranks and other programs."""
    for _ in range(2):
        step(rank, subject=subject, use_orig_params=use_orig_params)
    dist.barrier()
    before = _sent_over_loopback()
    dist.barrier()
    step(rank, subject=subject, use_orig_params=use_orig_params)
    dist.barrier()
    return _sent_over_loopback() - before


def _sent_over_loopback() -> int:
    lines = Path("/proc/net/dev").read_text().splitlines()
    [numbers] = [line.partition(":")[2].split() for line in lines if line.strip().startswith("lo:")]
    return int(numbers[8])
