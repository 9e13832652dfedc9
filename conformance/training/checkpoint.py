"""Checkpoints on disk. If the process is killed, the old or the new one is complete."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch


def save(path: Path, state: dict[str, Any]) -> None:
    """Write `state` to a second file, flush it to the disk, and then rename it to `path`."""
    unfinished = path.with_name(path.name + ".unfinished")
    with unfinished.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)
    if os.name == "posix":  # elsewhere a folder cannot be opened
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the new name itself
        finally:
            os.close(folder)


def load(path: Path, device: str) -> dict[str, Any] | None:
    """Return the state that was saved at `path`, or None. It has tensors and plain containers only."""
    if not path.exists():
        return None
    return torch.load(path, map_location=device, weights_only=True)
