"""Property tests that hold any implementation of torch's mixed-precision stack to torch's own behaviour.

Words used throughout:
    subject    what is judged: `impl`, `torch` itself, or any importable package that mirrors torch's paths
    reference  the torch that is installed
    library    either of them, seen through one door (`conformance.judge.library`)
    clause     one behaviour with a stable id and one sentence; every test says which clause it asks about
    outcome    everything a call did: its result, what it changed, what it raised, what it warned
    deviation  a row that says where `impl` leaves torch's behaviour on purpose, and why
"""
