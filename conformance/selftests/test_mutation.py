"""Mutants: what the operators change, which tests reach a changed line, and the score."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from conformance.exact_copy.copying import ROOT
from conformance.judge.judgement import unavailable
from conformance.strength.__main__ import main
from conformance.strength.mutation import lines
from conformance.strength.mutation.groups import (
    GROUPS,
    clauses_of,
    diff,
    draw,
    equivalence_note,
    file_of,
    find_mutant,
    key_of,
    modules_of,
    parsed,
    stale_notes,
)
from conformance.strength.mutation.operators import OPERATORS, mutate, sites
from conformance.strength.mutation.reach import Reach
from conformance.strength.mutation.score import Score
from conformance.strength.order import Task
from conformance.strength.results import EQUIVALENT, KILLED, SURVIVED, UNREACHED, read_table
from conformance.strength.worker import Worker

# Mutants of one function by operator, in order. A body is a body of `def f(a, rank, group):`.
MISTAKES = {
    "drop_statement": {
        "a.b = 1": ["pass"],
        "a += 1": ["pass"],
        "del a[0]": ["pass"],
        "raise a": ["pass"],
        "a.clear()": ["pass"],
        "b = 1": [],
        "a.wait()": [],
        "logger.info(a)": [],
        "self._perf_hint_log.info(a)": [],
        "'said'": [],
    },
    "drop_wait": {"a.wait()": ["pass"], "a.wait_stream(b)": [], "a.weight()": [], "b = a.wait()": []},
    "drop_device_wait": {"a.wait()": [], "a.wait_stream(b)": ["pass"]},
    "drop_argument": {
        "a(1, 2, x=3, **b)": ["a(1, x=3, **b)", "a(1, 2, **b)"],
        "a(b(1))": ["a()", "a(b())"],
        "a()": [],
    },
    "negate_condition": {
        "if a: b()": ["if not a:\n    b()"],
        "if a.pop(): logger.info(a)": [],
        "if a:\n    logger.info(a)\nelse:\n    b()": ["if not a:\n    logger.info(a)\nelse:\n    b()"],
        "if a:\n    b = a.pop()\n    logger.info(b)": ["if not a:\n    b = a.pop()\n    logger.info(b)"],
        "while a: b()": ["while not a:\n    b()"],
        "assert a": ["assert not a"],
        "b = 1 if a else 2": ["b = 1 if not a else 2"],
        "b = [x for x in a if x if a]": ["b = [x for x in a if not x if a]"],
    },
    "swap_extremes": {"max(a)": ["min(a)"], "a.any()": ["a.all()"], "b = ReduceOp.MIN": ["b = ReduceOp.MAX"]},
    "swap_signs": {
        "b = a + 1 - 2": ["b = a + 1 + 2", "b = a - 1 - 2"],
        "a -= 1": ["a += 1"],
        "b = a * 2": [],
    },
    "swap_bounds": {"b = a < 1": ["b = a <= 1"], "b = 0 >= a > 1": ["b = 0 > a > 1"], "b = a == 1": []},
    "return_early": {
        "a()\nb()": ["return", "a()\nreturn"],
        "'''Says.'''\na()": ["'''Says.'''\nreturn"],
        "pass": [],
    },
    "stale_value": {"a = a.float()": ["pass"], "b = a": [], "a.b = a": []},
    "wrong_group": {
        "a(b, group=self.process_group)": ["a(b, group=None)"],
        "a(group, b)": ["a(None, b)"],
        "a(b)": [],
    },
    "wrong_dtype": {
        "b = torch.float32": ["b = torch.float64"],
        "a(b.dtype)": ["a(torch.float64)"],
        "a(x=b.dtype)": ["a(x=torch.float64)"],
        "b = a.float32": [],
    },
    "wrong_rank": {
        "b = self.rank == 0": ["b = self.rank == 1", "b = 0 == 0"],
        "b = a[rank]": ["b = a[0]"],
        "self.rank = a": [],
    },
}


def function(body: str) -> str:
    return "def f(a, rank, group):\n" + textwrap.indent(body, "    ")


@pytest.mark.parametrize(
    ("operator", "body"), [(operator, body) for operator, mutants in MISTAKES.items() for body in mutants]
)
def test_operator_makes_listed_mutants(operator: str, body: str) -> None:
    source = function(body)
    mutants = []
    for site in sites(ast.parse(source)):
        if site.operator == operator:
            tree = ast.parse(source)
            assert mutate(tree, operator, site.number) == site
            mutants.append(ast.unparse(tree))
    assert mutants == [ast.unparse(ast.parse(function(mistake))) for mistake in MISTAKES[operator][body]]


def test_each_operator_is_tried() -> None:
    assert MISTAKES.keys() == OPERATORS.keys()
    with pytest.raises(LookupError, match="no mutant 1 of 'drop_wait'"):
        mutate(ast.parse(function("a.wait()")), "drop_wait", 1)


def test_only_code_in_functions_is_mutated() -> None:
    source = """
    x = max(1, 2)

    class A:
        y = max(1, 2)

        @decorated(1)
        def f(self, z: Literal[max] = max(1, 2)) -> None:
            if z:
                def g():
                    return (
                        max(1)
                    )
    """
    places = [
        (site.function, site.line)
        for site in sites(ast.parse(textwrap.dedent(source)))
        if site.operator == "swap_extremes"
    ]
    assert places == [("A.f.g", 11)]


@pytest.fixture
def line_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Record executed lines in a file of the test."""
    file = tmp_path / "lines"
    file.write_bytes(bytes(40))
    monkeypatch.setenv(lines.FILE, str(file))
    lines._flags.cache_clear()
    yield
    lines._flags.cache_clear()


@pytest.mark.usefixtures("line_flags")
def test_executed_lines_are_recorded() -> None:
    source = '''
    from __future__ import annotations
    def f(x):
        """Says."""
        if x:
            x = 1
        elif x is None:
            x = 2
        else:
            x = 3
        def g():
            return (
                x
            )
        return g
    '''
    tree = ast.parse(textwrap.dedent(source))
    lines.instrument(tree, 20)
    run: dict[str, object] = {}
    exec(compile(tree, "f.py", "exec"), run)
    assert run["f"].__doc__ == "Says."
    assert lines.take_executed() == []
    run["f"](None)
    assert lines.take_executed() == [25, 27, 28, 31, 35]
    assert run["f"](True)() == 1
    assert lines.take_executed() == [25, 26, 31, 32, 35]


def test_fastest_reaching_test_comes_first() -> None:
    value, other = sorted(clauses_of(GROUPS[2]))[:2]
    clauses = dict.fromkeys(("slow", "quick", "same", "gone", "traced"), value) | {"else": other, "name": ""}
    seconds = {"slow": 3.0, "quick": 1.0, "same": 1.5, "else": 2.0, "name": 0.2}
    reached = {"slow": [1, 2], "quick": [1], "same": [3], "else": [1], "name": [1]}
    reach = Reach(clauses, seconds, reached, ["traced"])
    assert reach.tests_of(1, GROUPS[2]) == ["name", "quick", "else", "slow", "traced"]
    assert reach.tests_of(2, GROUPS[2]) == ["slow", "traced"]
    assert reach.tests_of(4, GROUPS[2]) == ["traced"]
    assert reach.tests_of(1, GROUPS[0]) == ["name"]


@pytest.mark.parametrize("package", [ROOT, "impl"])
def test_groups_have_each_file_once_and_draws_are_reproducible(package: str) -> None:
    of = [modules_of(group, package) for group in GROUPS]
    assert all(of)
    assert len({module for modules in of for module in modules}) == sum(map(len, of))
    for group in GROUPS:
        drawn = draw(group, package, 5, 1)
        assert drawn == draw(group, package, 5, 1) != draw(group, package, 5, 2)
        assert len(set(drawn)) == 5
        for mutant in drawn:
            assert find_mutant(package, mutant.fault_id.partition(":")[2]) == mutant
            assert {line[0] for line in diff(package, mutant)} > {" "}
            assert mutant.site.line <= len(file_of(package, mutant.module).read_text().splitlines())


@pytest.mark.deadline(120)
@pytest.mark.parametrize("package", [ROOT, "impl"])
def test_mutant_is_killed_by_test_that_reaches_it(package: str) -> None:
    test = "conformance/nn/utils/test_clip_grad_value.py::test_clamping_foreach[cpu-True]"
    module = "nn.utils.clip_grad"
    site = next(
        site
        for site in sites(parsed(package, module))
        if site.function == "clip_grad_value_" and site.operator == "return_early"
    )
    with Worker(package, clauses=clauses_of(GROUPS[2])) as worker:
        mutant = worker.judge(
            Task(f"{package}+mutant:{module}:{site.operator}:{site.number}", frozenset(), tests=(test,))
        )
        assert (mutant.how, mutant.nodeid, mutant.tests_run) == ("failed", test, 1)
        assert worker.judge(Task(package, frozenset(), tests=(test,))).how == ""


@pytest.mark.deadline(300)
def test_sample_is_drawn_judged_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only tests of `clip_grad_value_` are measured, so mutants of other functions count as unreached."""
    monkeypatch.setenv("PYTEST_ADDOPTS", "-k test_clip_grad_value")
    out = tmp_path / "mutation.json"
    words = ["--group", "clipping", "--sample", "4", "--seed", "15", "--jobs", "1", "--out", str(out)]
    assert main(["mutation", *words]) == 0
    table = read_table(out, "mutation")
    functions = {
        row.name: find_mutant(ROOT, row.name.removeprefix("mutant:")).site.function for row in table.rows
    }
    assert sorted(functions.values()) == ["_clip_grads_with_norm_", *["clip_grad_value_"] * 3]
    for row in table.rows:
        assert (row.outcome == UNREACHED) == (functions[row.name] != "clip_grad_value_"), row
    killed = [row for row in table.rows if row.outcome == KILLED]
    assert killed
    assert all(row.nodeid.startswith("conformance/nn/utils/test_clip_grad_value.py::") for row in killed)
    assert f"clipping: {Score.of([row.outcome for row in table.rows])}" in capsys.readouterr().out


def test_score_counts_reached_mutants_without_equivalents() -> None:
    score = Score.of([KILLED] * 3 + [SURVIVED, UNREACHED, UNREACHED, EQUIVALENT])
    assert (score.killed, score.counted, score.unreached, score.equivalent) == (3, 4, 2, 1)
    assert str(score) == "75.0% [30.1%, 95.4%], 3 of 4 (2 unreached, 1 equivalent)"
    assert not Score.of([KILLED] * 8 + [SURVIVED, EQUIVALENT, UNREACHED]).depends_on_notes
    assert Score.of([KILLED] * 8 + [EQUIVALENT, UNREACHED, UNREACHED]).depends_on_notes
    assert str(Score.of([UNREACHED])) == "nothing to count (1 unreached, 0 equivalent)"


def test_equivalence_note_is_found_by_changed_lines_until_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, other = draw(GROUPS[2], ROOT, 2, 1)
    gone = [f"{key_of(ROOT, site)[:-12]}{'0' * 12}", "nn.utils.no_module:f:drop_wait:0"]
    rows = "".join(f'"{key}" = "It does."\n' for key in (key_of(ROOT, site), *gone))
    (tmp_path / "equivalent.toml").write_text(f'["{ROOT}"]\n{rows}')
    monkeypatch.setattr("conformance.strength.mutation.groups.__file__", str(tmp_path / "groups.py"))
    assert (equivalence_note(ROOT, site), equivalence_note(ROOT, other)) == ("It does.", "")
    assert stale_notes(ROOT) == gone
    assert stale_notes("impl") == []


@pytest.mark.parametrize(("package", "is_available"), [(ROOT, False), (ROOT, True), ("impl", False)])
def test_waits_of_device_are_dropped_unless_empty(
    monkeypatch: pytest.MonkeyPatch, package: str, is_available: bool
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: is_available)
    operators = {mutant.site.operator for group in GROUPS for mutant in draw(group, package, 10_000, 1)}
    assert operators == OPERATORS.keys() - (
        {"drop_device_wait"} if package == ROOT and not is_available else ()
    )


@pytest.mark.deadline(120)
@pytest.mark.usefixtures("line_flags")
def test_compiled_forward_records_lines_without_graph_break() -> None:
    def noting(x: torch.Tensor) -> torch.Tensor:
        lines.note(2)
        return x + 1

    run = torch.compile(noting, backend="eager", fullgraph=True)
    assert run(torch.zeros(1)).item() == 1
    assert lines.take_executed() == [2]


@pytest.mark.parametrize("package", [ROOT, "impl"])
def test_every_proof_matches_installed_source(package: str) -> None:
    if package == ROOT and not torch.__version__.startswith("2.13"):
        unavailable("the proofs are of torch 2.13")
    assert stale_notes(package) == []
