"""Tests of the check `language`: a bad and a good text for each rule, exemptions, and counts that only fall."""

from __future__ import annotations

import importlib
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from benchmarks.tests.sample_results import CI

ROOT = CI.parent


@pytest.fixture
def language(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(CI))
    return importlib.import_module("_language")


def checks_of(language: Any, path: str, source: str) -> list[str]:
    rules = language.Rules(tomllib.loads(language.LISTS.read_text()))
    return [complaint.check for complaint in language.complaints_of(path, source, rules)]


def function(docstring: str) -> str:
    return f'def function():\n    """{docstring}"""\n'


PYTHON = {
    "summary": (function("Raises: ValueError."), function("Raise ValueError.")),
    "first-word": (
        function("Of the thread that died, or else of the main thread."),
        function("Return the stack of the thread that died."),
    ),
    "first-word of a class": (
        'class Root:\n    """What a user says of the steps to come."""\n',
        'class Root:\n    """User settings for the next steps."""\n',
    ),
    "comment": (
        "# Those of copies are wide.\nnorm = 1\n",
        "# Low-precision gradients update wide masters,\n# of those it takes the norm.\nnorm = 1\n",
    ),
    "trailing": ("dtypes = []  # of what is unsharded\n", "dtypes = []  # dtype of each unsharded group\n"),
    "trailing that is long": (f"rows = 1  # {'rows ' * 13}\n", "rows = 1  # rows\n"),
    "word": (
        '"""Return a model that is sharded anew."""\n',
        '"""Return a model behind an interface, with `dealt` in backticks."""\n',
    ),
    "word in two lines": ("# The gradient is lost in\n# silence.\n", "# The gradient is silently\n# lost.\n"),
    "variable": ("units = [one for one in []]\n", "units = [unit for unit in []]\n"),
    "variable that is a parameter": ("f = lambda found: 1\n", "f = lambda found_inf: 1\n"),
    "variable that is caught": (
        "try:\n    pass\nexcept OSError as seen:\n    pass\n",
        "try:\n    pass\nexcept OSError as error:\n    pass\n",
    ),
    "definition": ("def refuse_twice(): ...\n", "def check_not_sharded(): ...\n"),
    "definition of an attribute": ("self.is_lent = True\n", "self.is_used_by_sharers = True\n"),
    "test-name": ("def test_what_raises(): ...\n", "def test_load_errors_match_torch(): ...\n"),
    "test-name of one word": ("def test_trains(): ...\n", "def test_training_matches_torch(): ...\n"),
    "spelling": (
        '"""Return the behavior."""\n',
        '"""Return the behaviour of `behavior` when ranks synchronise."""\ntext = "synchronize"\n',
    ),
}
TOML = {
    "sentence": ('says = "By what it is divided."\n', 'says = "min_scale bounds the scale."\n'),
    "sentence of a table": (
        '[[rows]]\nwhy = "Those that validate train on."\n',
        '[[rows]]\nwhy = "A validation run trains on."\nnote = "Whoever"\n',
    ),
    "length": (
        f'we_do = "Tandem raises {"and raises " * 15}."\n',
        f'we_do = "Tandem raises {"and raises " * 10}. Tandem returns."\n',
    ),
    "word": ('we_do = "Tandem shards anew."\n', 'we_do = "Tandem shards again."\n'),
}
MARKDOWN = {
    "word": ("Each user is told so.\n", "Each user reads `told`.\n\n```\nnobody\n```\n"),
    "spelling": ("Its behavior.\n", "Its behaviour.\n"),
}


@pytest.mark.parametrize(
    ("path", "check", "bad", "good"),
    [
        (path, check, *texts)
        for path, tables in (("a.py", PYTHON), ("a.toml", TOML), ("a.md", MARKDOWN))
        for check, texts in tables.items()
    ],
)
def test_rule_refuses_bad_and_accepts_good_text(
    language: Any, path: str, check: str, bad: str, good: str
) -> None:
    name = check.split(maxsplit=1)[0]
    assert set(checks_of(language, path, bad)) == {name}
    assert checks_of(language, path, good) == []


@pytest.mark.parametrize(
    "docstring",
    [
        "What Dynamo is to be told, told once somebody imports it.",
        "By the optimizer's own step, from gradients that are unscaled and clipped in place.",
        "None where it was not built.",
        "Those of all parameters, which lose them.",
        "With what it borrows.",
        "Whoever asks waits.",
    ],
)
def test_dialect_of_old_docstrings_is_refused(language: Any, docstring: str) -> None:
    assert "first-word" in checks_of(language, "a.py", function(docstring))


@pytest.mark.parametrize(
    "docstring",
    [
        "Whether torch has the operator.",
        "`owner` and its parameters.",
        "Finish this unit's backward if the autograd graph did not.",
        "0-dim norms of one order: one of the replicated gradients, and one for each shard group.",
    ],
)
def test_statements_are_accepted(language: Any, docstring: str) -> None:
    assert checks_of(language, "a.py", function(docstring)) == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("a.py", "def f(given): ...  # language: torch's name of the parameter\n"),
        ("a.py", 'def f():\n    """Of the root.\n\n    More.\n    """  # language: quoted from torch\n'),
        ("a.toml", 'why = "These raise."  # language: quoted from torch\n'),
        ("a.md", "Told so. <!-- language: quoted from torch -->\n"),
    ],
)
def test_exemption_needs_reason(language: Any, path: str, source: str) -> None:
    assert checks_of(language, path, source) == []
    reason = source.partition("language:")[2].removesuffix("\n").removesuffix("-->")
    assert "exemption" in checks_of(language, path, source.replace(reason, " "))


@pytest.mark.parametrize(
    ("subject", "is_good"),
    [
        ("fsdp: release input hooks of forwards without backward", True),
        ("ci/check, docs: check language", True),
        ("FSDP: a forward lets its hooks go", False),
        ("Two slots a core", False),
        ("fsdp: release input hooks.", False),
        (f"fsdp: release{' hooks' * 12}", False),
    ],
)
def test_commit_subject_names_area_and_change(
    language: Any, tmp_path: Path, subject: str, is_good: bool
) -> None:
    assert (language.of_subject(subject) is None) == is_good
    message = tmp_path / "message"
    message.write_text(f"{subject}\n\nBody.\n")
    command = [sys.executable, str(CI / "_language.py"), "--message", str(message)]
    assert subprocess.run(command, check=False).returncode == (not is_good)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Repository on a branch of `main`, with three complaints in impl and two allowed."""
    (tmp_path / "ci").mkdir()
    (tmp_path / "impl").mkdir()
    lists = (CI / "language.toml").read_text().partition("# How many complaints")[0]
    (tmp_path / "ci/language.toml").write_text(lists)
    allow(tmp_path, 2)
    (tmp_path / "impl/old.py").write_text("one = 1\nfound = 1\n")
    for command in (
        ["init", "-q", "-b", "main"],
        ["config", "user.email", "a@b.c"],
        ["config", "user.name", "a"],
        ["add", "."],
        ["commit", "-q", "-m", "impl: add old"],
        ["switch", "-q", "-c", "topic"],
    ):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    return tmp_path


def allow(tree: Path, number: int) -> None:
    path = tree / "ci/language.toml"
    lists = path.read_text().partition("# How many complaints")[0]
    allowed = f"[allowed.variable]\nimpl = {number}\n" if number else ""
    path.write_text(f"{lists}# How many complaints are left.\n{allowed}")


def test_count_may_not_rise_and_report_shows_new_line(language: Any, tree: Path) -> None:
    assert language.report(tree) == []
    (tree / "impl/old.py").write_text("one = 1\nfound = 1\nseen = 1\n")
    complaints = language.report(tree)
    assert len(complaints) == 2
    assert complaints[0].startswith('impl/old.py:3: variable: got "seen", expected')
    assert complaints[1] == "impl has 3 complaints of `variable`, and ci/language.toml allows 2"


def test_count_must_be_lowered_and_lower_writes_it(language: Any, tree: Path) -> None:
    (tree / "impl/old.py").write_text("one = 1\n")
    (complaint,) = language.report(tree)
    assert "has 1 complaints of `variable` and ci/language.toml allows 2" in complaint
    assert language.report(tree, lower=True) == []
    assert language.report(tree) == []
    assert tomllib.loads((tree / "ci/language.toml").read_text())["allowed"] == {"variable": {"impl": 1}}


def test_lower_never_raises_count_and_drops_zero(language: Any, tree: Path) -> None:
    (tree / "impl/old.py").write_text("one = 1\nfound = 1\nseen = 1\n")
    assert len(language.report(tree, lower=True)) > 0
    assert tomllib.loads((tree / "ci/language.toml").read_text())["allowed"] == {"variable": {"impl": 2}}
    (tree / "impl/old.py").write_text("")
    assert language.report(tree, lower=True) == []
    assert "allowed" not in tomllib.loads((tree / "ci/language.toml").read_text())
    (tree / "impl/old.py").write_text("one = 1\n")
    assert len(language.report(tree)) == 2


def test_branch_with_bad_subject_is_refused(language: Any, tree: Path) -> None:
    commit = ["git", "commit", "-q", "--allow-empty", "-m", "Reads better now"]
    subprocess.run(commit, cwd=tree, check=True)
    (complaint,) = language.report(tree)
    assert complaint.startswith("commit: got 'Reads better now'")
