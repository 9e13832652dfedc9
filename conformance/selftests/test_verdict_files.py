"""Files with a verdict: the schema of the report, counts for relays, and compared reports."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from conformance import __main__ as judge
from conformance.cli import judging
from conformance.cli.judging import chosen_tests
from conformance.cli.options import of_gate
from conformance.judge.clauses import AREAS
from conformance.judge.heading import SCHEMA, heading, judge_command, replay_command
from conformance.report import __main__ as drawing
from conformance.report import conclude
from conformance.report.matrix import SEVERITY
from conformance.report.side_by_side import side_by_side, write_side_by_side
from conformance.report.verdict_files import relay
from conformance.selftests.sample_reports import CLAUSE, HOSTILE, Page, a_report, judged

FOLDER = Path(__file__).parents[1] / "report"
OTHER = CLAUSE | {"id": "amp.grad_scaler.y", "says": "It does too."}


def schema() -> dict[str, Any]:
    return json.loads((FOLDER / "report.schema.json").read_text())


def concluded(report: dict[str, Any], folder: Path) -> dict[str, Any]:
    code = conclude(report, folder, lambda report: None)
    return json.loads((folder / "report.json").read_text()) | {"exit code": code}


def test_report_matches_schema_without_extra_keys(tmp_path: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="the extra `report` of pyproject.toml brings it")
    options = of_gate("").parse_args(["--seed=3"])
    parts = heading(options, 0.0) | {"verdict": "green", "bad_input": [], "ended_early": []}
    parts |= {
        "tests": [judged("passed"), judged("failed", replay="r", reason="so")],
        "not_run": [{"clause": "amp.x", "outcome": "not provided", "reason": "it lacks amp"}],
        "provides_nothing": False,
    }
    parts |= {"devices": ["cpu"], "expectations": []}
    report = concluded(parts, tmp_path)
    del report["exit code"]
    validator = jsonschema.Draft202012Validator(schema())
    validator.check_schema(schema())
    assert [error.message for error in validator.iter_errors(report)] == []
    assert report.keys() <= schema()["properties"].keys()
    row = schema()["properties"]["clauses"]["items"]["properties"]
    assert all(clause.keys() <= row.keys() for clause in report["clauses"])
    for key in schema()["required"]:
        lacking = {name: value for name, value in report.items() if name != key}
        assert list(validator.iter_errors(lacking)), key
    assert list(validator.iter_errors(report | {"tests": [judged("else")]}))


def test_schema_describes_each_key_and_outcome() -> None:
    def undescribed(name: str, part: dict[str, Any]) -> list[str]:
        inner = part.get("items", part).get("properties", {})
        without_description = [name] if "description" not in part else []
        return without_description + [
            path for key, value in inner.items() for path in undescribed(f"{name}.{key}", value)
        ]

    assert undescribed("report", schema()) == []
    assert schema()["properties"]["schema"]["const"] == SCHEMA
    test = schema()["properties"]["tests"]["items"]
    assert set(test["properties"]["outcome"]["enum"]) == set(SEVERITY) - {"not run", "not claimed"}
    assert set(test["required"]) == set(test["properties"]) == set(judged("passed"))


@pytest.mark.parametrize(
    ("outcome", "bad_input", "expected"),
    [
        ("passed", [], ("green", 0)),
        ("failed", [], ("red", 1)),
        ("passed", ["mend it"], ("red", 2)),
        ("failed", ["mend it"], ("red", 2)),
    ],
)
def test_invalid_input_is_distinguished_from_red(
    outcome: str, bad_input: list[str], expected: tuple[str, int], tmp_path: Path
) -> None:
    concluded_report = concluded(a_report(judged(outcome), bad_input=bad_input), tmp_path)
    assert (concluded_report["verdict"], concluded_report["exit code"]) == expected
    assert ("mend it" in (tmp_path / "index.html").read_text()) == bool(bad_input)


def test_relay_counts_every_test_and_clause_once() -> None:
    tests = [judged(outcome) for outcome in SEVERITY if outcome != "not run"]
    not_run = [{"clause": "nn.x", "outcome": "not run", "reason": "not selected"}]
    assert relay(a_report(*tests, not_run=not_run)) == {"passed": 3, "failed": 5, "skipped": len(tests) - 7}


def test_red_run_without_failed_test_counts_one_failure(tmp_path: Path) -> None:
    concluded(a_report(judged("passed"), ended_early=["stopped"]), tmp_path)
    counts = json.loads((tmp_path / "relay.json").read_text())
    assert (counts["passed"], counts["failed"], counts["skipped"]) == (1, 1, 0)


def test_compared_reports_show_differences_with_replay(tmp_path: Path) -> None:
    own_report = a_report(judged("passed"), judged("passed", nodeid="same", clause=OTHER["id"]))
    other_report = a_report(
        judged("failed", reason=f"because {HOSTILE}", replay="replay it"),
        judged("passed", nodeid="more"),
        judged("passed", nodeid="same", clause=OTHER["id"]),
        subject=HOSTILE,
        subject_version="1.0",
    )
    third = a_report(replay="tandem-judge third WHAT --profile quick", subject="third")
    for report in (own_report, other_report, third):
        report["clauses"] = [CLAUSE, OTHER] if report is not third else [CLAUSE]
    [area] = side_by_side([own_report, other_report])
    assert [row.clause["id"] for row in area.different] == [CLAUSE["id"]]
    assert [row.clause["id"] for row in area.alike] == [OTHER["id"]]
    assert (area.held_clauses(0), area.held_clauses(1)) == ("2 / 2", "1 / 2")

    write_side_by_side([own_report, other_report, third], tmp_path / "page.html")
    page = Page(tmp_path / "page.html")
    assert page.text.count("alert(1)") > 3
    assert len([tag for tag, _ in page.elements if tag == "script"]) == 1
    for reported in ("replay it", f"tandem-judge impl {CLAUSE['id']} --profile quick", "1/2"):
        assert reported in page.text
    assert f"tandem-judge third {OTHER['id']} --profile quick" in page.text
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    links = [attributes["href"] for tag, attributes in page.elements if tag == "a"]
    assert len(ids) == len(set(ids))
    assert {link.removeprefix("#") for link in links} <= set(ids)
    cells = [link for link in links if link.startswith(f"#{CLAUSE['id']}/")]
    assert len(cells) == 3
    assert not {"iframe", "img", "object", "embed", "base"} & {tag for tag, _ in page.elements}


def test_reports_are_compared_by_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(tmp_path / name) for name in ("a.json", "b.json")]
    for file, outcome in zip(files, ("passed", "failed"), strict=True):
        Path(file).write_text(json.dumps(a_report(judged(outcome, replay="r"))))
    out = tmp_path / "page.html"
    assert drawing.main(["--compare", *files, "--out", str(out)]) == 0
    assert "1 of 1 clauses differ" in re.sub(r"<[^>]*>", "", out.read_text())
    for words, reported in (
        (["--merge", "--compare", *files], "not allowed with"),
        (["--merge", *files, "--out", __file__], "is a file"),
        (files, "got 2 reports; expected one, or --compare"),
        (["--compare", *files, "--baseline", files[0]], "--baseline is for the page of one report"),
        (["--compare", files[0], str(out)], "is not JSON"),
    ):
        with pytest.raises(SystemExit) as ended:
            drawing.main(words)
        assert ended.value.code == 2
        assert reported in capsys.readouterr().err


def test_replay_runs_same_test() -> None:
    words = ["--subject=their.own", "--seed=3", "--device=cpu", "--world-sizes=1,4", "--profile=full"]
    options = of_gate("").parse_args(words)
    reported = "--profile full --seed 3 --device cpu --world-sizes 1,4"
    assert judge_command(options, "a[b c]") == f"tandem-judge their.own 'a[b c]' {reported}"
    assert replay_command(options, "x").endswith(reported)


SLIPS = {
    ("their/scaling",): "is not the name of a package, such as impl, torch or your.package",
    ("their", "nn.utils.clip"): "'nn.utils.clip' is neither a clause nor an area such as amp",
    ("their", "amp.GradScaler"): "; did you mean 'amp.grad_scaler'? python -m",
    (
        "their",
        "conformance/nn/test_none.py::test_x",
    ): "there is no test 'conformance/nn/test_none.py::test_x'",
    (
        "their",
        "amp",
        "conformance/test_surface.py::test_x",
    ): "and clauses (amp); name either tests or clauses",
    ("their", "--world-sizes=0"): "is not a list of positive numbers",
    ("their", "--device=cuda:0"): "is neither auto nor a list of device types such as cpu,cuda",
    ("their", "-n", "0"): "'0' is neither auto nor a positive number",
    ("their", f"--out={__file__}"): "is a file; expected a folder",
}


@pytest.mark.parametrize("words", list(SLIPS), ids=" ".join)
def test_mistake_in_command_is_explained_before_run(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        judge._options(words)
    assert ended.value.code == 2
    assert SLIPS[words] in " ".join(capsys.readouterr().err.split())


UNASKED = {
    "no tests ran in 0.10s": (
        pytest.ExitCode.NO_TESTS_COLLECTED,
        "the profile quick has no test of amp; --profile full has more tests",
        "the profile quick has no test of amp with --marks cuda; leave out --marks",
    ),
    "ImportError while loading conftest 'x.py'.": (
        pytest.ExitCode.USAGE_ERROR,
        *["ImportError while loading conftest 'x.py'."] * 2,
    ),
}


@pytest.mark.parametrize("reported", list(UNASKED))
def test_unknown_selection_is_mistake(reported: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, *sentences = UNASKED[reported]

    def run(command: object, log: Path, *_: object) -> tuple[str, int]:
        log.write_text(reported)
        return "", code

    monkeypatch.setattr(judging, "run", run)
    for words, sentence in zip(([], ["--marks=cuda"]), sentences, strict=True):
        assert judge.main(["torch", "amp", f"--out={tmp_path}", *words]) == 2
        assert json.loads((tmp_path / "report.json").read_text())["bad_input"] == [sentence]


@pytest.mark.deadline(120)
def test_error_of_pytest_for_unknown_test_is_reported(tmp_path: Path) -> None:
    """pytest does not report it with workers."""
    test = "conformance/test_surface.py::test_nobody"
    assert judge.main(["torch", test, "-n=1", f"--out={tmp_path}"]) == 2
    [bad_input] = json.loads((tmp_path / "report.json").read_text())["bad_input"]
    assert re.fullmatch(rf"ERROR: not found: .*{test}\n\(no match in any of .*\)", bad_input)


def test_area_is_run_from_its_folder() -> None:
    folders, clauses = chosen_tests(["nn.utils.clip_grad", "amp.grad_scaler"])
    assert [Path(folder).name for folder in folders] == ["amp", "utils"]
    assert clauses == ["nn.utils.clip_grad", "amp.grad_scaler"]
    everything, clauses = chosen_tests([])
    assert {Path(folder).name for folder in everything} == {*AREAS, "test_surface.py"}
    assert clauses == []
    [test], clauses = chosen_tests(["conformance/test_surface.py::test_x[a b]"])
    assert (Path(test).name, clauses) == ("test_surface.py::test_x[a b]", [])


def test_final_error_of_run_is_reported_completely() -> None:
    reported = "the subject 'x' cannot be loaded (SystemExit: 3); mend it\nIt wrote: " + "much " * 1000
    assert judging.reported_at_exit(f"a warning\nExit: {reported}\n") == reported.strip()
    assert judging.reported_at_exit("Exit: it") == "it"
