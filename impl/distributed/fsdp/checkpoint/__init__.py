"""Checkpoints of sharded training: complete or absent, for any number of ranks, and loaded without running code.

`save` writes the files of torch.distributed.checkpoint (DCP), each rank its rows, into a folder with another name, and
renames it when all files are on the disk. `load` reads them on any number of ranks, and changes the model, its
optimizer and other saved objects on all ranks or on none. `latest` finds the newest complete checkpoint.

torch's own `dcp.load` reads such a folder too. It unpickles the metadata, and every value that is not a tensor. So the
author of the files can run code in the process that loads them. `Reader` and `LoadPlanner` only accept the classes of
a checkpoint. Pass them to `dcp.load` for checkpoints that other programs saved:

    dcp.load(state_dict, storage_reader=Reader(path), planner=LoadPlanner())
"""

from impl.distributed.fsdp.checkpoint.folders import latest
from impl.distributed.fsdp.checkpoint.reading import LoadPlanner, Reader
from impl.distributed.fsdp.checkpoint.training import load, save

__all__ = ["LoadPlanner", "Reader", "latest", "load", "save"]
