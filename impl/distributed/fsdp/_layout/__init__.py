"""Layouts of a unit's parameters on the ranks. The engine sees a layout only through `_params/param_group.py`.

`flat*.py`: all parameters contiguous in one buffer, for FullyShardedDataParallel. Other files: DTensors, for
fully_shard.
"""
