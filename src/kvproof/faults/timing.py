"""Timing: the right bytes, moved too early or too late."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np

from kvproof.faults.model import HYBRID, Fault, Ground, unfit
from kvproof.faults.pages import ByteArray, bytes_at
from kvproof.faults.transfer import LOAD, SAVE, Move, Transfer

FOURTH_STEP = 4


class SaveBeforeCompute(Fault):
    """A save copies its blocks as they were before the forward pass that computed them."""

    stands_for = ("A64", "A68")
    oracle = "source_footprint"
    on = (SAVE,)

    def __init__(self) -> None:
        super().__init__()
        self._before: list[ByteArray] = []

    def before_forward(self, ground: Ground) -> None:
        self._before = ground.pages.snapshot()

    def alter(self, move: Move, transfer: Transfer, ground: Ground) -> None:
        storage = ground.pages.families[move.family].storage
        start = move.kv - ground.pages.addresses[storage]
        bytes_at(move.store, move.nbytes)[:] = self._before[storage][start : start + move.nbytes]


class SaveAfterReuse(Fault):
    """A save runs when its blocks were freed and computed again for other requests: stale block ids."""

    stands_for = ("A65", "A66", "A62")
    oracle = "provenance"
    on = (SAVE, LOAD)
    story = "reuse"
    unfit = unfit(ExampleConnector="it writes its file inside save_kv_layer; there is no later moment to save at")

    def __init__(self) -> None:
        super().__init__()
        self._held: list[Move] = []

    def carry(self, transfer: Transfer, ground: Ground) -> None:
        if transfer.load:
            ground.copy(SAVE, self._held)
            self._held = []
            ground.copy(LOAD, transfer.moves)
            return
        late = [m for m in transfer.moves if m.owner is not None and m.owner.label == "cold"]
        self._held += late
        ground.copy(SAVE, [m for m in transfer.moves if m not in late])


class _Held(Fault):
    """Base: loads are held back; :meth:`release` executes them."""

    def __init__(self) -> None:
        super().__init__()
        self._held: list[Move] = []

    def carry(self, transfer: Transfer, ground: Ground) -> None:
        if transfer.load:
            self._held += transfer.moves
        else:
            ground.copy(SAVE, transfer.moves)

    def release(self, moves: Iterable[Move], ground: Ground) -> None:
        """Execute held moves now."""
        moves = list(moves)
        self._held = [m for m in self._held if m not in moves]
        ground.copy(LOAD, moves)


class LoadBehindReader(_Held):
    """Every layer's load is waited for one layer too late: its bytes arrive after it has read."""

    stands_for = ("A70", "A64")

    def after_read(self, layer: str, ground: Ground) -> None:
        self.release([m for m in self._held if m.layer == layer], ground)


class LoadReportedTooEarly(_Held):
    """A load is reported finished a step before its copies happen."""

    stands_for = ("A75", "A71")
    oracle = "equality"

    def after_read(self, layer: str, ground: Ground) -> None:
        if layer == ground.pages.layers[-1]:
            self.release(self._held, ground)


class RunningStateOverwritten(Fault):
    """A late copy lands in the state of a running request after the step began and before its layer reads it.

    The layer then writes the next state over it, so nothing is wrong any more when the step is over.
    """

    stands_for = ("A65",)
    oracle = "footprint"
    stray = True
    story = "neighbour"
    model = HYBRID

    def __init__(self) -> None:
        super().__init__()
        self._steps = 0

    def before_forward(self, ground: Ground) -> None:
        running = ground.running()
        self._steps = self._steps + 1 if len(running) == 1 else 0
        if self._steps == FOURTH_STEP:
            state = ground.table(running[0], 0)[-1]
            with ground.elsewhere():
                bytes_at(ground.pages.address(0, state), 1)[0] ^= 0x80


class StagingBufferReused(Fault):
    """All blocks of a load are staged in one host buffer that is overwritten before the copies run."""

    stands_for = ("A84",)
    oracle = "provenance"

    def __init__(self) -> None:
        super().__init__()
        self._buffer = np.empty(0, np.uint8)

    def route(self, transfer: Transfer, ground: Ground) -> Iterable[Move]:
        self._buffer = np.empty(max(m.nbytes for m in transfer.moves), np.uint8)
        for move in transfer.moves:
            self._buffer[: move.nbytes] = bytes_at(move.store, move.nbytes)
        return [dataclasses.replace(m, store=self._buffer.ctypes.data) for m in transfer.moves]


FAULTS = (
    SaveBeforeCompute,
    SaveAfterReuse,
    LoadBehindReader,
    LoadReportedTooEarly,
    StagingBufferReused,
    RunningStateOverwritten,
)
