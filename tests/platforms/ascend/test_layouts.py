"""The layouts of facts/ascend-without-an-npu.md, exactly. TP 1, bf16, blocks of 128 tokens.

A number here that moves with a vllm-ascend release is news for every connector author: correct the table and say so.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))
from v41_resources import held, plan_of, planned


@dataclass(frozen=True)
class Seen:
    """What a layout comes down to. ``specs``: layers with a cache spec; ``per_block``: bytes one block id owns."""

    specs: int
    groups: int
    storages: int
    per_block: int


def seen(layout) -> Seen:
    from kvproof.layout import Layout

    found = Layout.from_json({k: v for k, v in layout.items() if k != "schema"})
    return Seen(len({r.layer for r in found.resources}), len(found.groups), len(found.storages), found.bytes_per_block)


V41 = Seen(51, 12, 4, 540_928)
V32 = Seen(122, 1, 183, 10_993_664)
V3 = Seen(61, 1, 122, 8_994_816)
CASES = {
    ("deepseek-v4.1", "ascend910b", "v1"): V41,
    ("deepseek-v4.1", "ascend910b", "v2"): V41,
    ("deepseek-v4.1", "ascend910c", "v1"): V41,
    ("deepseek-v4.1", "ascend950", "v2"): Seen(52, 12, 4, 462_848),
    ("deepseek-v3.2", "ascend910b", "v1"): V32,
    ("deepseek-v3.2", "ascend910b", "v2"): V32,
    ("deepseek-v3-bf16", "ascend910b", "v1"): V3,
    ("deepseek-v3-bf16", "ascend910b", "v2"): V3,
}


BYTES = {
    "ascend910b": {"window": 1024, "long": 1024, "index key": 128 + 2, "ring": 2 * 512 * 4},
    "ascend950": {"window": 512 + 32, "long": 256 + 64, "index key": 64 + 4, "ring": 2 * 512 * 4, "folded index": 544},
}
"""Of one row of deepseek-v4.1's caches: values and their scales."""


@pytest.fixture(scope="module")
def v41_plan():
    return plan_of("deepseek-v4.1")


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_table_of_layouts(layout, case, v41_plan):
    model, soc, runner = case
    code, found = layout(model, soc, "--runner", runner)
    assert (code, found["kv_layout"]) == (0, "LBNHC")
    assert seen(found) == CASES[case]
    if model == "deepseek-v4.1":
        rows, sizes = held(found)
        assert sizes == BYTES["ascend950" if soc == "ascend950" else "ascend910b"]
        if soc == "ascend950":  # which keeps the candidate source's index keys a second time, eight to a row
            assert rows[20].pop("folded index") == Fraction(1, 8)
        assert rows == planned(v41_plan, ring=32)


def test_key_and_value_are_two_views_of_one_page(layout, four_layers):
    code, found = layout(four_layers, "ascend910b")
    assert (code, seen(found)) == (0, Seen(4, 1, 4, 2_097_152))
    keys, values = ([r for r in found["resources"] if r["fields"][0]["name"] == name] for name in "KV")
    assert {(r["offset"], r["block_stride"], r["page_bytes"]) for r in keys} == {(0, 524_288, 262_144)}
    assert {(r["offset"], r["block_stride"], r["page_bytes"]) for r in values} == {(262_144, 524_288, 262_144)}


GRAPHS = ("--cudagraph-mode", "FULL_DECODE_ONLY")
PAGED_ATTENTION = ("--engine-args", '{"additional_config": {"pa_shape_list": [1, 2, 4]}}')


@pytest.mark.parametrize(("options", "storages"), [(GRAPHS, 4), (PAGED_ATTENTION, 4), (GRAPHS + PAGED_ATTENTION, 8)])
def test_the_cudagraph_mode_is_an_input_of_the_layout(layout, four_layers, options, storages):
    code, found = layout(four_layers, "ascend910b", *options)
    assert (code, seen(found)) == (0, Seen(4, 1, storages, 2_097_152))


DSPARK = ("--engine-args", '{"speculative_config": {"method": "dspark", "num_speculative_tokens": 3}}')


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_the_draft_of_deepseek_v41_is_a_group_of_its_own(layout, runner):
    code, found = layout("deepseek-v4.1", "ascend910b", "--runner", runner, *DSPARK)
    assert (code, seen(found)) == (0, Seen(54, 13, 4, 540_928))
    assert (len(found["groups"][-1]["layers"]), found["groups"][-1]["rule"]) == (3, "window")


def test_a_connector_moves_the_start_of_every_allocation(layout):
    code, found = layout("deepseek-v4.1", "ascend910b", "--runner", "v2", "--connector", "SimpleCPUOffloadConnector")
    assert (code, seen(found)) == (0, V41)
    blocks = found["num_blocks"]
    strides = {r["storage"]: r["block_stride"] for r in found["resources"]}
    aligned = {s["id"]: s["nbytes"] - blocks * strides[s["id"]] for s in found["storages"]}
    assert set(aligned.values()) == {2 << 20}


def test_latent_and_rope_have_a_storage_each(layout):
    _, found = layout("tiny-deepseek-v3", "ascend910b")
    names = {(r["fields"][0]["name"], r["storage"]) for r in found["resources"]}
    assert len({storage for _, storage in names}) == len(names)
    assert {name for name, _ in names} == {"latent", "rope"}


def test_deepseek_v41_shares_its_pages(layout):
    _, found = layout("deepseek-v4.1", "ascend910b")
    resources = found["resources"]
    assert sorted({r["block_stride"] for r in resources}) == [131_072, 147_712]
    shape = {(r["fields"][0]["name"], r["dtype"]): r for r in resources}
    assert shape["index key", "int8"]["cell_axes"][-1]["count"] == 128
    assert shape["index scale", "float16"]["cell_axes"][-1]["count"] == 2
    rings = [r for r in resources if r["dtype"] == "float32"]
    assert [r["tokens_per_row"] for r in rings] == [0, 0, 0]
    assert {r["cell_axes"][-1]["count"] for r in rings} == {32 * 1024 * 4}
    kinds = [g["spec"] for g in found["groups"]]
    assert (kinds[0], len(found["groups"][0]["layers"])) == ("AscendMLAAttentionSpec", 8)
    assert [len(g["layers"]) for g in found["groups"] if g["rule"] == "window"] == [4] * 10


def test_runner_v1_of_the_950_is_refused_in_vllm_ascends_words(layout):
    code, found = layout("deepseek-v4.1", "ascend950", "--runner", "v1")
    assert (code, found["verdict"]) == (3, "UNSUPPORTED")
    assert found["reason"]
