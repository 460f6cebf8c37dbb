"""Native objects of vLLM as the guard reads them, on objects of the same shape."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

from kvproof.trace.native import cached_entries, event_changes

HASH = bytes(range(32))
LOW64 = int.from_bytes(HASH[-8:], "big")


def pool(**entries: Any) -> SimpleNamespace:
    """A pool whose cache holds HASH of the group each name ends with."""
    cache = {HASH + int(name[1:]).to_bytes(4, "big"): value for name, value in entries.items()}
    return SimpleNamespace(cached_block_hash_to_block=SimpleNamespace(_cache=cache))


def test_entries_are_counted_per_block_and_known_by_group_and_hash() -> None:
    assert cached_entries(pool(g0="block", g3={7: "block", 9: "block"})) == Counter({(0, LOW64): 1, (3, LOW64): 2})


def test_a_pool_of_another_shape_is_not_guessed_at() -> None:
    assert cached_entries(SimpleNamespace()) is None


def test_events_name_entries_as_the_pool_does_in_bytes_and_in_integers() -> None:
    class BlockStored(SimpleNamespace):
        pass

    class BlockRemoved(SimpleNamespace):
        pass

    class AllBlocksCleared:
        pass

    events = [BlockStored(block_hashes=[HASH], group_idx=3), BlockRemoved(block_hashes=[LOW64], group_idx=3),
              AllBlocksCleared(), object()]  # fmt: skip
    assert list(event_changes(events)) == [("stored", (3, LOW64)), ("removed", (3, LOW64)), ("cleared", None)]
