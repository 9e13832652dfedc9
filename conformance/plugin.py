"""The pytest side of the judge: options, profiles, fixtures, deadlines, and the guard of torch's global state."""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Callable, Generator
from typing import Any

import hypothesis
import numpy
import pytest
import torch

from conformance import surface
from conformance.clauses import AREAS, HERE, all_clauses
from conformance.deviations import DeviationJudge, all_deviations, all_reference_limits
from conformance.library import Library, load_library
from conformance.results import Hang, Recorder, WorkerRecorder, unavailable

PROFILES = ("quick", "full", "deep")
_EXAMPLES = {"quick": 15, "full": 60, "deep": 1000}
_PHASES = (hypothesis.Phase.explicit, hypothesis.Phase.generate, hypothesis.Phase.shrink)
_DEFAULT_DEADLINE_S = 300.0
_REAL_STDERR = 2  # past pytest's capture


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("conformance")
    group.addoption(
        "--subject",
        default="impl",
        help="what to judge: impl, torch, or any package that mirrors torch's paths",
    )
    group.addoption(
        "--device",
        default="auto",
        help="comma-separated device types; auto takes cpu, and cuda where there is one",
    )
    group.addoption("--world-sizes", default="1,2", help="comma-separated numbers of ranks")
    group.addoption("--profile", default="full", choices=PROFILES, help="how much to try")
    group.addoption(
        "--seed",
        type=int,
        default=None,
        help="seed of Hypothesis and of the data; without it every run is the same",
    )
    group.addoption(
        "--no-shrink", action="store_true", help="tell a failing example as it was found, not the smallest"
    )
    group.addoption("--report", default=None, metavar="DIR", help="write report.json there")


def pytest_configure(config: pytest.Config) -> None:
    for line in (
        "clause(id): the clause that a test asks about",
        "deviation(id): the row of deviations.toml that a test asserts on both sides",
        "reference_limit(id): the row of reference_limits.toml that a test asserts of torch",
        "profile(name): the smallest profile that runs the test (quick unless said)",
        "deadline(seconds): when the test counts as hanging",
    ):
        config.addinivalue_line("markers", line)
    _set_hypothesis_up(config)
    _load_subject(config.option.subject)
    config.pluginmanager.register(WorkerRecorder(), "conformance-worker-recorder")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(config), "conformance-recorder")

    if os.environ.get("TRITON_INTERPRET") == "1":
        # Triton's interpreter computes with NumPy, which warns about the inf and nan that kernels are asked about.
        numpy.seterr(all="ignore")


def _load_subject(spec: str) -> None:
    reference = load_library("torch")
    before = {name: reference.find(name) for name in surface.names()}
    try:
        load_library(spec)
    except (Exception, SystemExit) as error:
        raise pytest.UsageError(
            f"the subject {spec!r} cannot be loaded ({type(error).__name__}: {error}); "
            "--subject wants impl, torch, or an importable package that mirrors torch's paths"
        ) from error
    replaced = [name for name, found in before.items() if reference.find(name) is not found]
    if replaced:
        raise pytest.UsageError(
            f"importing the subject {spec!r} put other objects in torch's places ({', '.join(replaced)}); it would be "
            "compared with itself. Let the package replace names when it is asked to, not when it is imported"
        )


def _set_hypothesis_up(config: pytest.Config) -> None:
    suppressed = (
        hypothesis.HealthCheck.too_slow,
        hypothesis.HealthCheck.function_scoped_fixture,
        hypothesis.HealthCheck.differing_executors,
    )
    for name, examples in _EXAMPLES.items():
        hypothesis.settings.register_profile(
            f"tandem-{name}",
            max_examples=examples,
            stateful_step_count=30,
            deadline=None,  # the whole test has one: see `pytest_runtest_call`
            database=None,
            derandomize=config.option.seed is None,
            # Not `explain`, which traces every line: a failing sequence would outlive its deadline.
            phases=_PHASES[: 2 if config.option.no_shrink else 3],
            print_blob=True,
            suppress_health_check=suppressed,
        )
    hypothesis.settings.load_profile(f"tandem-{config.option.profile}")
    if config.option.seed is not None:
        config.option.hypothesis_seed = config.option.seed


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept = [item for item in items if _is_wanted(config, item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test that names no clause, or one that does not exist, fails before it asks anything."""
    marker = item.get_closest_marker("clause")
    if marker is None:
        if _folder(item) in AREAS:
            pytest.fail(f"{item.nodeid} judges a subject but names no clause; mark it with @clause(id)")
    elif marker.args[0] not in all_clauses():
        pytest.fail(f"{item.nodeid} names the clause {marker.args[0]!r}, which no TOML file has")
    row = item.get_closest_marker("deviation")
    if row is not None and row.args[0] not in all_deviations():
        pytest.fail(f"{item.nodeid} names the deviation {row.args[0]!r}, which deviations.toml lacks")
    limit = item.get_closest_marker("reference_limit")
    if limit is not None and limit.args[0] not in all_reference_limits():
        pytest.fail(f"{item.nodeid} names the limit {limit.args[0]!r}, which reference_limits.toml lacks")


def _folder(item: pytest.Item) -> str:
    return item.path.relative_to(HERE).parts[0] if item.path.is_relative_to(HERE) else ""


def _is_wanted(config: pytest.Config, item: pytest.Item) -> bool:
    smallest = item.get_closest_marker("profile")
    in_profile = smallest is None or PROFILES.index(smallest.args[0]) <= PROFILES.index(config.option.profile)
    return in_profile and _concerns(item, config.option.subject.partition("+")[0])


def _concerns(item: pytest.Item, package: str) -> bool:
    """Whether a test is about the subject: the repository's own parts are not asked about with one from elsewhere."""
    folder = _folder(item)
    if folder == "kernels":
        return package == "impl"
    return package in ("impl", "torch") or folder in (*AREAS, "test_surface.py")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "device" in metafunc.fixturenames:
        metafunc.parametrize("device", devices(metafunc.config), indirect=True, scope="session")
    if "world_size" in metafunc.fixturenames:
        metafunc.parametrize(
            "world_size",
            [int(size) for size in metafunc.config.option.world_sizes.split(",")],
            scope="session",
        )


def devices(config: pytest.Config) -> list[str]:
    if config.option.device != "auto":
        return config.option.device.split(",")
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


@pytest.fixture(scope="session")
def subject(request: pytest.FixtureRequest) -> Library:
    """The library that is judged."""
    return load_library(request.config.option.subject)


@pytest.fixture(scope="session")
def reference() -> Library:
    """torch, as installed."""
    return load_library("torch")


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        unavailable("no CUDA device")
    return request.param


@pytest.fixture
def deviation(request: pytest.FixtureRequest, subject: Library, reference: Library) -> DeviationJudge:
    """Judges a probe against the row that the test's `deviation` mark names."""
    marker = request.node.get_closest_marker("deviation")
    request.node.deviation_judge = DeviationJudge(subject, reference, all_deviations()[marker.args[0]])
    return request.node.deviation_judge


def autocast_depth() -> int:
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def set_autocast_depth(depth: int) -> None:
    while autocast_depth() > depth:
        torch.autocast_decrement_nesting()
    while autocast_depth() < depth:
        torch.autocast_increment_nesting()


_GLOBAL_STATE: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "deterministic algorithms": (
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
    ),
    "autocast on cpu": (
        lambda: torch.is_autocast_enabled("cpu"),
        lambda on: torch.set_autocast_enabled("cpu", on),
    ),
    "autocast on cuda": (
        lambda: torch.is_autocast_enabled("cuda"),
        lambda on: torch.set_autocast_enabled("cuda", on),
    ),
    "autocast dtype on cpu": (
        lambda: torch.get_autocast_dtype("cpu"),
        lambda dtype: torch.set_autocast_dtype("cpu", dtype),
    ),
    "autocast dtype on cuda": (
        lambda: torch.get_autocast_dtype("cuda"),
        lambda dtype: torch.set_autocast_dtype("cuda", dtype),
    ),
    "autocast cache": (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    "autocast depth": (autocast_depth, set_autocast_depth),
}


@pytest.fixture(autouse=True)
def _torch_state_is_kept() -> Generator[None]:
    """Fails a test after which torch's global state is not what it was, and puts it back."""
    before = {name: read() for name, (read, _) in _GLOBAL_STATE.items()}
    torch.manual_seed(0)
    yield
    changed = {
        name: (before[name], read()) for name, (read, _) in _GLOBAL_STATE.items() if read() != before[name]
    }
    for name in changed:
        _GLOBAL_STATE[name][1](before[name])
    torch.clear_autocast_cache()
    assert not changed, f"torch's global state was changed (before, after): {changed}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Give the test its deadline: an exception where Python can still run, the end of the process where not."""
    marker = item.get_closest_marker("deadline")
    seconds = marker.args[0] if marker else _DEFAULT_DEADLINE_S

    def stop(signum: int, frame: object) -> None:
        raise Hang(f"the test did not end within {seconds:g} s")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    faulthandler.dump_traceback_later(seconds + 30, exit=True, file=_REAL_STDERR)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
