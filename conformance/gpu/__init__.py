"""Phases of `ci/gpu`: judge and time the subject on a GPU host within minutes, and write one small bundle.

Nothing is installed and no network is used. Each phase is a separate process (`phases`). It gets a `PhaseTask` and
a time limit, and writes a line for each planned row and each result (`phase_rows`). A phase that is cut or
dies leaves its results, and the names of its missing rows are known. The next phases get the time that a phase leaves.
`bundle` writes the files, `first_page` the answers at the top of the summary. Later, `ci/bench --add` adds the timings
to the repository on another host.
"""
