"""Child process: vLLM's LLM class with several processes, as a user starts it.

    python traced_llm.py '{"model": DIR, "kv_trace": {...}, "rounds": 1}'

Prints "served N" after each of ``rounds`` short rounds, then serves a long one (to be killed in) when ``long`` is set.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def main() -> int:
    wanted = json.loads(sys.argv[1])
    model = Path(wanted["model"])
    if not (model / "config.json").exists():
        from traced_soak import QWEN3

        from kvproof.zoo import checkpoint

        checkpoint.make(model, QWEN3)
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(model),
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=2048,
        max_num_seqs=8,
        block_size=32,
        num_gpu_blocks_override=600,
        gpu_memory_utilization=0.3,
        additional_config={"kv_trace": wanted["kv_trace"]},
    )
    prompts = [{"prompt_token_ids": [(7 * n + i) % 250 for i in range(20 + 30 * n)]} for n in range(6)]

    def serve(tokens: int) -> int:
        sampling = SamplingParams(max_tokens=tokens, temperature=0, detokenize=False, ignore_eos=True)
        answers = llm.generate(prompts, sampling, use_tqdm=False)
        return sum(len(answer.outputs[0].token_ids) for answer in answers)

    for _ in range(wanted.get("rounds", 1)):
        print(f"served {serve(5)}", flush=True)
    if wanted.get("long"):
        print(f"pid {os.getpid()}", flush=True)
        serve(1500)
    return 0


if __name__ == "__main__":
    sys.exit(main())
