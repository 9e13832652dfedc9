"""Tests of recorded results: reading, merging, and how a file of results finds its commit and machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import asv_format, catalogue, history, machine, point, source
from benchmarks.point import Unfit
from benchmarks.tests.sample_results import MACHINE, git, load_command, results

pytestmark = pytest.mark.deadline(60)
ROOT = Path(__file__).parents[2]
GPU = {"machine": "a-gpu", "os": "Linux", "arch": "x86_64", "cpu": "C", "num_cpu": "16", "ram": "128 GiB"}
GPU |= {"gpu": "H200", "driver": "580"}


def test_added_point_reads_back_equal(tmp_path: Path) -> None:
    files = history.add(results({"few": 0.5}), MACHINE, "a" * 40, 1_000, tmp_path)
    assert [file.relative_to(tmp_path).as_posix() for file in files] == [
        "m/aaaaaaaa-existing-py3.11-torch2.13.0.json",
        "m/machine.json",
    ]
    (point,) = history.points(tmp_path)
    assert (point.machine, point.commit, point.date_ms) == ("m", "a" * 40, 1_000)
    assert point.ratios == {"RatioClip[few]": history.RatioPoint(0.5, 0.1, 0.5, of_impl=3.0, of_torch=6.0)}


def test_memory_is_read_as_a_ratio(tmp_path: Path) -> None:
    described = {
        "b.Peak.track_bytes": {"params": [["'impl'", "'torch'", "'DDP'"], ["2", "4"]], "version": "1"}
    }
    cells = {("'impl'", "2"): 60, ("'torch'", "2"): 80, ("'DDP'", "2"): 160, ("'impl'", "4"): 1}
    values: asv_format.Measured = {
        "b.Peak.track_bytes": {case: {"result": value} for case, value in cells.items()}
    }
    content = asv_format.results(described, values, MACHINE, {"python": "3", "torch": "2"}, 7)
    history.add(content, MACHINE, "a" * 40, 1_000, tmp_path)
    (point,) = history.points(tmp_path)
    assert point.ratios == {"Peak[2]": history.RatioPoint(0.75, 0.0, None, 60, 80, "bytes")}


def test_later_run_keeps_cases_that_it_did_not_measure(tmp_path: Path) -> None:
    for ratios in ({"few": 0.5, "many": 0.6}, {"many": 0.7}):
        history.add(results(ratios), MACHINE, "a" * 40, 1_000, tmp_path)
    (point,) = history.points(tmp_path)
    assert {name: ratio.value for name, ratio in point.ratios.items()} == {
        "RatioClip[few]": 0.5,
        "RatioClip[many]": 0.7,
    }


def test_later_timing_keeps_the_statistics_of_other_cases(tmp_path: Path) -> None:
    described = {"b.Step.time_call": {"params": [["'few'", "'many'"]], "version": "1"}}
    for size, stats in (("few", {"result": 1.0, "q_25": 0.9}), ("many", {"result": 2.0, "q_25": 1.9})):
        values: asv_format.Measured = {"b.Step.time_call": {(repr(size),): stats}}
        row_of_size = asv_format.results(described, values, MACHINE, {"python": "3", "torch": "2"}, 7)
        file, _ = history.add(row_of_size, MACHINE, "a" * 40, 1_000, tmp_path)
    content = json.loads(file.read_text())
    row = dict(zip(content["result_columns"], content["results"]["b.Step.time_call"], strict=False))
    assert (row["result"], row["stats_q_25"]) == ([1.0, 2.0], [0.9, 1.9])


def test_points_are_selected_by_machine_and_torch_newest_first(tmp_path: Path) -> None:
    for position, ratio in enumerate((0.1, 0.2, 0.3, 0.4)):
        history.add(results({"few": ratio}), MACHINE, str(position) * 40, position, tmp_path)
    history.add(results({"few": 9.0}), {"machine": "other"}, "b" * 40, 9, tmp_path)
    points = history.of_machine("m", "2.13.0", tmp_path)
    assert history.ratios_by_case(points, 3) == {"RatioClip[few]": [0.4, 0.3, 0.2]}
    assert history.of_machine("m", "2.12.0", tmp_path) == []


# The commit and the machine of a file of results


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Repository with files that results depend on, at its first commit on branch main."""
    root = tmp_path / "repository"
    for name in ("impl/a.py", "benchmarks/b.py", "conformance/c.toml", "ci/gpu", "pyproject.toml"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    git(root, "init", "-q", "-b", "main")
    commit(root, "first")
    return root


def commit(root: Path, message: str) -> str:
    git(root, "add", "-A")
    git(root, "commit", "-q", "--allow-empty", "-m", message)
    return git(root, "rev-parse", "HEAD")


def test_file_ids_equal_git_ids(repository: Path) -> None:
    (repository / "impl/__pycache__").mkdir()
    for name in ("impl/__pycache__/a.pyc", "impl/_library.cpython-311.so"):
        (repository / name).write_text("generated")
    assert source.files(repository) == source.files_of("HEAD", repository)
    assert len(source.files(repository)) == 5


def test_commit_is_found_by_its_files(repository: Path) -> None:
    first = source.commit_here(repository)
    ran = source.files(repository)
    (repository / "README.md").write_text("which nothing depends on")
    commit(repository, "second")
    (repository / "impl/a.py").write_text("other")
    third = commit(repository, "third")
    assert source.commit_of(ran, None, repository) == first
    assert source.commit_of(source.files(repository), None, repository) == third
    assert source.commit_of(source.files(repository), third, repository) == third
    assert source.commit_of(source.files(repository), first, repository) == third


@pytest.fixture
def file(tmp_path: Path, repository: Path) -> Path:
    """File of results of the repository's commit, in a separate folder."""
    name = "bench_grad_scaler.RatioUpdate"
    values: asv_format.Measured = {
        f"{name}.track_ratio_vs_torch": {("'cpu'",): {"result": 0.5}},
        f"{name}.track_noise": {("'cpu'",): {"result": 0.01}},
    }
    described = asv_format.describe_benchmarks(catalogue.load_all())
    content = asv_format.results(described, values, GPU, {"python": "3.12", "torch": "2.11.0+cu130"}, 7)
    (tmp_path / "report").mkdir()
    file = tmp_path / "report" / point.FILE
    file.write_text(json.dumps(point.content_of(content, GPU, source.here(repository))))
    return file


def change(file: Path, part: str, **about: Any) -> None:
    content = json.loads(file.read_text())
    content[part] |= about
    file.write_text(json.dumps(content))


def test_adding_twice_gives_the_same_files(file: Path, repository: Path) -> None:
    written = point.add(file.parent, root=repository)
    head = source.commit_here(repository)
    assert head is not None
    folder = repository / "benchmarks/results"
    assert [file.relative_to(folder).as_posix() for file in written] == [
        f"a-gpu/{head[:8]}-existing-py3.12-torch2.11.0+cu130.json",
        "a-gpu/machine.json",
    ]
    before = {file: file.read_bytes() for file in written}
    assert point.add(file, root=repository) == written
    assert {file: file.read_bytes() for file in written} == before
    content = json.loads(written[0].read_text())
    assert content["commit_hash"] == head
    assert content["date"] == int(git(repository, "show", "-s", "--format=%at", "HEAD")) * 1000


def test_adding_keeps_benchmarks_of_an_earlier_run(file: Path, repository: Path) -> None:
    written = point.add(file, root=repository)[0]
    earlier = json.loads(written.read_text())["results"].keys()
    other = {"bench_x.X.track_x": [[1.0], []]}
    change(file, "results", results=other)
    point.add(file, root=repository)
    assert json.loads(written.read_text())["results"].keys() == earlier | other.keys()


def test_name_argument_replaces_the_machine_name(file: Path, repository: Path) -> None:
    point.add(file, "lab-h200", repository)
    (added,) = history.points(repository / "benchmarks/results")
    assert (added.machine, added.traits["machine"]) == ("lab-h200", "lab-h200")


def test_results_without_machine_name_are_accepted_only_from_this_host(
    file: Path, repository: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    change(file, "machine", machine="")
    with monkeypatch.context() as there:
        there.setattr("platform.node", lambda: "another-host")
        with pytest.raises(
            Unfit, match="was measured on another machine, which has no name; pass --machine NAME"
        ):
            point.add(file, root=repository)
    assert machine.own_name() == ""
    point.add(file, root=repository)
    (added,) = history.points(repository / "benchmarks/results")
    assert added.machine == machine.own_name() != ""


@pytest.mark.parametrize("claims", [True, False], ids=["commit known", "commit unknown"])
def test_dirty_tree_is_refused(file: Path, repository: Path, claims: bool) -> None:
    ran = source.files(repository) | {"impl/a.py": "0" * 40}
    change(file, "source", files=ran, **({} if claims else {"commit": None}))
    with pytest.raises(Unfit, match=r"no commit of this repository.*impl/a\.py.*measure again"):
        point.add(file, root=repository)
    assert not (repository / "benchmarks/results").exists()


def test_unknown_commit_is_refused(file: Path, repository: Path) -> None:
    change(file, "source", commit="1" * 40)
    with pytest.raises(Unfit, match=r"does not have; fetch it first"):
        point.add(file, root=repository)


def test_invalid_file_of_results_is_refused(
    file: Path, repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    change(file, "machine", machine="../../up")
    with pytest.raises(Unfit, match=r"names its machine '\.\./\.\./up'; expected letters"):
        point.add(file, root=repository)
    file.write_text("{}")
    with pytest.raises(Unfit, match="is not a file of results: it lacks host, machine, results, source"):
        point.add(file, root=repository)
    file.write_text("{")
    with pytest.raises(Unfit, match="is incomplete"):
        point.add(file, root=repository)
    file.unlink()
    with pytest.raises(Unfit, match=r"no timings at .*point\.json"):
        point.add(file.parent, root=repository)
    monkeypatch.syspath_prepend(str(ROOT / "ci"))
    assert load_command("bench").add_measured(file.parent, None) == 2
    assert "no timings at" in capsys.readouterr().err


@pytest.mark.deadline(300)
def test_asv_publishes_added_results(file: Path, repository: Path, tmp_path: Path) -> None:
    pytest.importorskip("asv", reason="the extra `benchmarks` of pyproject.toml brings asv")
    point.add(file, root=repository)
    catalogue.describe_in(repository / "benchmarks/results/benchmarks.json")
    settings = json.loads((ROOT / "asv.conf.json").read_text()) | {"html_dir": str(tmp_path / "html")}
    (repository / "asv.conf.json").write_text(json.dumps(settings))
    done = subprocess.run(
        [sys.executable, "-m", "asv", "publish", "--no-pull"],
        cwd=repository, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    drawn = json.loads((tmp_path / "html/index.json").read_text())
    assert drawn["params"]["gpu"] == ["H200"]
    assert drawn["params"]["torch"] == ["2.11.0+cu130"]
    assert drawn["machines"].keys() == {"a-gpu"}
    points = list((tmp_path / "html/graphs").rglob("bench_grad_scaler.RatioUpdate.track_ratio_vs_torch.json"))
    assert [json.loads(file.read_text())[0][1] for file in points if "summary" not in str(file)] == [
        [0.5, None]
    ]
