"""Child process: a real engine whose tensors the guard takes for a device's: it clones, copies and judges late.

    python traced_deferred.py DIRECTORY

Prints one line of JSON: findings of a clean run, how many plans were judged, and the findings after one planted fault.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from typing import Any

from kvproof.engine import traced


def main(directory: str) -> None:
    """One engine, a clean run, one fault."""
    from kvproof.trace import copies, worker_side
    from kvproof.zoo import checkpoint, describe

    model = checkpoint.make(
        directory, {**describe("tiny-qwen3").config, "num_hidden_layers": 2, "torch_dtype": "float32"}
    )

    copies.on_host = worker_side.on_host = lambda tensor: False
    engine = traced.TracedEngine(model, options={"full_check_every": 4})
    for n in range(6):
        engine.add(f"r{n}", [(7 * n + i) % 200 for i in range(100 + 20 * n)], max_tokens=40)
    engine.run()
    clean = engine.findings()
    plans = Counter(engine.runner.kv_trace_guard.judge.judged + engine.runner.kv_trace_guard.judge.fast)

    # Beneath the guard's hook: the runner's own slots point at another block while the guard copies them.
    runner = engine.runner
    native: Any = runner._get_slot_mappings
    armed = [True]

    def wrong_block(*args: Any, **kwargs: Any) -> Any:
        by_group, by_layer = native(*args, **kwargs)
        if armed[0] and by_group and runner.input_batch.num_reqs == 1:
            armed[0] = False
            by_group = {group: slots + 128 for group, slots in by_group.items()}
        return by_group, by_layer

    runner._get_slot_mappings = wrong_block
    engine.add("victim", [3] * 20, max_tokens=3)
    engine.run()
    print(json.dumps({"clean": clean, "plans": plans["Plan"], "found": engine.findings()}))
    engine.close()


if __name__ == "__main__":
    wanted = traced.environment("v1")
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **wanted})
    main(sys.argv[1])
