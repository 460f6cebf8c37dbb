"""Contents: the right place, the wrong bytes. Each fault is a function of one page's bytes."""

from __future__ import annotations

import numpy as np

from kvproof.faults.model import HYBRID, Fault, Ground, middle_layer, target_page
from kvproof.faults.pages import ByteArray, bytes_at
from kvproof.faults.transfer import LOAD, SAVE, Move, Transfer

SWAPPED_BYTES = 8
SWAP_AT = 16


class PageFault(Fault):
    """Base: :meth:`spoil` changes a page after it arrived. Only the middle layer, unless ``every_layer``."""

    every_layer = False

    def alter(self, move: Move, transfer: Transfer, ground: Ground) -> None:
        if self.every_layer or move.layer == middle_layer(ground.pages):
            page = target_page(move, transfer.load)
            cells = ground.pages.cells(move.family, move.owner.group if move.owner else None, page)
            self.spoil(page, cells, move, transfer.load)

    def spoil(self, page: ByteArray, cells: ByteArray, move: Move, load: bool) -> None:
        """Change ``page`` in place; ``cells`` uint8 ``[rows, heads, bytes]`` is a view of it."""
        raise NotImplementedError


def exchange_halves(cells: ByteArray) -> ByteArray:
    """K and V of every cell exchanged."""
    half = cells.shape[-1] // 2
    return np.concatenate([cells[..., half:], cells[..., :half]], -1)


class KvExchangedOnLoad(PageFault):
    """K and V of one layer are exchanged when they are loaded."""

    stands_for = ("A01", "A09")

    def spoil(self, page: ByteArray, cells: ByteArray, move: Move, load: bool) -> None:
        cells[:] = exchange_halves(cells)


class KvExchangedOnSave(PageFault):
    """K and V of one layer are exchanged when they are saved."""

    stands_for = ("A01", "A09")
    oracle = "provenance"
    on = (SAVE,)

    def spoil(self, page: ByteArray, cells: ByteArray, move: Move, load: bool) -> None:
        cells[:] = exchange_halves(cells)


def planes_as_heads(cells: ByteArray) -> ByteArray:
    """``[rows, 2 heads, K V]`` read as ``[2 planes K V, rows, heads]``: the same shape, other axes.

    The first head's bytes are taken for the K plane, row by row all heads; the second head's for the V plane.
    """
    rows, heads, width = cells.shape
    planes = cells.transpose(1, 0, 2).reshape(2, rows, heads, width // 2)
    return np.concatenate([planes[0], planes[1]], -1)


class TwoHeadsTakenForPlanes(PageFault):
    """With two KV heads the head axis is read as the K/V axis: the shapes agree, so nothing complains."""

    stands_for = ("A01",)
    on = (SAVE,)
    every_layer = True

    def spoil(self, page: ByteArray, cells: ByteArray, move: Move, load: bool) -> None:
        cells[:] = planes_as_heads(cells)


class HeadsExchanged(PageFault):
    """Two heads of one layer are exchanged when they are loaded."""

    stands_for = ("A10", "A17")

    def spoil(self, page: ByteArray, cells: ByteArray, move: Move, load: bool) -> None:
        cells[:] = cells[:, ::-1].copy()


class TokensReversed(PageFault):
    """The tokens of every block of one layer arrive in reverse order."""

    stands_for = ("A10",)

    def spoil(self, page: ByteArray, cells: ByteArray, move: Move, load: bool) -> None:
        cells[:] = cells[::-1].copy()


class TokensInterleaved(PageFault):
    """Even tokens first, then odd ones: an interleave size that differs between save and load."""

    stands_for = ("A50", "A47")

    def spoil(self, page: ByteArray, cells: ByteArray, move: Move, load: bool) -> None:
        cells[:] = np.concatenate([cells[::2], cells[1::2]])


class RowsTurnedByBlock(PageFault):
    """Save and load both turn the rows of a block by its block id: the same arithmetic on both ways, other ids."""

    stands_for = ("A04", "A87")
    on = (LOAD, SAVE)

    def spoil(self, page: ByteArray, cells: ByteArray, move: Move, load: bool) -> None:
        cells[:] = np.roll(cells, -move.block if load else move.block, axis=0)


class ScaleOfBlock(PageFault):
    """Bytes are combined with a side value kept per block id, on both ways; the load uses its own block's value."""

    stands_for = ("A05", "A60")
    on = (LOAD, SAVE)

    def spoil(self, page: ByteArray, cells: ByteArray, move: Move, load: bool) -> None:
        page ^= np.uint8(move.block % 255 + 1)


def exchange_at(page: ByteArray, distance: int) -> None:
    """Exchange a few bytes of ``page`` with those ``distance`` bytes further."""
    near, far = slice(SWAP_AT, SWAP_AT + SWAPPED_BYTES), slice(SWAP_AT + distance, SWAP_AT + SWAPPED_BYTES + distance)
    page[near], page[far] = page[far].copy(), page[near].copy()


class SwapAt251(PageFault):
    """Eight bytes are exchanged with those 251 bytes further: invisible to a pattern that repeats every 251 bytes."""

    stands_for = ("A01",)

    def spoil(self, page: ByteArray, cells: ByteArray, move: Move, load: bool) -> None:
        exchange_at(page, 251)


class SwapAt256(PageFault):
    """Eight bytes are exchanged with those 256 bytes further: invisible to a pattern of one byte per address."""

    stands_for = ("A01", "A03")

    def spoil(self, page: ByteArray, cells: ByteArray, move: Move, load: bool) -> None:
        exchange_at(page, 256)


class BitFlipped(PageFault):
    """One bit of one byte in the middle of every page of one layer is wrong."""

    stands_for = ("A05",)

    def spoil(self, page: ByteArray, cells: ByteArray, move: Move, load: bool) -> None:
        page[page.size // 2 + 5] ^= 1


class ZerosLoaded(PageFault):
    """One layer is loaded as zeros, which look like a fresh cache and train a drafter quite well."""

    stands_for = ("A15", "A60")

    def spoil(self, page: ByteArray, cells: ByteArray, move: Move, load: bool) -> None:
        page[:] = 0


class BytesSwapped(PageFault):
    """Both bytes of every number are exchanged when they are loaded."""

    stands_for = ("A16", "A18")

    def spoil(self, page: ByteArray, cells: ByteArray, move: Move, load: bool) -> None:
        page[:] = page.reshape(-1, 2)[:, ::-1].reshape(-1)


def through_float16(page: ByteArray) -> ByteArray:
    """bfloat16 numbers converted to float16 and back, as bytes."""
    numbers = (page.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = numbers.astype(np.float16).astype(np.float32)
    return (rounded.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


class StoredAsHalf(PageFault):
    """One layer is stored as float16 although the cache is bfloat16: large numbers overflow, small ones vanish."""

    stands_for = ("A05", "A07")
    on = (SAVE,)

    def spoil(self, page: ByteArray, cells: ByteArray, move: Move, load: bool) -> None:
        page[:] = through_float16(page.copy())


class SaveWritesSource(PageFault):
    """A save changes the last byte of the page it reads, as a conversion done in place would."""

    stands_for = ("A10", "A65")
    oracle = "footprint"
    stray = True
    on = (SAVE,)

    def spoil(self, page: ByteArray, cells: ByteArray, move: Move, load: bool) -> None:
        bytes_at(move.kv, move.nbytes)[-1] = 0xFF


class PaddingWritten(Fault):
    """A load changes the first byte behind a state: padding today, the next field after an upgrade."""

    stands_for = ("A05", "A08")
    oracle = "footprint"
    model = HYBRID

    def alter(self, move: Move, transfer: Transfer, ground: Ground) -> None:
        if move.owner is not None:
            padding = ground.pages.padding(move.family, move.owner.group)
            if padding.size:
                frame = ground.pages.address(move.family, move.block)
                bytes_at(frame + int(padding[0]), 1)[0] ^= 0xFF


FAULTS = (
    KvExchangedOnLoad,
    KvExchangedOnSave,
    TwoHeadsTakenForPlanes,
    HeadsExchanged,
    TokensReversed,
    TokensInterleaved,
    RowsTurnedByBlock,
    ScaleOfBlock,
    SwapAt251,
    SwapAt256,
    BitFlipped,
    ZerosLoaded,
    BytesSwapped,
    StoredAsHalf,
    SaveWritesSource,
    PaddingWritten,
)
