"""What the numbers depend on, in words that stay the same on every machine of a kind; asv filters by them.

Needs nothing but Python: `ci/bench` asks before there is an environment, `ci/gpu` where none may be made.
"""

import os
import platform
import re
import subprocess
from pathlib import Path

MACHINE_VARIABLE = "TANDEM_BENCH_MACHINE"  # another name for the machine


def describe_machine(gpu_in_use: str = "none") -> dict[str, str]:
    """The keys by which asv tells machines apart; all machines must have the same ones.

    `gpu_in_use` is what a caller knows of, where nvidia-smi may be missing.
    """
    gpu, driver = nvidia()
    gpu = gpu_in_use if gpu == "none" else gpu
    cpu, cores = cpu_model(), os.cpu_count() or 1
    memory_gib = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)
    words = f"{cpu} {cores} cores {gpu if gpu != 'none' else ''}"
    name = re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")
    return {
        "machine": os.environ.get(MACHINE_VARIABLE, name),
        "os": platform.system(),
        "arch": platform.machine(),
        "cpu": cpu,
        "num_cpu": str(cores),
        "ram": f"{memory_gib} GiB",
        "gpu": gpu,
        "driver": driver,
    }


def nvidia() -> tuple[str, str]:
    """Name and driver of the first GPU."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
        name, driver = told.splitlines()[0].rsplit(", ", 1)
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
