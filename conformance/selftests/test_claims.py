"""The claims file: names that lead elsewhere, a device, and everything that can be wrong with it."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from conformance.judge.clauses import all_clauses
from conformance.judge.files import claims, claims_file
from conformance.judge.files.claims import wrong_in_claims
from conformance.judge.library import Library, NotProvided
from conformance.judge.results import BAD_INPUT
from conformance.judge.sandbox import trial
from conformance.selftests.misbehaving import write_subject, written
from conformance.selftests.test_misbehaving_subjects import CPU_ALONE, OTHERS, SCALER, judged, not_run, of

Subject = Callable[[str], Library]


@pytest.fixture
def subject_that_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Subject]:
    """Return a function that makes a library of the package `json` with a claims file of this text."""

    def make(text: str) -> Library:
        file = tmp_path / "claims.toml"
        file.write_text(text)
        monkeypatch.setenv("TANDEM_CLAIMS", "")
        claims_file.set_claims_file("json", file)
        claims_file.claims_file.cache_clear()
        return Library("json")

    yield make
    claims_file.claims_file.cache_clear()


def test_extension_that_became_core_may_stay_claimed(
    subject_that_says: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    extension = replace(all_clauses()["distributed.fsdp.fully_shard.kept_storage"], level="core")
    monkeypatch.setattr(claims, "all_clauses", lambda: {extension.id: extension})
    library = subject_that_says(f'extensions = ["{extension.id}"]')
    assert list(wrong_in_claims(library)) == []


def test_names_resolve_as_claims_file_says(subject_that_says: Subject) -> None:
    library = subject_that_says("""
        claims = ["distributed.fsdp.FullyShardedDataParallel"]
        [names]
        "amp.GradScaler" = "torch.cuda.amp.GradScaler"
        "distributed.fsdp.wrap" = "torch.distributed.fsdp.wrap"
        "distributed.fsdp.ShardingStrategy" = "torch.distributed.fsdp.ShardingStrategy"
        nn.utils.clip_grad_norm_ = "torch.nn.utils.clip_grad_value_"
    """)
    assert list(wrong_in_claims(library)) == []
    assert library.amp.GradScaler is torch.cuda.amp.GradScaler
    assert library.find("amp.GradScaler.step") is torch.cuda.amp.GradScaler.step
    assert library.distributed.fsdp.wrap.ModuleWrapPolicy is torch.distributed.fsdp.wrap.ModuleWrapPolicy
    assert library.nn.utils.clip_grad_norm_ is torch.nn.utils.clip_grad_value_
    with pytest.raises(NotProvided, match=r"^json does not provide nn\.utils\.clip_grad_value_$"):
        library.find("nn.utils.clip_grad_value_")


REASON, DATE = "reason = 'it is'", "expires = 2027-01-31"
MISTAKES_IN_EXPECTATION = {
    f"{REASON}\n{DATE}": "number 1 has neither clause nor test; expected one of the two",
    f"clause = 'x'\ntest = 'y'\n{REASON}\n{DATE}": "number 1 has both clause and test; expected one of the two",
    f"test = [1]\n{REASON}\n{DATE}": "number 1 has test = [1]; expected a string or a list of strings",
    f"test = ['{CPU_ALONE}', '{CPU_ALONE}_not']\n{REASON}\n{DATE}": (
        f"names the test '{CPU_ALONE}_not', which does not exist; expected a test as reports"
    ),
    f"clause = 'x'\n{DATE}": "number 1 has no 'reason'; expected a string",
    f"clause = 'x'\n{REASON}": "number 1 has no 'expires'; expected a date without quotes",
    f"clause = 'x'\n{REASON}\nexpires = '2027-01-31'": (
        "number 1 has expires = '2027-01-31'; expected a date without quotes"
    ),
    f"clause = 'amp.grad_scaler.scale.multiply'\n{REASON}\n{DATE}": (
        "names the clause 'amp.grad_scaler.scale.multiply', which does not exist; did you mean"
    ),
    f"test = 'test_x.py::test_x'\n{REASON}\n{DATE}\ndue = 1": (
        "number 1 has the unknown key 'due'; expected one of clause, test, reason, link, expires"
    ),
}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("claims = 'amp.GradScaler'", "has claims = 'amp.GradScaler'; expected a list of strings"),
        ("extensions = ['x', 3]", "has extensions = ['x', 3]; expected a list of strings"),
        (
            "claims = ['amp.GradScalr']",
            "claims has 'amp.GradScalr', which torch does not have; did you mean 'amp.G",
        ),
        (
            "extensions = ['amp.grad_scaller.fused_step.*']",
            "extensions has 'amp.grad_scaller.fused_step.*', which is not a clause of an extension; did you mean",
        ),
        ("claim = []", "has the unknown key 'claim'; expected one of claims, extensions,"),
        ("distribution = 1", "has distribution = 1; expected a string"),
        ("names = 'their.scaler'", "has names = 'their.scaler'; expected a table of strings"),
        ("[names]\n'amp.GradScaler' = 1", "has names = {'amp.GradScaler': 1}; expected a table of strings"),
        (
            "[names]\n'amp.GradScalar' = 'torch.amp.GradScaler'",
            "[names] has 'amp.GradScalar', which torch does not have; did you mean 'amp.GradScaler'?",
        ),
        (
            "[names]\n'amp.GradScaler' = 'torch.amp.LossScaler'",
            "[names] says that amp.GradScaler is torch.amp.LossScaler, which does not exist; expected module.name",
        ),
        (
            "[names]\n'amp.GradScaler' = 'not_installed.amp.LossScaler'",
            "[names] says that amp.GradScaler is not_installed.amp.LossScaler, which does not exist",
        ),
        (
            "[names]\n'amp.GradScaler' = 'fails_on_import.GradScaler'",
            "but fails_on_import cannot be imported (RuntimeError: not on this machine); fix what raises",
        ),
        ("device = 'npu'", "has device = 'npu'; expected a table, [device]"),
        ("[device]\nimport = 'json'", "[device] has no 'type'; expected a string"),
        (
            "[device]\ntype = 'cpu'\nimport = 'brings_no_device'",
            "[device] cpu cannot be used (json does not provide brings_no_device)",
        ),
        (
            "[device]\ntype = 'cpu'\nimport = 'fails_on_import'",
            "[device] cpu cannot be used (fails_on_import cannot be imported (RuntimeError: not on this machine))",
        ),
        ("[device]\ntype = 'gpu'", "[device] gpu cannot be used (Expected one of cpu, cuda,"),
        ("expectations = 1", "has expectations = 1; expected tables, [[expectations]]"),
        *(
            (f"[[expectations]]\n{keys}", f"[[expectations]] {says}")
            for keys, says in MISTAKES_IN_EXPECTATION.items()
        ),
    ],
)
def test_each_mistake_in_claims_file_is_reported(
    subject_that_says: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, says: str
) -> None:
    monkeypatch.syspath_prepend(written(tmp_path / "subjects"))
    sentences = list(wrong_in_claims(subject_that_says(text)))
    assert any(says in sentence for sentence in sentences), sentences
    assert all("claims.toml" in sentence and "\n" not in sentence for sentence in sentences), sentences


@pytest.mark.parametrize("text", ["claims = [", "\x00"])
def test_invalid_toml_raises(subject_that_says: Subject, text: str) -> None:
    with pytest.raises(claims_file.UnreadableClaims, match=r"claims\.toml cannot be read \(.*expected TOML"):
        subject_that_says(text)


def test_missing_file_raises(tmp_path: Path) -> None:
    with pytest.raises(claims_file.UnreadableClaims, match=r"cannot be read \(FileNotFoundError"):
        claims_file.read(tmp_path / "claims.toml")


WRONG = """
claims = ["nn.utils.clip_grad_value_", "nn.utils.clip_grad"]

[names]
"amp.GradScaler" = "torch.amp.LossScaler"

[device]
type = "cpu"
import = "fails_on_import"
"""


def test_mistakes_in_file_do_not_stop_other_judging(tmp_path: Path) -> None:
    write_subject(tmp_path, "says_wrong", WRONG)
    report = judged("says_wrong", tmp_path, CPU_ALONE, SCALER)
    assert {entry["outcome"] for entry in of(report, CPU_ALONE)} == {"passed"}
    assert not of(report, SCALER)
    assert "not provided" in not_run(report, SCALER)
    assert (report["exit code"], report["verdict"], len(report["bad_input"])) == (BAD_INPUT, "red", 3)
    log = (tmp_path / "log").read_text()
    assert all(f"BAD INPUT {sentence}" in log for sentence in report["bad_input"])
    assert "did you mean 'nn.utils.clip_grad_norm'" in log


def test_device_error_without_text_is_reported(
    subject_that_says: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = subject_that_says("[device]\ntype = 'cpu'")
    monkeypatch.setattr(library, "bring_device", Mock(side_effect=AssertionError))
    [sentence] = wrong_in_claims(library)
    assert "[device] cpu cannot be used (AssertionError)" in sentence


def test_explicit_file_takes_precedence(tmp_path: Path) -> None:
    claims_file = tmp_path / "given.toml"
    claims_file.write_text('[names]\n"nn.utils" = "torch.nn.utils"\n')
    report = judged("lacks_what_it_claims", tmp_path, CPU_ALONE, SCALER, f"--claims={claims_file}")
    assert {entry["outcome"] for entry in of(report, CPU_ALONE)} == {"passed"}
    assert "not provided" in not_run(report, SCALER)  # the other file claims them
    assert not of(report, SCALER)
    assert (report["verdict"], report["exit code"], report["claims_file"]) == ("green", 0, str(claims_file))


def test_devices_of_file_are_judged(tmp_path: Path) -> None:
    (tmp_path / "brings_meta.py").write_text(
        "from pathlib import Path\nPath(__file__).with_name('brought').touch()\n"
    )
    write_subject(tmp_path, "on_meta", '[device]\ntype = "meta"\nimport = "brings_meta"\n')
    report = judged("on_meta", tmp_path, OTHERS)
    assert {entry["device"] for entry in report["tests"]} == {"meta"}
    assert (tmp_path / "brought").exists()
    assert report["bad_input"] == []
    there = judged("on_meta", tmp_path, OTHERS, "--device=cpu")
    assert {entry["device"] for entry in there["tests"]} == {"cpu"}


def test_device_of_claims_file_may_be_requested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_subject(tmp_path, "on_theirs", '[device]\ntype = "theirs"\nimport = "brings_theirs"\n', "")
    (tmp_path / "brings_theirs.py").write_text(
        'import torch\ntorch.utils.rename_privateuse1_backend("theirs")\n'
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    reported = trial.import_in_subprocess("on_theirs", "cpu,theirs,gpu").bad_input
    [slip] = [sentence for sentence in reported if sentence.startswith("--device")]
    assert "'gpu', which torch does not know; expected cpu, cuda or another device type" in slip
