"""The guard's memory of block tables against a dict of lists."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvproof.trace.shadow import Shadow

BLOCKS = (12, 5)
"""Blocks of the pools of the two groups."""
NAMES = st.sampled_from([f"r{i}" for i in range(9)])
GROUPS = st.integers(0, len(BLOCKS) - 1)
IDS = st.lists(st.integers(-3, 14) | st.sampled_from([2**31, -(2**40), 2**62]), max_size=6)


def kept(block: int) -> int:
    """What the table keeps of an id: 32 bits."""
    return max(-(2**31), min(block, 2**31 - 1))


class ShadowMachine(RuleBasedStateMachine):
    """Every operation on the shadow and on plain lists."""

    @initialize(rows=st.integers(1, 3), columns=st.integers(1, 3))
    def start(self, rows: int, columns: int) -> None:
        self.shadow = Shadow(BLOCKS, rows=rows, columns=columns)
        self.lists: dict[str, list[list[int]]] = {}
        self.low: dict[str, list[int]] = {}

    def live(self, group: int) -> list[tuple[str, int, int]]:
        """(request, column, block) of every counted cell of a group."""
        return [
            (name, column, block)
            for name, lists in self.lists.items()
            for column, block in enumerate(lists[group])
            if column >= self.low[name][group]
        ]

    @rule(name=NAMES)
    def add(self, name: str) -> None:
        row = self.shadow.add(name)
        assert self.shadow.row_of[name] == row
        self.lists[name] = [[] for _ in BLOCKS]
        self.low[name] = [0 for _ in BLOCKS]

    @rule(name=NAMES)
    def forget(self, name: str) -> None:
        assert self.shadow.forget(name) == (name in self.lists)
        self.lists.pop(name, None)
        self.low.pop(name, None)

    @precondition(lambda self: self.lists)
    @rule(data=st.data(), group=GROUPS, blocks=IDS)
    def append(self, data: Any, group: int, blocks: list[int]) -> None:
        name = data.draw(st.sampled_from(sorted(self.lists)))
        mine = self.lists[name][group]
        assert self.shadow.append(group, self.shadow.row_of[name], np.array(blocks, np.int64)) == len(mine)
        mine += [kept(block) for block in blocks]

    @precondition(lambda self: self.lists)
    @rule(data=st.data(), group=GROUPS)
    def cut(self, data: Any, group: int) -> None:
        """Takes back an append, of which nothing has left the window."""
        name = data.draw(st.sampled_from(sorted(self.lists)))
        mine = self.lists[name][group]
        count = data.draw(st.integers(0, len(mine) - self.low[name][group]))
        self.shadow.cut(group, self.shadow.row_of[name], count)
        del mine[len(mine) - count :]

    @precondition(lambda self: self.lists)
    @rule(data=st.data())
    def clear(self, data: Any) -> None:
        name = data.draw(st.sampled_from(sorted(self.lists)))
        self.shadow.clear(self.shadow.row_of[name])
        self.lists[name] = [[] for _ in BLOCKS]
        self.low[name] = [0 for _ in BLOCKS]

    @precondition(lambda self: self.lists)
    @rule(data=st.data(), group=GROUPS)
    def drop_before(self, data: Any, group: int) -> None:
        names = data.draw(st.lists(st.sampled_from(sorted(self.lists)), unique=True))
        columns = [data.draw(st.integers(0, 9)) for _ in names]
        self.shadow.drop_before(group, self.shadow.rows(names), np.array(columns, np.int64))
        for name, column in zip(names, columns, strict=True):
            low = self.low[name]
            low[group] = max(low[group], min(column, len(self.lists[name][group])))

    @invariant()
    def rows_are_the_lists(self) -> None:
        if not hasattr(self, "lists"):
            return
        shadow = self.shadow
        assert len(shadow) == len(self.lists)
        assert set(shadow.row_of) == set(self.lists)
        rows = list(shadow.row_of.values())
        assert len(set(rows)) == len(rows)
        assert [shadow.name_of[row] for row in rows] == list(shadow.row_of)
        for name, lists in self.lists.items():
            for group, mine in enumerate(lists):
                assert shadow.blocks(group, shadow.row_of[name]).tolist() == mine
        asked = [*self.lists, "nobody"]
        assert shadow.rows(asked).tolist() == [shadow.row_of.get(name, -1) for name in asked]

    @invariant()
    def uses_and_holders_are_counted(self) -> None:
        if not hasattr(self, "lists"):
            return
        for group, size in enumerate(BLOCKS):
            live = self.live(group)
            count = Counter(block for _, _, block in live)
            assert self.shadow.uses[group].tolist() == [count[block] for block in range(size)]
            for block in range(size):
                found = self.shadow.holders(group, block, -1)
                assert sorted(found) == sorted((name, column) for name, column, one in live if one == block)
            for name in self.lists:
                beside = self.shadow.row_of[name]
                found = self.shadow.holders(group, 1, beside)
                assert sorted(found) == sorted((n, c) for n, c, b in live if b == 1 and n != name)

    @invariant()
    def lookups_answer_minus_one_outside(self) -> None:
        if not hasattr(self, "lists"):
            return
        names = [*self.lists, "nobody"]
        pairs = [(name, column) for name in names for column in range(-1, 12)]
        rows = self.shadow.rows([name for name, _ in pairs])
        columns = np.array([column for _, column in pairs], np.int64)
        for group in range(len(BLOCKS)):
            expected = [
                self.lists[name][group][column]
                if name in self.lists and 0 <= column < len(self.lists[name][group])
                else -1
                for name, column in pairs
            ]
            assert self.shadow.lookup(group, rows, columns).tolist() == expected
        beyond = np.array([len(self.shadow.name_of), -5], np.int64)
        assert self.shadow.lookup(0, beyond, np.zeros(2, np.int64)).tolist() == [-1, -1]

    @precondition(lambda self: self.lists)
    @rule(data=st.data())
    def excerpt(self, data: Any) -> None:
        """A copy of some rows, in the order asked for; what happens later does not reach it."""
        names = data.draw(st.lists(st.sampled_from([*sorted(self.lists), "nobody"]), unique=True))
        copy, rows = self.shadow.excerpt(self.shadow.rows(names))
        known = [name for name in names if name in self.lists]
        assert [name for name, row in zip(names, rows.tolist(), strict=True) if row >= 0] == known
        before = {name: [list(mine) for mine in self.lists[name]] for name in known}
        for name in known:
            for group in range(len(BLOCKS)):
                self.shadow.append(group, self.shadow.row_of[name], np.array([1]))
                self.lists[name][group].append(1)
        for name, row in zip(names, rows.tolist(), strict=True):
            for group in range(len(BLOCKS)):
                if row >= 0:
                    assert copy.blocks(group, row).tolist() == before[name][group]
                    found = copy.lookup(group, np.array([row]), np.array([len(before[name][group])]))
                    assert found.tolist() == [-1]


TestShadow = ShadowMachine.TestCase
TestShadow.settings = settings(max_examples=60, stateful_step_count=40)
