"""Options of the commands that judge (`tandem-judge` and `ci/gate`), checked before anything is imported.

This module needs only Python, because `ci/gate` reads its options before there is an environment. A mistake in the
command ends it with a message and exit code 2.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path

PROFILES = ("smoke", "quick", "full", "deep")
MARKS = ("generic", "accelerator", "cuda")  # marks of clauses
REPORT = "report"


def add_selection(add: Callable[..., object], profile: str) -> None:
    """Add the options that decide what is judged. `profile` is the default. pytest has them too."""
    add(
        "--claims", type=file, metavar="FILE", help="the subject's claims file (default: next to its package)"
    )
    add(
        "--device",
        type=devices,
        default="auto",
        metavar="NAME,NAME",
        help="device types such as cpu,cuda (default: those that this machine has)",
    )
    add(
        "--world-sizes",
        type=world_sizes,
        default="1,2",
        metavar="N,N",
        help="numbers of ranks (default: 1,2)",
    )
    add(
        "--profile",
        choices=PROFILES,
        default=profile,
        help=f"how many examples and tests to run (default: {profile})",
    )
    add(
        "--marks",
        type=marks,
        default=",".join(MARKS),
        metavar="MARK,MARK",
        help=f"marks of the clauses to judge by (default: {','.join(MARKS)})",
    )
    add(
        "--shard",
        type=shard,
        metavar="I/N",
        help="run the I-th of N shards, which take about as long; python -m conformance.report --merge joins them",
    )
    add("--seed", type=int, help="draw other examples (default: every run draws the same)")


def add_judging(parser: argparse.ArgumentParser) -> None:
    """Add the options that decide what is judged and where the report is written."""
    add_selection(parser.add_argument, "quick")
    parser.add_argument(
        "--rerun",
        type=reruns,
        default=0,
        metavar="N",
        help="judge N more times with the same seed; tests with different outcomes are flaky (default: 0)",
    )
    parser.add_argument(
        "--out",
        "--report",
        type=folder,
        metavar="FOLDER",
        help=f"folder for the report (default: {REPORT})",
    )


def of_gate(describes: str | None) -> argparse.ArgumentParser:
    """Return the parser of `ci/gate`, which judges, times and trains, and therefore needs a checkout."""
    from benchmarks.machine import machine_name  # noqa: PLC0415 (only in a checkout)

    parser = argparse.ArgumentParser(
        prog="ci/gate", description=describes, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--subject",
        type=subject,
        default="impl",
        help="the package to judge: impl (default), torch, or one that has torch's paths",
    )
    add_judging(parser)
    add(
        "--parts",
        type=parts,
        default="judging,timing,training",
        metavar="NAME,NAME",
        help="phases to run: judging, and timing or training (default: all)",
    )
    add("--baseline", type=file, metavar="REPORT.JSON", help="an earlier report to compare with")
    add(
        "--machine",
        type=machine_name,
        metavar="NAME",
        help="the pool of equal machines whose recorded results the speed is compared with (default: this machine)",
    )
    return parser


def _matching(pattern: str, otherwise: str) -> Callable[[str], str]:
    """Return the type of an option whose text must match a pattern. `otherwise` describes any other text."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise argparse.ArgumentTypeError(f"{text!r} {otherwise}")
        return text

    return check


# The name of a package, which may have a fault (`torch+clip_grad.dtensor_local_norm`).
subject = _matching(
    r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*(\+\S+)?",
    "is not the name of a package, such as impl, torch or your.package",
)
world_sizes = _matching(r"[1-9]\d*(,[1-9]\d*)*", "is not a list of positive numbers such as 1,2,4")
# Device types may not exist before the subject is imported, which may register one.
devices = _matching(r"[a-z]\w*(,[a-z]\w*)*", "is neither auto nor a list of device types such as cpu,cuda")
# The number of test processes is not 0, because a subject may end the process that it is judged in.
workers = _matching(r"auto|[1-9]\d*", "is neither auto nor a positive number")


def reruns(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of additional runs such as 2")
    return int(text)


def shard(text: str) -> str:
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a shard such as 1/3, the first of three")
    return text


def marks(text: str) -> str:
    if unknown := set(text.split(",")) - set(MARKS):
        raise argparse.ArgumentTypeError(f"{text!r} has {min(unknown)!r}; expected {', '.join(MARKS)}")
    return text


def parts(text: str) -> str:
    named = set(text.split(","))
    if "judging" not in named or not named <= {"judging", "timing", "training"}:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of judging, timing and training that includes judging"
        )
    return text


def file(text: str) -> str:
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"there is no file {text}")
    return str(Path(text).resolve())


def folder(text: str) -> str:
    path = Path(text).resolve()
    if path.exists() and not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a file; expected a folder, which need not exist")
    return str(path)
