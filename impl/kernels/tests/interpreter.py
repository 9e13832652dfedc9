"""A process in which Triton interprets its kernels on CPU tensors.

TRITON_INTERPRET must be set before Triton is imported, which a process that also compiles kernels cannot have. So
one worker a test process is started when first asked, takes module-level functions with their arguments, and dies
with its parent's end of the pipe. Run as a program it is that worker.
"""

import atexit
import functools
import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Callable
from importlib.util import find_spec
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import torch

from conformance.judge.judgement import unavailable

_ROOT = Path(__file__).parents[3]
_START_S = 120.0
_CALL_S = 60.0


class Interpreter:
    def __init__(self) -> None:
        self._pipe, child_end = Pipe()
        environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        environment.pop("TANDEM_KERNELS", None)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "impl.kernels.tests.interpreter", str(child_end.fileno())],
            cwd=_ROOT, env=environment, pass_fds=[child_end.fileno()],
        )  # fmt: skip
        child_end.close()
        self._wait_s = _START_S

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call `function` in the interpreter's process. Return its result, or raise its exception."""
        self._pipe.send_bytes(pickle.dumps((function, arguments)))
        if not self._pipe.poll(self._wait_s):
            self.stop()
            raise TimeoutError(f"{function.__name__} did not return from the interpreter in {self._wait_s} s")
        self._wait_s = _CALL_S
        ok, outcome = pickle.loads(self._pipe.recv_bytes())
        assert ok, f"in the interpreter:\n{outcome}"
        return outcome

    def stop(self) -> None:
        self._pipe.close()
        self._process.kill()
        self._process.wait(10)
        the_interpreter.cache_clear()


@functools.cache
def the_interpreter() -> Interpreter:
    if find_spec("triton") is None:
        unavailable("Triton is not installed")
    interpreter = Interpreter()
    atexit.register(interpreter.stop)
    return interpreter


def _serve(pipe: Connection) -> None:
    # Memory that torch leaves uninitialised is filled with nan, so an element that no kernel wrote is seen.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    while True:
        try:
            request = pipe.recv_bytes()
        except EOFError:
            return
        try:
            function, arguments = pickle.loads(request)
            answer = pickle.dumps((True, function(*arguments)))
        except Exception:
            answer = pickle.dumps((False, traceback.format_exc()))
        pipe.send_bytes(answer)


if __name__ == "__main__":
    from conformance.gpu import interpreter_rounding
    from impl.kernels.tests import interpreter_nesting

    interpreter_nesting.patch_language_once()
    interpreter_rounding.patch_interpreter()
    _serve(Connection(int(sys.argv[1])))
