"""Training is reproducible. Its judge passes correct libraries and fails wrong ones."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.judge.library import load_library
from conformance.training.compare import Bound, compare
from conformance.training.config import TrainingConfig, small_config
from conformance.training.corpus import load_corpus, windows
from conformance.training.gpt import Shape
from conformance.training.judge import as_json, judge, parts_of
from conformance.training.trainer import Parts, TrainingRun, train

CONFIG = small_config(
    "fp16",
    shape=Shape(layers=1, heads=2, width=16, context=16),
    steps=20,
    growth_interval=5,
    inject_inf_at=12,
    evaluate_every=8,
    held_out_windows=4,
)
TORCH = parts_of(load_library("torch"))


def run(parts: Parts = TORCH, config: TrainingConfig = CONFIG) -> TrainingRun:
    return train(parts, config, load_corpus())


@pytest.fixture(scope="module")
def reference() -> TrainingRun:
    return run()


@pytest.fixture(scope="module")
def bound(reference: TrainingRun) -> Bound:
    return Bound.between(reference, *(run(config=neighbour) for neighbour in CONFIG.neighbours()))


def test_same_config_repeats_bits_and_keeps_global_state(reference: TrainingRun) -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    threads = torch.get_num_threads()
    again = run()
    # The norm of a skipped step may be nan, which differs from itself, unlike its repr.
    assert repr(again) == repr(reference)
    assert torch.equal(torch.rand(3), expected)
    assert torch.get_num_threads() == threads
    assert run(config=dataclasses.replace(CONFIG, seed=2)).weights != reference.weights


def test_config_overflows_and_recovers_from_injected_inf(reference: TrainingRun) -> None:
    at = CONFIG.inject_inf_at
    assert at is not None
    assert 0 in reference.skipped
    assert at in reference.skipped
    assert any(0 < step < at and step - 1 not in reference.skipped for step in reference.skipped), (
        "no mid-run overflow"
    )
    assert reference.scales[at] == reference.scales[at - 1] * CONFIG.backoff_factor
    assert at + 1 not in reference.skipped
    assert all(map(math.isfinite, reference.losses))
    assert math.isfinite(reference.grad_norms[at + 1])


class NeverSkips(torch.amp.GradScaler):
    def step(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()


class NeverBacksOff(torch.amp.GradScaler):
    def update(self, new_scale: Any = None) -> None:
        before = self.get_scale()
        super().update(new_scale)
        super().update(max(before, self.get_scale()))


def no_autocast(*args: Any, **kwargs: Any) -> Any:
    return torch.amp.autocast(*args, **kwargs | {"enabled": False})


def no_clipping(parameters: list[torch.Tensor], max_norm: float, **_: Any) -> torch.Tensor:
    return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])


def clipping_in_double(parameters: list[torch.Tensor], max_norm: float, **_: Any) -> torch.Tensor:
    grads = [p.grad for p in parameters if p.grad is not None]
    norm = torch.cat([grad.flatten().double() for grad in grads]).norm()
    for grad in grads:
        grad.mul_(torch.clamp(max_norm / (norm + 1e-6), max=1.0).float())
    return norm.float()


WRONG = {
    "clips nothing": ({"clip_grad_norm_": no_clipping}, {"bits", "bound on losses", "bound on grad_norms"}),
    "never skips": ({"GradScaler": NeverSkips}, {"scale", "start", "recovery of the subject"}),
    "never backs off": ({"GradScaler": NeverBacksOff}, {"scale", "recovery of the subject"}),
    "casts nothing": ({"autocast": no_autocast}, {"scale", "start"}),
}


def red(bound: Bound | None, reference: TrainingRun, subject: TrainingRun) -> set[str]:
    return {check.name for check in compare(CONFIG, reference, subject, bound) if not check.passed}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_library_fails_the_expected_checks(name: str, reference: TrainingRun, bound: Bound) -> None:
    parts, expected = WRONG[name]
    subject = run(dataclasses.replace(TORCH, **parts))
    unlike_reference = {"bits", "bound on losses", "bound on grad_norms"}
    for held_to in (None, bound):
        checked = {check.name for check in compare(CONFIG, reference, subject, held_to)}
        failed = red(held_to, reference, subject) - {"learning of the reference", "learning of the subject"}
        assert expected & checked <= failed, f"{name}: red are {sorted(failed)}"
        assert failed <= expected | unlike_reference, f"{name}: red are {sorted(failed)}"


def test_another_rounding_is_within_the_bound_but_not_the_same_bits(
    reference: TrainingRun, bound: Bound
) -> None:
    subject = run(dataclasses.replace(TORCH, clip_grad_norm_=clipping_in_double))
    unlearned = {"learning of the reference", "learning of the subject"}
    assert red(None, reference, subject) - unlearned == {"bits"}
    assert red(bound, reference, subject) - unlearned == set()


def test_unskipped_inf_fails_recovery_check(reference: TrainingRun) -> None:
    at = CONFIG.inject_inf_at
    without = run(config=dataclasses.replace(CONFIG, inject_inf_at=None))
    assert at not in without.skipped
    assert {"scale", "recovery of the subject"} <= red(None, reference, without)


def test_missing_components_come_from_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    utils = tmp_path / "wrong_rider" / "nn" / "utils"
    utils.mkdir(parents=True)
    for folder in (utils, utils.parent, utils.parents[1]):
        (folder / "__init__.py").touch()
    (utils / "__init__.py").write_text(
        "def clip_grad_norm_(*args, **kwargs):\n    raise ZeroDivisionError('fell off')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    result = judge("wrong_rider", CONFIG)
    assert result.lacking == ["amp.autocast", "amp.GradScaler"]
    assert not result.passed
    assert [c.reasons for c in result.comparisons] == [["runs: ZeroDivisionError: fell off"]]
    written = json.loads(json.dumps(as_json([result]), allow_nan=False))
    assert written["runs"][0]["agrees"] is False
    assert len(written["runs"][0]["reference"]["losses"]) == CONFIG.steps
    assert written["corpus"]["fingerprint"] == load_corpus().fingerprint


def test_command_draws_and_explains_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("rich")
    from conformance.training.__main__ import main  # noqa: PLC0415 needs what the report needs

    words = ["--subject", "torch", "--device", "cpu", "--out", str(tmp_path), "--steps", "4"]
    assert main(words) == 1  # four steps teach nothing
    assert "more steps may do it" in " ".join(capsys.readouterr().out.split())
    assert (tmp_path / "fp16-adamw.svg").read_text().startswith("<?xml")
    assert (tmp_path / "fp16-adamw.png").stat().st_size > 0
    written = json.loads((tmp_path / "training.json").read_text())["runs"][0]
    assert len(written["subject"]["losses"]) == 4


def fake_library(root: Path, files: dict[str, bytes]) -> Path:
    for name, source in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(source)
    return root


def test_corpus_has_only_library_files_and_splits_by_file(tmp_path: Path) -> None:
    own = {f"package/module{i}.py": bytes([i]) * 50_000 for i in range(40)}
    strange = {
        f"{folder}/x.py": b"\xff" * 10 for folder in ("site-packages", "test", "a/tests", "config-3.13")
    }
    corpus = load_corpus(fake_library(tmp_path / "first", own | strange))
    assert corpus.files == 40
    train_bytes, held_out = set(corpus.train.tolist()), set(corpus.held_out.tolist())
    assert held_out
    assert not train_bytes & held_out
    assert train_bytes | held_out == set(range(40))
    other = load_corpus(fake_library(tmp_path / "second", own | {"package/module3.py": b"!" * 50_000}))
    assert other.fingerprint != corpus.fingerprint
    with pytest.raises(FileNotFoundError, match="holds 3 bytes"):
        load_corpus(fake_library(tmp_path / "third", {"a.py": b"a=1"}))


def test_window_depends_only_on_its_number() -> None:
    text = torch.arange(256, dtype=torch.uint8)
    together = windows(text, 8, "key", range(6))
    alone = torch.cat([windows(text, 8, "key", range(i, i + 1)) for i in range(6)])
    assert torch.equal(together, alone)
    assert torch.equal(together - together[:, :1], torch.arange(8).expand(6, 8))
    assert len(set(together[:, 0].tolist())) > 1


def test_bound_ignores_steps_after_torch_differs_from_itself() -> None:
    """A difference that is more than 8 times (TIMES_FURTHER) the second largest of the run ends the comparison.

    It ends at step 3 in the first and the last case. In the second case, 1e-2 is only 5 times 2e-3.
    """

    def run_of(*norms: float) -> TrainingRun:
        return TrainingRun(losses=[2.0] * 4, grad_norms=[*norms], scales=[8.0] * 4, held_out={4: 2.0})

    reference, far_off = run_of(1.0, 1.0, 1.0, 1.0), run_of(1.0, 1.0, 1.0, 5.0)
    bound = Bound.between(reference, run_of(1.0, 1.0001, 1.0, 1.01))
    assert (bound.agree_until, bound.grad_norms) == (3, pytest.approx(1e-4))
    assert "bound on grad_norms" not in red(bound, reference, far_off)
    bound = Bound.between(reference, run_of(1.0, 1.002, 1.0, 1.01))
    assert (bound.agree_until, bound.grad_norms) == (4, pytest.approx(1e-2))
    assert "bound on grad_norms" in red(bound, reference, far_off)
    bound = Bound.between(reference, run_of(1.0, 1.0001, 1.0, 1.0001), run_of(1.0, 1.0, 1.0, 1.01))
    assert bound.agree_until == 3  # torch differs from one neighbour there, not from the other
    assert "bound on grad_norms" not in red(bound, reference, far_off)
