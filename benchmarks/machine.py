"""Whose the numbers are, and what they depend on.

A machine is judged only by points of its own, or of a pool of equal machines whose name was given: what can be read of
a machine, a processor and a number of cores or the id of its system's image, is shared by machines of other speed. So
one that makes points gets a name that no other has, once, which is kept where programs keep their state.

Needs nothing but Python: `ci/bench` asks before there is an environment, `ci/gpu` where none may be made.
"""

import argparse
import os
import platform
import re
import secrets
import subprocess
from pathlib import Path

NAME = r"\w[\w.-]*"  # it is a folder's
NAME_RULE = "letters, digits, '-', '_' and '.', such as lab-h100"


def checked_name(text: str) -> str:
    """What an option `--machine` takes."""
    if not re.fullmatch(NAME, text):
        raise argparse.ArgumentTypeError(f"{text!r} is no name of a machine; expected {NAME_RULE}")
    return text


def own_name() -> str:
    """The name under which this machine has made points; empty if it has made none."""
    try:
        name = _own_file().read_text().strip()
    except (OSError, RuntimeError, ValueError):  # no file, no home, no text
        return ""
    # A home that has moved to other hardware took the file along.
    return name if re.fullmatch(rf"{re.escape(_kind())}-[0-9a-f]+", name) else ""


def make_own_name() -> str:
    """The same, made if there is none: for whoever adds points."""
    if not (name := own_name()):
        name = f"{_kind()}-{secrets.token_hex(3)}"
        _own_file().parent.mkdir(parents=True, exist_ok=True)
        _own_file().write_text(f"{name}\n")
    return name


def _own_file() -> Path:
    """By the host, since hosts may share a home."""
    state = os.environ.get("XDG_STATE_HOME") or Path("~/.local/state").expanduser()
    return Path(state, "tandem", f"machine-{platform.node()}")


def _kind() -> str:
    gpu, _ = nvidia()
    words = f"{cpu_model()} {os.cpu_count()} cores {gpu if gpu != 'none' else ''}"
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")


def describe_machine(name: str, gpu_in_use: str = "none") -> dict[str, str]:
    """The keys by which asv tells machines apart; all machines must have the same ones.

    `gpu_in_use` is what a caller knows of, where nvidia-smi may be missing.
    """
    gpu, driver = nvidia()
    memory_gib = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)
    return {
        "machine": name,
        "os": platform.system(),
        "arch": platform.machine(),
        "cpu": cpu_model(),
        "num_cpu": str(os.cpu_count()),
        "ram": f"{memory_gib} GiB",
        "gpu": gpu_in_use if gpu == "none" else gpu,
        "driver": driver,
    }


def nvidia() -> tuple[str, str]:
    """Name and driver of the first GPU."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        reported = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
        name, driver = reported.splitlines()[0].rsplit(", ", 1)
    except (OSError, subprocess.SubprocessError, IndexError, ValueError):
        return "none", "none"
    return name, driver


def cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    found = (
        re.search(r"^model name\s*: (.*)$", cpuinfo.read_text(), re.MULTILINE) if cpuinfo.exists() else None
    )
    name = found[1] if found else platform.processor() or platform.machine()
    return re.sub(r"\(R\)|\(TM\)|\bCPU\b|@.*$", "", name).strip()
