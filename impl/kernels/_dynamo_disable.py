"""Functions that Dynamo does not trace."""

from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

_Function = TypeVar("_Function", bound=Callable[..., Any])

_SKIP_IT_AND_ITS_CALLS = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)


def dynamo_disable(function: _Function) -> _Function:
    """Make Dynamo break graphs at `function` and skip its callees, without the cost of `torch.compiler.disable`.

    The mark is on the code object, so no wrapper sets thread state in each call. It is for functions that compiled code
    calls, and that are never passed to `torch.compile` themselves.
    """
    marked: Any = function
    marked.__code__ = marked.__code__.replace()  # a copy, because closures of one function share their code
    set_code_exec_strategy(marked.__code__, _SKIP_IT_AND_ITS_CALLS)
    marked._torchdynamo_disable = True  # prevents inlining
    marked._torchdynamo_disable_msg = "it depends on what the host knows in each call"
    return function
