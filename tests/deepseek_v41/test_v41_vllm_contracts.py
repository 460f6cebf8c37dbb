"""The contracts with vLLM: plugin, specs, planner, metadata, options (specification 2.4, 4; H1, H4, H8, H17, H29, H30).

One child process (``v41_contracts.py``) tries them all; nothing here imports vLLM.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from v41_contracts import run

pytestmark = pytest.mark.engine
Tried = Callable[[str], dict[str, Any]]
OURS = ["kvproof.deepseek_v41.model", "DeepseekV41ForCausalLM", "kvproof.deepseek_v41.serving"]


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> Tried:
    return run("vllm", tmp_path_factory.mktemp("v41-vllm"))


def is_refused(found: dict[str, str], *parts: str, kind: str = "ValueError") -> None:
    assert found["type"] == kind, found
    assert "\n" not in found["text"]
    assert [part for part in parts if part not in found["text"]] == [], found["text"]


# --- plugin and settings


def test_the_distribution_names_the_plugin() -> None:
    (point,) = distribution("kvproof").entry_points.select(group="vllm.general_plugins", name="kvproof_deepseek_v41")
    assert point.value == "kvproof.deepseek_v41.plugin:register"


def test_without_the_plugin_the_architecture_is_vllms(tried: Tried) -> None:
    assert tried("plugin")["before"][0].startswith("vllm.")


@pytest.mark.parametrize("case", ["cpu", "cpu, switch empty", "cpu, force", "other, force"])
def test_the_plugin_takes_the_architecture(tried: Tried, case: str) -> None:
    found = tried("plugin")[case]
    assert (found["type"], found["entries"]) == ("", OURS)
    assert (found["again"]["type"], found["again"]["entries"]) == ("", OURS)


@pytest.mark.parametrize("case", ["other", "other, switch empty"])
def test_other_platforms_keep_theirs(tried: Tried, case: str) -> None:
    found = tried("plugin")[case]
    assert found["type"] == ""
    assert found["entries"] == found["again"]["entries"] == tried("plugin")["before"]


@pytest.mark.parametrize("case", ["cpu, nonsense", "cpu, Force", "other, nonsense"])
def test_an_unknown_value_of_the_switch_is_refused(tried: Tried, case: str) -> None:
    found = tried("plugin")[case]
    is_refused(found, "KVPROOF_DEEPSEEK_V41", case.split(", ")[1], "force")
    assert found["entries"] == tried("plugin")["before"]


def test_no_other_architecture_is_touched(tried: Tried) -> None:
    assert tried("plugin")["others kept"]


def test_vllm_finds_the_plugin_by_itself(tried: Tried) -> None:
    assert tried("plugin")["by vLLM"] == OURS


@pytest.mark.parametrize(("form", "method"), [("plain", "none"), ("quantised", "deepseek_v4_fp8")])
def test_settings_that_the_model_needs(tried: Tried, form: str, method: str) -> None:
    assert tried("settings")[form] == {
        "class": "kvproof.deepseek_v41.model.DeepseekV41ForCausalLM",
        "prefix caching": True,
        "chunked prefill": True,
        "head dtype": "torch.float32",
        "dtype": "torch.bfloat16",
        "quant_config": True,
        "mla": False,
        "quant_method": method,
        "head": "torch.float32",
    }


# --- specs


@pytest.mark.parametrize(("kind", "count"), [("window", 19), ("ring", 13)])
def test_a_changed_field_makes_another_geometry(tried: Tried, kind: str, count: int) -> None:
    found = tried("fields")[kind]
    assert len(found["names"]) >= count
    assert {"dtype", "head_size", "head_size_v", "block_size", "num_kv_heads", "page_size_padded"} <= set(
        found["names"]
    )
    assert found["uniform"] == []
    assert found["planned"] == []
    assert found["itself"]


@pytest.mark.parametrize("kind", ["long", "key"])
def test_compressed_caches_may_differ_in_width_and_ratio_only(tried: Tried, kind: str) -> None:
    free = {"head_size", "tokens_per_state", "page_size_padded", "cache_role"}
    assert set(tried("fields")[kind]["uniform"]) == free
    assert set(tried("fields")[kind]["planned"]) == free


@pytest.mark.parametrize("kind", ["window", "long", "key", "ring"])
def test_only_equal_specs_merge(tried: Tried, kind: str) -> None:
    found = tried("fields")[kind]
    assert found["merged"] == []
    assert found["itself"]
    # The error by which vLLM's planner learns it; in words.
    is_refused(found["refusal"], found["names"][-1], kind="AssertionError")


UNIFORM = {"windows alike", "compressed, ratio and width", "rings alike"}


def test_uniformity(tried: Tried) -> None:
    found = tried("uniformity")
    assert len(found) == 18
    assert {case for case, uniform in found.items() if uniform} == UNIFORM


def test_page_sizes(tried: Tried) -> None:
    assert tried("pages")["wrong"] == []


def test_managers(tried: Tried) -> None:
    found = tried("pages")
    assert found["managers"] == {
        "window": "SlidingWindowManager",
        "long": "FullAttentionManager",
        "key": "FullAttentionManager",
        "ring": "CircularBufferManager",
    }
    assert found["cacheable"] == {"window": True, "long": True, "key": True, "ring": False}
    assert found["slot mapping"] == {"window": True, "long": True, "key": True, "ring": False}


def test_a_block_must_hold_whole_groups(tried: Tried) -> None:
    is_refused(tried("pages")["odd"], "block_size", "15", "2")
    assert tried("pages")["odd at ratio 1"]["type"] == ""


@pytest.mark.parametrize("layout", ["BLHNC", "BLNHC"])
def test_planned_groups_hold_one_kind(tried: Tried, layout: str) -> None:
    groups = tried("groups")[layout]
    assert all(len(group["kinds"]) == 1 for group in groups)
    assert sum(len(group["layers"]) for group in groups) == 12
    long = [group["layers"] for group in groups if group["kinds"] == ["CompressedSpec"]]
    caches = [f"layers.{layer}.attn.{cache}" for layer in (1, 3) for cache in ("indexer.k_cache", "long_cache")]
    assert long == [caches]


# --- metadata


@pytest.mark.parametrize("spec", ["window", "long", "key", "ring"])
def test_a_batch_beyond_the_capacity_is_refused_first(tried: Tried, spec: str) -> None:
    is_refused(tried("capacity")["5 requests"][spec], "5", "max_num_seqs = 4")
    is_refused(tried("capacity")["65 tokens"][spec], "65", "64")


def test_the_capacity_is_the_larger_of_batch_and_graph(tried: Tried) -> None:
    found = tried("capacity")
    is_refused(found["65 tokens, small graphs"], "65", "64")
    is_refused(found["129 tokens, graphs of 128"], "129", "128")
    assert found["at the capacity"] == [64] * 4
    assert found["at the capacity of graphs"] == 128
    assert found["above the batch, below the graphs"] == 65
    assert found["without graphs"] == found["no graphs at all"] == 64
    assert found["empty"] == 0


def test_slots_against_loops_over_tokens(tried: Tried) -> None:
    found = tried("slots")
    assert found["wrong"] == []  # each with its seed
    assert (found["tokens"], found["written"]) > (500, 200)


@pytest.mark.parametrize(("kind", "rows"), [("window", (16, 4, 2)), ("key", (16, 4, 2)), ("long", (8, 2, 1))])
def test_padded_dummy_and_replayed_tokens_write_nothing(tried: Tried, kind: str, rows: tuple[int, int, int]) -> None:
    """Rows written by block, of blocks 0 to 4."""
    full, four, two = rows
    assert tried("silent")[kind] == {
        "real": [0, full, 0, four, 0],
        "replayed": [0, 0, 0, 0, 0],
        "dummy": [0, 0, 0, 0, 0],
        "dummy beside real": [0, full, 0, 0, 0],
        "half replayed": [0, 0, four, 0, 0],
        "padded": [0, two, 0, 0, 0],
    }


def test_a_ring_is_addressed_by_its_compressor(tried: Tried) -> None:
    expected = {"write": [-1] * 4, "table": [[2], [0]], "position": [0, 1, 2, 5], "block_size": 8}
    assert tried("silent")["ring"] == expected


# --- order and names (rules 8 and 9)


def test_a_filtered_index_source_needs_candidates(tried: Tried) -> None:
    found = tried("rules")
    is_refused(found["filtered first"], "layer 5", "candidates", kind="RuntimeError")
    assert found["nothing selected"]
    assert found["filtered after"]["type"] == ""
    assert found["same keys"]
    assert found["selected"] == found["source selected"] == 12 * 4  # 12 tokens, top 4


def test_a_layer_name_is_registered_once(tried: Tried) -> None:
    is_refused(tried("rules")["twice"], "layers.0.attn.swa_cache", "twice")
    assert len(tried("rules")["names"]) == 7 + 2 * 2 + 1


# --- options


@pytest.mark.parametrize(
    ("case", "parts"),
    [
        ("pipeline", ("pipeline_parallel_size=2", "1")),
        ("data parallel", ("data_parallel_size=2", "1")),
        ("prefill context parallel", ("prefill_context_parallel_size=2", "1")),
        ("decode context parallel", ("decode_context_parallel=2", "1")),
        ("microbatches", ("ubatch_size", "True", "False")),
        ("kv cache fp8", ("kv_cache_dtype='fp8'", "'auto'")),
        ("kv cache fp8_ds_mla", ("kv_cache_dtype='fp8_ds_mla'", "'auto'")),
        ("speculation", ("speculative_config=", "ngram", "None")),
        ("engram", ("engram_layer_ids=(1,)", "()")),
        ("vision", ("vision_n_layers=2", "0")),
        ("odd block", ("block_size=15", "even")),
        ("no block", ("block_size=None", "integer")),
        ("heads", ("num_attention_heads=4", "tensor_parallel=3")),
        ("groups", ("o_groups=2", "tensor_parallel=4")),
        ("experts", ("n_routed_experts=7", "expert_parallel=2")),
        ("expert width", ("moe_intermediate_size=31", "tensor_parallel=2")),
    ],
)
def test_an_option_that_the_model_cannot_honour_is_refused(tried: Tried, case: str, parts: tuple[str, ...]) -> None:
    found = tried("options")[case]
    is_refused(found, *parts)
    assert found["layers"] == [], "before the first layer"


def test_the_options_it_was_altered_from_are_accepted(tried: Tried) -> None:
    assert tried("options")["unchanged"]["type"] == ""
