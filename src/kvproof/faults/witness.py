"""The witness: what a right transfer would have done, and the first byte where the faulty one differs.

It watches the connector's own plan, before a fault changes it: a save shows the true bytes of a page, a load says which
pages they belong to. It asks neither the ledger nor the byte code.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from kvproof.faults.pages import ByteArray, Pages, Place, bytes_at
from kvproof.faults.transfer import Move, Transfer

Prefix = tuple[int, ...]
GroupOf = Callable[[int], int | None]
PrefixOf = Callable[[Move], Prefix | None]


@dataclass(frozen=True)
class Wrong:
    """The first wrong byte of one page. ``stray``: the transfer had no business with this page."""

    place: Place
    stray: bool


class Witness:
    """``group_of`` names the group that owns a block, ``prefix_of`` the tokens whose state a page holds."""

    def __init__(self, pages: Pages, group_of: GroupOf, prefix_of: PrefixOf) -> None:
        self._pages = pages
        self._group_of = group_of
        self._prefix_of = prefix_of
        self._truth: dict[tuple[int, int, Prefix], ByteArray] = {}
        self._labels: dict[tuple[str, int, int, int], ByteArray] = {}
        self.wrong: list[Wrong] = []
        """First wrong byte of every page of the first transfer that went wrong."""

    def forget(self) -> None:
        """Start over."""
        self._truth.clear()
        self._labels.clear()
        self.wrong = []

    @contextlib.contextmanager
    def watch(self, transfer: Transfer, replaced: frozenset[int] = frozenset()) -> Iterator[None]:
        """Around the execution of ``transfer`` in whatever faulty way. What ``replaced`` blocks hold is never read."""
        if not transfer.load:
            self._remember(transfer)
        right = self._pages.snapshot()
        meant: set[tuple[int, int]] = set()
        if transfer.load:
            for move in transfer.moves:
                meant |= self._pages.covered(move.kv, move.nbytes)
                self._write(right, move)
        yield
        if not self.wrong:
            self.wrong = [
                wrong for wrong in self._compare(right, meant)
                if wrong.place.block not in replaced or wrong.place.resource == "padding"
            ]  # fmt: skip

    def stored(self, label: str, move: Move) -> int | None:
        """Address of the true bytes of the page at the same index of the request with ``label``."""
        if move.owner is None:
            return None
        page = self._labels.get((label, move.family, move.owner.group, move.owner.index))
        return None if page is None else page.ctypes.data

    def first(self, stray: bool) -> Place | None:
        """First wrong byte, in layer order."""
        found = [w.place for w in self.wrong if w.stray == stray]
        return found[0] if found else None

    def _key(self, move: Move) -> tuple[int, int, Prefix] | None:
        prefix = self._prefix_of(move)
        return None if prefix is None or move.owner is None else (move.family, move.owner.group, prefix)

    def _remember(self, transfer: Transfer) -> None:
        for move in transfer.moves:
            key = self._key(move)
            if key is not None and move.owner is not None:
                page = bytes_at(move.kv, move.nbytes).copy()
                self._truth[key] = page
                self._labels[move.owner.label, move.family, move.owner.group, move.owner.index] = page

    def _write(self, memory: list[ByteArray], move: Move) -> None:
        """What a right load of ``move`` puts into ``memory``."""
        key = self._key(move)
        page = self._truth.get(key) if key is not None else None
        if page is None:
            page = bytes_at(move.store, move.nbytes)
        storage = self._pages.families[move.family].storage
        start = move.kv - self._pages.addresses[storage]
        memory[storage][start : start + page.nbytes] = page

    def _compare(self, right: list[ByteArray], meant: set[tuple[int, int]]) -> list[Wrong]:
        found = []
        for index, family in enumerate(self._pages.families):
            here, there = (
                np.lib.stride_tricks.as_strided(
                    memory[family.offset :], (self._pages.layout.num_blocks, family.nbytes), (family.block_stride, 1)
                )
                for memory in (self._pages.storages[family.storage], right[family.storage])
            )
            differs = here != there
            for block in np.flatnonzero(differs.any(axis=1)).tolist():
                places = self._pages.first_places(
                    index, block, self._group_of(block), np.flatnonzero(differs[block])
                )
                found += [Wrong(place, (index, block) not in meant) for place in places]
        return found
