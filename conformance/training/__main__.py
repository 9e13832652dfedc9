"""Train a byte-level GPT with torch's mixed-precision components and with the subject's."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from pathlib import Path

# cuBLAS repeats its sums in the same order only with this, read when CUDA starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from conformance.training.certify import Certificate, NotComparable, certify
from conformance.training.config import DTYPES, OPTIMIZERS, TrainingConfig, full_config, small_config
from conformance.training.judge import TrainingResult, as_json, judge
from conformance.training.trainer import TrainingRun


def main(words: list[str] | None = None) -> int:
    options = _parse(words)
    console = Console()
    if options.certify:
        return _certify(options.certify, console)
    out = Path(options.out)
    folder = None if options.gate else out
    try:
        configs = _configs(options)
        if folder:
            folder.mkdir(parents=True, exist_ok=True)
        results = _judge(options, configs, folder if options.record else None, console)
    except KeyboardInterrupt:
        console.print("stopped")
        return 130
    if folder:
        from conformance.training import plot  # noqa: PLC0415 (judging needs no matplotlib)

        for result in results:
            for comparison in result.comparisons:
                files = plot.save(comparison, result.subject, folder)
                console.print(f"plot: {files[0]}")
    if file := options.json or (folder and folder / "training.json"):
        Path(file).write_text(json.dumps(as_json(results)))
        console.print(f"data: {file}")
    return _tell(results, console)


def _parse(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m conformance.training", description=__doc__)
    parser.add_argument("--subject", default="impl", help="a package that has torch's paths")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", choices=("small", "full"), help="default: small on the CPU, else full")
    parser.add_argument("--dtype", choices=DTYPES, default="fp16")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, help="adamw lets torch choose the path")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--inject-inf-at", type=int, metavar="STEP", help="default: within the first half")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--out", default="report/training", help="folder for plots, data and certificates")
    parser.add_argument("--record", action="store_true", help="write a certificate of each run in --out")
    parser.add_argument("--certify", nargs=2, metavar="FOLDER", help="only compare two certificates")
    parser.add_argument("--gate", action="store_true", help="small, fp16 and bf16, no plots")
    parser.add_argument("--json", metavar="FILE", help="default: training.json in --out")
    return parser.parse_args(words)


def _configs(options: argparse.Namespace) -> list[TrainingConfig]:
    size = options.size or ("small" if options.gate or options.device == "cpu" else "full")
    make = small_config if size == "small" else full_config
    overrides = {
        name: getattr(options, name)
        for name in ("device", "optimizer", "steps", "inject_inf_at", "seed")
        if getattr(options, name) is not None
    }
    return [
        _with_inf_inside(make(dtype, **overrides)) for dtype in (DTYPES if options.gate else [options.dtype])
    ]


def _with_inf_inside(config: TrainingConfig) -> TrainingConfig:
    if config.inject_inf_at is None or config.inject_inf_at < config.steps - 1:
        return config
    return dataclasses.replace(config, inject_inf_at=config.steps // 2)


def _judge(
    options: argparse.Namespace, configs: list[TrainingConfig], certificates: Path | None, console: Console
) -> list[TrainingResult]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console) as progress:
        tasks: dict[str, TaskID] = {}

        def show(name: str, run: TrainingRun) -> None:
            if name not in tasks:
                tasks[name] = progress.add_task(name, total=configs[0].steps, note="")
            note = f"{run.losses[-1]:.2f} bits a byte, {len(run.skipped)} skipped"
            progress.update(tasks[name], completed=len(run.losses), note=note)

        return [judge(options.subject, config, show, certificates) for config in configs]


def _certify(folders: list[str], console: Console) -> int:
    """Compare two runs. Return 0 if they agree, 1 if they differ, 2 if they cannot be compared."""
    try:
        verdict = certify(*map(Certificate.read, folders))
    except NotComparable as error:
        console.print(f"[red]{escape(str(error))}[/]", soft_wrap=True, highlight=False)
        return 2
    for sentence in verdict.says:
        console.print(escape(sentence), soft_wrap=True, highlight=False)
    outcome = "[green]same[/]" if verdict.agrees else "[red]different[/]"
    console.print(f"{outcome}: {verdict.compared}")
    return 0 if verdict.agrees else 1


def _tell(results: list[TrainingResult], console: Console) -> int:
    for result in results:
        for comparison in result.comparisons:
            console.print(f"\n[bold]{result.subject}, {comparison.name}[/]")
            for check in comparison.checks:
                mark = "[green]pass[/]" if check.passed else "[red]FAIL[/]"
                console.print(
                    f"  {mark}  {check.name}: {escape(check.says)}", soft_wrap=True, highlight=False
                )
        if result.lacking:
            console.print(f"not provided, so torch's is used: {', '.join(result.lacking)}")
    passed = all(result.passed for result in results)
    seconds = sum(result.seconds for result in results)
    console.print(f"\n{'[green]green[/]' if passed else '[red]red[/]'} after {seconds:.0f} s")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
