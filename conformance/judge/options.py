"""What a command that judges is asked, checked before anything is imported: by `tandem-judge`, the gate and `ci/gate`.

Needs Python alone, since `ci/gate` asks before there is an environment. A slip ends in a sentence and exit code 2.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

PROFILES = ("quick", "full", "deep")
REPORT = "report"


def add_judging(parser: argparse.ArgumentParser) -> None:
    """The options that decide what is judged and where the report goes."""
    add = parser.add_argument
    add("--claims", type=file, metavar="FILE", help="the subject's claims file, if not beside it")
    add(
        "--device",
        type=devices,
        default="auto",
        metavar="NAME,NAME",
        help="cpu, cuda, … (default: what is there)",
    )
    add(
        "--world-sizes",
        type=world_sizes,
        default="1,2",
        metavar="N,N",
        help="numbers of ranks (default: 1,2)",
    )
    add("--profile", choices=PROFILES, default="quick", help="how much to try (default: quick)")
    add("--seed", type=int, help="another draw of examples; without it every run tries the same")
    add(
        "--out",
        "--report",
        type=folder,
        metavar="FOLDER",
        help=f"where the report goes (default: {REPORT})",
    )


def of_gate(describes: str | None) -> argparse.ArgumentParser:
    """What `ci/gate` takes: it judges, times and trains, for which it needs the checkout."""
    from benchmarks.machine import machine_name  # noqa: PLC0415 (lies in a checkout alone)

    parser = argparse.ArgumentParser(
        prog="ci/gate", description=describes, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--subject",
        type=subject,
        default="impl",
        help="impl (default), torch, or a package with torch's paths",
    )
    add_judging(parser)
    add(
        "--parts",
        type=parts,
        default="judging,timing,training",
        metavar="NAME,NAME",
        help="judging, and timing or training (default: all)",
    )
    add("--baseline", type=file, metavar="REPORT.JSON", help="an earlier run to compare with")
    add(
        "--machine",
        type=machine_name,
        metavar="NAME",
        help="whose points judge its speed: a pool of equal machines (default: this machine's own)",
    )
    add(
        "--kills",
        type=file,
        metavar="KILLS.JSON",
        help="the kill matrix (default: kills.json in the report's folder)",
    )
    return parser


def subject(text: str) -> str:
    """A package, or one with a fault (`torch+clip_grad.no_clip`)."""
    if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*(\+\S+)?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no package name such as impl, torch or your.package")
    return text


def world_sizes(text: str) -> str:
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of positive numbers such as 1,2,4")
    return text


def devices(text: str) -> str:
    """Types as torch names them; which there are is known when the subject is there, whose claims may bring one."""
    if not re.fullmatch(r"[a-z]\w*(,[a-z]\w*)*", text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither auto nor a list of device types such as cpu,cuda"
        )
    return text


def workers(text: str) -> str:
    """Processes that run tests; never none, since a subject may end the process that it is judged in."""
    if text != "auto" and not re.fullmatch(r"[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is neither auto nor a positive number")
    return text


def parts(text: str) -> str:
    named = set(text.split(","))
    if "judging" not in named or not named <= {"judging", "timing", "training"}:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no list of judging, timing and training with judging in it"
        )
    return text


def file(text: str) -> str:
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"there is no file {text}")
    return str(Path(text).resolve())


def folder(text: str) -> str:
    path = Path(text).resolve()
    if path.exists() and not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a file; expected a folder, which may be new")
    return str(path)
