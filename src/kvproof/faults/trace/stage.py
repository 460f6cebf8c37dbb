"""The engines faults are planted in, the stories they serve, and what a fault may look up in them."""

from __future__ import annotations

import importlib
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvproof.engine.traced import TracedEngine
from kvproof.faults.trace.model import CONTENT, DRAFTS, OFFLOAD, V1, V2
from kvproof.faults.trace.tap import CONNECTOR, POOL, RUNNER, SCHEDULER, Taps

BLOCK, NUM_BLOCKS, MAX_LEN, BUDGET = 32, 40, 512, 128
"""Tokens per block (the CPU's smallest), blocks, tokens per request, tokens per step."""
VOCABULARY = 1024
MODEL = "tiny-qwen3"
STEPS = 60
"""Most steps a story may take."""


@dataclass(frozen=True)
class Engine:
    """One configuration. ``options`` are the guard's, ``connector`` a name, ``arguments`` vLLM's."""

    summary: str
    options: dict[str, Any] = field(default_factory=dict)
    connector: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)


ENGINES: dict[str, Engine] = {
    V2: Engine("model runner V2, prefix caching, chunked prefill; the guard's default sampling"),
    DRAFTS: Engine(
        "model runner V2, asynchronous scheduling, n-gram speculation",
        arguments={
            "async_scheduling": True,
            "speculative": {
                "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1
            },
        },
    ),
    OFFLOAD: Engine(
        "model runner V2 with SimpleCPUOffloadConnector, which loads asynchronously",
        connector="SimpleCPUOffloadConnector",
    ),
    V1: Engine("model runner V1, prefix caching, chunked prefill; every step gets the full check",
               options={"full_check_every": 1}),
    CONTENT: Engine(
        "model runner V1 with OffloadingConnector, KV cache events and the guard's content mode",
        options={"content": 1000, "full_check_every": 1},
        connector="OffloadingConnector",
        arguments={"events": True},
    ),
}  # fmt: skip


class Stage:
    """A running engine with taps, and look-ups in vLLM's own objects. The guard is read through its log only."""

    def __init__(self, name: str, model: Path):
        """``model`` is where the random model is, or is to be made."""
        self.taps = Taps()
        self.runner_kind = name[:2]
        self.label = "start"
        self.steps = 0
        self.owed: list[Callable[[], object]] = []
        """What a story still has to do once its fault was seen."""
        self._random = random.Random(0)
        self.engine = self._start(ENGINES[name], model)

    def _start(self, chosen: Engine, model: Path) -> TracedEngine:
        if self.runner_kind == "v2":
            from kvproof.platforms import triton_host

            triton_host.register()  # before the first import of vLLM
        if not model.exists():
            from kvproof.zoo import checkpoint, describe

            # Half the layers and a number type a CPU calculates with: the guard looks at the plans, not at the numbers.
            checkpoint.make(model, dict(describe(MODEL).config) | {"torch_dtype": "float32", "num_hidden_layers": 2})
        arguments = dict(chosen.arguments)
        if chosen.connector is not None:
            from vllm.config import KVTransferConfig

            arguments["connector"] = KVTransferConfig(
                kv_connector=chosen.connector, kv_role="kv_both",
                kv_connector_extra_config={"cpu_bytes_to_use": 1 << 26, "block_size": BLOCK},
            )  # fmt: skip
        if arguments.pop("events", False):
            from vllm.config import KVEventsConfig

            arguments["kv_events_config"] = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
        self._tap_classes(chosen.connector)
        engine = TracedEngine(
            model, runner=self.runner_kind, options=chosen.options, num_blocks=NUM_BLOCKS, block_size=BLOCK,
            max_model_len=MAX_LEN, max_num_batched_tokens=BUDGET, **arguments,
        )  # fmt: skip
        self.taps.above(engine.scheduler, SCHEDULER)
        self.taps.above(engine.runner, RUNNER)
        self.taps.above(engine.scheduler.kv_cache_manager.block_pool, POOL)
        if engine.scheduler.connector is not None:
            self.taps.above(engine.scheduler.connector, CONNECTOR)
        return engine

    def _tap_classes(self, connector: str | None) -> None:
        from vllm.v1.core.block_pool import BlockPool
        from vllm.v1.core.sched.scheduler import Scheduler

        worker = "vllm.v1.worker.gpu.model_runner" if self.runner_kind == "v2" else "vllm.v1.worker.gpu_model_runner"
        self.taps.below(Scheduler, SCHEDULER)
        self.taps.below(importlib.import_module(worker).GPUModelRunner, RUNNER)
        self.taps.below(BlockPool, POOL)
        if connector is not None:
            from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

            self.taps.below(KVConnectorFactory.get_connector_class_by_name(connector), CONNECTOR)

    # -- what vLLM itself says ----------------------------------------------------------------------------------------

    @property
    def scheduler(self) -> Any:
        """vLLM's scheduler."""
        return self.engine.scheduler

    @property
    def runner(self) -> Any:
        """vLLM's model runner."""
        return self.engine.runner

    @property
    def pool(self) -> Any:
        """vLLM's block pool."""
        return self.scheduler.kv_cache_manager.block_pool

    def blocks(self, request: str) -> list[int]:
        """Block table of a request by the scheduler's manager."""
        return list(self.scheduler.kv_cache_manager.get_block_ids(request)[0])

    def free_block(self) -> int:
        """A block nobody uses."""
        return int(next(b.block_id for b in self.pool.blocks if b.ref_cnt == 0 and not b.is_null))

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return int(self.scheduler.kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size)

    def slot(self, request: str, position: int) -> int:
        """Where the token at a position of a request belongs."""
        size = self.block_size
        return self.blocks(request)[position // size] * size + position % size

    def table_width(self) -> int:
        """Columns of the runner's block table."""
        if self.runner_kind == "v2":
            return int(self.runner.block_tables.block_tables[0].gpu.shape[1])
        return int(self.runner.input_batch.block_table[0].max_num_blocks_per_req)

    def state_rows(self) -> dict[str, int]:
        """The runner's own row of each request."""
        holder = self.runner.req_states if self.runner_kind == "v2" else self.runner.input_batch
        rows: dict[str, int] = holder.req_id_to_index
        return rows

    def starts(self, output: Any) -> dict[str, int]:
        """Request -> tokens computed before the step."""
        cached = output.scheduled_cached_reqs
        return dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True)) | {
            new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs
        }

    def running(self) -> list[str]:
        """Requests that are running."""
        return [request.request_id for request in self.scheduler.running]

    # -- stories ------------------------------------------------------------------------------------------------------

    def prompt(self, length: int) -> list[int]:
        """Random tokens."""
        return [self._random.randrange(VOCABULARY) for _ in range(length)]

    def add(self, name: str, prompt: Sequence[int], max_tokens: int = 7) -> str:
        """Submit a request; its full id carries the fault's name."""
        full = f"{self.label}/{name}"
        self.engine.add(full, prompt, max_tokens)
        return full

    def begin(self, label: str) -> None:
        """Name what follows, and make its random tokens a function of that name."""
        self.label = label
        self._random = random.Random(zlib.crc32(label.encode()))

    def step(self) -> None:
        """One turn of the engine loop."""
        self.steps += 1
        self.engine.step()

    def tell(self, story: str, over: Callable[[], bool]) -> None:
        """Serve a story step by step until ``over``, or until nothing is left to do."""
        for _ in STORIES[story](self):
            self.step()
            if over():
                return
        for _ in range(STEPS):
            if over() or not self.engine.busy:
                return
            self.step()

    def drain(self) -> None:
        """Abort what is left and let the engine come to rest."""
        while self.owed:
            self.owed.pop()()
        for _ in range(STEPS):
            self.engine.abort(list(self.scheduler.requests))
            if not self.engine.busy:
                return
            self.step()
        raise RuntimeError(f"{self.label}: the engine does not come to rest")


def pair(stage: Stage) -> Iterator[None]:
    """Two prompts of different length are computed together and decode side by side."""
    stage.add("a", stage.prompt(70))
    stage.add("b", stage.prompt(45))
    yield


def late(stage: Stage) -> Iterator[None]:
    """While one request decodes, a second one arrives."""
    stage.add("a", stage.prompt(70))
    yield
    yield
    stage.add("b", stage.prompt(45))
    yield


def chunked(stage: Stage) -> Iterator[None]:
    """A prompt longer than the step's budget is computed in chunks."""
    stage.add("a", stage.prompt(300))
    yield


def single(stage: Stage) -> Iterator[None]:
    """One request, from its prompt to its end."""
    stage.add("a", stage.prompt(70), max_tokens=3)
    yield


def repeating(stage: Stage) -> Iterator[None]:
    """Two prompts that repeat themselves, so that n-grams are found and drafts are made."""
    stage.add("a", [5, 6, 7, 8] * 14, max_tokens=12)
    stage.add("b", [9, 10, 11] * 12, max_tokens=12)
    yield


def shared(stage: Stage) -> Iterator[None]:
    """A prompt is computed and ends; it comes back with a tail, as a prefix hit, beside a stranger that decodes."""
    head = stage.prompt(70)
    stage.add("first", head, max_tokens=1)
    stage.add("stranger", stage.prompt(50), max_tokens=10)
    for _ in range(4):
        yield
    stage.add("again", [*head, *stage.prompt(20)], max_tokens=3)
    yield


def offloaded(stage: Stage) -> Iterator[None]:
    """A prompt is computed and saved, the prefix cache is emptied, and the prompt comes back through the connector."""
    head = stage.prompt(100)
    stage.add("cold", head, max_tokens=4)
    while stage.engine.busy:
        yield
    stage.engine.reset()
    stage.add("again", head, max_tokens=4)
    yield


def idle_rank(stage: Stage) -> Iterator[None]:
    """Between two steps the runner makes a dummy run, as an idle data-parallel rank does."""
    stage.add("a", stage.prompt(40))
    yield
    yield
    # Only with attention does model runner V1 make a plan in a dummy run; V2 always does.
    stage.runner._dummy_run(4, **({"force_attention": True} if stage.runner_kind == "v1" else {}))
    yield


def lost_step(stage: Stage) -> Iterator[None]:
    """A step is declared between two requests; it is empty, so that nothing is lost with it."""
    stage.add("a", stage.prompt(40), max_tokens=2)
    while stage.engine.busy:
        yield
    from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

    output = stage.scheduler.schedule()
    if stage.taps.fault is None:
        stage.runner.execute_model(output)
        stage.scheduler.update_from_output(output, EMPTY_MODEL_RUNNER_OUTPUT)
    else:
        stage.owed.append(lambda: stage.scheduler.update_from_output(output, EMPTY_MODEL_RUNNER_OUTPUT))
    stage.add("b", stage.prompt(40), max_tokens=2)
    yield


STORIES: dict[str, Callable[[Stage], Iterator[None]]] = {
    story.__name__: story
    for story in (pair, late, chunked, single, repeating, shared, offloaded, idle_rank, lost_step)
}
