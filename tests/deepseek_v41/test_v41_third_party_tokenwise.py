"""The token-wise operations against code nobody here wrote, at the released widths.

vLLM's side runs in one process of its own (this file as a script, Triton interpreted): its torch reference of the
delayed mHC, its Engram kernels and host code, its router kernel, rope, activation and MXFP8 functions. transformers'
``deepseek_v4`` runs here, where V4 and V4.1 share the mechanism.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

H, M, D, P = 5120, 4, 512, 64
EPS = 1e-20
MIXING = {"hc_eps": 1e-6, "iterations": 20}
ROPE = {"theta": 160000.0, "factor": 16.0, "original_max_position": 65536, "beta_fast": 32, "beta_slow": 1}


def inputs(tokenizer: str) -> dict:
    """What both sides compute from."""
    torch.manual_seed(41)
    mixed = 2 * M + M * M
    lengths = [9, 1, 4, 26]
    mask = torch.rand(40) < 0.2
    rows = torch.randint(0, 5000, (7, 24))
    rows[1, 3] = rows[6] = -1  # belong to another shard, or to a padded token
    logits = 3 * torch.randn(13, 384)
    logits[0] = logits[0].round()
    logits[1] = 0
    logits[2, ::2] = torch.nan
    logits[3] += 20
    return {
        "tokenizer": tokenizer,
        "stream": torch.randn(3, M, H).bfloat16(),
        "fn": torch.randn(mixed, M * H) / (M * H) ** 0.5,
        "base": 0.1 * torch.randn(mixed),
        "scale": (0.5 * torch.randn(3)).abs() + 0.5,
        "pre": torch.rand(3, M),
        "y": torch.randn(3, H).bfloat16(),
        "engram": {
            "engram_layer_ids": [1, 14],
            "engram_num_embeddings": [384006168, 384016682],
            "engram_max_ngram_size": 4,
            "engram_n_heads": 8,
            "engram_head_dim": 256,
            "engram_compressed_vocab_size": 99092,
            "engram_pad_token_id": 2,
            "engram_vocab_size": 16_000_000,
        },
        "token_map": torch.randint(0, 99092, (1000,)),
        "tokens": torch.randint(0, 1000, (40,)),
        "dead": mask,
        "starts": torch.tensor([0, *lengths]).cumsum(0),
        "first_positions": torch.tensor([0, 5, 2, 100]),
        "lookback": torch.tensor([[-1, -1, -1], [3, 4, 5], [6, 7, -1], [8, 9, 10]]),
        "lookback_dead": torch.tensor([[0, 0, 0], [0, 1, 0], [0, 0, 0], [0, 0, 0]]).bool(),
        "table": torch.randint(0, 0x7F, (5000, 256), dtype=torch.uint8) | (torch.randint(0, 2, (5000, 1)) << 7).byte(),
        # The interpreter's own conversion of subnormal numbers to bf16 is wrong; 2^(20 - 127) keeps clear of them.
        "table_scale": torch.randint(20, 140, (5000, 8), dtype=torch.uint8),
        "rows": rows,
        "projected": torch.randn(3, (M + 1) * H).bfloat16(),
        "q_weight": torch.randn(M, H).bfloat16(),
        "k_weight": torch.randn(M, H).bfloat16(),
        "keep": torch.tensor([True, False, True]),
        "logits": logits,
        "bias": torch.randn(384).round(),
        "gate_up": 6 * torch.randn(5, 2 * 2304),
        "positions": torch.tensor([0, 1, 77, 4095, 8191]),
        "query": torch.randn(5, 3, D).bfloat16(),
        "weight": torch.randn(64, H),
    }


def grouped() -> tuple[torch.Tensor, torch.Tensor]:
    """Attention results [T, 8, 4096] and wo_a [8 · 1024, 4096]."""
    numbers = torch.Generator().manual_seed(8)
    heads = torch.randn(3, 8, 8 * D, generator=numbers).bfloat16()
    return heads, (torch.randn(8 * 1024, 8 * D, generator=numbers) / 64).bfloat16()


# ---------------------------------------------------------------------- vLLM's side, in its own process


def vllm_side(given: dict) -> dict:
    from kvproof.platforms import triton_host

    triton_host.register()
    from transformers import PreTrainedTokenizerFast
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.kernels.mhc.torch import mhc_post_torch, mhc_pre_delayed_torch
    from vllm.models.deepseek_v41.common import engram

    out: dict = {}
    mixing = (EPS, 1e-6, 1e-6, 2.0, 20)
    parameters = (given["fn"], given["scale"], given["base"])
    out["mhc"] = mhc_pre_delayed_torch(given["stream"], *parameters, *mixing, given["pre"])
    out["first"] = mhc_pre_delayed_torch(given["stream"], *parameters, *mixing)[2]
    out["expanded"] = mhc_post_torch(given["y"], given["stream"], out["mhc"][0], out["mhc"][1])

    layout = engram.EngramLayout(SimpleNamespace(**given["engram"]))
    out["primes"], out["offsets"] = layout.primes, layout.offsets
    out["multipliers"] = engram.compute_hash_multipliers(layout.layer_ids, layout.max_ngram_size, 99092)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=given["tokenizer"])
    out["map"] = engram.build_compressed_token_map(tokenizer)

    state = engram.NgramHashState.__new__(engram.NgramHashState)
    torch.nn.Module.__init__(state)
    state.use_slot_cache, state.pad_id, state.block_size = False, 2, 32
    state.multipliers, state.primes, state.offsets = out["multipliers"], torch.tensor(layout.primes), layout.offsets
    state.token_map = given["token_map"].int()
    lengths = given["starts"].diff()
    places = torch.arange(40) - given["starts"][:-1].repeat_interleave(lengths)
    positions = given["first_positions"].repeat_interleave(lengths) + places
    out["hashes"] = state(
        given["tokens"].int(),
        positions,
        given["starts"].int(),
        given["dead"],
        given["lookback"],
        given["lookback_dead"],
        None,
        None,
    )
    out["lookup"] = torch.empty(7, 24, 256, dtype=torch.bfloat16)
    table = given["table"].view(torch.float8_e4m3fn), given["table_scale"]
    holder = SimpleNamespace(
        part_n_hash_cols=24, n_hash_cols=24, head_start=0, vocab_start_idx=0, vocab_end_idx=5000, dim=256,
        block_size=32, cpu_offload=False, _packed=None, _num_sms=2, _storage=lambda: table,
    )  # fmt: skip
    engram.ParallelEngramEmbedding.lookup(holder, given["rows"], out["lookup"])
    module = SimpleNamespace(
        _batch=None, wkv=lambda rows: given["projected"], embed=lambda ids: torch.zeros(3, 24, 256), dim=H, hc_mult=M,
        use_sequence_parallel=False, eps=EPS, clamp_value=1e-6, q_weight=given["q_weight"], k_weight=given["k_weight"],
    )  # fmt: skip
    # An fp32 stream: the interpreter cuts where the compiled kernel rounds to bf16.
    out["gated"] = engram.Engram.forward(module, given["stream"].float(), torch.zeros(3, 24), given["keep"])

    with set_current_vllm_config(VllmConfig()):
        out |= small_operations(given)

    from kvproof.deepseek_v41.attention import GroupedLinear  # ours; it needs vLLM

    heads, weight = grouped()
    ours = GroupedLinear(8, 8 * D, 1024, 0, 1)
    ours.weight = torch.nn.Parameter(weight, requires_grad=False)
    out["grouped"] = ours(heads)
    return out


def small_operations(given: dict) -> dict:
    from vllm.model_executor.layers.activation import SiluAndMulWithClamp
    from vllm.model_executor.layers.fused_moe.router import dsv4_topk
    from vllm.model_executor.layers.quantization.utils import mxfp8_utils, quant_utils
    from vllm.model_executor.layers.rotary_embedding.deepseek_scaling_rope import DeepseekV4ScalingRotaryEmbedding
    from vllm.platforms import current_platform

    out: dict = {}
    with patch.object(type(current_platform), "is_cuda", lambda self: True):
        importlib.reload(dsv4_topk)  # it defines its kernel on CUDA only
    out["routed"] = dsv4_topk.dsv4_topk(given["logits"], given["bias"], torch.int64, 1.5)
    out["swiglu"] = SiluAndMulWithClamp(10.0, compile_native=False).forward_native(given["gate_up"])
    out["mxfp8"] = mxfp8_utils._mxfp8_e4m3_quantize_torch(given["weight"])
    out["mxfp8_back"] = mxfp8_utils.dequant_mxfp8_to_bf16(*out["mxfp8"])
    values = given["weight"].to(torch.float8_e4m3fn)
    scale = torch.exp2(given["table_scale"][:2].repeat(1, 20).float() - 127)
    out["block"] = quant_utils.scaled_dequantize(values, scale, quant_utils.GroupShape(32, 32))
    for name, arguments in {
        "released": (65536, 160000.0, 16.0),
        "plain": (1048576, 10000.0, 1.0),  # what upstream builds for ratio 0: YaRN of factor 1
    }.items():
        rope = DeepseekV4ScalingRotaryEmbedding.__new__(DeepseekV4ScalingRotaryEmbedding)
        rope.max_position_embeddings, rope.base, factor = arguments
        rope.rotary_dim, rope.beta_fast, rope.beta_slow = P, 32, 1
        out[f"frequencies {name}"] = rope._compute_inv_freq(factor)
    rope = DeepseekV4ScalingRotaryEmbedding(
        D, P, 2048, 160000.0, False, 4.0, torch.bfloat16, beta_fast=32, beta_slow=1, mscale=0, mscale_all_dim=0
    )
    out["table"] = rope.cos_sin_cache[given["positions"]]
    for inverse in (False, True):
        out[f"rotated {inverse}"] = rope.forward_native(given["positions"], given["query"].clone(), inverse=inverse)[0]
    return out


if __name__ == "__main__":
    torch.save(vllm_side(torch.load(sys.argv[1])), sys.argv[2])
    sys.exit()

from kvproof.deepseek_v41.ops import engram, formats, mhc, moe  # noqa: E402
from kvproof.deepseek_v41.ops.norm import rms_norm  # noqa: E402
from kvproof.deepseek_v41.ops.rope import Rope, rotate  # noqa: E402


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    from kvproof.platforms.triton_host import ENVIRONMENT

    folder = tmp_path_factory.mktemp("tokenwise")
    given = inputs(str(train_tokenizer(folder / "tokenizer.json")))
    torch.save(given, folder / "given.pt")
    command = [sys.executable, __file__, str(folder / "given.pt"), str(folder / "theirs.pt")]
    done = subprocess.run(command, env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return given, torch.load(folder / "theirs.pt")


def train_tokenizer(path: Path) -> Path:
    """A byte-level BPE whose vocabulary has partial UTF-8, cases, accents, ligatures and runs of space."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    text = Path(__file__).read_text(encoding="utf-8")
    words = ["The the THE tHe", "é É e\u0301 ê Ê", "\ufb01 fi \uff21 A a", "日本語 中文 한국어"]
    words += ["  \n\n\t\r\n   ", "ÅÄÖ åäö ß ẞ İ ı"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1500,
        special_tokens=["<bos>", "<eos>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text, text.upper(), *words * 50], trainer)
    tokenizer.save(str(path))
    return path


def ulps(a, b):
    """Distance in bf16 steps; zero of either sign is one place."""

    def place(x):
        bits = x.view(torch.int16).int()
        return torch.where(bits < 0, -(bits & 0x7FFF), bits)

    return (place(a) - place(b)).abs()


# ---------------------------------------------------------------------- hyper-connections


def test_delayed_mhc(ran):
    given, theirs = ran
    post, comb, collapsed, pre = theirs["mhc"]
    got = mhc.mixes(given["stream"], given["fn"], given["base"], given["scale"], norm_eps=EPS, **MIXING)
    torch.testing.assert_close(got.pre, pre, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got.post, post.squeeze(-1), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got.comb, comb, rtol=1e-5, atol=1e-6)
    assert torch.equal(mhc.collapse(given["stream"], given["pre"]), collapsed)
    assert torch.equal(mhc.collapse(given["stream"], None), theirs["first"])


def test_mhc_post(ran):
    given, theirs = ran
    post, comb = theirs["mhc"][:2]
    got = mhc.expand(given["stream"], given["y"], post.squeeze(-1), comb)
    assert (got != theirs["expanded"]).float().mean() < 1e-3
    torch.testing.assert_close(got, theirs["expanded"], rtol=2**-7, atol=2**-9)


def test_v4_hyper_connection(ran):
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection

    given = ran[0]
    theirs = DeepseekV4HyperConnection(
        SimpleNamespace(hc_mult=M, hidden_size=H, hc_sinkhorn_iters=20, hc_eps=1e-6, rms_norm_eps=EPS)
    )
    theirs.load_state_dict({name: given[name] for name in ("fn", "base", "scale")})
    with torch.no_grad():
        post, comb, collapsed = theirs(given["stream"].unsqueeze(0))
    got = mhc.mixes(given["stream"], given["fn"], given["base"], given["scale"], norm_eps=EPS, **MIXING)
    torch.testing.assert_close(got.post, post[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got.comb, comb[0], rtol=1e-5, atol=1e-6)
    # V4's own mix feeds its own sublayer.
    torch.testing.assert_close(mhc.collapse(given["stream"], got.pre), collapsed[0], rtol=1.6e-2, atol=1e-2)


# ---------------------------------------------------------------------- norm and rope


def test_v4_norm():
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4RMSNorm

    torch.manual_seed(0)
    x, weight = torch.randn(5, H), 1 + 0.1 * torch.randn(H)
    theirs = DeepseekV4RMSNorm(H, EPS)
    theirs.weight.data = weight
    torch.testing.assert_close(rms_norm(x, weight, EPS), theirs(x).detach(), rtol=1e-6, atol=1e-7)
    x, theirs.weight.data = x.bfloat16(), weight.bfloat16()
    assert ulps(rms_norm(x, weight.bfloat16(), EPS), theirs(x).detach()).max() <= 1


def test_rope_frequencies(ran):
    _, theirs = ran
    assert torch.equal(Rope(P, scaled=True, **ROPE).inverse_frequencies(), theirs["frequencies released"])
    factor_one = Rope(P, 10000.0, 1.0, 1048576, 32, 1, True).inverse_frequencies()
    assert torch.equal(factor_one, theirs["frequencies plain"])
    plain = Rope(P, 10000.0, 1.0, 1048576, 32, 1, False).inverse_frequencies()
    torch.testing.assert_close(plain, theirs["frequencies plain"], rtol=2**-23, atol=0)


def test_rope_table_and_rotation(ran):
    given, theirs = ran
    cos, sin = Rope(P, 160000.0, 4.0, 2048, 32, 1, True).cos_sin(given["positions"])
    torch.testing.assert_close(torch.cat((cos, sin), -1), theirs["table"], rtol=0, atol=1e-7)
    cos, sin = theirs["table"].chunk(2, -1)
    for inverse in (False, True):
        assert torch.equal(rotate(given["query"], cos, sin, inverse=inverse), theirs[f"rotated {inverse}"])


def test_v4_rope():
    from transformers import DeepseekV4Config
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4RotaryEmbedding, apply_rotary_pos_emb

    yarn = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 65536, "beta_fast": 32,
            "beta_slow": 1, "attention_factor": 1.0, "rope_theta": 160000.0}  # fmt: skip
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    config = DeepseekV4Config(head_dim=D, qk_rope_head_dim=P, max_position_embeddings=1048576)
    for parameters in (yarn, plain):
        parameters["partial_rotary_factor"] = P / D
    config.rope_parameters = {"main": plain, "compress": yarn}
    theirs = DeepseekV4RotaryEmbedding(config)
    positions = torch.tensor([0, 5, 4097, 1048575])
    query = torch.randn(4, 3, D, generator=torch.Generator().manual_seed(0)).bfloat16()
    for kind, scaled in (("compress", True), ("main", False)):
        rope = Rope(P, scaled=scaled, **(ROPE if scaled else ROPE | {"theta": 10000.0}))
        cos, sin = theirs(torch.zeros(1), positions.unsqueeze(0), layer_type=kind)
        torch.testing.assert_close(rope.inverse_frequencies(), getattr(theirs, f"{kind}_inv_freq"), rtol=2**-22, atol=0)
        if not scaled:
            assert torch.equal(torch.stack(rope.cos_sin(positions)), torch.stack((cos[0], sin[0])))
        heads = query.transpose(0, 1).unsqueeze(0)
        assert torch.equal(rotate(query, cos[0], sin[0]), apply_rotary_pos_emb(heads, cos, sin)[0].transpose(0, 1))


# ---------------------------------------------------------------------- experts


def test_router_kernel(ran):
    """vLLM's top-6 of 384, with ties, NaN logits and logits on the linear side of softplus among the rows."""
    given, theirs = ran
    weights, ids = moe.route(given["logits"], given["bias"], 6, 1.5)
    assert torch.equal(ids, theirs["routed"][1])
    torch.testing.assert_close(weights, theirs["routed"][0], rtol=1e-5, atol=0)


def test_v4_router():
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4TopKRouter

    torch.manual_seed(3)
    theirs = DeepseekV4TopKRouter(
        SimpleNamespace(
            num_experts_per_tok=6, num_local_experts=384, hidden_size=H, scoring_func="sqrtsoftplus",
            routed_scaling_factor=1.5,
        )
    )  # fmt: skip
    theirs.weight.data = torch.randn(384, H) / 30
    theirs.e_score_correction_bias.data = torch.randn(384)
    with torch.no_grad():
        logits, weights, ids = theirs(torch.randn(9, H))
    got, got_ids = moe.route(logits, theirs.e_score_correction_bias, 6, 1.5)
    order, their_order = got_ids.sort(-1), ids.sort(-1)
    assert torch.equal(order.values, their_order.values)
    torch.testing.assert_close(got.gather(1, order.indices), weights.gather(1, their_order.indices))


def test_clamped_swiglu(ran):
    given, theirs = ran
    gate, up = given["gate_up"].chunk(2, -1)
    assert (gate > 10).any()
    assert (up.abs() > 10).any()
    torch.testing.assert_close(moe.swiglu(gate, up, 10.0), theirs["swiglu"], rtol=1e-6, atol=1e-6)


def test_v4_experts():
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts

    torch.manual_seed(5)
    settings = SimpleNamespace(
        num_local_experts=3, hidden_size=H, intermediate_size=2304, hidden_act="silu", swiglu_limit=0.5,
        _experts_implementation="eager",
    )  # fmt: skip
    with torch.device("meta"):
        theirs = DeepseekV4Experts(settings)
    theirs.gate_up_proj = torch.nn.Parameter((torch.randn(3, 2 * 2304, H) / H**0.5).bfloat16())
    theirs.down_proj = torch.nn.Parameter((torch.randn(3, H, 2304) / 2304**0.5).bfloat16())
    x = torch.randn(4, H).bfloat16()
    weights, ids = moe.route(torch.randn(4, 3), torch.zeros(3), 2, 1.5)
    with torch.no_grad():
        expected = theirs(x, ids, weights).float()
        got = moe.experts(x, ids, weights, theirs.gate_up_proj, theirs.down_proj, 0.5)
    assert ((got - expected).norm(dim=-1) / expected.norm(dim=-1)).max() < 0.01


def test_v4_grouped_output(ran):
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4GroupedLinear

    heads, weight = grouped()
    with torch.device("meta"):
        theirs = DeepseekV4GroupedLinear(8 * D, 8 * 1024, 8)
    theirs.weight = torch.nn.Parameter(weight, requires_grad=False)
    torch.testing.assert_close(ran[1]["grouped"], theirs(heads), rtol=2**-7, atol=2**-8)


# ---------------------------------------------------------------------- formats


def test_mxfp8_rows(ran):
    given, theirs = ran
    values, scale = formats.quantise_fp8_block(given["weight"], (1, 32))
    assert torch.equal(values.view(torch.uint8), theirs["mxfp8"][0].view(torch.uint8))
    assert torch.equal(scale, theirs["mxfp8"][1])
    assert torch.equal(formats.dequantise_rows_fp8(values, scale), theirs["mxfp8_back"].float())


def test_fp8_blocks(ran):
    given, theirs = ran
    scale = given["table_scale"][:2].repeat(1, 20)
    got = formats.dequantise_fp8_block(given["weight"].to(torch.float8_e4m3fn), scale)
    assert torch.equal(got, theirs["block"])


def test_mxfp4_of_transformers():
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    torch.manual_seed(6)
    packed = torch.randint(0, 256, (2, 64, H // 2), dtype=torch.uint8)
    scale = torch.randint(100, 140, (2, 64, H // 32), dtype=torch.uint8)
    theirs = convert_moe_packed_tensors(packed.view(2, 64, H // 32, 16), scale, dtype=torch.float32)
    assert torch.equal(formats.dequantise_mxfp4(packed, scale), theirs.transpose(1, 2))


# ---------------------------------------------------------------------- Engram


def our_layout(given):
    fields = {name.removeprefix("engram_"): value for name, value in given["engram"].items()}
    return engram.HashLayout.of(**{name: fields[name] for name in fields if name not in ("head_dim", "pad_token_id")})


def test_engram_layout(ran):
    given, theirs = ran
    layout = our_layout(given)
    assert torch.equal(layout.primes, torch.tensor(theirs["primes"]))
    assert torch.equal(layout.offsets.flatten(1), theirs["offsets"])
    assert torch.equal(layout.multipliers, theirs["multipliers"])


def test_engram_hashes(ran):
    """vLLM's Triton kernel: four requests, barriers in the batch and in the history, a request's own beginning."""
    given, theirs = ran
    assert given["dead"].any()
    values = given["token_map"][given["tokens"]].masked_fill(given["dead"], engram.BARRIER)
    known = (given["lookback"] >= 0) & ~given["lookback_dead"]
    lookback = torch.where(known, given["token_map"][given["lookback"].clamp(min=0)], engram.BARRIER)
    got = engram.hashes(our_layout(given), values, given["starts"], lookback, 2)
    assert torch.equal(got, theirs["hashes"].long())


def test_engram_token_map(ran):
    from tokenizers import Tokenizer

    given, (values, distinct) = ran[0], ran[1]["map"]
    tokenizer = Tokenizer.from_file(given["tokenizer"])
    names = [tokenizer.id_to_token(token) for token in range(tokenizer.get_vocab_size())]
    got, count = engram.compressed_token_map(lambda token: tokenizer.decode([token], skip_special_tokens=False), names)
    assert (got.tolist(), count) == (values, distinct)
    assert distinct < 0.95 * len(names)
    assert any("\ufffd" in tokenizer.decode([token]) for token in range(len(names)))


def test_engram_lookup(ran):
    given, theirs = ran
    known = given["rows"] >= 0
    at = given["rows"].clamp(min=0)
    rows = formats.dequantise_rows_fp8(given["table"][at].view(torch.float8_e4m3fn), given["table_scale"][at])
    assert torch.equal(torch.where(known.unsqueeze(-1), rows, 0).bfloat16(), theirs["lookup"])


def test_engram_gate(ran):
    given, theirs = ran
    stream = given["stream"].float()
    got = engram.gate_update(stream, given["projected"], given["q_weight"], given["k_weight"], given["keep"], EPS)
    assert torch.equal(got[1], stream[1])
    torch.testing.assert_close(got, theirs["gated"], rtol=1e-5, atol=1e-6)
