"""The ledger: what every byte of KV memory must hold right now, kept symbolically.

For every (resource, block, row) the ledger knows a content id or a :class:`Fill`. It writes the byte code when the
model computes a token, expects it where a load must restore one, and can judge memory at any moment by computing the
expected bytes again. So no copy of the KV cache is ever needed: the ledger costs 4 bytes per row.

Planes: a row whose heads are not adjacent in memory (head-major layouts) is coded head by head, so that the bytes of
consecutive tokens stay one contiguous run. ``_Plane`` is that unit; everything public speaks of resources.

Speed: rows fall into runs (consecutive contents, or one fill) that are written and compared as whole words. Only a page
in which such a run differs, or whose rows are no multiple of 8 bytes, is compared byte by byte. One thread does it all:
two spend more time handing the interpreter lock to each other than the second core saves (benchmarks/README.md).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvproof.bytecode.code import CHUNK_WORDS, OPTIONAL_BASE, POISON_BYTES, ByteCode, Decoded, Fill, optional_content
from kvproof.layout import Layout, Resource
from kvproof.layout.frames import FrameFamily, frame_families

ByteArray = npt.NDArray[np.uint8]
IntArray = npt.NDArray[np.int32]
NULL_BLOCK = 0
UNJUDGED = frozenset((int(Fill.ANY), int(Fill.TAINTED)))
ZEROED_OR_POISON = (Fill.TARGET.byte, Fill.UNCOMPUTED.byte, 0)
"""Bytes of a row the runner was told to zero: vLLM does so before the step, V1 of vllm-ascend leaves some alone."""
LEGAL_BYTES = {int(fill): (fill.byte,) for fill in Fill} | {int(Fill.ZEROED_OR_POISON): ZEROED_OR_POISON}
"""What a row in a fill state may show."""
MAX_RUNS = 64
"""Runs of rows in one page that are worth comparing one by one."""


@dataclass(frozen=True)
class Mismatch:
    """Bytes of one page that are not what the ledger says.

    ``resource`` is None for padding. ``page_byte`` is the first wrong byte, from the start of the page; ``row`` and
    ``row_byte`` the same place in the resource's own terms. ``expected`` is a content id (>= 0) or a Fill.
    ``counts`` splits the wrong bytes by what stands there (poison kinds, ``zero``, ``foreign``). ``wrong`` holds
    (page byte, state) runs as (start, length, state) in page order for the byte map.
    """

    group: int
    layer: str
    resource: int | None
    block: int
    page_byte: int
    row: int
    row_byte: int
    expected: int
    observed: int
    decoded: Decoded | None
    counts: dict[str, int]
    wrong: tuple[tuple[int, int, str], ...] = field(repr=False)

    @property
    def wrong_bytes(self) -> int:
        return sum(self.counts.values())


@dataclass
class Judged:
    """How much was looked at: bytes [B], pages (block x resource), and the resources and blocks concerned."""

    bytes: int = 0
    pages: int = 0
    resources: set[int] = field(default_factory=set)
    blocks: set[int] = field(default_factory=set)

    def add(self, other: Judged) -> None:
        self.bytes += other.bytes
        self.pages += other.pages
        self.resources |= other.resources
        self.blocks |= other.blocks


@dataclass(frozen=True)
class _Plane:
    resource: Resource
    code_id: int
    first_byte: int  # of the plane's bytes inside a resource row
    row_bytes: int
    pages: ByteArray  # [num_blocks, *row axes, row_bytes], a view of memory


class Ledger:
    """Expected contents of the memory described by ``layout``.

    ``memories[i]`` are the bytes of storage ``i``, uint8 1-D, writable. The constructor changes nothing;
    :meth:`paint` fills memory.
    """

    def __init__(self, layout: Layout, code: ByteCode, memories: Sequence[ByteArray]) -> None:
        if len(memories) != len(layout.storages):
            raise ValueError(f"{len(memories)} memories for {len(layout.storages)} storages")
        self.layout = layout
        self.code = code
        self.memories = list(memories)
        self.families = frame_families(layout)
        self.owner = np.full(layout.num_blocks, -1, np.int16)
        self.rows = {r.id: np.full((layout.num_blocks, r.rows), Fill.FREE, np.int32) for r in layout.resources}
        self._planes: dict[int, list[_Plane]] = {}
        self._words: dict[int, npt.NDArray[np.uint64] | None] = {}
        self._code_rows: dict[int, int] = {}
        self._plane_of_code: dict[int, _Plane] = {}
        for r in layout.resources:
            self._planes[r.id] = self._make_planes(r)
            self._words[r.id] = _as_words([plane.pages for plane in self._planes[r.id]])
        self._padding = {(i, g.id): _padding(f, g.id) for i, f in enumerate(self.families) for g in layout.groups}
        self._members = {(i, g.id): f.of_group(g.id) for i, f in enumerate(self.families) for g in layout.groups}
        self._row_bytes = {r.id: r.row_bytes for r in layout.resources}
        self._frames = [self._frame(family) for family in self.families]
        self._contents_used = 0
        self.zeroed_padding = False
        """Set once the runner zeroes whole pages: their padding, and that of their copies, may then be zero too."""

    def _make_planes(self, r: Resource) -> list[_Plane]:
        pages = r.view(self.memories[r.storage], self.layout.num_blocks)
        row_rank = len(r.row_axes)
        outer = r.cell_axes[:-1]
        adjacent = all(
            a.stride == b.count * b.stride for a, b in zip(r.cell_axes[:-1], r.cell_axes[1:], strict=True)
        )
        views = []
        if adjacent:
            shape = (*pages.shape[: 1 + row_rank], r.row_bytes)
            strides = (*pages.strides[: 1 + row_rank], r.cell_axes[-1].stride)
            views.append((0, np.lib.stride_tricks.as_strided(pages, shape, strides)))
        else:
            inner = r.cell_axes[-1].count
            for n, index in enumerate(np.ndindex(*(a.count for a in outer))):
                views.append((n * inner, pages[(slice(None), *(slice(None),) * row_rank, *index)]))
        planes = []
        for first_byte, view in views:
            plane = _Plane(r, len(self._code_rows), first_byte, view.shape[-1], view)
            self._code_rows[plane.code_id] = plane.row_bytes
            self._plane_of_code[plane.code_id] = plane
            planes.append(plane)
        return planes

    # ------------------------------------------------------------------ changes

    def paint(self) -> None:
        """Fill all memory: FREE everywhere, NULL in the null block."""
        for memory in self.memories:
            memory[:] = Fill.FREE.byte
        self.owner[:] = -1
        for rows in self.rows.values():
            rows[:] = Fill.FREE
        for frames in self._frames:
            frames[NULL_BLOCK] = Fill.NULL.byte

    def allocate(self, group: int, blocks: Iterable[int], fill: Fill) -> None:
        """Hand ``blocks`` to ``group``: whatever stood there is gone, its rows show ``fill``."""
        wanted = list(blocks)
        for block in wanted:
            self._check_block(block)
        self.owner[wanted] = group
        for r in self.layout.group_resources(group):
            self.rows[r.id][wanted] = fill
        for i in range(len(self.families)):
            self._poison(i, group, wanted, fill)

    def _poison(self, index: int, group: int, blocks: list[int], fill: Fill) -> None:
        family, padding, byte = self.families[index], self._padding[index, group], fill.byte
        for block in blocks:
            frame = self._frames[index][block]
            if not padding:
                frame.fill(byte)
                continue
            for begin, end in padding:
                frame[begin:end] = Fill.FREE.byte
            for r in family.of_group(group):
                for plane in self._planes[r.id]:
                    plane.pages[block] = byte

    def write(self, resource: Resource, block: int, first_row: int, contents: IntArray) -> None:
        """The model computes rows ``first_row ...`` of ``block``: memory gets their code."""
        self.expect(resource, block, first_row, contents)
        planes, words, step = self._planes[resource.id], self._words[resource.id], _step(resource)
        runs = _row_runs(contents, step) if contents.size else []
        if words is not None and len(runs) <= MAX_RUNS:
            for first, last in runs:
                for begin, part in _rows_of(words[block], first_row + first, first_row + last):
                    self.code.fill(part, planes[0].code_id, int(contents[begin - first_row]), step)
            return
        rows = np.arange(first_row, first_row + len(contents))
        index = np.unravel_index(rows, tuple(a.count for a in resource.row_axes))
        for plane in planes:
            plane.pages[block][index] = self.code.rows(plane.code_id, contents, plane.row_bytes)

    def expect(self, resource: Resource, block: int, first_row: int, contents: IntArray) -> None:
        """Rows ``first_row ...`` of ``block`` must hold ``contents`` from now on; memory is not touched."""
        self._check_block(block)
        rows, last = self.rows[resource.id], first_row + len(contents)
        if not 0 <= first_row <= last <= rows.shape[1]:
            raise ValueError(f"rows {first_row} to {last} of resource {resource.id}, limit {rows.shape[1]} rows")
        rows[block, first_row:last] = contents
        self._contents_used = max(self._contents_used, int(contents.max(initial=-1)) + 1)

    def _check_block(self, block: int) -> None:
        if block == NULL_BLOCK:
            raise ValueError("the null block holds nobody's rows, block 0")
        if not 0 < block < self.layout.num_blocks:
            raise ValueError(f"block {block}, limit {self.layout.num_blocks} blocks")

    def mark(self, resource: Resource, block: int, fill: Fill, first_row: int = 0, last_row: int | None = None) -> None:
        """Set the symbolic state of rows ``[first_row, last_row)`` without touching memory."""
        self.rows[resource.id][block, first_row:last_row] = fill

    # ------------------------------------------------------------------ judgement

    def judge(self, blocks: Iterable[int] | None = None) -> tuple[list[Mismatch], Judged]:
        """Compare memory with the ledger: all frames of ``blocks`` (default: all), padding and null block included."""
        wanted = list(range(self.layout.num_blocks)) if blocks is None else sorted(set(blocks))
        mismatches: list[Mismatch] = []
        judged = Judged()
        for i in range(len(self.families)):
            found, seen = self._judge_family(i, wanted)
            mismatches += found
            judged.add(seen)
        return mismatches, judged

    def judge_rows(
        self, resource: Resource, wanted: Mapping[int, tuple[int, int]]
    ) -> tuple[list[Mismatch], Judged]:
        """Compare rows ``wanted[block] = [first, last)`` of one resource with the ledger."""
        mismatches: list[Mismatch] = []
        judged = Judged()
        for block, (first, last) in wanted.items():
            self._check_block(block)
            found, nbytes = self._judge_page(resource, block, first, last)
            mismatches += found
            judged.add(Judged(nbytes, 1, {resource.id}, {block}))
        return mismatches, judged

    def _judge_family(self, index: int, blocks: list[int]) -> tuple[list[Mismatch], Judged]:
        family = self.families[index]
        frames = self._frames[index]
        mismatches: list[Mismatch] = []
        judged = Judged(0, len(blocks), {r.id for r in family.resources}, set(blocks))
        for block in blocks:
            owner = int(self.owner[block])
            if owner < 0:
                fill = Fill.NULL if block == NULL_BLOCK else Fill.FREE
                mismatches += self._judge_unowned(family, frames[block], block, fill)
                judged.bytes += family.nbytes
                continue
            for r in self._members[index, owner]:
                found, nbytes = self._judge_page(r, block, 0, self.rows[r.id].shape[1])
                mismatches += found
                judged.bytes += nbytes
            mismatches += self._judge_padding(family, frames[block], block, owner, self._padding[index, owner])
            judged.bytes += sum(end - begin for begin, end in self._padding[index, owner])
        return mismatches, judged

    def _judge_unowned(self, family: FrameFamily, frame: ByteArray, block: int, fill: Fill) -> list[Mismatch]:
        """A frame of nobody, in terms of the group whose resource comes first in it: page by page, then the rest.

        K and V may be pages of their own in one frame; bytes of the second are not padding of the first.
        """
        if _all_bytes(frame, fill.byte):
            return []
        rest = np.flatnonzero(frame != fill.byte)
        mismatches = []
        for r in family.of_group(family.resources[0].group):
            offsets = r.page_offsets()
            mine = np.isin(rest + family.offset - r.offset, offsets)
            wrong, rest = rest[mine], rest[~mine]
            if wrong.size:
                states, page_bytes = _states(frame[wrong]), wrong + family.offset - r.offset
                row, row_byte = divmod(int(np.flatnonzero(offsets == page_bytes[0])[0]), r.row_bytes)
                mismatches.append(
                    Mismatch(
                        r.group, r.layer, r.id, block, int(page_bytes[0]), row, row_byte, fill, int(frame[wrong[0]]),
                        self._decode(r, block, row, row_byte, None), _counts(states), _byte_runs(page_bytes, states),
                    )
                )  # fmt: skip
        if rest.size:
            mismatches.append(self._loose(family.resources[0], family, frame, block, fill, rest))
        return mismatches

    def _judge_padding(
        self, family: FrameFamily, frame: ByteArray, block: int, group: int, padding: _ByteRanges
    ) -> list[Mismatch]:
        if all(_all_bytes(frame[begin:end], Fill.FREE.byte) for begin, end in padding):
            return []
        at = np.concatenate([np.arange(a, b) for a, b in padding])
        wrong = at[(frame[at] != Fill.FREE.byte) & ~((frame[at] == 0) & self.zeroed_padding)]
        if not wrong.size:
            return []
        # Named after the page the first wrong byte lies in, or after whoever else has a page in this frame.
        first = family.offset + int(wrong[0])
        mine = family.of_group(group)
        r = next((r for r in mine if r.offset <= first < r.offset + r.page_bytes), (*mine, *family.resources)[0])
        return [self._loose(r, family, frame, block, Fill.FREE, wrong)]

    def _loose(
        self, r: Resource, family: FrameFamily, frame: ByteArray, block: int, fill: Fill, wrong: npt.NDArray[np.int64]
    ) -> Mismatch:
        """Wrong bytes of a frame that no resource uses, counted from the start of the page of ``r``'s layer."""
        mine = self.layout.group_resources(r.group)
        page = min(p.offset for p in mine if (p.layer, p.storage) == (r.layer, r.storage))
        states, page_bytes = _states(frame[wrong]), wrong + family.offset - page
        return Mismatch(
            r.group, r.layer, None, block, int(page_bytes[0]), 0, 0, fill, int(frame[wrong[0]]), None,
            _counts(states), _byte_runs(page_bytes, states),
        )  # fmt: skip

    def _judge_page(self, r: Resource, block: int, first: int, last: int) -> tuple[list[Mismatch], int]:
        """Mismatches of rows ``[first, last)``, and how many bytes [B] of them were compared."""
        rows = self.rows[r.id][block, first:last]
        if not rows.size:
            return [], 0
        runs = _row_runs(rows, _step(r))
        judged = self._row_bytes[r.id] * sum(end - begin for begin, end in runs if int(rows[begin]) not in UNJUDGED)
        words = self._words[r.id]
        if not judged or (
            words is not None
            and len(runs) <= MAX_RUNS
            and all(self._run_holds(r, words, block, first + begin, first + end) for begin, end in runs)
        ):
            return [], judged
        return self._compare_page(r, block, first, last), judged

    def _run_holds(self, r: Resource, words: npt.NDArray[np.uint64], block: int, first: int, last: int) -> bool:
        """Whether one run of rows (see :func:`_row_runs`) is as it must be. May say no where bytes are mixed."""
        state, code_id, step = int(self.rows[r.id][block, first]), self._planes[r.id][0].code_id, _step(r)
        if state in UNJUDGED:
            return True
        fills = LEGAL_BYTES.get(state, ())
        if state <= OPTIONAL_BASE:
            state, fills = OPTIONAL_BASE - state, LEGAL_BYTES[Fill.TARGET]
        for begin, part in _rows_of(words[block], first, last):
            if any(_all_words(part, fill) for fill in fills):
                continue
            if state < 0 or not self.code.matches(part, code_id, state + (begin - first) * step, step):
                return False
        return True

    def _compare_page(self, r: Resource, block: int, first: int, last: int) -> list[Mismatch]:
        """Byte-exact comparison; the fast paths above only decide whether it is needed."""
        rows = self.rows[r.id][block, first:last]
        observed = self.observed(r, block)[first:last]
        expected = np.empty_like(observed)
        may_miss = rows <= OPTIONAL_BASE
        for plane in self._planes[r.id]:
            columns = slice(plane.first_byte, plane.first_byte + plane.row_bytes)
            for fill in Fill:
                expected[rows == fill, columns] = fill.byte
            for coded, ids in ((rows >= 0, rows), (may_miss, optional_content(rows))):
                if coded.any():
                    expected[coded, columns] = self.code.rows(plane.code_id, ids[coded], plane.row_bytes)
        wrong = observed != expected
        wrong[(rows == Fill.ANY) | (rows == Fill.TAINTED)] = False
        told = rows == Fill.ZEROED_OR_POISON
        wrong[told] &= ~np.isin(observed[told], ZEROED_OR_POISON)
        wrong[may_miss] &= observed[may_miss] != Fill.TARGET.byte
        if not wrong.any():
            return []
        offsets = r.page_offsets().reshape(r.rows, r.row_bytes)[first:last]
        page_bytes = offsets[wrong]
        order = np.argsort(page_bytes, kind="stable")
        states = _states(observed[wrong])[order]
        page_bytes = page_bytes[order]
        place = r.locate(int(page_bytes[0]))
        row, row_byte = place if place is not None else (first, 0)
        return [
            Mismatch(
                r.group, r.layer, r.id, block, int(page_bytes[0]), row, row_byte, int(rows[row - first]),
                int(observed[row - first, row_byte]), self._decode(r, block, row, row_byte, int(rows[row - first])),
                _counts(states), _byte_runs(page_bytes, states),
            )
        ]  # fmt: skip

    def observed(self, r: Resource, block: int) -> ByteArray:
        """Copy of the bytes of one page, uint8 ``[rows, row_bytes]``."""
        out = np.empty((r.rows, r.row_bytes), np.uint8)
        for plane in self._planes[r.id]:
            columns = slice(plane.first_byte, plane.first_byte + plane.row_bytes)
            out[:, columns] = plane.pages[block].reshape(r.rows, plane.row_bytes)
        return out

    def name_of(self, r: Resource, block: int, row: int) -> tuple[int, int] | None:
        """(resource id, content) a row names itself; None where its rows are too short to carry a name."""
        plane = self._planes[r.id][0]
        if plane.row_bytes < 8:
            return None
        hit = self._decode(r, block, row, plane.first_byte, None)
        return (-1, -1) if hit is None else (hit.resource, hit.content)

    def _decode(self, r: Resource, block: int, row: int, row_byte: int, expected: int | None) -> Decoded | None:
        """Origin of one observed byte in terms of resources, or None."""
        for plane in self._planes[r.id]:
            if plane.first_byte <= row_byte < plane.first_byte + plane.row_bytes:
                seen = plane.pages[block][np.unravel_index(row, tuple(a.count for a in r.row_axes))]
                byte = row_byte - plane.first_byte
                if seen[byte] in POISON_BYTES:
                    return None
                prefer = expected if expected is not None and expected >= 0 else None
                hit = self.code.decode(seen, byte, self._code_rows, self._contents_used, prefer)
                if hit is None:
                    return None
                source = self._plane_of_code[hit.resource]
                return Decoded(source.resource.id, hit.content, source.first_byte + hit.row_byte)
        return None

    def taint(self, mismatch: Mismatch) -> bool:
        """Do not report this page again: its wrong rows are no longer judged, padding and free frames repainted.

        True where memory was repainted, all of it in the frames of this block.
        """
        if mismatch.resource is None or self.owner[mismatch.block] < 0:
            fill = Fill.NULL if mismatch.block == NULL_BLOCK else Fill.FREE
            for i, frames in enumerate(self._frames):
                frame = frames[mismatch.block]
                owner = int(self.owner[mismatch.block])
                if owner < 0:
                    frame[:] = fill.byte
                for begin, end in self._padding[i, owner] if owner >= 0 else ():
                    frame[begin:end] = Fill.FREE.byte
            return True
        r = next(r for r in self.layout.resources if r.id == mismatch.resource)
        offsets = r.page_offsets().reshape(r.rows, r.row_bytes)
        wrong = np.zeros(offsets.max() + 1, np.bool_)
        for start, length, _ in mismatch.wrong:
            wrong[start : start + length] = True
        self.rows[r.id][mismatch.block, wrong[offsets].any(axis=1)] = Fill.TAINTED
        return False

    def _frame(self, family: FrameFamily) -> ByteArray:
        """Writable view uint8 ``[num_blocks, nbytes]`` of a frame family."""
        memory = self.memories[family.storage]
        return np.lib.stride_tricks.as_strided(
            memory[family.offset :], (self.layout.num_blocks, family.nbytes), (family.block_stride, 1)
        )


_ByteRanges = tuple[tuple[int, int], ...]
"""Half-open byte ranges of a frame, in order."""


def _padding(family: FrameFamily, group: int) -> _ByteRanges:
    """Bytes of the frame no resource of ``group`` uses."""
    used = np.zeros(family.nbytes + 2, np.uint8)  # a border on both sides, so that every range has two edges
    for r in family.of_group(group):
        r.view(used, 1, r.offset - family.offset + 1)[:] = 1
    used[0] = used[-1] = 1
    edges = np.flatnonzero(np.diff(used)).tolist()
    return tuple(zip(edges[::2], edges[1::2], strict=True))


def _step(r: Resource) -> int:
    """By how much the content id grows from one row to the next, in tokens of one request."""
    return max(1, r.tokens_per_row)


def _row_runs(rows: IntArray, step: int) -> list[tuple[int, int]]:
    """Half-open ranges of rows that hold consecutive contents (also optional ones) or one and the same fill."""
    before, after = rows[:-1], rows[1:]
    delta = after - before
    if rows[0] >= 0 and np.count_nonzero(delta == step) == delta.size:
        return [(0, rows.size)]
    joined = ((delta == step) & (before >= 0)) | ((delta == -step) & (before <= OPTIONAL_BASE))
    joined |= (delta == 0) & (after > OPTIONAL_BASE) & (after < 0)
    cuts = np.flatnonzero(~joined) + 1
    return list(itertools.pairwise([0, *cuts.tolist(), rows.size]))


def _as_words(planes: list[ByteArray]) -> npt.NDArray[np.uint64] | None:
    """The planes of a resource as uint64 ``[num_blocks, kernel blocks, heads, rows, words]``.

    None where rows are no whole words, or the planes do not follow each other at one distance.
    """
    first = planes[0] if planes[0].ndim == 4 else planes[0][:, None]
    starts = [plane.ctypes.data for plane in planes]
    distances = {b - a for a, b in itertools.pairwise(starts)} or {0}
    if first.shape[-1] % 8 or first.strides[-1] != 1 or first.ndim > 4 or len(distances) > 1:
        return None
    words = first.view(np.uint64)
    blocks, kernel_blocks, *rest = words.shape
    outer, inner = words.strides[:2], words.strides[2:]
    return np.lib.stride_tricks.as_strided(
        words, (blocks, kernel_blocks, len(planes), *rest), (*outer, distances.pop(), *inner)
    )


def _rows_of(
    page: npt.NDArray[np.uint64], first: int, last: int
) -> Iterator[tuple[int, npt.NDArray[np.uint64]]]:
    """(first row, words ``[heads, rows, words]``) of rows ``[first, last)``, kernel block by kernel block."""
    rows = page.shape[2]
    for begin in range(first - first % rows, last, rows):
        low, high = max(first, begin), min(last, begin + rows)
        yield low, page[begin // rows, :, low - begin : high - begin]


def _all_bytes(data: ByteArray, value: int) -> bool:
    if data.nbytes % 8 == 0:
        return _all_words(data.view(np.uint64), value)
    return bool((data == value).all())


def _all_words(data: npt.NDArray[np.uint64], value: int) -> bool:
    """Whether every byte of ``data`` is ``value``; long memory in pieces, so that the result stays in the cache."""
    word = np.uint64(value * 0x0101010101010101)
    return not any(
        np.count_nonzero(data[begin : begin + CHUNK_WORDS] != word) for begin in range(0, len(data), CHUNK_WORDS)
    )


_STATE_NAMES = ("foreign", "zero", "poison_target", "poison_uncomputed", "poison_free", "poison_null")
_STATE_OF_BYTE = np.zeros(256, np.uint8)
_STATE_OF_BYTE[0] = 1
_STATE_OF_BYTE[[0xFF, 0xFE, 0xFD, 0xFC]] = (2, 3, 4, 5)


def _states(observed: ByteArray) -> ByteArray:
    """Index into ``_STATE_NAMES`` of each wrong byte. A zero is called so only where most wrong bytes are zero."""
    states = _STATE_OF_BYTE[observed]
    if (states == 1).sum() * 2 < states.size:
        states = np.where(states == 1, np.uint8(0), states)
    return states


def _counts(states: ByteArray) -> dict[str, int]:
    return {_STATE_NAMES[i]: int(n) for i, n in enumerate(np.bincount(states)) if n}


def _byte_runs(positions: npt.NDArray[np.int64], states: ByteArray) -> tuple[tuple[int, int, str], ...]:
    """(start, length, state) of adjacent equal states. ``positions`` are sorted bytes."""
    cuts = np.flatnonzero((np.diff(positions) != 1) | (np.diff(states.astype(np.int16)) != 0)) + 1
    edges = [0, *cuts.tolist(), positions.size]
    return tuple(
        (int(positions[a]), b - a, _STATE_NAMES[states[a]]) for a, b in itertools.pairwise(edges)
    )
