"""The catalogue of clauses, with a digest that is equal for equal clauses."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from conformance.judge import clauses


def digest() -> str:
    """Return a digest of all clauses, which does not depend on the installed torch.

    It includes the supported versions of torch that a clause does not hold for, so that support of a new version
    changes it only if a clause does not hold for that version. Marks are left out, because a mark changes who is judged
    by a clause, and not what the clause requires.
    """
    supported = set(clauses.TORCH_VERSIONS)

    def lasting(row: dict[str, Any]) -> dict[str, Any]:
        level = {"level": "extension"} if row.get("until") else {}
        fields = {key: value for key, value in row.items() if key != "mark"}
        return {**fields, **level, "torch": sorted(supported - set(row["torch"]))}

    rows = [lasting(row) for row in clauses.for_report()]
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()[:12]


def as_dict() -> dict[str, Any]:
    """Return the catalogue as JSON data."""
    return {
        "catalogue": digest(),
        "torch": list(clauses.TORCH_VERSIONS),
        "clauses": [row | {"torch": list(row["torch"])} for row in clauses.for_report()],
    }
