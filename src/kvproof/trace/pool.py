"""The guard's own books of one block pool: who was handed what, counted apart from the pool's own counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from kvproof.trace import native
from kvproof.trace.guard import standing_aside
from kvproof.trace.records import PoolChange

if TYPE_CHECKING:
    from kvproof.trace.scheduler_side import SchedulerGuard


class PoolBook:
    """Reference counts of one BlockPool as its calls change them. Wraps the pool's methods on this object only."""

    def __init__(self, pool: Any, guard: SchedulerGuard):
        self.pool = pool
        self.guard = guard
        self.options = guard.options
        self.references = np.fromiter((b.ref_cnt for b in pool.blocks), np.int64, len(pool.blocks))
        self._by_connector: Counter[int] = Counter()
        self._stored: Counter[Any] = Counter()
        self._allocated: list[int] = []
        self._events = bool(getattr(pool, "enable_kv_cache_events", False))
        allocate, touch, free = pool.get_new_blocks, pool.touch, pool.free_blocks

        def get_new_blocks(*args: Any, **kwargs: Any) -> Any:
            blocks = allocate(*args, **kwargs)
            self.changed("alloc", blocks)
            return blocks

        def touched(blocks: Any, *args: Any, **kwargs: Any) -> Any:
            blocks = list(blocks)
            result = touch(blocks, *args, **kwargs)
            self.changed("touch", blocks)
            return result

        def free_blocks(blocks: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
            blocks = list(blocks)
            result = free(blocks, *args, **kwargs)
            self.changed("release", blocks)
            return result

        pool.get_new_blocks, pool.touch, pool.free_blocks = get_new_blocks, touched, free_blocks
        if hasattr(pool, "unpin_blocks"):
            unpin = pool.unpin_blocks

            def unpin_blocks(blocks: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
                blocks = list(blocks)
                result = unpin(blocks, *args, **kwargs)
                self.changed("release", blocks)
                return result

            pool.unpin_blocks = unpin_blocks
        if self._events:
            take = pool.take_events

            def take_events(*args: Any, **kwargs: Any) -> Any:
                events = take(*args, **kwargs)
                self._note(self._stored, events)
                return events

            pool.take_events = take_events

    # The pool's methods are called from inside vLLM; standing_aside needs the guard's own reporting.
    def failed(self, where: str, error: BaseException) -> None:
        """Hand a fault of the books to the guard."""
        self.guard.failed(f"PoolBook.{where}", error)

    @standing_aside
    def changed(self, action: str, native_blocks: list[Any]) -> None:
        """Take one change into the books, log it, judge it."""
        mine = [block for block in native_blocks if getattr(block, "pool", None) in (None, self.pool)]
        blocks = np.fromiter((block.block_id for block in mine), np.int64, len(mine))
        if not len(blocks):
            return
        guard = self.guard
        inside = (blocks >= 0) & (blocks < len(self.references))
        safe = np.where(inside, blocks, 0)
        before = self.references[safe].copy()
        np.add.at(self.references, safe[inside], -1 if action == "release" else 1)
        after = self.references[safe]
        if guard.in_connector:
            for block in blocks.tolist():
                self._by_connector[block] += -1 if action == "release" else 1
                if not self._by_connector[block]:
                    del self._by_connector[block]
        if action == "alloc" and self.options.content:
            self._allocated += blocks.tolist()
        request = guard.freeing or guard.allocating
        self._log(action, blocks, after, request)
        null = blocks == 0  # the pool does not keep the null block's count
        record = PoolChange(
            action=action,
            blocks=blocks,
            before=np.where(null, 0 if action == "alloc" else 1, before),
            after=np.where(null, 0, after),
            native=np.where(null, 0, np.fromiter((block.ref_cnt for block in mine), np.int64, len(mine))),
            num_blocks=len(self.references),
            request=request,
        )
        if action == "release":
            guard.declarer.steady.stop()  # the next step looks at the books again
            free = blocks[(after == 0) & ~null]
            record.users = self._users(free)
            if guard.any_transfer_open:
                record.loading = {b: name for b in free.tolist() if (name := guard.transfers_open(b)) is not None}
        guard.examine(record)

    def _log(self, action: str, blocks: Any, after: Any, request: str | None) -> None:
        guard = self.guard
        name = "kv.release" if action == "release" else "kv.alloc"
        if not guard.sink.wants(name):
            return
        free = int(self.pool.get_num_free_blocks())
        if action == "release":
            guard.emit(name, request=request, blocks=blocks, freed=blocks[after == 0], free=free)
        else:
            guard.emit(name, request=request, action=action, blocks=blocks, free=free)

    def _users(self, blocks: Any) -> dict[int, str]:
        """Running requests, other than the one being freed, whose declared and still read part names a block."""
        guard = self.guard
        shadow, found = guard.declarer.shadow, {}
        requests = guard.scheduler.requests
        for group in guard.groups:
            if not group.slotted or guard._book_of_group[group.index] is not self:
                continue
            uses = shadow.uses[group.index]
            for block in blocks[uses[blocks] > 0].tolist():
                for name, column in shadow.holders(group.index, block, -1):
                    request = requests.get(name)
                    if name == guard.freeing or request is None or getattr(request.status, "name", "") != "RUNNING":
                        continue
                    computed = np.array([request.num_computed_tokens])
                    if column >= int(group.first_live_column(computed)[0]):
                        found[block] = name
        return found

    def take_allocated(self) -> list[int]:
        """Blocks handed out since the last call."""
        taken, self._allocated = self._allocated, []
        return taken

    def kept(self) -> int:
        """Blocks the connector holds on purpose."""
        return len(self._by_connector)

    def cached(self) -> tuple[int | None, int | None, int | None]:
        """(prefix-cache entries by the event stream, entries in the pool, announced ones it lacks); None: no events."""
        entries = native.cached_entries(self.pool) if self._events else None
        if entries is None:
            return None, None, None
        stored = Counter(self._stored)
        self._note(stored, self.pool.kv_event_queue)
        return stored.total(), entries.total(), (stored - entries).total()

    @staticmethod
    def _note(stored: Counter[Any], events: Any) -> None:
        for kind, key in native.event_changes(events):
            if kind == "cleared":
                stored.clear()
            elif kind == "stored":
                stored[key] += 1
            else:
                stored[key] -= 1
                if not stored[key]:
                    del stored[key]
