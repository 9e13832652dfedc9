"""Plain technical English, as far as lists of words can hold it: see "Style" in CONTRIBUTING.md.

`language.toml` has the words. A line that has to break a rule ends in `# language: REASON`.

    python ci/_language.py PATH...             every complaint about these files and folders
    python ci/_language.py --message FILE      complaints about a commit message
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import translate
from pathlib import Path
from typing import Any

from _environment import ROOT, git
from _texts import Name, Text, exemptions, names_of_python, texts_of_markdown, texts_of_python, texts_of_toml

LISTS = ROOT / "ci" / "language.toml"
LEFT_OUT = ("benchmarks/results/", "ci/language.toml", "docs/differences.md")
MOST_EXEMPTIONS = 30
MOST_SHOWN = 40
SUBJECT = re.compile(r"[a-z][\w./-]*(, [a-z][\w./-]*)*: [a-z].*[^.]")
SUBJECT_CHARACTERS = 72


@dataclass(frozen=True)
class Complaint:
    path: str
    line: int
    check: str
    got: str
    expected: str

    def __str__(self) -> str:
        got = self.got if len(self.got) <= 60 else f"{self.got[:59]}…"
        return (
            f'{self.path}:{self.line}: {self.check}: got "{got}", expected {self.expected}; '
            "see CONTRIBUTING.md, Style"
        )


# Rules for texts and names


class Rules:
    """The checks, each a function from a text or a name to the complaints about it."""

    def __init__(self, lists: dict[str, Any]) -> None:
        first_words = {kind: set(lists[kind]["first_words"].split()) for kind in ("docstring", "comment")}
        first_words["trailing"] = first_words["docstring"]
        first_words["sentence"] = first_words["comment"] | set(lists["sentence"]["first_words"].split())
        self._first_words = first_words
        self._sections = tuple(f"{name}:" for name in lists["docstring"]["sections"].split())
        self._trailing_characters: int = lists["comment"]["trailing_characters"]
        self.keys: list[str] = lists["sentence"]["keys"].split()
        self._sentence_words: int = lists["sentence"]["words"]
        words = sorted(lists["word"]["refused"], key=len, reverse=True)
        self._words = re.compile(rf"\b(?:{'|'.join(words)})\b".replace(" ", r"\s+"), re.IGNORECASE)
        self._allowed_words = re.compile("|".join(lists["word"]["allowed"]).replace(" ", r"\s+"))
        self._spelling = re.compile(rf"\b\w*(?:{'|'.join(lists['spelling']['refused'])})\w*", re.IGNORECASE)
        self._variables = set(lists["variable"]["names"].split())
        definitions = map(translate, lists["definition"]["names"].split())
        self._definition = re.compile("|".join(definitions))
        self._test_words = set(lists["test-name"]["first_words"].split())

    def of_text(self, text: Text) -> Iterator[tuple[str, int, str, str]]:
        """Yield the check, line, what it got and what it expected for each complaint about a text."""
        first_line = text.text.partition("\n")[0]
        word = re.match(r"[\"'(]*([A-Za-z']+)", first_line)
        if text.kind == "docstring" and first_line.startswith(self._sections):
            yield "summary", text.line, first_line, "a summary before the sections"
        elif word and word[1].lower() in self._first_words.get(text.kind, ()):
            check = {"docstring": "first-word"}.get(text.kind, text.kind)
            yield check, text.line, first_line, _EXPECTED[text.kind]
        if text.kind == "trailing" and len(text.text) > self._trailing_characters:
            expected = f"at most {self._trailing_characters} characters; move it above the line"
            yield "trailing", text.line, first_line, expected
        if text.kind == "sentence":
            for sentence in re.split(r"(?<=[.!?]) +", text.text):
                if (words := len(sentence.split())) > self._sentence_words:
                    expected = f"at most {self._sentence_words} words a sentence, not {words}"
                    yield "length", text.line, sentence, expected
        yield from self._of_words(text)

    def _of_words(self, text: Text) -> Iterator[tuple[str, int, str, str]]:
        prose = self._allowed_words.sub("", re.sub(r"`[^`]*`|https?:\S*", "", text.text))
        for match in self._words.finditer(prose):
            line = text.line + prose.count("\n", 0, match.start())
            yield "word", line, match[0], "a word of the field"
        for match in self._spelling.finditer(prose):
            line = text.line + prose.count("\n", 0, match.start())
            yield "spelling", line, match[0], "British spelling"

    def of_name(self, name: Name) -> Iterator[tuple[str, int, str, str]]:
        """Yield the check, line, what it got and what it expected for each complaint about a bound name."""
        if name.kind in ("variable", "parameter") and name.name in self._variables:
            yield "variable", name.line, name.name, "a name that says its type or role"
        if self._definition.match(name.name):
            yield "definition", name.line, name.name, "a name that says what it does or is"
        if name.kind == "function" and name.name.startswith("test_"):
            words = name.name.split("_")[1:]
            if words[0] in self._test_words or len(words) == 1:
                yield "test-name", name.line, name.name, "the subject and what is expected of it"


_EXPECTED = {
    "docstring": "a noun phrase or an imperative",
    "comment": "a full sentence that names its subject",
    "trailing": "a noun phrase",
    "sentence": "a full sentence that begins with its subject",
}


# The tree


def complaints_of(path: str, source: str, rules: Rules) -> list[Complaint]:
    """Return the complaints about a file, without exempt lines."""
    names: Iterable[Name] = ()
    if path.endswith(".toml"):
        texts = texts_of_toml(source, rules.keys)
    elif path.endswith(".md"):
        texts = texts_of_markdown(source)
    else:
        nodes = [*ast.walk(ast.parse(source))]
        texts, names = texts_of_python(nodes, source), names_of_python(nodes)
    exempt = exemptions(source)
    raised = [
        *(
            Complaint(path, line, check, got, expected)
            for text in texts
            for check, line, got, expected in rules.of_text(text)
            if not {line, text.line, text.last_line} & exempt.keys()
        ),
        *(
            Complaint(path, line, check, got, expected)
            for name in names
            for check, line, got, expected in rules.of_name(name)
            if line not in exempt
        ),
        *(
            Complaint(path, line, "exemption", "language:", "a reason after it")
            for line, reason in exempt.items()
            if not reason
        ),
    ]
    return sorted(raised, key=lambda complaint: complaint.line)


def sources_of(root: Path, below: Iterable[str] = ()) -> dict[str, str]:
    """Return the texts of Python, TOML and Markdown files that git does not ignore, keyed by path."""
    listed = git(root, "ls-files", "--cached", "--others", "--exclude-standard", "--", *below)
    return {
        path: (root / path).read_text()
        for path in sorted(set(listed.splitlines()))
        if not path.startswith(LEFT_OUT) and (root / path).is_file() and _is_read(root / path)
    }


def _is_read(path: Path) -> bool:
    if path.suffix in (".py", ".toml", ".md"):
        return True
    return (
        path.parent.name == "ci" and not path.suffix and path.read_text().startswith("#!/usr/bin/env python3")
    )


def all_complaints(sources: Mapping[str, str], rules: Rules) -> list[Complaint]:
    return [complaint for path, source in sources.items() for complaint in complaints_of(path, source, rules)]


def of_subject(subject: str) -> str | None:
    """Return what is wrong with the subject of a commit message, or None."""
    if len(subject) > SUBJECT_CHARACTERS:
        return f"commit: {len(subject)} characters in {subject!r}, expected at most {SUBJECT_CHARACTERS}"
    if not SUBJECT.fullmatch(subject):
        return f"commit: got {subject!r}, expected `area: imperative` in lower case without a full stop"
    return None


def base_of(root: Path) -> str:
    """Return the commit that this branch left `main` at, or HEAD where git knows no such branch."""
    for branch in ("origin/main", "main"):
        base = git(root, "merge-base", "HEAD", branch, check=False).strip()
        if base:
            return base
    return "HEAD"


def changed_lines(root: Path, base: str) -> Callable[[Complaint], bool]:
    """Return whether a complaint is about a line that was changed since `base`."""
    untracked = set(git(root, "ls-files", "--others", "--exclude-standard").splitlines())
    changed: set[tuple[str, int]] = set()
    path = ""
    for line in git(root, "diff", "--unified=0", "--no-color", "--no-prefix", base).splitlines():
        if line.startswith("+++ "):
            path = line[4:]
        elif match := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            start, length = int(match[1]), int(match[2] or 1)
            changed.update((path, number) for number in range(start, start + length))
    return lambda complaint: complaint.path in untracked or (complaint.path, complaint.line) in changed


# The counts, which can only fall


Counts = dict[str, dict[str, int]]


def counts_of(complaints: Iterable[Complaint]) -> Counts:
    """Return how many complaints there are for each check and top folder. A file at the top counts by itself."""
    counted = Counter((complaint.check, complaint.path.split("/")[0]) for complaint in complaints)
    counts: Counts = {}
    for check, folder in sorted(counted):
        counts.setdefault(check, {})[folder] = counted[check, folder]
    return counts


def lowered(allowed: Counts, counts: Counts) -> Counts:
    """Return the smaller of both numbers for each check and folder, without zeros."""
    return {
        check: smaller
        for check, folders in allowed.items()
        if (
            smaller := {
                folder: least
                for folder, number in folders.items()
                if (least := min(number, counts.get(check, {}).get(folder, 0)))
            }
        )
    }


def write_allowed(path: Path, allowed: Counts) -> None:
    lists = path.read_text().partition("# How many complaints")[0].rstrip()
    lines = [
        "# How many complaints are left, by check and folder; `ci/check --only language --lower` writes it."
    ]
    for check, folders in allowed.items():
        lines += [f"[allowed.{check}]", *(f'"{folder}" = {number}' for folder, number in folders.items()), ""]
    path.write_text("\n".join([lists, "", *lines]).rstrip() + "\n")


def report(root: Path, *, lower: bool = False) -> list[str]:
    """Return what fails the check. With `lower`, first lower the counts to what is left."""
    path = root / "ci" / "language.toml"
    lists = tomllib.loads(path.read_text())
    sources = sources_of(root)
    complaints = all_complaints(sources, Rules(lists))
    counts, allowed = counts_of(complaints), lists.get("allowed", {})
    if lower:
        allowed = lowered(allowed, counts)
        write_allowed(path, allowed)
    base = base_of(root)
    lines = [
        *_of_commits(root, base),
        *_of_exemptions(sources),
        *_above(complaints, counts, allowed, changed_lines(root, base)),
    ]
    for check, folders in allowed.items():
        for folder, number in folders.items():
            if (left := counts.get(check, {}).get(folder, 0)) < number:
                lines.append(
                    f"{folder} has {left} complaints of `{check}` and ci/language.toml allows {number}: "
                    "lower it by `ci/check --only language --lower`"
                )
    return lines


def _above(
    complaints: list[Complaint], counts: Counts, allowed: Counts, is_new: Callable[[Complaint], bool]
) -> Iterator[str]:
    for check, folders in counts.items():
        for folder, number in folders.items():
            most = allowed.get(check, {}).get(folder, 0)
            if number <= most:
                continue
            here = [
                entry for entry in complaints if entry.check == check and entry.path.split("/")[0] == folder
            ]
            shown = [entry for entry in here if is_new(entry)] or here
            yield from map(str, shown[:MOST_SHOWN])
            yield f"{folder} has {number} complaints of `{check}`, and ci/language.toml allows {most}"


def _of_commits(root: Path, base: str) -> Iterator[str]:
    for subject in git(root, "log", "--no-merges", "--format=%s", f"{base}..HEAD").splitlines():
        if complaint := of_subject(subject):
            yield complaint


def _of_exemptions(sources: Mapping[str, str]) -> Iterator[str]:
    number = sum(len(exemptions(source)) for source in sources.values())
    if number > MOST_EXEMPTIONS:
        yield f"{number} lines are exempt from the rules by `# language: REASON`, expected at most {MOST_EXEMPTIONS}"


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--message"]:
        subject = Path(arguments[1]).read_text().partition("\n")[0]
        lines = [complaint for complaint in [of_subject(subject)] if complaint]
    else:
        lines = [
            *map(str, all_complaints(sources_of(ROOT, arguments), Rules(tomllib.loads(LISTS.read_text()))))
        ]
    print("\n".join(lines), end="\n" if lines else "")
    return 1 if lines else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
