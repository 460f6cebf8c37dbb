"""The oracle is only worth what is known about it: golden vectors of the specification's appendix A, worked examples,
and properties that the formulas promise. None of these compares the oracle with another implementation."""

from __future__ import annotations

import cmath
import math
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from naive import (
    INF,
    Forward,
    attend,
    best,
    candidate_blocks,
    collapse,
    engram_gate,
    engram_hash,
    engram_hashes,
    engram_multipliers,
    engram_offsets,
    engram_primes,
    expand,
    forward,
    inverse_frequencies,
    latest,
    mixes,
    pool_pair,
    restrict,
    rms_norm,
    router_scores,
    router_weights,
    sinkhorn,
    swiglu,
    top_k,
    yarn_range,
)
from torch import Tensor
from weights import SMALL, TINY, TRUNCATED, random_weights, shapes, token_map, without_engram

CONFIGS = {"tiny": TINY, "truncated": TRUNCATED, "small": SMALL}
SEED = 20


def prompt(length: int, seed: int = SEED) -> list[int]:
    """Real text tokens only: below the image id."""
    return torch.randint(0, 300, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def run(config: Mapping[str, Any], tensors: Mapping[str, Tensor], ids: list[int], **forced: Any) -> Forward:
    return forward(config, tensors, ids, token_map=token_map(config), forced=forced)


@pytest.fixture(scope="module", params=CONFIGS)
def config(request: pytest.FixtureRequest) -> dict[str, Any]:
    return CONFIGS[request.param]


@pytest.fixture(scope="module")
def tensors(config: dict[str, Any]) -> dict[str, Tensor]:
    return random_weights(config, SEED, torch.float32)


@pytest.fixture(scope="module")
def whole(config: dict[str, Any], tensors: dict[str, Tensor]) -> Forward:
    return run(config, tensors, prompt(40))


@pytest.fixture(scope="module")
def tiny() -> dict[str, Tensor]:
    return random_weights(TINY, SEED, torch.float32)


@pytest.fixture(scope="module")
def tiny_whole(tiny: dict[str, Tensor]) -> Forward:
    return run(TINY, tiny, prompt(40))


# --- appendix A and the worked examples

LAYERS_61 = engram_primes(61, layers=2, max_ngram=3, heads=2)
MULTIPLIERS_97 = {
    1: [78284821251697249, 4944257750913641, 36735214942979007],
    3: [28120650625044949, 83420386932483685, 11112535645682063],
}


def test_a1_primes_and_offsets() -> None:
    assert LAYERS_61 == [[[61, 67], [71, 73]], [[79, 83], [89, 97]]]
    assert [engram_offsets(layer) for layer in LAYERS_61] == [[0, 61, 128, 199], [0, 79, 162, 251]]


@pytest.mark.parametrize(
    ("start", "layers", "expected"),
    [
        (61, 2, [(61, 73, 272), (79, 97, 348)]),
        (1000, 1, [(1009, 1163, 25874)]),
        (16_000_000, 2, [(16000057, 16000463, 384006168), (16000477, 16000889, 384016682)]),
    ],
)
def test_a1_first_last_sum(start: int, layers: int, expected: list[tuple[int, int, int]]) -> None:
    ngram, heads = (3, 2) if start == 61 else (4, 8)
    found = engram_primes(start, layers, ngram, heads)
    assert [(layer[0][0], layer[-1][-1], sum(map(sum, layer))) for layer in found] == expected


@pytest.mark.parametrize(
    ("layer", "compressed", "expected"),
    [
        (1, 97, MULTIPLIERS_97[1]),
        (3, 97, MULTIPLIERS_97[3]),
        (1, 1000, [7593627661414631, 479593001838623, 3563315849468963, 7331553243427023]),
        (14, 1000, [6710194209774885, 5104308867516367, 3064058137012075, 8186904390910353]),
        (1, 99092, [76632096046245, 4839876093313, 35959672319349, 73987337458391]),
        (14, 99092, [67716810739261, 51510806800915, 30921347202721, 82619226485591]),
    ],
)
def test_a2_multipliers(layer: int, compressed: int, expected: list[int]) -> None:
    assert engram_multipliers(layer, compressed, len(expected)) == expected


@pytest.mark.parametrize(
    ("slot", "layer", "ids", "expected"),
    [
        (0, 1, [5, 6, 7, 8], [[3, 89, 186, 240], [6, 102, 142, 218], [22, 113, 135, 244], [26, 94, 166, 262]]),
        (0, 1, [5, 6, None, 8], [[3, 89, 186, 240], [6, 102, 142, 218], [19, 112, 155, 211], [54, 62, 176, 268]]),
        (1, 3, [5, 6, 7, 8], [[46, 125, 184, 324], [39, 157, 201, 265], [46, 155, 238, 325], [38, 143, 202, 286]]),
    ],
    ids=["layer1", "layer1-third-dead", "layer3"],
)
def test_a3_hashes(slot: int, layer: int, ids: list[int | None], expected: list[list[int]]) -> None:
    primes, multipliers = LAYERS_61[slot], MULTIPLIERS_97[layer]
    assert engram_hashes(ids, primes, multipliers, 2) == expected
    # A chunk of positions 2..3 knows its past only through the lookback [c1, c0], newest first.
    chunk, lookback = ids[2:], [ids[1], ids[0]]
    windows = [chunk[i::-1] + lookback for i in range(2)]
    assert [engram_hash(window, primes, multipliers, 2) for window in windows] == expected[2:]


@pytest.mark.parametrize(
    ("iterations", "expected"),
    [
        (1, [[0.2475267, 0.8002955], [0.7524724, 0.1997034]]),
        (3, [[0.2249676, 0.7795492], [0.7750314, 0.2204497]]),
        (20, [[0.2227005, 0.7772985], [0.7772986, 0.2227005]]),
    ],
)
def test_a4_sinkhorn(iterations: int, expected: list[list[float]]) -> None:
    found = sinkhorn(torch.tensor([[0, 1], [2, 0.5]], dtype=torch.float64), 1e-6, iterations)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=2e-7)


def test_a5_router() -> None:
    scores = router_scores(torch.tensor([0.0, 1, -1, 2], dtype=torch.float64))
    choice = scores + torch.tensor([0.6, 0, 0, -1], dtype=torch.float64)
    ids, gap = best(dict(enumerate(choice.tolist())), 2)
    assert scores.tolist() == pytest.approx([0.8325546, 1.1459763, 0.5596978, 1.4583992], abs=1e-7)
    assert choice.tolist() == pytest.approx([1.4325547, 1.1459763, 0.5596978, 0.4583992], abs=2e-7)
    assert ids == [0, 1]
    assert gap == pytest.approx(1.1459763 - 0.5596978, abs=2e-7)
    assert router_weights(scores, ids, 1.5).tolist() == pytest.approx([0.6311916, 0.8688085], abs=1e-7)


def test_router_edges() -> None:
    assert router_scores(torch.tensor([25.0, 800.0, -800.0], dtype=torch.float64)).tolist() == [5, math.sqrt(800), 0]
    assert router_weights(torch.zeros(3), [0, 2], 1.5).tolist() == [0, 0]
    assert router_weights(torch.tensor([1.0, 3.0]), [1], 1.5, normalise=False).tolist() == [4.5]
    assert best({0: 1.0, 1: 2.0, 2: 2.0, 3: 2.0}, 2) == ([1, 2], 0.0)


def test_a6_engram_gate() -> None:
    found = engram_gate(torch.tensor([0, -0.0, 0.25, -0.25, 4], dtype=torch.float64))
    assert found.tolist() == pytest.approx([0.50025, 0.50025, 0.6224593, 0.3775407, 0.8807971], abs=1e-7)


def test_a7_pooling() -> None:
    first, second = torch.tensor([[1.0, 2, 0, 1], [3, 6, 0, 0]], dtype=torch.float64)
    assert pool_pair(first, second).tolist() == pytest.approx([2.0, 3.0757658], abs=2e-7)


def test_example_of_3_9() -> None:
    assert top_k([1, 7, 3, -INF, -INF], 3, 4) == ([0, 1, 2], INF)
    assert top_k([1, 7, 3, 9], 4, 2) == ([1, 3], 4)
    assert top_k([5, 7, 5, 5], 4, 2) == ([0, 1], 0)  # tie: the lower row
    assert top_k([1, -INF, 3], 3, 3) == ([0, 2], INF)  # excluded is not selected, though there is room
    assert top_k([], 0, 4) == ([], INF)


def test_example_of_3_10() -> None:
    scores = [9, 8, 7, 6, 5, 4, -INF, -INF]
    assert candidate_blocks(scores, 6, 2, 2) == ([0, 2], 2)  # 9 beats 7
    assert candidate_blocks(scores, 6, 2, 3) == ([0, 1, 2], INF)
    assert candidate_blocks(scores, 4, 2, 1) == ([1], INF)  # the newest block wins though it scores least
    assert candidate_blocks([9, 1, 2, 8, 7], 5, 2, 2) == ([0, 2], 1)  # a newest block of one row
    assert candidate_blocks([1, 2, 8, 7, 3, 0, 0, 0], 7, 2, 3) == ([1, 2, 3], 1)  # 3 beats 2
    assert candidate_blocks(scores, 0, 2, 2) == ([], INF)
    assert restrict(scores[:5], [0, 2], 2) == [9, 8, -INF, -INF, 5]


# --- sections 2 and 3, piece by piece


@pytest.mark.parametrize(
    ("layer", "kv", "index"),
    [(2, 2, 2), (7, 2, 2), (8, 8, 8), (13, 8, 8), (19, 14, 14), (20, 20, 20), (23, 20, 20), (26, 20, 24), (39, 20, 36)],
)
def test_released_topology(layer: int, kv: int, index: int) -> None:
    assert latest(SMALL["kv_source_layer_ids"], layer) == kv
    assert latest(SMALL["index_source_layer_ids"], layer) == index


def test_yarn() -> None:
    assert yarn_range(64, 160000, 65536, 32, 1) == (15, 25)
    assert yarn_range(8, 160000, 64, 32, 1) == (0, 1)
    released = TINY | {
        "qk_rope_head_dim": 64,
        "rope_parameters": {"rope_type": "yarn", "factor": 16, "original_max_position_embeddings": 65536},
    }
    plain = torch.tensor([160000 ** (-i / 32) for i in range(32)], dtype=torch.float64)
    ratio = plain / inverse_frequencies(released, 2)
    assert ratio[:16].tolist() == [1.0] * 16
    assert ratio[25:].tolist() == pytest.approx([16.0] * 7)
    assert ratio[20].item() == pytest.approx(1 / (0.5 + 0.5 / 16))  # half way
    # A layer without compression is never scaled, and a nested form names the scaling of the others.
    assert inverse_frequencies(released, 0).tolist() == pytest.approx([10000 ** (-i / 32) for i in range(32)])
    nested = released | {"rope_parameters": {"main": {"rope_type": "default"}, "compress": released["rope_parameters"]}}
    assert torch.equal(inverse_frequencies(nested, 1), inverse_frequencies(released, 1))
    default = released | {"rope_parameters": {"rope_type": "default"}}
    assert torch.equal(inverse_frequencies(default, 1), plain)


def test_a_row_of_zeros_survives_the_tiny_epsilon() -> None:
    x = torch.tensor([[0.0, 0.0], [3.0, 4.0]], dtype=torch.float64)
    found = rms_norm(x, torch.tensor([1.0, 2.0], dtype=torch.float64), 1e-20)
    assert found[0].tolist() == [0, 0]
    assert found[1].tolist() == pytest.approx([3 / math.sqrt(12.5), 8 / math.sqrt(12.5)])


def test_mixes_by_hand() -> None:
    config = {"rms_norm_eps": 1e-20, "hc_eps": 1e-6, "hc_sinkhorn_iters": 20}
    stream = torch.tensor([[[3.0, 0.0], [0.0, 4.0]]], dtype=torch.float64)  # one token, M = 2, H = 2; mean square 6.25
    fn = torch.zeros(8, 4, dtype=torch.float64)
    fn[0, 0] = fn[3, 3] = fn[5, 0] = 1.0  # pre_0 and comb[0, 1] see x_00 = 3, post_1 sees x_11 = 4
    base = torch.tensor([0, 1.0, 0.5, 0, 0, 0, 2.0, 0], dtype=torch.float64)
    scale = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    pre, post, comb = mixes(stream, fn, base, scale, config)

    def sigmoid(x: float) -> float:
        return 1 / (1 + math.exp(-x))

    assert pre[0].tolist() == pytest.approx([sigmoid(3 / 2.5) + 1e-6, sigmoid(1.0) + 1e-6], rel=1e-9)
    assert post[0].tolist() == pytest.approx([2 * sigmoid(0.5), 2 * sigmoid(2 * 4 / 2.5)], rel=1e-9)
    logits = torch.tensor([[0, 3 * 3 / 2.5], [2.0, 0]], dtype=torch.float64)
    torch.testing.assert_close(comb[0], sinkhorn(logits, 1e-6, 20))
    torch.testing.assert_close(comb[0].sum(0), torch.ones(2, dtype=torch.float64), rtol=0, atol=2e-5)


def test_expand_and_collapse_by_hand() -> None:
    stream = torch.tensor([[[1.0], [10.0]]])
    comb = torch.tensor([[[0.1, 0.2], [0.3, 0.4]]])  # [source, destination]
    found = expand(stream, torch.tensor([[100.0]]), torch.tensor([[1.0, 2.0]]), comb)
    assert found.flatten().tolist() == pytest.approx([100 + 0.1 + 3, 200 + 0.2 + 4])
    assert collapse(stream, torch.tensor([[0.5, 0.25]])).tolist() == [[3.0]]
    assert collapse(stream, None).tolist() == [[1.0]]


def test_attend_by_hand() -> None:
    q = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]] * 2, dtype=torch.float64)
    keys = torch.tensor([[math.log(2), 1.0], [math.log(3), 5.0], [math.log(2), 1.0]], dtype=torch.float64)
    mask = torch.tensor([[True, False, True], [False, False, False]])
    found = attend(q, keys, mask, torch.tensor([0.0, -INF], dtype=torch.float64), 1.0)
    # Head 0: two equal keys of weight 2 each, both counted, and a sink of weight 1 that carries no value.
    assert found[0, 0].tolist() == pytest.approx([4 / 5 * math.log(2), 4 / 5])
    assert found[0, 1].tolist() == pytest.approx([math.log(2), 1.0])  # no sink
    assert found[1].tolist() == [[0, 0], [0, 0]]  # nothing visible, with and without a sink


def test_swiglu_clamps_the_gate_only_from_above() -> None:
    gate, up = torch.tensor([3.0, -3.0, 0.1]), torch.tensor([-3.0, 3.0, 0.2])
    sigmoid = torch.sigmoid(torch.tensor([0.5, -3.0, 0.1]))
    expected = torch.tensor([0.5, -3.0, 0.1]) * sigmoid * torch.tensor([-0.5, 0.5, 0.2])
    torch.testing.assert_close(swiglu(gate, up, 0.5), expected)
    torch.testing.assert_close(swiglu(gate, up, None), gate * torch.sigmoid(gate) * up)


# --- the whole model


def per_token(out: Forward) -> Iterator[tuple[str, Any]]:
    """Everything the pass says about single tokens, row t for token t."""
    yield "logits", out.logits
    yield from ((f"stream {layer}", stream) for layer, stream in enumerate(out.streams))
    for name in ("swa", "ring", "experts", "expert_choice", "expert_gap", "selection", "selection_gap", "engram_rows"):
        yield from ((f"{name} {layer}", value) for layer, value in getattr(out, name).items())
    if out.candidates is not None:
        yield "candidates", out.candidates
        yield "candidate_gap", out.candidate_gap


def assert_same_before(one: Forward, other: Forward, token: int, config: Mapping[str, Any]) -> None:
    """Both passes agree on all that tokens before `token` can know."""
    for (name, a), (same, b) in zip(per_token(one), per_token(other), strict=True):
        assert name == same
        if isinstance(a, list):
            assert a[:token] == b[:token], name
        else:
            torch.testing.assert_close(a[:token], b[:token], rtol=1e-9, atol=1e-9, msg=f"{name} differs")
    for layer, rows in one.long.items():
        complete = token // config["compress_ratios"][layer]
        torch.testing.assert_close(rows[:complete], other.long[layer][:complete], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(one.index_keys[layer][:complete], other.index_keys[layer][:complete])
    for layer, scores in one.index_scores.items():
        complete = token // config["compress_ratios"][latest(config["kv_source_layer_ids"], layer)]
        torch.testing.assert_close(scores[:token, :complete], other.index_scores[layer][:token, :complete])


def test_shapes_of_the_result(config: dict[str, Any], whole: Forward) -> None:
    tokens, ratios = 40, config["compress_ratios"]
    assert whole.logits.shape == (tokens, config["vocab_size"])
    assert whole.logits.dtype == torch.float64
    assert len(whole.streams) == len(whole.swa) == config["num_hidden_layers"]
    assert list(whole.long) == list(whole.index_keys) == config["kv_source_layer_ids"]
    assert list(whole.ring) == [layer for layer in config["kv_source_layer_ids"] if ratios[layer] == 2]
    assert list(whole.selection) == list(whole.index_scores) == config["index_source_layer_ids"]
    for layer, rows in whole.long.items():
        assert rows.shape == (tokens // ratios[layer], config["head_dim"])
        assert whole.index_keys[layer].shape == (len(rows), config["index_head_dim"])
    assert all(rows.shape == (tokens, 2 * config["head_dim"]) for rows in whole.ring.values())
    for layer, scores in whole.index_scores.items():
        seen = torch.tensor([(t + 1) // ratios[layer] for t in range(tokens)])
        assert torch.equal((scores > -INF).sum(1), seen)
        assert [len(row) for row in whole.selection[layer]] == seen.clamp(max=config["index_topk"]).tolist()


def test_the_prompt_exercises_every_limit(config: dict[str, Any], whole: Forward) -> None:
    """40 tokens are enough for truncation at both levels, so the properties below are not about short paths."""
    assert whole.candidates is not None
    last = whole.candidates[-1]
    block, count = config["candidate_block_size"], config["candidate_topk_blocks"]
    assert len(last) == count < 40 // block
    assert 39 // block in last  # the newest
    for layer, gaps in whole.selection_gap.items():
        assert gaps.min() < INF
        if layer > config["candidate_source_layer_id"]:
            assert all(
                row // block in kept
                for rows, kept in zip(whole.selection[layer], whole.candidates, strict=True)
                for row in rows
            )
            free = [
                top_k(row, t + 1, config["index_topk"])[0] for t, row in enumerate(whole.index_scores[layer].tolist())
            ]
            assert free != whole.selection[layer]
    assert len({int(expert) for ids in whole.experts.values() for expert in ids.flatten()}) == 8


def test_random_weights_keep_the_stack_tame(config: dict[str, Any], tensors: dict[str, Tensor], whole: Forward) -> None:
    """An error of 1e-6 in the embedding may grow by tens, not explode; and the logits say different things."""
    noise = torch.randn(tensors["embed.weight"].shape, generator=torch.Generator().manual_seed(SEED))
    nudged = tensors | {"embed.weight": tensors["embed.weight"].double() * (1 + 1e-6 * noise.double())}
    found = run(config, nudged, prompt(40), **choices(whole))
    error = (found.streams[-1] - whole.streams[-1]).flatten(1).norm(dim=1) / whole.streams[-1].flatten(1).norm(dim=1)
    assert 1e-7 < error.max() < 1e-4
    assert 0.5 < whole.logits.std() < 2
    assert len(whole.logits.argmax(1).unique()) > 20


def test_first_sublayer_sees_the_embedding(config: dict[str, Any], tensors: dict[str, Tensor], whole: Forward) -> None:
    def w(name: str) -> Tensor:
        return tensors[name].double()

    eps = config["rms_norm_eps"]
    u = rms_norm(w("embed.weight")[prompt(40)], w("layers.0.attn_norm.weight"), eps)
    kv = rms_norm(u @ w("layers.0.attn.wkv.weight").T, w("layers.0.attn.kv_norm.weight"), eps)
    plain = config["head_dim"] - config["qk_rope_head_dim"]
    torch.testing.assert_close(whole.swa[0][:, :plain], kv[:, :plain], rtol=1e-12, atol=1e-12)


def silent(tensors: Mapping[str, Tensor], layer: int) -> dict[str, Tensor]:
    """The same tensors, but neither sublayer of `layer` says anything."""
    names = [n for n in tensors if n.startswith(f"layers.{layer}.") and n.endswith(("wo_b.weight", "w2.weight"))]
    return dict(tensors) | {name: torch.zeros_like(tensors[name]) for name in names}


def silently(stream: Tensor, tensors: Mapping[str, Tensor], layer: int) -> tuple[Tensor, Tensor]:
    """What a silent layer leaves: the stream through its two comb matrices, and the pre mix of its ffn."""
    pre = torch.empty(0)
    for sublayer in ("attn", "ffn"):
        fn, base, scale = (tensors[f"layers.{layer}.hc_{sublayer}_{part}"].double() for part in ("fn", "base", "scale"))
        pre, _, comb = mixes(stream, fn, base, scale, TINY)
        stream = torch.einsum("tij,tih->tjh", comb, stream)
    return stream, pre


def test_silent_sublayers_only_mix_the_copies(tiny: dict[str, Tensor]) -> None:
    """With nothing to add, a layer is its two comb matrices, and the logits read the mix of the last ffn."""
    out = run(without_engram(TINY) | {"num_hidden_layers": 2}, silent(tiny, 1), prompt(9))
    stream, pre = silently(out.streams[0], tiny, 1)
    torch.testing.assert_close(out.streams[1], stream)
    h = rms_norm(torch.einsum("ti,tih->th", pre, stream), tiny["norm.weight"].double(), TINY["rms_norm_eps"])
    torch.testing.assert_close(out.logits, h @ tiny["head.weight"].double().T)


def test_engram_update_one_by_one() -> None:
    """A memory in front of a silent first layer: the formula of 5.5 in scalars, every copy and token."""
    config = PLAIN | {"num_hidden_layers": 1, "engram_layer_ids": [0], "engram_num_embeddings": [272]}
    tensors = silent(random_weights(config, SEED, torch.float32), 0)
    ids, hidden, image = prompt(7), config["hidden_size"], 4
    ids[image] = config["image_token_id"]
    out = run(config, tensors, ids)

    table, wkv, q_w, k_w = (
        tensors[f"layers.0.engram.{name}"].double() for name in ("embed.weight", "wkv.weight", "q_weight", "k_weight")
    )
    stream = tensors["embed.weight"].double()[ids][:, None].repeat(1, 4, 1)
    for t, rows in enumerate(out.engram_rows[0].tolist()):
        projected = wkv @ torch.cat([table[row] for row in rows])
        value = projected[4 * hidden :]
        for i in range(4):
            x, key = stream[t, i].tolist(), projected[i * hidden : (i + 1) * hidden].tolist()
            d = sum(a * b * c * e for a, b, c, e in zip(x, key, q_w[i].tolist(), k_w[i].tolist(), strict=True))
            d /= math.sqrt(sum(a * a for a in x) / hidden) * math.sqrt(sum(a * a for a in key) / hidden)
            d /= math.sqrt(hidden)
            gate = 1 / (1 + math.exp(-math.copysign(math.sqrt(abs(d)), d)))
            stream[t, i] += (0 if t == image else gate) * value
    torch.testing.assert_close(out.streams[0], silently(stream, tensors, 0)[0])


# One compressed layer, whose input is the embedding.
SINGLE = without_engram(TINY) | {
    "num_hidden_layers": 1,
    "compress_ratios": [1],
    "kv_source_layer_ids": [0],
    "index_source_layer_ids": [0],
    "candidate_source_layer_id": -1,
}


def test_attention_one_by_one() -> None:
    """The formulas of 3.3 and 3.11 head by head, over rows that other tests have checked."""
    config, eps, heads, latent, rope = SINGLE, 1e-20, 4, 32, 8
    tensors = random_weights(config, SEED, torch.float32)
    tensors |= {name: torch.zeros_like(tensors[name]) for name in tensors if name.endswith("w2.weight")}
    ids, frequencies = prompt(13), inverse_frequencies(config, 1)
    out = run(config, tensors, ids)

    def w(name: str) -> Tensor:
        return tensors[f"layers.0.{name}"].double()

    def turn(row: Tensor, position: int) -> Tensor:
        parts = [part for pair in turned(row[-rope:], position, frequencies) for part in (pair.real, pair.imag)]
        return torch.cat([row[:-rope], torch.tensor(parts, dtype=torch.float64)])

    ys = []
    for t, token in enumerate(ids):
        u = rms_norm(tensors["embed.weight"][token].double(), w("attn_norm.weight"), eps)
        q = w("attn.wq_b.weight") @ rms_norm(w("attn.wq_a.weight") @ u, w("attn.q_norm.weight"), eps)
        keys = [out.swa[0][j] for j in range(max(0, t - 7), t + 1)] + [out.long[0][j] for j in out.selection[0][t]]
        answers = []
        for head in range(heads):
            asked = turn(q[head * latent : (head + 1) * latent], t)
            shares = [math.exp(float(asked @ key) / math.sqrt(latent)) for key in keys]
            total = sum(shares) + math.exp(w("attn.attn_sink")[head])
            answer = sum((share / total * key for share, key in zip(shares, keys, strict=True)), torch.zeros(latent))
            answers.append(turn(answer, -t))
        low_rank = [  # two groups of two heads, 16 rows of wo_a each
            w("attn.wo_a.weight")[:16] @ torch.cat(answers[:2]),
            w("attn.wo_a.weight")[16:] @ torch.cat(answers[2:]),
        ]
        ys.append(w("attn.wo_b.weight") @ torch.cat(low_rank))
    stream, fed = tensors["embed.weight"].double()[ids][:, None].repeat(1, 4, 1), torch.stack(ys)
    for sublayer, y in (("attn", fed), ("ffn", torch.zeros_like(fed))):
        _, post, comb = mixes(stream, *(w(f"hc_{sublayer}_{part}") for part in ("fn", "base", "scale")), config)
        stream = expand(stream, y, post, comb)
    torch.testing.assert_close(out.streams[0], stream)


def test_index_scores_one_by_one() -> None:
    """The formula of 3.8 in scalars."""
    config = SINGLE
    tensors = random_weights(config, SEED, torch.float32)
    ids, eps = prompt(9), config["rms_norm_eps"]
    heads, width, rope = config["index_n_heads"], config["index_head_dim"], config["qk_rope_head_dim"]
    frequencies = inverse_frequencies(config, 1)

    def w(name: str) -> Tensor:
        return tensors[f"layers.0.{name}"].double()

    def scalars(row: Tensor, position: int) -> list[float]:
        pairs = turned(row[-rope:], position, frequencies)
        return row[:-rope].tolist() + [part for pair in pairs for part in (pair.real, pair.imag)]

    us = [rms_norm(tensors["embed.weight"][token].double(), w("attn_norm.weight"), eps) for token in ids]
    keys, queries = [], []
    for t, u in enumerate(us):
        latent = rms_norm(w("attn.compressor.wkv.weight") @ u, w("attn.compressor.norm.weight"), eps)
        key = rms_norm(w("attn.indexer.wk.weight") @ latent, w("attn.indexer.k_norm.weight"), eps)
        keys.append(scalars(key, t))
        qr = rms_norm(w("attn.wq_a.weight") @ u, w("attn.q_norm.weight"), eps)
        queries.append([scalars(head, t) for head in (w("attn.indexer.wq_b.weight") @ qr).reshape(heads, width)])
    expected = torch.full((9, 9), -INF, dtype=torch.float64)
    for t, u in enumerate(us):
        weights = (w("attn.indexer.weights_proj.weight") @ u).tolist()
        for j in range(t + 1):
            dots = [sum(a * b for a, b in zip(head, keys[j], strict=True)) for head in queries[t]]
            total = sum(weight * max(dot, 0.0) for weight, dot in zip(weights, dots, strict=True))
            expected[t, j] = total / math.sqrt(width) / math.sqrt(heads)
    torch.testing.assert_close(run(config, tensors, ids).index_scores[0], expected)


def turned(row: Tensor, position: int, frequencies: Tensor) -> list[complex]:
    """Rotation as multiplication of complex numbers."""
    pairs = row.reshape(-1, 2).tolist()
    return [
        complex(*pair) * cmath.exp(1j * position * frequency)
        for pair, frequency in zip(pairs, frequencies.tolist(), strict=True)
    ]


def test_a_group_stands_at_its_first_position(tiny: dict[str, Tensor], tiny_whole: Forward) -> None:
    rope, latent = TINY["qk_rope_head_dim"], TINY["head_dim"]
    frequencies = inverse_frequencies(TINY, 2)
    ring, norm = tiny_whole.ring[1], tiny["layers.1.attn.compressor.norm.weight"].double()
    for j in (0, 1, 7, 19):
        a, g = ring[2 * j : 2 * j + 2, :latent], ring[2 * j : 2 * j + 2, latent:]
        share = 1 / (1 + torch.exp(g[1] - g[0]))
        row = rms_norm(share * a[0] + (1 - share) * a[1], norm, 1e-20)
        found = tiny_whole.long[1][j]
        torch.testing.assert_close(found[:-rope], row[:-rope])
        assert turned(row[-rope:], 2 * j, frequencies) == pytest.approx(turned(found[-rope:], 0, frequencies))
        key = tiny["layers.1.attn.indexer.wk.weight"].double() @ row
        key = rms_norm(key, tiny["layers.1.attn.indexer.k_norm.weight"].double(), 1e-20)
        found = tiny_whole.index_keys[1][j]
        torch.testing.assert_close(found[:-rope], key[:-rope])
        assert turned(key[-rope:], 2 * j, frequencies) == pytest.approx(turned(found[-rope:], 0, frequencies))


@pytest.mark.parametrize(
    ("config", "token"),
    [("tiny", 0), ("tiny", 13), ("tiny", 38), ("truncated", 13), ("small", 13)],
    indirect=["config"],
    scope="module",
)
def test_causality(config: dict[str, Any], tensors: dict[str, Tensor], whole: Forward, token: int) -> None:
    ids = prompt(40)
    ids[token] = (ids[token] + 1) % 300
    other = run(config, tensors, ids)
    assert_same_before(whole, other, token, config)
    assert (other.logits[token] - whole.logits[token]).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ("tiny", 1),
        ("tiny", 2),
        ("tiny", 9),
        ("tiny", 24),
        ("tiny", 39),
        ("truncated", 1),
        ("truncated", 9),
        ("small", 35),
    ],
    indirect=["config"],
    scope="module",
)
def test_a_prefix_gives_the_prefix(
    config: dict[str, Any], tensors: dict[str, Tensor], whole: Forward, length: int
) -> None:
    assert_same_before(run(config, tensors, prompt(length)), whole, length, config)


LAYERS = 3
PLAIN = without_engram(TINY) | {
    "num_hidden_layers": LAYERS,
    "sliding_window": 4,
    "compress_ratios": [0] * LAYERS,
    "kv_source_layer_ids": [],
    "index_source_layer_ids": [],
    "candidate_source_layer_id": -1,
}
REACH = LAYERS * (PLAIN["sliding_window"] - 1)  # the farthest token that still sees token 0


@pytest.fixture(scope="module")
def plain() -> dict[str, Tensor]:
    return random_weights(PLAIN, SEED, torch.float32)


def test_window(plain: dict[str, Tensor]) -> None:
    ids = prompt(20)
    one, other = run(PLAIN, plain, ids), run(PLAIN, plain, [(ids[0] + 1) % 300, *ids[1:]])
    changed = (one.logits - other.logits).abs().amax(1)
    assert changed[REACH] > 1e-6
    assert changed[REACH + 1 :].max() < 1e-12


def test_only_relative_positions_matter(plain: dict[str, Tensor]) -> None:
    """With windows alone, a token whose whole past is the same says the same at any position: what the inverse
    rotation of the attention output is for."""
    ids, cut = prompt(24), 7
    one, other = run(PLAIN, plain, ids), run(PLAIN, plain, ids[cut:])
    late, late_cut = one.logits[cut + REACH :], other.logits[REACH:]
    torch.testing.assert_close(late, late_cut, rtol=1e-9, atol=1e-9)
    assert (one.swa[0][cut:] - other.swa[0]).abs().max() > 0.1  # though the cached rows differ


def test_filtering_is_nothing_while_every_block_is_a_candidate(tiny: dict[str, Tensor], tiny_whole: Forward) -> None:
    every = run(TINY | {"candidate_topk_blocks": 20}, tiny, prompt(40))  # ceil(40 / 2)
    never = run(TINY | {"candidate_source_layer_id": -1}, tiny, prompt(40))
    assert never.candidates is None
    assert every.selection == never.selection != tiny_whole.selection
    assert torch.equal(every.logits, never.logits)
    assert (every.logits - tiny_whole.logits).abs().max() > 1e-3
    # One block too few acts on the first token that has 20 blocks, and not before.
    fewer = run(TINY | {"candidate_topk_blocks": 19}, tiny, prompt(40))
    assert fewer.candidate_gap is not None
    assert torch.equal(fewer.logits[:38], never.logits[:38])
    assert (fewer.candidate_gap < INF).tolist() == [False] * 38 + [True] * 2


# Which caches, choices and streams a tensor reaches first: (tensor, unchanged, changed). Streams are those after the
# layer. The delayed mixes are why the pre rows of a sublayer act one sublayer later.
INFLUENCE = {
    "layers.1.attn.compressor.wkv.weight": ("streams 0, swa 1", "ring 1, long 1, index_keys 1, streams 1"),
    "layers.1.attn.compressor.wgate.weight": ("swa 1", "ring 1, long 1, index_keys 1"),
    "layers.1.attn.compressor.norm.weight": ("ring 1, swa 1", "long 1, index_keys 1, streams 1, streams 2"),
    "layers.1.attn.indexer.wk.weight": ("ring 1, long 1, swa 1", "index_keys 1, index_scores 1, streams 1, streams 2"),
    "layers.1.attn.indexer.k_norm.weight": ("long 1", "index_keys 1, index_scores 1"),
    "layers.3.attn.indexer.wk.weight": ("long 3, streams 2", "index_keys 3, index_scores 3, index_scores 5, streams 3"),
    "layers.3.attn.indexer.wq_b.weight": ("long 3, index_keys 3, swa 3", "index_scores 3, streams 3, swa 4"),
    "layers.5.attn.indexer.wq_b.weight": ("index_scores 3, streams 4, swa 5", "index_scores 5, streams 5, streams 6"),
    "layers.5.attn.indexer.weights_proj.weight": ("index_scores 3, streams 4", "index_scores 5, streams 5"),
    "layers.3.attn.wq_a.weight": ("swa 3, long 3", "index_scores 3, streams 3"),
    "layers.3.attn.wq_b.weight": ("index_scores 3, expert_choice 2", "streams 3, index_scores 5"),
    "layers.0.attn.wkv.weight": ("embed", "swa 0, streams 0, long 1"),
    "layers.4.attn.attn_sink": ("streams 3, swa 4, expert_choice 3", "streams 4, expert_choice 4"),
    "layers.4.attn.wo_a.weight": ("swa 4", "expert_choice 4, streams 4"),
    "layers.4.ffn.gate.weight": ("streams 3, swa 4", "expert_choice 4, streams 4"),
    "layers.4.ffn.shared_experts.w2.weight": ("expert_choice 4", "streams 4"),
    "layers.1.engram.wkv.weight": ("streams 0, engram_rows 1", "swa 1, ring 1, streams 1"),
    "layers.3.engram.embed.weight": ("streams 2", "swa 3, long 3"),
    "layers.2.hc_attn_fn pre": ("streams 1, swa 2", "expert_choice 2, streams 2"),
    "layers.2.hc_attn_fn post": ("swa 2", "expert_choice 2, streams 2"),
    "layers.2.hc_ffn_fn pre": ("streams 2, expert_choice 2", "swa 3, logits"),
    "layers.2.hc_ffn_fn post": ("expert_choice 2", "streams 2, swa 3"),
    "layers.2.hc_ffn_fn comb": ("expert_choice 2", "streams 2, swa 3"),
    "layers.6.hc_ffn_base pre": ("streams 6", "logits"),
    "norm.weight": ("streams 6", "logits"),
}


def fact(out: Forward, name: str) -> Tensor:
    kind, _, layer = name.partition(" ")
    return getattr(out, kind)[int(layer)] if layer else getattr(out, kind)


@pytest.mark.parametrize("target", INFLUENCE)
def test_what_a_tensor_reaches(tiny: dict[str, Tensor], tiny_whole: Forward, target: str) -> None:
    name, _, part = target.partition(" ")
    copies = TINY["hc_mult"]
    rows = {"": slice(None), "pre": slice(copies), "post": slice(copies, 2 * copies), "comb": slice(2 * copies, None)}
    changed = tiny[name].clone()
    noise = torch.randn(changed.shape, generator=torch.Generator().manual_seed(SEED))
    changed[rows[part]] += noise[rows[part]] * changed[rows[part]].std()
    other = run(TINY, tiny | {name: changed}, prompt(40))
    same, different = INFLUENCE[target]
    for where in same.split(", "):
        if where != "embed":
            assert torch.equal(fact(other, where), fact(tiny_whole, where)), where
    for where in different.split(", "):
        assert not torch.allclose(fact(other, where), fact(tiny_whole, where), rtol=1e-4, atol=1e-4), where


def test_the_router_bias_selects_but_does_not_weigh(tiny: dict[str, Tensor], tiny_whole: Forward) -> None:
    raised = {f"layers.{layer}.ffn.gate.bias": tiny[f"layers.{layer}.ffn.gate.bias"] + 3.0 for layer in range(7)}
    other = run(TINY, tiny | raised, prompt(40))
    torch.testing.assert_close(other.expert_choice[6], tiny_whole.expert_choice[6] + 3.0)
    torch.testing.assert_close(other.logits, tiny_whole.logits)


def test_weights_of_chosen_experts_sum_to_the_scaling_factor(tiny: dict[str, Tensor]) -> None:
    """Layer 6 with every routed expert equal to the shared one gives that expert 1.5 + 1 times; and each token hears
    only the experts it chose."""
    at = "layers.6.ffn."
    shared = {part: tiny[f"{at}shared_experts.{part}.weight"].double() for part in ("w1", "w2", "w3")}
    clones = {f"{at}experts.{e}.{part}.weight": w for e in range(8) for part, w in shared.items()}
    mute = {name: 0 * w for name, w in clones.items()}
    one = run(TINY, tiny | clones, prompt(40))
    other = run(TINY, tiny | mute | {f"{at}shared_experts.w2.weight": 2.5 * shared["w2"]}, prompt(40))
    torch.testing.assert_close(one.streams[6], other.streams[6])

    silenced = run(TINY, tiny | clones | {f"{at}experts.5.w2.weight": 0 * shared["w2"]}, prompt(40))
    moved = (one.streams[6] - silenced.streams[6]).abs().amax((1, 2)) > 0
    assert moved.tolist() == (one.experts[6] == 5).any(1).tolist()
    assert 0 < moved.sum() < 40


# --- Engram inside the model


def test_image_tokens_are_barriers_without_memory(tiny: dict[str, Tensor]) -> None:
    ids, image = prompt(12), 5
    ids[image] = TINY["image_token_id"]
    one = run(TINY, tiny, ids)
    other = run(TINY, tiny, [(token + 1) % 300 if t < image else token for t, token in enumerate(ids)])
    for layer in TINY["engram_layer_ids"]:
        assert not torch.equal(one.engram_rows[layer][:image], other.engram_rows[layer][:image])
        assert torch.equal(one.engram_rows[layer][image:], other.engram_rows[layer][image:])
    # Tables reach the window rows of their own layer: of every token but the image.
    name = "layers.1.engram.wkv.weight"
    silent = run(TINY, tiny | {name: torch.zeros_like(tiny[name])}, ids)
    moved = (one.swa[1] - silent.swa[1]).abs().amax(1) > 1e-6
    assert moved.tolist() == [t != image for t in range(12)]


def test_engram_rows_lie_in_their_column(config: dict[str, Any], whole: Forward) -> None:
    layers, orders = config["engram_layer_ids"], config["engram_max_ngram_size"]
    primes = engram_primes(config["engram_vocab_size"], len(layers), orders, config["engram_n_heads"])
    for layer, own, table in zip(layers, primes, config["engram_num_embeddings"], strict=True):
        low = torch.tensor(engram_offsets(own))
        sizes = torch.tensor([prime for order in own for prime in order])
        assert sizes.sum() <= table
        assert bool(((whole.engram_rows[layer] >= low) & (whole.engram_rows[layer] < low + sizes)).all())


def test_engram_needs_its_token_map(tiny: dict[str, Tensor]) -> None:
    with pytest.raises(ValueError, match="token_map is needed"):
        forward(TINY, tiny, prompt(3))
    assert forward(without_engram(TINY), tiny, prompt(3)).engram_rows == {}


# --- replaying another implementation's choices


def choices(out: Forward) -> dict[str, Any]:
    return {"selection": out.selection, "candidates": out.candidates, "experts": out.experts}


def test_replaying_its_own_choices_changes_nothing(tiny: dict[str, Tensor], tiny_whole: Forward) -> None:
    padded = {
        layer: torch.tensor([row + [-1] * (TINY["index_topk"] - len(row)) for row in rows], dtype=torch.int32)
        for layer, rows in tiny_whole.selection.items()
    }
    again = run(TINY, tiny, prompt(40), **choices(tiny_whole) | {"selection": padded})
    assert torch.equal(again.logits, tiny_whole.logits)


def test_replayed_choices_are_used_and_the_own_ones_reported(tiny: dict[str, Tensor], tiny_whole: Forward) -> None:
    last = 39
    rows = [*tiny_whole.selection[3][:last], [0, 1, 2, 3]]
    assert rows != tiny_whole.selection[3]
    other = run(TINY, tiny, prompt(40), selection={3: rows})
    assert other.selection[3] == tiny_whole.selection[3]
    assert_same_before(other, tiny_whole, last, TINY)
    assert torch.equal(other.streams[2], tiny_whole.streams[2])
    assert not torch.allclose(other.streams[3][last], tiny_whole.streams[3][last])

    oldest = [row if t < last else [0, 1, 19] for t, row in enumerate(tiny_whole.candidates or [])]
    other = run(TINY, tiny, prompt(40), candidates=oldest)
    assert other.candidates == tiny_whole.candidates
    assert torch.equal(other.streams[4], tiny_whole.streams[4])
    assert {row // 2 for row in other.selection[5][last]} <= {0, 1, 19}

    experts = tiny_whole.experts[6].clone()
    experts[last] = torch.tensor([e for e in range(8) if e not in experts[last]][:2])
    other = run(TINY, tiny, prompt(40), experts={6: experts})
    assert torch.equal(other.experts[6], tiny_whole.experts[6])
    assert torch.equal(other.logits[:last], tiny_whole.logits[:last])
    assert not torch.allclose(other.logits[last], tiny_whole.logits[last])


@pytest.mark.parametrize(
    ("forced", "message"),
    [
        ({"selection": {1: [[0], [0], [0]]}}, r"selection of layer 1, token 0: \[0\].*0\.\.-1"),
        ({"selection": {3: [[0], [0], [0, 3]]}}, r"selection of layer 3, token 2: \[0, 3\].*0\.\.2"),
        ({"selection": {3: [[0], [0, 0], [0]]}}, "token 1.*distinct"),
        ({"selection": {3: [[0], [-2], [0]]}}, "token 1"),
        ({"selection": {3: [[0]]}}, "1 tokens, the sequence has 3"),
        ({"candidates": [[0], [1], [0]]}, r"candidates, token 1: \[1\]"),
        ({"experts": {2: [[0, 1], [0, 8], [0, 1]]}}, r"experts of layer 2, token 1: \[0, 8\].*0\.\.7"),
    ],
)
def test_replaying_the_impossible(tiny: dict[str, Tensor], forced: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(TINY, tiny, prompt(3), **forced)


# --- weights.py


class Recording(dict[str, Tensor]):
    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(tensors)
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Tensor:
        self.read.add(name)
        return super().__getitem__(name)


def test_every_tensor_is_read(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """All but routed experts that no token chose."""
    watched = Recording(tensors)
    out = run(config, watched, prompt(40))
    chosen = {f"layers.{layer}.ffn.experts.{e}." for layer, ids in out.experts.items() for e in ids.flatten().tolist()}
    expected = {name for name in tensors if ".experts." not in name or name[: name.index(".w", 9) + 1] in chosen}
    assert watched.read == expected


def test_random_weights_depend_on_name_and_seed_alone() -> None:
    full, bare = random_weights(TINY, 1, torch.bfloat16), random_weights(without_engram(TINY), 1, torch.bfloat16)
    assert {name for name in full if name not in bare} == {name for name in full if ".engram." in name} != set()
    assert all(torch.equal(full[name], bare[name]) for name in bare)
    assert not torch.equal(full["embed.weight"], random_weights(TINY, 2, torch.bfloat16)["embed.weight"])
    fp32 = {name for name, tensor in full.items() if tensor.dtype == torch.float32}
    assert fp32 == {n for n in full if ".hc_" in n or n.endswith(("attn_sink", "gate.bias"))}
    assert {tensor.dtype for name, tensor in full.items() if name not in fp32} == {torch.bfloat16}


def test_shapes_of_the_release() -> None:
    """The table of section 9.1, from its configuration."""
    released = SMALL | {
        "hidden_size": 5120,
        "num_attention_heads": 64,
        "head_dim": 512,
        "q_lora_rank": 1280,
        "o_groups": 8,
        "o_lora_rank": 1024,
        "index_n_heads": 32,
        "index_head_dim": 128,
        "n_routed_experts": 384,
        "moe_intermediate_size": 2304,
        "engram_n_heads": 8,
        "engram_head_dim": 256,
        "engram_num_embeddings": [384006168, 384016682],
    }
    found = shapes(released)
    expected = {
        "layers.0.hc_attn_fn": (24, 20480),
        "layers.0.hc_ffn_base": (24,),
        "layers.0.attn.wq_a.weight": (1280, 5120),
        "layers.0.attn.wq_b.weight": (32768, 1280),
        "layers.0.attn.wkv.weight": (512, 5120),
        "layers.0.attn.wo_a.weight": (8192, 4096),
        "layers.0.attn.wo_b.weight": (5120, 8192),
        "layers.2.attn.compressor.wgate.weight": (512, 5120),
        "layers.20.attn.compressor.wkv.weight": (512, 5120),
        "layers.36.attn.indexer.wq_b.weight": (4096, 1280),
        "layers.36.attn.indexer.weights_proj.weight": (32, 5120),
        "layers.20.attn.indexer.wk.weight": (128, 512),
        "layers.39.ffn.experts.383.w2.weight": (5120, 2304),
        "layers.39.ffn.shared_experts.w1.weight": (2304, 5120),
        "layers.14.engram.wkv.weight": (25600, 6144),
        "layers.14.engram.q_weight": (4, 5120),
    }
    assert {name: found[name] for name in expected} == expected
    assert "layers.20.attn.compressor.wgate.weight" not in found
    assert "layers.36.attn.indexer.wk.weight" not in found
    assert "layers.3.attn.indexer.wq_b.weight" not in found
