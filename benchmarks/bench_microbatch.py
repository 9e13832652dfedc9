"""A step of a small transformer with four microbatches: in impl each one is checked, in torch none is."""

import contextlib

import torch
from torch import nn

from benchmarks import comparison
from benchmarks.common import DEVICES, SEED, require, scaler_of
from benchmarks.timing import Workload

_WIDTH, _LAYERS, _VOCABULARY, _MICROBATCHES = 256, 4, 256, 4


def accumulation(subject: str, tokens: int, device: str) -> Workload:
    require(device)
    torch.manual_seed(SEED)
    layers = [
        nn.TransformerEncoderLayer(_WIDTH, 4, 4 * _WIDTH, dropout=0.0, batch_first=True)
        for _ in range(_LAYERS)
    ]
    model = nn.Sequential(nn.Embedding(_VOCABULARY, _WIDTH), *layers, nn.Linear(_WIDTH, _VOCABULARY)).to(
        device
    )
    inputs = torch.randint(_VOCABULARY, (_MICROBATCHES, tokens // 128, 128), device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    scaler = scaler_of(subject, device)
    region = contextlib.nullcontext if subject == "torch" else scaler.microbatch

    def accumulate() -> None:
        optimizer.zero_grad()
        for batch in inputs:
            with region(optimizer):
                loss = nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())
                scaler.scale(loss / _MICROBATCHES).backward()

    def call() -> None:
        accumulate()
        scaler.step(optimizer)
        scaler.update()

    def effect() -> list[torch.Tensor]:
        accumulate()
        scaler.unscale_(optimizer)
        scaler.update()
        return [param.grad.clone() for param in model.parameters() if param.grad is not None]

    return Workload(call, effect=effect)


class RatioMicrobatches(comparison.Ratio):
    title = "Accumulation of four microbatches"
    area = "AMP step"
    curve = "microbatches, {tokens} tokens each"
    params = [[256, 1024], DEVICES]
    param_names = ["tokens", "device"]
    workload = staticmethod(accumulation)

    def setup_cache(self):
        return self.measure_all()

    setup_cache.timeout = 1_800
