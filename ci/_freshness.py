"""What the documents promise, compared with what is in the repository; each check returns its complaints."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import _differences
import _picture
from _environment import ROOT, project

sys.path.insert(0, str(ROOT))
from benchmarks import history

DOCUMENTS = tuple(
    str(file.relative_to(ROOT)) for folder in (ROOT, ROOT / "docs") for file in sorted(folder.glob("*.md"))
)

MOST_COMMITS_BEHIND = 10


def warnings(points: list[history.Point], root: Path = ROOT) -> list[str]:
    """What lags behind without being wrong: the newest of these points of the clock."""
    if not points:
        return ["the clock has no points: ci/bench makes one"]
    newest = points[-1]
    behind = history.commits_since(newest.commit, root)
    reported = f"the clock's newest point, {newest.commit[:8]} on {newest.machine},"
    if behind is None:
        return [f"{reported} is of no commit of this history (a shallow clone?)"]
    if behind > MOST_COMMITS_BEHIND:
        return [
            f"{reported} is {behind} commits of impl old, more than {MOST_COMMITS_BEHIND}: "
            f"run ci/bench --history {behind}"
        ]
    return []


def complaints() -> list[str]:
    return [complaint for check in CHECKS for complaint in check()]


def paths_exist() -> list[str]:
    """Every path that a document names in backticks is there, be it a file, a folder or something made (ignored)."""
    missing = []
    for document in DOCUMENTS:
        for path in re.findall(r"`([\w.][\w./-]*)`", (ROOT / document).read_text()):
            is_path = "/" in path or path.endswith((".md", ".toml", ".json", ".yaml"))
            if is_path and not (ROOT / path).exists() and not _is_made(path):
                missing.append(f"{document} names `{path}`, which does not exist")
    return missing


def links_lead_somewhere() -> list[str]:
    """Return each link of a document to a file or heading that does not exist."""
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
    """The map in docs/design.md has every folder of the top level."""
    design = (ROOT / "docs/design.md").read_text()
    folders = {path.split("/")[0] for path in _git("ls-files", "*/*").splitlines()}
    return [
        f"docs/design.md does not name the folder `{folder}`"
        for folder in sorted(folders)
        if not folder.startswith(".") and not re.search(rf"\b{folder}\b", design)
    ]


def version_agrees() -> list[str]:
    """The changelog's first section is the unreleased one and carries the version of pyproject.toml."""
    expected = f"Unreleased: {project()['project']['version']}"
    first = re.search(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    if first is None or first[1] != expected:
        return [f"CHANGELOG.md must begin with the section `## {expected}`, not {first and first[0]!r}"]
    return []


def benchmarked_torch_agrees() -> list[str]:
    """asv builds its environments with the torch that ci/ installs, and uninstalls the project by its right name."""
    asv = json.loads((ROOT / "asv.conf.json").read_text())
    found = {"torch": asv["matrix"]["req"]["torch"], "project": asv["project"]}
    expected = {"torch": [project()["tool"]["tandem"]["torch"]], "project": project()["project"]["name"]}
    return [] if found == expected else [f"asv.conf.json has {found}, pyproject.toml {expected}"]


def dependencies_have_reasons() -> list[str]:
    """docs/recipes.md lists each dependency, and none that is gone."""
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
        *(f"docs/recipes.md lists {name}, which is no dependency" for name in sorted(listed - expected)),
    ]


CHECKS: tuple[Callable[[], list[str]], ...] = (
    paths_exist,
    folders_are_named,
    version_agrees,
    benchmarked_torch_agrees,
    dependencies_have_reasons,
    _differences.stale,
    _picture.stale,
    links_lead_somewhere,
)


def _is_made(path: str) -> bool:
    return subprocess.run(["git", "check-ignore", "-q", path], cwd=ROOT, check=False).returncode == 0


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout
