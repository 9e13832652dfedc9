"""Replacement of Dynamo's trackers by ours."""

from __future__ import annotations

import contextlib

import torch._dynamo.variables.builder

from impl._patching import PatchSet
from impl.dynamo.optimizer import OptimizerVariable

_patches = PatchSet(
    lambda: [(torch._dynamo.variables.builder.OptimizerVariable, OptimizerVariable)], within="torch._dynamo"
)


def install() -> None:
    """Trace optimizers by `OptimizerVariable` in the whole process. A second call changes nothing.

    Compiled code is not changed: call `torch._dynamo.reset()` to compile it again.
    Sync: none. Collectives: none.
    """
    _patches.install()


def uninstall() -> None:
    """Undo `install()`, once no `installed()` block is open. A call without `install()` changes nothing."""
    _patches.uninstall()


def installed() -> contextlib.AbstractContextManager[None]:
    """Context manager that installs for one block. Blocks nest and may overlap across threads.

    >>> import torch
    >>> parameter = torch.nn.Parameter(torch.ones(2))
    >>> parameter.grad = torch.ones(2)
    >>> optimizer = torch.optim.SGD([parameter], lr=0.5)
    >>> with installed():
    ...     torch.compile(optimizer.step, backend="eager")()
    >>> parameter.tolist()
    [0.5, 0.5]
    """
    return _patches.installed()
