"""Small models trained on the simulated device and on the CPU. The program prints whose bits agree, as JSON."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from conformance import simulator

STEPS, HEADS, VOCABULARY = 3, 2, 30


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.out = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)
        self.norm, self.qkv, self.mix = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1)
        )
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(attended.transpose(1, 2).flatten(2))
        return self.out(nn.functional.gelu(x))


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1, bias=False),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 4, 3),
            nn.ConvTranspose2d(4, 4, 2),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.body(images).mean((2, 3))


def ids(seed: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(seed))


def normal(*shape: int) -> Callable[[int], torch.Tensor]:
    return lambda seed: torch.randn(shape, generator=torch.Generator().manual_seed(seed))


WAYS: dict[str, dict] = {
    "transformer, Adam, foreach": {"optimizer": lambda p: torch.optim.Adam(p, 1e-2, foreach=True)},
    "transformer, Adam, one by one": {"optimizer": lambda p: torch.optim.Adam(p, 1e-2, foreach=False)},
    "transformer, AdamW, fused": {"optimizer": lambda p: torch.optim.AdamW(p, 1e-2, fused=True)},
    "transformer, SGD, scaled": {
        "optimizer": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        "scale": 2.0**12,
    },
    "transformer, SGD, an overflow": {"optimizer": lambda p: torch.optim.SGD(p, 0.1), "scale": 2.0**126},
    "transformer, bfloat16": {"optimizer": lambda p: torch.optim.SGD(p, 0.1), "dtype": torch.bfloat16},
    "convolutions": {"model": Convolutions, "data": normal(4, 3, 8, 8)},
}


def train(device: str, model=Transformer, data=ids, optimizer=None, scale=None, dtype=None) -> str:
    torch.manual_seed(0)
    model = model().to(device)
    stepper = optimizer(model.parameters()) if optimizer else torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler(device, enabled=scale is not None, init_scale=scale or 1.0)
    for step in range(STEPS):
        batch = data(step).to(device, non_blocking=True)
        with torch.autocast(device, dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            loss = model(batch).float().square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(stepper)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(stepper)
        scaler.update()
        stepper.zero_grad()
    parameters = b"".join(p.detach().cpu().view(torch.uint8).numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(parameters).hexdigest()


def main(seeds: int) -> None:
    simulator.enable()
    torch.set_num_threads(1)
    simulator.log_hazards()
    results = {}
    for name, way in WAYS.items():
        with sdpa_kernel(SDPBackend.MATH):
            on_cpu = train("cpu", **way)
        outcomes, hazards = [], []
        for seed in range(seeds):
            simulator.set_schedule(seed)
            outcomes.append(train("sim", **way))
            hazards += [str(hazard) for hazard in simulator.take_hazards()]
        results[name] = {"equal": [outcome == on_cpu for outcome in outcomes], "hazards": hazards}
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main(int(sys.argv[1]))
