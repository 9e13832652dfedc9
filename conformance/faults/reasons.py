"""Why a fault may survive, and why a clause may catch none: rows that fail once they are not true any more."""

from __future__ import annotations

import tomllib

from conformance.judge.clauses import HERE


def all_excuses() -> dict[str, dict[str, str]]:
    """By subject, then by the fault's id."""
    return tomllib.loads((HERE / "survivors.toml").read_text())


def excuses(package: str) -> dict[str, str]:
    """Why a fault in this subject may survive, by its id."""
    return all_excuses().get(package, {})


def idle_reasons() -> dict[str, str]:
    """Why a clause may catch no fault, by its id."""
    return tomllib.loads((HERE / "idle_clauses.toml").read_text())
