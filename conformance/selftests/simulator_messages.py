"""Programs that send messages between ranks, as a script for the simulator: `simulator_messages.py PROGRAM ...`.

A program gets its rank, that rank's values [4], and memory [4] for a message. It returns what arrived.
"""

from __future__ import annotations

import contextlib
import sys

import torch
import torch.distributed as dist

# Correct programs. Each rank returns the same under every seed.


def every_call(rank: int, x: torch.Tensor, received: torch.Tensor) -> list[torch.Tensor]:
    peer = 1 - rank
    if rank == 0:
        dist.send(x * 2, peer)
        dist.recv(received, peer)
    else:
        dist.recv(received, peer)
        dist.send(received + x, peer)
    first = received.clone()
    sending, receiving = dist.isend(x + 1, peer), dist.irecv(received, peer)
    receiving.wait()
    second = received.clone()
    sending.wait()
    short = torch.zeros(2, dtype=torch.int64, device=x.device)
    batch = [
        dist.P2POp(dist.irecv, received, peer),
        dist.P2POp(dist.irecv, short, peer),
        dist.P2POp(dist.isend, x + 5, peer),
        dist.P2POp(dist.isend, x[:2].long() + 7, peer),
    ]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    return [first, second, received, short]


def host_memory(rank: int, x: torch.Tensor, received: torch.Tensor) -> list[torch.Tensor]:
    peer = 1 - rank
    x, received = torch.full((2,), float(rank)), torch.zeros(2)
    if rank == 0:
        dist.send(x, peer, tag=3)
        dist.recv(received, peer, tag=4)
    else:
        dist.recv(received, peer, tag=3)
        dist.send(x + received + 1, peer, tag=4)
    batched = torch.zeros(2)
    batch = [dist.P2POp(dist.isend, x + 5, peer), dist.P2POp(dist.irecv, batched, peer)]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    return [received, batched]


def scaled_sums(rank: int, x: torch.Tensor, received: torch.Tensor) -> list[torch.Tensor]:
    half, total, shard = dist._make_nccl_premul_sum(0.5), x.clone(), torch.zeros(2, device=x.device)
    dist.all_reduce(total, half)
    dist.reduce_scatter(shard, list(x.chunk(2)), half)
    return [total, shard]


def larger_than_a_piece(rank: int, x: torch.Tensor, received: torch.Tensor) -> list[torch.Tensor]:
    received = torch.zeros(3 << 20, device=x.device)
    if rank == 0:
        dist.send(torch.arange(received.numel(), device=x.device, dtype=received.dtype), 1)
    else:
        dist.recv(received, 0)
    return [received]


def receive_before_all_reduce(rank: int, x: torch.Tensor, received: torch.Tensor) -> list[torch.Tensor]:
    """The all-reduce of rank 0 must begin while rank 0 waits for a message."""
    total = x.clone()
    reducing = dist.all_reduce(total, async_op=True)
    if rank == 0:
        dist.recv(received, 1)
        received.sum().item()
        reducing.wait()
    else:
        reducing.wait()
        total.sum().item()
        dist.send(x + total, 0)
    return [received, total]


def receive_over_a_barrier(rank: int, x: torch.Tensor, received: torch.Tensor) -> list[torch.Tensor]:
    """Rank 0's host must reach a barrier before rank 1 sends the message."""
    receiving = dist.irecv(received, 1) if rank == 0 else None
    dist.barrier()
    if receiving is not None:
        receiving.wait()
    else:
        dist.send(x, 0)
    return [received]


def query_before_the_send(rank: int, x: torch.Tensor, received: torch.Tensor) -> list[torch.Tensor]:
    """A query must return even if the peer sends only after the host goes on."""
    if rank == 0:
        receiving = dist.irecv(received, 1)
        receiving.is_completed()
    dist.all_reduce(x)
    x.sum().item()
    if rank == 0:
        while not receiving.is_completed():
            pass
    else:
        dist.send(x, 0)
    return [received, x]


def ring(rank: int, x: torch.Tensor, received: torch.Tensor) -> list[torch.Tensor]:
    size = dist.get_world_size()
    if rank == 0:
        dist.send(x, 1)
        dist.recv(received, size - 1)
    else:
        dist.recv(received, rank - 1)
        dist.send(received + x, (rank + 1) % size)
    return [received]


def answer_through_a_third_rank(rank: int, x: torch.Tensor, received: torch.Tensor) -> list[torch.Tensor]:
    """Rank 0 waits for rank 2, rank 2 for rank 1, and rank 1 for rank 0's reply."""
    if rank == 0:
        answer = torch.zeros_like(received)
        answering = dist.irecv(answer, 2)
        dist.recv(received, 1)
        dist.isend(received * 2, 1)
        answering.wait()
        return [answer]
    if rank == 1:
        dist.send(x, 0)
    dist.recv(received, rank - 1)
    dist.send(received + 1, {1: 2, 2: 0}[rank])
    return [received]


def coalesced_all_reduces(rank: int, x: torch.Tensor, received: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of rank 1 are not on the current device."""
    with dist._coalescing_manager(device=x.device, async_ops=True) as coalesced:
        dist.all_reduce(x)
        dist.all_reduce(received)
    coalesced.wait()
    return [x * 2, received + 1]


def send_after_a_failed_batch(rank: int, x: torch.Tensor, received: torch.Tensor) -> list[torch.Tensor]:
    with contextlib.suppress(ZeroDivisionError), dist._coalescing_manager(device=x.device):
        dist.isend(x, 1 - rank)
        1 / 0  # noqa: B018 - an error of the user
    if rank == 0:
        dist.send(x * 2, 1)
    else:
        dist.recv(received, 0)
    return [received]


# Races: a wait is missing.


def sent_memory_is_overwritten(rank: int, x: torch.Tensor, received: torch.Tensor) -> list[torch.Tensor]:
    if rank == 0:
        sending = dist.isend(x, 1)
        x.fill_(5)
        sending.wait()
    else:
        dist.recv(received, 0)
    return [received]


def received_memory_is_read(rank: int, x: torch.Tensor, received: torch.Tensor) -> list[torch.Tensor]:
    if rank == 0:
        dist.send(x, 1)
        return []
    receiving = dist.irecv(received, 0)
    result = received * 2
    receiving.wait()
    return [result]


def batched_memory_is_read(rank: int, x: torch.Tensor, received: torch.Tensor) -> list[torch.Tensor]:
    (work,) = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, received, 1 - rank)]
    )
    result = received * 2
    work.wait()
    return [result]


# Mistakes that no schedule can run to the end.


def both_receive_first(rank: int, x: torch.Tensor, received: torch.Tensor) -> list[torch.Tensor]:
    dist.recv(received, 1 - rank)
    dist.send(x, 1 - rank)
    return [received]


def send_without_receive(rank: int, x: torch.Tensor, received: torch.Tensor) -> list[torch.Tensor]:
    if rank == 0:
        dist.send(x, 1)
    return []


def receive_without_send(rank: int, x: torch.Tensor, received: torch.Tensor) -> list[torch.Tensor]:
    if rank == 0:
        dist.recv(received, 1)
        received.sum().item()
    dist.barrier()
    return [received]


def host_receive_without_send(rank: int, x: torch.Tensor, received: torch.Tensor) -> list[torch.Tensor]:
    if rank == 0:
        dist.recv(received.cpu(), 1)
    dist.barrier()
    return [received]


def host_sum_against_receive(rank: int, x: torch.Tensor, received: torch.Tensor) -> list[torch.Tensor]:
    if rank == 0:
        dist.all_reduce(x.cpu())
    else:
        dist.recv(received, 0)
        received.sum().item()
    return [received]


def receive_against_all_reduce(rank: int, x: torch.Tensor, received: torch.Tensor) -> list[torch.Tensor]:
    if rank == 0:
        dist.recv(received, 1)
        received.sum().item()
    dist.all_reduce(x)
    x.sum().item()
    if rank == 1:
        dist.send(x, 0)
    return [received]


def broadcasts_from_different_ranks(rank: int, x: torch.Tensor, received: torch.Tensor) -> list[torch.Tensor]:
    dist.broadcast(x, src=rank)
    x.sum().item()
    return [x]


def batch_without_send(rank: int, x: torch.Tensor, received: torch.Tensor) -> list[torch.Tensor]:
    dist.batch_isend_irecv([dist.P2POp(dist.irecv, received, 1 - rank)])[0].wait()
    received.sum().item()
    return [received]


def batch_of_host_and_device_memory(rank: int, x: torch.Tensor, received: torch.Tensor) -> list[torch.Tensor]:
    peer = 1 - rank
    batch = [dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, torch.zeros(4), peer)]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    return []


def tags_in_another_order(rank: int, x: torch.Tensor, received: torch.Tensor) -> list[torch.Tensor]:
    for tag in (1, 2) if rank == 0 else (2, 1):
        if rank == 0:
            dist.send(x + tag, 1, tag=tag)
        else:
            dist.recv(received, 0, tag=tag)
    return [received]


def size_differs(rank: int, x: torch.Tensor, received: torch.Tensor) -> list[torch.Tensor]:
    if rank == 0:
        dist.send(x[:3], 1)
    else:
        dist.recv(received, 0)
    return [received]


def main() -> None:
    dist.init_process_group("simccl")
    rank = dist.get_rank()
    device = torch.device("sim", rank)
    for name in sys.argv[1:]:
        x = torch.arange(4.0, device=device) + 10 * rank
        tensors = globals()[name](rank, x, torch.zeros(4, device=device))
        torch.save(tensors, f"{name}{rank}.pt")
        for tensor in tensors:
            print(tensor[-4:].tolist())  # noqa: T201 - output is compared
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
