"""Tests of the checks of generated documents in `ci/check`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from conformance.judge.clauses import all_clauses
from conformance.judge.files.rows import HARMS, all_deviations, all_reference_limits

sys.path.insert(0, str(Path(__file__).parents[1]))
import _benchmarks
import _differences
import _freshness
import _picture

DEVIATION = """
["clip_grad.norm"]
torch_does = "clip_grad_norm_ returns inf."
we_do = "Tandem returns the norm."
why = "The step is lost."
devices = ["cpu"]
thread = "pytorch/pytorch#1"
harm = "{harm}"
"""


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(_differences, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "conformance").mkdir()
    return tmp_path


def write_deviations(tree: Path, text: str) -> None:
    (tree / _differences.SOURCE).write_text(text)


def test_differences_page_is_complained_about_until_written(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_freshness, "ROOT", tree)
    monkeypatch.setattr(_freshness, "GENERATED", {"docs/differences.md": _differences.page})
    write_deviations(tree, DEVIATION.format(harm="silent"))
    assert "run ci/check --fix" in _freshness.generated_are_current()[0]
    _freshness.write_generated()
    assert _freshness.generated_are_current() == []
    write_deviations(tree, DEVIATION.format(harm="hang"))
    assert len(_freshness.generated_are_current()) == 1


def test_differences_page_lists_the_worst_first(tree: Path) -> None:
    hang = DEVIATION.format(harm="hang").replace("clip_grad.norm", "clip_grad.early")
    write_deviations(tree, hang + DEVIATION.format(harm="silent"))
    page = _differences.page()
    assert page.index("**clip_grad.norm**") < page.index("**clip_grad.early**")
    assert "- torch: `clip_grad_norm_` returns inf." in page
    assert "[pytorch/pytorch#1](https://github.com/pytorch/pytorch/issues/1)" in page
    assert "| [Gradient clipping](#gradient-clipping) | 1 | 1 |" in page


def test_differences_page_needs_an_api_for_each_deviation(tree: Path) -> None:
    write_deviations(tree, DEVIATION.format(harm="silent").replace("clip_grad.", "new."))
    with pytest.raises(ValueError, match=r"no API is known for new\.norm"):
        _differences.page()


def test_differences_page_knows_all_harms() -> None:
    assert tuple(_differences._HARMS) == HARMS


def test_torch_versions_page_links_to_all_rows_with_a_range() -> None:
    page = Path(__file__).parents[2] / "docs" / "torch-versions.md"
    links = dict(re.findall(r"\[`([\w.]+)`\]\(([^)]+)\)", page.read_text()))
    rows = {**all_clauses(), **all_deviations(), **all_reference_limits()}
    assert links.keys() <= rows.keys()
    assert {name for name, row in rows.items() if row.torch} - links.keys() == set()
    for name, file in links.items():
        assert name.rpartition(".")[2] in (page.parent / file).read_text()


def test_picture_has_the_judged_packages_and_all_rows() -> None:
    svg = _picture.picture()
    judged = _picture.packages()
    assert len(judged) == 5
    assert all(f">{package.holds} of {package.clauses}<" in svg for package in judged)
    assert all(f">{row}<" in svg for row in _picture._ROWS)
    assert _picture.times().point.commit[:8] in svg


def test_picture_needs_a_result_with_all_cases(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_picture, "ROOT", tree)
    with pytest.raises(ValueError, match="run ci/bench"):
        _picture.times()


def test_benchmarks_page_is_complained_about_until_written(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (_freshness, _benchmarks):
        monkeypatch.setattr(module, "ROOT", tree)
    monkeypatch.setattr(_freshness, "GENERATED", {_benchmarks.PAGE: _benchmarks.page})
    blocks = [f"<!-- {name} -->\n<!-- end of {name} -->\n" for name in ("figures", "movers")]
    (tree / _benchmarks.PAGE).write_text("before\n" + "between\n".join(blocks) + "after\n")
    assert "run ci/check --fix" in _freshness.generated_are_current()[0]
    _freshness.write_generated()
    assert _freshness.generated_are_current() == []
    page = (tree / _benchmarks.PAGE).read_text()
    assert [line for line in page.splitlines() if not line.startswith(("|", "<", "No", "- ")) and line] == [
        "before",
        "between",
        "after",
    ]
    assert "| `clip_grad_norm_`, GPT-2's tensors |" in page
    (tree / _benchmarks.PAGE).write_text(blocks[0])
    with pytest.raises(ValueError, match="has no block between `<!-- movers -->`"):
        _benchmarks.page()


def test_links_to_missing_files_and_headings_are_complained_about(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_freshness, "ROOT", tree)
    monkeypatch.setattr(_freshness, "DOCUMENTS", ("docs/a.md",))
    (tree / "docs/a.md").write_text("# One step\n[a](#one-step) [b](#two) [c](b.md) [d](https://x.org)\n")
    assert _freshness.links_lead_somewhere() == [
        "docs/a.md links to #two, which does not exist",
        "docs/a.md links to b.md, which does not exist",
    ]
