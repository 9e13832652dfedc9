"""The pytest side of the judge: options, profiles, fixtures, deadlines, and the guard of torch's global state."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import gc
import signal
from collections.abc import Generator, Sequence
from pathlib import Path

import hypothesis
import pytest
import torch

from conformance.judge import claims_file, global_state, reference_limits, seeding, trial
from conformance.judge.claims import NotClaimed, claimed_extensions, exposes
from conformance.judge.clauses import AREAS, HERE, all_clauses, clause_of
from conformance.judge.comparing import Compare
from conformance.judge.deadlines import MOST_RESTARTS, Deadlines
from conformance.judge.deviations import DeviationJudge
from conformance.judge.environment import is_usable, quieten_triton
from conformance.judge.errors import Hang, stop_by_hand
from conformance.judge.expectations import Expectations, unshrunk
from conformance.judge.judgement import unavailable
from conformance.judge.library import Library, NotProvided, load_library, package_of
from conformance.judge.notes import Notes
from conformance.judge.options import PROFILES
from conformance.judge.results import BAD_INPUT, NO_DEVICE, Recorder, WorkerRecorder
from conformance.judge.rows import all_deviations, all_reference_limits

_EXAMPLES = {"quick": 15, "full": 60, "deep": 1000}
_SELFTESTS = HERE / "selftests"
_PHASES = (hypothesis.Phase.explicit, hypothesis.Phase.generate, hypothesis.Phase.shrink)


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
    group.addoption(
        "--deadline",
        type=float,
        default=None,
        metavar="SECONDS",
        help="limit for a test that names none (default: by the profile)",
    )
    group.addoption(
        "--claims",
        default=None,
        metavar="FILE",
        help="the subject's claims file (default: conformance_claims.toml beside its __init__, if there)",
    )
    group.addoption(
        "--today",
        default=None,
        metavar="DATE",
        type=datetime.date.fromisoformat,
        help="the day by which expectations expire (default: today)",
    )
    group.addoption(
        "--clauses",
        default="",
        help="comma-separated clauses, or their beginnings: tests of others are left out",
    )
    group.addoption("--report", default=None, metavar="DIR", help="write report.json there")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if getattr(config.option, "maxworkerrestart", "") is None:  # before pytest-xdist reads it
        config.option.maxworkerrestart = str(MOST_RESTARTS)
    for line in (
        "clause(id): the clause that a test asks about",
        "deviation(id): the row of deviations.toml that a test asserts on both sides",
        "reference_limit(id): the row of reference_limits.toml that a test asserts of torch",
        "profile(name): the smallest profile that runs the test (quick unless said)",
        "deadline(seconds): when the test counts as hanging",
        "world_sizes(fewest, also): of `world_size`, the smallest at which the test says anything (1 unless said), and "
        "those at which it runs whatever is asked for",
    ):
        config.addinivalue_line("markers", line)
    _set_hypothesis_up(config)
    notes = Notes.of(config)
    deadlines = None if config.getoption("dist", "no") != "no" else Deadlines(config, notes)
    learned = _load_subject(config, deadlines)
    _expectations(config).keep(config)
    config.pluginmanager.register(reference_limits, "conformance-reference-limits")
    if deadlines is not None:
        config.pluginmanager.register(deadlines, "conformance-deadlines")
        config.pluginmanager.register(WorkerRecorder(notes), "conformance-worker-recorder")
    if not hasattr(config, "workerinput"):
        signal.signal(signal.SIGTERM, stop_by_hand)
        config.pluginmanager.register(Recorder(config, notes, learned), "conformance-recorder")

    quieten_triton()


def _load_subject(config: pytest.Config, deadlines: Deadlines | None) -> trial.Learned:
    """Import the subject, and learn what it claims.

    Where workers run the tests it is imported on trial only, so that nothing it does, at its exit for one, reaches
    the process that says yes or no.
    """
    spec, devices = config.option.subject, config.option.device
    if config.option.claims is not None:
        claims_file.give(package_of(spec), Path(config.option.claims))
    try:
        if deadlines is None:
            return trial.learn_on_trial(spec, devices)
        is_worker = hasattr(config, "workerinput")
        with deadlines.of_import():
            complaints = trial.load(spec)
            return trial.Learned(None) if is_worker else trial.learn(spec, complaints, devices)
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
            deadline=None,  # the whole test has one: see `deadlines`
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
        seeding.set_run_seed(config.option.seed)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept = [item for item in items if _is_selected(config, item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


def pytest_collection_finish() -> None:
    gc.freeze()  # what is imported stays: no collection, of which tests and pytest's end ask, looks at it again
    atexit.register(gc.unfreeze)  # but Python's own at the end, without which extensions tell of leaks


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test that names no clause, or one that does not exist, fails before it asks anything.

    One of an extension that the subject does not claim ends before any fixture is made.
    """
    asked, spec = clause_of(item), item.config.option.subject
    found = all_clauses().get(asked)
    if not asked:
        if _folder(item) in AREAS:
            pytest.fail(f"{item.nodeid} judges a subject but names no clause; mark it with @clause(id)")
    elif found is None:
        pytest.fail(f"{item.nodeid} names the clause {asked!r}, which no TOML file has")
    elif not found.holds_here:
        unavailable(f"its clause is of other versions than torch {torch.__version__}")
    elif found.level == "extension" and asked not in claimed_extensions(spec):
        raise NotClaimed(f"{spec} does not claim the extension {asked}")
    row = item.get_closest_marker("deviation")
    if row is not None and row.args[0] not in all_deviations():
        pytest.fail(f"{item.nodeid} names the deviation {row.args[0]!r}, which deviations.toml lacks")
    limit = item.get_closest_marker("reference_limit")
    if limit is not None and limit.args[0] not in all_reference_limits():
        pytest.fail(f"{item.nodeid} names the limit {limit.args[0]!r}, which reference_limits.toml lacks")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    is_expected = Expectations.of(item.config).find(item.nodeid, clause_of(item)) is not None
    with unshrunk(getattr(item, "obj", None)) if is_expected else contextlib.nullcontext():
        return (yield)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The suite's own tests judge no subject: they are collected only where they are named."""
    named = (Path(config.invocation_params.dir, word.partition("::")[0]) for word in config.args)
    is_own = collection_path == _SELFTESTS
    return True if is_own and not any(path.is_relative_to(_SELFTESTS) for path in named) else None


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> None:
    """A test of a clause that is about names which the subject lacks, all of them, ends before it does any work.

    Also one that asks torch alone: it says nothing of the subject.
    """
    if asked := clause_of(pyfuncitem):
        names, library = all_clauses()[asked].names, load_library(pyfuncitem.config.option.subject)
        if names and not any(exposes(library, name) for name in names):
            raise NotProvided(library.spec, names[0])


def _folder(item: pytest.Item) -> str:
    return item.path.relative_to(HERE).parts[0] if item.path.is_relative_to(HERE) else ""


def _is_selected(config: pytest.Config, item: pytest.Item) -> bool:
    smallest = item.get_closest_marker("profile")
    in_profile = smallest is None or PROFILES.index(smallest.args[0]) <= PROFILES.index(config.option.profile)
    return (
        in_profile
        and _is_asked(item, config.option.clauses)
        and _concerns(item, package_of(config.option.subject))
    )


def _is_asked(item: pytest.Item, chosen: str) -> bool:
    """Whether its clause is among those that were chosen."""
    clause = all_clauses().get(clause_of(item))
    return not chosen or (clause is not None and clause.is_asked_by(chosen.split(",")))


def _concerns(item: pytest.Item, package: str) -> bool:
    """Whether a test is about the subject: the repository's own parts are asked about with `impl` alone.

    What trains over a subject, and with libraries over it, does so over torch too, to compare.
    """
    if not item.path.is_relative_to(HERE.parent):  # somebody else's
        return True
    folder = _folder(item)
    trains = folder in ("clients", "training") and package == "torch"
    return package == "impl" or trains or folder in (*AREAS, "test_surface.py")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "device" in metafunc.fixturenames:
        metafunc.parametrize("device", devices(metafunc.config), indirect=True, scope="session")
    if "world_size" in metafunc.fixturenames:
        metafunc.parametrize("world_size", _world_sizes(metafunc), scope="session")


def _world_sizes(metafunc: pytest.Metafunc) -> list[int]:
    asked = [int(size) for size in metafunc.config.option.world_sizes.split(",")]
    marker = metafunc.definition.get_closest_marker("world_sizes")
    return usable_world_sizes(asked, *(marker.args if marker else ()), **(marker.kwargs if marker else {}))


def usable_world_sizes(asked: Sequence[int], fewest: int = 1, also: Sequence[int] = ()) -> list[int]:
    """Those asked for that a test can use, and those that it uses anyway; the fewest, if there are none."""
    return sorted({*also, *(size for size in asked if size >= fewest)}) or [fewest]


def devices(config: pytest.Config) -> list[str]:
    if config.option.device != "auto":
        return config.option.device.split(",")
    if (named := load_library(config.option.subject).claims_file.device) and is_usable(named.type):
        return [named.type]
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
def compare(reference: Library, subject: Library) -> Compare:
    return Compare(reference, subject)


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    if not is_usable(request.param):
        unavailable(f"{NO_DEVICE} {request.param}")
    return request.param


@pytest.fixture
def deviation(request: pytest.FixtureRequest, subject: Library, reference: Library) -> DeviationJudge:
    """Judges a probe against the row that the test's `deviation` mark names."""
    row = all_deviations()[request.node.get_closest_marker("deviation").args[0]]
    is_extension = clause_of(request.node) in claimed_extensions(subject.spec)
    device = request.getfixturevalue("device") if "device" in request.fixturenames else None
    request.node.deviation_judge = DeviationJudge(subject, reference, row, is_extension, device)
    return request.node.deviation_judge


@pytest.fixture(autouse=True)
def _torch_state_is_kept() -> Generator[None]:
    """Fails a test after which torch's global state is not what it was, and puts it back."""
    before = global_state.read(global_state.EVERYTHING)
    seeding.begin()
    yield
    changed = global_state.put_back(global_state.EVERYTHING, before)
    torch.clear_autocast_cache()
    assert not changed, f"torch's global state was changed (before, after): {changed}"
