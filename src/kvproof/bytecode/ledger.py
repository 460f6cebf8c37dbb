"""The ledger: what every byte of KV memory must hold right now, kept symbolically.

For every (resource, block, row) the ledger knows a content id or a :class:`Fill`. It writes the byte code when the
model computes a token, expects it where a load must restore one, and can judge memory at any moment by computing the
expected bytes again. So no copy of the KV cache is ever needed: the ledger costs 4 bytes per row.

Planes: a row whose heads are not adjacent in memory (head-major layouts) is coded head by head, so that the bytes of
consecutive tokens stay one contiguous run. ``_Plane`` is that unit; everything public speaks of resources.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvproof.bytecode.code import OPTIONAL_BASE, POISON_BYTES, ByteCode, Decoded, Fill, optional_content
from kvproof.layout import Layout, Resource
from kvproof.layout.frames import FrameFamily, frame_families

ByteArray = npt.NDArray[np.uint8]
IntArray = npt.NDArray[np.int32]
NULL_BLOCK = 0


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
    words: npt.NDArray[np.uint64] | None  # [num_blocks, rows, words] when contiguous and aligned


class Ledger:
    """Expected contents of the memory described by ``layout``.

    ``memories[i]`` are the bytes of storage ``i``, uint8 1-D, writable. The constructor changes nothing;
    :meth:`paint` fills memory.
    """

    def __init__(self, layout: Layout, code: ByteCode, memories: Sequence[ByteArray], threads: int = 0) -> None:
        if len(memories) != len(layout.storages):
            raise ValueError(f"{len(memories)} memories for {len(layout.storages)} storages")
        self.layout = layout
        self.code = code
        self.memories = list(memories)
        self.families = frame_families(layout)
        self.owner = np.full(layout.num_blocks, -1, np.int16)
        self.rows = {r.id: np.full((layout.num_blocks, r.rows), Fill.FREE, np.int32) for r in layout.resources}
        self._planes: dict[int, list[_Plane]] = {}
        self._code_rows: dict[int, int] = {}
        self._plane_of_code: dict[int, _Plane] = {}
        for r in layout.resources:
            self._planes[r.id] = self._make_planes(r)
        self._padding = {
            (i, g.id): _padding(f, g.id) for i, f in enumerate(self.families) for g in layout.groups
        }
        self._contents_used = 0
        self._pool = ThreadPoolExecutor(threads or min(4, os.cpu_count() or 1))

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
            plane = _Plane(r, len(self._code_rows), first_byte, view.shape[-1], view, _as_words(view, r.rows))
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
        for family in self.families:
            self._frame(family)[NULL_BLOCK] = Fill.NULL.byte

    def allocate(self, group: int, blocks: Iterable[int], fill: Fill) -> None:
        """Hand ``blocks`` to ``group``: whatever stood there is gone, its rows show ``fill``."""
        for block in blocks:
            self.owner[block] = group
            for i, family in enumerate(self.families):
                frame = self._frame(family)[block]
                padding = self._padding[i, group]
                if padding is None:
                    frame[:] = fill.byte
                    continue
                frame[:] = Fill.FREE.byte
                for r in family.of_group(group):
                    for plane in self._planes[r.id]:
                        plane.pages[block] = fill.byte
            for r in self.layout.group_resources(group):
                self.rows[r.id][block] = fill

    def write(self, resource: Resource, block: int, first_row: int, contents: IntArray) -> None:
        """The model computes rows ``first_row ...`` of ``block``: memory gets their code."""
        self.expect(resource, block, first_row, contents)
        last = first_row + len(contents)
        consecutive = contents.size < 2 or bool((np.diff(contents) == 1).all())
        for plane in self._planes[resource.id]:
            if plane.words is not None and consecutive:
                self.code.fill(plane.words[block, first_row:last], plane.code_id, int(contents[0]))
            else:
                code = self.code.rows(plane.code_id, contents, plane.row_bytes)
                axes = tuple(a.count for a in resource.row_axes)
                index = np.unravel_index(np.arange(first_row, last), axes)
                plane.pages[block][index] = code

    def expect(self, resource: Resource, block: int, first_row: int, contents: IntArray) -> None:
        """Rows ``first_row ...`` of ``block`` must hold ``contents`` from now on; memory is not touched."""
        if block == NULL_BLOCK:
            raise ValueError("the null block holds nobody's rows, block 0")
        self.rows[resource.id][block, first_row : first_row + len(contents)] = contents
        self._contents_used = max(self._contents_used, int(contents.max(initial=-1)) + 1)

    def mark(self, resource: Resource, block: int, fill: Fill, first_row: int = 0, last_row: int | None = None) -> None:
        """Set the symbolic state of rows ``[first_row, last_row)`` without touching memory."""
        self.rows[resource.id][block, first_row:last_row] = fill

    # ------------------------------------------------------------------ judgement

    def judge(self, blocks: Iterable[int] | None = None) -> tuple[list[Mismatch], Judged]:
        """Compare memory with the ledger: all frames of ``blocks`` (default: all), padding and null block included."""
        wanted = list(range(self.layout.num_blocks)) if blocks is None else sorted(set(blocks))
        return _merge(self._pool.map(lambda i: self._judge_family(i, wanted), range(len(self.families))))

    def judge_rows(
        self, resource: Resource, wanted: dict[int, tuple[int, int]]
    ) -> tuple[list[Mismatch], Judged]:
        """Compare rows ``wanted[block] = [first, last)`` of one resource with the ledger."""
        mismatches: list[Mismatch] = []
        judged = Judged()
        for block, (first, last) in wanted.items():
            mismatches += self._judge_page(resource, block, first, last)
            judged.add(Judged((last - first) * resource.row_bytes, 1, {resource.id}, {block}))
        return mismatches, judged

    def _judge_family(self, index: int, blocks: list[int]) -> tuple[list[Mismatch], Judged]:
        family = self.families[index]
        frames = self._frame(family)
        mismatches: list[Mismatch] = []
        judged = Judged(resources={r.id for r in family.resources})
        for block in blocks:
            owner = int(self.owner[block])
            if owner < 0:
                fill = Fill.NULL if block == NULL_BLOCK else Fill.FREE
                mismatches += self._judge_unowned(family, frames[block], block, fill)
            else:
                for r in family.of_group(owner):
                    mismatches += self._judge_page(r, block, 0, r.rows)
                padding = self._padding[index, owner]
                if padding is not None and padding.size:
                    mismatches += self._judge_padding(family, frames[block], block, owner, padding)
            judged.add(Judged(family.nbytes, 1, set(), {block}))
        return mismatches, judged

    def _judge_unowned(self, family: FrameFamily, frame: ByteArray, block: int, fill: Fill) -> list[Mismatch]:
        if _all_bytes(frame, fill.byte):
            return []
        r = family.resources[0]
        wrong = np.flatnonzero(frame != fill.byte)
        first = int(wrong[0]) + family.offset - r.offset
        place = r.locate(first)
        row, row_byte = place or (0, 0)
        decoded = self._decode(r, block, row, row_byte, None) if place else None
        states = _states(frame[wrong])
        return [
            Mismatch(
                r.group, r.layer, r.id if place else None, block, first, row, row_byte, fill, int(frame[wrong[0]]),
                decoded, _counts(states), _byte_runs(wrong + family.offset - r.offset, states),
            )
        ]  # fmt: skip

    def _judge_padding(
        self, family: FrameFamily, frame: ByteArray, block: int, group: int, padding: npt.NDArray[np.int64]
    ) -> list[Mismatch]:
        bad = padding[frame[padding] != Fill.FREE.byte]
        if not bad.size:
            return []
        mine = family.of_group(group)
        layer = mine[0].layer if mine else family.resources[0].layer
        states = _states(frame[bad])
        return [
            Mismatch(
                group, layer, None, block, int(bad[0]), 0, 0, Fill.FREE, int(frame[bad[0]]), None, _counts(states),
                _byte_runs(bad, states),
            )
        ]  # fmt: skip

    def _judge_page(self, r: Resource, block: int, first: int, last: int) -> list[Mismatch]:
        rows = self.rows[r.id][block, first:last]
        if rows.size == 0:
            return []
        low, high = int(rows.min()), int(rows.max())
        if high < 0 and low == high and low in (Fill.ANY, Fill.TAINTED):
            return []
        if block == NULL_BLOCK:
            return []
        consecutive = low >= 0 and (rows.size == 1 or bool((np.diff(rows) == 1).all()))
        for plane in self._planes[r.id]:
            if plane.words is None:
                break
            words = plane.words[block, first:last]
            if consecutive:
                if not self.code.matches(words, plane.code_id, int(rows[0])):
                    break
            elif not (_plain_fill(low, high) and _all_words(words, Fill(low).byte)):
                break
        else:
            return []
        return self._compare_page(r, block, first, last)

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
        wrong[rows == Fill.ZEROED_OR_POISON] &= observed[rows == Fill.ZEROED_OR_POISON] != 0
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

    def taint(self, mismatch: Mismatch) -> None:
        """Do not report this page again: its wrong rows are no longer judged, padding and free frames repainted."""
        if mismatch.resource is None or self.owner[mismatch.block] < 0:
            fill = Fill.NULL if mismatch.block == NULL_BLOCK else Fill.FREE
            for i, family in enumerate(self.families):
                frame = self._frame(family)[mismatch.block]
                owner = int(self.owner[mismatch.block])
                if owner < 0:
                    frame[:] = fill.byte
                elif (padding := self._padding[i, owner]) is not None:
                    frame[padding] = Fill.FREE.byte
            return
        r = next(r for r in self.layout.resources if r.id == mismatch.resource)
        offsets = r.page_offsets().reshape(r.rows, r.row_bytes)
        wrong = np.zeros(offsets.max() + 1, np.bool_)
        for start, length, _ in mismatch.wrong:
            wrong[start : start + length] = True
        self.rows[r.id][mismatch.block, wrong[offsets].any(axis=1)] = Fill.TAINTED

    def _frame(self, family: FrameFamily) -> ByteArray:
        """Writable view uint8 ``[num_blocks, nbytes]`` of a frame family."""
        memory = self.memories[family.storage]
        return np.lib.stride_tricks.as_strided(
            memory[family.offset :], (self.layout.num_blocks, family.nbytes), (family.block_stride, 1)
        )


def _plain_fill(low: int, high: int) -> bool:
    """Whether rows between the states ``low`` and ``high`` all show one poison byte and nothing else is legal."""
    return OPTIONAL_BASE < low == high < 0 and low != Fill.ZEROED_OR_POISON


def _merge(parts: Iterable[tuple[list[Mismatch], Judged]]) -> tuple[list[Mismatch], Judged]:
    mismatches: list[Mismatch] = []
    judged = Judged()
    for found, seen in parts:
        mismatches += found
        judged.add(seen)
    return mismatches, judged


def _padding(family: FrameFamily, group: int) -> npt.NDArray[np.int64] | None:
    """Bytes of the frame no resource of ``group`` uses; None when there are none."""
    mine = family.of_group(group)
    if sum(r.used_bytes for r in mine) == family.nbytes:
        return None
    used = np.zeros(family.nbytes, np.bool_)
    for r in mine:
        used[r.page_offsets() + (r.offset - family.offset)] = True
    return np.flatnonzero(~used)


def _as_words(view: ByteArray, rows: int) -> npt.NDArray[np.uint64] | None:
    """``view`` as uint64 ``[num_blocks, rows, words]`` if every page is contiguous and aligned, else None."""
    row_bytes = view.shape[-1]
    if row_bytes % 8 or not view[0].flags.c_contiguous or view.strides[0] % 8 or view.ctypes.data % 8:
        return None
    flat = np.lib.stride_tricks.as_strided(view, (view.shape[0], rows * row_bytes), (view.strides[0], 1))
    return flat.view(np.uint64).reshape(view.shape[0], rows, row_bytes // 8)


def _all_bytes(data: ByteArray, value: int) -> bool:
    if data.nbytes % 8 == 0 and data.ctypes.data % 8 == 0:
        return _all_words(data.view(np.uint64), value)
    return bool((data == value).all())


def _all_words(data: npt.NDArray[np.uint64], value: int) -> bool:
    return bool((data == np.uint64(value * 0x0101010101010101)).all())


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
