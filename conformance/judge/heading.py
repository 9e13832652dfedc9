"""Head of a report: the suite, torch, the subject, the options and the machine."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import importlib.util
import json
import shlex
import time
import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from conformance.judge import catalogue, clauses
from conformance.judge.files.claims_file import UnreadableClaims, claims_file
from conformance.judge.files.rows import all_deviations
from conformance.judge.library import package_of
from conformance.judge.sandbox import environment

# Version of report.json. Raised when a key is removed or changes its meaning (`report/report.schema.json`).
SCHEMA = 1
_DISTRIBUTION = "tandem-torch"
_ROOT = Path(__file__).parents[2]


def _is_checkout() -> bool:
    file = _ROOT / "pyproject.toml"
    return file.is_file() and tomllib.loads(file.read_text()).get("project", {}).get("name") == _DISTRIBUTION


CHECKOUT = _is_checkout()  # False if this package is installed
_CALLED_IN_CHECKOUT = CHECKOUT and Path.cwd() == _ROOT


def heading(options: argparse.Namespace, began: float) -> dict[str, Any]:
    """Return a report without results. `options` are those of pytest or of a command that judges."""
    return {
        "schema": SCHEMA,
        "suite": {
            "version": _version_of(_DISTRIBUTION),
            "commit": environment.commit(),
            "catalogue": catalogue.digest(),
        },
        "torch": str(torch.__version__),
        "subject": options.subject,
        **_identity(package_of(options.subject)),
        "claims_file": options.claims,
        "device": options.device,
        "world_sizes": options.world_sizes,
        "profile": options.profile,
        "shard": options.shard,
        "marks": options.marks.split(","),
        "seed": options.seed,
        "replay": judge_command(options, "WHAT"),
        "began": datetime.datetime.fromtimestamp(began, datetime.UTC).isoformat(timespec="seconds"),
        "seconds": round(time.time() - began, 1),
        "environment": environment.describe(),
        "clauses": clauses.for_report(),
        "deviations": [asdict(row) | {"fixed_in": row.fixed_in} for row in all_deviations().values()],
    }


def replay_command(options: argparse.Namespace, test: str) -> str:
    """Return the command that judges one test again in the current folder."""
    if not _CALLED_IN_CHECKOUT:
        return judge_command(options, test)
    words = ["python", "-m", "pytest", test, "--subject", options.subject]
    return shlex.join([*words, *_non_default_options(options)])


def judge_command(options: argparse.Namespace, target: str) -> str:
    """Return the command that judges a test or a clause again. `target` is its id."""
    return shlex.join(["tandem-judge", options.subject, target, *_non_default_options(options)])


def _non_default_options(options: argparse.Namespace) -> list[str]:
    words = ["--profile", options.profile]
    words += [] if options.seed is None else ["--seed", str(options.seed)]
    words += [] if options.device == "auto" else ["--device", options.device]
    words += [] if options.marks == ",".join(clauses.MARKS) else ["--marks", options.marks]
    words += [] if options.world_sizes == "1,2" else ["--world-sizes", options.world_sizes]
    return words + ([] if options.claims is None else ["--claims", options.claims])


def _identity(package: str) -> dict[str, str]:
    """Return the version and the commit of a subject without importing it. Unknown values are empty."""
    top = package.partition(".")[0]
    if top == "impl":
        return {"subject_version": _version_of(_DISTRIBUTION), "subject_commit": environment.commit()}
    if top == "torch":
        return {"subject_version": str(torch.__version__), "subject_commit": str(torch.version.git_version)}
    known = [_named_distribution(package), *importlib.metadata.packages_distributions().get(top, [])]
    distribution = next(filter(None, known), "")
    return {
        "subject_version": _version_of(distribution),
        "subject_commit": _commit_of(top) or _installed_commit(distribution),
    }


def _named_distribution(package: str) -> str:
    """Return the distribution that the claims file names, for an adapter that wraps another package."""
    with contextlib.suppress(UnreadableClaims):
        return claims_file(package).distribution
    return ""


def _version_of(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return ""


def _commit_of(package: str) -> str:
    """Return the commit of the checkout that tracks the package, or an empty string."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return ""
    return environment.commit(Path(spec.origin)) if spec and spec.origin else ""


def _installed_commit(distribution: str) -> str:
    """Return the commit that pip recorded if it installed from a repository, or an empty string."""
    try:
        noted = importlib.metadata.distribution(distribution).read_text("direct_url.json")
        return json.loads(noted or "{}").get("vcs_info", {}).get("commit_id", "")
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return ""
