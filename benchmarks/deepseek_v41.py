"""What a decoded token of DeepSeek V4.1 costs in a short and in a long context, in one engine.

    python benchmarks/deepseek_v41.py [--steps N] [--json]

Two figures, each the ratio of a token at 32,768 tokens of context to one at 4,096:

- a whole step of the 40-layer ``deepseek-v41-small`` in a running engine, one request, greedy, fp32. Its widths are
  narrow, so most of a step is the calling of operations;
- what depends on the context at all, at the released widths: gathering, scoring and selecting of the 8 index sources,
  and the attention of the 40 layers; without the matrices, which cost the same in any context.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from kvproof.engine import traced

CONTEXTS = (4096, 32768)
"""Tokens in the cache when the timed steps begin."""

LIMIT = 3.0
"""Most that a token in the longest context may cost, in tokens of the shortest."""


def measure(steps: int) -> dict[str, object]:
    """Median seconds of a decoding step by context, and their ratio."""
    from kvproof.engine.traced import TracedEngine
    from kvproof.zoo import deepseek_v41

    with tempfile.TemporaryDirectory() as where:
        model = deepseek_v41.make("deepseek-v41-small", Path(where) / "small", dtype="float32")
        longest = CONTEXTS[-1] + steps + 128
        engine = TracedEngine(
            model,
            block_size=128,
            dtype="float32",
            max_model_len=longest,
            max_num_batched_tokens=512,
            max_num_seqs=1,
            num_blocks=longest // 128 + 200,
            enable_prefix_caching=True,
        )
        generator = random.Random(0)
        prompt = [generator.randrange(3, 280) for _ in range(CONTEXTS[-1])]
        medians = {}
        for context in CONTEXTS:
            served = engine.add(str(context), prompt[:context], max_tokens=steps + 2)
            while not served.tokens:
                engine.step()
                _progress(f"prefill of {context} tokens")
            seconds = []
            for _ in range(steps):
                start = time.perf_counter()
                engine.step()
                seconds.append(time.perf_counter() - start)
            medians[context] = statistics.median(seconds)
            engine.run()
        engine.close()
    return {
        "milliseconds": {str(context): round(1000 * value, 2) for context, value in medians.items()},
        "ratio": round(medians[CONTEXTS[-1]] / medians[CONTEXTS[0]], 2),
        "limit": LIMIT,
    }


def operations(rounds: int) -> dict[str, object]:
    """Milliseconds of the operations of one token that see the context, released widths, bf16 caches, by context."""
    import torch

    from kvproof.deepseek_v41.ops.attention import sparse_attention
    from kvproof.deepseek_v41.ops.indexer import scores
    from kvproof.deepseek_v41.ops.paging import read_pages
    from kvproof.deepseek_v41.ops.selection import top_k

    heads, width, index_heads, index_width, top, window, block = 64, 512, 32, 128, 512, 128, 128
    sources = {1: 5, 2: 3}  # index sources by ratio; 40 layers attend
    torch.manual_seed(0)
    q = torch.randn(1, heads, width).bfloat16()
    index_q, weights = torch.randn(1, 1, index_heads, index_width).bfloat16(), torch.rand(1, 1, index_heads)
    milliseconds: dict[str, float] = {}
    for context in CONTEXTS:
        table = torch.randperm(context // block).unsqueeze(0) + 1
        slots = torch.randint(block, context, (1, window + top))
        window_cache = torch.randn(context // block + 1, block, width).bfloat16()

        def attend(window_cache=window_cache, slots=slots) -> None:
            sparse_attention(
                q, window_cache, slots[:, :window], window_cache, slots[:, window:], torch.zeros(heads), width**-0.5
            )

        total = 40 * _best(attend, rounds)
        for ratio, count in sources.items():
            keys = torch.randn(context // block + 1, block // ratio, index_width).bfloat16()

            def select(keys=keys, table=table) -> None:
                found = scores(index_q, weights, read_pages(keys, table)).flatten(0, 1)
                top_k(found, torch.tensor([found.shape[1]]), top)

            total += count * _best(select, rounds)
        milliseconds[str(context)] = round(1000 * total, 1)
    first, last = (milliseconds[str(context)] for context in CONTEXTS)
    return {"milliseconds": milliseconds, "ratio": round(last / first, 2), "limit": LIMIT}


def _best(call: Callable[[], None], rounds: int) -> float:
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{text} …", end="", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="decoding steps timed in each context")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    args = parser.parse_args()
    wanted = {**traced.environment("v1"), "VLLM_PLUGINS": "kvproof_deepseek_v41"}
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        # Some of these count only when the interpreter starts.
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **wanted})
    results = {"operations": operations(args.steps), "step": measure(args.steps)}
    if args.json:
        print(json.dumps(results))
    else:
        for name, result in results.items():
            for context, milliseconds in result["milliseconds"].items():
                print(f"{name}: {context:>6} tokens of context, {milliseconds} ms per decoded token")
            print(f"{name}: ratio {result['ratio']} (target: at most {LIMIT})")
    return 0 if all(result["ratio"] <= LIMIT for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
