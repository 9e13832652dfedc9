"""Train with torch's components and with the subject's, and compare the two runs."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import platform
import textwrap
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from conformance.judge.library import Library, load_library
from conformance.training.compare import TIMES_FURTHER, Bound, Check, compare
from conformance.training.config import TrainingConfig
from conformance.training.corpus import load_corpus
from conformance.training.trainer import ByFusedStep, Captured, Parts, Trainer, TrainingRun, train

_PARTS = ("amp.autocast", "amp.GradScaler", "nn.utils.clip_grad_norm_")
_CAPTURE = "optim.capture"


@dataclass(frozen=True)
class TrainingComparison:
    """A run of the subject and torch's. `bound` is None if every bit must agree."""

    name: str
    config: TrainingConfig
    reference: TrainingRun
    subject: TrainingRun
    bound: Bound | None
    checks: list[Check]

    @property
    def agrees(self) -> bool:
        return all(check.passed for check in self.checks)

    @property
    def reasons(self) -> list[str]:
        return [f"{check.name}: {check.says}" for check in self.checks if not check.passed]


@dataclass
class TrainingResult:
    subject: str
    config: TrainingConfig
    corpus: dict[str, str | int]
    comparisons: list[TrainingComparison] = field(default_factory=list)
    lacking: list[str] = field(
        default_factory=list
    )  # components that are torch's, because the subject lacks them
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return all(comparison.agrees for comparison in self.comparisons)


def judge(
    subject: str,
    config: TrainingConfig,
    on_step: Callable[[str, TrainingRun], None] | None = None,
    certificates: Path | None = None,
) -> TrainingResult:
    """Run `config` with torch and with `subject`.

    `on_step` is called after each step with the run's name and the run. With `certificates`, each run writes one in a
    folder of its own there.
    """
    started = time.perf_counter()
    corpus = load_corpus()
    library = load_library(subject)
    result = TrainingResult(
        subject, config, corpus.describe(), lacking=[p for p in _PARTS if not library.provides(p)]
    )

    def run(
        role: str, parts: Parts, config: TrainingConfig, trained_by: type[Trainer] = Trainer
    ) -> TrainingRun:
        name = f"{role} {parts.name} {config.dtype} {config.optimizer}"
        reported = on_step and (lambda run: on_step(name, run))
        certificate = certificates and certificates / f"{name.replace(' ', '-')}.certificate"
        return train(parts, config, corpus, reported, trained_by, certificate)

    if len(result.lacking) == len(_PARTS):
        return result
    reference = run("reference", parts_of(load_library("torch")), config)
    bound = None
    for way in _ways(library, config):
        if not way.is_bitwise and bound is None:
            torchs = parts_of(load_library("torch"))
            below, above = config.neighbours()
            bound = Bound.between(reference, run("below", torchs, below), run("above", torchs, above))
        held_to = None if way.is_bitwise else bound
        try:
            with library.kernels.backend(way.backend) if way.backend else contextlib.nullcontext():
                subject_run = run("subject", parts_of(library, way.name), config, way.trained_by)
            checks = compare(config, reference, subject_run, held_to)
        except Exception as error:
            # An error of the subject fails its run, but must not end the judge. Its text may contain full tensors, so
            # only the traceback is printed.
            traceback.print_tb(error.__traceback__)
            says = textwrap.shorten(f"{type(error).__name__}: {error}", 300, placeholder=" …")
            subject_run, checks = TrainingRun(), [Check("runs", False, says)]
        name = f"{config.dtype}, {config.optimizer}" + (f", {way.name}" if way.name else "")
        result.comparisons.append(TrainingComparison(name, config, reference, subject_run, held_to, checks))
    result.seconds = time.perf_counter() - started
    return result


def parts_of(library: Library, way: str = "") -> Parts:
    """Return the library's components, and torch's for those that the library does not provide."""
    torch_library = load_library("torch")
    components = [(library if library.provides(path) else torch_library).find(path) for path in _PARTS]
    capture = library.find(_CAPTURE) if library.provides(_CAPTURE) else None
    return Parts(f"{library.spec} {way}".strip(), *components, capture)


def as_json(results: list[TrainingResult]) -> dict[str, Any]:
    """Return the data that a report draws: one entry of `runs` for each comparison. Non-finite numbers become None."""
    return {
        "runs": [as_entry(comparison) for result in results for comparison in result.comparisons],
        "corpus": results[0].corpus,
        "lacking": results[0].lacking,
        "versions": {"torch": str(torch.__version__), "python": platform.python_version()},
        "seconds": sum(result.seconds for result in results),
    }


def as_entry(comparison: TrainingComparison) -> dict[str, Any]:
    bound = comparison.bound
    return {
        "name": comparison.name,
        "agrees": comparison.agrees,
        "says": " ".join(check.says + "." for check in comparison.checks if check.passed),
        "reasons": comparison.reasons,
        "checks": [dataclasses.asdict(check) for check in comparison.checks],
        "plan": dataclasses.asdict(comparison.config),
        "bound": bound and dataclasses.asdict(bound) | {"times": TIMES_FURTHER},
        "reference": _curves(comparison.reference),
        "subject": _curves(comparison.subject),
    }


def _curves(run: TrainingRun) -> dict[str, Any]:
    curves = dataclasses.asdict(run)
    for name in ("losses", "grad_norms", "scales"):
        curves[name] = [value if math.isfinite(value) else None for value in curves[name]]
    return curves


@dataclass(frozen=True)
class _Variant:
    """A training method of the subject."""

    name: str
    backend: str | None  # backend of its kernels, if it has several
    is_bitwise: bool  # whether each bit must then agree with torch's
    trained_by: type[Trainer] = Trainer


def _ways(library: Library, config: TrainingConfig) -> list[_Variant]:
    on_cpu = torch.device(config.device).type == "cpu"
    has_backends = library.provides("kernels.backend")
    if has_backends:
        ways = [_Variant("backend torch", "torch", True)] if on_cpu else []
        ways.append(_Variant("backend auto", "auto", False))
    else:
        ways = [_Variant("", None, on_cpu and library.package == "torch")]
    if library.provides("amp.GradScaler") and hasattr(library.find("amp.GradScaler"), "fused_step"):
        ways.append(_Variant("fused step", "auto" if has_backends else None, False, ByFusedStep))
    if library.provides(_CAPTURE):
        ways.append(
            _Variant("captured", "torch" if has_backends else None, on_cpu and has_backends, Captured)
        )
    return ways
