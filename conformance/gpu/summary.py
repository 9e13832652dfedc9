"""The bundle for a reader: summary.md, whose every number is in report.json too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from conformance.gpu.first_page import first_page
from conformance.gpu.markdown import MOST_NAMED, cell, first_line, named, table
from conformance.gpu.phases import LEFT_OUT


def summary(report: dict[str, Any]) -> str:
    parts = [_verdict(report), _host(report), first_page(report), _phases(report)]
    for name, draw in _SECTIONS.items():
        rows = report["phases"].get(name, {}).get("rows", [])
        if rows:
            parts.append(draw(rows))
    return "\n\n".join(parts) + "\n"


def _verdict(report: dict[str, Any]) -> str:
    lines = [f"# {report['verdict'].upper()}: {report['subject']} on {report['device']}", ""]
    lines += [f"- {cell(reason)}" for reason in report["reasons"]]
    lines += [f"- not shown: {cell(reason)}" for reason in report["not_shown"]]
    left_out = [name for name, phase in report["phases"].items() if phase["why"] == LEFT_OUT]
    if left_out:
        lines.append(f"- only a part was asked for, without {', '.join(left_out)}")
    if report["tests_asked_for"] != "conformance":
        lines.append(f"- of the tests, only `{report['tests_asked_for']}` were asked for")
    changed = report["changed_since_commit"]
    where = f"commit {report['commit'] or 'unknown (the files are listed in report.json)'}"
    lines.append(f"- {where}" + (f", with {len(changed)} files changed: {named(changed)}" if changed else ""))
    lines.append(
        f"- {report['began']}, {report['seconds']:.0f} of {report['budget_s']:.0f} s; `{report['options']}`"
    )
    return "\n".join(lines)


def _host(report: dict[str, Any]) -> str:
    host = report["host"]
    if not host:
        return "## Host\n\nnot known"
    environment = host["environment"]
    packages = [f"{name} {version}" for name, version in environment["packages"].items()]
    lines = [
        f"- {environment['system']}, Python {environment['python']}, CUDA {environment['cuda']}, "
        f"driver {host['machine']['driver']}",
        f"- {environment['processor']}, {environment['cores']} cores, {host['machine']['ram']}",
        f"- {', '.join(packages)}",
    ]
    lines += [
        f"- {gpu['name']}, {gpu['capability']}, {gpu['memory_gib']} GiB, {gpu['multiprocessors']} multiprocessors; "
        f"cuDNN {host['cudnn']}, NCCL {host['nccl']}"
        for gpu in host["gpus"]
    ]
    return "\n".join(["## Host", "", *lines])


def _phases(report: dict[str, Any]) -> str:
    rows = [
        [name, f"{phase['seconds']:.0f}", first_line(phase["why"]) or "whole", named(phase["not_run"])]
        for name, phase in report["phases"].items()
    ]
    return "## Phases\n\n" + table(["phase", "s", "ended", "not run"], rows)


def _unavailable(rows: Sequence[dict[str, Any]]) -> str:
    why = Counter(first_line(row.get("reason", "")) for row in rows if row["outcome"] == "unavailable")
    lines = [[str(count), reason] for reason, count in why.most_common(MOST_NAMED)]
    return "## Unavailable tests\n\n" + (table(["tests", "reason"], lines) if lines else "none")


def _probe(rows: Sequence[dict[str, Any]]) -> str:
    groups = sorted({(row["device"], row["backend"], row["world_size"]) for row in rows})
    row_of = {(row["operation"], row["device"], row["backend"], row["world_size"]): row for row in rows}
    operations = list(dict.fromkeys(row["operation"] for row in rows))
    lines = [
        [operation, *(_probed(row_of.get((operation, *group))) for group in groups)]
        for operation in operations
    ]
    heads = ["", *(f"{world_size} ranks, {backend}, {device}" for device, backend, world_size in groups)]
    return "## Between ranks\n\n" + table(heads, lines)


def _probed(row: dict[str, Any] | None) -> str:
    return "" if row is None else " ".join(filter(None, [row["outcome"], first_line(row["says"])]))


def _speed(rows: Sequence[dict[str, Any]]) -> str:
    ratios = [row for row in rows if "ratio" in row]
    lines = [
        [row["name"], f"{row['ratio']:.3f}", f"{row['low']:.3f} to {row['high']:.3f}", str(row["pairs"])]
        for row in ratios
    ]
    lines += [
        [row["name"], row["outcome"], cell(row["says"]), ""] for row in rows if row["outcome"] == "failed"
    ]
    timed = sum(row["outcome"] == "measured" for row in rows) - len(ratios)
    return (
        f"## Speed\n\nSubject ÷ torch, lower is better; {timed} absolute times are in report.json.\n\n"
        + table(["case", "ratio", "95% interval", "pairs"], lines)
    )


def _plain(title: str) -> Any:
    def draw(rows: Sequence[dict[str, Any]]) -> str:
        return f"## {title}\n\n" + table(
            ["", "", ""], [[row["name"], row["outcome"], cell(row["says"])] for row in rows]
        )

    return draw


def _counted(title: str) -> Any:
    """Return a section that counts the rows that agree and lists the others, those with the same text together."""

    def draw(rows: Sequence[dict[str, Any]]) -> str:
        others: dict[tuple[str, str], list[str]] = {}
        for row in rows:
            if row["outcome"] != "agrees":
                others.setdefault((row["outcome"], row["says"]), []).append(row["name"])
        agreeing = len(rows) - sum(map(len, others.values()))
        counted = f"## {title}\n\n{agreeing} of {len(rows)} agree."
        lines = [[named(names), outcome, says] for (outcome, says), names in others.items()]
        return f"{counted}\n\n{table(['', '', ''], lines)}" if lines else counted

    return draw


_SECTIONS = {
    "judge": _unavailable,
    "kernels": _plain("Kernels"),
    "waits": _counted("Calls that must not synchronise"),
    "values": _plain("Values of ten steps beside torch's"),
    "graphs": _plain("CUDA graphs"),
    "training": _plain("Training"),
    "launches": _plain("What one call launches"),
    "bandwidth": _plain("Bandwidth"),
    "fake": _plain("Sharded steps without communication"),
    "steps": _plain("Steps beside torch's"),
    "large": _plain("Large steps beside torch's"),
    "speed": _speed,
    "probe": _probe,
}
