"""Generator of `docs/differences.md` from `conformance/deviations.toml`: differences from torch, worst first.

`ci/check --fix` writes it, and `ci/check --only freshness` compares it.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from typing import Any

from _environment import ROOT

SOURCE = "conformance/deviations.toml"

# The first part of a deviation's name, and the API that it belongs to.
_APIS = {
    "fully_shard": "fully_shard (FSDP2)",
    "fsdp": "FullyShardedDataParallel (FSDP1) and both sharding APIs",
    "optim_state": "Optimizer state dicts of FullyShardedDataParallel",
    "sharded_grad_scaler": "ShardedGradScaler",
    "grad_scaler": "GradScaler",
    "clip_grad": "Gradient clipping",
    "autocast": "autocast",
    "optimizer_variable": "Optimizers under torch.compile",
}
# Names of `HARMS` of conformance/judge/files/rows.py in the table and in headings.
_HARMS = {
    "silent": ("Wrong results", "torch silently gives wrong results"),
    "hang": ("Hangs", "torch hangs, ends the process or loses work"),
    "error": ("Errors", "torch raises, or its error misleads"),
    "cost": ("Cost", "torch takes more memory or time, or lacks information"),
    "limit": ("Missing", "Missing in Tandem"),
}
_NAMES = re.compile(r"(?<![\w`.])([A-Za-z][\w.]*_[\w.]*\w(?:\([^()]*\)|=\w+)?|_\w+)(?!`)")
_HEAD = """\
<!-- Generated from conformance/deviations.toml by `ci/check --fix`. Do not edit. -->
# Differences from torch

Tandem has the results, errors and warnings of torch. This page lists every exception.
A test asserts both sides of each entry, so an entry cannot become stale unnoticed.
An entry with a range of torch versions, such as *torch <2.15*, is fixed in the later versions.
Another implementation may take either side and still conform.

An entry names the device types on which torch was seen to do this. *Any* means that the cause is in Python code
that no device changes. The last line of an entry says where the problem was reported, or how it was found.

{table}
"""


def page() -> str:
    deviations = tomllib.loads((ROOT / SOURCE).read_text())
    sections = [_section(api, deviations) for api in _APIS]
    unknown = sorted({name for name in deviations if name.partition(".")[0] not in _APIS})
    if unknown:
        raise ValueError(f"{SOURCE}: no API is known for {', '.join(unknown)}; name it in ci/_differences.py")
    return "\n".join([_HEAD.format(table=_table(deviations)), *sections])


def _table(deviations: Mapping[str, Any]) -> str:
    rows = [
        "| API | " + " | ".join(short for short, _ in _HARMS.values()) + " |",
        "|---" * (len(_HARMS) + 1) + "|",
    ]
    for api, title in _APIS.items():
        counts = [str(len(_entries(deviations, api, harm)) or "") for harm in _HARMS]
        rows.append(f"| [{title}](#{anchor(title)}) | {' | '.join(counts)} |")
    return "\n".join(rows)


def _section(api: str, deviations: Mapping[str, Any]) -> str:
    lines = [f"## {_APIS[api]}", ""]
    for harm, (_, title) in _HARMS.items():
        if entries := _entries(deviations, api, harm):
            lines += [f"### {title}", ""]
            lines += [line for name, deviation in entries.items() for line in _entry(name, deviation)]
    return "\n".join(lines)


def _entries(deviations: Mapping[str, Any], api: str, harm: str) -> dict[str, Any]:
    return {
        name: deviation
        for name, deviation in deviations.items()
        if name.partition(".")[0] == api and deviation["harm"] == harm
    }


def _entry(name: str, deviation: Mapping[str, Any]) -> list[str]:
    versions = ""
    if "torch" in deviation:
        versions = f"torch {deviation['torch']}, recorded {deviation['recorded']}, "
    where = f"{versions}devices: {', '.join(deviation.get('devices', ['any']))}"
    return [
        f"**{name}** ({where})",
        "",
        f"- torch: {_escaped(deviation['torch_does'])}",
        f"- Tandem: {_escaped(deviation['we_do'])}",
        f"- Why: {_escaped(deviation['why'])}",
        f"- Source: {_linked(deviation['thread'])}",
        "",
    ]


def _escaped(text: str) -> str:
    """Return the sentence with names of code in backticks, so that Markdown changes no underscore in them."""
    return _NAMES.sub(r"`\1`", text).replace("*", r"\*")


def _linked(thread: str) -> str:
    return re.sub(r"\b([\w-]+/[\w-]+)#(\d+)", r"[\1#\2](https://github.com/\1/issues/\2)", thread)


def anchor(title: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
