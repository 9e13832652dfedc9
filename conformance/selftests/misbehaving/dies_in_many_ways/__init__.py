"""Ends or hangs its process in another way in each of its functions but two."""

from types import SimpleNamespace

import cannot_be_stopped
import ends_its_process
import holds_pythons_lock
import is_killed
import segfaults
import stops_its_process
import torch
from right import after, clipping

__all__ = ["amp", "nn"]

nn = clipping(
    clip_grad_norm=after(cannot_be_stopped.act, torch.nn.utils.clip_grad_norm),
    clip_grad_norm_=after(stops_its_process.act, torch.nn.utils.clip_grad_norm_),
    clip_grad_value_=after(is_killed.act, torch.nn.utils.clip_grad_value_),
    clip_grads_with_norm_=after(segfaults.act, torch.nn.utils.clip_grads_with_norm_),
    get_total_norm=after(ends_its_process.act, torch.nn.utils.get_total_norm),
)
amp = SimpleNamespace(
    autocast=torch.amp.autocast,
    custom_fwd=torch.amp.custom_fwd,
    is_autocast_available=after(holds_pythons_lock.act, torch.amp.is_autocast_available),
)
