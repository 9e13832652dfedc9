"""Chromium without a window, driven through its DevTools pipe: real keys, real layout, no driver, no network.

The pipe is two file descriptors (3 and 4) and JSON with a zero byte after each message, so this needs no library.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import select
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from conformance.judge.judgement import unavailable

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = [
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",
    "--no-first-run",
    "--hide-scrollbars",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-quic",
]

# Each visible text with its contrast and the least contrast of WCAG 2.2, 1.4.3. Its background is that of the elements
# around it. The colour of a text in a drawing is its fill.
CONTRAST = """
(() => {
  const rgba = (text) => {
    const n = text.match(/[\\d.]+/g).map(Number);
    const unit = text.startsWith("color(srgb") ? 255 : 1;  // color-mix() gives numbers from 0 to 1
    return [...n.slice(0, 3).map((v) => v * unit), n[3] ?? 1];
  };
  const over = (top, below) => [0, 1, 2].map((i) => top[i] * top[3] + below[i] * (1 - top[3]));
  const light = (c) => c.slice(0, 3).map((v) => v / 255)
    .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (element) => {
    if (!element) return [255, 255, 255];
    const own = rgba(getComputedStyle(element).backgroundColor);
    return own[3] === 1 ? own : over(own, ground(element.parentElement));
  };
  const found = [];
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const element = texts.currentNode.parentElement;
    if (!texts.currentNode.data.trim() || !element.checkVisibility() || element.closest("script")) continue;
    const style = getComputedStyle(element);
    const size = parseFloat(style.fontSize);
    const least = size >= 24 || (size >= 18.66 && style.fontWeight >= 700) ? 3 : 4.5;
    const drawn = element.closest("svg");
    const below = ground(drawn ? drawn.parentElement : element);
    const both = [light(over(rgba(drawn ? style.fill : style.color), below)), light(below)];
    const contrast = (Math.max(...both) + 0.05) / (Math.min(...both) + 0.05);
    found.push({ contrast, least, text: texts.currentNode.data.trim(), tag: element.outerHTML.slice(0, 90) });
  }
  return found;
})()
"""


def find_chromium() -> str | None:
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


@contextlib.contextmanager
def start(profile: Path) -> Iterator[Browser]:
    """Context manager that runs a browser for a module's tests, or reports them as *unavailable* if there is none."""
    program = find_chromium() or ""
    if not program:
        unavailable("no Chromium on PATH")
    try:
        browser = Browser(program, profile)
    except (RuntimeError, OSError) as error:  # a package that only says where to get the real one
        unavailable(f"{program} does not start: {error}")
        raise
    with contextlib.closing(browser):
        yield browser


class Browser:
    """A page of a browser. Every call ends within 55 seconds since the start, or raises TimeoutError."""

    def __init__(self, program: str, profile: Path) -> None:
        self._end = time.monotonic() + 55.0
        self._ids = itertools.count(1)
        self._unread = b""
        self.complaints: list[str] = []  # console messages and uncaught errors of the page
        self.requests: list[str] = []  # addresses that the page asked for
        there, self._send_fd = os.pipe()
        self._read_fd, back = os.pipe()
        # Copies above the descriptors that they are moved to.
        ends = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (there, back)]
        actions = [
            *((os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_WRONLY, 0) for fd in (1, 2)),
            *((os.POSIX_SPAWN_DUP2, end, fd) for fd, end in enumerate(ends, 3)),
        ]
        words = [program, *_FLAGS, f"--user-data-dir={profile}"]
        try:
            self._process = os.posix_spawn(program, words, os.environ, file_actions=actions, setsid=True)
        finally:
            for fd in (there, back, *ends):
                os.close(fd)
        self._session = ""
        try:
            self._begin()
        except BaseException:
            self.close()
            raise

    def _begin(self) -> None:
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)
        os.close(self._send_fd)
        os.close(self._read_fd)

    def open(self, file: Path, width: int, height: int = 900, fragment: str = "") -> None:
        """Load a file, with a fragment, in a viewport of this width. Below 600 pixels the browser acts like a phone."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        # Without a blank page first, an open page is not loaded again.
        self._call("Page.navigate", url="about:blank")
        self._call("Page.navigate", url=file.absolute().as_uri() + fragment)
        while self.run("document.readyState !== 'complete' || location.protocol !== 'file:'"):
            time.sleep(0.02)

    def run(self, script: str) -> Any:
        """Return the value of a JavaScript expression. Wait for it if it is a promise."""
        answer = self._call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True, userGesture=True
        )
        if "exceptionDetails" in answer:
            raise AssertionError(f"{script[:200]}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def press(self, key: str, code: int, text: str = "") -> None:
        """Press and release a key, so that focus moves and buttons react."""
        about = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self._call("Input.dispatchKeyEvent", type="keyDown", text=text, **about)
        self._call("Input.dispatchKeyEvent", type="keyUp", **about)
        self.run("new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")

    def emulate_print(self, on: bool = True) -> None:
        """Lay the page out for paper, or for the screen again."""
        self._call("Emulation.setEmulatedMedia", media="print" if on else "")

    def emulate_dark(self, on: bool) -> None:
        """Prefer dark pages, or light ones."""
        preferred = {"name": "prefers-color-scheme", "value": "dark" if on else "light"}
        self._call("Emulation.setEmulatedMedia", features=[preferred])

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._send_fd, json.dumps(message).encode() + b"\0")
        while True:
            message = self._next()
            if message.get("id") == number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']['message']}")
                return message["result"]
            self._note(message)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            left = self._end - time.monotonic()
            if left <= 0 or not select.select([self._read_fd], [], [], left)[0]:
                raise TimeoutError("the browser did not answer in time")
            more = os.read(self._read_fd, 1 << 16)
            if not more:
                raise RuntimeError("the browser has ended")
            self._unread += more
        message, _, self._unread = self._unread.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(json.dumps(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
