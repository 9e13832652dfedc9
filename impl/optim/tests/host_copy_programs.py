"""User programs with tensors on two devices, the simulated one and the host: run by `test_host_copies`.

Each program gets the device of its device tensors. Its result must be the same if that is the host, and no memory may
be read or written too early: the simulated device runs all work as late as the host allows.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop
from torch.utils._pytree import tree_map_only

from conformance import simulator
from impl.amp import GradScaler
from impl.distributed.fsdp import ShardedGradScaler
from impl.kernels import HostCopy, _table, copy_into_, to_device
from impl.kernels.tests.racing import race
from impl.nn.utils import clip_grad_norm_, get_total_norm
from impl.optim import capture
from impl.optim._graphs import capture_graph, graphs_for
from impl.optim._shards import register_sharding
from impl.optim.tests.patches import Patches

Program = Callable[[torch.device], Any]
IN_ORDER, LATEST = 0, 1  # schedules
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

simulator.enable()  # never disabled: only a separate process imports this module
if INTERPRETED:
    from impl.kernels.tests import on_simulator

    on_simulator.tell()
LATE, HOST = torch.device(simulator.NAME, 0), torch.device("cpu")
BACKENDS = {LATE: simulator.BACKEND, HOST: "gloo"}
SCALE = 1024.0
PROGRAMS: dict[str, Program] = {}
FAULTS, TABLE_FAULTS = Patches(), Patches()  # the latter of what Triton's kernels find their way by


class StatelessOptimizer(Optimizer):
    """A user's own, which keeps no state."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in itertools.chain(*(group["params"] for group in self.param_groups)):
            if param.grad is not None:
                param.sub_(0.5 * param.grad)


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda params: SGD(params, 0.5, momentum=0.9),
    "AdamW": AdamW,
    "Adam, fused": lambda params: Adam(params, fused=True),
    "Adagrad, fused": lambda params: Adagrad(params, fused=True),
    "Adam, captured": lambda params: capture(Adam(params, fused=True)),
    "RMSprop": RMSprop,
    "a user's": StatelessOptimizer,
}
# Where parameters lie. Of the device alone, so that nothing of it is seen on the host but what is asked for.
PLACES: dict[str, Callable[[torch.device], list[torch.device]]] = {
    "on the host": lambda device: [HOST, HOST],
    "on both": lambda device: [device, HOST],
    "on the device": lambda device: [device, device],
}


def unscaled_first(scaler: Any, optimizer: Optimizer) -> Any:
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


def stepped(scaler: Any, optimizer: Optimizer) -> Any:
    scaler.step(optimizer)
    scaler.update()


def fused(scaler: Any, optimizer: Optimizer) -> Any:
    return scaler.fused_step(optimizer)


def fused_and_clipped(scaler: Any, optimizer: Optimizer) -> Any:
    return scaler.fused_step(optimizer, max_norm=0.5)


def fused_from_low_precision_params(scaler: Any, optimizer: Optimizer) -> Any:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    copies = [param.detach().half().requires_grad_() for param in params]
    for param, copy in zip(params, copies, strict=True):
        copy.grad, param.grad = param.grad.half(), None
    norm = scaler.fused_step(optimizer, max_norm=0.5, low_precision_params=copies)
    return norm, [copy.detach() for copy in copies]


WAYS = (unscaled_first, stepped, fused, fused_and_clipped, fused_from_low_precision_params)


def iterations(
    device: torch.device, make: Callable[..., Any], optimizer: str, place: str, way: Callable[..., Any]
) -> Iterator[Any]:
    """Three steps and what they leave; the second finds inf in the last gradient, the third in none."""
    params = [torch.nn.Parameter(torch.arange(1.0, 4.0).to(where)) for where in PLACES[place](device)]
    stepping = OPTIMIZERS[optimizer](params)
    scaler = make(device.type, init_scale=SCALE)
    for factor in (1.0, math.inf, 1.0):
        scaler.scale(torch.ones((), device=device))
        for param in params:
            param.grad = torch.full_like(param, 0.25 * SCALE)
        params[-1].grad[1] *= factor
        yield way(scaler, stepping)
        yield scaler.found_inf(stepping), scaler.step_was_taken(stepping), scaler.get_scale()
        yield [param.detach().clone() for param in params]


def named(program: Program) -> Program:
    PROGRAMS[program.__name__] = program
    return program


@named
def losses_on_both(device: torch.device) -> Any:
    scaler = GradScaler(device.type, init_scale=SCALE)
    first = scaler.scale(torch.ones((), device=device))
    return first, scaler.scale(torch.ones(2)), scaler.scale([torch.ones((), device=device), torch.ones(2)])


@named
def counters_on_the_other_device(device: torch.device) -> Any:
    """Step counters are on another device than their parameter, like in a state that was saved elsewhere."""
    param = torch.nn.Parameter(torch.ones(3))
    optimizer, scaler = Adam([param]), GradScaler(device.type, init_scale=SCALE)
    for _ in range(3):
        scaler.scale(torch.ones((), device=device))
        param.grad = torch.full_like(param, SCALE)
        scaler.fused_step(optimizer)
        optimizer.state[param]["step"] = optimizer.state[param]["step"].to(device)
    return param.detach(), optimizer.state[param]["step"]


@named
def clipping_on_both(device: torch.device) -> Any:
    params = [torch.nn.Parameter(torch.ones(3, device=where)) for where in (device, HOST)]
    for param in params:
        param.grad = torch.full_like(param, 2.0)
    return clip_grad_norm_(params, 1.0), [param.grad for param in params]


@named
def a_scale_on_its_floor(device: torch.device) -> Any:
    """The scaler warns when the numbers have arrived, and queries no event while the user captures a step."""
    param = torch.nn.Parameter(torch.ones(3, device=device))
    optimizer = SGD([param], 0.5, fused=True)  # fused, so that nothing waits
    scaler = GradScaler(device.type, init_scale=2.0, min_scale=2.0)
    param.grad = torch.empty_like(param)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for turn in range(12):
            if turn % 4 == 3:
                torch.accelerator.synchronize()  # arrival of the results of four steps
            scaler.scale(torch.ones((), device=device))
            param.grad.fill_(math.inf)
            step = functools.partial(stepped, scaler, optimizer)
            if turn % 4 == 1 and device == LATE:
                step_in_a_graph(step)
            else:
                step()
    return sum("min_scale" in str(warning.message) for warning in warned)


@named
def clipping_of_shared_complex_gradients(device: torch.device) -> Any:
    buffer = torch.full((5,), 2.0 + 2.0j, device=device)
    params = [torch.nn.Parameter(torch.ones(3, dtype=buffer.dtype, device=device)) for _ in range(2)]
    params[0].grad, params[1].grad = buffer[:3], buffer[2:]
    with racing_on(device):
        return clip_grad_norm_(params, 1.0), buffer


@named
def shared_low_precision_params(device: torch.device) -> Any:
    """The last parameter's copy counts where copies share memory."""
    buffer = torch.zeros(5, dtype=torch.bfloat16, device=device)
    params = [torch.nn.Parameter(torch.full((3,), value, device=device)) for value in (1.0, 2.0)]
    scaler = GradScaler(device.type, init_scale=SCALE)
    scaler.scale(torch.ones((), device=device))
    for param in params:
        param.grad = torch.full_like(param, SCALE)
    with racing_on(device):
        scaler.fused_step(RMSprop(params), low_precision_params=[buffer[:3], buffer[2:]])
    return buffer


@named
def shared_counters(device: torch.device) -> Any:
    """A counter of two parameters counts twice."""
    params = [torch.nn.Parameter(torch.ones(3, device=device)) for _ in range(2)]
    optimizer, scaler = Adam(params, fused=True), GradScaler(device.type, init_scale=SCALE)
    for _ in range(2):
        scaler.scale(torch.ones((), device=device))
        for param in params:
            param.grad = torch.full_like(param, SCALE)
        with racing_on(device):
            scaler.fused_step(optimizer)
        optimizer.state[params[1]]["step"] = optimizer.state[params[0]]["step"]
    return optimizer.state[params[0]]["step"]


def racing_on(device: torch.device) -> contextlib.AbstractContextManager[None]:
    return race() if device == LATE else contextlib.nullcontext()


def write_scale(scaler: GradScaler) -> None:
    assert scaler._scale is not None
    scaler._scale.fill_(64.0)


def assign_scale(scaler: GradScaler) -> None:
    assert scaler._scale is not None
    scaler._scale = torch.full_like(scaler._scale, 64.0)


def assign_backoff_factor(scaler: GradScaler) -> None:
    scaler._backoff_factor = 2.0**-12


def lower_scale_in_replays(scaler: GradScaler) -> None:
    param = torch.nn.Parameter(torch.ones(3, device=scaler._scale_from(HOST).device))
    param.grad = torch.full_like(param, math.inf)
    optimizer = SGD([param], 0.5, fused=True)
    step = functools.partial(stepped, scaler, optimizer)
    replay = replay_of(step) if param.device == LATE else step
    for _ in range(7):
        replay()


@named
def a_scale_that_changes_outside_of_updates(device: torch.device) -> Any:
    """The scale stays at its minimum, although results of earlier updates say that it cannot reach it."""
    param = torch.nn.Parameter(torch.ones(3, device=device))
    optimizer = SGD([param], 0.5, fused=True)
    scales = []
    changes = (write_scale, assign_scale, assign_backoff_factor, lower_scale_in_replays)
    for change, has_arrived in itertools.product(changes, (True, False)):
        scaler = GradScaler(device.type, init_scale=4096.0, min_scale=32.0)

        def step(value: float, scaler: GradScaler = scaler) -> None:
            scaler.scale(torch.ones((), device=device))
            param.grad = torch.full_like(param, value)
            stepped(scaler, optimizer)

        for _ in range(3):
            step(1.0)
            if has_arrived:
                torch.accelerator.synchronize()
        change(scaler)
        for _ in range(2):
            torch.accelerator.synchronize()
            step(math.inf)
            scales.append(scaler.get_scale())
    return scales


@named
def a_scale_that_is_rounded_down(device: torch.device) -> Any:
    """Rounding to float32 lowers the scale by more than the backoff factor does."""
    scaler = GradScaler(device.type, init_scale=1 + 100 * 2.0**-23, backoff_factor=0.9999999, min_scale=1.0)
    param = torch.nn.Parameter(torch.ones(3, device=device))
    optimizer = SGD([param], 0.5, fused=True)
    scales = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(110):
            scaler.scale(torch.ones((), device=device))
            param.grad = torch.full_like(param, math.inf)
            stepped(scaler, optimizer)
            scales.append(scaler.get_scale())
    return min(scales) - 1.0


def step_in_a_graph(step: Callable[[], object]) -> None:
    replay_of(step)()


def replay_of(step: Callable[[], object]) -> Callable[[], object]:
    graphs = graphs_for(LATE)
    assert graphs is not None
    return capture_graph(graphs, step).replay


@named
def a_group_of_the_device_alone(device: torch.device) -> Any:
    """Holds parameters whose gradients lie on the host; as nccl does where states are offloaded."""
    group = dist.new_group(backend=f"{device.type}:{BACKENDS[device]}")
    param = torch.nn.Parameter(torch.ones(3))
    register_sharding(param, (group,), (group,))
    reported = []
    for scaler in (
        GradScaler(device.type, enabled=False),
        ShardedGradScaler(device.type, process_group=group),
    ):
        scaler.scale(torch.ones((), device=device))
        param.grad = torch.full_like(param, 2.0)
        reported += [scaler.fused_step(SGD([param], 0.5), max_norm=0.5), param.detach().clone()]
    return reported


@named
def the_owner(device: torch.device) -> Any:
    into = torch.zeros(2).pin_memory()
    copy_into_(into, torch.ones(2, device=device))
    tensor = torch.ones(2, device=device)
    return (
        into + 1,
        to_device(tensor, HOST) + 1,
        to_device(tensor, HOST, torch.float64) + 1,
        to_device(tensor, device) is tensor,
    )


@named
def norms_on_two_streams(device: torch.device) -> Any:
    """Compute norms of the same tensors on two unordered streams. No other program leaves such a table."""
    tensors = [torch.full((5,), value, device=device) for value in (1.0, 2.0)]
    main = torch.accelerator.current_stream()
    sides, norms = (torch.Stream(LATE), torch.Stream(LATE)), []
    for side in sides:
        side.wait_stream(main)
        with side:
            norms.append(get_total_norm(tensors))
    for side in sides:
        main.wait_stream(side)
    return norms


# A check across ranks is the same for all optimizers of one skip method. A rank's own tensors are on the host.
_SHARDED = itertools.product(("AdamW", "Adam, fused", "a user's"), ("on the host",), WAYS)
for make, cases in ((GradScaler, itertools.product(OPTIMIZERS, PLACES, WAYS)), (ShardedGradScaler, _SHARDED)):
    for kind, place, way in cases:
        if INTERPRETED and kind not in ("Adam, fused", "a user's"):
            continue  # two kinds: updated by a kernel, and not

        def program(device: torch.device, reported: Any = (make, kind, place, way)) -> Any:
            return list(iterations(device, *reported))

        PROGRAMS[f"{make.__name__}: {kind} {place}, {way.__name__}"] = program


def findings(program: Program, schedule: int = LATEST) -> list[str]:
    """Return the failures of a program."""
    simulator.set_schedule(schedule)
    try:
        torch.testing.assert_close(on_host(program(LATE)), on_host(program(HOST)), equal_nan=True)
        simulator.synchronize()
    except Exception as error:  # a fault may raise anything
        return [f"{type(error).__name__}: {error}", *_failures_to_come()]
    return [str(hazard) for hazard in simulator.take_hazards()]


def _failures_to_come() -> Iterator[str]:
    """Yield the failures of work that was queued after a failure, one by one."""
    while True:
        try:
            simulator.synchronize()
            return
        except RuntimeError as error:
            yield str(error)


def on_host(value: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.detach().to(HOST), value)


@FAULTS.named("no copy blocks")
def _nothing_blocks(patch: pytest.MonkeyPatch) -> None:
    def never(tensor: Any, device: Any, dtype: Any = None, *, copy: bool = False) -> Any:
        return tensor.to(device, dtype, non_blocking=True, copy=copy)

    patch.setattr(to_device, "__code__", never.__code__)


@FAULTS.named("no copy into memory blocks")
def _nothing_blocks_in_memory(patch: pytest.MonkeyPatch) -> None:
    def never(target: Any, source: Any) -> Any:
        target.copy_(source, non_blocking=True)

    patch.setattr(copy_into_, "__code__", never.__code__)


@FAULTS.named("the event is not asked")
def _event_not_asked(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch, "Event", type("Event", (torch.Event,), {"query": lambda self: True}))


@FAULTS.named("the event is recorded before the copy")
def _event_too_soon(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch, "Event", type("Event", (torch.Event,), {"record": lambda self, stream: None}))


@FAULTS.named("the event is asked while a graph is captured")
def _asked_in_capture(patch: pytest.MonkeyPatch) -> None:
    def numbers(self: Any) -> Any:
        return self._numbers.tolist() if self._arrived is None or self._arrived.query() else None

    patch.setattr(HostCopy, "numbers", numbers)


@TABLE_FAULTS.named("a table serves every stream")
def _of_no_stream(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_table.stream_of, "__code__", (lambda device: 0).__code__)


@TABLE_FAULTS.named("a table is kept for other addresses")
def _of_other_addresses(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_table._Key, "__hash__", lambda key: hash(key.numels))
    patch.setattr(_table._Key, "__eq__", lambda key, other: key.numels == other.numels)


def main() -> None:
    torch.set_num_threads(1)
    simulator.log_hazards()
    backend = ",".join(f"{device.type}:{name}" for device, name in BACKENDS.items())
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    wrong_programs = {name: wrong for name, program in PROGRAMS.items() if (wrong := findings(program))}
    # Hazards of a late table, or of one used on another stream, appear in any order of the device's work.
    faults, schedule = (TABLE_FAULTS, IN_ORDER) if INTERPRETED else (FAULTS, LATEST)
    unnoticed: list[str] = []
    for fault, apply in faults.items():
        with pytest.MonkeyPatch.context() as patch:
            apply(patch)
            if not any(findings(program, schedule) for program in PROGRAMS.values()):
                unnoticed.append(fault)
    reported = {
        "programs": len(PROGRAMS),
        "found": wrong_programs,
        "faults": len(faults),
        "unnoticed": unnoticed,
    }
    reported["interpreted"] = INTERPRETED
    sys.stdout.write(json.dumps(reported))


if __name__ == "__main__":
    main()
