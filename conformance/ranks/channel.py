"""Pickled messages over one end of a socket pair. No call of the parent can block past its deadline.

The connections of `multiprocessing` block in the middle of a long message if the other side stops, and they pickle
tensors as handles to shared memory, which one side must keep alive.
"""

from __future__ import annotations

import contextlib
import pickle
import socket
import struct
import threading
from typing import Any

_LENGTH = struct.Struct("!Q")
_CHUNK_BYTES = 1 << 20
_MOST_CHUNKS = 64  # limit of one read, so that every rank is served


class Channel:
    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._received = bytearray()
        # A rank's autograd threads report collectives at the same time as its main thread.
        self._sending = threading.Lock()

    def fileno(self) -> int:
        return self._end.fileno()

    def send(self, message: Any, timeout_s: float | None = None) -> None:
        """Send a complete message.

        Raises:
            TimeoutError: the other end does not read.
            OSError: the other end is closed.
        """
        data = pickle.dumps(message)
        with self._sending:
            self._end.settimeout(timeout_s)
            self._end.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self) -> Any:
        """Wait for one message.

        Raises:
            EOFError: the other end is closed.
        """
        self._end.settimeout(None)
        while True:
            for message in self._complete(limit=1):
                return message
            chunk = self._end.recv(_CHUNK_BYTES)
            if not chunk:
                raise EOFError("the other end of the channel is gone")
            self._received += chunk

    def receive_available(self) -> tuple[list[Any], bool]:
        """Return the messages that have arrived, without waiting, and whether more can arrive."""
        is_open = True
        self._end.settimeout(0)
        with contextlib.suppress(BlockingIOError):
            for _ in range(_MOST_CHUNKS):
                try:
                    chunk = self._end.recv(_CHUNK_BYTES)
                except ConnectionError:
                    chunk = b""
                if not chunk:
                    is_open = False
                    break
                self._received += chunk
        return self._complete(), is_open

    def close(self) -> None:
        self._end.close()

    def _complete(self, limit: int | None = None) -> list[Any]:
        messages: list[Any] = []
        while len(self._received) >= _LENGTH.size and (limit is None or len(messages) < limit):
            (length,) = _LENGTH.unpack_from(self._received)
            stop = _LENGTH.size + length
            if len(self._received) < stop:
                break
            messages.append(pickle.loads(bytes(memoryview(self._received)[_LENGTH.size : stop])))
            del self._received[:stop]
        return messages
