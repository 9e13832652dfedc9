"""Reasons why a fault may survive and why a clause may kill none. A reason that is no longer true is red."""

from __future__ import annotations

import tomllib

from conformance.judge.clauses import HERE


def all_excuses() -> dict[str, dict[str, str]]:
    """Return the reasons by subject and by fault."""
    return tomllib.loads((HERE / "survivors.toml").read_text())


def excuses(package: str) -> dict[str, str]:
    """Return the reasons why faults in a subject may survive, by fault."""
    return all_excuses().get(package, {})


def idle_reasons() -> dict[str, str]:
    """Return the reasons why clauses may kill no fault, by clause."""
    return tomllib.loads((HERE / "idle_clauses.toml").read_text())
