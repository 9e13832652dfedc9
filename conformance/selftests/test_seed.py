"""`--seed` reaches all that is random: Hypothesis, the data of the tests and the ranks; every run is logged."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conformance.judge.sandbox import environment, seeding
from conformance.selftests.processes import run_pytest
from conformance.selftests.sample_reports import judged
from conformance.strategies.gradients import Gradient
from conformance.strength import false_positives
from conformance.strength.__main__ import main
from conformance.strength.results import Row, read_table, write_table

# Drawn values are written to a file. Each test has the same words as a test of the suite.
DRAWING = """
import json, random
from pathlib import Path
import torch
from hypothesis import given, strategies as st
from conformance.strategies.gradients import Gradient

drawn = []

@given(st.integers(0, 2**60))
def test_hypothesis(number):
    drawn.append(number)

def test_the_rest(ranks):
    Path(__file__).with_name("drawn.json").write_text(json.dumps({
        "hypothesis": drawn,
        "gradients": Gradient((3,), seed=1).values().tolist(),
        "this process": [torch.rand(()).item(), random.random()],
        "ranks": ranks(2).run("conformance.ranks.failing_programs:random_numbers"),
    }))
"""


def draw(folder: Path, *seed: str) -> dict[str, Any]:
    (folder / "test_drawing.py").write_text(DRAWING)
    plugins = ("-p", "conformance.plugin", "-p", "conformance.ranks.fixtures")
    words = ("--subject", "torch", "--profile", "quick", *seed, folder / "test_drawing.py")
    ended = run_pytest(*plugins, *words, cwd=folder)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return json.loads((folder / "drawn.json").read_text())


@pytest.mark.deadline(300)
def test_seed_determines_every_draw(tmp_path: Path) -> None:
    first, again, other = draw(tmp_path, "--seed=3"), draw(tmp_path, "--seed=3"), draw(tmp_path, "--seed=4")
    assert first == again
    assert all(first[source] != other[source] for source in first), (first, other)
    assert first["ranks"][0] == first["ranks"][1]


def test_equal_seeds_draw_equal_values_within_run_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def values(number: int) -> list[float]:
        return Gradient((4,), seed=number).values().tolist()

    monkeypatch.setattr(seeding, "_run_seed", 5)
    assert values(1) == values(1)
    assert values(1) != values(2)
    before = values(1)
    monkeypatch.setattr(seeding, "_run_seed", 6)
    assert values(1) != before


@pytest.mark.parametrize("seed", [0, -1, 2**70])
def test_any_integer_is_valid_seed(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(seeding, "_run_seed", seed)
    assert Gradient((1,), seed=7).values().isfinite().all()


def runs(out: Path, subject: str, *words: str) -> tuple[int, list[Row]]:
    options = ["--subject", subject, "--seeds=1", "--first=9", "--jobs=1", f"--out={out}", *words]
    test = "conformance/nn/utils/test_clip_grad_value.py::test_long_gradients_among_short_ones"
    code = main(["false-positives", *options, test])
    return code, read_table(out, "false-positives").rows


@pytest.mark.deadline(200)
def test_each_run_is_a_row(tmp_path: Path) -> None:
    code, (row,) = runs(tmp_path / "table.json", "torch")
    assert (code, row.name, row.outcome) == (0, "seed 9", "green")
    assert row.says.endswith(" passed")
    assert row.text == f"green, {row.says}"
    assert row.nodeid == ""


def test_judged_seed_is_not_judged_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "commit", lambda: "abc")
    judged_seeds: list[str] = []

    def run_pytest(spec: str, folder: Path, jobs: int, words: Sequence[str]) -> dict[str, Any]:
        judged_seeds.append(words[1])
        return {"verdict": "green", "tests": [judged("passed")]}

    monkeypatch.setattr(false_positives, "run_pytest", run_pytest)
    out = tmp_path / "table.json"
    runs(out, "torch", "--seeds=2")
    table = read_table(out, "false-positives")
    write_table(out, replace(table, rows=table.rows[:1], complete=False))
    code, rows = runs(out, "torch", "--seeds=2", "--resume")
    assert (code, [row.name for row in rows]) == (0, ["seed 9", "seed 10"])
    assert judged_seeds == ["--seed=9", "--seed=10", "--seed=10"]


@pytest.mark.deadline(200)
def test_fault_is_found_at_every_seed(tmp_path: Path) -> None:
    code, (only,) = runs(tmp_path / "table.json", "torch+skip:nn.utils.clip_grad_value_")
    assert (code, only.outcome) == (1, "red")
    assert only.nodeid
    assert "--seed 9" in only.says
