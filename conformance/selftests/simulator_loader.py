"""Batches copied ahead on a side stream, as a script for the simulator: `simulator_loader.py [MISTAKE]`.

With `early`, the model does not wait for the copy. With `unrecorded`, memory of a batch is used again while the model
still reads it, because `record_stream` is missing.
"""

import sys
from collections.abc import Iterator

import torch
from torch import nn
from torch.utils.data import DataLoader

mistake = "".join(sys.argv[1:])
device = torch.accelerator.current_accelerator()
torch.manual_seed(0)
main, side = torch.accelerator.current_stream(), torch.Stream(device)
model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loader = DataLoader(list(torch.randn(24, 8)), batch_size=4, pin_memory=True)


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


for x in prefetched(iter(loader)):
    model(x).square().mean().backward()
    del x
    optimizer.step()
    optimizer.zero_grad()
torch.save(model.state_dict(), "model.pt")
