"""Section 1 of the specification: what is read, in which form, and what is refused with which words."""

from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys
from dataclasses import FrozenInstanceError, asdict, astuple
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from weights import SMALL, TINY, TRUNCATED

from kvproof.deepseek_v41.config import Quantisation, RopeParameters, RopeScaling, TextConfig, VisionConfig
from kvproof.deepseek_v41.ops.rope import Rope

YARN = TINY["rope_parameters"]
VISION = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "patch_size": 14,
    "downsample_ratio": 3,
    "max_image_tokens": 64,
    "min_pixels": 0,
    "rope_theta": 10000,
}
FP8 = {
    "quant_method": "fp8",
    "weight_block_size": [32, 32],
    "scale_fmt": "ue8m0",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
}

# Tables 1.2 to 1.4, column "Released"; what is not visible there has a value that its contract allows.
RELEASED: dict[str, Any] = TINY | {
    "num_hidden_layers": 40,
    "hidden_size": 5120,
    "vocab_size": 129280,
    "num_attention_heads": 64,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1280,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "sliding_window": 128,
    "compress_ratios": [0, 0] + [2] * 18 + [1] * 20 + [0] * 3,
    "kv_source_layer_ids": [2, 8, 14, 20],
    "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
    "candidate_source_layer_id": 20,
    "candidate_topk_blocks": 2048,
    "candidate_block_size": 8,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 512,
    "n_routed_experts": 384,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 2304,
    "max_position_embeddings": 1048576,
    "rope_parameters": YARN | {"factor": 16, "original_max_position_embeddings": 65536},
    "image_token_id": 129264,
    "engram_layer_ids": [1, 14],
    "engram_max_ngram_size": 4,
    "engram_n_heads": 8,
    "engram_head_dim": 256,
    "engram_vocab_size": 16000000,
    "engram_num_embeddings": [384006168, 384016682],
    "engram_compressed_vocab_size": 99092,
    "num_nextn_predict_layers": 3,
    "dspark_target_layer_ids": [37, 38, 39],
    "dspark_block_size": 5,
    "dspark_n_routed_experts": 128,
    "dspark_num_experts_per_tok": 3,
    "quantization_config": FP8 | {"expert_dtype": "fp4"},
}

REQUIRED = (
    "num_hidden_layers hidden_size vocab_size num_attention_heads head_dim qk_rope_head_dim q_lora_rank o_groups "
    "o_lora_rank sliding_window compress_ratios index_n_heads index_head_dim index_topk rms_norm_eps n_routed_experts "
    "num_experts_per_tok n_shared_experts moe_intermediate_size scoring_func norm_topk_prob topk_method "
    "routed_scaling_factor hc_mult hc_eps hc_sinkhorn_iters max_position_embeddings rope_theta compress_rope_theta "
    "rope_parameters"
)
NEEDED_BY_A_FEATURE = (
    "candidate_topk_blocks candidate_block_size engram_max_ngram_size engram_n_heads engram_head_dim engram_vocab_size "
    "engram_compressed_vocab_size engram_pad_token_id engram_num_embeddings dspark_block_size "
    "dspark_num_experts_per_tok dspark_markov_rank dspark_noise_token_id"
)
COUNTS = [name for name, value in TINY.items() if type(value) is int]
REALS = [name for name, value in TINY.items() if type(value) is float]
LISTS = [name for name, value in TINY.items() if type(value) is list]
PRIVATE = (
    "kv_source_layers",
    "index_source_layers",
    "candidate_source_layer",
    "engram_pad_id",
    "dspark_n_activated_experts",
)


def refused(hf: dict[str, Any], *words: str) -> str:
    with pytest.raises(ValueError, match="must be") as caught:
        TextConfig.from_hf(hf)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message
    return message


# --- what is accepted


def test_released_values_are_read_field_by_field() -> None:
    config = TextConfig.from_hf(RELEASED)
    different = {"compress_ratios", "rope_parameters", "quantization_config", *LISTS}
    for name in RELEASED.keys() - different:
        assert getattr(config, name) == RELEASED[name], name
    for name in LISTS:
        assert getattr(config, name) == tuple(RELEASED[name]), name
    assert config.quantisation == Quantisation(quant_method="fp8", weight_block_size=(32, 32))
    assert config.quantisation.quant_method == "deepseek_v4_fp8"
    assert config.vision is None


@pytest.mark.parametrize("hf", [TINY, TRUNCATED, SMALL], ids=["tiny", "truncated", "small"])
def test_the_project_s_own_configurations_are_valid(hf: dict[str, Any]) -> None:
    assert TextConfig.from_hf(hf).num_hidden_layers == hf["num_hidden_layers"]


def test_object_flat_mapping_and_nested_file_read_the_same() -> None:
    flat = TINY | {
        "vision_n_layers": 2,
        "vision_dim": 32,
        "vision_n_heads": 2,
        "vision_inter_dim": 48,
        "vision_max_n_token": 64,
        "vision_min_pixels": 0,
    }
    text = TINY | {"model_type": "deepseek_v41_text", "rope_scaling": YARN}
    del text["rope_parameters"]
    nested = {"model_type": "deepseek_v41", "text_config": text, "vision_config": VISION}
    config = TextConfig.from_hf(flat)
    assert config == TextConfig.from_hf(nested) == TextConfig.from_hf(SimpleNamespace(**flat))
    assert hash(config) == hash(TextConfig.from_hf(nested))
    assert config.vision == VisionConfig(
        vision_n_layers=2,
        vision_dim=32,
        vision_n_heads=2,
        vision_inter_dim=48,
        vision_max_n_token=64,
        vision_min_pixels=0,
    )


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        TextConfig.from_hf(TINY).hidden_size = 1  # type: ignore[misc]


def test_integers_are_taken_for_reals_and_kept_as_reals() -> None:
    config = TextConfig.from_hf(TINY | {"rope_theta": 10000, "swiglu_limit": 10, "routed_scaling_factor": 2})
    assert [type(x) for x in (config.rope_theta, config.swiglu_limit, config.routed_scaling_factor)] == [float] * 3


@pytest.mark.parametrize("off", [{}, {"candidate_source_layer_id": -1}, {"candidate_source_layer_id": None}])
def test_without_candidate_source_its_counts_may_be_absent(off: dict[str, Any]) -> None:
    hf = {name: value for name, value in TINY.items() if not name.startswith("candidate")}
    config = TextConfig.from_hf(hf | off)
    assert (config.candidate_source_layer_id, config.candidate_topk_blocks, config.candidate_block_size) == (None, 0, 0)


@pytest.mark.parametrize("prefix", ["engram", "dspark"])
@pytest.mark.parametrize("how", ["absent", "empty"])
def test_a_feature_without_layers_is_off(prefix: str, how: str) -> None:
    hf = {name: value for name, value in TINY.items() if not name.startswith(prefix)}
    layers = {"engram": "engram_layer_ids", "dspark": "dspark_target_layer_ids"}[prefix]
    if how == "empty":
        hf[layers] = []
    assert getattr(TextConfig.from_hf(hf), layers) == ()


def test_absent_swiglu_limit_is_no_clamp() -> None:
    assert TextConfig.from_hf(TINY | {"swiglu_limit": None}).swiglu_limit is None


def test_number_of_draft_layers_and_experts_fall_back_as_upstream() -> None:
    assert TextConfig.from_hf(TINY | {"n_mtp_layers": 4}).num_nextn_predict_layers == 4
    assert TextConfig.from_hf(TINY | {"num_nextn_predict_layers": None}).num_nextn_predict_layers == 3
    for absent in (None, 0):
        assert TextConfig.from_hf(TINY | {"dspark_n_routed_experts": absent}).dspark_n_routed_experts == 8


@pytest.mark.parametrize(("eos", "read"), [(1, (1,)), ([1, 7], (1, 7)), (None, ())])
def test_eos_is_one_id_or_a_list(eos: object, read: tuple[int, ...]) -> None:
    assert TextConfig.from_hf(TINY | {"eos_token_id": eos}).eos_token_id == read


# --- H28, and the names of an older port


def test_the_last_token_may_be_the_image_and_no_pad_id_is_derived_from_it() -> None:
    config = TextConfig.from_hf(TINY | {"image_token_id": 319})
    assert config.image_token_id == 319
    assert 320 not in [value for value in asdict(config).values() if value != config.vocab_size]
    assert not [name for name in asdict(config) if "image" in name and "pad" in name]


def test_names_of_an_older_port_do_not_exist_and_are_no_aliases() -> None:
    config = TextConfig.from_hf(TINY | dict.fromkeys(PRIVATE, 6))
    assert config == TextConfig.from_hf(TINY)
    assert [name for name in PRIVATE if hasattr(config, name)] == []


# --- what is missing (finding H11: never by assert, never later)


@pytest.mark.parametrize("how", ["absent", "null"])
@pytest.mark.parametrize("name", REQUIRED.split())
def test_a_required_field_is_missed_by_name(name: str, how: str) -> None:
    hf = {key: value for key, value in TINY.items() if key != name or how == "null"}
    refused(hf | ({name: None} if how == "null" else {}), f"{name}=None")


@pytest.mark.parametrize("name", NEEDED_BY_A_FEATURE.split())
def test_a_field_is_missed_by_name_when_its_feature_is_on(name: str) -> None:
    feature = {"c": "candidate_source_layer_id", "e": "engram_layer_ids", "d": "dspark_target_layer_ids"}[name[0]]
    refused({key: value for key, value in TINY.items() if key != name}, name, feature)


def test_a_tower_needs_the_image_token() -> None:
    hf = {name: value for name, value in TINY.items() if name != "image_token_id"}
    TextConfig.from_hf(hf)
    refused(hf | {"vision_n_layers": 1}, "image_token_id=None", "vision")


# --- types: a bool is no integer, "1" is not 1


@pytest.mark.parametrize("wrong", [True, "1", 1.0, [1]], ids=repr)
@pytest.mark.parametrize("name", COUNTS)
def test_a_count_is_an_integer_and_nothing_else(name: str, wrong: object) -> None:
    refused(TINY | {name: wrong}, name, repr(wrong))


@pytest.mark.parametrize("wrong", [True, "1.5", float("nan"), float("inf"), -float("inf"), 10**400, 0, -1.0])
@pytest.mark.parametrize("name", REALS)
def test_a_real_is_finite_positive_and_no_string(name: str, wrong: object) -> None:
    refused(TINY | {name: wrong}, f"{name}=", "a finite number >")


@pytest.mark.parametrize("wrong", [1, "12", {1: 2}, {1, 2}], ids=repr)
@pytest.mark.parametrize("name", LISTS)
def test_a_list_is_a_list(name: str, wrong: object) -> None:
    refused(TINY | {name: wrong}, f"{name}={wrong!r}", "a list")


@pytest.mark.parametrize("wrong", [True, "1", 1.0, None, -1], ids=repr)
@pytest.mark.parametrize("name", LISTS)
def test_an_entry_of_a_list_is_an_integer_and_is_named(name: str, wrong: object) -> None:
    entries = [*TINY[name][:1], wrong]
    refused(TINY | {name: entries}, f"{name}[1]={wrong!r}")


@pytest.mark.parametrize("wrong", [0, 1, "true"], ids=repr)
def test_a_flag_is_a_bool(wrong: object) -> None:
    refused(TINY | {"norm_topk_prob": wrong}, f"norm_topk_prob={wrong!r}", "true or false")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(name=st.sampled_from([*TINY, "quantization_config", "expert_dtype", "eos_token_id", "n_mtp_layers"]), value=JSON)
def test_any_json_in_any_field_is_read_or_refused_in_one_line(name: str, value: object) -> None:
    message = ""
    try:
        config = TextConfig.from_hf(TINY | {name: value})
    except ValueError as refusal:
        message = str(refusal)
    if message:
        assert re.fullmatch(r"[^\n]+=[^\n]+: must be [^\n]+", message), message
    else:
        # What is accepted is in canonical form: making it again from its own fields changes nothing.
        assert TextConfig(**{field: getattr(config, field) for field in asdict(config)}) == config


# --- limits, one change each


LIMITS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"num_hidden_layers": 0}, ("num_hidden_layers=0", ">= 1")),
    ({"vocab_size": 300}, ("image_token_id=300", "vocab_size=300")),
    ({"image_token_id": 320}, ("image_token_id=320", "vocab_size=320")),
    ({"bos_token_id": 320}, ("bos_token_id=320", "vocab_size=320")),
    ({"eos_token_id": [1, 320]}, ("eos_token_id=(1, 320)", "vocab_size=320")),
    ({"pad_token_id": -1}, ("pad_token_id=-1", ">= 0")),
    ({"pad_token_id": 320}, ("pad_token_id=320", "vocab_size=320")),
    ({"dspark_n_routed_experts": -1}, ("dspark_n_routed_experts=-1", ">= 0")),
    ({"dspark_noise_token_id": 320}, ("dspark_noise_token_id=320", "vocab_size=320")),
    ({"num_key_value_heads": 2}, ("num_key_value_heads=2", "must be 1")),
    ({"head_dim": 31}, ("head_dim=31", "even")),
    ({"head_dim": 8}, ("head_dim=8", "qk_rope_head_dim=8")),
    ({"qk_rope_head_dim": 7}, ("qk_rope_head_dim=7", "even")),
    ({"qk_rope_head_dim": 0}, ("qk_rope_head_dim=0", ">= 1")),
    ({"index_head_dim": 6}, ("qk_rope_head_dim=8", "index_head_dim=6")),
    ({"index_head_dim": 8, "qk_rope_head_dim": 16}, ("qk_rope_head_dim=16", "index_head_dim=8")),  # H3
    ({"o_groups": 3}, ("o_groups=3", "num_attention_heads=4")),
    ({"sliding_window": 0}, ("sliding_window=0", ">= 1")),
    ({"compress_ratios": [0, 2, 2, 1, 1, 1, 4, 0, 0]}, ("compress_ratios[6]=4", "0 or 1 or 2")),
    ({"compress_ratios": [0, 2, 2, 1, 1, 1]}, ("compress_ratios=", "num_hidden_layers=7")),
    ({"compress_ratios": [0, 2, 2, 1, 1, 1, 1, 0, 1]}, ("compress_ratios=", "num_hidden_layers=7", "draft")),
    ({"n_shared_experts": -1}, ("n_shared_experts=-1", ">= 0")),
    ({"num_experts_per_tok": 9}, ("num_experts_per_tok=9", "n_routed_experts=8")),
    ({"scoring_func": "sigmoid"}, ("scoring_func='sigmoid'", "sqrtsoftplus")),
    ({"topk_method": "greedy"}, ("topk_method='greedy'", "noaux_tc")),
    ({"hidden_act": "gelu"}, ("hidden_act='gelu'", "silu")),
    ({"n_group": 2}, ("n_group=2", "must be 1")),
    ({"topk_group": 2}, ("topk_group=2", "must be 1")),
    ({"num_hash_layers": 3}, ("num_hash_layers=3", "must be 0")),
    ({"tie_word_embeddings": True}, ("tie_word_embeddings=True", "must be False")),
    ({"rope_theta": 1.0}, ("rope_theta=1.0", "> 1")),
    ({"candidate_source_layer_id": -2}, ("candidate_source_layer_id=-2", ">= 0")),
    ({"engram_layer_ids": [3, 1]}, ("engram_layer_ids=(3, 1)", "strictly increasing")),
    ({"engram_layer_ids": [1, 7]}, ("engram_layer_ids=(1, 7)", "num_hidden_layers=7")),
    ({"engram_max_ngram_size": 1}, ("engram_max_ngram_size=1", ">= 2")),
    ({"engram_n_heads": 0}, ("engram_n_heads=0", ">= 1")),
    ({"engram_head_dim": 48}, ("engram_head_dim=48", "multiple of 32")),
    ({"engram_compressed_vocab_size": 321}, ("engram_compressed_vocab_size=321", "vocab_size=320")),
    ({"engram_pad_token_id": -1}, ("engram_pad_token_id=-1", ">= 0")),  # H19
    ({"engram_pad_token_id": 320}, ("engram_pad_token_id=320", "vocab_size=320")),  # H19
    ({"engram_pad_token_id": 300}, ("engram_pad_token_id=300", "image_token_id=300")),  # H19
    ({"engram_num_embeddings": [272]}, ("engram_num_embeddings=(272,)", "engram_layer_ids=(1, 3)")),
    ({"engram_num_embeddings": [271, 348]}, ("engram_num_embeddings=(271, 348)", "[272, 348]")),  # H23
    ({"engram_num_embeddings": [272, 347]}, ("engram_num_embeddings=(272, 347)", "[272, 348]")),  # H23
    ({"engram_num_embeddings": [100, 348]}, ("engram_num_embeddings=(100, 348)", "engram_vocab_size=61")),
    ({"engram_vocab_size": 10**18}, ("engram_num_embeddings=(272, 348)", "engram_vocab_size=1000000000000000000")),
    ({"engram_rotation_config": {"delta_basis": "x"}}, ("engram_rotation_config=", "absent")),  # H26
    ({"dspark_target_layer_ids": [5, 4]}, ("dspark_target_layer_ids=(5, 4)", "strictly increasing")),
    ({"dspark_target_layer_ids": [4, 4]}, ("dspark_target_layer_ids=(4, 4)", "strictly increasing")),
    ({"dspark_target_layer_ids": [8]}, ("dspark_target_layer_ids=(8,)", "<= num_hidden_layers=7")),
    ({"dspark_num_experts_per_tok": 5}, ("dspark_num_experts_per_tok=5", "dspark_n_routed_experts=4")),
    ({"num_nextn_predict_layers": 0}, ("num_nextn_predict_layers=0", ">= 1")),
    ({"dspark_draft_topk": 0}, ("dspark_draft_topk=0", ">= 1")),
    ({"draft_vocab_size": 319}, ("draft_vocab_size=319", "vocab_size=320")),
    ({"vision_n_layers": -1}, ("vision_n_layers=-1", ">= 1")),
    ({"vision_n_layers": True}, ("vision_n_layers=True", "integer")),
    ({"vision_n_layers": 2, "vision_max_n_token": 3}, ("vision_max_n_token=3", ">= 4")),
    ({"vision_n_layers": 2, "vision_dim": 36, "vision_n_heads": 6}, ("vision_dim=36", "vision_n_heads=6")),
    ({"vision_n_layers": 2, "vision_patch_size": 0}, ("vision_patch_size=0", ">= 1")),
    ({"vision_n_layers": 2, "vision_max_wh_ratio": 0}, ("vision_max_wh_ratio=0", "> 0")),
    ({"text_config": [1]}, ("text_config=[1]", "mapping")),
]


@pytest.mark.parametrize(("change", "words"), LIMITS, ids=[repr(change) for change, _ in LIMITS])
def test_a_value_beyond_its_limit_is_refused(change: dict[str, Any], words: tuple[str, ...]) -> None:
    refused(TINY | change, *words)


@pytest.mark.parametrize(
    "change",
    [
        {"dspark_target_layer_ids": [5, 7]},  # the end of the last layer
        {"qk_rope_head_dim": 16},  # equal to index_head_dim
        {"num_experts_per_tok": 8},
        {"candidate_source_layer_id": -1, "candidate_block_size": 0},
        {"n_shared_experts": 0},
        {"norm_topk_prob": False},
        {"draft_vocab_size": 320},
        {"engram_pad_token_id": 319},
        {"hidden_size": 60},  # unquantised
    ],
    ids=repr,
)
def test_a_value_at_its_limit_is_accepted(change: dict[str, Any]) -> None:
    TextConfig.from_hf(TINY | change)


# --- 1.6


def test_rope_of_the_two_kinds_of_layers_from_the_flat_form() -> None:
    config = TextConfig.from_hf(RELEASED)
    assert config.rope(0) == RopeParameters(10000.0, 1.0, 1048576, 32.0, 1.0, scaled=False)
    assert config.rope(1) == config.rope(2) == RopeParameters(160000.0, 16.0, 65536, 32.0, 1.0, scaled=True)
    assert Rope(config.qk_rope_head_dim, *astuple(config.rope(2))).ramp_bounds() == (15, 25)


def test_each_kind_of_layer_reads_its_own_sub_dict() -> None:
    main = {"rope_type": "default"}
    for compress, scaled in ((YARN, True), ({"rope_type": "default"}, False)):
        # transformers adds keys beside the two; they mean nothing.
        both = {"main": main, "compress": compress, "rope_theta": 1.5, "rope_type": "default"}
        config = TextConfig.from_hf(TINY | {"rope_parameters": both})
        assert config.rope(1).scaled is scaled
        assert (config.rope(0).theta, config.rope(1).theta) == (10000.0, 160000.0)


def test_rope_scaling_comes_before_rope_parameters() -> None:
    config = TextConfig.from_hf(TINY | {"rope_scaling": YARN | {"factor": 8}})
    assert config.rope(1).factor == 8.0


def test_rope_defaults() -> None:
    config = TextConfig.from_hf(TINY | {"rope_parameters": {"rope_type": "yarn"}})
    assert config.rope(2) == RopeParameters(160000.0, 1.0, 256, 32.0, 1.0, scaled=True)


ROPE_FAULTS: list[tuple[Any, tuple[str, ...]]] = [
    ("yarn", ("rope_parameters='yarn'", "mapping")),
    ({}, ("rope_type=None", "'default'")),
    ({"rope_type": "linear", "factor": 2}, ("rope_type='linear'", "'yarn'")),
    (YARN | {"factor": 0.5}, ("factor=0.5", ">= 1")),
    (YARN | {"factor": True}, ("factor=True", ">= 1")),
    (YARN | {"original_max_position_embeddings": 0}, ("original_max_position_embeddings=0", ">= 1")),
    (YARN | {"original_max_position_embeddings": 64.0}, ("original_max_position_embeddings=64.0", "integer")),
    (YARN | {"beta_slow": 0}, ("beta_slow=0", "> 0")),
    (YARN | {"beta_fast": 1}, ("beta_fast=1.0", "beta_slow=1.0")),
    ({"main": YARN}, ("rope_parameters=None", "mapping")),
    ({"compress": YARN}, ("rope_parameters=None", "mapping")),
    ({"main": YARN | {"factor": 0}, "compress": YARN}, ("factor=0", ">= 1")),
]


@pytest.mark.parametrize(("rope", "words"), ROPE_FAULTS, ids=[repr(rope) for rope, _ in ROPE_FAULTS])
def test_rope_parameters_beyond_their_limits(rope: Any, words: tuple[str, ...]) -> None:
    refused(TINY | {"rope_parameters": rope}, *words)


def test_rope_scaling_keeps_what_the_file_says() -> None:
    assert RopeScaling.of(YARN | {"mscale": 3.0}) == RopeScaling(
        rope_type="yarn", factor=4.0, original_max_position_embeddings=64, beta_fast=32.0, beta_slow=1.0
    )


# --- 1.7


@pytest.mark.parametrize("nothing", [None, {}, {"quant_method": "none"}], ids=repr)
def test_no_quantisation(nothing: Any) -> None:
    assert Quantisation.of(nothing) == Quantisation()
    assert not Quantisation.of(nothing).quantised


@pytest.mark.parametrize("method", ["fp8", "deepseek_v4_fp8"])
def test_both_names_of_the_fp8_method_are_one(method: str) -> None:
    read = Quantisation.of(FP8 | {"quant_method": method})
    assert read.quant_method == "deepseek_v4_fp8"
    assert read.quantised
    assert read.expert_dtype == "fp4"


def test_layers_left_unquantised_under_either_name() -> None:
    names = ["layers.0.attn.wo_a", "head"]
    assert Quantisation.of(FP8 | {"ignored_layers": names}).ignored_layers == tuple(names)
    assert Quantisation.of(FP8 | {"modules_to_not_convert": names}).ignored_layers == tuple(names)
    assert Quantisation.of(FP8 | {"ignored_layers": names, "modules_to_not_convert": ["x"]}).ignored_layers == (*names,)


def test_expert_dtype_beside_the_mapping_comes_first() -> None:
    hf = TINY | {"quantization_config": FP8 | {"expert_dtype": "fp4"}}
    assert TextConfig.from_hf(hf).quantisation.expert_dtype == "fp4"
    assert TextConfig.from_hf(hf | {"expert_dtype": "fp8"}).quantisation.expert_dtype == "fp8"
    assert TextConfig.from_hf(TINY | {"expert_dtype": "fp8"}).quantisation == Quantisation(expert_dtype="fp8")


QUANTISATION_FAULTS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"quantization_config": "fp8"}, ("quantization_config='fp8'", "mapping")),
    ({"quantization_config": {"weight_block_size": [32, 32]}}, ("quant_method=None", "'fp8'")),
    ({"quantization_config": FP8 | {"quant_method": "quark"}}, ("quant_method='quark'", "'fp8'")),
    ({"quantization_config": FP8 | {"weight_block_size": None}}, ("weight_block_size=None", "[32, 32]")),
    ({"quantization_config": FP8 | {"weight_block_size": [128, 128]}}, ("weight_block_size=(128, 128)", "[32, 32]")),
    ({"quantization_config": FP8 | {"weight_block_size": [32]}}, ("weight_block_size=(32,)", "[32, 32]")),
    ({"quantization_config": FP8 | {"weight_block_size": [32, True]}}, ("weight_block_size[1]=True", "integer")),
    ({"quantization_config": FP8 | {"scale_fmt": "fp32"}}, ("scale_fmt='fp32'", "'ue8m0'")),
    ({"quantization_config": FP8 | {"activation_scheme": "static"}}, ("activation_scheme='static'", "'dynamic'")),
    ({"quantization_config": FP8 | {"expert_dtype": "int4"}}, ("expert_dtype='int4'", "'fp4' or 'fp8'")),
    ({"quantization_config": FP8 | {"moe_quant_algo": "NVFP4"}}, ("moe_quant_algo='NVFP4'", "absent")),
    ({"quantization_config": FP8 | {"ignored_layers": "head"}}, ("ignored_layers='head'", "list")),
    ({"quantization_config": FP8 | {"ignored_layers": [3]}}, ("ignored_layers[0]=3", "name")),
    ({"expert_dtype": "int4"}, ("expert_dtype='int4'", "'fp4' or 'fp8'")),
    ({"hidden_size": 72, "quantization_config": FP8}, ("hidden_size=72", "multiple of 32")),
    ({"moe_intermediate_size": 48, "quantization_config": FP8}, ("moe_intermediate_size=48", "multiple of 32")),
]


@pytest.mark.parametrize(
    ("change", "words"), QUANTISATION_FAULTS, ids=[repr(change) for change, _ in QUANTISATION_FAULTS]
)
def test_quantisation_beyond_its_limits(change: dict[str, Any], words: tuple[str, ...]) -> None:
    refused(TINY | change, *words)


def test_fp8_experts_may_have_any_width() -> None:
    hf = TINY | {"moe_intermediate_size": 48, "quantization_config": FP8, "expert_dtype": "fp8"}
    assert TextConfig.from_hf(hf).moe_intermediate_size == 48


# --- the same through vLLM's own configuration class

FILES: dict[str, dict[str, Any]] = {
    "tiny": {"text_config": TINY},
    "rope_scaling": {
        "text_config": {name: value for name, value in TINY.items() if name != "rope_parameters"}
        | {"rope_scaling": YARN},
    },
    "two ropes": {"text_config": TINY | {"rope_parameters": {"main": {"rope_type": "default"}, "compress": YARN}}},
    "quantised": {"text_config": SMALL, "quantization_config": FP8 | {"expert_dtype": "fp8"}},
    "expert_dtype in text": {"text_config": TRUNCATED | {"expert_dtype": "fp8"}, "quantization_config": FP8},
    "vision": {"text_config": TINY | {"eos_token_id": 1}, "vision_config": VISION},
    "released": {
        "text_config": {name: value for name, value in RELEASED.items() if name != "quantization_config"},
        "quantization_config": RELEASED["quantization_config"],
    },
}

THROUGH_VLLM = f"""
import json, pathlib, pickle, sys
from vllm.transformers_utils.config import get_config
from vllm.transformers_utils.configs.deepseek_v41 import DeepseekV41Config
from kvproof.deepseek_v41.config import TextConfig

root = pathlib.Path(sys.argv[1])
results = {{}}
for name, file in json.loads((root / "files.json").read_text()).items():
    directory = root / name
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(file))
    for way, read in (
        ("class", DeepseekV41Config.from_pretrained),
        ("engine", lambda path: get_config(str(path), trust_remote_code=False)),
    ):
        hf = read(directory)
        private = [private for private in {PRIVATE!r} if hasattr(hf, private)]
        results[name, way] = type(hf).__name__, private, TextConfig.from_hf(hf)
(root / "results.pickle").write_bytes(pickle.dumps(results))
"""


@pytest.fixture(scope="module")
def through_vllm(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], tuple[str, list[str], TextConfig]]:
    root = tmp_path_factory.mktemp("v41_config")
    outer = {"model_type": "deepseek_v41", "architectures": ["DeepseekV41ForCausalLM"]}
    (root / "files.json").write_text(json.dumps({name: outer | file for name, file in FILES.items()}))
    run = subprocess.run([sys.executable, "-c", THROUGH_VLLM, str(root)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    return pickle.loads((root / "results.pickle").read_bytes())


@pytest.mark.parametrize("way", ["class", "engine"])
@pytest.mark.parametrize("name", FILES)
def test_vllm_s_configuration_object_reads_as_the_file_does(through_vllm: Any, name: str, way: str) -> None:
    kind, private, config = through_vllm[name, way]
    assert kind == "DeepseekV41Config"
    assert private == []
    assert config == TextConfig.from_hf(FILES[name])
