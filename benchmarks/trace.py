"""What kv_trace costs a decoding step, in one running engine: ``make bench-trace``.

    python benchmarks/trace.py [--requests 64 256] [--steps 400] [--runner v1] [--no-log] [--json]

A real engine (vLLM's own EngineCore, runner and kernels; a tiny random model) decodes N requests. The guard's hooks are
switched on and off from step to step; a step without them is read into the guard's shadow afterwards, outside the
clock, so that the next one is judged against the truth. Reported: thread CPU and wall time of the steps with and
without (median), and the time inside the hooks themselves, which the noise of a step does not reach.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from kvproof.engine import traced

TARGETS_MS = {64: 0.15, 256: 0.3}
"""Most a step may cost [ms], logging on."""

HOOKS = {
    "scheduler": ("_before_schedule", "_after_schedule", "_before_update", "_after_update"),
    "worker": ("_before_execute", "_after_execute", "_before_metadata", "_after_prepare_attn", "_before_postprocess",
               "_after_sample"),
}  # fmt: skip


class Switch:
    """Turns the hooks of both guards on and off, and adds up the time inside them."""

    def __init__(self) -> None:
        self.on = True
        self.wall = 0.0
        self.by_hook: dict[str, float] = {}

    def around(self, guard_type: type, name: str) -> None:
        """Put the switch and the clocks around one hook, before any guard exists."""
        hook = getattr(guard_type, name)

        def timed(guard: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.on:
                return None
            begun = time.perf_counter()  # thread_time is a system call and would be most of what it measures
            try:
                return hook(guard, *args, **kwargs)
            finally:
                spent = time.perf_counter() - begun
                self.wall += spent
                self.by_hook[name] = self.by_hook.get(name, 0.0) + spent

        setattr(guard_type, name, timed)


def measure(engine: traced.TracedEngine, switch: Switch, requests: int, steps: int) -> dict[str, Any]:
    """Decode with ``requests`` running, hooks on in every other step."""
    scheduler, worker = engine.scheduler.kv_trace_guard, engine.runner.kv_trace_guard
    native_schedule = engine.scheduler.schedule
    outputs: list[Any] = []

    def schedule(*args: Any, **kwargs: Any) -> Any:
        outputs.append(native_schedule(*args, **kwargs))
        return outputs[-1]

    engine.scheduler.schedule = schedule
    switch.on = True
    for n in range(requests):
        engine.add(f"cmpl-{n:032x}-0-{n:08x}", [1 + (n * 7 + i) % 900 for i in range(200 + n % 50)], 2 * steps + 200)
    while len(engine.scheduler.running) < requests or any(r.is_prefill_chunk for r in engine.scheduler.running):
        engine.step()
    for _ in range(20):
        engine.step()
    gc.collect()
    gc.freeze()
    cpu: dict[bool, list[float]] = {True: [], False: []}
    wall: dict[bool, list[float]] = {True: [], False: []}
    switch.wall = 0.0
    switch.by_hook.clear()
    hooks: list[float] = []
    for n in range(2 * steps):
        switch.on = n % 2 == 0 or engine.runner.kv_trace_guard.content is not None
        switch.wall = 0.0
        begun, cpu_begun = time.perf_counter(), time.thread_time()
        engine.step()
        cpu[switch.on].append(time.thread_time() - cpu_begun)
        wall[switch.on].append(time.perf_counter() - begun)
        if switch.on:
            hooks.append(switch.wall)
        else:
            scheduler._sequence += 1
            for declarer in (scheduler.declarer, worker.declarer):
                if declarer.beat(outputs[-1], scheduler._sequence) is None:
                    declarer.judged_in_order(declarer.read(outputs[-1], scheduler._sequence))
            worker._previous = scheduler._sequence
        outputs.clear()
    switch.on = True
    findings = engine.findings()
    if findings:
        raise RuntimeError(f"the guard reported something: {findings[0].get('message')}")
    ms = {name: 1e3 * value / steps for name, value in sorted(switch.by_hook.items(), key=lambda item: -item[1])}
    engine.scheduler.schedule = native_schedule
    return {
        "requests": requests,
        "steps": steps,
        "hooks_ms": {"mean": 1e3 * statistics.mean(hooks), "median": 1e3 * statistics.median(hooks)},
        "step_cpu_ms": {key: 1e3 * statistics.median(cpu[on] or [0.0]) for key, on in (("on", True), ("off", False))},
        "step_wall_ms": {key: 1e3 * statistics.median(wall[on] or [0.0]) for key, on in (("on", True), ("off", False))},
        "by_hook_ms": ms,
        "target_ms": TARGETS_MS.get(requests),
    }


def main(argv: list[str]) -> int:
    """Measure and print; exit code 0 whatever the figures say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", nargs="+", type=int, default=[64, 256])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--runner", choices=("v1", "v2"), default="v1")
    parser.add_argument("--no-log", action="store_true", help="vLLM's logger at its usual level instead of a directory")
    parser.add_argument("--content", action="store_true", help="content mode on; the hooks then run in every step")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    wanted = traced.environment(args.runner)
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.execve(sys.executable, [sys.executable, __file__, *argv], {**os.environ, **wanted})

    from kvproof.trace.scheduler_side import SchedulerGuard
    from kvproof.trace.worker_side import WorkerGuard
    from kvproof.zoo import checkpoint, describe

    switch = Switch()
    for guard_type, names in ((SchedulerGuard, HOOKS["scheduler"]), (WorkerGuard, HOOKS["worker"])):
        for name in names:
            switch.around(guard_type, name)
    with tempfile.TemporaryDirectory() as directory:
        config = {**describe("tiny-qwen3").config, "num_hidden_layers": 2, "torch_dtype": "float32"}
        model = checkpoint.make(Path(directory), config)
        results = []
        for requests in args.requests:
            options: dict[str, Any] = {"content": args.content}
            if args.no_log:
                options["path"] = None
            engine = traced.TracedEngine(
                model,
                runner=args.runner,
                options=options,
                num_blocks=requests * 20 + 64,
                max_model_len=2304,
                max_num_seqs=requests,
                max_num_batched_tokens=4096,
            )
            results.append(measure(engine, switch, requests, args.steps))
            engine.close()
    if args.json:
        print(json.dumps({"machine": platform.processor() or platform.machine(), "results": results}, indent=1))
        return 0
    for r in results:
        target = f" (target {r['target_ms']} ms)" if r["target_ms"] else ""
        share = 100 * r["hooks_ms"]["mean"] / (r["step_wall_ms"]["off"] or r["step_wall_ms"]["on"])
        without = "" if args.content else " and as many without"
        print(f"{r['requests']} decoding requests, {r['steps']} steps with the hooks{without}")
        print(
            f"  inside the hooks, wall: {r['hooks_ms']['median']:.3f} ms median, {r['hooks_ms']['mean']:.3f} ms mean"
            f"{target}; {share:.1f} % of the step"
        )
        for clock in () if args.content else ("cpu", "wall"):
            on, off = r[f"step_{clock}_ms"]["on"], r[f"step_{clock}_ms"]["off"]
            print(f"  step, {clock}, median: {off:.3f} ms off, {on:.3f} ms on, {on - off:+.3f} ms")
        print("  " + ", ".join(f"{name} {ms:.3f}" for name, ms in r["by_hook_ms"].items()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
