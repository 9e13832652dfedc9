"""Layers of the simulator's C++ files: each uses only files that its headers name before it."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

SIMULATOR = Path(__file__).parents[1] / "simulator" / "csrc"


def parts_of(header: str) -> dict[str, set[str]]:
    """The files that a header of the simulator has a section for, in its order, with the names declared there."""
    _, *sections = re.split(r"^// -- (\w+\.cpp):", header, flags=re.MULTILINE)
    declared = re.compile(r"^(?:(?:class|struct|using) (\w+)|\w[\w:<>*& ]*?[ *&](\w+)\()", re.MULTILINE)
    return {
        name: {"".join(match) for match in declared.findall(section)}
        for name, section in zip(sections[::2], sections[1::2], strict=True)
    }


def used_in(source: str, names: Collection[str]) -> set[str]:
    """Return the members of `names`, all types or all functions, that a C++ file uses.

    Members of the same name do not count.
    """
    bare = re.sub(r"//.*|\bsim::", "", source)
    ends = {name: r"\b" if name[0].isupper() else r"\(" for name in names}
    return {name for name, end in ends.items() if re.search(rf"(?<![\w.>:]){name}{end}", bare)}


def test_simulator_files_use_earlier_files() -> None:
    """Each header names files from the lowest to the highest, so there is no cycle."""
    parts = parts_of((SIMULATOR / "device.h").read_text()) | parts_of((SIMULATOR / "tensors.h").read_text())
    assert {"schedule.cpp", "memory.cpp", "tensors.cpp"} <= parts.keys()
    rows = list(parts.items())
    upward = {
        name: used_in((SIMULATOR / name).read_text(), set().union(*(names for _, names in rows[index + 1 :])))
        for index, (name, _) in enumerate(rows)
    }
    assert {name: sorted(names) for name, names in upward.items() if names} == {}


def test_uses_of_simulator_file_are_detected() -> None:
    low = "// -- low.cpp: a\nint low();\n"
    high = "// -- high.cpp: b\nclass High {\n  int no();\n};\nstd::vector<int> high(int at);\n"
    assert parts_of(low + high) == {"low.cpp": {"low"}, "high.cpp": {"High", "high"}}
    for source in ("return high(1);", "sim::high(1);", "High* one;"):
        assert used_in(source, {"High", "high"}) != set()
    for source in ("// high(1)", "one.high(1);", "two->high(1);", "other::high(1);", "int high = 1;"):
        assert used_in(source, {"High", "high"}) == set()
