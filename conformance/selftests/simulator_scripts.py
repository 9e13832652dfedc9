"""Trainings of users, as a script for the simulator: `simulator_scripts.py NAME [MISTAKE]`."""

import sys
import tempfile
import warnings
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

name, mistake = sys.argv[1], "".join(sys.argv[2:])
device = torch.accelerator.current_accelerator()
if name in ("ddp", "zero"):
    dist.init_process_group("simccl")
    device = torch.device(device.type, dist.get_rank())
    torch.accelerator.set_device_index(device.index)
else:
    torch.manual_seed(0)
main, side = torch.accelerator.current_stream(), torch.Stream(device)
model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), 0.1)


def step() -> None:
    optimizer.step()
    optimizer.zero_grad()


def ddp() -> object:
    """Train with DistributedDataParallel, fed from a pinned buffer.

    With `refill`, the host refills the buffer before it was copied to the device. With `hook`, a communication hook
    returns a bucket before its all-reduce has ended.
    """
    replica = DistributedDataParallel(model, bucket_cap_mb=1e-4)

    def sum_without_wait(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        dist.all_reduce(bucket.buffer(), async_op=True)
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    if mistake == "hook":
        replica.register_comm_hook(None, sum_without_wait)
    buffer, copied = torch.empty(4, 8).pin_memory(), torch.Event(device)
    for _ in range(3):
        if mistake != "refill":
            copied.synchronize()
        buffer.copy_(torch.randn(4, 8))
        x = buffer.to(device, non_blocking=True)
        copied.record()
        replica(x).square().mean().backward()
        step()
    return model.state_dict()


def loader() -> object:
    """Copy batches ahead on a side stream.

    With `early`, the model does not wait for the copy. With `unrecorded`, memory of a batch is used again while the
    model still reads it, because `record_stream` is missing.
    """

    def copied(batch: torch.Tensor) -> torch.Tensor:
        with side:
            return batch.to(device, non_blocking=True)

    def prefetched(batches: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
        following = copied(next(batches))
        while following is not None:
            batch = following
            if mistake != "early":
                main.wait_stream(side)
            if mistake != "unrecorded":
                batch.record_stream(main)
            upcoming = next(batches, None)
            following = None if upcoming is None else copied(upcoming)
            yield batch
            del batch

    for x in prefetched(iter(DataLoader(list(torch.randn(24, 8)), batch_size=4, pin_memory=True))):
        model(x).square().mean().backward()
        del x
        step()
    return model.state_dict()


def offload() -> object:
    """Keep activations on the host until backward.

    With `unrecorded`, memory of an activation is used again while it is copied to the host. With `early`, backward
    does not wait for the copy back.
    """

    def to_host(activation: torch.Tensor) -> torch.Tensor:
        if activation.shape != (64, 8):
            return activation
        side.wait_stream(main)
        if mistake != "unrecorded":
            activation.record_stream(side)
        with side:
            host = torch.empty(activation.shape, pin_memory=True)
            return host.copy_(activation, non_blocking=True)

    def to_device(packed: torch.Tensor) -> torch.Tensor:
        if packed.device.type != "cpu":
            return packed
        with side:
            activation = packed.to(device, non_blocking=True)
        if mistake != "early":
            main.wait_stream(side)
        activation.record_stream(main)
        return activation

    layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))).to(device)
    optimizer = torch.optim.SGD(layers.parameters(), 0.1)
    for _ in range(2):
        with saved_tensors_hooks(to_host, to_device):
            loss = layers(torch.randn(64, 8).to(device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return layers.state_dict()


def checkpoint() -> object:
    """Save asynchronous checkpoints of DCP.

    With `overtaken`, the optimizer does not wait for the copy of the weights to the host. With `unfinished`, the
    checkpoint is written before the copy has ended.
    """
    loaded = {}
    for number in range(2):
        side.wait_stream(main)
        with side, torch.no_grad():
            copies = {key: weight.to("cpu", non_blocking=True) for key, weight in model.named_parameters()}
        model(torch.randn(4, 8).to(device)).square().mean().backward()
        if mistake != "overtaken":
            main.wait_stream(side)
        step()
        if mistake != "unfinished":
            side.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            dcp.async_save(copies, checkpoint_id=folder, no_dist=True).result()
            values = {key: torch.empty_like(copy) for key, copy in copies.items()}
            dcp.load(values, checkpoint_id=folder, no_dist=True)
        loaded[f"step {number}"] = values
    return loaded


def zero() -> object:
    """Shard an optimizer like ZeRO.

    With `gather`, the all-gather of the weights does not wait for the update. With `overwritten`, the gradients are
    cleared while they are sent.
    """
    weights = nn.utils.parameters_to_vector(model.parameters()).detach()
    dist.broadcast(weights, 0)
    nn.utils.vector_to_parameters(weights, model.parameters())
    gradients = torch.zeros_like(weights)
    start = 0
    for parameter in model.parameters():
        parameter.grad = gradients[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()
    shard = weights.chunk(dist.get_world_size())[dist.get_rank()].clone()
    gradient_shard, momentum = torch.empty_like(shard), torch.zeros_like(shard)
    for _ in range(3):
        model(torch.randn(4, 8).to(device)).square().mean().backward()
        work = dist.reduce_scatter_tensor(gradient_shard, gradients, async_op=True)
        if mistake != "overwritten":
            work.wait()
        gradients.zero_()
        work.wait()
        side.wait_stream(main)
        with side:
            momentum.lerp_(gradient_shard, 0.5)
            shard.sub_(momentum, alpha=0.1)
        if mistake != "gather":
            main.wait_stream(side)
        dist.all_gather_into_tensor(weights, shard)
    main.wait_stream(side)
    return model.state_dict()


warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)
torch.save(globals()[name](), f"{name}{device.index or 0}.pt")
if dist.is_initialized():
    dist.destroy_process_group()
