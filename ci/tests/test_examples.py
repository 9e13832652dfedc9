"""The examples of README.md, CONTRIBUTING.md and docs/ run, print what the page says, and name options that exist.

How a page marks what it shows:
    ```python           run as one program with the page's other blocks, unless it begins with `# FILE`
    # FILE              as the block's first line: the block is saved under this name for the page's commands
    ```python excerpt   part of a file; not run here
    ```bash run         run where the files were saved; `# exit 1` says with which exit code
    ```text             below such commands: their output
    ```bash             not run: programs, modules and options have to exist
    print(x)  # y       prints y
"""

from __future__ import annotations

import functools
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from conformance.selftests.processes import run_python

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
_PROGRAMS = Path(sys.executable).parent
_LIMIT_S = 400.0
# Programs of others, whose options are not checked.
_OTHERS = {"pip", "python3", "cd", "export", "git", "torchrun", "."}

pytestmark = pytest.mark.deadline(_LIMIT_S + 60)


@dataclass(frozen=True)
class CodeBlock:
    language: str
    mark: str  # words beside the language
    text: str

    @property
    def file(self) -> str:
        named = re.match(r"# ([\w./-]+\.py)\n", self.text) if self.language == "python" else None
        return named[1] if named and not self.mark else ""


def blocks_of(page: Path) -> list[CodeBlock]:
    fences = re.findall(r"^```(\w*) ?(.*)\n((?:.*\n)*?)```$", page.read_text(), re.MULTILINE)
    return [CodeBlock(*parts) for parts in fences]


def commands_in(block: CodeBlock) -> list[str]:
    """Return the block's commands; a backslash continues a line."""
    lines = block.text.replace("\\\n", " ").splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]


def run(command: str, cwd: Path, tree: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {
        "PATH": f"{_PROGRAMS}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(tree),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        ["bash", "-c", command],
        cwd=cwd,
        env=environ,
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )


def save_files(page: Path, folder: Path) -> None:
    for block in blocks_of(page):
        if block.file:
            file = folder / block.file
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block.text)


WITH_PROGRAMS = [
    page for page in PAGES if any(b.language == "python" and not (b.file or b.mark) for b in blocks_of(page))
]


@pytest.mark.parametrize("page", WITH_PROGRAMS, ids=lambda page: page.name)
def test_python_examples_print_what_the_page_says(page: Path, tmp_path: Path) -> None:
    program = "".join(
        block.text
        for block in blocks_of(page)
        if block.language == "python" and not (block.file or block.mark)
    )
    (tmp_path / "example.py").write_text(program)
    ended = run("python example.py", tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == re.findall(r"^print\(.*\)  # (.*)$", program, re.MULTILINE)


# `conformance/selftests/test_simulator_script.py` runs these pages, where the simulator can be built.
_ON_THE_SIMULATOR = {"simulator.md", "gate-your-backend.md"}
WITH_COMMANDS = [
    page
    for page in PAGES
    if page.name not in _ON_THE_SIMULATOR and any(block.mark == "run" for block in blocks_of(page))
]


@pytest.mark.profile("full")
@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: page.name)
def test_commands_give_the_output_of_the_page(page: Path, tmp_path: Path) -> None:
    save_files(page, tmp_path)
    blocks = blocks_of(page)
    for block, below in zip(blocks, [*blocks[1:], CodeBlock("", "", "")], strict=True):
        if block.mark != "run":
            continue
        output = ""
        for command in commands_in(block):
            ended = run(command, tmp_path)
            expected = re.search(r"# exit (\d)", command)
            assert ended.returncode == int(expected[1] if expected else 0), ended.stdout + ended.stderr
            output += ended.stdout
        if below.language == "text":
            assert output == below.text


@pytest.mark.profile("full")
def test_first_clause_and_fault_of_contributing_work(tmp_path: Path) -> None:
    """The fault must turn the clause red, and nothing else may."""
    for folder in ("impl", "conformance"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    blocks = blocks_of(ROOT / "CONTRIBUTING.md")
    [clause] = [block for block in blocks if block.language == "toml"]
    test, fault = [block for block in blocks if block.mark == "excerpt"]
    for file, block in {
        "conformance/nn/utils/clip_grad.toml": clause,
        "conformance/nn/utils/test_clip_grad_value.py": test,
        "conformance/strength/faults/handmade/nn_utils_clip_grad_scaling.py": fault,
    }.items():
        with (tmp_path / file).open("a") as out:
            out.write(f"\n\n{block.text}")
    first = commands_in(next(block for block in blocks if "-k signed_zeros" in block.text))[0]
    command = first.removeprefix(".venv/bin/")
    green = run(command, tmp_path, tmp_path)
    assert green.returncode == 0, green.stdout + green.stderr
    red = run(f"{command} --subject impl+clip_grad.zero_signs_lost", tmp_path, tmp_path)
    assert red.returncode == 1, red.stdout + red.stderr
    assert "clip_grad_value_ keeps the sign of zeros." in red.stdout


def commands_of_ours() -> dict[str, list[tuple[str, list[str]]]]:
    """Return the pages and words of each program's commands, if its options are ours."""
    commands: dict[str, list[tuple[str, list[str]]]] = {}
    for page in PAGES:
        for block in blocks_of(page):
            for command in commands_in(block) if block.language == "bash" else ():
                program, words = program_of(command)
                commands.setdefault(program, []).append((page.name, words))
    return {program: uses for program, uses in commands.items() if program not in _OTHERS}


def program_of(command: str) -> tuple[str, list[str]]:
    """Return the program (`python -m MODULE` as one, with its subcommand) and its further words.

    `tandem-judge` and `tandem-race` count as the modules that they run.
    """
    words = [word.removeprefix(".venv/bin/") for word in shlex.split(command, comments=True)]
    while "=" in words[0]:  # variables of the environment
        del words[0]
    length = 1 if words[:2] != ["python", "-m"] else 4 if words[2] == "conformance.strength" else 3
    program, others = " ".join(words[:length]), words[length:]
    modules = {
        "python -m pytest": "pytest",
        "tandem-judge": "python -m conformance",
        "tandem-race": "python -m conformance.simulator",
    }
    return modules.get(program, program), others


@functools.cache
def help_of(program: str) -> str:
    # `ci/test` hands its arguments to pytest; the head of the file has its own.
    own = (ROOT / "ci/test").read_text() if program == "ci/test" else ""
    command = "python -m pytest" if program in ("ci/test", "pytest") else program
    module = command.removeprefix("python -m ")
    is_module = module != command
    ended = run_python("-m", *module.split(), "--help") if is_module else run(f"{command} --help", ROOT)
    assert ended.returncode == 0, (
        f"{program} --help ended with {ended.returncode}: {ended.stdout}{ended.stderr}"
    )
    return own + ended.stdout + ended.stderr


# A test for each program, because asking it for its help takes seconds.
@pytest.mark.parametrize("program", list(commands_of_ours()))
def test_commands_have_options_that_exist(program: str) -> None:
    for page, words in commands_of_ours()[program]:
        own_words = words[: words.index("--")] if "--" in words else words
        options = {word.partition("=")[0] for word in own_words if re.match(r"--?[a-z]", word)}
        unknown = [option for option in options if not re.search(rf"(?<![\w-]){option}\b", help_of(program))]
        assert not unknown, f"{page}: {program} has no {', '.join(unknown)}"
        for word in own_words:
            is_path = re.fullmatch(r"(?:conformance|impl|benchmarks|ci)/[\w./-]+", word.partition("::")[0])
            assert not is_path or (ROOT / is_path[0]).exists(), f"{page}: {word} does not exist"
