"""The cache and selection operations against upstream's own V4.1 kernels, run by Triton's interpreter on the CPU.

One child process (this file as a script) runs the kernels at the released widths with few tokens and saves what they
were given and what they answered; nothing here imports vLLM. What cannot run on a CPU is not an oracle: the MXFP4 and
NVFP4 stores (inline assembly) and ``fused_indexer_q_rope_quant`` itself (its CPU branch wants a compiled operator that
the wheel lacks; its Triton kernel is called instead).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvproof.deepseek_v41.ops.attention import sparse_attention
from kvproof.deepseek_v41.ops.compressor import compress_pairs
from kvproof.deepseek_v41.ops.indexer import scores
from kvproof.deepseek_v41.ops.norm import rms_norm
from kvproof.deepseek_v41.ops.paging import read_pages, read_rows, slots_of, write_rows
from kvproof.deepseek_v41.ops.rope import rotate
from kvproof.deepseek_v41.ops.selection import candidate_blocks, check_candidates, restrict, top_k

pytestmark = pytest.mark.engine
SECTIONS: dict[str, Callable[[], dict[str, Any]]] = {}
EPS = 1e-20
TIMEOUT_S = 600


def section(function: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    SECTIONS[function.__name__] = function
    return function


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def norm_weight(width: int) -> Tensor:
    return (1 + 0.1 * torch.randn(width)).bfloat16()


def angles(positions: int) -> Tensor:
    """[positions, 64]: 32 cosines, then 32 sines."""
    phase = torch.rand(positions, 32) * 6.28
    return torch.cat((phase.cos(), phase.sin()), dim=1)


# --- the child -------------------------------------------------------------------------------------------------------


@section
def compressor() -> dict[str, Any]:
    from vllm.models.deepseek_v41.common.ops.fused_compress_quant_cache import fused_save_compress_norm

    weight, ring = norm_weight(512), torch.full((3, 8, 1024), 99.0)
    steps = []
    # (ring block, start position, tokens): pairs cut anywhere, chunks longer than the ring, dummies on the null block.
    for chunks in (
        [(1, 0, 5), (0, 4, 3), (2, 0, 19)],
        [(2, 19, 12), (1, 5, 2), (0, 1, 2)],
        [(1, 7, 1), (2, 31, 1)],
        [(2, 32, 1), (1, 8, 8)],
    ):
        blocks, starts, lengths = (torch.tensor(column) for column in zip(*chunks, strict=True))
        request = torch.repeat_interleave(torch.arange(len(chunks)), lengths)
        loc = torch.tensor([0, *lengths.cumsum(0).tolist()])
        position = starts[request] + torch.arange(len(request)) - loc[request]
        slots = torch.where(blocks[request] > 0, blocks[request] * 8 + position % 8, -1)
        state, latent = torch.randn(len(request), 1024) * 2, torch.full((len(request), 512), 77.0).bfloat16()
        before = ring.clone()
        fused_save_compress_norm(state, position, ring, slots, loc.int(), request.int(), weight, EPS, 2, latent)
        steps.append(
            {"blocks": blocks, "starts": starts, "loc": loc, "state": state, "latent": latent}
            | {"before": before, "after": ring.clone()}
        )
    return {"weight": weight, "steps": steps}


def paged() -> dict[str, Tensor]:
    """Two requests on pages of 16 tokens; tokens of both, and a padded one of slot -1."""
    return {
        "table": torch.tensor([[3, 1, 5], [2, 4, 6]], dtype=torch.int32),
        "request": torch.tensor([0, 0, 0, 1, 1, 0, -1, 1, 0]),
        "position": torch.tensor([0, 1, 17, 2, 3, 31, 0, 40, 33]),
    }


@section
def stores() -> dict[str, Any]:
    from vllm.models.deepseek_v41.common.ops import indexer_k_norm_rope_store
    from vllm.models.deepseek_v41.common.ops.fused_compress_quant_cache import rope_quant_insert

    tokens, table = paged(), angles(64)
    latent, key, weight = torch.randn(9, 512).bfloat16(), torch.randn(9, 128).bfloat16(), norm_weight(128)
    result: dict[str, Any] = tokens | {"angles": table, "latent": latent, "key": key, "weight": weight}
    for ratio in (1, 2):
        slots = slots_of(tokens["table"], tokens["request"], tokens["position"], 16, ratio)
        rows = torch.full((7, 16 // ratio, 512), 5.0).bfloat16()
        rope_quant_insert(latent, tokens["position"], table, rows, slots, ratio)
        bytes_ = torch.zeros(7, 16 // ratio, 132, dtype=torch.uint8)
        indexer_k_norm_rope_store(key, tokens["position"], table, weight, EPS, bytes_, slots, ratio, False)
        result |= {f"rows{ratio}": rows, f"keys{ratio}": bytes_}
    return result


@section
def gathers() -> dict[str, Any]:
    from vllm.models.deepseek_v41.common.ops import dequantize_and_gather_k_cache, quantize_and_insert_k_cache

    table = torch.tensor([[3, 1], [2, 4]], dtype=torch.int32)
    request, position = torch.arange(2).repeat_interleave(12), torch.arange(12).repeat(2)
    rows = torch.randint(-8, 9, (24, 512)).bfloat16()  # whole numbers up to 8 survive e4m3 with any power of two
    slots = slots_of(table, request, position, 8)
    slots[5] = -1
    result: dict[str, Any] = {"table": table, "request": request, "position": position, "rows": rows, "slots": slots}
    lengths, wanted = ints(12, 10), ints(7, 3)
    for record in (528, 584):
        cache = torch.zeros(5, 8, record, dtype=torch.uint8)
        quantize_and_insert_k_cache(rows, cache.view(5, -1), slots, 8, bytes_per_token=record)
        out = torch.zeros(2, 9, 512).bfloat16()
        dequantize_and_gather_k_cache(out, cache, lengths, wanted, table, 8, 2)
        result[f"out{record}"] = out
    return result | {"lengths": lengths, "wanted": wanted}


@section
def index_scores() -> dict[str, Any]:
    from vllm.models.deepseek_v4.common.ops import fused_indexer_q
    from vllm.models.deepseek_v41.common.ops import indexer_k_norm_rope_store
    from vllm.v1.attention.ops.rocm_aiter_mla_sparse import fp8_paged_mqa_logits_torch

    table, positions = angles(64), torch.tensor([20, 33, 9])
    q, w = torch.randn(3, 4, 128).bfloat16(), torch.randn(3, 4)
    q8, folded = torch.empty(q.shape, dtype=torch.float8_e4m3fn), torch.empty(3, 4)
    fused_indexer_q._FUSED_INDEXER_Q_ROPE_QUANT_TRITON_KERNEL(
        positions, q, table, w, 128**-0.5, 4**-0.5, q8, folded, fp8_max=448.0, use_fnuz=False
    )
    cache = torch.zeros(8, 8, 132, dtype=torch.uint8)
    key = torch.randn(56, 128).bfloat16()
    indexer_k_norm_rope_store(key, torch.arange(56), table, norm_weight(128), EPS, cache, torch.arange(8, 64), 1, False)
    pages = torch.tensor([[3, 1, 5], [2, 4, 0], [7, 6, 0]], dtype=torch.int32)
    visible = ints(21, 16, 10)
    logits = fp8_paged_mqa_logits_torch(q8.unsqueeze(1), cache, folded, visible, pages, 24)
    return {"angles": table, "positions": positions, "q": q, "w": w, "q8": q8.float(), "folded": folded} | {
        "cache": cache,
        "pages": pages,
        "visible": visible,
        "logits": logits,
    }


@section
def candidates() -> dict[str, Any]:
    from vllm.model_executor.kernels.attention.dsa import candidate_blocks as kernels

    block, count, width = 4, 3, 30
    scores = torch.randn(6, width)
    scores[5, 2] = torch.nan
    visible, blocks = ints(30, 0, 9, 1, 23, 27), -(-width // block)
    block_scores, chosen = torch.empty(6, blocks), torch.empty(6, count, dtype=torch.int32)
    kernels._block_scores_kernel[(6, 1)](
        scores, None, visible, block_scores, *scores.stride(), 0, 1, width, blocks, block, False, 1, 128
    )
    top = block_scores.topk(count, dim=-1)
    kernels._store_candidates_kernel[(6, 1)](top.values, top.indices, chosen, *chosen.stride(), count, count, 256)
    masked, flags = scores.clone(), torch.empty(6, blocks + 1, dtype=torch.uint8)
    kernels._candidate_flags_kernel[(6,)](
        chosen, None, flags, *chosen.stride(), 0, width, blocks, block, count, False, 1
    )
    kernels._mask_candidates_kernel[(6, 1)](
        masked, None, visible, flags, *masked.stride(), 0, 1, width, blocks, block, False, 1, 1024
    )
    return {"block": block, "scores": scores, "visible": visible, "chosen": chosen, "masked": masked}


@section
def global_slots() -> dict[str, Any]:
    from vllm.models.deepseek_v41.common.ops import compute_global_topk_indices_and_lens

    selected = torch.sort(torch.randint(-4, 24, (5, 16)).clamp(min=-1), descending=True).values.int()
    table, request = torch.tensor([[3, 1, 5], [2, 4, 6]], dtype=torch.int32), ints(0, 1, 1, 0, 1)
    slots, _ = compute_global_topk_indices_and_lens(selected, request, table, 8, torch.ones(5, dtype=torch.bool))
    return {"selected": selected, "table": table, "request": request, "slots": slots}


@section
def attention() -> dict[str, Any]:
    from vllm.models.deepseek_v41.common.ops import combine_topk_swa_indices
    from vllm.v1.attention.ops.rocm_aiter_mla_sparse import _sparse_attn_prefill_ragged_kernel as kernel

    # Two requests in one chunk: tokens 3..8 of one, 20..22 of the other. Ratio 2, window 8, 4 selected rows.
    request = torch.tensor([0] * 6 + [1] * 3)
    position = torch.tensor([3, 4, 5, 6, 7, 8, 20, 21, 22])
    long, window = torch.randn(2, 11, 512), torch.randn(2, 23, 512)
    selected = torch.full((9, 4), -1, dtype=torch.int32)
    for t, p in enumerate(position.tolist()):
        rows = torch.randperm((p + 1) // 2)[:4].sort().values
        selected[t, : len(rows)] = rows.int()
    # The workspace of a request: 11 long rows, then the window rows from position length - gathered on.
    lengths, gathered, m, n = ints(9, 23), ints(9, 10), 24, 11
    workspace = torch.zeros(2, m, 512)
    for r in range(2):
        workspace[r, :n] = long[r]
        workspace[r, n : n + int(gathered[r])] = window[r, int(lengths[r] - gathered[r]) : int(lengths[r])]
    combined, used = combine_topk_swa_indices(selected, ints(0, 6, 9), lengths, gathered, 8, 2, 4, m, n)
    ragged = [combined[t, : int(used[t])] for t in range(9)] + [ints()]  # a last token that sees nothing
    starts = torch.tensor([0, *(len(row) for row in ragged)]).cumsum(0).int()
    q, sink = torch.randn(10, 16, 512), torch.randn(16)
    sink[5] = -torch.inf
    out = torch.full_like(q, 7.0)
    kv = workspace.view(-1, 512)
    kernel[(10, 1)](
        q, kv, torch.cat(ragged), starts, sink, out, *q.stride(), *kv.stride(), *out.stride(), 16, 512, len(kv),
        512**-0.5, HAS_ATTN_SINK=True, OUT_DV=512, BLOCK_H=16, BLOCK_D=512, BLOCK_K=16,
    )  # fmt: skip
    return {"request": request, "position": position, "long": long, "window": window, "selected": selected} | {
        "q": q,
        "sink": sink,
        "out": out,
    }


@section
def query_norm() -> dict[str, Any]:
    from vllm.models.deepseek_v41.common.ops.query_quant import fused_q_kv_rmsnorm_quant

    q, kv = torch.randn(3, 1280).bfloat16(), torch.randn(3, 512).bfloat16()
    q_weight, kv_weight = norm_weight(1280), norm_weight(512)
    kv[1] = 0
    quantised, normed = fused_q_kv_rmsnorm_quant(q, kv, q_weight, kv_weight, EPS)
    groups = torch.arange(40)
    offsets = groups // 4 * 512 + torch.arange(3).unsqueeze(1) * 16 + groups % 4
    values, scales = quantised.data, quantised.scale
    return {"q": q, "kv": kv, "q_weight": q_weight, "kv_weight": kv_weight, "normed": normed} | {
        "values": values.float(),
        "exponents": scales[offsets].int() - 127,
    }


def child(target: str) -> None:
    from kvproof.platforms import triton_host

    triton_host.register()  # before the first import of vLLM
    results = {}
    for number, (name, run) in enumerate(SECTIONS.items()):
        torch.manual_seed(number)
        results[name] = run()
    torch.save(results, target)


# --- the comparisons -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    from kvproof.platforms.triton_host import ENVIRONMENT

    target = tmp_path_factory.mktemp("v41") / "third_party.pt"
    env = os.environ | ENVIRONMENT | {"OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [sys.executable, str(Path(__file__)), str(target)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, dict[str, Any]] = torch.load(target)
    return result


def truncated(x: Tensor) -> Tensor:
    """fp32 to bf16 towards zero: what Triton's interpreter does where a device rounds to nearest."""
    return (x.view(torch.int32) & -0x10000).view(torch.float32).bfloat16()


def same_but_for_fp32_noise(ours: Tensor, theirs: Tensor) -> None:
    """bf16 tensors: at most one unit in the last place apart, and nearly everywhere the same."""
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=2**-7, atol=1e-30)
    assert (ours != theirs).float().mean() < 0.01


def same_codes(codes: Tensor, exact: Tensor) -> None:
    """``codes`` are ``exact`` rounded to e4m3: at most half a step away (3 mantissa bits; 2^-9 below the normal ones).

    The interpreter drops the carry of some mantissas that round up to 2, so 125 may become 64: such a number is let
    pass at half its value, where it lies in the last half step of its power of two.
    """
    near = (codes - exact).abs() <= (exact.abs() / 16).clamp(min=2**-9)
    mantissa, _ = torch.frexp(exact.abs())
    dropped = (mantissa * 2 >= 1.9375) & ((codes * 2 - exact).abs() <= exact.abs() / 16)
    assert (near | dropped).all()
    assert near.float().mean() > 0.95


def test_compressed_latents_and_ring_rows(oracle: dict[str, dict[str, Any]]) -> None:
    case, emitted = oracle["compressor"], 0
    for step in case["steps"]:
        ring = step["before"].clone()
        pooled, emitting = compress_pairs(step["state"], ring, step["blocks"], step["loc"], step["starts"])
        assert torch.equal(ring, step["after"])
        written = (step["latent"] != 77.0).any(dim=1).nonzero().flatten()
        assert emitting.tolist() == written.tolist()
        same_but_for_fp32_noise(truncated(rms_norm(pooled, case["weight"], EPS)), step["latent"][emitting])
        emitted += len(emitting)
    assert emitted == 2 + 9 + 1 + 6 + 2 + 4


@pytest.mark.parametrize("ratio", [1, 2])
def test_cache_rows_land_in_the_same_slots(oracle: dict[str, dict[str, Any]], ratio: int) -> None:
    case = oracle["stores"]
    slots = slots_of(case["table"], case["request"], case["position"], 16, ratio)
    slots = slots.where((case["position"] + 1) % ratio == 0, -1)
    cos, sin = case["angles"][case["position"] // ratio * ratio].chunk(2, dim=1)
    theirs = case[f"rows{ratio}"]
    ours = torch.full_like(theirs, 5.0)
    write_rows(ours, slots, truncated(rotate(case["latent"].float(), cos, sin)))
    assert torch.equal(ours, theirs)
    assert int((ours != 5.0).any(dim=2).sum()) == {1: 8, 2: 5}[ratio]

    normed = truncated(rms_norm(case["key"].float(), case["weight"], EPS))
    keys = truncated(rotate(normed.float(), cos, sin))
    page = 16 // ratio
    pages = case[f"keys{ratio}"].view(7, -1)
    codes = pages[:, : page * 128].view(7, page, 128).view(torch.float8_e4m3fn).float()
    scales = pages[:, page * 128 :].contiguous().view(torch.float32).view(7, page, 1)
    held = torch.zeros(7, page, 128)
    write_rows(held, slots, keys)
    used = held.abs().amax(dim=2, keepdim=True).clamp(min=1e-4)
    expected = torch.where((held != 0).any(dim=2, keepdim=True), (used / 448).log2().ceil().exp2(), 0.0)
    assert torch.equal(scales, expected)
    same_codes(codes, held / scales.where(scales > 0, 1.0))


@pytest.mark.parametrize("record", [528, 584])
def test_rows_are_gathered_from_the_same_slots(oracle: dict[str, dict[str, Any]], record: int) -> None:
    case = oracle["gathers"]
    cache = torch.zeros(5, 8, 512, dtype=torch.bfloat16)
    write_rows(cache, case["slots"], case["rows"])
    first = case["lengths"] - case["wanted"]
    position = torch.arange(7) + first.unsqueeze(1)
    position = position.where(torch.arange(7) < case["wanted"].unsqueeze(1), -1).long()
    ours = read_rows(cache, slots_of(case["table"], torch.arange(2), position, 8))
    assert torch.equal(ours, case[f"out{record}"][:, 2:])
    assert int((ours != 0).any(dim=2).sum()) == 9  # one of the ten rows was never stored: its slot was -1


def test_index_queries_and_scores(oracle: dict[str, dict[str, Any]]) -> None:
    case = oracle["index_scores"]
    cos, sin = case["angles"][case["positions"]].chunk(2, dim=1)
    scale = (case["folded"] / case["w"] * 128**0.5 * 2).log2().round().exp2().unsqueeze(2)
    q = case["q8"] * scale
    same_codes(case["q8"], truncated(rotate(case["q"].float(), cos, sin)).float() / scale)

    pages = case["cache"].view(8, -1)
    codes = pages[:, : 8 * 128].view(8, 8, 128).view(torch.float8_e4m3fn).float()
    cache = codes * pages[:, 8 * 128 :].contiguous().view(torch.float32).view(8, 8, 1)
    ours = scores(q.unsqueeze(1), case["w"].unsqueeze(1), read_pages(cache, case["pages"])).squeeze(1)
    seen = torch.arange(24) < case["visible"].unsqueeze(1)
    assert torch.equal(seen, case["logits"] > -torch.inf)
    torch.testing.assert_close(ours[seen], case["logits"][seen], rtol=1e-5, atol=1e-6)
    top = top_k(ours, case["visible"].long(), 8).sort(dim=1).values
    assert torch.equal(top, case["logits"].topk(8, dim=1).indices.sort(dim=1).values.int())


def test_candidate_blocks_and_the_mask(oracle: dict[str, dict[str, Any]]) -> None:
    case = oracle["candidates"]
    visible = case["visible"].long()
    chosen = candidate_blocks(case["scores"], visible, case["block"], 3)
    check_candidates(chosen, visible, case["block"])
    assert torch.equal(chosen.sort(dim=1).values, case["chosen"].sort(dim=1).values)
    assert 0 in chosen[5]  # the block with a NaN
    masked = restrict(case["scores"], chosen, case["block"])
    masked[torch.arange(30) >= visible.unsqueeze(1)] = -torch.inf
    torch.testing.assert_close(masked, case["masked"], rtol=0, atol=0, equal_nan=True)


def test_selected_rows_have_the_same_slots(oracle: dict[str, dict[str, Any]]) -> None:
    case = oracle["global_slots"]
    slots = slots_of(case["table"], case["request"], case["selected"] * 2, 16, ratio=2)
    assert torch.equal(slots.int(), case["slots"])
    assert (slots < 0).any()


def test_attention_over_window_selection_and_sink(oracle: dict[str, dict[str, Any]]) -> None:
    case = oracle["attention"]
    # Pages of 4 tokens; the long rows of two of them share a page. Request r owns blocks 1 + 6 r up to 6 + 6 r.
    table, request, position = torch.arange(1, 13).view(2, 6), case["request"], case["position"]
    window_cache, long_cache = torch.full((13, 4, 512), torch.nan), torch.full((13, 2, 512), torch.nan)
    for r in range(2):
        of = torch.full((23,), r)
        write_rows(window_cache, slots_of(table, of, torch.arange(23), 4), case["window"][r])
        write_rows(long_cache, slots_of(table, of[:11], torch.arange(11) * 2, 4, ratio=2), case["long"][r])
    window = position.unsqueeze(1) - torch.arange(8)
    ours = sparse_attention(
        case["q"],
        window_cache,
        torch.cat([slots_of(table, request, window, 4), torch.full((1, 8), -1)]),
        long_cache,
        torch.cat([slots_of(table, request, case["selected"] * 2, 4, ratio=2), torch.full((1, 4), -1)]),
        case["sink"],
        512**-0.5,
    )
    torch.testing.assert_close(ours, case["out"], rtol=1e-5, atol=1e-6)
    assert not ours[9].any()


def test_query_and_latent_norms(oracle: dict[str, dict[str, Any]]) -> None:
    case = oracle["query_norm"]
    same_but_for_fp32_noise(truncated(rms_norm(case["kv"].float(), case["kv_weight"], EPS)), case["normed"])
    assert not case["normed"][1].any()
    scale = case["exponents"].float().exp2().repeat_interleave(32, dim=1)
    normed = truncated(rms_norm(case["q"].float(), case["q_weight"], EPS)).float()
    same_codes(case["values"], normed / scale)


if __name__ == "__main__":
    child(sys.argv[1])
