"""A simulated accelerator, `sim`, on which a missing wait gives a wrong number, the same one for the same seed.

    from conformance import simulator
    simulator.enable(devices=2)             # torch.device("sim"), torch.sim, and the c10d backend simccl
    simulator.set_schedule(17)              # the order in which streams run
    ...                                     # any program that is not specific to one device type
    for hazard in simulator.take_hazards(): print(hazard)

`python -m conformance.simulator train.py --seeds 100` runs a script under a hundred schedules. The simulator needs
torch 2.13 to 2.15 and, for the first build, a C++ compiler, but nothing else of this project.

The path of an operator through the files of csrc:

    y = x * 2                        Python
    │ operators.cpp                  outputs at once, by the meta kernel; the CPU kernel becomes a task
    │ memory.cpp                     memory of the current stream's pool, filled with poison
    │ launch.cpp: enqueue            a capture keeps the task (graphs.cpp); each replay starts here
    │ hazards.cpp                    checks whether this stream waits for earlier uses of the memory
    ▼ schedule.cpp: append           the host continues
    stream 0   ▕ mul ▏ record e ▏                   streams are queues: nothing runs by itself
    stream 1   ▕ wait e ▏ all_gather ▏ copy_ ▏      collectives.cpp: gloo runs it, and the task that needs it ends it
    ▼ the seed decides which queue runs, and when, at the latest when the host waits
    the CPU's kernel, on raw memory

Messages (`send`, `recv`, `isend`, `irecv`, `batch_isend_irecv`) run in the same order as NCCL's. A batch is one task on
the stream of the group's collectives. Other messages have a stream for each pair of ranks. Messages match in the order
of the calls, and a send waits for no receive. If every rank waits for another one or has ended, the waiting ranks raise
an error that says what each rank waits for, and where.

Seed 0 runs everything in program order, and seed 1 everything as late as the host allows. Seed 2 runs the default
stream early and the others late, and seed 3 the reverse. From seed 4 on, each stream is early, late or in between at
random, and this changes during the run.
"""

from conformance.simulator._build import Unavailable, ensure_built
from conformance.simulator.control import (
    Hazard,
    HostWait,
    course,
    device_is_enabled,
    enable,
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
    "host_view",
    "launch",
    "log_hazards",
    "set_schedule",
    "synchronize",
    "take_hazards",
    "take_host_waits",
    "take_unreplayable",
]
