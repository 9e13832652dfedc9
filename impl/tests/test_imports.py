"""Every module of `impl` can be imported first, and Dynamo knows our regions in each order of imports."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from conformance.strength.mutation.groups import source_files

ROOT = Path(__file__).parents[2]
DEADLINE_S = 400  # a fresh Dynamo takes tens of seconds on busy cores

# Each child is a fork that has imported torch but nothing of ours: as good as a new interpreter, in a fraction of its
# time. Modules of torch that take a second to import are imported before the fork, except for Dynamo.
EACH_FIRST = """
import importlib, os, sys, torch.distributed.checkpoint, torch.distributed.fsdp

for name in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        try:
            importlib.import_module(name)
        except BaseException as error:
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""

# Compile a region without a graph break, for instances created before anything was traced.
AFTERWARDS = """
import torch, impl.amp, impl.cpu.amp, warnings
warnings.simplefilter("ignore")
for made in (impl.amp.autocast("cpu"), impl.cpu.amp.autocast(), type("Derived", (impl.amp.autocast,), {})("cpu")):
    def run(x):
        with made:
            return x @ x
    graphs = []
    def backend(module, inputs):
        graphs.append([str(node.target) for node in module.graph.nodes if "autocast" in str(node.target)])
        return module.forward
    torch._dynamo.reset()
    assert torch.compile(run, fullgraph=True, backend=backend)(torch.ones(2, 2)).dtype == torch.bfloat16
    assert len(graphs) == 1 and len(graphs[0]) == 2, graphs
print("known")
"""

ORDERS = {
    "ours first": "import impl.amp, torch._dynamo",
    "Dynamo first": "import torch._dynamo, impl.amp",
    "our words for Dynamo first": "import impl.dynamo.autocast",
    "Dynamo never by name": "import impl.amp",
    "Dynamo fails once": """
import sys, impl.amp
sys.modules["torch._dynamo.aot_compile"] = None
try:
    import torch._dynamo
    raise SystemExit("it did not fail")
except ImportError:
    del sys.modules["torch._dynamo.aot_compile"]
""",
    "ours while another thread imports Dynamo": """
import sys, threading, torch
thread = threading.Thread(target=lambda: __import__("torch._dynamo"))
thread.start()
while thread.is_alive() and "torch._dynamo" not in sys.modules:
    pass
import impl.amp
thread.join()
""",
    "both reloaded": """
import importlib, torch._dynamo, impl.amp.autocast_mode
importlib.reload(torch._dynamo)
importlib.reload(impl.amp.autocast_mode)
importlib.reload(impl.amp)
import impl.cpu.amp
""",
}


def output_of(code: str, *arguments: str) -> str:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=environ,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    return run.stdout + run.stderr[-2000:]


def modules() -> list[str]:
    has_triton = importlib.util.find_spec("triton") is not None
    paths = [file.relative_to(ROOT).with_suffix("") for file in source_files("impl")]
    names = [".".join(path.parts).removesuffix(".__init__") for path in paths]
    return [name for name in names if has_triton or "._triton" not in name]


@pytest.mark.profile("full")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.deadline(DEADLINE_S + 20)
def test_each_module_may_come_first() -> None:
    assert len(modules()) > 10
    assert output_of(EACH_FIRST, *modules()) == ""


IN_QUICK = ("ours first", "Dynamo never by name", "Dynamo fails once")


@pytest.mark.deadline(DEADLINE_S + 20)
@pytest.mark.parametrize(
    "order",
    [
        order if order in IN_QUICK else pytest.param(order, marks=pytest.mark.profile("full"))
        for order in ORDERS
    ],
)
def test_dynamo_knows_our_regions(order: str) -> None:
    assert output_of(ORDERS[order] + AFTERWARDS) == "known\n"


def test_versions_of_torch_are_compared_with_their_first_development_build() -> None:
    """The pre-releases 2.15.0.dev20260901, 2.15.0a0 and 2.15.0rc1 behave like 2.15, but sort before 2.15."""
    text = "\n".join(file.read_text() for file in (ROOT / "impl").rglob("*.py"))
    compared = re.findall(r"torch\.__version__ [<>=]+ (\S+\d\S*)", text)
    assert compared
    assert all(version.strip('":,').endswith(".dev0") for version in compared), compared
