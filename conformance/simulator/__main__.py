"""tandem-race train.py --seeds 100: does the order of streams change what a script does?

`python -m conformance.simulator` is the same command.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path

from conformance.simulator import Hazard, Unavailable, enable
from conformance.simulator.lanes import page
from conformance.simulator.script import Difference, ScheduledRun, Script, differences, import_shared, run

USAGE_ERROR = 2


def main(arguments: list[str] | None = None) -> int:
    """Run the script under each schedule, and print which change its results. Return 1 if any does or it fails."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    split = words.index("--") if "--" in words else len(words)
    options = _parser().parse_args(words[:split])
    if not Path(options.script).is_file():
        return _refuse(f"there is no script {options.script}")
    if options.html is not None and not options.html.parent.is_dir():
        return _refuse(f"there is no folder {options.html.parent} for --html; create it first")
    try:
        enable(devices=max(options.devices, options.ranks))
    except (Unavailable, RuntimeError) as error:
        return _refuse(str(error))
    script = Script(options.script, tuple(words[split + 1 :]), options.ranks, options.timeout)
    # A replay imports it too, so that garbage is collected at the same points.
    import_shared(script)
    if options.seed is not None:
        return _replay(script, options.seed, options.html)
    # Each schedule needs memory for its ranks, and a container may have fewer CPUs than its host.
    jobs = options.jobs or min(8, max(2, len(os.sched_getaffinity(0)) // options.ranks))
    return _compare(script, range(1, options.seeds), jobs, options.html)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tandem-race",
        description="Run a script on a simulated accelerator under many orders of its streams. Report the orders that "
        "change its exit status, its output or the tensors that it saves with torch.save. The script must take its "
        "device from torch.accelerator.",
        epilog="What follows -- are the script's own arguments.",
    )
    parser.add_argument("script")
    parser.add_argument(
        "--seeds",
        type=_positive,
        default=20,
        help="schedules to try (20): 0 is the script's own order, 1 to 3 are extreme, the others are drawn",
    )
    parser.add_argument(
        "--seed", type=int, help="run only this schedule, and print its output, hazards and waits"
    )
    parser.add_argument(
        "--ranks",
        type=_positive,
        default=1,
        help="processes that run it, with the variables that torchrun sets (1)",
    )
    parser.add_argument(
        "--devices",
        type=int,
        default=1,
        help="devices that each process sees, at least one for each rank (1)",
    )
    parser.add_argument(
        "--jobs",
        type=_positive,
        help="schedules to run at the same time (default: cores divided by ranks, from 2 to 8)",
    )
    parser.add_argument("--html", type=Path, help="page to write, with a picture of each hazard")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one schedule (300)")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"got {text}, expected at least 1")
    return number


def _refuse(sentence: str) -> int:
    print(sentence, file=sys.stderr)
    return USAGE_ERROR


def _replay(script: Script, seed: int, html: Path | None) -> int:
    (course,) = run(script, [seed], jobs=1)
    sys.stdout.write(course.output)
    sys.stderr.write(course.errors)
    print(f"\nseed {seed}: exit status {course.status}")
    for wait in course.waits:
        print(f"the host waits: {wait}")
    hazards = _report_hazards(script, [course], html)
    return course.status or int(bool(hazards))


def _compare(script: Script, seeds: range, jobs: int, html: Path | None) -> int:
    reference, again = run(script, [0, 0], jobs)
    noise = differences(reference, again)
    if noise:
        kinds = ", ".join(sorted({difference.kind for difference in noise}))
        print(f"two runs of the same schedule differ, so this is not compared: {kinds}")
    if reference.digests != again.digests:
        print("two runs of the same schedule took different courses, so a seed may not replay what it found")
    ignored = {difference.kind for difference in noise}
    print(
        f"{script.path}: in its own order, exit status {reference.status}, {len(reference.saved)} tensors saved"
    )
    if reference.status:
        sys.stderr.write(reference.errors)
        print("the script failed in its own order, so no other schedule was compared with it")
        return 1
    courses = run(script, list(seeds), jobs)
    changed = {
        course.seed: [change for change in differences(reference, course) if change.kind not in ignored]
        for course in courses
    }
    changed = {seed: changes for seed, changes in changed.items() if changes}
    for seed, changes in changed.items():
        print(f"  seed {seed}{_named(seed)}: {_summary(changes)}")
    hazards = _report_hazards(script, [reference, *courses], html)
    print(
        f"{len(changed)} of {len(courses)} schedules change the result; {hazards} hazard{'' if hazards == 1 else 's'}"
    )
    if changed:
        print(f"replay one: {_command(script, next(iter(changed)))}")
    return int(bool(changed or hazards))


def _named(seed: int) -> str:
    names = {
        1: "everything as late as the host allows",
        2: "the default stream early, others late",
        3: "the default stream late, others early",
    }
    return f" ({names[seed]})" if seed in names else ""


def _summary(changes: list[Difference]) -> str:
    first, more = changes[0], len(changes) - 1
    return f"{first}{f', and {more} more' if more else ''}"


def _report_hazards(script: Script, courses: list[ScheduledRun], html: Path | None) -> int:
    """Print the hazards of all courses, each once, and draw them. Return how many there are."""
    hazards: dict[str, Hazard] = {}
    for hazard in (hazard for course in courses for hazard in course.hazards):
        hazards.setdefault(str(hazard), hazard)
    for number, text in enumerate(hazards, 1):
        print(f"hazard {number}: {text}")
    for course in courses:
        for reason in dict.fromkeys(course.unreplayable):
            print(f"seed {course.seed} is not replayable: {reason}")
    if html is not None:
        html.write_text(page(f"Hazards of {script.path}", list(hazards.values())))
        print(f"pictures: {html}")
    return len(hazards)


def _command(script: Script, seed: int) -> str:
    words = ["tandem-race", script.path, "--seed", str(seed)]
    if script.ranks > 1:
        words += ["--ranks", str(script.ranks)]
    if script.arguments:
        words += ["--", *script.arguments]
    return shlex.join(words)


if __name__ == "__main__":
    sys.exit(main())
