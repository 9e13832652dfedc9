"""What `ci/gpu` does: judge and time on a host with a GPU, as it is, within minutes, into one small bundle.

Nothing is installed and no network is reached. Each phase is a process of its own (`phases`). It gets a `PhaseTask` and
a limit of time, and writes a line for each thing that it plans and that it finds (`phase_rows`). A phase that is cut or
dies leaves what it had found, and what it did not reach is known by name. The time that a phase leaves goes to the next
ones. `bundle` writes the files, `first_page` the answers at the top of the summary. `ci/bench --add` adds the timings
to the repository, elsewhere and later.
"""
