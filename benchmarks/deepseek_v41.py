"""What a decoded token of DeepSeek V4.1 costs in a short and in a long context, in one engine.

    python benchmarks/deepseek_v41.py [--steps N] [--json]

One request at a time, greedy, on the 40-layer ``deepseek-v41-small`` in fp32. The prompt is prefilled in chunks, then
single decoding steps are timed; the figure is the ratio of the medians.
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
    result = measure(args.steps)
    if args.json:
        print(json.dumps(result))
    else:
        for context, milliseconds in result["milliseconds"].items():
            print(f"{context:>6} tokens of context: {milliseconds} ms per decoded token")
        print(f"ratio {result['ratio']} (target: at most {LIMIT})")
    return 0 if result["ratio"] <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
