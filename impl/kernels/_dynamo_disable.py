"""Functions that Dynamo does not see."""

from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

_Function = TypeVar("_Function", bound=Callable[..., Any])

_SKIP_IT_AND_ITS_CALLS = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)


def dynamo_disable(function: _Function) -> _Function:
    """As `torch.compiler.disable` does it, at no cost in a call: Dynamo breaks graphs at it, and skips all below.

    The code itself says so, and no wrapper that sets the thread's state in each call. For functions that compiled code
    calls, and that nobody compiles by themselves.
    """
    marked: Any = function
    marked.__code__ = marked.__code__.replace()  # its own: the closures that one function makes share theirs
    set_code_exec_strategy(marked.__code__, _SKIP_IT_AND_ITS_CALLS)
    marked._torchdynamo_disable = True  # where Dynamo would inline it
    marked._torchdynamo_disable_msg = "it depends on what the host knows in each call"
    return function
