"""Child process: one fault beneath the guard of a real engine with ``action: raise``; prints what ``step`` raised.

    python traced_raise.py MODEL v1|v2

One JSON object per fault on standard output. Faults are planted in the native class, so the guard wraps the broken
method as it would wrap a broken release of vLLM.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvproof.engine import traced
from kvproof.platforms import triton_host

Plant = Callable[[Any], None]


class Fault:
    """Changes what a method of a native class returns, from the moment it is armed."""

    def __init__(self, owner: type, name: str, change: Plant):
        self.armed = False
        native = getattr(owner, name)

        def broken(*args: Any, **kwargs: Any) -> Any:
            result = native(*args, **kwargs)
            if self.armed:
                change(result)
            return result

        setattr(owner, name, broken)


def total(output: Any) -> None:
    """The declared sum is one too high."""
    output.total_num_scheduled_tokens += 1


def slot_v1(result: Any) -> None:
    """The first token of the step goes to the last slot of its block."""
    by_group = result[0]
    if by_group:
        slots = by_group[0]
        slots[0] = slots[0] // 32 * 32 + 31


def slot_v2(result: Any) -> None:
    """The same in model runner V2."""
    slots = result[1][0]
    slots[0] = slots[0] // 32 * 32 + 31


def attempt(engine: traced.TracedEngine, fault: Fault, name: str) -> dict[str, Any]:
    """Serve a while, arm the fault, step until something is raised."""
    engine.add(f"{name}-before", [1, 2, 3] * 20, max_tokens=4)
    engine.run()
    clean = engine.findings()
    engine.add(name, [4, 5, 6] * 20, max_tokens=4)
    fault.armed = True
    try:
        engine.run()
    except Exception as error:
        raised: dict[str, Any] = {
            "type": type(error).__name__,
            "message": str(error),
            "violations": [
                {key: getattr(v, key) for key in ("rule", "request", "group", "block", "expected", "found")}
                for v in getattr(error, "violations", ())
            ],
        }
    else:
        raised = {}
    fault.armed = False
    return {"clean": clean, "raised": raised, "logged": engine.findings()}


def main() -> int:
    model, runner = Path(sys.argv[1]), sys.argv[2]
    if not (model / "config.json").exists():
        from traced_soak import QWEN3

        from kvproof.zoo import checkpoint

        checkpoint.make(model, QWEN3)
    if runner == "v2":
        triton_host.register()
        from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    else:
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.core.sched.scheduler import Scheduler

    faults = {
        "total": Fault(Scheduler, "schedule", total),
        "slot": Fault(GPUModelRunner, "prepare_attn", slot_v2)
        if runner == "v2"
        else Fault(GPUModelRunner, "_get_slot_mappings", slot_v1),
    }
    for name, fault in faults.items():
        options = {"action": "raise", "full_check_every": 2}
        engine = traced.TracedEngine(model, runner=runner, options=options, block_size=32, dtype="float32")
        result = {"fault": name, **attempt(engine, fault, f"victim-{name}")}
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()
        engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
