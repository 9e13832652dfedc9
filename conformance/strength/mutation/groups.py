"""Groups of files to mutate, with the areas whose tests judge them, and the drawing of samples."""

from __future__ import annotations

import ast
import difflib
import fnmatch
import functools
import hashlib
import importlib.util
import itertools
import random
import tomllib
from dataclasses import dataclass
from pathlib import Path

import torch

from conformance.exact_copy.copying import ROOT, copied_modules, source_of
from conformance.judge.clauses import all_clauses
from conformance.strength.mutation.operators import OPERATORS, MutationSite, mutants, replace_node

# Prefix of mutants, and the name of source that records its lines, after the `+` of a subject's spec.
MUTANT, LINES = "mutant:", "lines:all"


@dataclass(frozen=True)
class MutationGroup:
    name: str
    # Patterns of module paths below the package. Modules of an earlier group are left out.
    modules: tuple[str, ...]
    areas: tuple[str, ...]  # patterns of areas whose tests run


GROUPS = (
    MutationGroup(
        "scaler",
        (
            "amp.grad_scaler",
            "*.amp.grad_scaler",
            "distributed.fsdp.sharded_grad_scaler",
            # Modules of impl only:
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
            f"distributed.fsdp._{name}*"
            for name in ("state_dict", "optim_utils", "shard_utils", "fsdp_extensions")
        ),
        ("distributed.*",),
    ),
    MutationGroup("FSDP runtime", ("distributed.fsdp.*",), ("distributed.*",)),
    MutationGroup("OptimizerVariable", ("dynamo", "dynamo.*"), ("dynamo.*",)),
)


@dataclass(frozen=True)
class Mutant:
    group: MutationGroup
    module: str  # path below the package
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
    """Return the modules of a group as paths below the package."""
    earlier_groups = GROUPS[: GROUPS.index(group)]

    def is_of(module: str, group: MutationGroup) -> bool:
        return any(fnmatch.fnmatch(module, pattern) for pattern in group.modules)

    return [
        module
        for module in _modules(package)
        if is_of(module, group) and not any(is_of(module, earlier) for earlier in earlier_groups)
    ]


@functools.cache
def _modules(package: str) -> tuple[str, ...]:
    if package == ROOT:
        return tuple(sorted(copied_modules()))
    files = (file.relative_to(_folder(package)).with_suffix("") for file in source_files(package))
    return tuple(sorted(".".join(file.parts) for file in files if file.name != "__init__"))


def source_files(package: str) -> list[Path]:
    """Return the files of a package without its tests."""
    folder = _folder(package)
    return [file for file in sorted(folder.rglob("*.py")) if "tests" not in file.relative_to(folder).parts]


def file_of(package: str, module: str) -> Path:
    """Return the file of a module without importing the package, whose source will be changed."""
    return (
        source_of(module)
        if package == ROOT
        else _folder(package).joinpath(*module.split(".")).with_suffix(".py")
    )


def _folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise LookupError(f"the source of {package!r} cannot be changed; expected impl or {ROOT}")
    return Path(spec.submodule_search_locations[0])


def draw(group: MutationGroup, package: str, sample: int, seed: int) -> list[Mutant]:
    """Return a random sample of a group's mutants, from each operator in turn.

    Functions of `torch.cpu` that wait for streams and events are empty, so that no test can miss their calls in torch.
    """
    chance = random.Random(f"{seed} {group.name}")
    by_operator: dict[str, list[Mutant]] = {operator: [] for operator in OPERATORS}
    for module in modules_of(group, package):
        for site in sites_in(package, module):
            by_operator[site.operator].append(Mutant(group, module, site))
    if package == ROOT and not torch.accelerator.is_available():
        by_operator["drop_device_wait"].clear()
    turns = itertools.zip_longest(*(chance.sample(mutants, len(mutants)) for mutants in by_operator.values()))
    return list(itertools.islice((mutant for turn in turns for mutant in turn if mutant), sample))


def find_mutant(package: str, name: str) -> Mutant:
    """Return the mutant with a name such as `amp.grad_scaler:return_early:0`.

    Raises:
        ValueError: there is none.
    """
    for group in GROUPS:
        for module in modules_of(group, package):
            if name.startswith(f"{module}:"):
                for site in sites_in(package, module):
                    if Mutant(group, module, site).fault_id == f"{MUTANT}{name}":
                        return Mutant(group, module, site)
    raise ValueError(
        f"{package} has no mutant {name!r}; expected a name such as amp.grad_scaler:return_early:0"
    )


def parsed(package: str, module: str) -> ast.Module:
    return ast.parse(file_of(package, module).read_text(encoding="utf-8"))


@functools.cache
def _mutants_in(package: str, module: str) -> tuple[ast.Module, dict[MutationSite, tuple[ast.AST, ast.AST]]]:
    """Return the tree of a module, and by site the node that a mutant changes and the node that replaces it."""
    tree = parsed(package, module)
    return tree, {site: (node, other) for site, node, other in mutants(tree)}


def sites_in(package: str, module: str) -> list[MutationSite]:
    return list(_mutants_in(package, module)[1])


@functools.cache
def _unparsed(package: str, module: str) -> list[str]:
    return ast.unparse(parsed(package, module)).splitlines()


def diff(package: str, mutant: Mutant) -> list[str]:
    """Return the changed lines of a mutant with - and +, as `ast.unparse` formats them, and three lines of context."""
    tree, nodes = _mutants_in(package, mutant.module)
    node, other = nodes[mutant.site]
    replace_node(tree, node, other)
    try:
        after = ast.unparse(tree).splitlines()
    finally:
        replace_node(tree, other, node)
    lines = difflib.unified_diff(_unparsed(package, mutant.module), after, lineterm="", n=3)
    return [line for line in lines if not line.startswith(("---", "+++", "@@"))]


def key_of(package: str, mutant: Mutant) -> str:
    """Return a name that stays the same as long as the changed lines do. `equivalent.toml` uses it as key."""
    changed = "\n".join(line for line in diff(package, mutant) if line[0] in "+-")
    digest = hashlib.sha256(changed.encode()).hexdigest()[:12]
    return f"{mutant.module}:{mutant.site.function}:{mutant.site.operator}:{digest}"


def equivalence_note(package: str, mutant: Mutant) -> str:
    """Return the note on why a mutant behaves the same as the original, or an empty string."""
    return _equivalence_notes(package).get(key_of(package, mutant), "")


def stale_notes(package: str) -> list[str]:
    """Return the keys of equivalence notes that belong to no mutant of the installed source."""
    stale = []
    for key in _equivalence_notes(package):
        module, function, operator, _ = key.split(":")
        module_sites = sites_in(package, module) if module in _modules(package) else []
        candidates = [site for site in module_sites if (site.function, site.operator) == (function, operator)]
        if key not in (key_of(package, Mutant(GROUPS[0], module, site)) for site in candidates):
            stale.append(key)
    return stale


def _equivalence_notes(package: str) -> dict[str, str]:
    notes = tomllib.loads(Path(__file__).with_name("equivalent.toml").read_text(encoding="utf-8"))
    return notes.get(package, {})
