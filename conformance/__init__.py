"""Property tests that compare any implementation of torch's mixed-precision and sharded-training stack with torch.

Terms:
    subject    the package that is judged: `impl`, `torch` itself, or any importable package that has torch's paths
    reference  the installed torch
    library    the subject or the reference, both accessed by `conformance.judge.library`
    clause     one behaviour with a stable id and one sentence; every test names its clause
    outcome    the observable effects of a call: result, changed state, exception and warnings
    deviation  a behaviour in which `impl` differs from torch on purpose, with the reason
"""

from conformance.judge import providers

providers.register("faults", "conformance.strength.faults.injection")
providers.register("simulator", "conformance.simulator")
