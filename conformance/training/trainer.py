"""The training loop. Its mixed-precision components come from a library: autocast, the scaler and clipping."""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from conformance.training.certificate import RunRecorder
from conformance.training.config import DTYPES, OPTIMIZERS, TrainingConfig
from conformance.training.corpus import Corpus, windows
from conformance.training.gpt import GPT


@dataclass(frozen=True)
class Parts:
    """Components that the loop takes from a library. Each works like torch's component of that name."""

    name: str
    autocast: Callable[..., Any]
    GradScaler: Callable[..., Any]
    clip_grad_norm_: Callable[..., Any]
    capture: Callable[..., Any] | None = None  # capture of optimizers, None for torch


@dataclass
class TrainingRun:
    """Record of one run. The entries of step i are `losses[i]`, `grad_norms[i]` and `scales[i]`."""

    losses: list[float] = field(default_factory=list)  # bits a byte, before the step
    grad_norms: list[float] = field(default_factory=list)  # results of clipping: unscaled, unclipped
    scales: list[float] = field(default_factory=list)  # scale following each step
    skipped: list[int] = field(default_factory=list)  # steps that changed no weight
    held_out: dict[int, float] = field(default_factory=dict)  # bits a byte, by the number of steps done
    weights: str = ""  # sha256 of all parameters at the end


class Trainer:
    def __init__(self, parts: Parts, config: TrainingConfig, corpus: Corpus) -> None:
        self.parts, self.config, self.corpus = parts, config, corpus
        torch.manual_seed(config.seed)
        self.model = GPT(config.shape).to(config.device)
        self.parameters = list(self.model.parameters())
        if config.rounded_towards is not None:
            with torch.no_grad():
                for parameter in self.parameters:
                    limit = torch.full_like(parameter, config.rounded_towards)
                    parameter.copy_(torch.nextafter(parameter, limit))
        arguments, self._clip_foreach = OPTIMIZERS[config.optimizer]
        self.optimizer = torch.optim.AdamW(
            self.parameters, betas=(0.9, 0.95), weight_decay=config.weight_decay, **arguments
        )
        self.scaler = parts.GradScaler(
            self._device_type,
            init_scale=config.init_scale,
            growth_factor=config.growth_factor,
            backoff_factor=config.backoff_factor,
            growth_interval=config.growth_interval,
        )
        self.position = 0  # training windows drawn so far
        self.run = TrainingRun()
        self.recorder: RunRecorder | None = None

    @property
    def steps_done(self) -> int:
        return len(self.run.losses)

    def advance(self) -> None:
        """Run one step, which the scaler may skip."""
        config, run, step = self.config, self.run, self.steps_done
        for group in self.optimizer.param_groups:
            group["lr"] = config.learning_rate_at(step)
        loss = torch.stack([self._accumulate() for _ in range(config.accumulate)]).sum()
        last = self.parameters[-1]
        if step == config.inject_inf_at and last.grad is not None:
            last.grad.view(-1)[0] = math.inf
        before = last.detach().clone()
        self._record("backward", loss=loss)
        norm = self.update()
        self.optimizer.zero_grad()
        self._record("step")
        # AdamW changes every weight in every step that it takes, so one parameter shows whether the step was skipped.
        if torch.equal(before, last):
            run.skipped.append(step)
        run.grad_norms.append(float(norm))
        run.scales.append(float(self.scaler.get_scale()))
        run.losses.append(float(loss) / math.log(2))

    def update(self) -> torch.Tensor:
        """Unscale, clip, step and update. Return the norm of the gradients before clipping."""
        self.scaler.unscale_(self.optimizer)
        norm = self.parts.clip_grad_norm_(self.parameters, self.config.max_norm, foreach=self._clip_foreach)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return norm

    def record_in(self, folder: Path) -> None:
        """Write a certificate of all steps."""
        self.recorder = RunRecorder(
            folder,
            self.model,
            self.optimizer,
            self.scaler,
            precision=DTYPES[self.config.dtype],
        )

    @torch.no_grad()
    def held_out_bits(self) -> float:
        """Return the mean loss of the held-out windows, in bits per byte."""
        config = self.config
        drawn = windows(
            self.corpus.held_out, config.shape.context + 1, "held out", range(config.held_out_windows)
        ).to(config.device)
        with self._autocast():
            losses = [self.model.loss(part) for part in drawn.split(config.batch)]
        return float(torch.stack(losses).mean()) / math.log(2)

    def weights(self) -> str:
        digest = hashlib.sha256()
        for parameter in self.parameters:
            digest.update(parameter.detach().cpu().numpy().tobytes())
        return digest.hexdigest()

    @property
    def _device_type(self) -> str:
        return torch.device(self.config.device).type

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        return self.parts.autocast(self._device_type, dtype=DTYPES[self.config.dtype])

    def _record(self, phase: str, **values: torch.Tensor) -> None:
        if self.recorder:
            self.recorder.record(phase, **values)

    def _accumulate(self) -> torch.Tensor:
        """Add the gradients of one batch, and return its part of the step's loss."""
        config = self.config
        drawn = range(self.position, self.position + config.batch)
        window_BT = windows(self.corpus.train, config.shape.context + 1, f"train {config.seed}", drawn)
        self.position = drawn.stop
        with self._autocast():
            loss = self.model.loss(window_BT.to(config.device)) / config.accumulate
        self.scaler.scale(loss).backward()
        return loss.detach()


class ByFusedStep(Trainer):
    """Trainer with one `fused_step` call instead of unscaling, clipping, step and update."""

    def update(self) -> torch.Tensor:
        return self.scaler.fused_step(self.optimizer, max_norm=self.config.max_norm)


class Captured(Trainer):
    """Trainer with an optimizer whose step is captured."""

    def __init__(self, parts: Parts, config: TrainingConfig, corpus: Corpus) -> None:
        super().__init__(parts, config, corpus)
        assert parts.capture is not None
        parts.capture(self.optimizer)


def train(
    parts: Parts,
    config: TrainingConfig,
    corpus: Corpus,
    on_step: Callable[[TrainingRun], None] | None = None,
    trained_by: type[Trainer] = Trainer,
    certificate: Path | None = None,
) -> TrainingRun:
    """Run `config` to its end. `certificate` is the folder of the run's certificate, if it gets one."""
    with _repeatable(config):
        trainer = trained_by(parts, config, corpus)
        if certificate:
            trainer.record_in(certificate)
        run = trainer.run
        while trainer.steps_done < config.steps:
            trainer.advance()
            done = trainer.steps_done
            if done % config.evaluate_every == 0:
                run.held_out[done] = trainer.held_out_bits()
            if on_step:
                on_step(run)
        run.held_out[trainer.steps_done] = trainer.held_out_bits()
        run.weights = trainer.weights()
    return run


@contextlib.contextmanager
def _repeatable(config: TrainingConfig) -> Iterator[None]:
    """Context manager with reproducible random numbers, threads and algorithms. The caller's are restored."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    on_cuda = torch.device(config.device).type == "cuda"
    with torch.random.fork_rng(range(torch.cuda.device_count()) if on_cuda else ()):
        torch.set_num_threads(config.threads)
        if on_cuda:
            torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.set_num_threads(threads)
            torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
