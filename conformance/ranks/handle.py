"""The parent's handle of one rank: its process, its pipes, and the messages that they bring."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import re
import select
import selectors
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from typing import Any

from conformance.judge.rank_errors import Failure
from conformance.ranks import process as rank_process
from conformance.ranks.channel import Channel
from conformance.ranks.process import RankSettings, serve

# Modules that the fork server imports once, so that a rank starts in milliseconds. It must not run operators, because
# the threads that they start would be missing in every fork. DTensor's first operator imports Dynamo, which takes
# seconds that should not count against the deadline of a case.
_PRELOADED = (
    "torch",
    "torch.distributed",
    "torch.distributed.tensor",
    "torch._dynamo",
    rank_process.__name__,
)
# Modules with cases, which the fork server also imports. They import no subject, because each rank imports its own.
_CASE_MODULES = re.compile(
    r"conformance\.(ranks\.failing_programs|gpu\.probed_operations|strategies\.dtensor_gradients"
    r"|selftests\.processes|distributed\.(\w+\.)*test_\w+)"
)
_KILL_S = 10.0
_TAIL_BYTES = 16_384
_READ_BYTES = 65_536
_MOST_READS = 64
_STACK_S = 3.0
# The outermost frame of a rank's main thread, whose stack is last. It is the fork server's command.
_LAST_FRAME = b'  File "<string>", line 1 in <module>\n'


@functools.cache
def fork_server(*modules: str) -> ForkServerContext:
    """Return the context whose processes are forks of a server that has imported torch.

    Before its first process, the server also imports the modules with cases that this process has imported, and those
    among `modules`.
    """
    context = multiprocessing.get_context("forkserver")
    # A new process imports its parent's main module, which under `python -m pytest` is pytest.
    mains = ["pytest"] if "pytest" in sys.modules else []
    cases = filter(_CASE_MODULES.fullmatch, dict.fromkeys([*sys.modules, *modules]))
    context.set_forkserver_preload([*_PRELOADED, *mains, *cases])
    return context


def shared_fork_server() -> dict[str, Any]:
    """Start the fork server, and return the attributes by which its forks can use it too."""
    forkserver.ensure_running()
    server: Any = forkserver._forkserver  # pyright: ignore[reportPrivateUsage]
    # Python 3.14 has a key too.
    return {name: value for name, value in vars(server).items() if name.endswith(("_address", "_authkey"))}


def keep_fork_server(shared: Mapping[str, Any]) -> None:
    """Use the fork server that forked this process, because starting a new one takes seconds.

    Forget its modules of tests, which have the settings of no profile.
    """
    server: Any = forkserver._forkserver  # pyright: ignore[reportPrivateUsage]
    vars(server).update(shared)
    # Each use would check the server as a child process, but it is a child of another process.
    server.ensure_running = lambda: None
    for name in [name for name in sys.modules if name.startswith("conformance.") and ".test_" in name]:
        del sys.modules[name]


@dataclass(eq=False)
class RankHandle:
    number: int
    process: BaseProcess
    control: Channel
    output: Connection
    stacks: Connection
    # Nothing is written to it. The rank dies when this end is closed, also by the end of this process.
    lifeline: Connection
    _tail: bytearray = field(default_factory=bytearray)

    @classmethod
    def start(cls, settings: RankSettings) -> RankHandle:
        context = fork_server()
        control, control_end = socket.socketpair()
        output, output_end = context.Pipe(duplex=False)
        stacks, stacks_end = context.Pipe(duplex=False)
        lifeline_end, lifeline = context.Pipe(duplex=False)
        ends = (control_end, output_end, stacks_end, lifeline_end)
        # A daemon could not start processes, but the subject may start some, such as data loader workers.
        process = context.Process(
            target=serve, args=(settings, *ends), name=f"rank {settings.rank}", daemon=False
        )
        process.start()
        for end in ends:
            end.close()
        os.set_blocking(output.fileno(), False)
        os.set_blocking(stacks.fileno(), False)
        return cls(settings.rank, process, Channel(control), output, stacks, lifeline)

    def watch(self, selector: selectors.BaseSelector) -> None:
        for source in (self.control, self.output, self.process.sentinel):
            selector.register(source, selectors.EVENT_READ, data=self)

    def send(self, message: Any, timeout_s: float) -> None:
        # A rank that is gone or does not read is noticed by its missing answer.
        with contextlib.suppress(OSError):
            self.control.send(message, max(timeout_s, 0.001))

    def read(self, source: Any, selector: selectors.BaseSelector) -> Iterator[Any]:
        """Yield the messages of a readable source, and a `Failure` if the rank has died."""
        is_open = True
        if source is self.output:
            is_open = self._drain_output()
        elif source is self.control:
            messages, is_open = self.control.receive_available()
            yield from messages
        else:
            is_open = False
            yield from self.control.receive_available()[0]
            yield self._death()
        if not is_open:
            with contextlib.suppress(KeyError):
                selector.unregister(source)

    def forget_output(self) -> None:
        self._drain_output()
        self._tail.clear()

    def output_tail(self) -> str:
        """Return the end of what the rank has written to stdout and stderr since its case began."""
        self._drain_output()
        return self._tail.decode(errors="replace")

    def ask_for_stack(self) -> None:
        with contextlib.suppress(ProcessLookupError, TypeError):
            os.kill(self.process.pid, signal.SIGUSR1)  # pyright: ignore[reportArgumentType]

    def stack(self) -> str:
        """Return the Python stacks of all threads of the rank. Call `ask_for_stack` before."""
        text = bytearray()
        end = time.monotonic() + _STACK_S
        # A stack arrives in pieces, and on a busy machine with pauses.
        while not text.endswith(_LAST_FRAME) and (left_s := end - time.monotonic()) > 0:
            if not select.select([self.stacks], [], [], left_s)[0]:
                break
            piece = os.read(self.stacks.fileno(), _READ_BYTES)
            if not piece:
                break
            text += piece
        # The frames of the rank itself, outside the case, are the same in every report.
        case, *_ = text.decode(errors="replace").partition(f'  File "{rank_process.__file__}"')
        return case or "no stack: the rank is stopped, or was not started completely"

    def kill(self) -> None:
        """Kill the rank and the processes that it started, which are in its process group."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)  # pyright: ignore[reportArgumentType]
        except ProcessLookupError:  # no group yet, or no process any more
            self.process.kill()

    def join_and_close(self) -> None:
        self.process.join(_KILL_S)
        with contextlib.suppress(ValueError):  # still running after SIGKILL, in the kernel
            self.process.close()
        for end in (self.control, self.output, self.stacks, self.lifeline):
            end.close()

    def _drain_output(self) -> bool:
        """Read the available output and return whether more can arrive."""
        with contextlib.suppress(BlockingIOError):
            for _ in range(_MOST_READS):
                piece = os.read(self.output.fileno(), _READ_BYTES)
                if not piece:
                    return False
                self._tail += piece
                del self._tail[:-_TAIL_BYTES]
        return True

    def _death(self) -> Failure:
        when_ns = time.monotonic_ns()
        self.process.join(_KILL_S)
        code = self.process.exitcode
        text = (
            f"killed by {signal.Signals(-code).name}"
            if code is not None and code < 0
            else f"exit code {code}"
        )
        return Failure(self.number, "death", text, traceback="", when_ns=when_ns, exitcode=code)
