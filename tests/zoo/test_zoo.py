"""The bundled models: every file is whole, every bad input ends in one line."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvproof import zoo

VALID = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}


def model_directory(path: Path, text: str | bytes) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def refusal(call: Any, *args: Any) -> str:
    with pytest.raises(ValueError, match=r".") as caught:
        call(*args)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    return message


def test_the_kinds_of_cache_that_must_be_there_are_there() -> None:
    families = {zoo.describe(name).family for name in zoo.names()}
    assert families == {
        "dense",
        "sliding-window",
        "latent",
        "compressed-latent",
        "conv-hybrid",
        "mamba-hybrid",
        "linear-hybrid",
        "multimodal",
    }
    assert zoo.names() == sorted(zoo.names())


@pytest.mark.parametrize("name", zoo.names())
def test_each_model_is_whole(name: str, tmp_path: Path) -> None:
    model = zoo.describe(name)
    assert model.name == name
    assert model.summary.endswith(".")
    assert "\n" not in model.summary

    text = model.config.get("text_config", model.config)
    layers = text["num_hidden_layers"]
    assert text["num_attention_heads"] % text["num_key_value_heads"] == 0
    assert len(text.get("layer_types", range(layers))) == layers
    assert len(text.get("compress_ratios", range(layers))) >= layers
    assert all(index < layers for index in text.get("full_attn_idxs", []))
    assert model.config["torch_dtype"] == "bfloat16"

    written = zoo.write(name, tmp_path / "new" / name)
    assert json.loads((written / "config.json").read_text()) == model.config
    assert {file.name for file in written.iterdir()} == {"config.json", *model.files}
    assert zoo.resolve(str(written), tmp_path) == written
    assert json.loads(json.dumps(model.to_json()))["config"] == model.config


def test_the_bf16_twins_differ_from_the_released_models_in_nothing_but_the_weight_format() -> None:
    twins = [name for name in zoo.names() if name.endswith("-bf16")]
    assert twins
    for name in twins:
        released = dict(zoo.describe(name.removesuffix("-bf16")).config)
        del released["quantization_config"]
        assert zoo.describe(name).config == released


def test_tiny_qwen3_has_the_ambiguous_size() -> None:
    assert zoo.describe("tiny-qwen3").config["num_key_value_heads"] == 2


def test_a_model_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        zoo.describe("tiny-qwen3").name = "x"  # type: ignore[misc]


def test_a_near_miss_names_what_was_meant() -> None:
    assert "qwen3-0.6b" in refusal(zoo.describe, "Qwen3-0.6B")


def test_a_far_miss_lists_what_is_bundled() -> None:
    message = refusal(zoo.describe, "zzzzzz")
    assert all(name in message for name in zoo.names())


@pytest.mark.parametrize("name", ["", ".", "../configs/tiny-qwen3", "/etc/passwd", "a\nb", "x\0", "x" * 5000])
def test_a_name_never_becomes_a_path(name: str, tmp_path: Path) -> None:
    refusal(zoo.describe, name)
    refusal(zoo.write, name, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_write_takes_an_empty_directory_and_refuses_a_full_one(tmp_path: Path) -> None:
    zoo.write("tiny-qwen3", tmp_path)
    before = (tmp_path / "config.json").read_bytes()
    assert str(tmp_path) in refusal(zoo.write, "tiny-gemma3", tmp_path)
    assert (tmp_path / "config.json").read_bytes() == before


def test_write_refuses_a_file_and_a_path_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refusal(zoo.write, "tiny-qwen3", tmp_path / "file")
    refusal(zoo.write, "tiny-qwen3", tmp_path / "file" / "below")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_unwritable_place_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    refusal(zoo.write, "tiny-qwen3", tmp_path / "x")
    refusal(zoo.resolve, "tiny-qwen3", tmp_path / "x")


def test_resolve_of_a_bundled_name_may_be_repeated(tmp_path: Path) -> None:
    first = zoo.resolve("tiny-qwen3", tmp_path)
    assert first == tmp_path / "tiny-qwen3"
    assert zoo.resolve("tiny-qwen3", tmp_path) == first


def test_a_directory_wins_over_a_bundled_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model_directory(tmp_path / "tiny-qwen3", json.dumps(VALID))
    assert zoo.resolve("tiny-qwen3", tmp_path / "work") == Path("tiny-qwen3")
    assert not (tmp_path / "work").exists()


def test_resolve_refuses_what_is_no_model_directory(tmp_path: Path) -> None:
    assert "config.json" in refusal(zoo.resolve, str(tmp_path), tmp_path)
    file = model_directory(tmp_path / "m", json.dumps(VALID)) / "config.json"
    assert "is a file" in refusal(zoo.resolve, str(file), tmp_path)
    (tmp_path / "d" / "config.json").mkdir(parents=True)
    assert "cannot be read" in refusal(zoo.resolve, str(tmp_path / "d"), tmp_path)
    # A bundled name over a workdir that is a file.
    assert "cannot be written" in refusal(zoo.resolve, "tiny-qwen3", file)
    assert "not bundled" in refusal(zoo.describe, "nothing-of-the-kind")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "not JSON"),
        ("{", "line 1"),
        (b"\xff\xfe", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("9" * 5000, "not JSON"),
        ("[1]", "must be an object"),
        ("null", "must be an object"),
        ("{}", "model_type is None"),
        (json.dumps({**VALID, "model_type": 3}), "model_type is 3"),
        (json.dumps({**VALID, "model_type": ""}), "model_type is ''"),
        (json.dumps({"model_type": "qwen3"}), "architectures is None"),
        (json.dumps({**VALID, "architectures": []}), "architectures is []"),
        (json.dumps({**VALID, "architectures": "Qwen3"}), "architectures is 'Qwen3'"),
        (json.dumps({**VALID, "architectures": [1]}), "architectures is [1]"),
    ],
)
def test_a_broken_config_is_named_with_its_fault(text: str | bytes, complaint: str, tmp_path: Path) -> None:
    directory = model_directory(tmp_path / "a\nb", text)
    assert complaint in refusal(zoo.resolve, str(directory), tmp_path)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
configs = json_values | st.fixed_dictionaries(
    {"model_type": st.text() | json_values, "architectures": st.lists(st.text(), max_size=2) | json_values}
)


@given(config=configs)
def test_any_json_is_a_model_or_one_line(config: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = model_directory(tmp_path_factory.getbasetemp() / "json", json.dumps(config))
    fields = config if isinstance(config, dict) else {}
    architectures = fields.get("architectures")
    named = isinstance(fields.get("model_type"), str) and fields["model_type"] != ""
    listed = isinstance(architectures, list) and all(isinstance(entry, str) for entry in architectures)
    if named and listed and architectures:
        assert zoo.resolve(str(directory), directory) == directory
    else:
        refusal(zoo.resolve, str(directory), directory)


@given(text=st.binary(max_size=40))
def test_any_bytes_end_in_one_line(text: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    refusal(
        zoo.resolve,
        str(model_directory(tmp_path_factory.getbasetemp() / "bytes", text)),
        tmp_path_factory.getbasetemp(),
    )


@given(name=st.text(alphabet=st.characters(blacklist_characters="/."), max_size=12))
def test_any_other_name_ends_in_one_line(name: str) -> None:
    if name not in zoo.names() and not os.path.exists(name):
        refusal(zoo.resolve, name, Path("nowhere"))
    assert not Path("nowhere").exists()


def test_the_zoo_needs_neither_torch_nor_vllm() -> None:
    code = "import sys; from kvproof import zoo; zoo.describe('tiny-qwen3'); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert not {"torch", "vllm", "numpy"} & set(loaded.split())
