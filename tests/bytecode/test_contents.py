from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvproof.bytecode import Contents
from kvproof.bytecode.contents import Named


@settings(max_examples=60)
@given(st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=8))
def test_two_places_share_an_id_exactly_when_their_prefixes_are_equal(requests):
    contents = Contents()
    prefixes: dict[tuple[int, ...], int] = {}
    for number, tokens in enumerate(requests):
        ids = contents.intern(f"r{number}", tokens)
        assert len(ids) == len(tokens)
        for position, content in enumerate(ids.tolist()):
            key = tuple(tokens[: position + 1])
            new = key not in prefixes
            assert prefixes.setdefault(key, content) == content
            if new:
                assert content == len(prefixes) - 1  # consecutive, in the order of first appearance
                assert contents.name(content) == Named(f"r{number}", position)
    assert len(contents) == len(prefixes) == len(set(prefixes.values()))


def test_a_fresh_prompt_is_consecutive():
    contents = Contents()
    contents.intern("a", [5, 6])
    assert contents.intern("b", [5, 7, 8, 9]).tolist() == [0, 2, 3, 4]


@pytest.mark.parametrize("content", [-1, 2])
def test_names_never_given_out_are_refused(content):
    contents = Contents()
    contents.intern("a", [5, 6])
    with pytest.raises(ValueError, match=f"content id {content} was never given out, limit 2"):
        contents.name(content)
