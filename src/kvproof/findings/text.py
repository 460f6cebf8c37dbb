"""Text for people: sizes with their unit, counted nouns, and strings from elsewhere made safe to print."""

from __future__ import annotations

import re
import unicodedata

_BINARY_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB")


def human_bytes(count: int) -> str:
    """Size in the largest binary unit that keeps it at 1 or more: ``1536`` -> ``1.50 KiB``."""
    if count < 1024:
        return f"{count} B"
    size = float(count)
    for unit in _BINARY_UNITS:
        size /= 1024
        if size < 1024 or unit == _BINARY_UNITS[-1]:
            break
    return f"{size:.2f} {unit}"


def counted(count: int, noun: str) -> str:
    """Number with its noun: ``1 finding``, ``1,200 findings``."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def printable(text: str) -> str:
    """One line without control characters.

    Layer names, request ids and error texts come from models and connectors: an escape sequence or a
    right-to-left override in them must not reach a terminal, and XML cannot hold them at all.
    """
    kept = "".join(c for c in text if c.isspace() or unicodedata.category(c) not in {"Cc", "Cf", "Cs", "Cn"})
    return re.sub(r"\s+", " ", kept)


def printable_block(text: str) -> str:
    """Like :func:`printable`, line breaks and indentation kept."""
    lines = text.expandtabs().splitlines()
    return "\n".join(" " * (len(line) - len(line.lstrip(" "))) + printable(line.strip()) for line in lines)


PROGRESS = "kvproof: "
"""How a child process marks its progress lines on standard output."""
