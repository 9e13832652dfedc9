"""What only `fully_shard` needs: the state of a sharded module, its initialization and settings of groups."""
