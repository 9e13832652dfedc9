"""`python -m conformance.simulator script.py`: what it reports about a script, the documented example included."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from conformance.selftests.processes import ROOT, run_fresh_python, run_python
from conformance.selftests.simulator_runs import simulate, simulate_source
from conformance.simulator.control import Hazard, Step
from conformance.simulator.lanes import page
from conformance.simulator.script import ScheduledRun, differences

FINDINGS = sorted((ROOT / "conformance/simulator/findings").glob("*.py"))

pytestmark = pytest.mark.deadline(560.0)


def test_documented_race_is_found_as_shown(tmp_path: Path) -> None:
    section = (ROOT / "docs/simulator.md").read_text().partition("## Find a race")[2].partition("\n## ")[0]
    script, command_line, reported = re.findall(r"```\w+.*\n((?:.*\n)*?)```", section)
    program, *words = shlex.split(command_line, comments=True)
    assert program == "tandem-race"
    (tmp_path / "race.py").write_text(script)
    ended = run_fresh_python("-m", "conformance.simulator", *words, cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (1, reported)


def test_page_draws_streams_of_a_hazard_with_the_missing_wait(tmp_path: Path) -> None:
    source = """\
        import torch
        main, side, other = torch.accelerator.current_stream(), torch.Stream("sim"), torch.Stream("sim")
        x = torch.ones(3, device="sim")
        other.wait_stream(main)
        with other: y = x * 2
        with side: z = x * 3
        torch.accelerator.synchronize()
    """
    status, report = simulate_source(source, "--seed", 1, "--html", "lanes.html", cwd=tmp_path)
    assert status == 1, report
    assert "pictures: lanes.html" in report
    page = (tmp_path / "lanes.html").read_text()
    [picture] = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    drawn = ElementTree.fromstring(picture)
    texts = ["".join(text.itertext()) for text in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert texts == [
        "sim:0 default stream",
        "sim:0 stream 1",
        "sim:0 stream 2",
        "aten::fill_ writes",
        "script.py:3 <module>",
        "waits, script.py:4 <module>",
        "aten::mul",
        "script.py:5 <module>",
        "aten::mul reads",
        "script.py:6 <module>",
        "no wait",
    ]
    lines = {path.get("class"): path.get("d") for path in drawn.iter("{http://www.w3.org/2000/svg}path")}
    # From the box of `fill_` in the first lane: the wait of the third lane, and no wait of the second one.
    assert (lines["wait"], lines["missing"][:8]) == ("M135 74L675 119", "M135 74C")
    assert lines["missing"].endswith(" 405 226")
    assert not re.search(r"(src|href)=", page)


def test_page_without_hazard_has_no_picture(tmp_path: Path) -> None:
    source = "import torch\ntorch.ones(3, device='sim').sum().item()\n"
    status, _ = simulate_source(source, "--seeds", 2, "--html", "lanes.html", cwd=tmp_path)
    assert status == 0
    page = (tmp_path / "lanes.html").read_text()
    assert "No hazard: " in page
    assert "<svg" not in page


def test_page_lists_hazard_of_unknown_stream_without_picture() -> None:
    step = Step("sim:0 default stream", 4, "aten::mul", "a.py:1 f", "", -1)
    hazard = Hazard("the host writes", "host", "a.py:3 f", "a task", "", "", "a wait", steps=(step,))
    text = page("Hazards", [hazard])
    assert "the host writes at a.py:3 f" in text
    assert "<svg" not in text


def test_documented_gate_of_backend_is_green(tmp_path: Path) -> None:
    page = (ROOT / "docs/gate-your-backend.md").read_text()
    for name, text in re.findall(r"```\w+\n# (acme\S+)\n((?:.*\n)*?)```", page):
        (tmp_path / name).write_text(text)
    [command] = re.findall(r"```bash run\nPYTHONPATH=\. tandem-judge (.*)\n```", page)
    paths = os.pathsep.join((str(ROOT), "."))
    ended = run_python("-m", "conformance", *shlex.split(command), cwd=tmp_path, PYTHONPATH=paths)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    report = json.loads((tmp_path / "report/report.json").read_text())
    assert report["devices"] == ["acme"]
    holding = {test["clause"] for test in report["tests"] if test["outcome"] == "passed"}
    assert len(holding) > 50


def test_replay_has_output_status_and_waits_of_script(tmp_path: Path) -> None:
    source = "import torch\nprint(torch.ones(2, device='sim').sum().item())\nraise SystemExit(3)\n"
    status, output = simulate_source(source, "--seed", 5, cwd=tmp_path)
    assert status == 3
    assert output.startswith("2.0\n")
    assert "the host waits: item at script.py:2 <module>, 1 times" in output


def test_script_that_ends_its_process_has_no_verdict(tmp_path: Path) -> None:
    source = "import os, torch\ntorch.ones(2, device='sim')\nos._exit(0)\n"
    status, output = simulate_source(source, "--seeds", 2, cwd=tmp_path)
    assert (status, "ended without a report of its hazards" in output) == (1, True), output
    assert "no other schedule was compared with it" in output
    source = "import os\nif os.environ['RANK'] == '1': os._exit(0)\nraise SystemExit(3)\n"
    status, output = simulate_source(source, "--seed", 0, "--ranks", 2, cwd=tmp_path)
    assert (status, "rank 1: ended without a report of its hazards" in output) == (3, True), output


def test_saved_files_are_kept_for_one_run(tmp_path: Path) -> None:
    source = """
        import torch
        try: begun = torch.load("x.pt")["x"]
        except FileNotFoundError: begun = torch.zeros(1, device="sim")
        torch.save({"x": begun + 1}, "x.pt")
        print(torch.load("x.pt")["x"].item())
    """
    status, output = simulate_source(source, "--seeds", 3, cwd=tmp_path)
    assert (status, "0 of 2 schedules change the result" in output) == (0, True), output
    assert simulate("script.py", "--seed", 2, cwd=tmp_path)[1].startswith("1.0\n")


def test_peer_is_ended_after_failure_with_reason(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import os, time\nassert os.environ['RANK'] == '0'\ntime.sleep(100)\n"
    )
    program = (
        "from conformance.simulator import __main__, script\nscript._AFTER_FAILURE_S = 1.0\n"
        "raise SystemExit(__main__.main())"
    )
    ended = run_python("-c", program, "script.py", "--seed", 0, "--ranks", 2, cwd=tmp_path)
    assert ended.returncode != 0
    assert "rank 0: ended, because it went on for 1 s after rank 1 had failed" in ended.stderr


def test_late_rank_is_ended_with_its_stack(tmp_path: Path) -> None:
    source = "import threading\ndef wait_for_ever():\n    threading.Event().wait()\nwait_for_ever()\n"
    status, output = simulate_source(source, "--seed", 0, "--timeout", 5, cwd=tmp_path)
    assert status != 0
    assert re.search(r'File ".*script\.py", line 3 in wait_for_ever\n', output), output
    assert "ended after 5 s" in output


def test_unrunnable_script_gives_no_verdict(tmp_path: Path) -> None:
    assert simulate("absent.py", cwd=tmp_path) == (2, "there is no script absent.py\n")
    (tmp_path / "empty.py").touch()
    assert "got 0, expected at least 1" in simulate("empty.py", "--seeds", 0, cwd=tmp_path)[1]
    reported = "there is no folder absent for --html; create it first\n"
    assert simulate("empty.py", "--html", "absent/page.html", cwd=tmp_path) == (2, reported)


def test_missing_compiler_is_reported_as_unavailable(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("")
    environment = {"TORCH_EXTENSIONS_DIR": str(tmp_path / "cache"), "PATH": str(tmp_path), "CXX": ""}
    ended = run_fresh_python("-m", "conformance.simulator", "script.py", cwd=tmp_path, **environment)
    assert (ended.returncode, ended.stdout) == (2, "")
    # A torch that was built for CUDA may log before it that it finds no runtime.
    *logged, sentence = ended.stderr.splitlines()
    assert (
        sentence
        == "the simulator has to be built once, and there is no C++ compiler: install g++, or name one by CXX"
    )
    assert all("cpp_extension.py" in line for line in logged), ended.stderr


# The tasks of the other streams cannot run during the all-reduce, because they wait for it. Later tasks are drawn.
_SLOW_PEER = """
import sys, time
import torch
import torch.distributed as dist
from conformance import simulator

dist.init_process_group("simccl")
device = torch.device("sim", 0)
x, streams = torch.ones(4, device=device), [torch.Stream(device) for _ in range(3)]
work = dist.all_reduce(x, async_op=True)
for stream in streams:
    with stream:
        work.wait()
        x + 1
while dist.get_rank() == 1 and time.process_time() < float(sys.argv[1]):
    pass  # a host that only slept would let the device go on
work.wait()
x.sum().item()
for _ in range(30):
    for stream in streams:
        with stream:
            torch.ones(4, device=device)
simulator.synchronize()
print(simulator.course())
"""


def test_slow_peer_does_not_change_schedule(tmp_path: Path) -> None:
    words = ("--ranks", 2, "--seed", 4, "--")
    fast, slow = (simulate_source(_SLOW_PEER, *words, seconds, cwd=tmp_path)[1] for seconds in (0, 4))
    assert "not replayable" not in slow, slow
    assert re.findall(r"rank \d: \w{16}", slow) == re.findall(r"rank \d: \w{16}", fast) != []


@pytest.mark.parametrize("disabled", [False, True])
def test_dynamo_is_imported_once_unless_script_configures_it(tmp_path: Path, disabled: bool) -> None:
    setting = "os.environ['TORCH_COMPILE_DISABLE'] = '1'\n" if disabled else ""
    (tmp_path / "dynamo.py").write_text(
        "import os, sys\n"
        f"print('torch._dynamo' in sys.modules)\n{setting}"
        "import torch._dynamo.config\n"
        "print(torch._dynamo.config.disable)\n"
    )
    ended = run_fresh_python("-m", "conformance.simulator", "dynamo.py", "--seed", 1, cwd=tmp_path)
    assert ended.stdout.splitlines()[:2] == [str(not disabled), str(disabled)]


def test_failed_script_is_reported_as_failure(tmp_path: Path) -> None:
    status, output = simulate_source("raise ValueError('it fails')", "--seeds", 3, cwd=tmp_path)
    assert status == 1
    assert "failed in its own order, so no other schedule was compared" in output
    assert "ValueError: it fails" in output
    assert "schedules change the result" not in output


def test_differences_name_the_first_line_and_each_tensor() -> None:
    reference = ScheduledRun(0, output="a\nb\n", saved={"m.pt: w": "1", "m.pt: v": "2"})
    course = ScheduledRun(
        1, status=1, output="a\nc\n", errors="Traceback\nValueError: no\n", saved={"m.pt: w": "3"}
    )
    assert [str(difference) for difference in differences(reference, course)] == [
        "exit status 1, not 0: ValueError: no",
        "line 2 says 'c', not 'b'",
        "m.pt: v is not saved",
        "m.pt: w has other bits",
    ]
    assert differences(reference, reference) == []


# By script: the first hazard. Most of these accesses are in torch, whose lines change.
RACES = {
    "fsdp_offloaded_unsharded_parameters": ("copy from the host writes", "aten::mm reads"),
    "fsdp_summoned_offloaded_parameters": ("the host writes", "copy from the host reads"),
    "fully_shard_all_reduce_hook": ("copy_ writes", "all_reduce writes"),
    "fully_shard_chunked_loss": ("aten::cat writes", "reduce_scatter reads"),
    "fully_shard_gradient_hook": ("the host touches", "copy to the host writes"),
    "fully_shard_offloaded_parameters": ("the host writes", "copy from the host reads"),
    "fully_shard_offloaded_replicas": ("copy_ writes", "all_reduce writes"),
    "fully_shard_side_stream": ("aten::fill_ writes", "reduce_scatter reads"),
    "grad_scaler_host_copy": ("the host touches", "copy to the host writes"),
    "threaded_group": ("aten::cat reads", "aten::fill_ writes"),
    "wait_stream_of_itself": ("aten::mul reads", "aten::fill_ writes"),
}
PLANTED = [script for script in FINDINGS if "rewritten(" in script.read_text()]


def is_fixed(script: Path) -> bool:
    """Return whether the installed torch no longer has the race that `script` shows."""
    versions = re.match(
        r'"""(?:torch 2\.13(?: to 2\.(\d+)| and later)|Fixed in torch 2\.13|Every torch)[: ]',
        script.read_text(),
    )
    assert versions, f"{script} does not begin with the versions of torch that have the race"
    return versions[1] is not None and int(torch.__version__.split(".")[1]) > int(versions[1])


def run_finding(script: Path, *arguments: str) -> tuple[int, str]:
    """Run the command of a script's docstring."""
    command = re.search(r"^    python -m conformance.simulator (.*)$", script.read_text(), re.MULTILINE)
    assert command, f"{script} has no command"
    return simulate(*command[1].split(), "--seeds", 4, *(["--", *arguments] if arguments else []), cwd=ROOT)


@pytest.mark.parametrize(
    "script",
    [FINDINGS[0], *(pytest.param(script, marks=pytest.mark.profile("full")) for script in FINDINGS[1:])],
    ids=lambda script: script.stem,
)
def test_race_of_torch_is_found_until_fixed(script: Path) -> None:
    status, report = run_finding(script)
    if is_fixed(script):
        assert "0 of 3 schedules change the result; 0 hazards" in report, report
        assert status == 0
        return
    assert status == 1, (
        f"torch {torch.__version__} has no such race: write the last version that has it\n{report}"
    )
    now, before = RACES[script.stem]
    assert re.search(rf"^hazard 1: {now}( on .*)? at .*\n  what {before} on ", report, re.MULTILINE), report


@pytest.mark.parametrize(
    "script",
    [PLANTED[0], *(pytest.param(script, marks=pytest.mark.profile("full")) for script in PLANTED[1:])],
    ids=lambda script: script.stem,
)
def test_torch_without_planted_race_has_one_result(script: Path) -> None:
    status, report = run_finding(script, "fixed")
    assert "0 of 3 schedules change the result; 0 hazards" in report, report
    assert status == 0


def test_every_finding_is_short_and_listed_on_page() -> None:
    page = (ROOT / "docs/races.md").read_text()
    assert sorted(RACES) == [script.stem for script in FINDINGS]
    for script in FINDINGS:
        assert len(script.read_text().splitlines()) <= 40, script
        assert f"findings/{script.name})" in page, script


# Each call succeeds with the first argument and is refused with the second.
_REFUSED = """
import sys
import torch

device = sys.argv[1]
x, u, i = (torch.ones(3, dtype=dtype, device=device) for dtype in (torch.float32, torch.uint8, torch.int32))
square = torch.ones(2, 2, device=device)
for call, right, wrong in (
    (u.fill_, 3, 300),
    (i.fill_, 0.0, float("nan")),
    (i.fill_, 1e9, 1e10),
    (lambda least: torch.histc(x, 4, least, 3.0), 2.0, 4.0),
    (lambda lambd: torch.nn.functional.softshrink(x, lambd), 0.5, -1.0),
    (lambda p: torch.renorm(x.view(3, 1), p, 0, 1.0), 2.0, -2.0),
    (lambda length: x.add_(torch.ones(length, device=device)), 3, 4),
    (lambda dtype: torch.layer_norm(x, (3,), x.to(dtype)), torch.float32, torch.float64),
    (lambda dtype: square @ square.to(dtype), torch.float32, torch.bfloat16),
    (lambda most: x.half().clamp(max=most), 1e4, 1e9),
    (lambda dtype: torch.linalg.inv(torch.eye(2, device=device).to(dtype)), torch.float32, torch.float16),
):
    call(right)
    for _ in range(2):
        try:
            call(wrong)
            print("is taken")
        except Exception as error:
            print(type(error).__name__, str(error).splitlines()[0])
print(*(len(torch.arange(0.5, end, 0.25, device=device)) for end in (0.5, 1.0)))
"""


def test_error_of_cpu_is_raised_at_its_call(tmp_path: Path) -> None:
    _, on_sim = simulate_source(_REFUSED, "--seed", 1, "--", "sim", cwd=tmp_path)
    on_cpu = run_python("script.py", "cpu", cwd=tmp_path).stdout
    assert "is taken" not in on_cpu
    assert on_sim.partition("\nseed 1:")[0] == on_cpu


def test_device_failure_names_calling_line(tmp_path: Path) -> None:
    source = "import torch\nx = torch.arange(3, device='sim')\ny = x[x + 1]\nprint('on')\nprint(y.cpu())\n"
    status, output = simulate_source(source, "--seed", 1, cwd=tmp_path)
    assert status == 1
    assert output.startswith("on\n")
    assert re.search(
        r"failed on the device: index 3 is out of bounds.*\n +it was called at \S*script.py:3", output
    ), output


def test_memory_is_split_and_counted(tmp_path: Path) -> None:
    source = """
        import torch
        a, b = (torch.empty(n, dtype=torch.uint8, device="sim") for n in (4000, 100))
        def reported(): return [f(0) for f in (torch.sim.memory_allocated, torch.sim.max_memory_allocated,
                                               torch.sim.memory_reserved, torch.accelerator.memory_allocated)]
        print(reported(), b.data_ptr() - a.data_ptr())
        del a
        print(reported())
        torch.sim.reset_peak_memory_stats()
        del b
        torch.sim.empty_cache()
        print(reported())
    """
    _, output = simulate_source(source, "--seed", 1, cwd=tmp_path)
    assert output.splitlines()[:3] == [
        "[4608, 4608, 2097152, 4608] 4096",
        "[512, 4608, 2097152, 512]",
        "[0, 512, 0, 0]",
    ]
