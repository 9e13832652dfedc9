"""What a report is about and was made with: the suite, torch, the subject, and how it was asked."""

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

from conformance import catalogue
from conformance.judge import clauses, environment
from conformance.judge.claims_file import UnreadableClaims, claims_file
from conformance.judge.library import package_of
from conformance.judge.rows import all_deviations

SCHEMA = 1  # of report.json: raised when a key goes or means something else (`report/report.schema.json`)
_DISTRIBUTION = "tandem-torch"
_ROOT = Path(__file__).parents[2]


def _is_checkout() -> bool:
    file = _ROOT / "pyproject.toml"
    return file.is_file() and tomllib.loads(file.read_text()).get("project", {}).get("name") == _DISTRIBUTION


CHECKOUT = _is_checkout()  # else this package was installed, alone
_CALLED_IN_CHECKOUT = CHECKOUT and Path.cwd() == _ROOT


def heading(options: argparse.Namespace, began: float) -> dict[str, Any]:
    """All of a report but what was found; `options` are those of pytest, or of a command that judges."""
    return {
        "schema": SCHEMA,
        "suite": {
            "version": _version_of(_DISTRIBUTION),
            "commit": environment.commit(),
            "catalogue": catalogue.version(),
        },
        "torch": str(torch.__version__),
        "subject": options.subject,
        **_identity(package_of(options.subject)),
        "claims_file": options.claims,
        "device": options.device,
        "world_sizes": options.world_sizes,
        "profile": options.profile,
        "seed": options.seed,
        "replay": judge_command(options, "WHAT"),
        "began": datetime.datetime.fromtimestamp(began, datetime.UTC).isoformat(timespec="seconds"),
        "seconds": round(time.time() - began, 1),
        "environment": environment.describe(),
        "clauses": clauses.for_report(),
        "deviations": [asdict(row) | {"fixed_in": row.fixed_in} for row in all_deviations().values()],
    }


def replay_command(options: argparse.Namespace, test: str) -> str:
    """What judges one test again, typed where the judge was called."""
    if not _CALLED_IN_CHECKOUT:
        return judge_command(options, test)
    words = ["python", "-m", "pytest", test, "--subject", options.subject]
    return shlex.join([*words, *_given(options)])


def judge_command(options: argparse.Namespace, what: str) -> str:
    """What judges a test or a clause again."""
    return shlex.join(["tandem-judge", options.subject, what, *_given(options)])


def _given(options: argparse.Namespace) -> list[str]:
    words = ["--profile", options.profile]
    words += [] if options.seed is None else ["--seed", str(options.seed)]
    words += [] if options.device == "auto" else ["--device", options.device]
    words += [] if options.world_sizes == "1,2" else ["--world-sizes", options.world_sizes]
    return words + ([] if options.claims is None else ["--claims", options.claims])


def _identity(package: str) -> dict[str, str]:
    """The version of a subject and the commit that it was made from, without importing it; empty where unknown."""
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
    """What the claims file says whose version it is: an adapter judges another package than its own."""
    with contextlib.suppress(UnreadableClaims):
        return claims_file(package).distribution
    return ""


def _version_of(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return ""


def _commit_of(package: str) -> str:
    """Of the checkout that the package lies in, if that tracks it."""
    try:
        found = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return ""
    return environment.commit(Path(found.origin)) if found and found.origin else ""


def _installed_commit(distribution: str) -> str:
    """What pip noted when it installed from a repository."""
    try:
        noted = importlib.metadata.distribution(distribution).read_text("direct_url.json")
        return json.loads(noted or "{}").get("vcs_info", {}).get("commit_id", "")
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return ""
