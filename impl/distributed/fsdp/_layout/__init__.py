"""How the parameters of a unit lie on the ranks; the engine knows of a layout what `_param_group.py` says, and no more.

`flat.py` and the files of that name: all parameters end to end in one buffer, as FullyShardedDataParallel has it.
"""
