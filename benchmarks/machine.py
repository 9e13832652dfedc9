"""Names and descriptions of the machines that record results.

A machine is judged only by its own recorded results, or by those of a pool of equal machines that the user names. A
processor and a number of cores do not identify a machine, nor does the id of its system image, because machines of
different speed share them. So a machine gets a unique name when it first records a result, stored in the user's state
folder.

This module needs only Python, because `ci/bench` and `ci/gpu` use it without an environment.
"""

import argparse
import os
import platform
import re
import secrets
import subprocess
from pathlib import Path

NAME = r"\w[\w.-]*"  # name of a folder, too
NAME_RULE = "letters, digits, '-', '_' and '.', such as lab-h100"


def machine_name(text: str) -> str:
    """Return `text` if it is a valid machine name. Raise ArgumentTypeError otherwise."""
    if not re.fullmatch(NAME, text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a valid machine name; expected {NAME_RULE}")
    return text


def own_name() -> str:
    """Return the name under which this machine has recorded results, or an empty string if it has not."""
    try:
        name = _own_file().read_text().strip()
    except (OSError, RuntimeError, ValueError):  # no file, no home, no text
        return ""
    # A home folder that was moved to other hardware contains the file of the old machine.
    return name if re.fullmatch(rf"{re.escape(_kind())}-[0-9a-f]+", name) else ""


def make_own_name() -> str:
    """Return this machine's name, and create it if there is none. Call it only to record results."""
    if not (name := own_name()):
        name = f"{_kind()}-{secrets.token_hex(3)}"
        _own_file().parent.mkdir(parents=True, exist_ok=True)
        _own_file().write_text(f"{name}\n")
    return name


def _own_file() -> Path:
    """Return the file with this machine's name. Its name contains the host, because hosts may share a home folder."""
    state = os.environ.get("XDG_STATE_HOME") or Path("~/.local/state").expanduser()
    return Path(state, "tandem", f"machine-{platform.node()}")


def _kind() -> str:
    gpu, _ = nvidia()
    words = f"{cpu_model()} {os.cpu_count()} cores {gpu if gpu != 'none' else ''}"
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")


def describe_machine(name: str, gpu_in_use: str = "none") -> dict[str, str]:
    """Return asv's keys of a machine. All machines must have the same keys.

    `gpu_in_use` is the GPU that the caller knows of. It is used if nvidia-smi is missing.
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
    """Return the name and driver of the first GPU, or 'none' for both."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        reported = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
        name, driver = reported.splitlines()[0].rsplit(", ", 1)
    except (OSError, subprocess.SubprocessError, IndexError, ValueError):
        return "none", "none"
    return name, driver


def cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    match = (
        re.search(r"^model name\s*: (.*)$", cpuinfo.read_text(), re.MULTILINE) if cpuinfo.exists() else None
    )
    name = match[1] if match else platform.processor() or platform.machine()
    return re.sub(r"\(R\)|\(TM\)|\bCPU\b|@.*$", "", name).strip()
