"""The layouts of facts/cuda-without-a-gpu.md, exactly. Runner V2, TP 1, vLLM's own dtype of the cache.

A number here that moves with a vLLM release is news for every connector author: correct the table and say so.
Where 0.32 and 0.33 differ, both are given (`make test-cuda-0.32`).
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from v41_resources import held, plan_of, planned

from kvproof.platforms import installed

BEFORE_0_33 = installed.vllm_release() < (0, 33)
V2 = ("--runner", "v2")


@dataclass(frozen=True)
class Seen:
    """What a layout comes down to. ``strides``: bytes between blocks; ``pages``: (tokens per block, page bytes)."""

    kv_layout: str
    groups: int
    strides: frozenset[int]
    pages: frozenset[tuple[int, int]]


def seen(layout) -> Seen:
    size = {g["id"]: g["block_size"] for g in layout["groups"]}
    resources = layout["resources"]
    return Seen(
        layout["kv_layout"],
        len(layout["groups"]),
        frozenset(r["block_stride"] for r in resources),
        frozenset((size[r["group"]], r["page_bytes"]) for r in resources),
    )


def uniform(kv_layout: str, groups: int, block: int, page: int) -> Seen:
    return Seen(kv_layout, groups, frozenset({page}), frozenset({(block, page)}))


DENSE, DENSE_BLACKWELL = uniform("LBNHC", 1, 16, 65_536), uniform("LBHNC", 1, 16, 65_536)
CASES = {
    "qwen3-8b 8.0": DENSE,
    "qwen3-8b 9.0": DENSE,
    "qwen3-8b 10.0": DENSE_BLACKWELL,
    "qwen3-8b 12.0": DENSE,
    "llama-3.1-8b 9.0": DENSE,
    "llama-3.1-8b 10.0": DENSE_BLACKWELL,
    "deepseek-v3 8.0": uniform("LBNHC", 1, 16, 18_432),
    "deepseek-v3 9.0": uniform("LBNHC", 1, 16, 18_432),
    "deepseek-v3 10.0": uniform("LBNHC", 1, 32, 36_864),
    "deepseek-v3 12.0": uniform("LBNHC", 1, 16, 18_432),
    "deepseek-v3.2 9.0": Seen("LBNHC", 1, frozenset({73_728, 8_448}), frozenset({(64, 73_728), (64, 8_448)})),
    "deepseek-v3.2 12.0": Seen("LBNHC", 1, frozenset({41_984, 8_448}), frozenset({(64, 41_984), (64, 8_448)})),
    "gpt-oss-20b 9.0": uniform("LBNHC", 2, 16, 32_768),
    "gpt-oss-20b 10.0": uniform("LBHNC", 2, 16, 32_768),
    "gemma-3-1b 9.0": uniform("LBNHC", 7, 16, 16_384),
    "gemma-3-1b 10.0": uniform("LBHNC", 7, 16, 16_384),
}


@pytest.mark.parametrize("case", CASES)
def test_table_of_layouts(layout, case):
    code, found = layout(*case.split(), *V2)
    assert code == 0
    assert seen(found) == CASES[case]


@pytest.mark.parametrize(("capability", "kv_layout"), [("9.0", "LBNHC"), ("10.0", "LBHNC")])
def test_hybrid_pages_hold_a_state_or_a_block(layout, capability, kv_layout):
    code, found = layout("qwen3-next-80b-a3b", capability, *V2)
    assert (code, found["kv_layout"]) == (0, kv_layout)
    kinds = [g["kind"] for g in found["groups"]]
    assert (kinds.count("mamba"), kinds.count("full_attention")) == (3, 1)
    # The block is as many tokens as it takes for a page of attention to hold a state; 0.33 rounds further up.
    block, page = (544, 1_114_112) if BEFORE_0_33 else (576, 1_179_648)
    assert {g["block_size"] for g in found["groups"]} == {block}
    assert {r["block_stride"] for r in found["resources"]} == {page}


V41 = {
    # capability: groups, block stride, (SWA record, page), (compressed record, block)
    "9.0": (9, 116_928, (584, 19_008), (584, 64)),
    # Whole windows of 3,168 bytes since 0.33: 1,056 bytes of padding more.
    "10.0": (7, 135_168 if BEFORE_0_33 else 136_224, (528, 16_896), (288, 128)),
    "12.0": (6, 230_400, (584, 19_008), (584, 128)),
}


@pytest.mark.parametrize("capability", V41)
def test_deepseek_v41(layout, capability):
    groups, stride, window, (record, block) = V41[capability]
    code, found = layout("deepseek-v4.1", capability, *V2)
    assert (code, found["kv_layout"], len(found["groups"]), len(found["storages"])) == (0, "BLHNC", groups, 1)
    resources = found["resources"]
    assert {r["block_stride"] for r in resources} == {stride}
    sizes = {g["id"]: g["block_size"] for g in found["groups"]}

    def of(name):
        mine = [r for r in resources if r["layer"].endswith(name)]
        return {(r["cell_axes"][-1]["count"], r["page_bytes"], sizes[r["group"]]) for r in mine}, len(mine)

    assert of("swa_cache") == ({(*window, 32)}, 40)
    compressed, count = of("attn")
    assert (count, {(size, tokens) for size, _, tokens in compressed}) == (4, {(record, block)})
    index, count = of("k_cache")
    assert (count, {size for size, _, _ in index}) == (4, {132})
    rings = [r for r in resources if r["layer"].endswith("state_cache")]
    assert [(r["dtype"], r["row_axes"], r["cell_axes"][-1]["count"]) for r in rings] == [
        ("float32", [{"count": 8, "stride": 4096}], 4096)
    ] * 3
    # The caches that kvproof.deepseek_v41 plans, layer by layer; what a row holds is the platform's.
    rows, sizes = held(found)
    assert rows == planned(plan_of("deepseek-v4.1"), ring=8)
    assert sizes == {"window": window[0], "long": record, "index key": 132, "ring": 2 * 512 * 4}
    # Every id owns one stride of bytes, whatever group uses it: all groups are laid over each other.
    assert found["storages"][0]["nbytes"] == stride * found["num_blocks"]


def test_the_connector_changes_the_layout(layout):
    code, found = layout("qwen3-8b", "9.0", *V2, "--connector", "OffloadingConnector")
    assert (code, found["kv_layout"]) == (0, "LBHNC")
    code, found = layout("gpt-oss-20b", "9.0", *V2, "--connector", "ExampleConnector")
    assert (code, len(found["groups"])) == (0, 1)


@pytest.mark.parametrize("model", ["qwen3-next-80b-a3b", "deepseek-v4.1"])
def test_a_connector_without_hybrid_support_is_refused_in_vllms_words(layout, model):
    code, found = layout(model, "9.0", *V2, "--connector", "ExampleConnector")
    assert (code, found["verdict"]) == (3, "UNSUPPORTED")
    assert found["reason"]
