"""Measures of the suite's strength: whether it detects bugs, and passes correct subjects.

    python -m conformance.strength faults             correct subjects with one injected bug each
    python -m conformance.strength mutation           small changes of source, in the exact copy of torch or in `impl`
    python -m conformance.strength false-positives    correct subjects, judged with one seed after another

Each prints a line for each result as soon as it is known, and writes all results as one table of the same form
(`results.py`) to the folder `report`, or to the file of --out. Ctrl-C ends it within seconds. The table then has what
is known until then, and is marked as incomplete. `MEASURE --help` explains the options.

Exit codes: 0 as expected, 1 not as expected, 2 not judged, 130 stopped.
"""
