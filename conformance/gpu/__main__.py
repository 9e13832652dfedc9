"""Judge and time on a host with a GPU as it is: nothing installed, no network, within minutes, one small bundle.

ci/gpu --out bundle                  everything, within 9 minutes
ci/gpu --device cpu                  everything but the device
ci/gpu --only launches --only bandwidth
ci/gpu --only probe --only judge --ranks gloo    ranks over gloo instead of NCCL
ci/gpu --machine lab-h100            name of the host, or of a pool of equal hosts, for its timings
ci/bench --add bundle                in a checkout with git: add the timings to benchmarks/results

Each phase has the time that it needed on an H100, and judge, training, fake, steps, large and speed share the rest.
The time that a phase leaves goes to the next ones. Two phases always come first: warm-up (imports, the device, Triton,
the C library) and host. On a GPU the judge runs CUDA tests only, the most valuable first, and the phase speed runs CUDA
cases only, headline ratios first. The bundle's summary.md begins with the answers; report.json has every row.

Exit code 0: judged green (or not judged, if that was not asked for). 1: red, or not shown because time ran out or there
is no CUDA device. 2: the command is wrong.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.machine import machine_name
from conformance.gpu import judging_phase
from conformance.gpu.bundle import REPORT, SUMMARY, Bundle
from conformance.gpu.phase_rows import PhaseTask, say
from conformance.gpu.phases import LEFT_OUT, NO_CUDA, STOPPED, Clock, GpuPhase, PhaseRun, module, run_all

_NEEDED = ("torch", "pytest", "hypothesis", "numpy")
_PROFILES = ("quick", "full", "deep")
_BUDGET_S = 540.0
_LEAST_BUDGET_S = 10.0


# cuBLAS repeats its sums in the same order only with this, read when CUDA starts.
_REPEATABLE = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def _interpreted_on_cpu(task: PhaseTask) -> dict[str, str]:
    return {} if task.device == "cuda" else {"TRITON_INTERPRET": "1"}


def phases(gpus: int) -> list[GpuPhase]:
    """Return the phases in their order: short checks and counts, then the judgement, then timings."""
    return [
        GpuPhase("probe", 0, module("probe"), fixed_s=30.0),
        GpuPhase("kernels", 0, module("kernels"), _interpreted_on_cpu, True, fixed_s=25.0),
        GpuPhase("waits", 0, module("waits"), fixed_s=20.0),
        GpuPhase("values", 0, module("values"), fixed_s=16.0),
        GpuPhase("graphs", 0, module("graphs"), fixed_s=15.0),
        GpuPhase("launches", 0, module("launches"), fixed_s=14.0),
        GpuPhase("bandwidth", 0, module("bandwidth"), fixed_s=35.0),
        GpuPhase(
            "judge",
            45,
            lambda task: judging_phase.command(task, gpus),
            judging_phase.environ,
            True,
            fixed_s=20.0,
        ),
        GpuPhase("training", 8, module("training_phase"), lambda task: _REPEATABLE, True, fixed_s=12.0),
        GpuPhase("fake", 4, module("fake"), fixed_s=15.0),
        GpuPhase("steps", 5, module("steps"), fixed_s=12.0),
        GpuPhase("large", 5, module("large"), fixed_s=12.0),
        GpuPhase("speed", 18, module("speed_phase"), fixed_s=12.0),
    ]


# From a cold disk, imports take 40 s. The time that they leave goes to the next phases.
WARM_UP = GpuPhase("warm-up", 0, module("warm_up"), fixed_s=22.0, spare_s=38.0)
HOST = GpuPhase("host", 0, module("host"), fixed_s=6.0, spare_s=14.0)
_HOST_AGAIN = GpuPhase("host, again", 0, module("host"), fixed_s=3.0)
NAMES = [phase.name for phase in phases(0)]


def main(words: Sequence[str] | None = None, began: float | None = None) -> int:
    """Run the command that `words` say. `began`, on the monotonic clock, is when the budget began to run."""
    options = _options(words)
    if lacking := [name for name in _NEEDED if find_spec(name) is None]:
        return _refuse(
            f"nothing is installed by it, and this Python ({sys.executable}) has no {', '.join(lacking)}; "
            "start it with the one that has"
        )
    signal.signal(signal.SIGTERM, _interrupt)
    with tempfile.TemporaryDirectory(prefix="tandem-gpu-", ignore_cleanup_errors=True) as folder:
        return _run(options, Path(folder), began)


def _refuse(why: str) -> int:
    print(f"ci/gpu: {why}", file=sys.stderr)  # noqa: T201
    return 2


def _interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


def _options(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="ci/gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", default="report/gpu", metavar="FOLDER", help="where the bundle goes (default: report/gpu)")
    add("--device", default="auto", choices=["auto", "cuda", "cpu"], help="auto: cuda where there is one")
    add(
        "--budget",
        type=_budget,
        default=_BUDGET_S,
        metavar="S",
        help=f"seconds in all (default: {_BUDGET_S:g})",
    )
    add("--only", action="append", choices=NAMES, help="this phase (may be repeated)")
    add("--machine", type=machine_name, metavar="NAME", help="under which its timings are kept")
    add("--subject", default="impl", help="impl, torch, or any package that mirrors torch's paths")
    add("--profile", default="quick", choices=_PROFILES, help="how much to try")
    add("--tests", default="conformance", help="what the judge is asked for, as pytest takes it")
    add("--devices", metavar="NAMES", default="", help="devices to judge (default: that of --device)")
    add(
        "--ranks",
        choices=["gloo", "nccl"],
        default="",
        help="backend of CUDA ranks, which may share a GPU (default: nccl)",
    )
    add(
        "--workers",
        type=int,
        metavar="N",
        help="judging processes (default: by cores and GPUs, at most 12 a GPU)",
    )
    add(
        "--deadline",
        type=float,
        metavar="S",
        help="limit of a test in seconds, doubled with CUDA ranks (default: 40, on the CPU 120)",
    )
    add("--seed", type=int, help="another draw of examples; without it every run tries the same")
    return parser.parse_args(words)


def _budget(text: str) -> float:
    seconds = float(text)
    if seconds < _LEAST_BUDGET_S:
        raise argparse.ArgumentTypeError(
            f"{text} seconds are too few to find anything; {_LEAST_BUDGET_S:g} at least"
        )
    return seconds


def _run(options: argparse.Namespace, folder: Path, began: float | None) -> int:
    task = PhaseTask(
        rows="",
        until=0.0,
        device=options.device,
        subject=options.subject,
        profile=options.profile,
        seed=options.seed,
        tests=options.tests,
        machine=options.machine or "",
        devices=options.devices,
        ranks=options.ranks,
        workers=options.workers,
        deadline_s=options.deadline,
    )
    words = shlex.join(["ci/gpu", *sys.argv[1:]])
    bundle = Bundle(task, folder, Path(options.out).resolve(), options.budget, words)
    named = options.only or NAMES
    chosen = [phase for phase in phases(0) if phase.name in named]
    clock = Clock([WARM_UP, HOST, *chosen[:-1], _HOST_AGAIN, *chosen[-1:]], options.budget, began)
    if clock.shortage:
        say(f"ci/gpu: {clock.shortage}")
    run_all([WARM_UP, HOST], task, clock, folder, bundle.add)
    host = bundle.host
    bundle.task = task = replace(
        task,
        device=_device(options.device, bundle),
        probes=str(folder / "probe.jsonl") if "probe" in named else "",
    )
    all_phases = phases(len(host.get("gpus", [])))
    bundle.ran += [
        PhaseRun(phase, LEFT_OUT, not_run=[phase.name]) for phase in all_phases if phase.name not in named
    ]
    chosen = [phase for phase in all_phases if phase.name in named]
    if obstacle := _obstacle(task.device, bundle):
        for phase in chosen:
            bundle.add(PhaseRun(phase, obstacle, not_run=[phase.name]))
    else:
        # Results name their host. The last phase takes all the time that is left, so the second try comes before it.
        again = [] if host else [_HOST_AGAIN]
        run_all([*chosen[:-1], *again, *chosen[-1:]], task, clock, folder, bundle.add)
    return _tell(bundle.write(), bundle.out)


def _obstacle(device: str, bundle: Bundle) -> str:
    """Return why no phase can run, or "". A host that could not be described is no reason."""
    if any(ran.why == STOPPED for ran in bundle.ran):
        return STOPPED
    return NO_CUDA if device == "cuda" and _has_cuda(bundle) is False else ""


def _device(requested: str, bundle: Bundle) -> str:
    if requested != "auto":
        return requested
    known = _has_cuda(bundle)
    return "cuda" if known or (known is None and any(Path("/dev").glob("nvidia[0-9]*"))) else "cpu"


def _has_cuda(bundle: Bundle) -> bool | None:
    """Return whether torch can use CUDA here, as the first phase that knows reports it, or None if none does."""
    if bundle.host:
        return bundle.host["cuda"]
    warm = bundle.phase(WARM_UP.name)
    return next((row["cuda"] for row in warm.recorded.rows if "cuda" in row), None) if warm else None


def _tell(report: dict[str, Any], out: Path) -> int:
    for reason in [*report["reasons"], *(f"not shown: {why}" for why in report["not_shown"])]:
        say(f"- {reason}")
    for name, phase in report["phases"].items():
        if phase["not_run"] and phase["why"] != LEFT_OUT:
            why = phase["why"].splitlines()[0]
            say(f"- {name}: {len(phase['not_run'])} not run ({why}), named in {REPORT}")
    say(
        f"{report['verdict'].upper()} {report['subject']} on {report['device']} "
        f"after {report['seconds']:.0f} s; {out / SUMMARY}"
    )
    return 0 if report["verdict"] in ("green", "not judged") else 1


if __name__ == "__main__":
    sys.exit(main())
