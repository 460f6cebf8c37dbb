"""A KV memory of a few kilobytes and the ground a fault stands on, without an engine.

Two layers, pages of ``[heads][rows][K V]`` bytes as vLLM's CPU layout has them, one request ``cold`` that saves and one
request ``again`` that loads the same tokens into other blocks.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
from collections.abc import Iterable, Iterator

import numpy as np

from kvproof.faults.model import Fault
from kvproof.faults.pages import Pages, Place, bytes_at
from kvproof.faults.transfer import LOAD, SAVE, Move, Owner, Transfer
from kvproof.faults.witness import Witness
from kvproof.layout.model import Axis, Field, Group, Layout, Resource, Storage

ROWS, HEADS, CELL = 8, 2, 64
PAGE = ROWS * HEADS * CELL
LAYERS = ("layer.0", "layer.1", "layer.2")
COLD, AGAIN = "story/cold#1", "story/again#2"


def layout(num_blocks: int) -> Layout:
    """One full-attention group over ``LAYERS``, layer outermost."""
    return Layout(
        "LBHNC",
        num_blocks,
        (Storage(0, len(LAYERS) * num_blocks * PAGE),),
        (Group(0, "full_attention", ROWS, LAYERS, "all"),),
        tuple(
            Resource(
                i, 0, name, "bfloat16", 0, i * num_blocks * PAGE, PAGE, PAGE, (Axis(ROWS, CELL),),
                (Axis(HEADS, ROWS * CELL), Axis(CELL, 1)), 1, (Field("K", 0, CELL // 2), Field("V", CELL // 2, CELL)),
            )
            for i, name in enumerate(LAYERS)
        ),
    )  # fmt: skip


class FakeGround:
    """Memory of random bytes, computed anew before they are saved; ``tables`` of the two requests are disjoint."""

    unit = ROWS

    def __init__(self, num_blocks: int, cold: list[int], again: list[int], seed: int = 0) -> None:
        self.tables = {COLD: cold, AGAIN: again}
        self.used = {0, *cold, *again}
        self._rng = np.random.default_rng(seed)
        memory = self._rng.integers(0, 251, len(LAYERS) * num_blocks * PAGE, dtype=np.uint8)
        self.pages = Pages(layout(num_blocks), [memory], [memory.ctypes.data])
        # A page to spare behind the last one: faults may read too far.
        self.store = np.full((len(LAYERS) * len(cold) + 1) * PAGE, 7, np.uint8)
        self.witness = Witness(self.pages, lambda block: 0 if block else None, self._prefix)
        self.executed: list[tuple[str, Move]] = []

    def _prefix(self, move: Move) -> tuple[int, ...] | None:
        return None if move.owner is None else tuple(range(move.owner.index + 1))

    def transfer(self, direction: str) -> Transfer:
        """The right transfer of one request."""
        request = AGAIN if direction == LOAD else COLD
        moves = []
        for family, layer in enumerate(LAYERS):
            for index, block in enumerate(self.tables[request]):
                at = self.store.ctypes.data + (family * len(self.tables[COLD]) + index) * PAGE
                owner = Owner(request, request.split("/")[1].split("#")[0], 0, index)
                moves.append(Move(self.pages.address(family, block), at, PAGE, family, block, layer, owner))
        return Transfer(direction, tuple(moves))

    def tell(self, fault: Fault) -> Place | None:
        """Save, forget, load under ``fault``; the first wrong byte."""
        for direction in (SAVE, LOAD):
            if direction == LOAD:
                for family in range(len(LAYERS)):
                    for block in self.tables[AGAIN]:
                        ctypes.memset(self.pages.address(family, block), 0xFF, PAGE)
            fault.before_forward(self)
            transfer = self.transfer(direction)
            if direction == SAVE:
                for move in transfer.moves:
                    page = bytes_at(move.kv, PAGE)
                    page[:] = self._rng.integers(0, 251, PAGE, dtype=np.uint8)
            with self.witness.watch(transfer):
                fault.carry(transfer, self)
        return self.witness.first(fault.stray)

    def copy(self, direction: str, moves: Iterable[Move]) -> None:
        storage = self.pages.storages[0]
        for move in moves:
            self.executed.append((direction, move))
            inside = 0 <= move.kv - storage.ctypes.data <= storage.nbytes - move.nbytes
            if inside:  # as the recorder of claims: what lies nowhere is not executed
                source, target = (move.store, move.kv) if direction == LOAD else (move.kv, move.store)
                ctypes.memmove(target, source, move.nbytes)

    def stored(self, label: str, move: Move) -> int | None:
        return self.witness.stored(label, move)

    def table(self, request: str, group: int) -> list[int]:
        return self.tables[request]

    def free_block(self) -> int:
        return next(b for b in range(self.pages.layout.num_blocks) if b not in self.used)

    def running(self) -> list[str]:
        return list(self.tables)

    @contextlib.contextmanager
    def elsewhere(self) -> Iterator[None]:
        with self.witness.watch(Transfer(LOAD, ())):
            yield


def with_local(transfer: Transfer, tokens: int) -> Transfer:
    """The same transfer for a request of which ``tokens`` were cached locally."""
    return Transfer(
        transfer.direction,
        tuple(
            dataclasses.replace(m, owner=dataclasses.replace(m.owner, local=tokens))
            for m in transfer.moves
            if m.owner is not None
        ),
    )
