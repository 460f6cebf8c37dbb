"""Omissions: bytes that are not transferred although the connector says so."""

from __future__ import annotations

from collections.abc import Iterable

from kvproof.faults.model import HYBRID, ONE_GROUP, WINDOWED, Fault, Ground, middle_layer, unfit
from kvproof.faults.transfer import LOAD, SAVE, Move, Transfer, runs


def _without_layer(transfer: Transfer, ground: Ground) -> list[Move]:
    return [m for m in transfer.moves if m.layer != middle_layer(ground.pages)]


class LayerNeverSaved(Fault):
    """One layer is left out of every save; its load brings back whatever the store held before."""

    stands_for = ("A54", "A51")
    oracle = "equality"
    on = (SAVE,)

    def route(self, transfer: Transfer, ground: Ground) -> Iterable[Move]:
        return _without_layer(transfer, ground)


class LayerNeverLoaded(Fault):
    """One layer is left out of every load, as when its hook never runs under a replayed graph."""

    stands_for = ("A70", "A51")

    def route(self, transfer: Transfer, ground: Ground) -> Iterable[Move]:
        return _without_layer(transfer, ground)


class LayerSkippedBothWays(Fault):
    """One layer is neither saved nor loaded, so save and load agree with each other and both are wrong."""

    stands_for = ("A54", "A86", "A89")
    oracle = "inventory"
    on = (LOAD, SAVE)

    def route(self, transfer: Transfer, ground: Ground) -> Iterable[Move]:
        return _without_layer(transfer, ground)


class LastBlockNotLoaded(Fault):
    """The last block of every load is dropped in all layers: the lost tail chunk, on the reading side."""

    stands_for = ("A36", "A56")

    def route(self, transfer: Transfer, ground: Ground) -> Iterable[Move]:
        return [m for run in runs(transfer.moves) for m in run[:-1]]


class LastBlockNotSaved(Fault):
    """The last block of every save is acknowledged but not written: the lost tail chunk, on the writing side."""

    stands_for = ("A36", "A71")
    oracle = "equality"
    on = (SAVE,)

    def route(self, transfer: Transfer, ground: Ground) -> Iterable[Move]:
        return [m for run in runs(transfer.moves) for m in run[:-1]]


class FirstBlockNotLoaded(Fault):
    """The first block of every load is dropped, as when a chunk counter starts at one."""

    stands_for = ("A35", "A69")
    oracle = "equality"

    def route(self, transfer: Transfer, ground: Ground) -> Iterable[Move]:
        return [m for run in runs(transfer.moves) for m in run[1:]]


class OnlyFirstChunkSaved(Fault):
    """Of a prompt computed in chunks only the first chunk is written; the hit still covers all of it."""

    stands_for = ("A32", "A36")
    story = "chunked"
    on = (SAVE,)
    unfit = unfit(
        ExampleConnector="the unfaulted connector has this very fault (A32): it saves a prompt when its first chunk is "
        "scheduled and never again"
    )

    def __init__(self) -> None:
        super().__init__()
        self._saved: set[str] = set()

    def route(self, transfer: Transfer, ground: Ground) -> Iterable[Move]:
        kept = [m for m in transfer.moves if m.owner is None or m.owner.request not in self._saved]
        self._saved |= {m.owner.request for m in transfer.moves if m.owner is not None}
        return kept


class LoadDoesNothing(Fault):
    """The load moves nothing and reports success: the swallowed failure."""

    stands_for = ("A75", "A78")

    def route(self, transfer: Transfer, ground: Ground) -> Iterable[Move]:
        return ()


class PageTooSmall(Fault):
    """Every page is copied one row short, as with a page size taken from a narrower dtype."""

    stands_for = ("A07", "A12")

    def route(self, transfer: Transfer, ground: Ground) -> Iterable[Move]:
        row = row_stride(transfer.moves[0], ground)
        return [m.part(0, m.nbytes - row) for m in transfer.moves]


class HeadNotSaved(Fault):
    """The last head of one layer is left out of every save, as with a head count of the wrong rank."""

    stands_for = ("A17", "A10")
    on = (SAVE,)

    def route(self, transfer: Transfer, ground: Ground) -> Iterable[Move]:
        layer = middle_layer(ground.pages)
        return [m.part(0, m.nbytes // 2) if m.layer == layer else m for m in transfer.moves]


class LastValueNotLoaded(Fault):
    """The V half of a page's last row is cut off in one layer: one component truncated by a few bytes."""

    stands_for = ("A86",)

    def route(self, transfer: Transfer, ground: Ground) -> Iterable[Move]:
        layer = middle_layer(ground.pages)
        half = row_stride(transfer.moves[0], ground) // 2
        return [m.part(0, m.nbytes - half) if m.layer == layer else m for m in transfer.moves]


class WindowTailNotLoaded(Fault):
    """The last block of a sliding window is not loaded, as with a window counted one block short."""

    stands_for = ("A40", "A62")
    model = WINDOWED
    unfit = unfit(ExampleConnector=ONE_GROUP)

    def route(self, transfer: Transfer, ground: Ground) -> Iterable[Move]:
        windows = {g.id for g in ground.pages.layout.groups if g.rule == "window"}
        return [
            m
            for run in runs(transfer.moves)
            for m in (run[:-1] if run[0].owner is not None and run[0].owner.group in windows else run)
        ]


class StateComponentNotLoaded(Fault):
    """Of a layer's two states only the second is loaded: a side buffer that nobody registered."""

    stands_for = ("A86", "A89")
    model = HYBRID

    def route(self, transfer: Transfer, ground: Ground) -> Iterable[Move]:
        moves = []
        for move in transfer.moves:
            resources = ground.pages.group_resources(move.family, move.owner.group if move.owner else None)
            first = resources[1].offset - resources[0].offset if len(resources) > 1 else 0
            moves.append(move.part(first, move.nbytes - first))
        return moves


def row_stride(move: Move, ground: Ground) -> int:
    """Bytes between two rows of a page."""
    return ground.pages.group_resources(move.family, move.owner.group if move.owner else None)[0].row_axes[-1].stride


FAULTS = (
    LayerNeverSaved,
    LayerNeverLoaded,
    LayerSkippedBothWays,
    LastBlockNotLoaded,
    LastBlockNotSaved,
    FirstBlockNotLoaded,
    OnlyFirstChunkSaved,
    LoadDoesNothing,
    PageTooSmall,
    HeadNotSaved,
    LastValueNotLoaded,
    WindowTailNotLoaded,
    StateComponentNotLoaded,
)
