"""A real engine in this process with the guard on: the ground on which the guard is tried, broken and measured.

Nothing is staged: a small random checkpoint, vLLM's own EngineCore, runner, kernels and connector. The environment must
be right before Python starts (``environment``), so callers run this in a child process.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

KV_MEMORY = 1 << 29
"""Limit of KV memory [B]; the block count decides what is taken."""


def environment(runner: str) -> dict[str, str]:
    """Environment a process must be started with to run a traced engine with model runner ``v1`` or ``v2``."""
    from kvproof.platforms import triton_host

    env = {
        "VLLM_PLUGINS": "kvproof_trace",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
        "PYTHONHASHSEED": "0",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
    }
    if runner == "v2":
        env |= triton_host.ENVIRONMENT
        # vLLM's profiling run of V2 leaves attention output unwritten; NaN in it stops the interpreter. glibc hands
        # out memory of zeros with this.
        env["MALLOC_PERTURB_"] = "255"
    return env


@dataclass
class Served:
    """One request as the engine answered it."""

    name: str
    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    finish: str | None = None


class TracedEngine:
    """An EngineCore in this process. ``options`` are those of ``additional_config.kv_trace``; None: guard off.

    ``async_scheduling`` is switched on behind the CPU platform's back, which always declines it. ``speculative`` and
    ``connector`` are vLLM's speculative_config and kv_transfer_config.
    """

    def __init__(
        self,
        model: Path | str,
        *,
        runner: str = "v1",
        options: dict[str, Any] | None = None,
        num_blocks: int = 64,
        max_model_len: int = 1024,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 256,
        async_scheduling: bool = False,
        speculative: dict[str, Any] | None = None,
        connector: Any = None,
        **engine_args: Any,
    ):
        from kvproof.platforms import copies, cpu, triton_host

        if runner == "v2":
            triton_host.register()
        from vllm import SamplingParams
        from vllm.engine.arg_utils import EngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine import EngineCoreRequest
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.executor.uniproc_executor import UniProcExecutor

        if connector is not None:
            cpu.install()
        if runner == "v2":
            copies.zero_blocks_on_host()
        self._request, self._sampling = EngineCoreRequest, SamplingParams
        self.logs = Path(tempfile.mkdtemp(prefix="kvproof-trace-"))
        extra = {} if options is None else {"kv_trace": {"enabled": True, "path": str(self.logs), **options}}
        config = EngineArgs(
            model=str(model),
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            num_gpu_blocks_override=num_blocks,
            kv_cache_memory_bytes=KV_MEMORY,
            enable_prefix_caching=engine_args.pop("enable_prefix_caching", True),
            async_scheduling=False,
            disable_log_stats=True,
            speculative_config=speculative,
            kv_transfer_config=connector,
            additional_config=extra,
            **engine_args,
        ).create_engine_config(UsageContext.ENGINE_CONTEXT)
        config.scheduler_config.async_scheduling = async_scheduling
        self.core = EngineCore(config, UniProcExecutor, log_stats=False)
        self.config = config
        self.served: dict[str, Served] = {}
        self._offsets: dict[Path, int] = {}

    @property
    def scheduler(self) -> Any:
        """vLLM's scheduler."""
        return self.core.scheduler

    @property
    def runner(self) -> Any:
        """vLLM's model runner."""
        return self.core.model_executor.driver_worker.worker.model_runner

    def add(self, name: str, prompt: Sequence[int], max_tokens: int = 4, **sampling: Any) -> Served:
        """Submit one greedy request."""
        request = self._request(
            request_id=name,
            prompt_token_ids=list(prompt),
            mm_features=None,
            sampling_params=self._sampling(max_tokens=max_tokens, temperature=0, ignore_eos=True, **sampling),
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        self.core.add_request(*self.core.preprocess_add_request(request))
        self.served[name] = Served(name, list(prompt))
        return self.served[name]

    def step(self) -> bool:
        """One turn of vLLM's engine loop; whether the model ran."""
        outputs, executed = self.core.step_fn()
        self.core.post_step(executed)
        for batch in (outputs or {}).values():
            for output in batch.outputs:
                served = self.served.get(output.request_id)
                if served is not None:
                    served.tokens += output.new_token_ids
                    if output.finish_reason is not None:
                        served.finish = str(output.finish_reason)
        return bool(executed)

    @property
    def busy(self) -> bool:
        """Whether the engine has anything left to do."""
        return bool(self.core.scheduler.has_requests() or getattr(self.core, "batch_queue", None))

    def run(self, limit: int = 10_000) -> int:
        """Step until nothing is left; RuntimeError after ``limit`` steps."""
        for n in range(limit):
            if not self.busy:
                return n
            self.step()
        raise RuntimeError(f"the engine still has work after {limit} steps")

    def abort(self, names: Sequence[str]) -> None:
        """Abort requests, as a client that hangs up does."""
        self.core.abort_requests(list(names))

    def reset(self, running: bool = False) -> bool:
        """Reset the prefix cache; ``running`` also preempts what runs."""
        return bool(self.core.scheduler.reset_prefix_cache(reset_running_requests=running))

    def events(self) -> Iterator[dict[str, Any]]:
        """Events logged since the last call, flushed first."""
        for owner in (self.scheduler, self.runner):
            guard = getattr(owner, "kv_trace_guard", None)
            if guard is not None:
                guard.sink.flush()
        for path in sorted(self.logs.glob("*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                for line in file:
                    yield json.loads(line)
                self._offsets[path] = file.tell()

    def findings(self) -> list[dict[str, Any]]:
        """kv.violation and kv.error events since the last call of this or ``events``."""
        return [event for event in self.events() if event["event"] in ("kv.violation", "kv.error")]

    def close(self) -> None:
        """End the engine and remove its logs."""
        self.core.shutdown()
        shutil.rmtree(self.logs, ignore_errors=True)
