"""Logs of two runs made comparable: what differs from run to run by nature is replaced by a name in angle brackets."""

from __future__ import annotations

import re
from functools import cache

_RULES: tuple[tuple[str, str, int], ...] = (
    # Terminal control: OSC (titles, links), CSI (colours, cursor), two-character escapes.
    (r"\x1b\][^\x07\x1b\n]*(?:\x07|\x1b\\)|\x1b\[[0-?]*[ -/]*[@-~]|\x1b[@-_]", "", 0),
    # A progress bar redraws its line: only what it showed last is kept.
    (r"^[^\n]*\r(?=[^\n])", "", re.M),
    (r"\r+$", "", re.M),
    (r"\[\d+:\d\d(?::\d\d)?<[^\]\n]*\]", "[<progress>]", 0),
    # glog and torch: level, month and day, time, thread.
    (r"\b([IWEF])\d{4} \d\d:\d\d:\d\d\.\d+ +\d+\b", r"\1<time> <pid>", 0),
    (r"\b(?:\d{4}[-/])?\d\d[-/]\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?", "<time>", 0),
    (r"(?<![\d:])\d{1,2}:\d\d:\d\d(?:[.,]\d+)?(?![\d:])", "<time>", 0),
    (r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b", "<uuid>", re.I),
    (r"(?<![0-9a-f])[0-9a-f]{32}(?![0-9a-f])", "<uuid>", 0),
    # Five digits and more: 0xFF in a sentence about poison is no pointer.
    (r"\b0x[0-9a-f]{5,}\b", "<pointer>", re.I),
    # Temporary directories by their random name wherever TMPDIR is, then by their place.
    (r"(?<![\w.])(?:/[\w.+@-]+)*/(?:kvproof-|tmp)[a-z0-9_]{8}(?![\w-])", "<tmp>", 0),
    (r"(?<![\w.])(?:/private|/var)?/tmp/[^/\s'\"`,;()\[\]{}]+", "<tmp>", 0),
    (r"(://)[^/\s:'\"<>]+:\d+\b", r"\1<host>:<port>", 0),
    (r"\b\d{1,3}(?:\.\d{1,3}){3}:\d+\b", "<host>:<port>", 0),
    (r"\b(localhost):\d+\b", r"\1:<port>", 0),
    (r"\b(port)( ?[=:] ?| )\d+\b", r"\1\2<port>", re.I),
    (r"\b([pt]id|process(?: id)?)( ?[=:] ?| )\d+\b", r"\1\2<pid>", re.I),
    (r"\b\d+(?:\.\d+)? ?(?:tok(?:en)?s?|reqs?|it|[KMG]i?B)/s\b", "<rate>", 0),
    (r"\b\d+(?:\.\d+)?(?:e-?\d+)? ?(?:[mnuµ]s|s|secs?|seconds?|milliseconds?|min|minutes?)\b", "<duration>", 0),
)


def normalise_log(text: str) -> str:
    """``text`` without times, durations, process ids, pointers, temporary paths, UUIDs, ports and colours.

    Idempotent: the rules are applied until nothing changes. Each application shortens what stands outside angle
    brackets, so this ends.
    """
    while True:
        before = text
        for pattern, replacement in _compiled():
            text = pattern.sub(replacement, text)
        if text == before:
            return text


@cache
def _compiled() -> list[tuple[re.Pattern[str], str]]:
    return [(re.compile(pattern, flags), replacement) for pattern, replacement, flags in _RULES]
