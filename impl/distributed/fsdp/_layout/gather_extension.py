"""Parameters that define their own all-gather inputs and unsharded tensor, for example quantised ones.

torch's names for the two methods of such a tensor subclass are `fsdp_pre_all_gather` and `fsdp_post_all_gather`. Since
torch 2.15, a third method says whether the gathered tensors are freed once the parameter is created from them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from impl.distributed.fsdp._layout.sharded_param import ShardedParam
from impl.kernels import keep_for_current_stream

_BEFORE, _AFTER = "fsdp_pre_all_gather", "fsdp_post_all_gather"
_RELEASES = "fsdp_should_release_all_gather_outputs_after_post_all_gather"
_ARGUMENT_COUNTS = (1, 5)  # argument counts that the first method may have


class GatherExtension:
    """State of the all-gathers of one parameter with an extension.

    Args:
        param: the parameter, whose local tensor has both methods.
        device: compute device.
        policy: the user's policy, which the first method may take.
    """

    def __init__(self, param: ShardedParam, device: torch.device, policy: object) -> None:
        if param.info.parallel is not None:
            raise NotImplementedError(
                f"{param.name} is a DTensor whose local tensor has an all-gather extension, which is not supported yet"
            )
        self._param = param
        self._device = device
        self._policy = policy
        self._releases_outputs = _releases_outputs(param.local)
        mesh: Any = param.mesh
        self._mesh = mesh if mesh.ndim == 1 else mesh[mesh.mesh_dim_names[-1]]
        # The stride of the parameter itself may differ if a size is 1.
        self._stride = torch.empty(param.shape, device="meta").stride()
        self._metadata: Any = None
        self._gathered_shapes: Sequence[torch.Size] = ()
        self._inner: Sequence[Tensor] = ()  # tensors that own the memory of the unsharded parameter
        self._unsharded: nn.Parameter | None = None
        self.outputs: list[Tensor] = []  # [W * n] for each tensor that is gathered

    @property
    def memory(self) -> set[int]:
        return {tensor.untyped_storage()._cdata for tensor in (*self.outputs, *self._inner)}

    def inputs(self) -> list[Tensor]:
        """Return this rank's tensors for a gather, each [n] of any dtype. Allocate the outputs.

        Raises:
            AssertionError: the first method takes other arguments than torch passes, or omits padding.
        """
        param: Any = self._param
        local: Any = param.local if param.local.device == self._device else param.local.to(self._device)
        before = getattr(local, _BEFORE)
        inputs, self._metadata = before(*self._arguments(inspect.signature(before)))
        if local.size() != param.padded_shape and any(
            tensor.size() != param.padded_shape for tensor in inputs
        ):
            raise AssertionError(
                "When a parameter is unevenly sharded by FSDP "
                f"(orig size={param.shape}, FSDP world size={param.mesh.size()}), "
                "fsdp_pre_all_gather must return all-gather inputs with the padded sharded size "
                f"{torch.Size(param.padded_shape)} but got {[tensor.size() for tensor in inputs]}"
            )
        self._gathered_shapes = [tensor.size() for tensor in inputs]
        if not self.outputs:
            self.outputs = [
                torch.empty(param.world * tensor.numel(), dtype=tensor.dtype, device=self._device)
                for tensor in inputs
            ]
        self._allocate(self.outputs)
        return [tensor.reshape(-1) for tensor in inputs]

    def _arguments(self, signature: inspect.Signature) -> tuple[Any, ...]:
        if len(signature.parameters) not in _ARGUMENT_COUNTS:
            raise AssertionError(
                f"Invalid fsdp_pre_all_gather: {signature}\n"
                "Expects fsdp_pre_all_gather(self, mesh: DeviceMesh, "
                "outer_size: torch.Size, outer_stride: tuple[int, ...], "
                "module: nn.Module, mp_policy: MixedPrecisionPolicy)"
            )
        if len(signature.parameters) == 1:
            return (self._mesh,)
        param = self._param
        return self._mesh, param.shape, self._stride, param.info.locations[0].module, self._policy

    def unsharded(self, dtype: torch.dtype) -> nn.Parameter:
        """Return the parameter made of the gathered tensors. It is always the same object, with new memory."""
        after = getattr(self._param.local, _AFTER)
        # `data` has a version of its own, because a graph may contain the gathered tensors and not the parameter.
        gathered = tuple(
            output.data.view(-1, *size[1:])
            for output, size in zip(self.outputs, self._gathered_shapes, strict=True)
        )
        if self._unsharded is None:
            tensor, self._inner = after(gathered, self._metadata, dtype)
            tensor = torch.as_strided(tensor, self._param.shape, self._stride, storage_offset=0)
            self._unsharded = nn.Parameter(tensor, requires_grad=self._param.sharded.requires_grad)
        else:
            self._allocate(self._inner)
            after(gathered, self._metadata, dtype, out=self._unsharded)
        self._metadata = None
        if self._releases_outputs:
            _free(self.outputs)
        return self._unsharded

    def keep_for_current_stream(self) -> None:
        """Keep tensors of the unsharded parameter, such as scales, until the current stream has read them.

        The memory of these tensors is GATHER's, and the last graph that contains them frees it. The memory of outputs
        and inner tensors is not concerned, because GATHER waits before that is freed.
        """
        if self._unsharded is not None:
            own = self.memory
            tensors = _tensors_inside(self._unsharded)
            keep_for_current_stream(
                tensor for tensor in tensors if tensor.untyped_storage()._cdata not in own
            )

    def free(self) -> None:
        _free((*self.outputs, *self._inner))

    def _allocate(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if not storage.nbytes():
                storage.resize_(tensor.numel() * tensor.itemsize)


def has_extension(param: ShardedParam) -> bool:
    """Return whether a parameter's local tensor defines its own all-gather.

    Raises:
        AssertionError: it has only one of the two methods, or a third one without them or whose result is not a bool.
    """
    local = param.local
    has_both = [hasattr(local, name) for name in (_BEFORE, _AFTER)]
    if has_both[0] != has_both[1]:
        raise AssertionError(
            "Both fsdp_pre_all_gather and fsdp_post_all_gather should be defined "
            f"if using all-gather extensions: {local}"
        )
    if _releases_outputs(local) and not has_both[0]:
        raise AssertionError(
            f"{_RELEASES} requires fsdp_pre_all_gather and fsdp_post_all_gather to be defined: {local}"
        )
    return has_both[0]


def _releases_outputs(local: Tensor) -> bool:
    method = getattr(local, _RELEASES, None)
    releases = method is not None and method()
    if not isinstance(releases, bool):
        raise AssertionError(f"{_RELEASES} must return a bool, got {type(releases)}")
    return releases


def _tensors_inside(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the ordinary tensors that a tensor subclass contains, at any depth, or the tensor if it is ordinary."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _tensors_inside(getattr(tensor, name))
    elif type(tensor) in (Tensor, nn.Parameter):
        yield tensor


def _free(tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        tensor.untyped_storage().resize_(0)
