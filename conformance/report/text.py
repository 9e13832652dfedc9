"""Cleaning of foreign text (names, exceptions, logs) for display on a page."""

from __future__ import annotations

from typing import Any

from rich.text import Text

_MOST = 20_000  # characters of a text, shortened in the middle
_SHOWN_AS: dict[int, str | int] = {
    **{code: 0x2400 + code for code in range(0x20)},  # control characters, NUL as ␀
    0x7F: "\u2421",
    # Controls that reverse the direction of the text around them.
    **dict.fromkeys((*range(0x202A, 0x202F), *range(0x2066, 0x206A)), "\ufffd"),
    **dict.fromkeys(range(0xD800, 0xE000), "\ufffd"),  # surrogates, not encodable in a file
}
del _SHOWN_AS[ord("\n")], _SHOWN_AS[ord("\t")]


def legible(value: Any) -> Any:
    """Return a value without terminal colours and control characters in its texts. Long texts are shortened."""
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, dict):
        return {legible(key): legible(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [legible(item) for item in value]
    return value


def _text(text: str) -> str:
    if len(text) > _MOST:
        half = _MOST // 2
        text = f"{text[:half]}\n[{len(text) - 2 * half:,} characters are left out here]\n{text[-half:]}"
    text = text.replace("\r\n", "\n")
    if "\x1b" in text:
        text = "\n".join(Text.from_ansi(line).plain for line in text.split("\n"))
    return text.translate(_SHOWN_AS)
