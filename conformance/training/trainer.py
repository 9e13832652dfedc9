"""The training loop. Its mixed-precision components come from a library: autocast, the scaler and clipping."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from conformance.training import checkpoint
from conformance.training.certificate import RunRecorder
from conformance.training.config import DTYPES, OPTIMIZERS, TrainingConfig
from conformance.training.corpus import Corpus, windows
from conformance.training.gpt import GPT


class OtherRun(ValueError):
    """Raised if a checkpoint belongs to another run."""


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
    resumed_at: list[int] = field(default_factory=list)
    seconds: float = 0.0
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
        """Write a certificate of the next steps."""
        self.recorder = RunRecorder(
            folder,
            self.model,
            self.optimizer,
            self.scaler,
            precision=DTYPES[self.config.dtype],
            first_step=self.steps_done,
        )

    @torch.no_grad()
    def held_out_bits(self) -> float:
        """Return the mean loss of the held-out windows, in bits per byte."""
        config = self.config
        drawn = windows(
            self.corpus.held_out, config.shape.context + 1, "held out", range(config.held_out_windows)
        ).to(config.device)
        self.model.eval()
        with self._autocast():
            losses = [self.model.loss(part) for part in drawn.split(config.batch)]
        self.model.train()
        return float(torch.stack(losses).mean()) / math.log(2)

    def weights(self) -> str:
        digest = hashlib.sha256()
        for parameter in self.parameters:
            digest.update(parameter.detach().cpu().numpy().tobytes())
        return digest.hexdigest()

    def state_dict(self) -> dict[str, Any]:
        return {
            "of": self._identity(),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "rng": torch.get_rng_state(),
            "device_rng": torch.cuda.get_rng_state() if self._device_type == "cuda" else None,
            "position": self.position,
            "run": dataclasses.asdict(self.run),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state.

        Raises:
            OtherRun: it is of a run with another config, corpus, torch or components.
        """
        here = self._identity()
        changed = [
            f"{k} was {state['of'].get(k)}, is {here[k]}" for k in here if state["of"].get(k) != here[k]
        ]
        if changed:
            raise OtherRun(
                f"the checkpoint is of another run: {'; '.join(changed)}; resume with the same settings"
            )
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        torch.set_rng_state(state["rng"].cpu())
        if state["device_rng"] is not None:
            torch.cuda.set_rng_state(state["device_rng"].cpu())
        self.position = state["position"]
        self.run = TrainingRun(**state["run"])
        self.run.resumed_at.append(self.steps_done)

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

    def _identity(self) -> dict[str, Any]:
        """Return everything that determines a run, except for its number of steps."""
        config = dataclasses.asdict(self.config)
        del config["steps"]
        return {
            **config,
            "parts": self.parts.name,
            "corpus": self.corpus.fingerprint,
            # The version is a string subclass of torch, which a checkpoint cannot contain.
            "torch": str(torch.__version__),
        }


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
    saved: Path | None = None,
    save_every: int = 10,
    on_step: Callable[[TrainingRun], None] | None = None,
    trained_by: type[Trainer] = Trainer,
    certificate: Path | None = None,
) -> TrainingRun:
    """Run `config` to its end.

    With `saved`, continue from the checkpoint there, if any, and keep it up to date. `certificate` is the folder of the
    run's certificate, if it gets one.
    """
    started = time.perf_counter()
    with _repeatable(config):
        trainer = trained_by(parts, config, corpus)
        state = checkpoint.load(saved, config.device) if saved else None
        if state:
            trainer.load_state_dict(state)
        if certificate:
            trainer.record_in(certificate)
        seconds_before = trainer.run.seconds
        while trainer.steps_done < config.steps:
            trainer.advance()
            done = trainer.steps_done
            if done % config.evaluate_every == 0:
                trainer.run.held_out[done] = trainer.held_out_bits()
            trainer.run.seconds = seconds_before + time.perf_counter() - started
            if saved and (done % save_every == 0 or done == config.steps):
                checkpoint.save(saved, trainer.state_dict())
            if on_step:
                on_step(trainer.run)
        run = trainer.run
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
