"""Exceptions that end a test or an import from outside, as opposed to exceptions of the subject."""

from __future__ import annotations

import traceback


class Hang(BaseException):
    """Raised when a test exceeds its deadline. A BaseException, so that Hypothesis does not shrink it."""


class StoppedByUser(KeyboardInterrupt):
    """Raised when the user presses Ctrl-C. A separate class, because a subject may raise KeyboardInterrupt."""


FROM_OUTSIDE = (Hang, StoppedByUser)


def describe(error: BaseException) -> str:
    """Return the type and text of an exception, even if `str` of it raises."""
    return "".join(traceback.format_exception_only(error)).strip()


def raise_stopped_by_user(signum: int, frame: object) -> None:
    """Raise `StoppedByUser`, as a signal handler."""
    raise StoppedByUser
