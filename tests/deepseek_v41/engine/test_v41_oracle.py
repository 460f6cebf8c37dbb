"""The model in a real engine, paged and chunked, against the naive float64 pass over the whole text.

The oracle first makes its own choices; where the engine chose otherwise, the oracle's gap at that place must be a near
tie. Then it is run again with the engine's choices, and every state and cache row must agree.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "support")]
import naive  # noqa: E402
from v41_play import BLOCK, SEED, checkpoint, differs, play, prompt  # noqa: E402
from weights import TRUNCATED, random_weights, without_engram  # noqa: E402

pytestmark = pytest.mark.engine
RECORD = ("hidden", "stream", "selection", "candidates", "router")
TEXT = prompt(120, 7)
NEAR_TIE = {"float32": 1e-3, "bfloat16": 0.15}
"""Largest gap, in score, at which two ways of summing may choose differently."""


@dataclass
class Compared:
    """One checkpoint: what the engine did with TEXT, and the oracle with the engine's choices and with its own."""

    config: dict[str, Any]
    dtype: str
    played: dict[str, dict[str, Any]]
    own: naive.Forward
    forced: naive.Forward
    weights: dict[str, torch.Tensor]

    def of(self, kind: str) -> dict[int, torch.Tensor]:
        """The engine's records of a kind by layer, position by position from 0."""
        found = {}
        for key, by_request in self.played["chunked"].items():
            if key.startswith(f"{kind}:"):
                positions, rows = by_request["a"]
                assert positions == list(range(len(TEXT)))
                found[int(key.split(".")[1])] = rows
        return found


def read(directory: Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint, quantised ones dequantised here and now, plainly."""
    raw = {name: t for path in sorted(directory.glob("*.safetensors")) for name, t in load_file(path).items()}
    found = {name: t.double() for name, t in raw.items() if t.element_size() > 1}
    signed = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    fp4 = torch.tensor(signed + [-value for value in signed], dtype=torch.float64)
    for name, codes in raw.items():
        if codes.element_size() > 1 or not name.endswith(".weight"):
            continue
        scale = 2.0 ** (raw[name.removesuffix("weight") + "scale"].view(torch.uint8).double() - 127)
        if codes.dtype == torch.float8_e4m3fn:
            rows, columns = codes.shape
            wide = scale.repeat_interleave(32, 0)[:rows].repeat_interleave(32, 1)[:, :columns]
            found[name] = codes.double() * wide
        else:
            codes = codes.view(torch.uint8).long()
            found[name] = fp4[torch.stack([codes & 15, codes >> 4], -1).flatten(1)] * scale.repeat_interleave(32, 1)
    return found


def truncated(directory: Path) -> Path:
    """The public five-layer topology as a checkpoint directory."""
    config = without_engram(TRUNCATED)
    directory.mkdir()
    save_file(
        {name: t.contiguous() for name, t in random_weights(config, SEED, torch.float32).items()},
        directory / "model.safetensors",
    )
    text = {**{k: v for k, v in config.items() if k != "rope_parameters"}, "rope_scaling": config["rope_parameters"]}
    released = {"model_type": "deepseek_v41", "architectures": ["DeepseekV41ForCausalLM"], "text_config": text}
    (directory / "config.json").write_text(json.dumps(released))
    return directory


MAKERS = {
    "tiny": ("float32", lambda at: checkpoint("deepseek-v41-tiny", at)),
    "tiny-quantised": ("float32", lambda at: checkpoint("deepseek-v41-tiny", at, quantized=True)),
    "tiny-bf16": ("bfloat16", lambda at: checkpoint("deepseek-v41-tiny", at, dtype="bfloat16")),
    "truncated": ("float32", truncated),
    "small": ("float32", lambda at: checkpoint("deepseek-v41-small", at)),
}
CASES = [
    {"name": "chunked", "chunk": 13, "requests": [{"id": "a", "prompt": TEXT, "n": 1}]},
    {"name": "residues", "requests": [{"id": str(n), "prompt": TEXT[:n], "n": 1} for n in range(1, 4 * BLOCK + 1)]},
]


@pytest.fixture(scope="module", params=MAKERS)
def compared(request, tmp_path_factory):
    dtype, make = MAKERS[request.param]
    directory = make(tmp_path_factory.mktemp("oracle") / request.param)
    config = json.loads((directory / "config.json").read_text())["text_config"]
    config["rope_parameters"] = config["rope_scaling"]
    weights = read(directory)
    played = play(directory, CASES, record=RECORD, dtype=dtype)
    seen = played["chunked"]
    layer = {key: int(key.split(".")[1]) for key in seen if ":" in key}
    rows = {key: seen[key]["a"][1] for key in layer}
    choices = {
        "selection": {layer[k]: rows[k].tolist() for k in rows if k.startswith("selection:")},
        "experts": {layer[k]: experts(config, weights, layer[k], rows[k]) for k in rows if k.startswith("router:")},
        "candidates": next(rows[k].tolist() for k in rows if k.startswith("candidates:")),
    }
    own = naive.forward(config, weights, TEXT)
    return Compared(config, dtype, played, own, naive.forward(config, weights, TEXT, forced=choices), weights)


def experts(config: dict[str, Any], weights: dict[str, torch.Tensor], layer: int, logits: torch.Tensor) -> torch.Tensor:
    """The experts that the engine's router logits [T, E] choose."""
    choice = torch.nn.functional.softplus(logits.double()).sqrt() + weights[f"layers.{layer}.ffn.gate.bias"]
    return choice.topk(config["num_experts_per_tok"]).indices


def relative(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Error of each row relative to the row's norm."""
    found, expected = found.double().flatten(1), expected.flatten(1)
    return (found - expected).norm(dim=1) / expected.norm(dim=1)


def test_choices_differ_at_near_ties_only(compared):
    near = NEAR_TIE[compared.dtype]
    for layer, rows in compared.of("selection").items():
        for token, (mine, theirs) in enumerate(zip(rows.tolist(), compared.forced.selection[layer], strict=True)):
            chosen = [row for row in mine if row >= 0]
            assert chosen == sorted(chosen)
            if chosen != theirs:
                assert compared.forced.selection_gap[layer][token] < near, (layer, token, chosen, theirs)
    (blocks,) = compared.of("candidates").values()
    for token, (mine, theirs) in enumerate(zip(blocks.tolist(), compared.forced.candidates, strict=True)):
        if [block for block in mine if block >= 0] != theirs:
            assert compared.forced.candidate_gap[token] < near, (token, mine, theirs)
    for layer, logits in compared.of("router").items():
        mine = experts(compared.config, compared.weights, layer, logits).sort().values
        theirs = compared.forced.experts[layer].sort().values
        flipped = (mine != theirs).any(dim=1)
        assert bool((compared.forced.expert_gap[layer][flipped] < near).all()), layer


def test_choices_are_made_at_all(compared):
    """The text is long enough that selection, filtering and the window all cut something off."""
    filtered = [layer for layer in compared.own.selection if layer > compared.config["candidate_source_layer_id"]]
    assert filtered
    k = compared.config["index_topk"]
    last = len(TEXT) - 1
    for layer, rows in compared.own.selection.items():
        assert len(rows[last]) == k < (last + 1) // compared.config["compress_ratios"][layer]
    assert len(compared.own.candidates[last]) * compared.config["candidate_block_size"] < len(TEXT)


def test_every_layer_agrees(compared):
    streams = compared.of("stream")
    assert sorted(streams) == list(range(compared.config["num_hidden_layers"]))
    for layer, stream in streams.items():
        error = relative(stream, compared.forced.streams[layer])
        if compared.dtype == "float32":
            assert float(error.max()) < 1e-4, (layer, float(error.max()))
        else:
            found = error.median(), error.quantile(0.99), error.max()
            assert all(value <= limit for value, limit in zip(found, (0.01, 0.05, 0.15), strict=True)), (layer, found)


def test_logits_agree(compared):
    positions, states = compared.played["chunked"]["hidden"]["a"]
    assert positions == list(range(len(TEXT)))
    logits = states.double() @ compared.weights["head.weight"].T
    limit = 1e-4 if compared.dtype == "float32" else 0.05
    assert float(relative(logits, compared.forced.logits).max()) < limit
    if compared.dtype == "float32":
        assert compared.played["chunked"]["tokens"]["a"] == [int(compared.forced.logits[-1].argmax())]


def test_cache_rows_agree(compared):
    rows = compared.played["chunked"]["rows"]["a"]
    limit = 1e-4 if compared.dtype == "float32" else 0.05
    for name, found in rows.items():
        layer = int(name.split(".")[1])
        if name.endswith("swa_cache"):
            expected = compared.forced.swa[layer][-len(found) :]
        elif name.endswith("long_cache"):
            expected = compared.forced.long[layer]
        elif name.endswith("k_cache"):
            expected = compared.forced.index_keys[layer]
        else:
            expected = compared.forced.ring[layer][len(TEXT) - len(found) :]
        assert len(found) == len(expected)
        if len(found):
            assert float(relative(found, expected).max()) < limit, name


def test_every_length_agrees(compared):
    """Prompts of 1 … 4 blocks: every residue modulo ratio, block, candidate block and window."""
    positions, states = compared.played["chunked"]["hidden"]["a"]
    limit = 1e-4 if compared.dtype == "float32" else 0.15
    worst = {}
    for n in range(1, 4 * BLOCK + 1):
        seen, found = compared.played["residues"]["hidden"][str(n)]
        assert seen[-1] == n - 1
        worst[n] = differs(found[-1], states[positions.index(n - 1)])
    assert max(worst.values()) < limit, max(worst.items(), key=lambda item: item[1])
    assert compared.played["residues"]["findings"] == []
