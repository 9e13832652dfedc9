"""The bytes of Python's standard library, split by file into text to train on and text held out."""

from __future__ import annotations

import functools
import hashlib
import os
import random
import re
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

# Left out: tests, and files that differ between two machines with the same Python (settings of the build, packages).
_SKIPPED = re.compile(
    r"site-packages|dist-packages|tests?|idle_test|__pycache__|config-.*"
    r"|_sysconfigdata.*\.py|(site|user)customize\.py"
)
_HELD_OUT_ONE_IN = 16
_LEAST_BYTES = 1_000_000


@dataclass(frozen=True, eq=False)
class Corpus:
    train: torch.Tensor  # [bytes] uint8
    held_out: torch.Tensor  # [bytes] uint8, of other files than those in `train`
    files: int
    fingerprint: str  # sha256 over every file's path, length and bytes

    def describe(self) -> dict[str, str | int]:
        return {
            "fingerprint": self.fingerprint,
            "files": self.files,
            "train_bytes": self.train.numel(),
            "held_out_bytes": self.held_out.numel(),
        }


@functools.cache
def load_corpus(root: Path | None = None) -> Corpus:
    """Read every source file below `root` (default: the running Python's standard library), in sorted order.

    Raises:
        FileNotFoundError: fewer than a million bytes of source, as in a Python that ships compiled files only.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    digest = hashlib.sha256()
    train, held_out, files = bytearray(), bytearray(), 0
    for name in _names(root):
        source = (root / name).read_bytes()
        digest.update(f"{name}\0{len(source)}\0".encode())
        digest.update(source)
        # By the name's own hash, so that a file more or less moves no other file across the split.
        is_held_out = hashlib.sha256(name.encode()).digest()[0] % _HELD_OUT_ONE_IN == 0
        (held_out if is_held_out else train).extend(source)
        files += 1
    if len(train) + len(held_out) < _LEAST_BYTES or not held_out:
        raise FileNotFoundError(
            f"{root} holds {len(train) + len(held_out)} bytes of Python source, {_LEAST_BYTES} are needed; "
            "use a Python whose standard library is installed as source files"
        )
    return Corpus(_as_tensor(train), _as_tensor(held_out), files, digest.hexdigest())


def windows(text: torch.Tensor, length: int, key: str, indices: range) -> torch.Tensor:
    """Return windows of `text` as [len(indices), length] int64. Window i depends only on `key` and i."""
    starts = [random.Random(f"{key}/{i}").randrange(text.numel() - length + 1) for i in indices]
    return torch.stack([text[start : start + length] for start in starts]).long()


def _names(root: Path) -> list[str]:
    paths: list[Path] = []
    for folder, inner, files in os.walk(root):
        inner[:] = [name for name in inner if not _SKIPPED.fullmatch(name)]  # not walked into
        paths += [
            Path(folder, name) for name in files if name.endswith(".py") and not _SKIPPED.fullmatch(name)
        ]
    return sorted(path.relative_to(root).as_posix() for path in paths)


def _as_tensor(text: bytearray) -> torch.Tensor:
    return torch.frombuffer(text, dtype=torch.uint8)
