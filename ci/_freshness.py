"""Checks of documents against the repository. Each check returns its complaints."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import _benchmarks
import _differences
import _picture
import _runs
from _environment import ROOT, git, project

sys.path.insert(0, str(ROOT))
from benchmarks import history

DOCUMENTS = tuple(
    str(file.relative_to(ROOT)) for folder in (ROOT, ROOT / "docs") for file in sorted(folder.glob("*.md"))
)
GENERATED: dict[str, Callable[[], str]] = {
    "docs/differences.md": _differences.page,
    "docs/results.svg": _picture.picture,
    _benchmarks.PAGE: _benchmarks.page,
    _runs.PAGE: _runs.page,
}
MOST_NEWER_COMMITS = 10


def warnings(points: list[history.Point], root: Path = ROOT) -> list[str]:
    """Return a warning if the newest of the recorded benchmark results is old or unknown, or if there are none."""
    if not points:
        return ["no benchmark results are recorded: run ci/bench"]
    newest = points[-1]
    newer = history.commits_since(newest.commit, root)
    subject = f"the newest benchmark result, {newest.commit[:8]} on {newest.machine},"
    if newer is None:
        return [f"{subject} is of a commit that is not in this history (a shallow clone?)"]
    if newer > MOST_NEWER_COMMITS:
        return [
            f"{subject} is {newer} commits of impl old, more than {MOST_NEWER_COMMITS}: "
            f"run ci/bench --history {newer}"
        ]
    return []


def complaints() -> list[str]:
    return [complaint for check in CHECKS for complaint in check()]


def paths_exist() -> list[str]:
    """Complain about paths in backticks in documents that do not exist and that git does not ignore."""
    missing = []
    for document in DOCUMENTS:
        for path in re.findall(r"`([\w.][\w./-]*)`", (ROOT / document).read_text()):
            is_path = "/" in path or path.endswith((".md", ".toml", ".json", ".yaml"))
            if is_path and not (ROOT / path).exists() and not _is_ignored(path):
                missing.append(f"{document} names `{path}`, which does not exist")
    return missing


def links_lead_somewhere() -> list[str]:
    """Complain about links of documents to files or headings that do not exist."""
    missing = []
    for document in DOCUMENTS:
        for target in re.findall(r"\]\((?!https?:)([^)\s]*)\)", (ROOT / document).read_text()):
            path, _, anchor = target.partition("#")
            file = (ROOT / document).parent / path if path else ROOT / document
            if not file.exists() or (anchor and anchor not in _anchors(file)):
                missing.append(f"{document} links to {target}, which does not exist")
    return missing


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {_differences.anchor(heading) for heading in headings}


def folders_are_named() -> list[str]:
    """Complain about top-level folders that docs/design.md does not name."""
    design = (ROOT / "docs/design.md").read_text()
    folders = {path.split("/")[0] for path in git(ROOT, "ls-files", "*/*").splitlines()}
    return [
        f"docs/design.md does not name the folder `{folder}`"
        for folder in sorted(folders)
        if not folder.startswith(".") and not re.search(rf"\b{folder}\b", design)
    ]


def generated_are_current() -> list[str]:
    """Complain about generated documents that are missing or out of date."""
    return [
        f"{path} is not what its sources give: run ci/check --fix"
        for path, generate in GENERATED.items()
        if not (ROOT / path).is_file() or (ROOT / path).read_text() != generate()
    ]


def write_generated() -> None:
    for path, generate in GENERATED.items():
        (ROOT / path).write_text(generate())


def version_agrees() -> list[str]:
    """Complain unless the changelog begins with the unreleased section of pyproject.toml's version."""
    expected = f"Unreleased: {project()['project']['version']}"
    first = re.search(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    if first is None or first[1] != expected:
        return [f"CHANGELOG.md must begin with the section `## {expected}`, not {first and first[0]!r}"]
    return []


def benchmarked_torch_agrees() -> list[str]:
    """Complain unless asv.conf.json has the torch version and the project name of pyproject.toml."""
    asv = json.loads((ROOT / "asv.conf.json").read_text())
    actual = {"torch": asv["matrix"]["req"]["torch"], "project": asv["project"]}
    expected = {"torch": [project()["tool"]["tandem"]["torch"]], "project": project()["project"]["name"]}
    return [] if actual == expected else [f"asv.conf.json has {actual}, pyproject.toml {expected}"]


def dependencies_have_reasons() -> list[str]:
    """Complain about dependencies that docs/recipes.md does not list, and about listed ones that are gone."""
    table = project()["project"]
    required = [
        *table["dependencies"],
        *(line for extra in table["optional-dependencies"].values() for line in extra),
    ]
    expected = {match[0] for line in required if (match := re.match(r"[\w-]+", line))}
    table_of_reasons = (ROOT / "docs/recipes.md").read_text().partition("## Add a dependency\n")[2]
    listed = set(re.findall(r"^\| `([\w-]+)` \|", table_of_reasons, re.MULTILINE))
    return [
        *(f"docs/recipes.md gives no reason for the dependency {name}" for name in sorted(expected - listed)),
        *(f"docs/recipes.md lists {name}, which is not a dependency" for name in sorted(listed - expected)),
    ]


CHECKS: tuple[Callable[[], list[str]], ...] = (
    paths_exist,
    folders_are_named,
    version_agrees,
    benchmarked_torch_agrees,
    dependencies_have_reasons,
    generated_are_current,
    links_lead_somewhere,
)


def _is_ignored(path: str) -> bool:
    return subprocess.run(["git", "check-ignore", "-q", path], cwd=ROOT, check=False).returncode == 0
