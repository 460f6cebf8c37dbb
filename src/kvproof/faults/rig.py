"""The rig: a staged engine in which faults can be planted and pulled out again.

Every transfer of the connector passes here as a :class:`Transfer`; without a fault it is executed as it is. The rig is
the only part of this package that touches vLLM objects.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group

from kvproof.engine.harness import Harness, Tracked
from kvproof.faults import torch_copies
from kvproof.faults.model import Expected, Fault
from kvproof.faults.pages import NULL_BLOCK, Pages, Place
from kvproof.faults.transfer import LOAD, SAVE, Move, Owner, Transfer, batch_of, whole
from kvproof.faults.witness import Prefix, Witness
from kvproof.platforms.hostcopy import HOST_COPIER, CopyBatch


class Rig:
    """Wires one staged engine. Create once; ``fault`` is whatever is planted now. See ``model.Ground``."""

    def __init__(self, model: str, staged: Any, seed: int, profile: Any) -> None:
        self.model = model
        self.staged = staged
        self.fault: Fault | None = None
        self.unit = staged.hit_unit
        self.mistake = ""
        """What a fault itself raised; never a proof of anything."""
        memory = staged.memory
        self.pages = Pages(memory.layout, memory.storages, memory.addresses)
        self.witness = Witness(self.pages, self._group_of, self._prefix_of)
        self._meant: set[int] = set()
        self._withheld: set[str] = set()  # loads that a fault never reported
        self._illegal: list[Place] = []
        self._wire_lookup()
        self.harness = Harness(staged, seed, profile)
        self._wire_moments()
        self._production_copy = HOST_COPIER.copy
        HOST_COPIER.copy = self._copy  # type: ignore[method-assign]
        torch_copies.wire(self)

    def plant(self, fault: Fault | None) -> None:
        """From now on ``fault`` is in charge; None pulls the last one out."""
        self.fault = fault
        self.witness.forget()
        self._illegal = []
        self.mistake = ""

    # ------------------------------------------------------------------ wiring

    def _wire_lookup(self) -> None:
        """Inside of what the harness observes, so that it sees what the scheduler is told."""
        connector = self.staged.core.scheduler.connector
        production = connector.get_num_new_matched_tokens

        def look_up(request: Any, num_computed_tokens: int) -> Any:
            if self.fault is None:
                return production(request, num_computed_tokens)
            label = self.harness.tracked[request.request_id].label
            return self.fault.look_up(production, request, label, num_computed_tokens, self)

        connector.get_num_new_matched_tokens = look_up

    def _wire_moments(self) -> None:
        begin_forward, attend = self.harness.begin_forward, self.harness.attend

        def begin() -> None:
            begin_forward()
            if self.fault is not None:
                self.fault.before_forward(self)

        def read(layer: str) -> None:
            attend(layer)
            if self.fault is not None:
                self.fault.after_read(layer, self)

        worker = get_kv_transfer_group()
        get_transfer_results = worker.get_transfer_results

        def results(finished_req_ids: set[str]) -> Any:
            found = get_transfer_results(finished_req_ids)
            loaded = found.finished_recving | self._withheld
            found.finished_recving = self.fault.report(loaded) if self.fault is not None else loaded
            self._withheld = loaded - found.finished_recving
            return found

        worker.get_transfer_results = results  # type: ignore[method-assign]
        self.harness.begin_forward = begin  # type: ignore[method-assign]
        self.harness.attend = read  # type: ignore[method-assign]

    def _copy(self, batch: CopyBatch) -> None:
        with self._noting_mistakes():
            transfer = self._transfer(batch) if self.fault is not None else None
        if transfer is None:
            self._production_copy(batch)
        else:
            self.carry(transfer)

    @contextmanager
    def _noting_mistakes(self) -> Iterator[None]:
        """Some connectors swallow what is raised under them; a mistake of ours must not pass for a fault's effect."""
        try:
            yield
        except Exception as error:
            self.mistake = f"{type(error).__name__}: {error}"
            raise

    def _transfer(self, batch: CopyBatch) -> Transfer | None:
        """The batch in terms of pages, or None where it does not touch KV memory."""
        load = bool(len(batch.targets)) and self.pages.find(int(batch.targets[0])) is not None
        kvs, stores = (batch.targets, batch.sources) if load else (batch.sources, batch.targets)
        moves = []
        for kv, store, nbytes in zip(kvs.tolist(), stores.tolist(), batch.sizes.tolist(), strict=True):
            move = self.move(kv, store, nbytes)
            if move is None:
                return None
            moves.append(move)
        return Transfer(LOAD if load else SAVE, tuple(whole(moves))) if moves else None

    def move(self, kv: int, store: int, nbytes: int) -> Move | None:
        """A move of the page at ``kv``, or None where that is not KV memory."""
        spot = self.pages.find(kv)
        if spot is None:
            return None
        owner = self._owner(spot.block)
        group = None if owner is None else owner.group
        layer = self.pages.group_resources(spot.family, group)[0].layer
        return Move(kv, store, nbytes, spot.family, spot.block, layer, owner)

    def carry(self, transfer: Transfer) -> None:
        """Execute a transfer the way the planted fault wants it."""
        if self.fault is None:
            self.copy(transfer.direction, transfer.moves)
            return
        with self._noting_mistakes(), self.witness.watch(transfer, self._replaced()):
            self._meant = {m.block for m in transfer.moves}
            self.fault.carry(transfer, self)

    # ------------------------------------------------------------------ Ground

    def copy(self, direction: str, moves: Iterable[Move]) -> None:
        """See ``Ground``. Pages that the transfer was not meant for are noted."""
        moves = list(moves)
        if moves:
            if not self._illegal:
                self._illegal = self._outside(moves)
            self._production_copy(batch_of(direction, moves))

    def elsewhere(self) -> AbstractContextManager[None]:
        """See ``Ground``."""
        return self.witness.watch(Transfer(LOAD, ()))

    def _replaced(self) -> frozenset[int]:
        """Blocks that states of loading requests go on in: a connector may write them, vLLM replaces what is there."""
        blocks: set[int] = set()
        for request in self.harness.tracked.values():
            if request.external and not request.loaded:
                for index, table in enumerate(request.tables):
                    group = self.harness.groups[index]
                    if group.rule == "state":
                        blocks |= set(table[(request.local + request.external) // group.block_size :])
        return frozenset(blocks)

    def _outside(self, moves: list[Move]) -> list[Place]:
        found: dict[int, Place] = {}
        for move in moves:
            spot = self.pages.find(move.kv)
            if spot is not None and spot.block not in self._meant:
                found.setdefault(spot.block, self.pages.place(spot, self._group_of(spot.block)))
        return [found[block] for block in sorted(found)]

    def stored(self, label: str, move: Move) -> int | None:
        """See ``Ground``."""
        return self.witness.stored(label, move)

    def table(self, request: str, group: int) -> list[int]:
        """See ``Ground``."""
        return self.harness.tracked[request].tables[group]

    def free_block(self) -> int:
        """See ``Ground``. One that no request of this story ever had."""
        used = {b for r in self._requests() for table in r.tables for b in table}
        pool = self.staged.core.scheduler.kv_cache_manager.block_pool
        free = [b.block_id for b in pool.free_block_queue.get_all_free_blocks() if b.block_id not in used]
        return int(free[-1])

    def running(self) -> list[str]:
        """See ``Ground``."""
        return [r.request_id for r in self.harness.tracked.values() if any(r.tables)]

    # ------------------------------------------------------------------ whose block

    def _requests(self) -> list[Tracked]:
        """Running requests first, then finished ones, the latest first."""
        return [*self.harness.tracked.values(), *reversed(self.harness.finished)]

    def _owner(self, block: int) -> Owner | None:
        for request in self._requests():
            for group, table in enumerate(request.tables):
                if block != NULL_BLOCK and block in table:
                    return Owner(request.request_id, request.label, group, table.index(block), request.local)
        return None

    def _group_of(self, block: int) -> int | None:
        owner = self._owner(block)
        return None if owner is None else owner.group

    def _prefix_of(self, move: Move) -> Prefix | None:
        if move.owner is None:
            return None
        request = next(r for r in self._requests() if r.request_id == move.owner.request)
        size = self.harness.groups[move.owner.group].block_size
        return tuple(request.prompt[: (move.owner.index + 1) * size])

    # ------------------------------------------------------------------ verdict

    def expected(self, fault: Fault) -> Expected | None:
        """Where ``fault`` did its damage; None when it never did any."""
        if fault.oracle in ("hit_length", "lifecycle"):
            if fault.request is None:
                return None
            stopped = fault.may_stop and bool(self.harness.transcript.errors)
            return Expected(scenario=self.harness.scenario) if stopped else Expected(request=fault.request)
        if fault.oracle == "legality":
            place = self._illegal[0] if self._illegal else None
        else:
            place = self.witness.first(fault.stray)
        if place is not None and fault.oracle == "inventory":
            r = next(r for r in self.pages.layout.resources if r.layer == place.layer)
            place = Place(r.group, r.layer, r.fields[0].name, 0, 0)
        return None if place is None else Expected(place=place)

    def idle(self) -> bool:
        """Abort what is left after a story; whether the engine can go on."""
        core = self.staged.core
        try:
            core.abort_requests(list(core.scheduler.requests))
            for _ in range(20):
                if not core.scheduler.has_requests():
                    break
                core.step_fn()
            return not core.scheduler.has_requests() and core.reset_prefix_cache()
        except Exception:
            return False
