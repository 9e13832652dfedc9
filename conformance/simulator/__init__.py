"""A simulated accelerator, `sim`, on which a forgotten wait is a wrong number, at the same place for the same seed.

    from conformance import simulator
    simulator.enable(devices=2)             # torch.device("sim"), torch.sim, and the c10d backend simccl
    simulator.set_schedule(17)              # the order in which streams go on
    ...                                     # any program that is not written for one device alone
    for hazard in simulator.take_hazards(): print(hazard)

`python -m conformance.simulator train.py --seeds 100` runs a script under a hundred of them. It needs torch 2.13
to 2.15 and, once, a C++ compiler, but nothing else of this project. TANDEM_SIMULATOR_NAME gives it another name.

How an operator travels, and the file of csrc that it passes:

    y = x * 2                        Python
    │ operators.cpp                  outputs at once, by the meta kernel; the CPU kernel is what is left to do
    │ memory.cpp                     memory of the current stream's pool, full of poison
    │ launch.cpp: enqueue            the stream's capture may keep it (graphs.cpp): it goes on from here in each replay
    │ hazards.cpp                    who touched this memory before, and does this stream know that it was done?
    ▼ schedule.cpp: append           and the host goes on
    stream 0   ▕ mul ▏ record e ▏                   streams are queues: nothing runs by itself
    stream 1   ▕ wait e ▏ all_gather ▏ copy_ ▏      collectives.cpp: gloo carries it, who needs it ends it
    ▼ the seed says which queue moves, and when; at the latest where the host waits for it
    the CPU's kernel, on raw memory

Messages (`send`, `recv`, `isend`, `irecv`, `batch_isend_irecv`) have NCCL's order. A batch is one task on the stream of
the group's collectives. Other messages have a stream for each pair of ranks. They match in the order of the calls. A
send waits for no receive. If every rank waits for another one or has ended, the ranks that wait raise an error. It says
what each rank waits for, and where.

Seed 0 runs all in the order of the program, 1 everything as late as the host allows, 2 the default stream early and the
others late, 3 the other way round; from 4 on streams are early, late or in between as drawn, and change.
"""

from conformance.simulator._build import Unavailable, ensure_built
from conformance.simulator.control import (
    Hazard,
    HostWait,
    course,
    device_is_enabled,
    enable,
    fail_allocation,
    launch,
    log_hazards,
    set_schedule,
    synchronize,
    take_hazards,
    take_host_waits,
    take_unreplayable,
)
from conformance.simulator.device import BACKEND, NAME, host_view

__all__ = [
    "BACKEND",
    "NAME",
    "Hazard",
    "HostWait",
    "Unavailable",
    "course",
    "device_is_enabled",
    "enable",
    "ensure_built",
    "fail_allocation",
    "host_view",
    "launch",
    "log_hazards",
    "set_schedule",
    "synchronize",
    "take_hazards",
    "take_host_waits",
    "take_unreplayable",
]
