"""Answers: the scheduler is told something that is not so."""

from __future__ import annotations

from typing import Any

from kvproof.faults.model import Fault, Ground, Lookup, unfit

SYNCHRONOUS = "its loads are synchronous; nothing is reported"


class HitLongerThanSaved(Fault):
    """The lookup counts one block more than was saved; its tokens are taken as computed."""

    stands_for = ("A28", "A30", "A32")
    oracle = "hit_length"
    story = "longer"
    may_stop = True
    unfit = unfit(ExampleConnector="it finds whole prompts only, so no prompt goes on behind its hit")

    def look_up(self, production: Lookup, request: Any, label: str, computed: int, ground: Ground) -> Any:
        hit, later = production(request, computed)
        if not hit or computed + hit + ground.unit >= request.num_tokens:
            return hit, later
        self.request = self.request or request.request_id
        return hit + ground.unit, later


class HitShorterThanSaved(Fault):
    """The lookup counts one block less than was saved: never wrong bytes, always wasted work."""

    stands_for = ("A31", "A40")
    oracle = "hit_length"
    may_stop = True

    def look_up(self, production: Lookup, request: Any, label: str, computed: int, ground: Ground) -> Any:
        hit, later = production(request, computed)
        if not hit or hit <= ground.unit:
            return hit, later
        self.request = self.request or request.request_id
        return hit - ground.unit, later


class NeverHits(Fault):
    """Save and lookup use different keys: everything is written, nothing is ever found."""

    stands_for = ("A21", "A50", "A40")
    oracle = "hit_length"

    def look_up(self, production: Lookup, request: Any, label: str, computed: int, ground: Ground) -> Any:
        if label == "again":
            self.request = request.request_id
        return 0, False


class HitNotAligned(Fault):
    """The lookup answers one token less than a block boundary, as when the last token must be computed."""

    stands_for = ("A33", "A30")
    oracle = "hit_length"
    may_stop = True

    def look_up(self, production: Lookup, request: Any, label: str, computed: int, ground: Ground) -> Any:
        hit, later = production(request, computed)
        if not hit:
            return hit, later
        self.request = self.request or request.request_id
        return hit - 1, later


class NegativeHit(Fault):
    """The lookup answers less than nothing, as an alignment of a length below one block does."""

    stands_for = ("A22",)
    oracle = "hit_length"
    may_stop = True

    def look_up(self, production: Lookup, request: Any, label: str, computed: int, ground: Ground) -> Any:
        if label != "again":
            return production(request, computed)
        self.request = request.request_id
        return -ground.unit, False


class KeyCollision(Fault):
    """Two prompts share their keys: the second one is given the blocks of the first."""

    stands_for = ("A22", "A24", "A26", "A47")
    oracle = "provenance"
    story = "together"
    unfit = unfit(
        ExampleConnector="it makes its key in four places from the token ids; none of them is the lookup",
        AscendStoreConnector="it asks the request for its keys once more when it loads",
    )

    def __init__(self) -> None:
        super().__init__()
        self._keys: list[Any] = []

    def look_up(self, production: Lookup, request: Any, label: str, computed: int, ground: Ground) -> Any:
        if label == "a":
            self._keys = list(request.block_hashes)
        if label != "b again":
            return production(request, computed)
        own = request.block_hashes
        request.block_hashes = self._keys[: len(own)]
        try:
            return production(request, computed)
        finally:
            request.block_hashes = own


class LoadNeverFinishes(Fault):
    """A load is done and never reported, so its request waits for ever and its blocks stay taken."""

    stands_for = ("A74", "A42")
    oracle = "lifecycle"
    may_stop = True
    unfit = unfit(ExampleConnector=SYNCHRONOUS, AscendStoreConnector=SYNCHRONOUS)

    def report(self, loaded: set[str]) -> set[str]:
        self.request = self.request or min(loaded, default=None)
        return set()


FAULTS = (
    HitShorterThanSaved,
    NeverHits,
    KeyCollision,
    HitLongerThanSaved,
    LoadNeverFinishes,
    HitNotAligned,
    NegativeHit,
)
