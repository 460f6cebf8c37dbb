"""Addresses: the right bytes at the wrong place, or the wrong bytes at the right one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np

from kvproof.faults.model import HYBRID, ONE_GROUP, WINDOWED, Fault, Ground, middle_layer, unfit
from kvproof.faults.omissions import row_stride
from kvproof.faults.pages import NULL_BLOCK
from kvproof.faults.transfer import LOAD, SAVE, Move, Transfer, runs

NOTHING_BEHIND = "its loads are asynchronous: vLLM allocates the blocks behind the hit when the load is over"


def _stride(move: Move, ground: Ground) -> int:
    return ground.pages.families[move.family].block_stride


def _next_block(move: Move, ground: Ground) -> Move:
    """The page of the next block id; of the one before where there is none."""
    step = 1 if move.block + 1 < ground.pages.layout.num_blocks else -1
    return move.at(move.kv + step * _stride(move, ground))


def _counted_up(transfer: Transfer, ground: Ground) -> list[Move]:
    return [
        m.at(run[0].kv + i * _stride(m, ground)) for run in runs(transfer.moves) for i, m in enumerate(run)
    ]  # fmt: skip


def _also(transfer: Transfer, extra: Move | None) -> list[Move]:
    return [*transfer.moves, *([extra] if extra is not None else [])]


def _of_layer(transfer: Transfer, ground: Ground) -> list[Move]:
    return [m for m in transfer.moves if m.layer == middle_layer(ground.pages)]


class BlocksCountedUpOnLoad(Fault):
    """A load takes the first block id and counts up instead of reading the table."""

    stands_for = ("A11", "A58")

    def route(self, transfer: Transfer, ground: Ground) -> Iterable[Move]:
        return _counted_up(transfer, ground)


class BlocksCountedUpOnSave(Fault):
    """A save takes the first block id and counts up instead of reading the table."""

    stands_for = ("A11", "A15")
    on = (SAVE,)

    def route(self, transfer: Transfer, ground: Ground) -> Iterable[Move]:
        return _counted_up(transfer, ground)


class BlockOffByOneOnLoad(Fault):
    """Every load lands one block id too high."""

    stands_for = ("A56", "A84")

    def route(self, transfer: Transfer, ground: Ground) -> Iterable[Move]:
        return [_next_block(m, ground) for m in transfer.moves]


class BlockOffByOneOnSave(Fault):
    """Every save reads one block id too high."""

    stands_for = ("A56", "A15")
    on = (SAVE,)

    def route(self, transfer: Transfer, ground: Ground) -> Iterable[Move]:
        return [_next_block(m, ground) for m in transfer.moves]


class BlockOffByOneBothWays(Fault):
    """Save and load both use the next block id: symmetric in the arithmetic, not in the bytes."""

    stands_for = ("A04", "A56")
    on = (LOAD, SAVE)

    def route(self, transfer: Transfer, ground: Ground) -> Iterable[Move]:
        return [_next_block(m, ground) for m in transfer.moves]


class RowOffByOne(Fault):
    """Every row of one layer lands one row later; the last one is dropped."""

    stands_for = ("A31", "A87")

    def route(self, transfer: Transfer, ground: Ground) -> Iterable[Move]:
        row = row_stride(transfer.moves[0], ground)
        layer = middle_layer(ground.pages)
        return [m if m.layer != layer else m.part(0, m.nbytes - row).at(m.kv + row) for m in transfer.moves]


class ByteOffByOne(Fault):
    """Every byte of one layer lands one byte later; the last one is dropped."""

    stands_for = ("A05", "A13")

    def route(self, transfer: Transfer, ground: Ground) -> Iterable[Move]:
        layer = middle_layer(ground.pages)
        return [m if m.layer != layer else m.part(0, m.nbytes - 1).at(m.kv + 1) for m in transfer.moves]


class PageTooLarge(Fault):
    """Every page of one layer is copied one row too long, into the next block's first row."""

    stands_for = ("A05", "A08")
    oracle = "footprint"
    stray = True

    def route(self, transfer: Transfer, ground: Ground) -> Iterable[Move]:
        row = row_stride(transfer.moves[0], ground)
        layer = middle_layer(ground.pages)
        return [m if m.layer != layer else m.part(0, m.nbytes + row) for m in transfer.moves]


class StrideOfOneHead(Fault):
    """Blocks are addressed with the stride of a resource half as wide, as if every head had its own page."""

    stands_for = ("A03", "A04", "A13")

    def route(self, transfer: Transfer, ground: Ground) -> Iterable[Move]:
        return [m.at(m.kv - m.block * _stride(m, ground) // 2) for m in transfer.moves]


class StrideOfAnotherGroup(Fault):
    """Attention blocks are addressed with the unpadded page size of the state groups."""

    stands_for = ("A08", "A13")
    model = HYBRID

    def route(self, transfer: Transfer, ground: Ground) -> Iterable[Move]:
        return [m.at(_padded_away(m, ground)) for m in transfer.moves]


def _padded_away(move: Move, ground: Ground) -> int:
    used = _state_page(move, ground)
    return move.kv - move.block * (_stride(move, ground) - used) if used else move.kv


def _state_page(move: Move, ground: Ground) -> int:
    """Bytes a state group uses of a frame; 0 where the move is a state's own."""
    states = _state_groups(ground)
    if move.owner is None or move.owner.group in states:
        return 0
    return sum(r.used_bytes for r in ground.pages.group_resources(move.family, states[0]))


def _state_groups(ground: Ground) -> list[int]:
    """In vLLM's order, in which they come before the attention group or, on Ascend, after it."""
    return [g.id for g in ground.pages.layout.groups if g.rule == "state"]


class PageSizeOfAnotherGroup(Fault):
    """Attention pages are copied with the unpadded page size of the state groups."""

    stands_for = ("A12", "A45")
    model = HYBRID

    def route(self, transfer: Transfer, ground: Ground) -> Iterable[Move]:
        return [m.part(0, _state_page(m, ground) or m.nbytes) for m in transfer.moves]


class TableOfAnotherGroup(Fault):
    """Attention blocks are looked up in the block table of a state group."""

    stands_for = ("A02", "A89")
    model = HYBRID

    def route(self, transfer: Transfer, ground: Ground) -> Iterable[Move]:
        moves = []
        for m in transfer.moves:
            if _state_page(m, ground) and m.owner is not None:
                table = ground.table(m.owner.request, _state_groups(ground)[0])
                m = m.at(ground.pages.address(m.family, table[m.owner.index]))
            moves.append(m)
        return moves


class WindowTablesExchanged(Fault):
    """Two sliding-window groups are loaded through each other's block table."""

    stands_for = ("A10", "A89")
    oracle = "provenance"
    model = WINDOWED
    unfit = unfit(
        ExampleConnector=ONE_GROUP,
        AscendStoreConnector="it moves a block in the memory of its own group's layers only, where the other group's "
        "block has no page: nothing foreign is read, pages stay unloaded",
    )

    def route(self, transfer: Transfer, ground: Ground) -> Iterable[Move]:
        first, second = [g.id for g in ground.pages.layout.groups if g.rule == "window"][:2]
        other = {first: second, second: first}
        moves = []
        for m in transfer.moves:
            if m.owner is not None and m.owner.group in other:
                table = ground.table(m.owner.request, other[m.owner.group])
                m = m.at(ground.pages.address(m.family, table[m.owner.index]))
            moves.append(m)
        return moves


class StateOfEarlierBoundary(Fault):
    """A load brings back the state at the end of the prompt's first block: a snapshot of another boundary."""

    stands_for = ("A59", "A58")
    oracle = "provenance"
    model = HYBRID
    story = "shortened"

    def route(self, transfer: Transfer, ground: Ground) -> Iterable[Move]:
        return [_earlier(m, ground) for m in transfer.moves]


def _earlier(move: Move, ground: Ground) -> Move:
    if move.owner is None or _state_page(move, ground) or not move.owner.index:
        return move
    source = ground.stored("head", dataclasses.replace(move, owner=dataclasses.replace(move.owner, index=0)))
    return move if source is None else dataclasses.replace(move, store=source)


class LayersExchanged(Fault):
    """Two layers receive each other's pages."""

    stands_for = ("A53", "A17")
    oracle = "provenance"

    def route(self, transfer: Transfer, ground: Ground) -> Iterable[Move]:
        first, second = ground.pages.layers[:2]
        families = {m.layer: m.family for m in transfer.moves}
        other = {first: families[second], second: families[first]}
        return [
            m.at(ground.pages.address(other[m.layer], m.block)) if m.layer in other else m for m in transfer.moves
        ]  # fmt: skip


class LayersShiftedOnSave(Fault):
    """Every layer is saved under the next layer's name."""

    stands_for = ("A53", "A54")
    oracle = "provenance"
    on = (SAVE,)
    unfit = unfit(ExampleConnector="it saves one layer per call, so no call sees two")

    def route(self, transfer: Transfer, ground: Ground) -> Iterable[Move]:
        layers = ground.pages.layers
        following = dict(zip(layers, [*layers[1:], layers[0]], strict=True))
        families = {m.layer: m.family for m in transfer.moves}
        return [m.at(ground.pages.address(families[following[m.layer]], m.block)) for m in transfer.moves]


class RequestsExchanged(Fault):
    """Two requests that load at the same time receive each other's blocks."""

    stands_for = ("A77", "A84")
    oracle = "provenance"
    story = "together"

    def route(self, transfer: Transfer, ground: Ground) -> Iterable[Move]:
        return [_from(m, ground, {"a again": "b", "b again": "a"}) for m in transfer.moves]


def _from(move: Move, ground: Ground, other: dict[str, str]) -> Move:
    if move.owner is None or move.owner.label not in other:
        return move
    source = ground.stored(other[move.owner.label], move)
    return move if source is None else dataclasses.replace(move, store=source)


class NullBlockWritten(Fault):
    """A placeholder of the table is transferred as if it were a block."""

    stands_for = ("A82", "A80")
    oracle = "footprint"
    stray = True

    def route(self, transfer: Transfer, ground: Ground) -> Iterable[Move]:
        mine = _of_layer(transfer, ground)[0]
        return _also(transfer, mine.at(ground.pages.address(mine.family, NULL_BLOCK)))


class FreeBlockWritten(Fault):
    """A load also lands in a block that belongs to nobody any more."""

    stands_for = ("A65", "A66")
    oracle = "footprint"
    stray = True

    def route(self, transfer: Transfer, ground: Ground) -> Iterable[Move]:
        mine = _of_layer(transfer, ground)[0]
        return _also(transfer, mine.at(ground.pages.address(mine.family, ground.free_block())))


def _onto_neighbour(move: Move, ground: Ground) -> Move | None:
    """The move into a block another running request owns in the same group."""
    if move.owner is None:
        return None
    for request in ground.running():
        owned = [b for b in ground.table(request, move.owner.group) if b != NULL_BLOCK]
        if request != move.owner.request and owned:
            return move.at(ground.pages.address(move.family, owned[0]))
    return None


class NeighbourWritten(Fault):
    """A load also lands in a block of another running request."""

    stands_for = ("A65", "A77")
    oracle = "footprint"
    stray = True
    story = "neighbour"

    def route(self, transfer: Transfer, ground: Ground) -> Iterable[Move]:
        return _also(transfer, _onto_neighbour(_of_layer(transfer, ground)[0], ground))


class NeighbourStateWritten(Fault):
    """A load also lands in the state another running request is about to continue from."""

    stands_for = ("A65", "A08")
    oracle = "footprint"
    stray = True
    story = "neighbour"
    model = HYBRID

    def route(self, transfer: Transfer, ground: Ground) -> Iterable[Move]:
        states = [m for m in transfer.moves if not _state_page(m, ground)]
        return _also(transfer, _onto_neighbour(states[0], ground) if states else None)


class LoadBehindHit(Fault):
    """A load fills one block more than the hit covers; the request still has to compute that one."""

    stands_for = ("A33", "A30")
    oracle = "footprint"
    stray = True
    unfit = unfit(
        SimpleCPUOffloadConnector=NOTHING_BEHIND, OffloadingConnector=NOTHING_BEHIND, MultiConnector=NOTHING_BEHIND
    )

    def route(self, transfer: Transfer, ground: Ground) -> Iterable[Move]:
        last = _of_layer(transfer, ground)[-1]
        if last.owner is None:
            return transfer.moves
        table = ground.table(last.owner.request, last.owner.group)
        return _also(transfer, last.at(ground.pages.address(last.family, table[last.owner.index + 1])))


class SaveReadsFreeBlock(Fault):
    """A save also reads a block that belongs to nobody: harmless bytes today, somebody's secrets tomorrow."""

    stands_for = ("A66", "A69")
    oracle = "legality"
    on = (SAVE,)

    def __init__(self) -> None:
        super().__init__()
        self._bin = np.empty(0, np.uint8)

    def route(self, transfer: Transfer, ground: Ground) -> Iterable[Move]:
        mine = transfer.moves[0]
        self._bin = np.empty(mine.nbytes, np.uint8)
        free = mine.at(ground.pages.address(mine.family, ground.free_block()))
        return _also(transfer, dataclasses.replace(free, store=self._bin.ctypes.data))


class BlockLoadedTwice(Fault):
    """The first block of every load is written to the next table entry as well, after that one was loaded."""

    stands_for = ("A42", "A45")
    oracle = "provenance"

    def route(self, transfer: Transfer, ground: Ground) -> Iterable[Move]:
        return [*transfer.moves, *(run[0].at(run[1].kv) for run in runs(transfer.moves) if len(run) > 1)]


class CachedBlockRewritten(Fault):
    """A load also writes a block the local prefix cache already holds, with the bytes of another one."""

    stands_for = ("A69", "A28")
    oracle = "footprint"
    stray = True
    story = "local"
    unfit = unfit(ExampleConnector="its loads begin at the first token, so every cached block is a target of the load")

    def route(self, transfer: Transfer, ground: Ground) -> Iterable[Move]:
        return _also(transfer, _onto_cached(_of_layer(transfer, ground)[0], ground))


class CachedBlockRewrittenEqual(Fault):
    """A load also writes a block the local prefix cache already holds, with the bytes that stand there anyway."""

    stands_for = ("A69",)
    oracle = "legality"
    story = "local"
    unfit = unfit(ExampleConnector="declared: its loads write locally cached blocks again")

    def route(self, transfer: Transfer, ground: Ground) -> Iterable[Move]:
        move = _onto_cached(_of_layer(transfer, ground)[0], ground)
        if move is None or move.owner is None:
            return transfer.moves
        head = dataclasses.replace(move, owner=dataclasses.replace(move.owner, index=0))
        source = ground.stored("cold", head)
        return _also(transfer, None if source is None else dataclasses.replace(head, store=source))


def _onto_cached(move: Move, ground: Ground) -> Move | None:
    if move.owner is None or not move.owner.local:
        return None
    return move.at(ground.pages.address(move.family, ground.table(move.owner.request, move.owner.group)[0]))


FAULTS = (
    BlocksCountedUpOnLoad,
    BlocksCountedUpOnSave,
    BlockOffByOneOnLoad,
    BlockOffByOneOnSave,
    BlockOffByOneBothWays,
    RowOffByOne,
    ByteOffByOne,
    PageTooLarge,
    StrideOfOneHead,
    StrideOfAnotherGroup,
    PageSizeOfAnotherGroup,
    TableOfAnotherGroup,
    WindowTablesExchanged,
    StateOfEarlierBoundary,
    LayersExchanged,
    LayersShiftedOnSave,
    RequestsExchanged,
    NullBlockWritten,
    FreeBlockWritten,
    NeighbourWritten,
    NeighbourStateWritten,
    LoadBehindHit,
    SaveReadsFreeBlock,
    BlockLoadedTwice,
    CachedBlockRewritten,
    CachedBlockRewrittenEqual,
)
