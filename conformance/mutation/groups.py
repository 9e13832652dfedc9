"""Groups of files: whose source is mutated, whose clauses ask about it, and how a sample is drawn."""

from __future__ import annotations

import ast
import difflib
import fnmatch
import functools
import hashlib
import importlib.util
import inspect
import itertools
import random
import textwrap
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from conformance.exact_copy.copying import ROOT, copied, source_of
from conformance.judge.clauses import all_clauses
from conformance.mutation.operators import OPERATORS, MutationSite, mutate, sites

# What torch's FSDP calls to wait where its device is the CPU, by how the call ends.
_WAITS_OF_THE_CPU: dict[str, Callable[..., Any]] = {
    "_device_handle.synchronize": torch.cpu.synchronize,
    "event.synchronize": torch.cpu.Event.synchronize,
    ".wait_stream": torch.cpu.Stream.wait_stream,
    ".wait_event": torch.cpu.Stream.wait_event,
}

MUTANT, LINES = "mutant:", "lines:all"  # after the `+` of a subject's spec


@dataclass(frozen=True)
class MutationGroup:
    name: str
    modules: tuple[
        str, ...
    ]  # patterns of paths below the package; what an earlier group has is not in a later one
    areas: tuple[str, ...]  # patterns of the areas whose tests run


GROUPS = (
    MutationGroup(
        "scaler",
        (
            "amp.grad_scaler",
            "*.amp.grad_scaler",
            "distributed.fsdp.sharded_grad_scaler",
            # Of impl:
            "amp._aware_optimizers",
            "amp._conditional_step",
            "amp._fused_step",
            "amp._gradients",
            "amp._loss_scale",
            "amp._opt_state",
        ),
        ("*.grad_scaler", "*.sharded_grad_scaler"),
    ),
    MutationGroup("autocast", ("amp.*", "*.amp.*"), ("*.autocast_mode",)),
    MutationGroup("clipping", ("nn.utils.clip_grad",), ("nn.*",)),
    MutationGroup(
        "FSDP state dicts",
        tuple(
            f"distributed.fsdp._{part}*"
            for part in ("state_dict", "optim_utils", "shard_utils", "fsdp_extensions")
        ),
        ("distributed.*",),
    ),
    MutationGroup("FSDP runtime", ("distributed.fsdp.*",), ("distributed.*",)),
    MutationGroup("OptimizerVariable", ("dynamo", "dynamo.*"), ("dynamo.*",)),
)


@dataclass(frozen=True)
class Mutant:
    group: MutationGroup
    module: str  # its path below the package
    site: MutationSite

    @property
    def fault_id(self) -> str:
        return f"{MUTANT}{self.module}:{self.site.operator}:{self.site.number}"


def clauses_of(group: MutationGroup) -> frozenset[str]:
    return frozenset(
        clause.id
        for clause in all_clauses().values()
        if any(fnmatch.fnmatch(clause.area, pattern) for pattern in group.areas)
    )


def modules_of(group: MutationGroup, package: str) -> list[str]:
    """Those of one group, by their paths below the package."""
    taken = GROUPS[: GROUPS.index(group)]

    def is_of(module: str, group: MutationGroup) -> bool:
        return any(fnmatch.fnmatch(module, pattern) for pattern in group.modules)

    return [
        module
        for module in _modules(package)
        if is_of(module, group) and not any(is_of(module, earlier) for earlier in taken)
    ]


@functools.cache
def _modules(package: str) -> tuple[str, ...]:
    if package == ROOT:
        return tuple(sorted(copied()))
    files = (file.relative_to(_folder(package)).with_suffix("") for file in source_files(package))
    return tuple(sorted(".".join(file.parts) for file in files if file.name != "__init__"))


def source_files(package: str) -> list[Path]:
    """The modules of a package, without its tests."""
    folder = _folder(package)
    return [file for file in sorted(folder.rglob("*.py")) if "tests" not in file.relative_to(folder).parts]


def file_of(package: str, module: str) -> Path:
    """Found without importing anything of a package that is to be executed otherwise."""
    return (
        source_of(module)
        if package == ROOT
        else _folder(package).joinpath(*module.split(".")).with_suffix(".py")
    )


def _folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise LookupError(f"{package!r} is no package whose source can be changed; {ROOT} and impl are")
    return Path(spec.submodule_search_locations[0])


def draw(group: MutationGroup, package: str, sample: int, seed: int) -> list[Mutant]:
    """A sample of the mutants of a group's files: the operators take turns, each draws from all that it makes."""
    chance = random.Random(f"{seed} {group.name}")
    made: dict[str, list[Mutant]] = {operator: [] for operator in OPERATORS}
    for module in modules_of(group, package):
        for site in sites_in(package, module):
            made[site.operator].append(Mutant(group, module, site))
    turns = itertools.zip_longest(*(chance.sample(mutants, len(mutants)) for mutants in made.values()))
    return list(itertools.islice((mutant for turn in turns for mutant in turn if mutant), sample))


def mutant_called(package: str, name: str) -> Mutant:
    """Of `amp.grad_scaler:drop_wait:0`.

    Raises:
        LookupError: none is called so.
    """
    for group in GROUPS:
        for module in modules_of(group, package):
            if name.startswith(f"{module}:"):
                for site in sites_in(package, module):
                    if Mutant(group, module, site).fault_id == f"{MUTANT}{name}":
                        return Mutant(group, module, site)
    raise LookupError(f"no mutant of {package} is called {name!r}")


def parsed(package: str, module: str) -> ast.Module:
    return ast.parse(file_of(package, module).read_text(encoding="utf-8"))


@functools.cache
def sites_in(package: str, module: str) -> list[MutationSite]:
    return sites(parsed(package, module))


@functools.cache
def _unparsed(package: str, module: str) -> list[str]:
    return ast.unparse(parsed(package, module)).splitlines()


def diff(package: str, mutant: Mutant) -> list[str]:
    """What the mistake changes: its lines with - and +, as Python writes the tree, and three around them."""
    after = parsed(package, mutant.module)
    mutate(after, mutant.site.operator, mutant.site.number)
    lines = difflib.unified_diff(
        _unparsed(package, mutant.module), ast.unparse(after).splitlines(), lineterm="", n=3
    )
    return [line for line in lines if not line.startswith(("---", "+++", "@@"))]


def key_of(package: str, mutant: Mutant) -> str:
    """A name that lasts while the lines that it changes stay: by it a proof is found in `equivalent.toml`."""
    changed = "\n".join(line for line in diff(package, mutant) if line[0] in "+-")
    digest = hashlib.sha256(changed.encode()).hexdigest()[:12]
    return f"{mutant.module}:{mutant.site.function}:{mutant.site.operator}:{digest}"


def proof_of(package: str, mutant: Mutant) -> str:
    """Why it does the same as what it was made of; empty if nobody has proven that."""
    return _proofs(package).get(key_of(package, mutant), "")


def is_idle(package: str, mutant: Mutant) -> bool:
    """Whether it leaves out a wait that does nothing where torch's FSDP runs on the CPU, as it does here."""
    if package != ROOT or mutant.site.operator != "drop_wait" or torch.accelerator.is_available():
        return False
    [wait] = (line[1:].strip() for line in diff(package, mutant) if line[0] == "-")
    called = ast.unparse(ast.parse(wait, mode="eval").body.func)  # type: ignore[attr-defined]
    return any(called.endswith(end) and is_empty(of) for end, of in _WAITS_OF_THE_CPU.items())


def is_empty(function: Callable[..., Any]) -> bool:
    """Whether its body is a docstring, `pass` or both."""
    [tree] = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    return all(
        isinstance(statement, ast.Pass)
        or (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))
        for statement in tree.body  # type: ignore[attr-defined]
    )


def stale_proofs(package: str) -> list[str]:
    """The names of the rows that no mutant of the installed source has."""
    found = []
    for key in _proofs(package):
        module, function, operator, _ = key.split(":")
        known = module in _modules(package)
        made = sites_in(package, module) if known else []
        like = [site for site in made if (site.function, site.operator) == (function, operator)]
        if key not in (key_of(package, Mutant(GROUPS[0], module, site)) for site in like):
            found.append(key)
    return found


def _proofs(package: str) -> dict[str, str]:
    proofs = tomllib.loads(Path(__file__).with_name("equivalent.toml").read_text(encoding="utf-8"))
    return proofs.get(package, {})
