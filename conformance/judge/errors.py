"""Ends that a test or an import can come to from outside, told apart from what the subject itself raises."""

from __future__ import annotations

import traceback


class Hang(BaseException):
    """A deadline has passed. Not an Exception, so that Hypothesis does not take it for an example to shrink."""


class StoppedByHand(KeyboardInterrupt):
    """Somebody pressed Ctrl-C. A class of its own, since a subject may raise KeyboardInterrupt itself."""


FROM_OUTSIDE = (Hang, StoppedByHand)


def describe(error: BaseException) -> str:
    """Type and text of an exception, also of one that cannot be turned into text."""
    return "".join(traceback.format_exception_only(error)).strip()


def stop_by_hand(signum: int, frame: object) -> None:
    """A handler of signals."""
    raise StoppedByHand
