"""The fast ledger against the naive one: the same wrong bytes, the same places, the same names, whatever happens."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_ledger import NaiveLedger, Wrong, named_states, optional_state
from random_layouts import layouts

from kvproof.bytecode import ByteCode, Fill, Ledger, Mismatch
from kvproof.layout import Layout, Resource

CODE = ByteCode(1)
FILLS = (Fill.TARGET, Fill.UNCOMPUTED, Fill.ZEROED_OR_POISON, Fill.ANY)
MARKS = (Fill.TARGET, Fill.UNCOMPUTED, Fill.ZEROED_OR_POISON, Fill.ANY, Fill.TAINTED, Fill.FREE, Fill.NULL)


class Twins:
    """One story told to both ledgers; the naive one's bytes are compared with the real memory after every word."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.memories = [np.zeros(s.nbytes, np.uint8) for s in layout.storages]
        self.fast = Ledger(layout, CODE, self.memories)
        self.naive = NaiveLedger(layout, CODE)
        self.fast.paint()
        self.naive.paint()

    def same_memory(self) -> None:
        for mine, other in zip(self.naive.memories, self.memories, strict=True):
            assert bytes(mine) == other.tobytes()

    def poke(self, storage: int, byte: int, values: bytes) -> None:
        """A stray write, seen by both."""
        values = values[: len(self.naive.memories[storage]) - byte]
        self.naive.memories[storage][byte : byte + len(values)] = values
        self.memories[storage][byte : byte + len(values)] = np.frombuffer(values, np.uint8)

    def judge(self, blocks: list[int] | None) -> list[Mismatch]:
        found, judged = self.fast.judge(blocks)
        wanted = range(self.layout.num_blocks) if blocks is None else sorted(set(blocks))
        assert judged.bytes == sum(self.naive.judged_bytes(b) for b in wanted)
        assert judged.blocks == set(wanted)
        assert judged.resources == {r.id for r in self.layout.resources}
        self.compare(found, self.naive.wrong(wanted))
        return found

    def judge_rows(self, r: Resource, block: int, first: int, last: int) -> None:
        found, _ = self.fast.judge_rows(r, {block: (first, last)})
        self.compare(found, self.naive.wrong_rows(r, block, range(first, last)))

    def compare(self, found: list[Mismatch], expected: list[Wrong]) -> None:
        """Pages one by one; what no resource owns is compared as one set, the fast ledger splits it by frames."""
        pages = {(w.resource, w.block): w.states for w in expected}
        seen: set[tuple[int, int]] = set()
        loose: dict[int, set[tuple[int, int]]] = {}
        for m in found:
            owned = m.resource is not None and self.naive.owner[m.block] is not None
            addresses = self.check(m, pages[m.resource, m.block] if owned else pages[None, m.block])
            if owned:
                assert (m.resource, m.block) not in seen
                seen.add((m.resource, m.block))
                assert addresses == set(pages[m.resource, m.block])
            else:
                assert not loose.setdefault(m.block, set()) & addresses
                loose[m.block] |= addresses
        assert seen == {key for key in pages if key[0] is not None}
        assert loose == {w.block: set(w.states) for w in expected if w.resource is None}

    def check(self, m: Mismatch, wrong: dict[tuple[int, int], int]) -> set[tuple[int, int]]:
        """Everything a mismatch says about its bytes; their addresses."""
        start = self.page_start(m)
        storage = next(r.storage for r in self.layout.resources if (r.group, r.layer) == (m.group, m.layer))
        states = {(storage, start + i): state for begin, length, state in m.wrong for i in range(begin, begin + length)}
        assert states == named_states({a: wrong[a] for a in states})
        owner = self.naive.owner[m.block]
        namer = m.group if owner is None or m.resource is not None else owner
        pages = [r for r in self.layout.group_resources(namer) if m.resource in (None, r.id)]
        used = {self.naive.address(r, m.block, inside) for r in pages for _, _, inside in self.naive.cells[r.id]}
        assert not states.keys() & used if m.resource is None else states.keys() <= used
        first = min(states)
        assert first == (storage, start + m.page_byte)
        assert m.observed == wrong[first]
        assert m.wrong_bytes == len(states)
        assert m.counts == {s: list(states.values()).count(s) for s in set(states.values())}
        if m.resource is not None:
            r = self.layout.resources[m.resource]
            assert (m.row, m.row_byte, m.page_byte) in self.naive.cells[r.id]
            if self.naive.owner[m.block] is not None:
                assert m.expected == self.naive.states[r.id, m.block, m.row]
                assert m.group == self.naive.owner[m.block]
        if self.naive.owner[m.block] is None:
            assert m.expected == (Fill.NULL if m.block == 0 else Fill.FREE)
        return set(states)

    def page_start(self, m: Mismatch) -> int:
        """Start of the page a mismatch counts from: its resource's, or for padding its layer's."""
        mine = [r for r in self.layout.group_resources(m.group) if r.layer == m.layer]
        r = self.layout.resources[m.resource] if m.resource is not None else min(mine, key=lambda r: r.offset)
        assert r in mine
        return r.offset + m.block * r.block_stride

    def taint(self, found: list[Mismatch]) -> None:
        for m in found:
            block_owner = self.naive.owner[m.block]
            if m.resource is None or block_owner is None:
                used = {
                    self.naive.address(r, m.block, inside)
                    for r in self.layout.resources
                    if r.group == block_owner
                    for _, _, inside in self.naive.cells[r.id]
                }
                for storage, byte in self.naive.pages[m.block] - used:
                    self.naive.memories[storage][byte] = 252 if m.block == 0 else 253
            else:
                r = self.layout.resources[m.resource]
                runs = {i for begin, length, _ in m.wrong for i in range(begin, begin + length)}
                for row, _, inside in self.naive.cells[r.id]:
                    if inside in runs:
                        self.naive.states[r.id, m.block, row] = int(Fill.TAINTED)
            self.fast.taint(m)


@st.composite
def words(draw: st.DrawFn, layout: Layout, owner: dict[int, int | None]) -> tuple:
    """One thing that may happen now."""
    live = [b for b, g in owner.items() if g is not None]
    kinds = ["allocate", "stray", "copy", "zero"] + ["write", "write", "expect", "optional", "mark"] * bool(live)
    kind = draw(st.sampled_from(kinds))
    if kind == "allocate":
        return (
            kind, draw(st.integers(0, len(layout.groups) - 1)), draw(st.integers(1, layout.num_blocks - 1)),
            draw(st.sampled_from(FILLS)),
        )  # fmt: skip
    if kind in ("stray", "copy", "zero"):
        s = draw(st.integers(0, len(layout.storages) - 1))
        size = layout.storages[s].nbytes
        place = (s, draw(st.integers(0, size - 1)))
        if kind == "stray":
            return kind, *place, bytes(draw(st.lists(st.sampled_from((0, 7, 250, 252, 253, 254, 255)), max_size=3)))
        return kind, *place, draw(st.integers(0, size - 1)), draw(st.integers(1, 200))
    block = draw(st.sampled_from(live))
    r = draw(st.sampled_from(layout.group_resources(owner[block] or 0)))
    first = draw(st.integers(0, r.rows - 1))
    count = draw(st.integers(1, r.rows - first))
    begin, step = draw(st.integers(0, 60)), draw(st.sampled_from((max(1, r.tokens_per_row), 1, 5, 0)))
    ids = [begin + i * step for i in range(count)]
    return kind, r, block, first, ids, draw(st.sampled_from(MARKS))


@settings(max_examples=70)
@given(st.data())
def test_judge_reports_exactly_the_wrong_bytes(data):
    layout = data.draw(layouts(), label="layout")
    both = Twins(layout)
    for _ in range(data.draw(st.integers(1, 7))):
        kind, *rest = data.draw(words(layout, both.naive.owner), label="then")
        if kind == "allocate":
            group, block, fill = rest
            both.fast.allocate(group, [block], fill)
            both.naive.allocate(group, block, fill)
        elif kind == "stray":
            both.poke(*rest)
        elif kind == "zero":
            storage, byte, _, length = rest
            both.poke(storage, byte, bytes(length))
        elif kind == "copy":
            storage, byte, source, length = rest
            both.poke(storage, byte, bytes(both.naive.memories[storage][source : source + length]))
        else:
            r, block, first, ids, mark = rest
            if kind == "write":
                both.fast.write(r, block, first, np.array(ids, np.int32))
                both.naive.write(r, block, first, ids)
            elif kind == "mark":
                both.fast.mark(r, block, mark, first, first + len(ids))
                both.naive.expect(r, block, first, [int(mark)] * len(ids))
            else:
                states = [optional_state(c) for c in ids] if kind == "optional" else ids
                both.fast.expect(r, block, first, np.array(states, np.int32))
                both.naive.expect(r, block, first, states)
        both.same_memory()
    everything = st.none() | st.lists(st.integers(0, layout.num_blocks - 1), min_size=1)
    live = [b for b, g in both.naive.owner.items() if g is not None]
    if live:
        block = data.draw(st.sampled_from(live))
        for r in layout.group_resources(both.naive.owner[block] or 0):
            first = data.draw(st.integers(0, r.rows))
            both.judge_rows(r, block, first, data.draw(st.integers(first, r.rows)))
    found = both.judge(data.draw(everything, label="judged blocks"))
    both.taint(found)
    both.same_memory()
    both.judge(None)
    both.taint(both.fast.judge()[0])
    assert both.fast.judge()[0] == []
