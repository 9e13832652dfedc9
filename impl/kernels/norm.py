"""The joint p-norm of a list of tensors."""

from collections.abc import Sequence

import torch
from torch import Tensor

from impl.kernels._by_dtype import by_dtype, takes_foreach


@torch.no_grad()
def total_norm(tensors: Sequence[Tensor], norm_type: float) -> Tensor:
    """Joint p-norm, as if all elements stood in one vector.

    Args:
        tensors: dense tensors of any shape and of mixed dtypes on one device; not empty.
        norm_type: any float, inf and -inf included. As in torch, 0 counts the tensors that are not all zero.

    Returns:
        0-dim, on that device; the dtype the tensors' dtypes promote to, but f32 for f16 alone.
    Sync: none. Collectives: none.
    """
    return _norm_plain(tensors, norm_type)


def _norm_plain(tensors: Sequence[Tensor], norm_type: float) -> Tensor:
    norms: list[Tensor] = []
    for same_dtype in by_dtype(tensors):
        # In f16 the norm of finite gradients soon passes 65504.
        wide = torch.float32 if same_dtype[0].dtype is torch.float16 else None
        if takes_foreach(same_dtype):
            norms.extend(torch._foreach_norm(same_dtype, norm_type, dtype=wide))
        else:
            norms.extend(torch.linalg.vector_norm(t, norm_type, dtype=wide) for t in same_dtype)
    return torch.linalg.vector_norm(torch.stack(norms), norm_type)
