"""Layouts of a unit's parameters on the ranks. The engine sees a layout only through `_params/param_group.py`.

`flat.py` and the files of that name: all parameters end to end in one buffer, as FullyShardedDataParallel has it.
"""
