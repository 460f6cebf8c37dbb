"""Section 2 of the specification: roles, the nineteen rules, limits of backends and of a deployment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from weights import SMALL, TINY, TRUNCATED

from kvproof.deepseek_v41.config import TextConfig
from kvproof.deepseek_v41.plan import FUSED, REFERENCE, LayerRole, Plan, check_serving, static_capacity

Hf = dict[str, Any]


def plan_of(hf: Hf) -> Plan:
    return Plan.of(TextConfig.from_hf(hf))


def serve(hf: Hf, **options: Any) -> None:
    config = TextConfig.from_hf(hf)
    check_serving(config, Plan.of(config), **{"block_size": 16} | options)


def refused(make: Callable[[], object], *words: str, error: type[Exception] = ValueError) -> None:
    with pytest.raises(error, match="must be") as caught:
        make()
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


# --- 2.3: the released topology (SMALL has its forty layers)


def test_released_groups() -> None:
    layers = plan_of(SMALL).layers
    kv = {2: range(2, 8), 8: range(8, 14), 14: range(14, 20), 20: range(20, 40)}
    index = kv | {20: range(20, 24), **{s: range(s, s + 4) for s in (24, 28, 32, 36)}}
    assert {s: range(m[0], m[-1] + 1) for s, m in members(layers, "kv_source").items()} == kv
    assert {s: range(m[0], m[-1] + 1) for s, m in members(layers, "index_source").items()} == index
    assert [role.layer for role in layers if role.filtered] == list(range(24, 40))
    assert [role.layer for role in layers if role.is_candidate_source] == [20]
    assert [(role.layer, role.engram_slot) for role in layers if role.engram_slot is not None] == [(1, 0), (14, 1)]
    assert layers[26] == LayerRole(26, 1, 20, 24, False, False, False, True, None)
    for layer in (0, 1):
        assert layers[layer] == LayerRole(
            layer, 0, None, None, False, False, False, False, layer - 1 if layer else None
        )


def members(layers: tuple[LayerRole, ...], source: str) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for role in layers:
        if getattr(role, source) is not None:
            found.setdefault(getattr(role, source), []).append(role.layer)
    return found


@pytest.mark.parametrize(
    ("hf", "cuts"),
    [(SMALL, (1, 2, 8, 14, 20)), (TINY, (1, 3)), (TRUNCATED, (1, 3))],
    ids=["released", "tiny", "truncated"],
)
def test_cut_points(hf: Hf, cuts: tuple[int, ...]) -> None:
    assert plan_of(hf).cut_points == cuts


def test_table_of_the_tiny_plan() -> None:
    assert plan_of(TINY).table().splitlines() == [
        "layer  ratio  kv source  index source  roles",
        "    0      0          –             –  window only",
        "    1      2          1             1  kv source, index source, engram 0",
        "    2      2          1             1  reader",
        "    3      1          3             3  kv source, index source, candidate source, engram 1",
        "    4      1          3             3  reader",
        "    5      1          3             5  index source, filtered",
        "    6      1          3             5  filtered",
    ]


def test_a_model_without_compression_needs_no_sources() -> None:
    hf = TINY | {
        "compress_ratios": [0] * 7,
        "kv_source_layer_ids": [],
        "index_source_layer_ids": [],
        "candidate_source_layer_id": -1,
    }
    plan = plan_of(hf)
    assert {(role.ratio, role.kv_source, role.index_source, role.filtered) for role in plan.layers} == {
        (0, None, None, False)
    }
    assert plan.cut_points == tuple(range(1, 7))


# --- 13.2: one change each, all refused when the plan is made

NEGATIVE: dict[str, tuple[Hf, tuple[str, ...]]] = {
    "ratio 4": ({"compress_ratios": [0, 2, 2, 4, 1, 1, 1, 0, 0]}, ("compress_ratios[3]=4", "0 or 1 or 2")),
    'ratio "1"': ({"compress_ratios": [0, 2, 2, "1", 1, 1, 1, 0, 0]}, ("compress_ratios[3]='1'", "0 or 1 or 2")),
    "ratio True": ({"compress_ratios": [0, 2, 2, True, 1, 1, 1, 0, 0]}, ("compress_ratios[3]=True", "0 or 1 or 2")),
    "kv source on a ratio-0 layer": (
        {"kv_source_layer_ids": [0, 1, 3], "index_source_layer_ids": [0, 1, 3, 5]},
        ("kv_source_layer_ids[0]=0", "ratio > 0"),
    ),
    "index source on a ratio-0 layer": (
        {"index_source_layer_ids": [0, 1, 3, 5]},
        ("index_source_layer_ids[0]=0", "ratio > 0"),
    ),
    "kv source not an index source": (
        {"index_source_layer_ids": [1, 5]},
        ("kv_source_layer_ids[1]=3", "index_source_layer_ids=(1, 5)"),
    ),
    "first compressed layer not a source": ({"kv_source_layer_ids": [3]}, ("kv_source_layer_ids[0]=3", "must be 1")),
    "first compressed layer not an index source": (
        {"index_source_layer_ids": [3, 5]},
        ("kv_source_layer_ids[0]=1", "index_source_layer_ids=(3, 5)"),
    ),
    "unsorted kv sources": ({"kv_source_layer_ids": [3, 1]}, ("kv_source_layer_ids=(3, 1)", "strictly increasing")),
    "duplicate kv sources": ({"kv_source_layer_ids": [1, 3, 3]}, ("kv_source_layer_ids=(1, 3, 3)", "increasing")),
    "unsorted index sources": ({"index_source_layer_ids": [1, 5, 3]}, ("index_source_layer_ids=(1, 5, 3)", "increas")),
    "duplicate index sources": ({"index_source_layer_ids": [1, 1, 3]}, ("index_source_layer_ids=(1, 1, 3)", "increas")),
    "bool as source": ({"kv_source_layer_ids": [True, 3]}, ("kv_source_layer_ids[0]=True", "integer")),
    "candidate source 1, filtered sources on kv 3": (
        {"candidate_source_layer_id": 1},
        ("candidate_source_layer_id=1", "must be 3"),
    ),
    "candidate source not in kv sources": (
        {"candidate_source_layer_id": 5},
        ("candidate_source_layer_id=5", "kv_source_layer_ids=(1, 3)"),
    ),
    "candidate source out of range": (
        {"candidate_source_layer_id": 7},
        ("candidate_source_layer_id=7", "kv_source_layer_ids=(1, 3)"),
    ),
    "candidate block 0": ({"candidate_block_size": 0}, ("candidate_block_size=0", ">= 1")),
    "candidate blocks 0": ({"candidate_topk_blocks": 0}, ("candidate_topk_blocks=0", ">= 1")),
    "index_topk 0": ({"index_topk": 0}, ("index_topk=0", ">= 1")),
    "kv sources empty": ({"kv_source_layer_ids": []}, ("kv_source_layer_ids=()", "not empty", "layer 1")),
    "index sources empty": ({"index_source_layer_ids": []}, ("index_source_layer_ids=()", "not empty", "layer 1")),
    "kv source beyond the last layer": (
        {"kv_source_layer_ids": [1, 7]},
        ("kv_source_layer_ids=(1, 7)", "num_hidden_layers=7"),
    ),
    "index source beyond the last layer": (
        {"index_source_layer_ids": [1, 3, 7]},
        ("index_source_layer_ids=(1, 3, 7)", "num_hidden_layers=7"),
    ),
    "negative source": ({"kv_source_layer_ids": [-6, 3]}, ("kv_source_layer_ids[0]=-6", ">= 0")),
    "consumer ratio is not its source's": (
        {"kv_source_layer_ids": [1], "candidate_source_layer_id": -1},
        ("compress_ratios[3]=1", "must be 2", "kv source 1"),
    ),
    "one consumer of another ratio": (
        {"compress_ratios": [0, 2, 2, 1, 1, 1, 2, 0, 0]},
        ("compress_ratios[6]=2", "must be 1", "kv source 3"),
    ),
    "draft layer with a ratio": ({"compress_ratios": [0, 2, 2, 1, 1, 1, 1, 0, 1]}, ("compress_ratios=", "draft")),
    "too few ratios": ({"compress_ratios": [0, 2, 2, 1, 1, 1]}, ("compress_ratios=", "num_hidden_layers=7")),
    "o_groups 3": ({"o_groups": 3}, ("o_groups=3", "num_attention_heads=4")),
    "rope dim 7": ({"qk_rope_head_dim": 7}, ("qk_rope_head_dim=7", "even")),
    "rope dim > index_head_dim": ({"qk_rope_head_dim": 18}, ("qk_rope_head_dim=18", "index_head_dim=16")),
    "hidden_act gelu": ({"hidden_act": "gelu"}, ("hidden_act='gelu'", "'silu'")),
    "expert_dtype int4": ({"expert_dtype": "int4"}, ("expert_dtype='int4'", "'fp4' or 'fp8'")),
    "num_experts_per_tok > n_routed_experts": (
        {"num_experts_per_tok": 9},
        ("num_experts_per_tok=9", "n_routed_experts=8"),
    ),
    "dspark targets [5,4]": ({"dspark_target_layer_ids": [5, 4]}, ("dspark_target_layer_ids=(5, 4)", "increasing")),
    "dspark targets [4,4]": ({"dspark_target_layer_ids": [4, 4]}, ("dspark_target_layer_ids=(4, 4)", "increasing")),
    "dspark targets [8]": ({"dspark_target_layer_ids": [8]}, ("dspark_target_layer_ids=(8,)", "num_hidden_layers=7")),
    "num_embeddings [271, 348]": (
        {"engram_num_embeddings": [271, 348]},
        ("engram_num_embeddings=(271, 348)", "[272, 348]"),
    ),
    "engram list length mismatch": (
        {"engram_num_embeddings": [272]},
        ("engram_num_embeddings=(272,)", "engram_layer_ids=(1, 3)"),
    ),
    "pad id -1": ({"engram_pad_token_id": -1}, ("engram_pad_token_id=-1", ">= 0")),
    "max_image_tokens 3": ({"vision_n_layers": 2, "vision_max_n_token": 3}, ("vision_max_n_token=3", ">= 4")),
}


@pytest.mark.parametrize("case", NEGATIVE)
def test_negative_configurations(case: str) -> None:
    change, words = NEGATIVE[case]
    refused(lambda: plan_of(TINY | change), *words)


# The rest of 13.2 is no field of the configuration: odd block size, method "mtp".
SERVING_FAULTS: dict[str, tuple[Hf, tuple[str, ...]]] = {
    "odd block size": ({"block_size": 15}, ("block_size=15", "even")),
    "block size 0": ({"block_size": 0}, ("block_size=0", ">= 1")),
    "block size as bool": ({"block_size": True}, ("block_size=True", "integer")),
    "method mtp": ({"speculative_method": "mtp"}, ("'mtp'", "dspark")),
    "tp does not divide the groups": ({"tensor_parallel": 4}, ("o_groups=2", "tensor_parallel=4")),
    "tp does not divide the heads": ({"tensor_parallel": 3}, ("num_attention_heads=4", "tensor_parallel=3")),
    "tp 0": ({"tensor_parallel": 0}, ("tensor_parallel=0", ">= 1")),
    "ep does not divide the experts": ({"expert_parallel": 3}, ("n_routed_experts=8", "expert_parallel=3")),
    "ep as a flag": ({"expert_parallel": True}, ("expert_parallel=True", "integer")),
    "dcp 2": ({"decode_context_parallel": 2}, ("decode_context_parallel=2", "must be 1")),
    "ep does not divide the draft's experts": (
        {"expert_parallel": 8, "speculative_method": "dspark"},
        ("dspark_n_routed_experts=4", "expert_parallel=8"),
    ),
    "targets before the last stage": (
        {"pipeline_cuts": [1, 3], "speculative_method": "dspark", "hf": {"dspark_target_layer_ids": [2, 5]}},
        ("dspark_target_layer_ids=(2, 5)", ">= 3"),
    ),
    "dspark without targets": (
        {"speculative_method": "dspark", "hf": {"dspark_target_layer_ids": []}},
        ("dspark_target_layer_ids=()", "given"),
    ),
    "unsorted cuts": ({"pipeline_cuts": [3, 1]}, ("pipeline_cuts=(3, 1)", "increasing")),
    "cut at 0": ({"pipeline_cuts": [0]}, ("pipeline_cuts=0", ">= 1")),
    "cut after the last layer": ({"pipeline_cuts": [7]}, ("pipeline_cuts=7", "num_hidden_layers=7")),
    "width of an expert": (
        {"tensor_parallel": 2, "hf": {"moe_intermediate_size": 33}},
        ("moe_intermediate_size=33", "tensor_parallel=2"),
    ),
    "width of the shared expert": (
        {"tensor_parallel": 2, "expert_parallel": 2, "hf": {"moe_intermediate_size": 33}},
        ("n_shared_experts * moe_intermediate_size=33", "tensor_parallel=2"),
    ),
}


@pytest.mark.parametrize("case", SERVING_FAULTS)
def test_deployments_that_do_not_fit(case: str) -> None:
    options, words = SERVING_FAULTS[case]
    change = options.get("hf", {})
    options = {name: value for name, value in options.items() if name != "hf"}
    refused(lambda: serve(TINY | change, **options), *words)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"block_size": 2},
        {"block_size": 18},  # no multiple of anything but two is asked for
        {"tensor_parallel": 2},
        {"tensor_parallel": 2, "expert_parallel": 4},
        {"pipeline_cuts": (1, 3)},
        {"speculative_method": "ngram"},
        {"pipeline_cuts": [3], "speculative_method": "dspark", "expert_parallel": 4},
    ],
    ids=repr,
)
def test_deployments_that_fit(options: Hf) -> None:
    serve(TINY, **options)


def test_every_cut_of_the_released_plan_is_legal_or_not_implemented() -> None:
    legal = (1, 2, 8, 14, 20)
    for cut in range(1, 40):
        if cut in legal:
            serve(SMALL, pipeline_cuts=[cut])
        else:
            refused(
                lambda cut=cut: serve(SMALL, pipeline_cuts=[cut]),
                f"pipeline_cuts={cut}:",
                str(legal),
                error=NotImplementedError,
            )


# --- findings H1, H6, H8 and rule 16


@pytest.mark.parametrize(
    ("batched", "captured", "capacity"), [(64, 128, 128), (128, 64, 128), (64, None, 64), (64, 0, 64), (64, 64, 64)]
)
def test_static_capacity_is_the_larger_of_the_two(batched: int, captured: int | None, capacity: int) -> None:
    assert static_capacity(batched, captured) == capacity


@pytest.mark.parametrize(("batched", "captured"), [(0, None), (-1, 8), (True, 8), (64, -1), (64, True), ("64", 8)])
def test_static_capacity_refuses_what_is_no_count(batched: Any, captured: Any) -> None:
    refused(lambda: static_capacity(batched, captured), "max_", "an integer >=")


KERNELS = TINY | {
    "hidden_size": 5120,
    "num_attention_heads": 64,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 512,
    "candidate_topk_blocks": 2048,
    "candidate_block_size": 8,
    "engram_head_dim": 256,
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"candidate_topk_blocks": 100}, ("candidate_topk_blocks=100", "64..2048 in steps of 64")),
        ({"candidate_topk_blocks": 2112}, ("candidate_topk_blocks=2112", "64..2048")),
        ({"candidate_block_size": 4}, ("candidate_block_size=4", "must be 8")),
        ({"index_topk": 2049}, ("index_topk=2049", "1..2048")),
        ({"index_n_heads": 16}, ("index_n_heads=16", "32 or 64")),
        ({"index_head_dim": 256}, ("index_head_dim=256", "must be 128")),
        ({"head_dim": 256}, ("head_dim=256", "must be 512")),
        ({"qk_rope_head_dim": 32}, ("qk_rope_head_dim=32", "must be 64")),
        ({"hidden_size": 4096}, ("hidden_size=4096", "must be 5120")),
        ({"hc_mult": 2}, ("hc_mult=2", "must be 4")),
        ({"num_attention_heads": 130}, ("num_attention_heads=130", "1..128")),
        ({"engram_head_dim": 96}, ("engram_head_dim=96", "steps of 128")),
    ],
    ids=repr,
)
def test_limits_of_kernels_bind_only_the_backend_that_has_them(change: Hf, words: tuple[str, ...]) -> None:
    accepted, other = TextConfig.from_hf(KERNELS), TextConfig.from_hf(KERNELS | change)
    assert Plan.of(accepted, limits=FUSED) == Plan.of(accepted)
    Plan.of(other, limits=REFERENCE)
    refused(lambda: Plan.of(other, limits=FUSED), *words, "fused")


def test_limits_of_a_feature_that_is_off_do_not_bind() -> None:
    candidates = {"candidate_source_layer_id": -1, "candidate_topk_blocks": 0, "candidate_block_size": None}
    engram = {name: None for name in TINY if name.startswith("engram")}
    assert Plan.of(TextConfig.from_hf(KERNELS | candidates | engram), limits=FUSED).layers


@pytest.mark.parametrize(("topk", "remarks"), [(6, 0), (7, 1)])
def test_too_few_candidates_are_a_remark(topk: int, remarks: int) -> None:
    found = plan_of(TINY | {"index_topk": topk}).remarks
    assert len(found) == remarks
    for sentence in found:
        assert all(word in sentence for word in ("candidate_topk_blocks=3", "candidate_block_size=2", "index_topk=7"))


# --- 2.1, 2.4 again, naively, over random plans


def naive_error(hf: Hf) -> str:
    """The rules of 2.4 about layers, in words for the first one broken; nothing when there is none."""
    n, ratios = hf["num_hidden_layers"], hf["compress_ratios"]
    kv, index, candidate = hf["kv_source_layer_ids"], hf["index_source_layer_ids"], hf["candidate_source_layer_id"]
    for found, rule in (
        (any(r not in (0, 1, 2) for r in ratios), "1"),
        (len(ratios) < n, "18"),
        (any(ratios[n:]), "17"),
        (any(list(ids) != sorted(set(ids)) or not set(ids) <= set(range(n)) for ids in (kv, index)), "10"),
    ):
        if found:
            return rule
    compressed = [layer for layer in range(n) if ratios[layer] > 0]
    if compressed and not (kv and index):
        return "2"
    if not set(kv) | set(index) <= set(compressed):
        return "11"
    if not set(kv) <= set(index):
        return "4"
    if compressed and not (compressed[0] in kv and compressed[0] in index):
        return "12"
    if any(ratios[layer] != ratios[naive_latest(kv, layer)] for layer in compressed):
        return "13"
    if any(naive_latest(index, layer) < naive_latest(kv, layer) for layer in compressed):
        return "14"
    if candidate == -1:
        return ""
    if candidate not in kv:
        return "5"
    if candidate < naive_latest(index, candidate):
        return "7"
    if any(naive_latest(kv, s) != naive_latest(kv, candidate) for s in index if candidate < s):
        return "15"
    return ""


def naive_latest(sources: list[int], layer: int) -> int:
    return [source for source in sources if source <= layer][-1]


BARE = {name: value for name, value in TINY.items() if not name.startswith(("engram", "dspark"))}


@st.composite
def valid_plans(draw: st.DrawFn) -> Hf:
    """Layers are appended one at a time, each from what its predecessors allow."""
    ratios: list[int] = [0] * draw(st.integers(0, 3))
    kv: list[int] = []
    index: list[int] = []
    for _ in range(draw(st.integers(1, 4))):
        ratio = draw(st.sampled_from([1, 2]))
        kv.append(len(ratios))
        for role in ["index", *draw(st.lists(st.sampled_from(["index", "reader", "window"]), max_size=5))]:
            if role == "index":
                index.append(len(ratios))
            ratios.append(0 if role == "window" else ratio)
    layers = len(ratios)
    engram = sorted(draw(st.sets(st.integers(0, layers - 1), max_size=2)))
    hf = BARE | {
        "num_hidden_layers": layers,
        "compress_ratios": ratios + [0] * draw(st.integers(0, 3)),
        "kv_source_layer_ids": kv,
        "index_source_layer_ids": index,
        # An older kv source would filter the index sources of younger ones.
        "candidate_source_layer_id": draw(st.sampled_from([-1, kv[-1]])),
    }
    if engram:
        hf |= {name: value for name, value in TINY.items() if name.startswith("engram")}
        hf |= {"engram_layer_ids": engram, "engram_num_embeddings": [1000] * len(engram)}
    return hf


@given(hf=valid_plans())
def test_random_valid_plans_satisfy_the_definitions(hf: Hf) -> None:
    assert naive_error(hf) == ""
    plan = plan_of(hf)
    ratios, kv, index = hf["compress_ratios"], hf["kv_source_layer_ids"], hf["index_source_layer_ids"]
    candidate, engram = hf["candidate_source_layer_id"], hf.get("engram_layer_ids", [])
    assert [role.layer for role in plan.layers] == list(range(hf["num_hidden_layers"]))
    for role in plan.layers:
        layer = role.layer
        assert role.ratio == ratios[layer]
        assert role.kv_source == (naive_latest(kv, layer) if ratios[layer] else None)
        assert role.index_source == (naive_latest(index, layer) if ratios[layer] else None)
        assert (role.is_kv_source, role.is_index_source) == (layer in kv, layer in index)
        assert role.is_candidate_source == (layer == candidate)
        assert role.filtered == (ratios[layer] > 0 and 0 <= candidate < naive_latest(index, layer))
        assert role.engram_slot == (engram.index(layer) if layer in engram else None)
        if role.kv_source is not None and role.index_source is not None:
            assert role.index_source >= role.kv_source  # rule 14
        assert not (role.is_candidate_source and role.filtered)  # rule 7
    assert len(plan.table().splitlines()) == 1 + len(plan.layers)


@given(hf=valid_plans())
def test_a_cut_is_legal_when_no_layer_reads_across_it(hf: Hf) -> None:
    plan = plan_of(hf)
    reads = [(role.layer, s) for role in plan.layers for s in (role.kv_source, role.index_source) if s is not None]
    candidate = hf["candidate_source_layer_id"]
    reads += [(role.layer, candidate) for role in plan.layers if role.filtered]
    legal = [c for c in range(1, len(plan.layers)) if not any(source < c <= reader for reader, source in reads)]
    assert plan.cut_points == tuple(legal)


@st.composite
def mutations(draw: st.DrawFn) -> Hf:
    """A valid plan with one change to one of the fields that the rules are about."""
    hf = dict(draw(valid_plans()))
    field = draw(
        st.sampled_from(
            ["num_hidden_layers", "candidate_source_layer_id"]
            + ["compress_ratios", "kv_source_layer_ids", "index_source_layer_ids"] * 3
        )
    )
    entry = st.integers(0, 3) if field == "compress_ratios" else st.integers(0, hf["num_hidden_layers"])
    if field == "num_hidden_layers":
        hf[field] = max(1, hf[field] + draw(st.sampled_from([-1, 1])))
        for name in [name for name in hf if name.startswith("engram")]:
            del hf[name]
    elif field == "candidate_source_layer_id":
        hf[field] = draw(st.integers(-1, hf["num_hidden_layers"]))
    else:
        entries = list(hf[field])
        at = draw(st.integers(0, len(entries) - 1))
        how = draw(st.sampled_from(["replace", "insert", "delete", "swap"]))
        if how == "insert":
            entries.insert(at, draw(entry))
        elif how == "replace":
            entries[at] = draw(entry)
        elif how == "delete":
            del entries[at]
        else:
            entries[at], entries[-1] = entries[-1], entries[at]
        hf[field] = entries
    return hf


@given(hf=mutations())
def test_a_changed_plan_is_refused_exactly_when_the_naive_rules_are_broken(hf: Hf) -> None:
    expected = naive_error(hf)
    message = ""
    try:
        plan_of(hf)
    except ValueError as refusal:
        message = str(refusal)
    assert bool(message) == bool(expected), (expected, message)


def test_the_mutations_reach_every_rule_a_list_can_break() -> None:
    """Otherwise the test above could pass for want of examples: one witness of each, by hand, on the tiny plan."""
    witnesses = {
        "1": {"compress_ratios": [0, 2, 2, 1, 1, 1, 3, 0, 0]},
        "2": {"kv_source_layer_ids": []},
        "4": {"index_source_layer_ids": [1, 5]},
        "5": {"candidate_source_layer_id": 5},
        "10": {"kv_source_layer_ids": [3, 1]},
        "11": {"index_source_layer_ids": [0, 1, 3, 5]},
        "12": {"kv_source_layer_ids": [3]},
        "13": {"compress_ratios": [0, 2, 1, 1, 1, 1, 1, 0, 0]},
        "15": {"candidate_source_layer_id": 1},
        "17": {"compress_ratios": [0, 2, 2, 1, 1, 1, 1, 0, 1]},
        "18": {"compress_ratios": [0, 2, 2, 1, 1, 1]},
    }
    for rule, change in witnesses.items():
        hf = BARE | change
        assert naive_error(hf) == rule
        refused(lambda hf=hf: plan_of(hf), *change)
