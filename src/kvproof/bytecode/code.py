"""The byte code: every row of every resource spells out who it is.

A row is one token's (or one state's) bytes in one resource. Its code is a function of (resource, content id, byte in
row) alone, so the bytes that must come back can be computed anywhere without a copy of what was there:

* the body is a window into a ring of random 64-bit words. The ring has a prime number of words and a row starts at
  ``content * words_per_row + resource * step``, so a whole run of consecutive contents is one contiguous copy out of
  the ring (fast), while nothing repeats at any short or round distance (a swap at distance 251, 256 or one row is
  visible);
* every ``UNIT`` bytes an 8-byte header names the row: a check digit, then in digits of base 251 the content (3), the
  resource (2) and the unit's index in the row (2). Any ``UNIT + 8`` bytes in a row name their origin. The check digit
  comes first and is never zero, so a page of zeros, of another layer or of the next token is wrong from its first byte
  on. Rows shorter than a header are body alone: they can be compared, not named.

Bytes of the code are 0..250. Larger values are fills (``Fill``), so memory nobody wrote is never taken for content.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

ByteArray = npt.NDArray[np.uint8]
WordArray = npt.NDArray[np.uint64]

BASE = 251
UNIT = 128
"""Bytes between two headers of a row."""
HEADER = 8
"""Bytes of a header."""
UNIT_WORDS = UNIT // HEADER
RING_WORDS = 32_749
"""Prime; 262 kB, small enough to stay in a core's private cache."""
RESOURCE_STEP = 1021
"""Words between the starts of two resources. Small, so that the heads of one page read neighbouring parts of the ring;
coprime to RING_WORDS and to any number of words per row, so that no two rows of one content start alike."""
MAX_CONTENTS = BASE**3
MAX_RESOURCES = BASE**2
MAX_ROW_BYTES = BASE**2 * UNIT
WINDOWS = (32, 16, 8, 4)
"""Bytes around an observed one that are looked for in the code."""
CHUNK_WORDS = 1 << 16
"""Words written or compared at once (512 kB). Less costs more calls than the cache of a core gives back."""


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
    """The code for one seed."""

    def __init__(self, seed: int = 0) -> None:
        self._period = np.random.default_rng(seed).integers(0, BASE, RING_WORDS * 8, dtype=np.uint8).view(np.uint64)
        self._ring = np.tile(self._period, 2)

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
            content = int(contents[first])
            if row_bytes < HEADER:
                out[first:last] = self._body(resource, content, (1, last - first, words), 1)[0]
            else:
                self.fill(out[None, first:last], resource, content)
        return out.view(np.uint8)[:, :row_bytes]

    def fill(self, memory: WordArray, resource: int, content: int, step: int = 1) -> None:
        """Write the code into ``memory``, uint64 ``[heads, rows, words]``, any strides.

        Head h, row i gets the code of resource ``resource + h`` and content ``content + i * step``.
        """
        for part, body, headers in self._expected(memory, resource, content, step):
            part[:] = body
            part[:, :, ::UNIT_WORDS] = headers

    def matches(self, memory: WordArray, resource: int, content: int, step: int = 1) -> bool:
        """Whether ``memory`` holds what :meth:`fill` with the same arguments would write."""
        for part, body, headers in self._expected(memory, resource, content, step):
            wrong = part != body
            np.not_equal(part[:, :, ::UNIT_WORDS], headers, out=wrong[:, :, ::UNIT_WORDS])
            if np.count_nonzero(wrong):
                return False
        return True

    def _expected(
        self, memory: WordArray, resource: int, content: int, step: int
    ) -> Iterator[tuple[WordArray, WordArray, WordArray]]:
        """Some rows of ``memory`` at a time, with the body and the headers that belong there."""
        heads, rows, words = memory.shape
        names = _row_names(content, rows, step, -(-words // UNIT_WORDS))
        owners = _resource_names(resource, heads)
        chunk = max(1, CHUNK_WORDS // (heads * words))
        for begin in range(0, rows, chunk):
            part = memory[:, begin : begin + chunk]
            body = self._body(resource, content + begin * step, part.shape, step)
            yield part, body, names[begin : begin + chunk] + owners

    def _body(self, resource: int, content: int, shape: tuple[int, ...], step: int) -> WordArray:
        """Bodies uint64 ``[heads, rows, words]``, without headers: windows into the ring, only to be read."""
        heads, rows, words = shape
        start = (content * words + resource * RESOURCE_STEP) % RING_WORDS
        end = start + (heads - 1) * RESOURCE_STEP + rows * step * words
        ring = self._ring
        if end > ring.size:
            ring = self._ring = np.tile(self._period, -(-end // RING_WORDS) + 1)
        strides = (8 * RESOURCE_STEP, 8 * step * words, 8)
        return np.ndarray((heads, rows, words), np.uint64, ring.data, 8 * start, strides)

    def decode(
        self, row: ByteArray, byte: int, resources: dict[int, int], contents: int, prefer: int | None = None
    ) -> Decoded | None:
        """Origin of ``row[byte]``, given the bytes observed around it.

        ``resources`` maps resource ids in use to their row bytes, ``contents`` is the number of ids given out,
        ``prefer`` the content expected here (decides between equally good answers). None when nothing in use explains
        the bytes: not content at all, or a fragment too short to be named.
        """
        observed = row.tobytes()
        codes: dict[tuple[int, int], bytes] = {}
        best, width = None, 0
        for resource, content, at in _named_in(row, byte, resources, contents):
            code = codes.get((resource, content))
            if code is None:
                code = codes[resource, content] = self._row(resource, content, resources[resource])
            # A header says where in its row the byte stands: a long row repeats itself, and so do the names in it.
            agreed = _agreement(observed, byte, code, at)
            if agreed > width:
                best, width = Decoded(resource, content, at), agreed
            if width == WINDOWS[0]:
                break
        if best is not None:
            return best
        for (resource, content), code in codes.items():
            hit = _longest_match(observed, byte, code)
            if hit is not None:
                return Decoded(resource, content, hit)
        if prefer is not None:
            for resource, row_bytes in resources.items():
                hit = _longest_match(observed, byte, self._row(resource, prefer, row_bytes))
                if hit is not None:
                    return Decoded(resource, prefer, hit)
        return None

    def _row(self, resource: int, content: int, row_bytes: int) -> bytes:
        code: bytes = self.rows(resource, np.array([content], np.int32), row_bytes).tobytes()
        return code


def _named_in(row: ByteArray, byte: int, resources: dict[int, int], contents: int) -> list[tuple[int, int, int]]:
    """(resource, content, row byte of ``row[byte]``) by every valid header in ``row``, nearest to ``byte`` first."""
    data = row.astype(np.int64)
    if data.size < HEADER:
        return []
    check, c0, r0, c1, r1, c2, u0, u1 = (data[i : data.size - HEADER + 1 + i] for i in range(HEADER))
    found = []
    valid = _content_check(c0, c1, c2) + _resource_check(r0, r1) == check
    for position in np.flatnonzero(valid).tolist():
        resource = int(r0[position] + BASE * r1[position])
        content = int(c0[position] + BASE * c1[position] + BASE**2 * c2[position])
        begin = int(u0[position] + BASE * u1[position]) * UNIT
        if resource in resources and content < contents and begin < resources[resource]:
            found.append((abs(position - byte), resource, content, begin + byte - position))
    return [(resource, content, at) for _, resource, content, at in sorted(found)]


@functools.lru_cache(512)
def _row_names(first: int, rows: int, step: int, units: int) -> WordArray:
    """Headers without the resource, uint64 ``[rows, units]``: bytes check c0 r0 c1 r1 c2 u0 u1.

    Kept, because all layers write and are judged by the same contents.
    """
    end = first + (rows - 1) * step + 1
    if end > MAX_CONTENTS:
        raise ValueError(f"{end} contents, limit {MAX_CONTENTS}")
    content = np.arange(first, end, step, dtype=np.uint64)[:, None]
    c0, c1, c2 = content % BASE, content // BASE % BASE, content // BASE**2
    unit = np.arange(units, dtype=np.uint64)
    names = _content_check(c0, c1, c2) | c0 << 8 | c1 << 24 | c2 << 40
    return np.asarray(names | unit % BASE << 48 | unit // BASE << 56, np.uint64)


@functools.cache
def _resource_names(first: int, count: int) -> WordArray:
    """The part of a header that names the resource, uint64 ``[count, 1, 1]``."""
    if first + count > MAX_RESOURCES:
        raise ValueError(f"{first + count} resources, limit {MAX_RESOURCES}")
    resource = np.arange(first, first + count, dtype=np.uint64)
    r0, r1 = resource % BASE, resource // BASE
    return np.asarray(_resource_check(r0, r1) | r0 << 16 | r1 << 32, np.uint64)[:, None, None]


# The two halves of the check digit add up to 1 ... 249, without a carry into the next byte.


def _content_check(c0: Any, c1: Any, c2: Any) -> Any:
    return (3 * c0 + 5 * c1 + 7 * c2) % 125


def _resource_check(r0: Any, r1: Any) -> Any:
    return (11 * r0 + 13 * r1) % 125 + 1


def _runs(contents: npt.NDArray[np.int32]) -> list[tuple[int, int]]:
    """Half-open ranges of ``contents`` that count up by one."""
    if contents.size == 0:
        return []
    cuts = np.flatnonzero(np.diff(contents) != 1) + 1
    edges = [0, *cuts.tolist(), contents.size]
    return list(itertools.pairwise(edges))


def _windows(observed: bytes, byte: int) -> Iterator[tuple[int, bytes]]:
    """(begin, bytes) of windows that hold ``observed[byte]``, widest first; one of equal bytes names nobody."""
    for width in WINDOWS:
        last = len(observed) - width
        for wanted in (byte, byte - width + 1, byte - width // 2) if last >= 0 else ():
            begin = min(max(wanted, 0), last)
            window = observed[begin : begin + width]
            if len(set(window)) > 1:
                yield begin, window


def _agreement(observed: bytes, byte: int, code: bytes, at: int) -> int:
    """How many bytes (0, 8, 16 or 32) say that ``observed[byte]`` stands at ``code[at]``."""
    for begin, window in _windows(observed, byte):
        place = at - (byte - begin)
        if len(window) >= HEADER and place >= 0 and code.startswith(window, place):
            return len(window)
    return 0


def _longest_match(observed: bytes, byte: int, code: bytes) -> int | None:
    """Where in ``code`` the neighbourhood of ``observed[byte]`` stands, or None.

    At least 4 bytes of the body must agree: the small digits of a header stand in many things that are no code.
    """
    named = len(code) >= HEADER
    for begin, window in _windows(observed, byte):
        at = code.find(window)
        body = sum(not named or i % UNIT >= HEADER for i in range(at, at + len(window)))
        if at >= 0 and body >= 4:
            return at + byte - begin
    return None
