"""Steps captured in CUDA graphs, by the user or by `capture(graph=True)`, beside the same steps run eagerly."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import SEED, member
from conformance.gpu.bandwidth import seconds
from conformance.gpu.phase_rows import PhaseTask, Result, Rows, serve
from conformance.gpu.values import BOUNDS, METHODS, Trained, give_grads, relative_distance

Call = Callable[[], object]
_WARM_UPS, _REPLAYS = 3, 5
# Steps of `capture(graph=True)`. The learning rate changes before step _CHANGE.
_STEPS, _CHANGE = 12, 6
_BOUND = BOUNDS[torch.float32]


def work(task: PhaseTask, rows: Rows) -> None:
    compares: dict[str, Callable[[], dict[str, Any]]] = {
        f"user's graph of {name}": partial(
            replayed_beside_eager, task.subject, method, task.device, in_users_graph
        )
        for name, method in METHODS.items()
    }
    compares["capture(graph=True)"] = partial(captured_beside_eager, task.subject, task.device)
    rows.run({name: partial(_judged, compare, task.device) for name, compare in compares.items()})


def _judged(compare: Callable[[], dict[str, Any]], device: str) -> Result:
    if device != "cuda":
        raise NotImplementedError("there are CUDA graphs on CUDA only")
    values = compare()
    return "failed" if values["fault"] else "agrees", values["fault"] or values["about"], values


def in_users_graph(call: Call) -> Call:
    """Capture `call` as torch's documentation recommends, after warm-up calls on a side stream."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARM_UPS):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def replayed_beside_eager(
    subject: str, method: Callable[[Trained], Tensor], device: str, capture: Callable[[Call], Call]
) -> dict[str, Any]:
    """Compare steps that are replayed with eager ones. `capture` makes _WARM_UPS calls, then captures a call."""
    replayed, eager = (Trained(subject, torch.float32, device, capturable=device == "cuda") for _ in range(2))
    give_grads(replayed, eager, torch.Generator(device).manual_seed(SEED))
    replay, step = capture(_step_from_same_grads(method, replayed)), _step_from_same_grads(method, eager)
    for _ in range(_WARM_UPS):
        step()
    before = [param.detach().clone() for param in replayed.params]
    for _ in range(_REPLAYS):
        replay()
        # A user's graph runs torch's operators. Other kernels round `1 - beta2` differently, by up to 1.3e-5 of it.
        with torchs_operators(subject):
            step()
    apart = max(map(relative_distance, replayed.params, eager.params))
    states = replayed.scale_and_growth(), eager.scale_and_growth()
    fault = ""
    if all(map(torch.equal, before, replayed.params)):
        fault = "a replay leaves the parameters as they were"
    elif not apart <= _BOUND:
        fault = f"parameters apart by {apart:.1e} from eager ones, bound {_BOUND:.0e}"
    elif states[0] != states[1]:
        fault = f"scale and growth tracker {states[0]}, eager {states[1]}"
    replay_s = seconds(replay, device)
    about = f"parameters apart by {apart:.1e}, {replay_s * 1e6:.1f} µs a replay"
    return {"fault": fault, "about": about, "parameters_apart": apart, "seconds": replay_s}


def torchs_operators(subject: str) -> AbstractContextManager[object]:
    """Return the subject's context manager that selects torch's operators. A subject without one runs as it is."""
    try:
        return member(subject, "kernels.backend")("torch")
    except NotImplementedError:
        return nullcontext()


def _step_from_same_grads(method: Callable[[Trained], Tensor], trained: Trained) -> Call:
    """Return a step that first writes its gradients, in place, as a captured backward does."""
    grads = [param.grad for param in trained.params if param.grad is not None]
    source = [grad.clone() for grad in grads]

    def step() -> None:
        torch._foreach_copy_(grads, source)
        method(trained)

    return step


def captured_beside_eager(subject: str, device: str) -> dict[str, Any]:
    """Compare `capture(graph=True)` with an eager optimizer whose learning rate is a tensor, bit for bit."""
    captured, eager = (Trained("torch", torch.float32, device) for _ in range(2))
    give_grads(captured, eager, torch.Generator(device).manual_seed(SEED))
    member(subject, "optim.capture")(captured.optimizer, graph=True)
    for step in range(_STEPS):
        lr = 1e-3 if step < _CHANGE else 5e-4
        captured.optimizer.param_groups[0]["lr"] = lr
        eager.optimizer.param_groups[0]["lr"] = torch.tensor(lr, device=device) if device == "cuda" else lr
        captured.optimizer.step()
        eager.optimizer.step()
    explanation = member(subject, "optim.explain")(captured.optimizer)
    fault = ""
    if not all(map(torch.equal, captured.params, eager.params)):
        apart = max(map(relative_distance, captured.params, eager.params))
        fault = f"parameters differ in bits from eager ones, apart by {apart:.1e}"
    elif not (explanation.graph and explanation.graph.replayed):
        fault = f"the last step was not replayed: {explanation}"
    return {"fault": fault, "about": str(explanation)}


if __name__ == "__main__":
    serve(work)
