"""``kvproof zoo make``: the released tensors, a tokenizer that loses nothing, the same bytes every time."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors import safe_open
from tokenizers import Tokenizer

from kvproof import zoo
from kvproof.cli import zoo as command
from kvproof.zoo import deepseek_v41, stored, tokenizer

MODELS = ("deepseek-v41-tiny", "deepseek-v41-small")
E8M0_ONE = 127

# Specification 9.1, text part, written down once more with the widths of the two models (they share them):
# V 320, H 64, heads 4 × 32, q_lora 32, groups 2 × 16, index heads 2 × 16, experts 8 × 32, four copies.
# "*" marks what the quantised form stores as FP8, "#" as MXFP4; "!" is float32 in every form.
EVERY_LAYER = """
attn_norm.weight 64                     ffn_norm.weight 64
hc_attn_fn! 24x256                      hc_ffn_fn! 24x256
hc_attn_base! 24                        hc_ffn_base! 24
hc_attn_scale! 3                        hc_ffn_scale! 3
attn.wq_a.weight* 32x64                 attn.q_norm.weight 32
attn.wq_b.weight* 128x32                attn.wkv.weight* 32x64
attn.kv_norm.weight 32                  attn.attn_sink! 4
attn.wo_a.weight* 32x64                 attn.wo_b.weight* 64x32
ffn.gate.weight 8x64                    ffn.gate.bias! 8
ffn.shared_experts.w1.weight* 32x64     ffn.shared_experts.w2.weight* 64x32
ffn.shared_experts.w3.weight* 32x64
"""
EVERY_EXPERT = "w1.weight# 32x64  w2.weight# 64x32  w3.weight# 32x64"
KV_SOURCE = """
attn.compressor.wkv.weight 32x64        attn.compressor.norm.weight 32
attn.indexer.wk.weight 16x32            attn.indexer.k_norm.weight 16
"""
RATIO_2_SOURCE = "attn.compressor.wgate.weight 32x64"
INDEX_SOURCE = "attn.indexer.wq_b.weight* 32x32  attn.indexer.weights_proj.weight 2x64"
ONCE = "embed.weight 320x64  head.weight 320x64  norm.weight 64"
ROLES = {
    "deepseek-v41-tiny": (7, {1}, {1, 3}, {1, 3, 5}),
    "deepseek-v41-small": (40, {2, 8, 14}, {2, 8, 14, 20}, {2, 8, 14, 20, 24, 28, 32, 36}),
}
"""Layers, ratio-2 sources, kv sources, index sources."""

Described = tuple[str, tuple[int, ...]]


def expected(model: str, plain: str, quantized: bool) -> dict[str, Described]:
    """Name -> (dtype, shape) of every tensor."""
    layers, ratio_2, kv, index = ROLES[model]
    lines = [("", ONCE)]
    for layer in range(layers):
        prefix = f"layers.{layer}."
        lines.append((prefix, EVERY_LAYER))
        lines += [(f"{prefix}ffn.experts.{expert}.", EVERY_EXPERT) for expert in range(8)]
        lines += [(prefix, text) for found, text in ((kv, KV_SOURCE), (ratio_2, RATIO_2_SOURCE)) if layer in found]
        lines += [(prefix, INDEX_SOURCE)] if layer in index else []
    table: dict[str, Described] = {}
    for prefix, text in lines:
        for name, mark, size in re.findall(r"([\w.]+)([*#!]?) ([\dx]+)", text):
            shape = tuple(int(part) for part in size.split("x"))
            name = prefix + name
            assert name not in table
            table[name] = ("F32" if mark == "!" else plain, shape)
            if quantized and mark in ("*", "#"):
                rows, columns = shape
                scale = name.removesuffix("weight") + "scale"
                table[scale] = ("F8_E8M0", (rows // 32 if mark == "*" else rows, columns // 32))
                table[name] = ("F8_E4M3", shape) if mark == "*" else ("U8", (rows, columns // 2))
    return table


def files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.safetensors"))


def entries(directory: Path) -> Iterator[tuple[str, str, Described]]:
    """(file, tensor name, (dtype, shape)) of all files, as the safetensors library reads them."""
    for path in files(directory):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  a safe_open object cannot be iterated
                part = file.get_slice(name)
                yield path.name, name, (part.get_dtype(), tuple(part.get_shape()))


def loaded(directory: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for path in files(directory):
        with safe_open(path, framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return tensors


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function (model, options) -> directory; each checkpoint is written once."""
    root = tmp_path_factory.mktemp("made")
    known: dict[str, Path] = {}

    def one(model: str, **options: Any) -> Path:
        key = f"{model}-{options}"
        if key not in known:
            known[key] = deepseek_v41.make(model, root / str(len(known)), **options)
        return known[key]

    return one


FORMS = {
    "bfloat16": ("BF16", {}),
    "float32": ("F32", {"dtype": "float32"}),
    "quantized": ("BF16", {"quantized": True}),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("model", MODELS)
def test_every_tensor_stands_once_with_the_released_name_shape_and_dtype(model: str, form: str, made: Any) -> None:
    plain, options = FORMS[form]
    directory = made(model, **options)
    found = list(entries(directory))
    names = [name for _, name, _ in found]
    assert len(names) == len(set(names))
    assert {name: described for _, name, described in found} == expected(model, plain, form == "quantized")

    index = json.loads((directory / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {name: file for file, name, _ in found}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in loaded(directory).values())
    shards = [path.name for path in files(directory)]
    assert len(shards) > 1
    assert shards == [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("model", MODELS)
def test_the_config_is_the_bundled_one_with_the_form_of_the_weights(model: str, form: str, made: Any) -> None:
    directory = made(model, **FORMS[form][1])
    config = json.loads((directory / "config.json").read_text())
    quantization = config.pop("quantization_config", None)
    assert (quantization is not None) == (form == "quantized")
    if quantization:
        assert quantization == zoo.describe("deepseek-v4.1").config["quantization_config"]
    assert config.pop("torch_dtype") == ("float32" if form == "float32" else "bfloat16")
    assert config == {key: value for key, value in zoo.describe(model).config.items() if key != "torch_dtype"}
    ends = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    assert json.loads((directory / "generation_config.json").read_text()) == ends
    assert ends.items() <= config.items()
    others = {"config.json", "generation_config.json", "model.safetensors.index.json"}
    others |= {"tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in directory.iterdir()} == others | {path.name for path in files(directory)}


def test_small_has_the_released_topology() -> None:
    small, released = (zoo.describe(name).config["text_config"] for name in ("deepseek-v41-small", "deepseek-v4.1"))
    for field in ("num_hidden_layers", "compress_ratios", "kv_source_layer_ids", "index_source_layer_ids"):
        assert small[field] == released[field]
    assert small["candidate_source_layer_id"] == released["candidate_source_layer_id"]


# Values


def test_the_laws_of_the_values(made: Any) -> None:
    for name, tensor in loaded(made("deepseek-v41-small", dtype="float32")).items():
        values = tensor.numpy()
        assert np.isfinite(values).all()
        if name.endswith("norm.weight"):
            assert abs(values.mean() - 1) < 0.11, name
            assert 0.05 < values.std() < 0.2, name
        elif re.search(r"hc_\w+_scale$", name):
            assert values.min() >= 0.5, name
        elif re.search(r"base$|sink$|bias$", name):
            assert 0 < np.abs(values).max() < 0.6, name
        elif name != "embed.weight":
            layers = 40 if re.search(r"wo_b|w2", name) else 1
            assert values.std() == pytest.approx((values.shape[1] * layers) ** -0.5, rel=0.25), name
        else:
            assert values.std() == pytest.approx(1, rel=0.05)


def test_a_tensor_is_like_no_other(made: Any) -> None:
    tensors = loaded(made("deepseek-v41-small", dtype="float32"))
    assert len({tensor.numpy().tobytes() for tensor in tensors.values()}) == len(tensors)


def test_bfloat16_is_the_rounded_float32(made: Any) -> None:
    exact, rounded = (loaded(made("deepseek-v41-tiny", dtype=dtype)) for dtype in ("float32", "bfloat16"))
    for name, tensor in rounded.items():
        assert torch.equal(tensor, exact[name].to(tensor.dtype)), name


def e4m3(codes: np.ndarray) -> np.ndarray:
    """Value of each byte, from its fields: sign, 4 bits of exponent, 3 of mantissa."""
    sign, exponent, mantissa = codes >> 7, codes >> 3 & 15, codes & 7
    assert not ((exponent == 15) & (mantissa == 7)).any(), "NaN"
    normal = (1 + mantissa / 8) * 2.0 ** (exponent.astype(int) - 7)
    return (1 - 2.0 * sign) * np.where(exponent == 0, mantissa / 8 * 2.0**-6, normal)


def e2m1(packed: np.ndarray) -> np.ndarray:
    """Values of each byte's two nibbles, the low one first."""
    table = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    table += [-value for value in table]
    return np.array([[table[code] for byte in row for code in (byte & 15, byte >> 4)] for row in packed.tolist()])


def power(scale: np.ndarray) -> np.ndarray:
    assert scale.max() < 255, "NaN"
    return 2.0 ** (scale.astype(int) - E8M0_ONE)


def check_e4m3(values: np.ndarray, codes: np.ndarray, scale: np.ndarray, block: tuple[int, int]) -> None:
    """``codes`` and ``scale`` stand for ``values`` as exactly as the format can."""
    assert scale.shape == (-(-values.shape[0] // block[0]), -(-values.shape[1] // block[1]))
    for i, j in np.ndindex(scale.shape):
        place = np.s_[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
        unit, part = power(scale[i, j]), values[place].astype(np.float64)
        # Half of the last of three mantissa bits; below the smallest normal value, half of the fixed step.
        assert (np.abs(e4m3(codes[place]) * unit - part) <= np.maximum(np.abs(part) / 16, unit * 2.0**-10)).all()
        if not part.any():
            assert unit == 1
        elif scale[i, j] > 0:
            assert 224 * unit < np.abs(part).max() <= 448 * unit, "the smallest scale without overflow"


def test_the_quantised_form_stands_for_the_same_numbers(made: Any) -> None:
    exact = {name: tensor.numpy() for name, tensor in loaded(made("deepseek-v41-tiny", dtype="float32")).items()}
    coded = loaded(made("deepseek-v41-tiny", dtype="float32", quantized=True))
    seen = {"F8": 0, "FP4": 0, "same": 0}
    for name, values in exact.items():
        weight, scale = coded[name], coded.get(name.removesuffix("weight") + "scale")
        if scale is None:
            seen["same"] += 1
            assert np.array_equal(weight.numpy(), values), name
            continue
        exponents = scale.view(torch.uint8).numpy()
        if weight.dtype == torch.uint8:
            seen["FP4"] += 1
            unit = np.repeat(power(exponents), 32, axis=1)
            size = np.abs(values) / unit
            step = np.where(size <= 2, 0.5, np.where(size <= 4, 1, 2))
            assert (np.abs(e2m1(weight.numpy()) - values / unit) <= step / 2).all(), name
            largest = size.reshape(size.shape[0], -1, 32).max(axis=2)
            assert ((largest > 3) & (largest <= 6)).all(), name
        else:
            seen["F8"] += 1
            check_e4m3(values, weight.view(torch.uint8).numpy(), exponents, (32, 32))
    assert seen == {"F8": 7 * 8 + 3, "FP4": 7 * 8 * 3, "same": len(exact) - (7 * 8 + 3) - 7 * 8 * 3}


magnitudes = st.sampled_from([0.0, 1e-38, 1e-6, 0.1, 1.0, 448.0, 1e6])


@given(st.integers(0, 2**32 - 1), st.integers(1, 70), st.integers(1, 70), magnitudes, magnitudes)
@example(0, 1, 1, 0.0, 0.0)
def test_fp8_of_any_shape(seed: int, rows: int, columns: int, loud: float, quiet: float) -> None:
    random = np.random.default_rng(seed)
    values = random.choice([loud, quiet], (rows, columns)) * random.normal(size=(rows, columns))
    for block in ((32, 32), (1, 32)):
        weight, scale = stored.fp8_blocks(values, block)
        check_e4m3(values, weight.codes, scale.codes, block)


@given(st.lists(st.floats(-448, 448, width=32), min_size=1, max_size=64))
@example([448.0, 432.0, 416.0, 2.0**-9, 2.0**-10, 3 * 2.0**-10, -0.0])
def test_fp8_rounds_as_torch_does(values: list[float]) -> None:
    block = np.array([[448.0, *values]])  # 448 makes the scale 1
    weight, scale = stored.fp8_blocks(block, (1, 128))
    assert scale.codes.tolist() == [[E8M0_ONE]]
    theirs = torch.tensor(block, dtype=torch.float32).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert weight.codes.tolist() == theirs.tolist()


@given(st.lists(st.floats(-6, 6), min_size=31, max_size=31))
@example([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5.0, *[0.0] * 17])
def test_mxfp4_takes_the_nearest_value(values: list[float]) -> None:
    weight, scale = stored.mxfp4(np.array([[6.0, *values]]))
    assert scale.codes.tolist() == [[E8M0_ONE]]
    grid = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
    for value, coded in zip(values, e2m1(weight.codes)[0][1:], strict=True):
        nearest = [at for at in grid if abs(at - abs(value)) == min(abs(other - abs(value)) for other in grid)]
        even = [at for at in nearest if len(nearest) == 1 or grid.index(at) % 2 == 0]
        assert [abs(coded)] == even
        assert coded == 0 or (coded < 0) == (value < 0)


def test_mxfp4_refuses_a_broken_group() -> None:
    with pytest.raises(ValueError, match=r"row of 33 values, must be a multiple of 32"):
        stored.mxfp4(np.zeros((2, 33)))


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=50))
@example([1.00390625, 1.01171875, -0.0, 0.0, 1e-40])
def test_bfloat16_rounds_as_torch_does(values: list[float]) -> None:
    theirs = torch.tensor(values, dtype=torch.float32).to(torch.bfloat16).view(torch.uint16).numpy()
    assert stored.bfloat16(np.array(values)).codes.tolist() == theirs.tolist()


def test_engram_is_one_more_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = zoo.describe("deepseek-v41-tiny")
    engram = {
        "engram_layer_ids": [1, 3],
        "engram_num_embeddings": [272, 348],
        "engram_max_ngram_size": 3,
        "engram_n_heads": 2,
        "engram_head_dim": 32,
    }
    text = {**tiny.config["text_config"], **engram}
    monkeypatch.setattr(zoo, "describe", lambda name: replace(tiny, config={**tiny.config, "text_config": text}))
    directory = deepseek_v41.make(tiny.name, tmp_path / "model", quantized=True)
    found = {name: described for _, name, described in entries(directory) if "engram" in name}
    table: dict[str, Described] = {}
    for layer, rows in ((1, 272), (3, 348)):
        table |= {
            f"layers.{layer}.engram.embed.weight": ("F8_E4M3", (rows, 32)),
            f"layers.{layer}.engram.embed.scale": ("F8_E8M0", (rows, 1)),
            f"layers.{layer}.engram.wkv.weight": ("F8_E4M3", (320, 128)),
            f"layers.{layer}.engram.wkv.scale": ("F8_E8M0", (10, 4)),
            f"layers.{layer}.engram.q_weight": ("BF16", (4, 64)),
            f"layers.{layer}.engram.k_weight": ("BF16", (4, 64)),
        }
    assert found == table


# Tokenizer

SPECIAL = [
    *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"),
    *("<｜System｜>", "<｜User｜>", "<｜Assistant｜>", "<｜latest_reminder｜>"),
    *("<｜action｜>", "<｜query｜>", "<｜authority｜>", "<｜domain｜>", "<｜title｜>", "<｜read_url｜>"),
    *("<think>", "</think>", "｜DSML｜", "<tool_result>", "</tool_result>", "<｜deepseek_image｜>"),
]
"""Specification 8.1."""


@pytest.fixture(scope="module")
def words(made: Any) -> Tokenizer:
    return Tokenizer.from_file(str(made("deepseek-v41-tiny") / "tokenizer.json"))


def test_the_vocabulary_has_exactly_the_size_of_the_model_s(words: Tokenizer) -> None:
    assert sorted(words.get_vocab(with_added_tokens=True).values()) == list(range(320))


@pytest.mark.parametrize("token", SPECIAL)
def test_a_special_token_is_one_id(token: str, words: Tokenizer) -> None:
    identity = words.token_to_id(token)
    assert words.encode(token).ids == [identity]
    assert words.encode(f"a{token}b").ids == [*words.encode("a").ids, identity, *words.encode("b").ids]
    assert words.decode([identity], skip_special_tokens=False) == token


def test_the_ids_that_the_config_names(words: Tokenizer) -> None:
    assert [words.token_to_id(token) for token in SPECIAL[:3]] == [0, 1, 2]
    assert words.token_to_id("<｜deepseek_image｜>") == 300


@given(st.lists(st.text() | st.sampled_from(SPECIAL)).map("".join))
@example("Zwölf Boxkämpfer 跳过 \U0001f9ea\u200d\n\t  \0")
def test_any_text_comes_back(words: Tokenizer, text: str) -> None:
    ids = words.encode(text).ids
    assert all(0 <= identity < 320 for identity in ids)
    assert words.decode(ids, skip_special_tokens=False) == text


def test_text_like_the_training_text_takes_fewer_tokens_than_bytes(words: Tokenizer) -> None:
    sentence = next(tokenizer.sentences())
    assert len(words.encode(sentence).ids) < 0.7 * len(sentence)


@pytest.mark.parametrize(
    ("vocab_size", "image", "complaint"),
    [
        (274, 100, "vocab_size is 274, must be at least 275"),
        (320, 320, "image_token_id is 320, must be 18 … 319"),
        (320, 17, "image_token_id is 17, must be 18 … 319"),
        (4000, 300, "vocab_size is 4000, must be at most"),
    ],
)
def test_a_vocabulary_that_cannot_be_is_refused(vocab_size: int, image: int, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        tokenizer.train(vocab_size, image)


@pytest.mark.parametrize(("vocab_size", "image"), [(275, 18), (320, 18), (320, 319), (400, 300)])
def test_any_place_of_the_image_token_leaves_no_gap(vocab_size: int, image: int) -> None:
    trained = tokenizer.train(vocab_size, image)
    assert sorted(trained.get_vocab().values()) == list(range(vocab_size))
    assert trained.encode("<｜deepseek_image｜>").ids == [image]


ENGINE = """
import json, sys
from transformers import AutoTokenizer
from vllm.tokenizers import get_tokenizer
from vllm.transformers_utils.config import get_config

directory, text, *others = sys.argv[1:]
config = get_config(directory, trust_remote_code=False)
theirs = AutoTokenizer.from_pretrained(directory)
chat = get_tokenizer(directory, tokenizer_mode="deepseek_v41")
turn = [{"role": "user", "content": text}]
prompt = chat.apply_chat_template(turn, tokenize=False, thinking=False)
ids = chat.apply_chat_template(turn, thinking=False)
fields = ("model_type", "architectures", "hidden_size", "compress_ratios", "vision_n_layers", "bos_token_id",
          "eos_token_id", "rope_parameters", "rms_norm_eps", "engram_layer_ids")
print(json.dumps({
    "class": type(config).__name__,
    "config": {field: getattr(config, field) for field in fields},
    "dtypes": [str(get_config(path, trust_remote_code=False).dtype) for path in (directory, *others)],
    "experts": [getattr(get_config(path, trust_remote_code=False), "expert_dtype", None) for path in others],
    "prompt": prompt, "ids": ids, "back": chat.decode(ids),
    "auto": theirs.encode(text), "auto size": len(theirs), "auto back": theirs.decode(theirs.encode(text)),
    "ends": [theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id],
}))
"""
TEXT = "Was hält der Zwischenspeicher? 跳过 it\n"


def test_vllm_and_transformers_load_it(made: Any, words: Tokenizer) -> None:
    """vLLM's config class, its tokenizer of the mode deepseek_v41 and transformers' AutoTokenizer, in one process."""
    forms = [made("deepseek-v41-tiny", **options) for options in ({}, {"dtype": "float32"}, {"quantized": True})]
    script = [sys.executable, "-c", ENGINE, str(forms[0]), TEXT, *map(str, forms[1:])]
    run = subprocess.run(script, capture_output=True, text=True, env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"})
    assert run.returncode == 0, run.stderr
    seen = json.loads(run.stdout.splitlines()[-1])

    assert seen["class"] == "DeepseekV41Config"
    config = seen["config"]
    assert config["architectures"] == ["DeepseekV41ForCausalLM"]
    assert config["model_type"] == "deepseek_v41"
    assert config["hidden_size"] == 64
    assert config["compress_ratios"] == [0, 2, 2, 1, 1, 1, 1, 0, 0]
    assert config["vision_n_layers"] == 0
    assert config["engram_layer_ids"] == []
    assert config["rms_norm_eps"] == 1e-20
    assert config["rope_parameters"]["rope_type"] == "yarn"
    assert (config["bos_token_id"], config["eos_token_id"]) == (0, 1)
    assert seen["dtypes"] == ["torch.bfloat16", "torch.float32", "torch.bfloat16"]
    assert seen["experts"] == [None, "fp4"]

    assert seen["prompt"] == f"<｜begin▁of▁sentence｜><｜User｜>{TEXT}<｜Assistant｜></think>"
    assert seen["ids"] == words.encode(seen["prompt"]).ids
    assert seen["back"] == seen["prompt"]
    single = [
        words.token_to_id(token) for token in ("<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "</think>")
    ]
    assert seen["ids"] == [*single[:2], *words.encode(TEXT).ids, *single[2:]]
    assert seen["auto"] == words.encode(TEXT).ids
    assert seen["auto back"] == TEXT
    assert (seen["auto size"], seen["ends"]) == (320, [0, 1, 2])


# The command


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers(required=True))
    args = parser.parse_args(["zoo", *arguments])
    return int(args.run(args))


def digests(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(directory.iterdir())}


@pytest.mark.parametrize("options", [(), ("--quantized", "--dtype", "float32", "--seed", "7")], ids="-".join)
def test_the_same_command_gives_the_same_bytes(options: tuple[str, ...], tmp_path: Path) -> None:
    for name in ("a", "b"):  # processes of their own, in which sets and dicts of strings are ordered differently
        script = "from kvproof.cli import main; import sys; sys.exit(main(sys.argv[1:]))"
        arguments = ["zoo", "make", "deepseek-v41-tiny", str(tmp_path / name), *options]
        environment = {**os.environ, "PYTHONHASHSEED": str(ord(name))}
        subprocess.run([sys.executable, "-c", script, *arguments], check=True, capture_output=True, env=environment)
    assert digests(tmp_path / "a") == digests(tmp_path / "b")


def test_another_seed_gives_other_weights_and_the_same_rest(made: Any) -> None:
    first, second = (made("deepseek-v41-tiny", seed=seed) for seed in (0, 1))
    before, after = digests(first), digests(second)
    assert before.keys() == after.keys()
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {path.name for path in files(first)}
    others = loaded(second)
    assert not any(torch.equal(tensor, others[name]) for name, tensor in loaded(first).items())


def test_the_command_prints_the_directory_and_passes_its_options_on(
    tmp_path: Path, made: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "deep" / "model"
    options = ("--dtype", "float32", "--seed", "1", "--quantized")
    assert run("make", "deepseek-v41-tiny", str(target), *options) == 0
    assert capsys.readouterr().out == f"{target}\n"
    assert digests(target) == digests(made("deepseek-v41-tiny", dtype="float32", seed=1, quantized=True))
    assert zoo.resolve(str(target), tmp_path) == target


def test_an_empty_directory_is_taken(tmp_path: Path) -> None:
    assert run("make", "deepseek-v41-tiny", str(tmp_path)) == 0


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("deepseek-v41-tiny", "."), "not an empty directory"),
        (("deepseek-v41-tiny", "kept"), "not an empty directory"),
        (("deepseek-v41-tiny", "kept/below"), "cannot be written"),
        (("deepseek-v4.1", "new"), "has no weights to make; names: deepseek-v41-small, deepseek-v41-tiny"),
        (("../deepseek-v41-tiny", "new"), "has no weights to make"),
        (("deepseek-v41-tiny", "new", "--seed", "-1"), "seed is -1, must be at least 0"),
    ],
)
def test_bad_input_is_one_line_and_changes_nothing(
    arguments: tuple[str, ...],
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kept").write_text("mine")
    before = (tmp_path / "kept").stat()
    assert run("make", *arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert complaint in captured.err
    assert [entry.name for entry in tmp_path.iterdir()] == ["kept"]
    assert (tmp_path / "kept").stat() == before


def test_an_unknown_dtype_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as stop:
        run("make", "deepseek-v41-tiny", str(tmp_path / "new"), "--dtype", "float16")
    assert stop.value.code == 2
    with pytest.raises(ValueError, match="dtype is 'float16', must be one of bfloat16, float32"):
        deepseek_v41.make("deepseek-v41-tiny", tmp_path / "new", dtype="float16")
    assert not (tmp_path / "new").exists()


def test_a_missing_package_is_named_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert run("make", "deepseek-v41-tiny", str(tmp_path / "new")) == 2
    assert "'tokenizers'" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_the_names_that_can_be_made_are_bundled() -> None:
    assert set(deepseek_v41.NAMES) == set(MODELS) <= set(zoo.names())
    for name in MODELS:
        model = zoo.describe(name)
        assert model.config["model_type"] == "deepseek_v41"
        assert model.config["text_config"]["model_type"] == "deepseek_v41_text"
        assert model.config["vision_config"]["num_hidden_layers"] == 0
