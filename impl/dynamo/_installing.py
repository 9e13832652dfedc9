"""Has Dynamo use our trackers in the places of its own."""

from __future__ import annotations

import contextlib

import torch._dynamo.variables.builder

from impl._patching import PatchSet
from impl.dynamo.optimizer import OptimizerVariable

_patches = PatchSet(
    lambda: [(torch._dynamo.variables.builder.OptimizerVariable, OptimizerVariable)], within="torch._dynamo"
)


def install() -> None:
    """Trace optimizers our way from now on, in the whole process; a second call changes nothing.

    Code that is compiled already stays as it is: call `torch._dynamo.reset()` to have it compiled again.
    Sync: none. Collectives: none.
    """
    _patches.install()


def uninstall() -> None:
    """Take back `install()`, once no `installed()` block is open. A call without `install()` changes nothing."""
    _patches.uninstall()


def installed() -> contextlib.AbstractContextManager[None]:
    """As `install()` for one block, however it ends. Blocks nest and may overlap across threads.

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
