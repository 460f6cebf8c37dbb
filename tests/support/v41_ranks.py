"""DeepSeek V4.1 served by one or two ranks: greedy tokens, and what every rank selected in every step.

    python v41_ranks.py PLAN.json RESULT.json

PLAN: {"model": DIR, "engine": {engine arguments}, "prompts": [[token ids], …], "n": tokens to generate}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def watch(worker: Any) -> None:
    """On a rank: note the selection of every indexer and the experts' share this rank holds."""
    from kvproof.deepseek_v41.indexer import Indexer

    worker.selected = []
    for name, module in worker.model_runner.model.named_modules():
        if isinstance(module, Indexer):
            module.register_forward_hook(
                lambda _, args, out, name=name: worker.selected.append((name, args[2].selection.tolist()))
            )


def seen(worker: Any) -> dict[str, Any]:
    """On a rank: its selections, and the shapes of what it holds of layer 0's experts and heads."""
    layer = worker.model_runner.model.layers[0]
    return {
        "selected": worker.selected,
        "experts": list(layer.ffn.experts.w13.shape),
        "heads": list(layer.attn.attn_sink.shape),
    }


def main(plan_path: str, result_path: str) -> None:
    from vllm import LLM, SamplingParams

    plan = json.loads(Path(plan_path).read_text())
    llm = LLM(
        model=plan["model"], skip_tokenizer_init=True, enforce_eager=True, disable_log_stats=True, **plan["engine"]
    )
    llm.collective_rpc(watch)
    sampling = SamplingParams(temperature=0, max_tokens=plan["n"], ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": p} for p in plan["prompts"]], sampling, use_tqdm=False)
    result = {"tokens": [list(o.outputs[0].token_ids) for o in outputs], "ranks": llm.collective_rpc(seen)}
    Path(result_path).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
