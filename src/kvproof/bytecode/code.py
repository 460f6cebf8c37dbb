"""The byte code: every row of every resource spells out who it is.

A row is one token's (or one state's) bytes in one resource. Its code is a function of (resource, content id, byte in
row) alone, so the bytes that must come back can be computed anywhere without a copy of what was there:

* the body is a window into a ring of random 64-bit words. The ring has a prime number of words and a row starts at
  ``content * words_per_row + resource * step``, so rows of one resource never start at the same word, and a whole
  run of consecutive contents is one contiguous copy out of the ring (fast), while nothing repeats at any short or
  round distance (a swap at distance 251, 256 or one row is visible);
* every ``UNIT`` bytes an 8-byte header names the row in digits of base 251: content (3), resource (2), a check digit
  over the content, and the unit's index in the row (2). Any ``UNIT + 8`` bytes in a row name their origin.

Bytes of the code are 0..250. Larger values are fills (``Fill``), so memory nobody wrote is never taken for content.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

ByteArray = npt.NDArray[np.uint8]

BASE = 251
UNIT = 128
"""Bytes between two headers of a row."""
RING_WORDS = 32_749
"""Prime; 262 kB, small enough to stay in a core's private cache."""
RESOURCE_STEP = 20_219
"""Words between the starts of two resources; coprime to RING_WORDS, so fewer resources than that never collide."""
MAX_CONTENTS = BASE**3
MAX_RESOURCES = BASE**2
MAX_ROW_BYTES = BASE**2 * UNIT


class Fill(IntEnum):
    """Symbolic states of a row that holds no content. ``byte`` is the value memory shows."""

    TARGET = -1  # allocated for a request that expects a load; must be overwritten by it
    UNCOMPUTED = -2  # allocated for a request that computes its own tokens; a save must not read it
    FREE = -3  # never allocated, or padding of a page
    NULL = -4  # the null block
    ZEROED_OR_POISON = -5  # the runner zeroes this block itself; either value is legal until it is written
    ANY = -6  # production code outside the connector may write here; not judged
    TAINTED = -7  # already reported; not judged again

    @property
    def byte(self) -> int:
        return {-1: 0xFF, -2: 0xFE, -3: 0xFD, -4: 0xFC, -5: 0xFF, -6: 0xFB, -7: 0xFB}[int(self)]


OPTIONAL_BASE = -1000


def optional(content: int) -> int:
    """Symbolic state of a row that may hold ``content`` or still be TARGET poison, and nothing else."""
    return OPTIONAL_BASE - content


def optional_content(state: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Inverse of :func:`optional` for states <= OPTIONAL_BASE."""
    return np.asarray(OPTIONAL_BASE - state, np.int32)


POISON_BYTES = {fill.byte: fill for fill in (Fill.TARGET, Fill.UNCOMPUTED, Fill.FREE, Fill.NULL)}


@dataclass(frozen=True)
class Decoded:
    """Origin of an observed byte: byte ``row_byte`` of the row of ``content`` in resource ``resource``."""

    resource: int
    content: int
    row_byte: int


class ByteCode:
    """The code for one seed. Thread-safe: only reads after construction."""

    def __init__(self, seed: int = 0) -> None:
        words = np.random.default_rng(seed).integers(0, BASE, RING_WORDS * 8, dtype=np.uint8).view(np.uint64)
        # Long enough that a whole page of up to RING_WORDS words is one slice from any start.
        self._ring = np.concatenate([words, words])
        self._names = _content_names(1 << 14)

    @staticmethod
    def words_per_row(row_bytes: int) -> int:
        if not 0 < row_bytes <= MAX_ROW_BYTES:
            raise ValueError(f"row of {row_bytes} bytes, limit {MAX_ROW_BYTES} bytes")
        return -(-row_bytes // 8)

    def rows(self, resource: int, contents: npt.NDArray[np.int32], row_bytes: int) -> ByteArray:
        """Code of the given rows, uint8 ``[len(contents), row_bytes]``. ``contents`` are ids >= 0."""
        words = self.words_per_row(row_bytes)
        out = np.empty((len(contents), words), np.uint64)
        for first, last in _runs(contents):
            self._fill_words(out[first:last], resource, int(contents[first]))
        return out.view(np.uint8)[:, :row_bytes]

    def fill(self, memory: npt.NDArray[np.uint64], resource: int, first_content: int) -> None:
        """Write rows of consecutive contents into C-contiguous words ``memory`` uint64 ``[rows, words]``."""
        self._fill_words(memory, resource, first_content)

    def matches(self, memory: npt.NDArray[np.uint64], resource: int, first_content: int) -> bool:
        """Whether C-contiguous words ``memory`` uint64 ``[rows, words]`` hold the code of consecutive contents."""
        rows, words = memory.shape
        headers = self._headers(resource, first_content, rows, words)
        flat = memory.reshape(-1)
        wrong = np.empty(flat.shape, np.bool_)
        position = self._start(resource, first_content, words)
        for begin in range(0, flat.size, RING_WORDS):
            end = min(begin + RING_WORDS, flat.size)
            start = (position + begin) % RING_WORDS
            np.not_equal(flat[begin:end], self._ring[start : start + end - begin], out=wrong[begin:end])
        step = UNIT // 8
        wrong.reshape(rows, words)[:, ::step] = memory[:, ::step] != headers
        return not wrong.any()

    def _fill_words(self, out: npt.NDArray[np.uint64], resource: int, first_content: int) -> None:
        rows, words = out.shape
        flat = out.reshape(-1)
        position = self._start(resource, first_content, words)
        for begin in range(0, flat.size, RING_WORDS):
            end = min(begin + RING_WORDS, flat.size)
            start = (position + begin) % RING_WORDS
            flat[begin:end] = self._ring[start : start + end - begin]
        out[:, :: UNIT // 8] = self._headers(resource, first_content, rows, words)

    @staticmethod
    def _start(resource: int, content: int, words: int) -> int:
        return (content * words + resource * RESOURCE_STEP) % RING_WORDS

    def _headers(self, resource: int, first: int, rows: int, words: int) -> npt.NDArray[np.uint64]:
        """Headers uint64 ``[rows, units]``: bytes u0 c0 r0 c1 r1 c2 check u1, the quickly changing digits first."""
        if resource >= MAX_RESOURCES or first + rows > MAX_CONTENTS:
            raise ValueError(
                f"resource {resource} or content {first + rows} too large, limits {MAX_RESOURCES}, {MAX_CONTENTS}"
            )
        names = self._names
        if first + rows > names.size:
            names = self._names = _content_names(max(2 * names.size, first + rows))
        row = names[first : first + rows] | np.uint64(resource % BASE << 16 | resource // BASE << 32)
        return np.asarray(row[:, None] | _unit_names(-(-words * 8 // UNIT)), np.uint64)

    def decode(
        self, row: ByteArray, byte: int, resources: dict[int, int], contents: int, prefer: int | None = None
    ) -> Decoded | None:
        """Origin of ``row[byte]``, given the bytes observed around it.

        ``resources`` maps resource ids in use to their row bytes, ``contents`` is the number of ids given out,
        ``prefer`` the content expected here (decides between equally good answers). None when nothing in use explains
        the bytes: not content at all, or a fragment too short to be named.
        """
        observed = row.tobytes()
        named = self._named_in(observed, byte, resources, contents)
        if prefer is not None:
            named += [(resource, prefer) for resource in resources]
        for resource, content in named:
            code = self.rows(resource, np.array([content], np.int32), resources[resource])[0].tobytes()
            hit = _longest_match(observed, byte, code)
            if hit is not None:
                return Decoded(resource, content, hit)
        return None

    def _named_in(
        self, observed: bytes, byte: int, resources: dict[int, int], contents: int
    ) -> list[tuple[int, int]]:
        """(resource, content) of every valid header in ``observed``, nearest to ``byte`` first."""
        found: dict[tuple[int, int], int] = {}
        data = np.frombuffer(observed, np.uint8).astype(np.int64)
        if data.size < 8:
            return []
        c0, r0, c1, r1, c2, check = (data[i : data.size - 7 + i] for i in range(1, 7))
        ok = (3 * c0 + 5 * c1 + 7 * c2 + 97) % BASE == check
        for position in np.flatnonzero(ok):
            resource = int(r0[position] + BASE * r1[position])
            content = int(c0[position] + BASE * c1[position] + BASE**2 * c2[position])
            if resource in resources and content < contents:
                key = (resource, content)
                found[key] = min(found.get(key, len(observed)), abs(int(position) - byte))
        return sorted(found, key=lambda key: found[key])


def _content_names(count: int) -> npt.NDArray[np.uint64]:
    """The part of a header that names contents 0 ... count - 1, uint64 ``[count]``."""
    content = np.arange(count, dtype=np.uint64)
    c0, c1, c2 = content % BASE, content // BASE % BASE, content // BASE**2
    check = (3 * c0 + 5 * c1 + 7 * c2 + 97) % BASE
    return np.asarray(c0 << 8 | c1 << 24 | c2 << 40 | check << 48, np.uint64)


@functools.cache
def _unit_names(units: int) -> npt.NDArray[np.uint64]:
    """The part of a header that names the unit's index in its row, uint64 ``[units]``."""
    unit = np.arange(units, dtype=np.uint64)
    return np.asarray(unit % BASE | unit // BASE << 56, np.uint64)


def _runs(contents: npt.NDArray[np.int32]) -> list[tuple[int, int]]:
    """Half-open ranges of ``contents`` that count up by one."""
    if contents.size == 0:
        return []
    cuts = np.flatnonzero(np.diff(contents) != 1) + 1
    edges = [0, *cuts.tolist(), contents.size]
    return list(itertools.pairwise(edges))


def _longest_match(observed: bytes, byte: int, code: bytes, least: int = 4) -> int | None:
    """Where in ``code`` the neighbourhood of ``observed[byte]`` stands, or None.

    Tries windows that contain ``byte``, widest first; at least ``least`` bytes (fewer in shorter rows) must agree.
    """
    for width in (32, 16, 8, least):
        for begin in (byte, byte - width + 1, byte - width // 2):
            if begin < 0 or begin + width > len(observed):
                continue
            at = code.find(observed[begin : begin + width])
            if at >= 0:
                return at + byte - begin
    if len(observed) <= least:
        at = code.find(observed)
        return None if at < 0 else at + byte
    return None
