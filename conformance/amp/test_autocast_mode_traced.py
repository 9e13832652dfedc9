"""Autocast under torch.compile, torch.export, make_fx and torch.jit is traced like torch's own class."""

from __future__ import annotations

import linecache
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from conformance.judge.clauses import clause
from conformance.judge.comparing import Compare
from conformance.judge.deviations import DeviationJudge
from conformance.judge.library import Library
from conformance.judge.outcome import Outcome, observe
from conformance.judge.sandbox import seeding
from conformance.strategies.regions import LOW, state


class RecordedGraphs:
    """Backend of torch.compile that records the operators of each graph that compute tensors, and their dtypes.

    Nodes that set a region's state are left out: torch's own class has one, and other classes have several.
    """

    def __init__(self) -> None:
        self.seen: list[list[str]] = []

    def __call__(self, module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        self.seen.append([line for line in described(module) if "torch." in line.rpartition(" ")[2]])
        return module.forward


def described(module: torch.fx.GraphModule) -> list[str]:
    """Describe each node of a graph by its target, its plain arguments, and the dtype of its result."""
    lines = []
    for node in module.graph.nodes:
        value = node.meta.get("example_value", node.meta.get("val"))
        dtype = str(value.dtype) if isinstance(value, torch.Tensor) else ""
        plain = [str(arg) for arg in node.args if isinstance(arg, (str, bool, torch.dtype))]
        target = (
            node.target
            if isinstance(node.target, str)
            else getattr(node.target, "__name__", str(node.target))
        )
        lines.append(" ".join([node.op, target if node.op == "call_function" else "", *plain, dtype]))
    return lines


def model(device: str) -> torch.nn.Module:
    seeding.seed_all(2)
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 2)).to(device)


def with_block(library: Library, device: str, **region: Any) -> Callable[..., Any]:
    # Look up the class here, because the traced code must not contain the judge's own look-ups.
    net, autocast = model(device), library.amp.autocast

    def run(x: torch.Tensor) -> Any:
        with autocast(device, **region):
            y = net(x)
            with autocast(device, enabled=False):
                y = y.float() @ y.float().t()
        return y @ x[:, :1].expand_as(y)

    return run


def decorated(library: Library, device: str, **region: Any) -> Callable[..., Any]:
    net = model(device)

    @library.amp.autocast(device, **region)
    def inner(x: torch.Tensor) -> torch.Tensor:
        return net(x)

    return lambda x: inner(x) + inner(x * 2)


def outer_instance(library: Library, device: str, **region: Any) -> Callable[..., Any]:
    net, region_instance = model(device), library.amp.autocast(device, **region)

    def run(x: torch.Tensor) -> Any:
        with region_instance:
            return net(x)

    return run


_HERE, _MADE_BEFORE = (
    clause("amp.autocast_mode.autocast.compiled"),
    clause("amp.autocast_mode.autocast.compiled_made_before"),
)
PROGRAMS = pytest.mark.parametrize(
    "program",
    [
        pytest.param(with_block, id="block", marks=_HERE),
        pytest.param(decorated, id="decorated", marks=_MADE_BEFORE),
        pytest.param(outer_instance, id="instance made outside", marks=_MADE_BEFORE),
    ],
)
Program = Callable[..., Callable[..., Any]]


@pytest.mark.profile("full")
@PROGRAMS
@pytest.mark.parametrize(
    "region", [{}, {"dtype": torch.float16}, {"enabled": False}, {"cache_enabled": False}], ids=str
)
def test_compiled_graphs_match_torch(
    compare: Compare, device: str, program: Program, region: dict[str, Any]
) -> None:
    def compiled(library: Library) -> Outcome:
        torch._dynamo.reset()
        graphs = RecordedGraphs()
        run = torch.compile(program(library, device, **region), fullgraph=True, backend=graphs)
        x = torch.linspace(-1, 1, 16, device=device).view(4, 4)
        before = state()
        return observe(lambda: (run(x), run(x + 1), graphs.seen, state() == before))

    [outcome] = compare(compiled)
    assert outcome.raised is None
    *_, graphs, is_restored = outcome.value
    assert graphs
    assert all(graphs)
    assert is_restored


@PROGRAMS
def test_compiled_region_agrees_with_eager(subject: Library, device: str, program: Program) -> None:
    torch._dynamo.reset()
    x = torch.linspace(-1, 1, 16, device=device).view(4, 4)
    run = program(subject, device, dtype=torch.bfloat16)
    assert torch.equal(torch.compile(run, fullgraph=True, backend="eager")(x), run(x))


@clause("amp.autocast_mode.autocast.compiled")
def test_compiled_again_when_the_region_around_differs(compare: Compare, device: str) -> None:
    """A function compiled outside a region must not be reused inside one (pytorch/pytorch#124901)."""

    def dtypes(library: Library) -> Outcome:
        torch._dynamo.reset()
        graphs = RecordedGraphs()
        run = torch.compile(model(device), fullgraph=True, backend=graphs)
        x = torch.ones(2, 4, device=device)
        dtypes_of_calls = [run(x).dtype]
        for dtype in (torch.bfloat16, torch.float16, torch.bfloat16):
            with library.amp.autocast(device, dtype=dtype):
                dtypes_of_calls.append(run(x).dtype)
        dtypes_of_calls.append(run(x).dtype)
        return observe(lambda: (dtypes_of_calls, len(graphs.seen)))

    [outcome] = compare(dtypes)
    assert outcome.value[0] == [torch.float32, torch.bfloat16, torch.float16, torch.bfloat16, torch.float32]


@clause("amp.autocast_mode.autocast.compiled_made_before")
@pytest.mark.profile("full")
def test_instances_are_guarded_by_value(subject: Library, device: str) -> None:
    """Instances with different values must not share a graph (pytorch/pytorch#194754)."""
    torch._dynamo.reset()
    graphs = RecordedGraphs()
    net = model(device)

    def run(x: torch.Tensor, region: Any) -> torch.Tensor:
        with region:
            return net(x)

    compiled = torch.compile(run, fullgraph=True, backend=graphs)
    x = torch.ones(2, 4, device=device)
    dtypes = [compiled(x, subject.amp.autocast(device, dtype=dtype)).dtype for dtype in (*LOW, *LOW)]
    assert dtypes == [*LOW, *LOW]


@clause("amp.autocast_mode.autocast.compiled")
@pytest.mark.profile("full")
def test_state_after_an_exception_in_compiled_code(subject: Library, device: str) -> None:
    torch._dynamo.reset()
    autocast = subject.amp.autocast

    def run(x: torch.Tensor) -> torch.Tensor:
        with autocast(device):
            y = x @ x
            torch._dynamo.graph_break()
            raise ValueError(str(y.dtype))

    before = state()
    with pytest.raises(ValueError, match=r"bfloat16|float16"):
        torch.compile(run, backend="eager")(torch.ones(2, 2, device=device))
    assert state() == before


class Exported(torch.nn.Module):
    def __init__(self, library: Library, device: str, region: dict[str, Any]) -> None:
        super().__init__()
        self.net, self.autocast, self.device, self.region = (
            model(device),
            library.amp.autocast,
            device,
            region,
        )

    def forward(self, x: torch.Tensor) -> Any:
        with self.autocast(self.device, **self.region):
            y = self.net(x)
            with self.autocast(self.device, enabled=False):
                z = x @ x.t()
        return y, z


@pytest.mark.profile("full")
@pytest.mark.parametrize(
    "strict",
    [
        pytest.param(True, marks=clause("amp.autocast_mode.autocast.exported_strictly")),
        pytest.param(False, marks=clause("amp.autocast_mode.autocast.exported")),
    ],
)
@pytest.mark.parametrize("region", [{}, {"dtype": torch.float16}], ids=str)
def test_exports_as_torch_does(compare: Compare, device: str, strict: bool, region: dict[str, Any]) -> None:
    def exported(library: Library) -> Outcome:
        torch._dynamo.reset()
        x = torch.linspace(-1, 1, 16, device=device).view(4, 4)
        before = state()

        def export() -> Any:
            program = torch.export.export(Exported(library, device, region), (x,), strict=strict)
            return described(program.graph_module), program.module()(x), state() == before

        return observe(export)

    [outcome] = compare(exported)
    assert outcome.raised is None
    assert outcome.value[2]


@clause("amp.autocast_mode.autocast.exported")
@pytest.mark.parametrize("pre_dispatch", [True, False])
@pytest.mark.parametrize("dtype", [None, *LOW], ids=str)
def test_make_fx_records_region_dtypes(
    compare: Compare, device: str, pre_dispatch: bool, dtype: torch.dtype | None
) -> None:
    def traced(library: Library) -> Outcome:
        x = torch.linspace(-1, 1, 16, device=device).view(4, 4)

        def run(x: torch.Tensor) -> torch.Tensor:
            with library.amp.autocast(device, dtype=dtype, cache_enabled=False):
                return x @ x + 1

        return observe(lambda: described(make_fx(run, pre_dispatch=pre_dispatch)(x)))

    [outcome] = compare(traced)
    low = torch.get_autocast_dtype(device) if dtype is None else dtype
    assert any(line.endswith(str(low)) for line in outcome.value)


@clause("amp.autocast_mode.autocast.jit_traced")
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_jit_trace_keeps_region_dtypes(compare: Compare, device: str, dtype: torch.dtype) -> None:
    def traced(library: Library) -> Outcome:
        x = torch.linspace(-1, 1, 16, device=device).view(4, 4)

        def run(x: torch.Tensor) -> torch.Tensor:
            with library.amp.autocast(device, dtype=dtype, cache_enabled=False):
                return x @ x

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.jit's own deprecation
            graph = torch.jit.trace(run, (x,))
        return observe(lambda: (graph(x), graph(x * 2)))

    [outcome] = compare(traced)
    assert [product.dtype for product in outcome.value] == [dtype, dtype]


@clause("amp.autocast_mode.autocast.jit_scripted")
@pytest.mark.deviation("autocast.not_scripted")
def test_scripting_region_raises_or_compiles(subject: Library, deviation: DeviationJudge) -> None:
    def helps(reported: str) -> bool:
        return (
            "torch.jit.script knows torch's own autocast class" in reported and "torch.jit.trace" in reported
        )

    def probe(library: Library) -> str:
        namespace: dict[str, Any] = {"__name__": __name__, "autocast": library.amp.autocast, "torch": torch}
        source = (
            "def run(x: torch.Tensor) -> torch.Tensor:\n    with autocast('cpu'):\n        return x @ x\n"
        )
        # TorchScript reads the function's source from its file, and a string has no file.
        linecache.cache["<scripted>"] = (len(source), None, source.splitlines(keepends=True), "<scripted>")
        exec(compile(source, "<scripted>", "exec"), namespace)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                torch.jit.script(namespace["run"])
            except Exception as error:
                return str(error)
        return "scripted"

    deviation.judge(
        probe,
        torch_does=lambda reported: reported == "scripted",
        # The compiler rejects every class but torch's. Only `impl` also promises that the error is helpful.
        we_do=lambda reported: reported != "scripted" and (subject.package != "impl" or helps(reported)),
    )
