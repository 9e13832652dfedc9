"""Code that only `FullyShardedDataParallel` needs: the wrapper, buffers and `summon_full_params`."""
