"""torch 2.13 to 2.14: ranks that are threads, as in tests, read each other's tensors without waiting for their streams.

The first rank's thread copies for all ranks, on its own current stream.

    python -m conformance.simulator conformance/simulator/findings/threaded_group.py
"""

import threading

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg

device = torch.accelerator.current_accelerator()
streams, parts, store = [torch.Stream(device) for _ in range(2)], [], dist.HashStore()
for stream in streams:
    with stream:
        parts.append(torch.ones(3, device=device))


def work(rank: int) -> None:
    dist.init_process_group("threaded", rank=rank, world_size=2, store=store)
    with streams[rank]:
        dist.all_reduce(parts[rank])
        print(parts[rank].tolist() if rank == 1 else "", end="")


torch._C._distributed_c10d._set_thread_isolation_mode(True)
multi_threaded_pg._install_threaded_pg()
threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
