"""Engram's token map, hashes and gate: golden vectors, contracts H18, H19, H23 and a version in Python integers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvproof.deepseek_v41.ops.engram import (
    BARRIER,
    HashLayout,
    TokenMap,
    compressed_token_map,
    gate,
    gate_update,
    hashes,
    multipliers,
    primes,
)

TINY = {
    "layer_ids": [1, 3],
    "num_embeddings": [272, 348],
    "max_ngram_size": 3,
    "n_heads": 2,
    "vocab_size": 61,
    "compressed_vocab_size": 97,
}
LAYOUT = HashLayout.of(**TINY)
PAD = 2

# ---------------------------------------------------------------------- layout


def test_golden_primes():
    assert primes(61, 2, 2, 2) == [[[61, 67], [71, 73]], [[79, 83], [89, 97]]]
    (thousand,) = primes(1000, 1, 3, 8)
    flat = [prime for order in thousand for prime in order]
    assert (flat[0], flat[-1], sum(flat), flat) == (1009, 1163, 25874, sorted(flat))


def test_golden_primes_of_the_release():
    one, fourteen = ([p for order in layer for p in order] for layer in primes(16_000_000, 2, 3, 8))
    assert (one[0], one[-1], sum(one)) == (16000057, 16000463, 384006168)
    assert (fourteen[0], fourteen[-1], sum(fourteen)) == (16000477, 16000889, 384016682)


def test_a_prime_base_is_taken_itself():
    assert primes(61, 1, 1, 1) == [[[61]]]
    assert primes(1, 1, 1, 3) == [[[2, 3, 5]]]


def test_golden_offsets():
    assert LAYOUT.offsets.flatten(1).tolist() == [[0, 61, 128, 199], [0, 79, 162, 251]]


@pytest.mark.parametrize(("layer", "count", "compressed", "golden"), [
    (1, 3, 97, [78284821251697249, 4944257750913641, 36735214942979007]),
    (3, 3, 97, [28120650625044949, 83420386932483685, 11112535645682063]),
    (1, 4, 1000, [7593627661414631, 479593001838623, 3563315849468963, 7331553243427023]),
    (14, 4, 1000, [6710194209774885, 5104308867516367, 3064058137012075, 8186904390910353]),
    (1, 4, 99092, [76632096046245, 4839876093313, 35959672319349, 73987337458391]),
    (14, 4, 99092, [67716810739261, 51510806800915, 30921347202721, 82619226485591]),
])  # fmt: skip
def test_golden_multipliers(layer, count, compressed, golden):
    assert multipliers(layer, count, compressed) == golden


@given(st.integers(0, 60), st.integers(1, 200_000))
def test_products_fit_int64(layer, compressed):
    for factor in multipliers(layer, 4, compressed):
        assert factor % 2 == 1
        assert 0 <= (compressed - 1) * factor < 2**63


@pytest.mark.parametrize(("change", "message"), [
    ({"num_embeddings": [271, 348]}, "engram_num_embeddings 271 of layer 1: must be >= 272"),
    ({"num_embeddings": [272, 347]}, "347 of layer 3: must be >= 348"),
    ({"num_embeddings": [272]}, "1 entries, must be 2"),
    ({"layer_ids": [], "num_embeddings": []}, "engram_layer_ids 0"),
    ({"max_ngram_size": 1}, "engram_max_ngram_size 1: must be >= 2"),
    ({"n_heads": 0}, "engram_n_heads 0"),
    ({"vocab_size": 0}, "engram_vocab_size 0"),
    ({"compressed_vocab_size": 0}, "engram_compressed_vocab_size 0"),
])  # fmt: skip
def test_impossible_layouts(change, message):
    with pytest.raises(ValueError, match=message):
        HashLayout.of(**(TINY | change))


# ---------------------------------------------------------------------- hashes


def hashed(values, lookback=((BARRIER, BARRIER),), starts=None, layout=LAYOUT):
    values = torch.tensor(values, dtype=torch.int64)
    starts = torch.tensor(starts if starts is not None else [0, len(values)])
    history = torch.tensor(lookback, dtype=torch.int64) if lookback else torch.zeros(0, 2, dtype=torch.int64)
    return hashes(layout, values, starts, history, PAD)


def test_golden_hashes():
    got = hashed([5, 6, 7, 8])
    assert got.dtype == torch.int64
    assert got[:, 0].tolist() == [[3, 89, 186, 240], [6, 102, 142, 218], [22, 113, 135, 244], [26, 94, 166, 262]]
    assert got[:, 1].tolist() == [[46, 125, 184, 324], [39, 157, 201, 265], [46, 155, 238, 325], [38, 143, 202, 286]]


def test_golden_hashes_with_a_dead_token():
    golden = [[3, 89, 186, 240], [6, 102, 142, 218], [19, 112, 155, 211], [54, 62, 176, 268]]
    assert hashed([5, 6, BARRIER, 8])[:, 0].tolist() == golden


def test_golden_hashes_across_a_chunk():
    assert torch.equal(hashed([7, 8], [[6, 5]]), hashed([5, 6, 7, 8])[2:])


def by_hand(sequence, at, slot, layout):
    """Rows of the token at place ``at`` of one whole request, in Python integers."""
    rolling, blocked, out = 0, False, []
    for far in range(layout.multipliers.shape[1]):
        place = at - far
        blocked = blocked or place < 0 or sequence[place] == BARRIER
        rolling ^= (PAD if blocked else sequence[place]) * int(layout.multipliers[slot, far])
        if far:
            columns = zip(layout.primes[slot, far - 1].tolist(), layout.offsets[slot, far - 1].tolist(), strict=True)
            out += [rolling % prime + offset for prime, offset in columns]
    return out


DEEP = HashLayout.of(
    layer_ids=[0, 2, 5],
    num_embeddings=[10**6] * 3,
    max_ngram_size=4,
    n_heads=3,
    vocab_size=500,
    compressed_vocab_size=99092,
)
VALUES = st.lists(st.one_of(st.just(BARRIER), st.integers(0, 99091)), min_size=1, max_size=14)


@given(st.lists(st.tuples(VALUES, st.integers(0, 13)), min_size=1, max_size=4), st.integers(0, 3))
def test_hashes_of_a_batch_of_chunks(requests, padding):
    """Requests at any place of their sequence, some with no token here, padding behind: each as if it were alone."""
    chunks, lookbacks, starts, expected = [], [], [0], []
    for sequence, cut in requests:
        cut = min(cut, len(sequence))
        chunks += sequence[cut:]
        starts.append(len(chunks))
        lookbacks.append([sequence[cut - 1 - j] if cut - 1 - j >= 0 else BARRIER for j in range(3)])
        expected += [[by_hand(sequence, at, slot, DEEP) for slot in range(3)] for at in range(cut, len(sequence))]
    got = hashed(chunks + [77] * padding, lookbacks, starts, DEEP)
    assert got.shape == (len(chunks) + padding, 3, 9)
    assert got[: len(chunks)].tolist() == expected
    assert got[len(chunks) :].eq(-1).all()
    used = got[: len(chunks)].view(-1, 3, 3, 3)
    assert ((used >= DEEP.offsets) & (used < DEEP.offsets + DEEP.primes)).all()


def test_int32_boundaries_of_the_runner():
    starts = torch.tensor([0, 1, 3], dtype=torch.int32)
    values, lookback = torch.tensor([5, 6, 7]), torch.full((2, 2), BARRIER, dtype=torch.int32)
    assert torch.equal(hashes(LAYOUT, values, starts, lookback, PAD)[1:], hashed([6, 7]))


def test_an_empty_step():
    assert hashed([], [], [0]).shape == (0, 2, 4)
    assert hashed([9, 9], [], [0]).eq(-1).all()


@pytest.mark.parametrize(("lookback", "starts", "message"), [
    ([[1, 2, 3]], [0, 2], r"lookback shape \(1, 3\): must be \(1, 2\)"),
    ([[1, 2]] * 2, [0, 2], r"lookback shape \(2, 2\)"),
    ([[1, 2]], [0, 3], "at most 2"),
    ([[1, 2]], [1, 2], "ascend from 0"),
    ([[1, 2]] * 2, [0, 2, 1], "ascend from 0"),
])  # fmt: skip
def test_misfitting_batches(lookback, starts, message):
    with pytest.raises(ValueError, match=message):
        hashed([5, 6], lookback, starts)


# ---------------------------------------------------------------------- token map

TEXTS = {
    "The": "The", "Ġthe": " the", "THE": "THE", "the": "the",
    "é": "é", "É": "E\u0301", "e": "e", "\u0301": "\u0301",
    "Ġ": " ", "ĊĊ": "\n\n", "Ġĉ": " \t", "": "",
    "ﬁ": "ﬁ", "fi": "fi", "Ａ": "Ａ", "a": "a",
    "â": "\ufffd", "ã": "\ufffd", "aâ": "a\ufffd", "x y": " x  \r\n y ",
}  # fmt: skip


def test_what_reads_alike_shares_a_number():
    tokens = list(TEXTS)
    values, distinct = compressed_token_map(lambda token: TEXTS[tokens[token]], tokens)
    number = dict(zip(tokens, values.tolist(), strict=True))
    groups: dict[int, set[str]] = {}
    for token, value in number.items():
        groups.setdefault(value, set()).add(token)
    assert list(groups.values()) == [
        {"The", "Ġthe", "THE", "the"}, {"é", "É", "e"},
        {"\u0301"},  # nothing is left of a lone accent: its own text
        {"Ġ", "ĊĊ", "Ġĉ"}, {""}, {"ﬁ", "fi"}, {"Ａ", "a"},
        {"â"}, {"ã"}, {"aâ"},  # incomplete UTF-8: told apart by the raw token
        {"x y"},
    ]  # fmt: skip
    assert (list(groups), distinct) == (list(range(11)), 11)
    assert values.dtype == torch.int64


def token_map(**changes):
    words = ["a", "b", "A", "<image>", "c"]
    settings = {"compressed_vocab_size": 4, "pad_token_id": 2, "barriers": [3]} | changes
    return TokenMap.of(words.__getitem__, words, **settings)


def test_compressing_a_batch():
    words = token_map()
    assert words.pad == 0
    got = words.compress(torch.tensor([[4, 2, 3], [1, 0, 3]], dtype=torch.int32))
    assert got.tolist() == [[3, 0, BARRIER], [1, 0, BARRIER]]
    assert got.dtype == torch.int64
    assert words.compress(torch.tensor([-1, 4]), placeholders=[-1]).tolist() == [BARRIER, 3]
    assert words.compress(torch.zeros(0, dtype=torch.int64)).shape == (0,)


@pytest.mark.parametrize("token", [-1, 5, 2**40, -(2**40)])
def test_ids_outside_the_map(token):
    with pytest.raises(ValueError, match=f"token id {token}: must be in 0..4"):
        token_map().compress(torch.tensor([0, token]))


@pytest.mark.parametrize(("change", "message"), [
    ({"pad_token_id": -1}, "engram_pad_token_id -1: must be in 0..4"),
    ({"pad_token_id": 5}, "engram_pad_token_id 5"),
    ({"pad_token_id": 3}, "engram_pad_token_id 3: must not be one of the barrier"),
    ({"barriers": [5]}, "barrier token id 5"),
    ({"barriers": [-1]}, "barrier token id -1"),
    ({"compressed_vocab_size": 5}, "engram_compressed_vocab_size 5: the tokenizer has 4"),
])  # fmt: skip
def test_impossible_maps(change, message):
    with pytest.raises(ValueError, match=message):
        token_map(**change)


# ---------------------------------------------------------------------- gate


@pytest.mark.parametrize(("d", "golden"), [
    (0.0, 0.50025), (-0.0, 0.50025), (0.25, 0.6224593), (-0.25, 0.3775407), (4.0, 0.8807971), (-1e-30, 0.49975),
])  # fmt: skip
def test_golden_gate(d, golden):
    assert float(gate(torch.tensor(d))) == pytest.approx(golden, abs=1e-7)


def memory(tokens=6, copies=4, width=32, dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    shapes = (tokens, copies, width), (tokens, (copies + 1) * width), (copies, width), (copies, width)
    return [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes]


@pytest.mark.parametrize("eps", [1e-20, 1e-2])
def test_update_index_by_index(eps):
    stream, projected, q, k = memory(tokens=2, copies=3, width=5)
    got = gate_update(stream, projected, q, k, torch.ones(2, dtype=torch.bool), eps)
    for token in range(2):
        value = projected[token, 15:].tolist()
        for copy in range(3):
            x, key = stream[token, copy].tolist(), projected[token, 5 * copy : 5 * copy + 5].tolist()
            dot = sum(a * b * c * d for a, b, c, d in zip(x, q[copy].tolist(), k[copy].tolist(), key, strict=True))
            for vector in (x, key):
                dot /= math.sqrt(sum(v * v for v in vector) / 5 + eps)
            dot /= math.sqrt(5)
            root = math.copysign(math.sqrt(max(abs(dot), 1e-6)), dot)
            opened = 1 / (1 + math.exp(-root))
            expected = [a + opened * v for a, v in zip(x, value, strict=True)]
            assert got[token, copy].tolist() == pytest.approx(expected, rel=1e-9)


def test_update_rounds_once():
    stream, projected, q, k = memory(tokens=40, dtype=torch.bfloat16)
    keep = torch.ones(40, dtype=torch.bool)
    right = gate_update(*(t.double() for t in (stream, projected, q, k)), keep, 1e-20).bfloat16()
    got = gate_update(stream, projected, q, k, keep, 1e-20)
    assert got.dtype == torch.bfloat16
    assert (got != right).float().mean() < 2e-3


def test_rows_without_memory_stay_as_they_are():
    stream, projected, q, k = memory(dtype=torch.bfloat16)
    keep = torch.tensor([True, False, True, False, False, True])
    projected[1], stream[3, 0, 0] = math.nan, -0.0
    got = gate_update(stream, projected, q, k, keep, 1e-20)
    assert torch.equal(got[~keep].view(torch.int16), stream[~keep].view(torch.int16))
    assert (got[keep] != stream[keep]).float().mean() > 0.9


def test_a_zero_key_opens_by_half():
    stream, projected, q, k = memory()
    projected[:, :128] = 0
    got = gate_update(stream, projected, q, k, torch.ones(6, dtype=torch.bool), 1e-20)
    torch.testing.assert_close(got, stream + 0.50024999996 * projected[:, None, 128:], rtol=0, atol=1e-9)


def test_misfitting_projection():
    stream, projected, q, k = memory()
    with pytest.raises(ValueError, match=r"projected shape \(6, 159\): must be \(6, 160\)"):
        gate_update(stream, projected[:, 1:], q, k, torch.ones(6, dtype=torch.bool), 1e-20)
