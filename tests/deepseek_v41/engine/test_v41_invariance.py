"""However a request reaches the engine, it gets the same tokens, states and cache rows (specification, section 12.4).

fp32, so that the only difference allowed is the order of sums: a thousandth of a percent of the largest value. Every
case runs under kv_trace, which must stay silent.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))
from v41_play import checkpoint, differs, play, prompt

pytestmark = pytest.mark.engine
NOISE = 1e-5
RING = 8
"""Rows of the ring without speculation (A.8)."""

SUBJECT = {"id": "a", "prompt": prompt(40), "n": 8}
OTHERS = [{"id": f"r{n}", "prompt": prompt(n, n), "n": 6} for n in (1, 5, 17, 33, 90)]
CHUNKS = (1, 3, 7, RING + 5, 2 * RING, 33)
"""Tokens of a step: inside pairs, single, longer than the ring, unlike the block."""


CASES = [
    {"name": "one-shot", "requests": [SUBJECT]},
    *({"name": f"chunks of {n}", "chunk": n, "requests": [SUBJECT]} for n in CHUNKS),
    {"name": "batch", "requests": [*OTHERS, SUBJECT]},
    {"name": "interleaved", "chunk": 13, "requests": [{**r, "at": 2 * i} for i, r in enumerate([*OTHERS, SUBJECT])]},
    {"name": "hit-fill", "requests": [SUBJECT]},
    {"name": "hit", "keep": True, "requests": [SUBJECT]},
    {"name": "hit in a batch", "keep": True, "requests": [SUBJECT, *OTHERS]},
    {"name": "reused pages", "poison": True, "requests": [SUBJECT]},
    {"name": "reused pages, batch", "poison": True, "chunk": 29, "requests": [*OTHERS, SUBJECT]},
    {"name": "preempted", "free": 64, "requests": [*({**r, "n": 46} for r in OTHERS), {**SUBJECT, "at": 1}]},
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return checkpoint("deepseek-v41-tiny", tmp_path_factory.mktemp("v41") / "tiny")


@pytest.fixture(scope="module", params=["v1", "v2"])
def played(request, tiny):
    return play(tiny, CASES, runner=request.param)


@pytest.mark.parametrize("case", [case["name"] for case in CASES])
def test_the_way_does_not_change_the_result(played, case):
    expected, found = played["one-shot"], played[case]
    assert found["findings"] == []
    assert found["tokens"]["a"] == expected["tokens"]["a"]
    positions, states = found["hidden"]["a"]
    all_positions, all_states = expected["hidden"]["a"]
    wanted = all_states[[all_positions.index(p) for p in positions]]
    assert differs(states, wanted) < NOISE
    assert found["rows"]["a"].keys() == expected["rows"]["a"].keys()
    worst = {name: differs(rows, expected["rows"]["a"][name]) for name, rows in found["rows"]["a"].items()}
    assert max(worst.values()) < NOISE, worst


def test_every_kind_of_cache_was_compared(played):
    rows = played["one-shot"]["rows"]["a"]
    kinds = {name.split("attn.")[1] for name, found in rows.items() if found.numel()}
    assert kinds == {"swa_cache", "long_cache", "indexer.k_cache", "compressor.state_cache"}


def test_the_cases_are_what_they_say(played):
    assert played["hit"]["hidden"]["a"][0][0] == 32, "two blocks of 16 were hit"
    assert played["one-shot"]["hidden"]["a"][0][0] == 0
    assert played["chunks of 1"]["steps"] == len(SUBJECT["prompt"]) + SUBJECT["n"] - 1
    assert played["one-shot"]["steps"] == SUBJECT["n"]
    assert played["preempted"]["preemptions"]["a"] > 0


def test_decode_is_prefill(tiny, played):
    """The tokens a request generated, given as a prompt, leave the same rows and lead to the same next token."""
    tokens = played["one-shot"]["tokens"]["a"]
    longer = {"id": "a", "prompt": SUBJECT["prompt"] + tokens[:-1], "n": 1}
    found = play(tiny, [{"name": "prefill", "requests": [longer]}])["prefill"]
    assert found["tokens"]["a"] == tokens[-1:]
    for name, rows in found["rows"]["a"].items():
        assert differs(rows, played["one-shot"]["rows"]["a"][name]) < NOISE, name
