from torch.distributed.fsdp import FullyShardedDataParallel

__all__ = ["FullyShardedDataParallel"]
