"""Checkpoints of sharded training: complete or not there, on any number of ranks, and read without running anything.

`save` writes the files of torch.distributed.checkpoint (DCP), each rank its rows, into a folder of another name, and
renames it when all of them are on the disk. `load` reads them on as many ranks as there are now, and changes the
model, its optimizer and whatever else was saved on all ranks or on none. `latest` finds the newest complete one.

torch's own `dcp.load` reads such a folder too. It unpickles the metadata, and every value that is no tensor, with all
that pickle can do: whoever wrote the files runs code in the process that loads them. `Reader` and `LoadPlanner` let
pass what a checkpoint is made of and nothing else; give them to `dcp.load` for checkpoints that were saved otherwise:

    dcp.load(state_dict, storage_reader=Reader(path), planner=LoadPlanner())
"""

from impl.distributed.fsdp.checkpoint.folders import latest
from impl.distributed.fsdp.checkpoint.reading import LoadPlanner, Reader
from impl.distributed.fsdp.checkpoint.training import load, save

__all__ = ["LoadPlanner", "Reader", "latest", "load", "save"]
