"""Training scripts of users on the simulated accelerator, right and with a planted mistake."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from conformance.selftests.processes import ROOT
from conformance.selftests.simulator_runs import simulate

pytestmark = pytest.mark.deadline(560.0)

SCRIPTS = ROOT / "conformance/selftests/simulator_scripts.py"
# By training and ranks: for each mistake, the hazard and the lines that it names.
TRAININGS = {
    ("ddp", 2): {
        "refill": (("the host writes", "buffer.copy_("), ("copy from the host reads", "buffer.to(")),
        "hook": (("copy_ reads", "dist.all_reduce("), ("all_reduce writes", "dist.all_reduce(")),
    },
    ("loader", 1): {
        "early": (("aten::addmm reads", "model(x)"), ("copy from the host writes", "batch.to(")),
        "unrecorded": (("copy from the host writes", "batch.to("), ("aten::mm reads", "model(x)")),
    },
    ("offload", 1): {
        "unrecorded": (("aten::tanh writes", "layers(torch"), ("copy to the host reads", "host.copy_(")),
        "early": (("aten::mm reads", "packed.to("), ("copy from the host writes", "packed.to(")),
    },
    ("checkpoint", 1): {
        "overtaken": (("aten::addcdiv writes", "optimizer.step("), ("copy to the host reads", "weight.to(")),
        "unfinished": (("the host touches", "dcp.async_save("), ("copy to the host writes", "weight.to(")),
    },
    ("zero", 2): {
        "gather": (("all_gather reads", "dist.all_gather"), ("aten::sub writes", "shard.sub_(")),
        "overwritten": (
            ("aten::zero_ writes", "gradients.zero_("),
            ("reduce_scatter reads", "dist.reduce_scatter"),
        ),
    },
}
RUNS = [(name, ranks, mistake) for (name, ranks), mistakes in TRAININGS.items() for mistake in mistakes]


def pattern_of(access: str, call: str) -> str:
    lines = SCRIPTS.read_text().splitlines()
    number = next(number for number, line in enumerate(lines, 1) if call in line)
    return rf"{access}(?: on .*)? at .*{SCRIPTS.name}:{number} \S+"


@pytest.mark.parametrize(("name", "ranks"), TRAININGS)
def test_right_training_has_one_result(tmp_path: Path, name: str, ranks: int) -> None:
    status, report = simulate(SCRIPTS, "--ranks", ranks, "--seeds", 5, "--", name, cwd=tmp_path)
    assert re.search(r"in its own order, exit status 0, [1-9]\d* tensors saved", report), report
    assert "0 of 4 schedules change the result; 0 hazards" in report, report
    assert "not replayable" not in report, report
    assert status == 0


@pytest.mark.parametrize(("name", "ranks", "mistake"), RUNS)
def test_mistake_is_found_with_its_lines(tmp_path: Path, name: str, ranks: int, mistake: str) -> None:
    status, report = simulate(SCRIPTS, "--ranks", ranks, "--seeds", 5, "--", name, mistake, cwd=tmp_path)
    assert status == 1
    now, before = (pattern_of(*access) for access in TRAININGS[name, ranks][mistake])
    assert re.search(rf"hazard \d+: {now}\n +what {before}\n", report), report
    assert re.search(r"[1-4] of 4 schedules change the result", report), report
