"""Plays cases of DeepSeek V4.1 on a real engine and saves what happened: tokens, hidden states, cache rows, selections.

    python v41_engine.py PLAN.json RESULT.pt

PLAN: {"model": DIR, "runner": "v1" | "v2", "engine": {engine arguments}, "record": [...], "cases": [CASE, …]}.
CASE: {"name", "requests": [{"id", "prompt", "n", "at"}], and optionally "chunk" (most tokens of one step), "keep" (do
not forget prefixes before), "poison" (NaN in every cache first), "free" (blocks left free, so that vLLM preempts)}.
A request that wants n tokens is looked at when it has them and is aborted then: its blocks are still its own.

One process, one engine; every case starts on an idle one. Runs under kv_trace, whose findings are part of the result.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from kvproof.engine.traced import TracedEngine


class Ground:
    """A running engine, its caches by layer name, and what its model did by request and position."""

    def __init__(self, plan: dict[str, Any]):
        self.engine = TracedEngine(plan["model"], runner=plan["runner"], options={"action": "log"}, **plan["engine"])
        from kvproof.deepseek_v41.caches import Cache
        from kvproof.deepseek_v41.decoder import DecoderLayer
        from kvproof.deepseek_v41.indexer import Indexer
        from kvproof.deepseek_v41.moe import Router

        layers = self.engine.config.compilation_config.static_forward_context
        self.caches = {name: layer for name, layer in layers.items() if isinstance(layer, Cache)}
        groups = self.engine.scheduler.kv_cache_config.kv_cache_groups
        self.group = {name: g for g, group in enumerate(groups) for name in group.layer_names}
        self.ring = next(name for name in self.caches if "state_cache" in name)
        self.window = next(name for name in self.caches if "swa_cache" in name)
        self.model = self.engine.runner.model
        self.seen: dict[str, dict[str, dict[int, torch.Tensor]]] = {}
        self.record = set(plan.get("record", ["hidden"]))
        self._on(self.model, "hidden", lambda args, out: out)
        for name, module in self.model.named_modules():
            if isinstance(module, DecoderLayer):
                self._on(module, "stream", lambda args, out: out[0], name)
            elif isinstance(module, Indexer):
                self._on(module, "selection", lambda args, out: args[2].selection, name)
                if module.is_candidate_source:
                    self._on(module, "candidates", lambda args, out: args[2].candidates, name)
            elif isinstance(module, Router):
                self._on(module, "router", lambda args, out: out, name)

    def _on(self, module: torch.nn.Module, kind: str, pick: Any, name: str = "") -> None:
        if kind not in self.record:
            return
        key = f"{kind}:{name}" if name else kind

        def keep(_: Any, args: Any, out: Any) -> None:
            step = self.caches[self.window].step
            if step is None:
                return
            names = self._names()
            rows = pick(args, out)
            for row, (request, position) in enumerate(zip(step.request.tolist(), step.position.tolist(), strict=True)):
                self.seen[names[request]][key][position] = rows[row].clone()

        module.register_forward_hook(keep)

    def _names(self) -> list[str]:
        """The requests of the batch in its order, known by their ring blocks."""
        manager = self.engine.scheduler.kv_cache_manager
        of_block = {
            blocks[0]: name
            for name in self.engine.scheduler.requests
            if (blocks := manager.get_block_ids(name)[self.group[self.ring]])
        }
        return [of_block[block] for block in self.caches[self.ring].step.block_table[:, 0].tolist()]

    def rows(self, name: str) -> dict[str, torch.Tensor]:
        """The rows of a request's caches that its next step could read, by cache."""
        scheduler = self.engine.scheduler
        computed = scheduler.requests[name].num_computed_tokens
        blocks = scheduler.kv_cache_manager.get_block_ids(name)
        found = {}
        for cache, layer in self.caches.items():
            spec, of_group = layer.spec, blocks[self.group[cache]]
            if cache.endswith("state_cache"):
                at = [(of_group[0], p % spec.block_size) for p in range(computed - computed % 2, computed)]
            else:
                ratio = int(spec.tokens_per_state)
                first = max(0, computed - spec.sliding_window + 1) if cache.endswith("swa_cache") else 0
                last_of_each = range(first + ratio - 1, computed, ratio)
                at = [(of_group[p // spec.block_size], p % spec.block_size // ratio) for p in last_of_each]
            found[cache] = torch.stack([layer.rows[b, r] for b, r in at]).clone() if at else torch.empty(0)
        return found

    def play(self, case: dict[str, Any]) -> dict[str, Any]:
        engine, scheduler = self.engine, self.engine.scheduler
        if not case.get("keep"):
            assert engine.reset(), "an idle engine forgets its prefixes"
        if case.get("poison"):
            for layer in self.caches.values():
                layer.kv_cache.fill_(torch.nan)
        limit, scheduler.max_num_scheduled_tokens = scheduler.max_num_scheduled_tokens, case.get("chunk") or 1 << 30
        scheduler.max_num_scheduled_tokens = min(limit, scheduler.max_num_scheduled_tokens)
        pool = scheduler.kv_cache_manager.block_pool
        held = pool.get_new_blocks(pool.get_num_free_blocks() - case["free"]) if "free" in case else []
        waiting = sorted(case["requests"], key=lambda r: r.get("at", 0))
        result: dict[str, Any] = defaultdict(dict)
        self.seen = defaultdict(lambda: defaultdict(dict))
        step, live = 0, {}
        while waiting or live:
            while waiting and waiting[0].get("at", 0) <= step:
                request = waiting.pop(0)
                live[request["id"]] = (engine.add(request["id"], request["prompt"], request["n"] + 1), request["n"])
            engine.step()
            step += 1
            for name, (served, n) in list(live.items()):
                request = scheduler.requests[name]
                result["preemptions"][name] = request.num_preemptions
                if len(served.tokens) >= n:
                    result["tokens"][name] = served.tokens[:n]
                    result["computed"][name] = request.num_computed_tokens
                    result["rows"][name] = self.rows(name)
                    engine.abort([name])
                    del live[name]
            if step > 5000:
                raise RuntimeError(f"case {case['name']}: no end after {step} steps")
        pool.free_blocks(held)
        scheduler.max_num_scheduled_tokens = limit
        while engine.busy:
            engine.step()
        result["steps"] = step
        for name, kinds in self.seen.items():
            for kind, by_position in kinds.items():
                positions = sorted(by_position)
                rows = torch.stack([by_position[p] for p in positions])
                result.setdefault(kind, {})[name] = (positions, rows)
        return dict(result)


def main(plan_path: str, result_path: str) -> None:
    plan = json.loads(Path(plan_path).read_text())
    ground = Ground(plan)
    results = {}
    for case in plan["cases"]:
        results[case["name"]] = ground.play(case)
        results[case["name"]]["findings"] = ground.engine.findings()
    torch.save(results, result_path)
    ground.engine.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
