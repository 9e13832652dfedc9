"""`impl.drop_in`: every place is taken, every place is given back, and programs run as they would without it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed._composable.fsdp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

import impl.amp
import impl.distributed.fsdp.wrap
import impl.nn.utils
from impl import drop_in

ROOT = Path(__file__).parents[2]

# Every public spelling, each held to be ours while ours are in place.
SPELLINGS = [
    "torch.GradScaler",
    "torch.autocast",
    "torch.amp.GradScaler",
    "torch.amp.autocast",
    "torch.amp.custom_bwd",
    "torch.amp.custom_fwd",
    "torch.amp.is_autocast_available",
    "torch.amp.autocast_mode.autocast",
    "torch.amp.autocast_mode.autocast_decorator",
    "torch.amp.autocast_mode.custom_bwd",
    "torch.amp.autocast_mode.custom_fwd",
    "torch.amp.autocast_mode.is_autocast_available",
    "torch.amp.grad_scaler.GradScaler",
    "torch.amp.grad_scaler.OptState",
    "torch.cpu.amp.GradScaler",
    "torch.cpu.amp.autocast",
    "torch.cpu.amp.autocast_mode.autocast",
    "torch.cpu.amp.grad_scaler.GradScaler",
    "torch.cuda.amp.GradScaler",
    "torch.cuda.amp.autocast",
    "torch.cuda.amp.custom_bwd",
    "torch.cuda.amp.custom_fwd",
    "torch.cuda.amp.autocast_mode.autocast",
    "torch.cuda.amp.autocast_mode.custom_bwd",
    "torch.cuda.amp.autocast_mode.custom_fwd",
    "torch.cuda.amp.grad_scaler.GradScaler",
    "torch.cuda.amp.grad_scaler.OptState",
    "torch.distributed._composable.fsdp.FSDPModule",
    "torch.distributed._composable.fsdp.MixedPrecisionPolicy",
    "torch.distributed._composable.fsdp.fully_shard",
    "torch.distributed.checkpoint.state_dict.get_model_state_dict",
    "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict",
    "torch.distributed.checkpoint.state_dict.get_state_dict",
    "torch.distributed.fsdp.CPUOffloadPolicy",
    "torch.distributed.fsdp.DataParallelMeshDims",
    "torch.distributed.fsdp.FSDPModule",
    "torch.distributed.fsdp.MixedPrecisionPolicy",
    "torch.distributed.fsdp.OffloadPolicy",
    "torch.distributed.fsdp.UnshardHandle",
    "torch.distributed.fsdp.fully_shard",
    "torch.distributed.fsdp.register_fsdp_forward_method",
    "torch.distributed.fsdp.share_comm_ctx",
    "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler",
    "torch.nn.utils.clip_grad_norm",
    "torch.nn.utils.clip_grad_norm_",
    "torch.nn.utils.clip_grad_value_",
    "torch.nn.utils.clip_grads_with_norm_",
    "torch.nn.utils.get_total_norm",
    "torch.nn.utils.clip_grad.clip_grad_norm",
    "torch.nn.utils.clip_grad.clip_grad_norm_",
    "torch.nn.utils.clip_grad.clip_grad_value_",
    "torch.nn.utils.clip_grad._clip_grads_with_norm_",
    "torch.nn.utils.clip_grad._get_total_norm",
]


# Names that torch added after the oldest version that is supported, with that version.
NEW = {
    "distributed.fsdp.DataParallelMeshDims": "2.12.dev0",
    "distributed.fsdp.GradientReductionHandle": "2.15.dev0",
}
SPELLINGS = [
    path for path in SPELLINGS if torch.__version__ >= NEW.get(path.removeprefix("torch."), "2.11.dev0")
]


def found(path: str) -> object:
    value: object = torch
    for name in path.split(".")[1:]:
        value = getattr(value, name)
    return value


def places() -> dict[str, int]:
    return {path: id(found(path)) for path in SPELLINGS}


def namespaces() -> dict[str, int]:
    """The identity of every name of every loaded module of torch."""
    return {
        f"{module_name}.{name}": id(value)
        for module_name, module in list(sys.modules.items())
        if module_name.partition(".")[0] == "torch"
        for name, value in list(vars(module).items())
    }


def are_ours() -> set[bool]:
    return {str(getattr(found(path), "__module__", "")).startswith("impl.") for path in SPELLINGS}


@pytest.fixture(autouse=True)
def put_back() -> Iterator[None]:
    # The modules that installing loads are loaded here, so that only the places can change.
    with drop_in.installed():
        pass
    before = places()
    yield
    drop_in.uninstall()
    assert places() == before


def test_each_name_of_the_table_is_in_both_libraries() -> None:
    for name in drop_in._NAMES:
        assert (drop_in._find("torch", name) is None) == (torch.__version__ < NEW.get(name, "2.11.dev0"))
        assert drop_in._find("impl", name) is not None


@pytest.mark.parametrize("path", SPELLINGS)
def test_installed_place_holds_our_object(path: str) -> None:
    before = found(path)
    with drop_in.installed():
        assert found(path) is not before
        assert found(path).__module__.startswith("impl.")  # type: ignore[attr-defined]
    assert found(path) is before


def test_spellings_stay_one_object() -> None:
    with drop_in.installed():
        assert torch.autocast is torch.amp.autocast_mode.autocast is impl.amp.autocast
        assert torch.nn.utils.clip_grad_norm_ is impl.nn.utils.clip_grad_norm_


def test_nothing_but_the_places_changes_and_all_of_it_is_restored() -> None:
    before = namespaces()
    drop_in.install()
    during = namespaces()
    drop_in.uninstall()
    after = namespaces()
    assert {name for name in before if before[name] != during[name]} >= set(SPELLINGS)
    assert before == after


def test_installing_twice_is_installing_once() -> None:
    drop_in.install()
    once = places()
    drop_in.install()
    assert places() == once
    drop_in.uninstall()
    assert are_ours() == {False}
    drop_in.uninstall()
    assert are_ours() == {False}


def test_failed_install_installs_nothing() -> None:
    with mock.patch.object(drop_in, "_find", side_effect=ImportError("broken")), pytest.raises(ImportError):
        drop_in.install()
    assert are_ours() == {False}
    with drop_in.installed():
        assert are_ours() == {True}
    assert are_ours() == {False}


def test_blocks_nest() -> None:
    with drop_in.installed():
        with drop_in.installed():
            assert are_ours() == {True}
        assert are_ours() == {True}
    assert are_ours() == {False}


def test_block_inside_install_keeps_installation() -> None:
    drop_in.install()
    with drop_in.installed():
        pass
    assert are_ours() == {True}
    with drop_in.installed():
        drop_in.uninstall()
        assert are_ours() == {True}
    assert are_ours() == {False}


def test_block_restores_after_exception() -> None:
    with pytest.raises(ZeroDivisionError), drop_in.installed():
        _ = 1 / 0
    assert are_ours() == {False}


def test_last_block_of_threads_uninstalls() -> None:
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with drop_in.installed():
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=hold)
    with drop_in.installed():
        thread.start()
        assert entered.wait(10)
    assert are_ours() == {True}
    leave.set()
    thread.join(10)
    assert not thread.is_alive()
    assert are_ours() == {False}


def test_replacements_of_other_code_are_kept() -> None:
    before = torch.nn.utils.clip_grad_norm_
    with mock.patch.object(torch.nn.utils, "clip_grad_norm_"):
        stand_in = torch.nn.utils.clip_grad_norm_
        with drop_in.installed():
            assert torch.nn.utils.clip_grad_norm_ is stand_in
        assert torch.nn.utils.clip_grad_norm_ is stand_in
    assert torch.nn.utils.clip_grad_norm_ is before


def test_sharded_scalers_derive_from_scalers_of_their_own_library() -> None:
    path = "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler"
    with drop_in.installed():
        assert issubclass(found(path), torch.amp.GradScaler)
    assert issubclass(found(path), torch.amp.GradScaler)


def test_torch_s_sharded_scaler_is_loaded_before_its_base_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text(
        "import sys, torch\n"
        "from impl import drop_in\n"
        "base, name = torch.amp.GradScaler, 'torch.distributed.fsdp.sharded_grad_scaler'\n"
        "assert name not in sys.modules\n"
        "drop_in.install()\n"
        "drop_in.uninstall()\n"
        "assert issubclass(sys.modules[name].ShardedGradScaler, base)\n"
    )
    done = subprocess.run(
        [sys.executable, "late.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("made_of", ["theirs", "ours"])
def test_checkpointing_takes_policies_of_either_library(made_of: str) -> None:
    """torch's helper checks the class of a policy that is not a function, and that class is ours by then."""
    torch_policy, our_policy = (
        torch.distributed.fsdp.wrap.CustomPolicy,
        impl.distributed.fsdp.wrap.CustomPolicy,
    )
    policy: Any = (torch_policy if made_of == "theirs" else our_policy)(
        lambda module: isinstance(module, torch.nn.Linear)
    )
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh())
    with drop_in.installed():
        apply_activation_checkpointing(model, auto_wrap_policy=policy)
    assert [type(layer).__name__ for layer in model] == ["CheckpointWrapper", "Tanh"]


def test_torch_training_step_runs_with_ours() -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.weight.detach().clone()
    with drop_in.installed():
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        assert isinstance(scaler, torch.GradScaler)
        assert isinstance(scaler, impl.amp.GradScaler)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(torch.ones(4, 3)).float().sum()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) > 1.0
        scaler.step(optimizer)
        scaler.update()
    assert not torch.equal(model.weight, before)


# --- as a command

SCRIPT = """
import sys
from torch import autocast
import beside
print(autocast.__module__, __name__, sys.argv[1:], beside.VALUE)
from impl import drop_in
drop_in.uninstall()
import torch
import torch.distributed._composable.fsdp
print(torch.autocast.__module__)
sys.exit(int(sys.argv[-1]))
"""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "impl.drop_in", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def program(tmp_path: Path) -> Path:
    (tmp_path / "program.py").write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("VALUE = 7\n")
    return tmp_path


@pytest.mark.parametrize("as_module", [False, True], ids=["script", "module"])
def test_runs_a_program(program: Path, as_module: bool) -> None:
    """The program has its own arguments, folder to import from and exit code, and one copy of drop_in."""
    target = ["-m", "program"] if as_module else [str(program / "program.py")]
    done = run(program if as_module else program.parent, *target, "--epochs", "-m", "5")
    assert done.stdout.splitlines() == [
        "impl.amp.autocast_mode __main__ ['--epochs', '-m', '5'] 7",
        "torch.amp.autocast_mode",
    ], done.stderr
    assert done.returncode == 5


OUTLIVING = """
import atexit, os, pickle, sys, threading, time
class Kept: pass
def still_there(where): print(where, pickle.loads(pickle.dumps(Kept())).__class__ is Kept)
def late():
    time.sleep(0.2)
    still_there("thread")
threading.Thread(target=late).start()
atexit.register(still_there, "exit")
os.chdir("/")
print(os.path.exists(__file__), sys.argv)
"""


def test_threads_and_exit_handlers_find_main_names(tmp_path: Path) -> None:
    """`__file__` is absolute, the arguments are unchanged, and `__main__` keeps its classes until the exit."""
    (tmp_path / "outliving.py").write_text(OUTLIVING)
    done = run(tmp_path, "outliving.py", "--", "-x")
    assert done.stdout.splitlines() == ["True ['outliving.py', '--', '-x']", "thread True", "exit True"], (
        done.stderr
    )


@pytest.mark.parametrize("words", [["-m", "no_such_module"], [], ["--unknown"]])
def test_refuses_in_a_sentence(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        drop_in.main(words)
    printed = capsys.readouterr()
    assert (refused.value.code, printed.out) == (2, "")
    assert printed.err.startswith("python -m impl.drop_in: ")
    assert are_ours() == {False}


def test_says_what_is_missing(tmp_path: Path) -> None:
    absent = run(tmp_path, "absent.py")
    assert (absent.returncode, absent.stdout) == (2, "")
    assert absent.stderr == "python -m impl.drop_in: there is no file absent.py\n"
