"""pytest plugin of the judge: options, profiles, fixtures, deadlines, and a check of torch's global state."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import gc
import os
import signal
from collections.abc import Generator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import hypothesis
import pytest
import torch

from conformance.cli import options
from conformance.judge import accounting
from conformance.judge.clauses import AREAS, all_clauses, clause_of
from conformance.judge.comparing import Compare
from conformance.judge.deviations import DeviationJudge
from conformance.judge.errors import Hang, raise_stopped_by_user
from conformance.judge.files import claims_file, reference_limits
from conformance.judge.files.claims import claimed_extensions, exposes, provided_names
from conformance.judge.files.expectations import Expectations, without_shrinking
from conformance.judge.files.rows import all_deviations, all_reference_limits
from conformance.judge.judgement import unavailable
from conformance.judge.library import Library, NotProvided, load_library, package_of
from conformance.judge.results import BAD_INPUT, NO_DEVICE, Recorder, WorkerRecorder
from conformance.judge.sandbox import global_state, seeding, trial
from conformance.judge.sandbox.deadlines import MOST_RESTARTS, Deadlines
from conformance.judge.sandbox.environment import is_usable, quieten_triton
from conformance.judge.sandbox.notes import Notes
from conformance.selection import Selection, folder_of

_EXAMPLES = {"smoke": 5, "quick": 15, "full": 60, "deep": 1000}
# Profiles in which each test of a deviation runs torch too, and how many tests of a function do so in the others.
_PROFILES_THAT_ALWAYS_ASK_TORCH = ("full", "deep")
_MOST_TESTS_THAT_ASK = 4
_ASKS_TORCH = pytest.StashKey[bool]()
_PHASES = (hypothesis.Phase.explicit, hypothesis.Phase.generate, hypothesis.Phase.shrink)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("conformance")
    group.addoption(
        "--subject",
        default="impl",
        help="the package to judge: impl, torch, or any that has torch's paths",
    )
    options.add_selection(group.addoption, "full")
    group.addoption(
        "--no-shrink", action="store_true", help="report the first failing example, not the smallest"
    )
    group.addoption(
        "--deadline",
        type=float,
        default=None,
        metavar="SECONDS",
        help="time limit for tests without their own (default: set by the profile)",
    )
    group.addoption(
        "--today",
        default=None,
        metavar="DATE",
        type=datetime.date.fromisoformat,
        help="the day that the dates of expectations are compared with (default: today)",
    )
    group.addoption(
        "--clauses",
        default="",
        help="comma-separated beginnings of clause ids: run only tests of these clauses",
    )
    group.addoption("--report", default=None, metavar="DIR", help="folder for report.json")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    # pytest-xdist reads this option later.
    if getattr(config.option, "maxworkerrestart", "") is None:
        config.option.maxworkerrestart = str(MOST_RESTARTS)
    for line in (
        "clause(id): the clause that the test belongs to",
        "deviation(id): the entry of deviations.toml that the test checks for torch and for the subject",
        "reference_limit(id): the entry of reference_limits.toml that the test checks for torch",
        "profile(name): the smallest profile that runs the test (default: quick)",
        "deadline(seconds): when the test counts as hanging",
        "world_sizes(fewest, also): the smallest useful `world_size` of the test (default: 1), and the sizes at which "
        "it runs in addition to those of --world-sizes",
    ):
        config.addinivalue_line("markers", line)
    _set_hypothesis_up(config)
    notes = Notes.of_run(config)
    has_workers = config.getoption("dist", "no") != "no"
    if has_workers:
        # The workers use all cores. By default, the threads of each worker's torch would spin between two operators.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    deadlines = None if has_workers else Deadlines(config, notes)
    info = _load_subject(config, deadlines)
    if not hasattr(config, "workerinput"):
        known = accounting.known_before(config.option.subject, info)
        notes.keep("known", {name: asdict(result) for name, result in known.items()})
    config.pluginmanager.register(Selection(config, notes), "conformance-selection")
    _expectations(config).keep(config)
    config.pluginmanager.register(reference_limits, "conformance-reference-limits")
    if deadlines is not None:
        config.pluginmanager.register(deadlines, "conformance-deadlines")
        config.pluginmanager.register(WorkerRecorder(notes), "conformance-worker-recorder")
    if not hasattr(config, "workerinput"):
        signal.signal(signal.SIGTERM, raise_stopped_by_user)
        config.pluginmanager.register(Recorder(config, notes, info), "conformance-recorder")

    quieten_triton()


def _load_subject(config: pytest.Config, deadlines: Deadlines | None) -> trial.SubjectInfo:
    """Import the subject and return its claims.

    If workers run the tests, it is imported only in a subprocess, so that it cannot affect the process that gives the
    verdict, for example at exit.
    """
    spec, devices = config.option.subject, config.option.device
    if config.option.claims is not None:
        claims_file.set_claims_file(package_of(spec), Path(config.option.claims))
    try:
        if deadlines is None:
            return trial.import_in_subprocess(spec, devices)
        is_worker = hasattr(config, "workerinput")
        with deadlines.for_import():
            complaints = trial.load(spec)
            if is_worker:
                return trial.SubjectInfo(None)
            info = trial.subject_info(spec, complaints, devices)
        with contextlib.suppress(Hang), deadlines.for_import():
            info = replace(info, provided=provided_names(spec))
        return info
    except (trial.CannotBeJudged, Hang) as error:
        pytest.exit(str(error), returncode=BAD_INPUT)


def _expectations(config: pytest.Config) -> Expectations:
    rows = claims_file.claims_file(package_of(config.option.subject)).expectations
    return Expectations(rows, config.option.today or datetime.datetime.now(datetime.UTC).date())


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
            deadline=None,  # per example; `deadlines` limits the test
            database=None,
            derandomize=config.option.seed is None,
            # Without `explain`, which traces every line, so that a failing sequence would exceed its deadline.
            phases=_PHASES[: 2 if config.option.no_shrink else 3],
            print_blob=True,
            suppress_health_check=suppressed,
        )
    hypothesis.settings.load_profile(f"tandem-{config.option.profile}")
    if config.option.seed is not None:
        config.option.hypothesis_seed = config.option.seed
        seeding.set_run_seed(config.option.seed)


def pytest_collection_finish(session: pytest.Session) -> None:
    if session.config.option.profile not in _PROFILES_THAT_ALWAYS_ASK_TORCH:
        _choose_tests_that_ask_torch(session.items)
    # Imported objects stay, so collections that tests and pytest request need not visit them. Without the unfreezing at
    # exit, extensions report leaks.
    gc.freeze()
    atexit.register(gc.unfreeze)


def _choose_tests_that_ask_torch(items: Sequence[pytest.Item]) -> None:
    """Choose at most `_MOST_TESTS_THAT_ASK` tests of each function to check what torch does in a deviation.

    torch may die or hang there, and its ranks take seconds to start again.
    """
    by_function: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("deviation") is not None:
            by_function.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for tests in by_function.values():
        for number, test in enumerate(tests):
            test.stash[_ASKS_TORCH] = number in scattered(len(tests), _MOST_TESTS_THAT_ASK)


def scattered(count: int, most: int) -> set[int]:
    """Return at most `most` of the numbers below `count`, at irregular distances, so that no parameter is left out."""
    if count <= most:
        return set(range(count))
    return {int(count * (number * 0.618 % 1)) for number in range(most)}


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail a test that names no clause, or an unknown clause, deviation or limit."""
    clause_id = clause_of(item)
    if not clause_id:
        if folder_of(item) in AREAS:
            pytest.fail(f"{item.nodeid} judges a subject but names no clause; mark it with @clause(id)")
    elif clause_id not in all_clauses():
        pytest.fail(f"{item.nodeid} names the clause {clause_id!r}, which no TOML file has")
    row = item.get_closest_marker("deviation")
    if row is not None and row.args[0] not in all_deviations():
        pytest.fail(f"{item.nodeid} names the deviation {row.args[0]!r}, which deviations.toml lacks")
    limit = item.get_closest_marker("reference_limit")
    if limit is not None and limit.args[0] not in all_reference_limits():
        pytest.fail(f"{item.nodeid} names the limit {limit.args[0]!r}, which reference_limits.toml lacks")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    is_expected = Expectations.of_run(item.config).find(item.nodeid, clause_of(item)) is not None
    with without_shrinking(getattr(item, "obj", None)) if is_expected else contextlib.nullcontext():
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> None:
    """End a test before it runs if the subject has none of the names of its clause.

    This includes tests that only use torch.
    """
    if clause_id := clause_of(pyfuncitem):
        names, library = all_clauses()[clause_id].names, load_library(pyfuncitem.config.option.subject)
        if names and not any(exposes(library, name) for name in names):
            raise NotProvided(library.spec, names[0])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "device" in metafunc.fixturenames:
        metafunc.parametrize("device", devices(metafunc.config), indirect=True, scope="session")
    if "world_size" in metafunc.fixturenames:
        metafunc.parametrize("world_size", _world_sizes(metafunc), scope="session")


def _world_sizes(metafunc: pytest.Metafunc) -> list[int]:
    sizes = [int(size) for size in metafunc.config.option.world_sizes.split(",")]
    marker = metafunc.definition.get_closest_marker("world_sizes")
    return usable_world_sizes(sizes, *(marker.args if marker else ()), **(marker.kwargs if marker else {}))


def usable_world_sizes(requested: Sequence[int], fewest: int = 1, also: Sequence[int] = ()) -> list[int]:
    """Return the requested sizes that a test can use and the sizes in `also`, or `fewest` if there are none."""
    return sorted({*also, *(size for size in requested if size >= fewest)}) or [fewest]


def devices(config: pytest.Config) -> list[str]:
    if config.option.device != "auto":
        names: list[str] = config.option.device.split(",")
        # The first backward starts autograd's threads, and a device that is registered later has none.
        for name in names:
            is_usable(name)
        return names
    if (named := load_library(config.option.subject).claims_file.device) and is_usable(named.type):
        return [named.type]
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


@pytest.fixture(scope="session")
def subject(request: pytest.FixtureRequest) -> Library:
    """The library that is judged."""
    return load_library(request.config.option.subject)


@pytest.fixture(scope="session")
def reference() -> Library:
    """The installed torch."""
    return load_library("torch")


@pytest.fixture(scope="session")
def compare(reference: Library, subject: Library) -> Compare:
    return Compare(reference, subject)


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    if not is_usable(request.param):
        unavailable(f"{NO_DEVICE} {request.param}")
    return request.param


@pytest.fixture
def deviation(request: pytest.FixtureRequest, subject: Library, reference: Library) -> DeviationJudge:
    """Return the judge of the deviation that the test's `deviation` mark names."""
    row = all_deviations()[request.node.get_closest_marker("deviation").args[0]]
    is_extension = clause_of(request.node) in claimed_extensions(subject.spec)
    device = request.getfixturevalue("device") if "device" in request.fixturenames else None
    asks_torch = request.node.stash.get(_ASKS_TORCH, True)
    request.node.deviation_judge = DeviationJudge(subject, reference, row, is_extension, device, asks_torch)
    return request.node.deviation_judge


@pytest.fixture(autouse=True)
def _check_torch_state() -> Generator[None]:
    """Restore torch's global state after each test, and fail a test that has changed it."""
    before = global_state.read(global_state.EVERYTHING)
    seeding.begin()
    yield
    changed = global_state.put_back(global_state.EVERYTHING, before)
    torch.clear_autocast_cache()
    assert not changed, f"torch's global state was changed (before, after): {changed}"
