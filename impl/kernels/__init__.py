"""Multi-tensor kernels: unscale, norm, scale, clamp, scale update.

Lists are not empty and hold dense tensors on one device, of mixed sizes and dtypes.
Nothing here tracks gradients.
"""

from impl.kernels._route import route
from impl.kernels.clamp import clamp_
from impl.kernels.norm import total_norm
from impl.kernels.scale import scale_
from impl.kernels.scale_update import update_scale_
from impl.kernels.unscale import nonfinite_mask, unscale_

__all__ = ["clamp_", "nonfinite_mask", "route", "scale_", "total_norm", "unscale_", "update_scale_"]
