"""Code that only `fully_shard` needs: initialisation and state of a sharded module, and settings of groups."""
