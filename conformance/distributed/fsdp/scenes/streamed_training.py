"""A training for programs whose work is on streams of the user."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

import torch
from torch import nn

from conformance.distributed.fsdp.scenes.fully_shard_training import full_parameters
from conformance.distributed.fsdp.scenes.scene import Scene

WIDTH = 16
UNIT_NUMEL = WIDTH * (WIDTH + 1)  # elements of a layer, and of its gathered or reduced buffer


class Fork(nn.Module):
    """Two layers, of which one computes on a stream of its own."""

    def __init__(self, stream: torch.Stream | None) -> None:
        super().__init__()
        self.a, self.b, self.stream = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), stream

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.stream is None:
            return self.a(x) + self.b(x)
        main = torch.accelerator.current_stream()
        self.stream.wait_stream(main)
        with self.stream:
            z = self.b(x)
        y = self.a(x)
        main.wait_stream(self.stream)
        return y + z


class StreamedTraining:
    """Model of three layers and streams of the user, which the unsharded reference on the CPU does not have.

    The second layer forks if `forks`.
    """

    def __init__(
        self, scene: Scene, api: str = "fully_shard", *, forks: bool = False, **options: Any
    ) -> None:
        self.device, self.api = scene.rank.device, api
        self.streams = [torch.Stream(self.device) if scene.shards else None for _ in range(3)]
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            layers: list[nn.Module] = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
            if forks:
                layers[1] = Fork(self.streams[0])
        model = nn.Sequential(*layers).to(self.device)
        if api == "fully_shard":
            self.model = scene.shard_children(model, **options)
        else:
            self.model = scene.wrap(
                model, strategy="FULL_SHARD", units=[nn.Linear], use_orig_params=True, **options
            )
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.5)
        self.x = torch.linspace(-1, 1, UNIT_NUMEL, device=self.device).view(-1, WIDTH)

    def loss(self, factor: float | torch.Tensor = 1.0) -> torch.Tensor:
        return self.model(factor * self.x).square().mean()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    @contextlib.contextmanager
    def unsynchronised(self) -> Generator[None]:
        """Context manager for a forward and backward without synchronisation."""
        if self.api != "fully_shard":
            with self.model.no_sync():
                yield
            return
        self.model.set_requires_gradient_sync(False)
        yield
        self.model.set_requires_gradient_sync(True)

    @contextlib.contextmanager
    def on(self, stream: torch.Stream | None, *, joins: bool = True) -> Generator[None]:
        """Context manager for work on a stream, which waits for the current one, and the reverse if it `joins`."""
        if stream is None:
            yield
            return
        main = torch.accelerator.current_stream()
        stream.wait_stream(main)
        with stream:
            yield
        if joins:
            main.wait_stream(stream)

    def fill_freed_memory(self, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
        """Return tensors that get memory which was given back to the current stream."""
        sizes = (UNIT_NUMEL, UNIT_NUMEL - WIDTH, UNIT_NUMEL // 2, WIDTH) * 12
        return [torch.full((size,), 7.0, device=self.device, dtype=dtype) for size in sizes]

    def fill_freed_memory_of(self, stream: torch.Stream | None, dtype: torch.dtype = torch.float32) -> None:
        """Make `stream` allocate, as for the next batch. Then the current stream waits for it."""
        if stream is not None:
            with stream:
                memory = self.fill_freed_memory(dtype)
            torch.accelerator.current_stream().wait_stream(stream)
            del memory

    def parameters(self) -> dict[str, torch.Tensor]:
        return full_parameters(self.model)
