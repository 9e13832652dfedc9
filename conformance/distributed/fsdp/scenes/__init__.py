"""Parts that test programs on ranks share.

scene             a rank with a library and a model that the library shards, which a program gets
twins             one program on the ranks of both libraries, and what both must agree on
rank_judging      comparisons of ranks with torch's ranks and with unsharded training
module_trees      small models, described by plain values
fsdp_training     trainings with FullyShardedDataParallel, described by plain values
forked_model      a model that programs write to between its calls
fully_shard_*     trainings and sequences of calls with fully_shard
"""
