"""A transfer as a connector planned it: pages that move between KV memory and the connector's store."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from kvproof.platforms.hostcopy import CopyBatch

LOAD, SAVE = "load", "save"


@dataclass(frozen=True)
class Owner:
    """Whose page it is: block ``index`` of ``request``'s table in ``group``. ``local`` tokens were cached locally."""

    request: str
    label: str
    group: int
    index: int
    local: int = 0


@dataclass(frozen=True)
class Move:
    """``nbytes`` bytes between address ``kv`` (KV memory) and address ``store``.

    ``family`` and ``block`` say which page the connector meant, ``layer`` and ``owner`` whose it is.
    """

    kv: int
    store: int
    nbytes: int
    family: int
    block: int
    layer: str
    owner: Owner | None

    def at(self, kv: int) -> Move:
        """The same move at another place in KV memory."""
        return dataclasses.replace(self, kv=kv)

    def part(self, first: int, nbytes: int) -> Move:
        """Bytes ``[first, first + nbytes)`` of this move."""
        return dataclasses.replace(self, kv=self.kv + first, store=self.store + first, nbytes=nbytes)


@dataclass(frozen=True)
class Transfer:
    """One batch in one direction."""

    direction: str
    moves: tuple[Move, ...]

    @property
    def load(self) -> bool:
        return self.direction == LOAD


def batch_of(direction: str, moves: Iterable[Move]) -> CopyBatch:
    """The moves as the copier takes them."""
    moves = list(moves)
    kv = np.array([m.kv for m in moves], np.uint64)
    store = np.array([m.store for m in moves], np.uint64)
    sizes = np.array([m.nbytes for m in moves], np.int64)
    return CopyBatch(store, kv, sizes) if direction == LOAD else CopyBatch(kv, store, sizes)


def whole(moves: Iterable[Move]) -> list[Move]:
    """Moves with the parts of a page put together again: some connectors move K and V, or the parts of a state, apart.

    Parts belong together where one begins behind the other on both sides, in one block and one layer.
    """
    found: list[Move] = []
    for move in moves:
        last = found[-1] if found else None
        if (
            last is not None
            and (last.block, last.layer, last.owner) == (move.block, move.layer, move.owner)
            and (last.kv + last.nbytes, last.store + last.nbytes) == (move.kv, move.store)
        ):
            found[-1] = dataclasses.replace(last, nbytes=last.nbytes + move.nbytes)
        else:
            found.append(move)
    return found


def runs(moves: Iterable[Move]) -> list[list[Move]]:
    """The moves of one request and one layer together, in their order."""
    found: dict[tuple[str, str], list[Move]] = {}
    for move in moves:
        found.setdefault((move.owner.request if move.owner else "", move.layer), []).append(move)
    return list(found.values())
