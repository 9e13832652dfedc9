"""What `ci/gpu` does: judge and time on a host with a GPU, as it is, within minutes, into one small bundle.

Nothing is installed and no network reached. Each phase is a process of its own (`phases`), which is told its
`PhaseTask` and how much time it has, and which writes a line for each thing it plans and each thing it finds
(`phase_rows`). So a phase that is cut, or that dies, leaves what it had found, and what it did not come to is known by
name. The time that a phase does not use is the next ones'. `bundle` makes the files; `ci/bench --add` takes the
timings among them into the repository, elsewhere and later.
"""
