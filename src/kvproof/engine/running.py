"""The question of ``kvproof check`` asked of a real running engine (``--mode engine``).

The byte oracles see a staged runner that never computes. Here vLLM serves a small real model, and the
question is the user's: *are the answers the same with the connector as without it?*

    engine without a connector   A, B1 B2, A again, C, reset, C          the expected token ids
    engine with the connector    A, B1 B2 | A again | C                  judged against them
                                 | A with the restored blocks overwritten once more (must differ) | A again

At every ``|`` the prefix cache is reset, which must answer True, and only then all KV memory is overwritten:
what is right afterwards came out of the connector. C shares a prefix with A that ends inside a block. The
last part is the proof that the comparison can fail at all: the same hit, but with the bytes of the restore
taken away again, layer by layer too. Tokens that do not change there do not depend on the KV, and the run is
vacuous instead of passed.

``ask`` is for a parent process: it starts ``python -m kvproof.engine.running``, relays the progress, bounds
every stage and leaves no process behind. ``run`` does the work in the calling process, which must not have
imported vLLM. ``judge`` is pure: transcript in, answer out.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvproof.findings.model import Finding, OracleResult, Status, Substitution
from kvproof.platforms.cpu import RUNNER_V2_SUBSTITUTION

Progress = Callable[[str], None]

STAGE_SECONDS = 300.0
"""Longest time between two progress lines [s]; an engine start on a loaded machine was seen at 115 s."""
SETTLE_SECONDS = 60.0
"""Longest wait for a connector to let go of the blocks it stores [s]."""
SETTLE_PROMPTS = 2
"""Small prompts served before the first reset: a connector may submit a store only in a later step."""
HIT_ATTEMPTS = 3
"""How often A is asked again until the connector answers: a store may become visible late."""
KV_CACHE_MEMORY = 1 << 30
"""Upper limit of KV memory [B] the engine is allowed; the block count below decides what it takes."""
SMALLEST_BLOCK = 16  # tokens; the smallest block any CPU backend uses
LAYERS_PER_PROGRESS = 8
REST_OF_PROMPT = 1  # token; vLLM computes at least the last prompt token itself

WITHOUT, WITH = "without connector", "with connector"
SUPPRESSED = "A suppressed"
PROGRESS_PREFIX = "kvproof: "
WATCH = "--watch-stdin"
PLUGIN = "kvproof_stand_ins"
ROOT_CAUSE = re.compile(r"\b(?:[\w.]*(?:Error|Exception)): .+")

OVERWRITE = (0x3F, 0xBF)
"""The bytes KV memory is overwritten with, in a seeded random order.

Not 0xFF, the poison of the byte oracles: that is NaN, and attention kernels multiply masked rows by zero, so
NaN would spread from rows nobody reads. Any sequence of these two is a finite number near ±1 in bfloat16,
float16, float32 and both float8 formats. That they change the tokens when they are read is not assumed:
the sensitivity proof uses the same bytes.
"""
OVERWRITE_PERIOD = 65521  # bytes; prime, so no two blocks of a power-of-two size hold the same bytes


# ---------------------------------------------------------------------------------------------------------
# what is asked and what is answered


class RefusedError(ValueError):
    """The case makes no sense as it stands; the message is one line with the value and its limit."""


@dataclass(frozen=True)
class EngineCase:
    """One engine run. ``connector`` is vLLM's ``kv_transfer_config`` as a dict, None for a run without one.

    The text ``{store}`` in a string of ``connector`` stands for ``store_dir``, an empty directory for
    whatever the connector writes.
    """

    model_dir: str
    connector: dict[str, Any] | None
    store_dir: str
    runner: str = "v1"  # v1 | v2
    multiprocess: bool = False
    prompt_tokens: int = 290
    max_tokens: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        if self.runner not in ("v1", "v2"):
            raise RefusedError(f"runner {self.runner!r} is neither 'v1' nor 'v2'")
        for name in ("prompt_tokens", "max_tokens"):
            if getattr(self, name) < 1:
                raise RefusedError(f"{name} {getattr(self, name)} must be at least 1")
        if not (Path(self.model_dir) / "config.json").is_file():
            raise RefusedError(f"model_dir {self.model_dir}: there is no config.json in it")

    @property
    def connector_name(self) -> str:
        return "none" if self.connector is None else str(self.connector.get("kv_connector", "?"))

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Step:
    """One prompt that was served: its output token ids, and the prompt tokens that came out of a cache."""

    engine: str  # "without connector" | "with connector"
    name: str
    prompt: str  # A | B1 | B2 | C
    tokens: tuple[int, ...]
    cached: int  # RequestOutput.num_cached_tokens
    attempt: int = 1
    overwritten_pages: int = 0  # only where the restore was suppressed


@dataclass(frozen=True)
class Reset:
    """One attempt to make the engine forget: the last answer of ``reset_prefix_cache`` and the wait [s]."""

    engine: str
    where: str
    done: bool
    seconds: float


@dataclass(frozen=True)
class Check:
    """One yes-or-no question of the run."""

    name: str
    passed: bool
    expected: str
    found: str


@dataclass
class Transcript:
    """What the engines said, in order; nothing in here was judged yet."""

    block_tokens: int = 0  # tokens of one manager block, the largest of all groups
    layers: tuple[str, ...] = ()
    vocabulary: int = 0
    shared_tokens: int = 0  # length of the prefix C shares with A
    steps: list[Step] = field(default_factory=list)
    resets: list[Reset] = field(default_factory=list)
    overwritten_bytes: int = 0
    error: tuple[str, str] | None = None  # (where, one line): the engine broke while it served
    unsupported: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    substitutions: list[Substitution] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)

    def of(self, engine: str, name: str) -> Step | None:
        """The last step of that name, None when it was not reached."""
        return next((s for s in reversed(self.steps) if (s.engine, s.name) == (engine, name)), None)

    def expected(self, prompt: str) -> tuple[int, ...] | None:
        """Output tokens without a connector; None if a cold and a warm prefix cache do not agree on them."""
        answers = {s.tokens for s in self.steps if s.engine == WITHOUT and s.prompt == prompt}
        return answers.pop() if len(answers) == 1 else None


@dataclass
class EngineAnswer:
    """The judged run. ``unsupported`` names the stage and vLLM's own reason when no engine came up."""

    case: dict[str, Any]
    checks: list[Check] = field(default_factory=list)
    oracles: list[OracleResult] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    substitutions: list[Substitution] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    block_tokens: int = 0
    overwritten_bytes: int = 0
    unsupported: str = ""

    @property
    def passed(self) -> bool:
        return not self.unsupported and all(o.status is Status.PASSED for o in self.oracles)

    def to_json(self) -> dict[str, Any]:
        lists = ("checks", "substitutions", "steps")
        return {
            "schema": "kvproof.engine/1",
            **{f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in lists},
            **{name: [dataclasses.asdict(item) for item in getattr(self, name)] for name in lists},
            "oracles": [o.to_json() for o in self.oracles],
            "findings": [f.to_json() for f in self.findings],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> EngineAnswer:
        """Inverse of ``to_json``. Findings of this mode carry no location, so they need no nesting."""
        plain = {f.name: data[f.name] for f in dataclasses.fields(cls)}
        return cls(
            **plain
            | {
                "checks": [Check(**c) for c in data["checks"]],
                "oracles": [OracleResult(**o | {"status": Status(o["status"])}) for o in data["oracles"]],
                "findings": [Finding(**f) for f in data["findings"]],
                "substitutions": [Substitution(**s) for s in data["substitutions"]],
                "steps": [Step(**s | {"tokens": tuple(s["tokens"])}) for s in data["steps"]],
            }
        )


# ---------------------------------------------------------------------------------------------------------
# the judgement


BYTES_NEXT = "run the byte modes (--mode bulk,layerwise,async): they name the layer, block and byte"


def judge(case: EngineCase, transcript: Transcript) -> EngineAnswer:
    """Turn what the engines said into checks, oracle results and findings. Pure."""
    answer = EngineAnswer(
        case=case.to_json(),
        substitutions=transcript.substitutions,
        steps=transcript.steps,
        seconds=transcript.seconds,
        versions=transcript.versions,
        block_tokens=transcript.block_tokens,
        overwritten_bytes=transcript.overwritten_bytes,
        unsupported=transcript.unsupported,
    )
    if not transcript.unsupported and case.connector is not None:
        _judge_tokens(case, transcript, answer)
        _judge_hits(case, transcript, answer)
        _judge_sensitivity(case, transcript, answer)
    return answer


def _judge_tokens(case: EngineCase, transcript: Transcript, answer: EngineAnswer) -> None:
    """Are the output tokens those of the engine without a connector?"""
    findings: list[Finding] = []
    compared = 0
    unstable: list[str] = []
    for step in transcript.steps:
        if step.engine != WITH or step.name.startswith(SUPPRESSED):
            continue
        expected = transcript.expected(step.prompt)
        if expected is None:
            unstable.append(step.prompt)
            continue
        compared += len(expected)
        same = step.tokens == expected
        label = step.name if step.attempt == 1 else f"{step.name}, attempt {step.attempt}"
        answer.checks.append(Check(f"tokens_equal[{label}]", same, _tokens(expected), _tokens(step.tokens)))
        if same:
            continue
        at = _first_difference(expected, step.tokens)
        restored = f"{step.cached} of {case.prompt_tokens} prompt tokens came from the connector"
        findings.append(
            Finding(
                oracle="engine_tokens",
                kind="wrong_tokens" if step.cached else "wrong_tokens_without_hit",
                message=(
                    f"{label}: output token {at} of {case.max_tokens} is {_at(step.tokens, at)}, without "
                    f"{case.connector_name} it is {_at(expected, at)} ({restored})"
                ),
                scenario=f"engine: {label}",
                next_step=BYTES_NEXT
                if step.cached
                else "nothing was loaded here: look for a save that writes into KV memory",
            )
        )
    findings += _breakdown(case, transcript, "engine_tokens")
    hit = any(s.cached for s in transcript.steps if s.engine == WITH and s.name == "A second")
    reason = ""
    status = Status.FAILED if findings else Status.PASSED
    if not findings and not hit:
        status, reason = Status.VACUOUS, "no prompt token came from the connector, so no restore was judged"
    elif not findings and unstable:
        status = Status.VACUOUS
        reason = (
            f"without a connector prompt {', '.join(sorted(set(unstable)))} is answered differently with a "
            "cold and a warm prefix cache: another seed or dtype float32 is needed"
        )
    source = "the same engine without a connector"
    _conclude(answer, findings, "engine_tokens", status, source, compared, reason)


def _breakdown(case: EngineCase, transcript: Transcript, oracle: str) -> list[Finding]:
    """The engine broke while it served: a finding of the oracle whose question it was."""
    if transcript.error is None:
        return []
    where, line = transcript.error
    if (oracle == "engine_sensitivity") != where.startswith(SUPPRESSED):
        return []
    message = f"{where}: the engine with {case.connector_name} broke: {line}"
    next_step = "the engine's log holds the whole traceback"
    return [Finding(oracle, "engine_error", message, f"engine: {where}", next_step=next_step)]


def _judge_hits(case: EngineCase, transcript: Transcript, answer: EngineAnswer) -> None:
    """Does the connector claim what it can have, no more and not nothing?"""
    findings: list[Finding] = []
    block = transcript.block_tokens
    limits = {
        "A first": (0, 0, "nothing was stored yet"),
        "B1": (0, 0, "it shares no block with another prompt"),
        "B2": (0, 0, "it shares no block with another prompt"),
        "A second": (block, case.prompt_tokens - REST_OF_PROMPT, "one block up to all but the last token"),
        "C": (0, transcript.shared_tokens, "at most the tokens it shares with A"),
    }
    judged = 0
    for name, (least, most, why) in limits.items():
        step = transcript.of(WITH, name)
        if step is None:
            continue
        judged += 1
        passed = least <= step.cached <= most
        expected = f"{least}..{most} ({why})"
        found = f"{step.cached} (attempt {step.attempt})"
        answer.checks.append(Check(f"external_hit[{name}]", passed, expected, found))
        if passed:
            continue
        if step.cached < least:
            kind = "no_external_hit" if step.cached == 0 else "short_external_hit"
            message = f"{name}: {step.cached} of {case.prompt_tokens} prompt tokens came from the connector"
            message += f" after {step.attempt} attempts, expected at least one block of {block} tokens"
            next_step = "look in the engine's log for the lookup that missed, and for a store that failed"
        else:
            kind = "hit_too_long"
            message = f"{name}: {step.cached} prompt tokens came from the connector, "
            message += f"the limit is {most}: {why}"
            next_step = "is the store empty at the start, and does the key cover every token of the prefix?"
        findings.append(Finding("engine_hit", kind, message, f"engine: {name}", next_step=next_step))
    for reset in transcript.resets:
        if reset.engine != WITH:
            continue
        found = f"{reset.done} after {reset.seconds:.1f} s"
        answer.checks.append(Check(f"reset[{reset.where}]", reset.done, "True", found))
        if not reset.done:
            message = f"{reset.where}: reset_prefix_cache() is still False after {reset.seconds:.0f} s "
            message += "with no request running: the connector holds blocks of finished requests"
            next_step = "get_finished must report every request whose blocks request_finished kept back"
            where = f"engine: {reset.where}"
            findings.append(Finding("engine_hit", "blocks_held", message, where, next_step=next_step))
    status = Status.FAILED if findings else Status.PASSED if judged else Status.VACUOUS
    source = "the scheduler's block size and the prompts' own lengths"
    reason = "" if judged else "no prompt was served"
    _conclude(answer, findings, "engine_hit", status, source, judged, reason)


def _judge_sensitivity(case: EngineCase, transcript: Transcript, answer: EngineAnswer) -> None:
    """Do the tokens depend on the restored bytes? Otherwise equal tokens prove nothing."""
    findings = _breakdown(case, transcript, "engine_sensitivity")
    expected = transcript.expected("A")
    suppressed = transcript.of(WITH, SUPPRESSED)
    seen, blind = [], []
    items = 0
    if suppressed is None or expected is None:
        status, reason = Status.VACUOUS, "no restore took place that could have been suppressed"
    else:
        items = len(expected)
        differs = suppressed.tokens != expected and suppressed.overwritten_pages > 0
        found = f"{_tokens(suppressed.tokens)}, {suppressed.overwritten_pages} pages overwritten"
        answer.checks.append(Check("sensitivity", differs, f"not {_tokens(expected)}", found))
        for layer in transcript.layers:
            step = transcript.of(WITH, f"{SUPPRESSED} {layer}")
            if step is not None:
                (blind if step.tokens == expected else seen).append(layer)
        status, reason = Status.PASSED, ""
        if not differs:
            status, reason = Status.VACUOUS, "the tokens are the same with the restore suppressed"
            message = f"{SUPPRESSED}: tokens do not depend on the KV: they are the same with the restore "
            message += f"suppressed ({suppressed.overwritten_pages} pages overwritten)"
            next_step = "use weights whose tokens depend on the KV; kvproof.zoo.checkpoint makes such"
            scenario = f"engine: {SUPPRESSED}"
            findings.append(Finding("engine_sensitivity", "vacuous", message, scenario, next_step=next_step))
        elif blind:
            reason = f"tokens do not show the loss of these layers alone: {', '.join(blind)}"
        elif not seen:
            reason = "the restore was suppressed as a whole only, not layer by layer"
    if findings and status is Status.PASSED:
        status = Status.FAILED
    source = "the same hit, with the restored blocks overwritten again before they are read"
    _conclude(answer, findings, "engine_sensitivity", status, source, items, reason, len(seen))


def _conclude(
    answer: EngineAnswer,
    findings: list[Finding],
    oracle: str,
    status: Status,
    source: str,
    items: int,
    reason: str,
    resources: int = 0,
) -> None:
    answer.findings += findings
    answer.oracles.append(
        OracleResult(
            oracle,
            status,
            source,
            judged_items=items,
            judged_resources=resources,
            findings=len(findings),
            reason=reason,
        )
    )


def _tokens(tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens))


def _at(tokens: Sequence[int], index: int) -> str:
    return str(tokens[index]) if index < len(tokens) else "missing"


def _first_difference(expected: Sequence[int], found: Sequence[int]) -> int:
    pairs = zip(expected, found, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(found)))


# ---------------------------------------------------------------------------------------------------------
# inside the worker process


class WorkerProbe:
    """Methods that vLLM adds to its worker (``worker_extension_cls``), called by name over its own RPC."""

    def kvproof_describe(self) -> dict[str, Any]:
        """Layers with KV memory, and the block size [tokens] of each group."""
        runner = self.model_runner  # type: ignore[attr-defined]
        config = runner.kv_cache_config
        return {
            "layers": [name for group in config.kv_cache_groups for name in group.layer_names],
            "block_tokens": [int(group.kv_cache_spec.block_size) for group in config.kv_cache_groups],
            "prefix_caching": bool(runner.cache_config.enable_prefix_caching),
            "vocabulary": int(runner.model_config.get_vocab_size()),
        }

    def kvproof_overwrite(self) -> int:
        """Overwrite all KV memory, padding and null block included; returns the number of bytes."""
        memories = _memories(self.model_runner)  # type: ignore[attr-defined]
        for memory in memories.values():
            _overwrite(memory, 0, memory.numel())
        return sum(memory.numel() for memory in memories.values())

    def kvproof_suppress(self, layers: list[str]) -> int:
        """From now on overwrite what the connector restores into these layers, before it is read.

        The connector does all its work and reports it, so nothing waits and the hit stays claimed; the
        bytes are gone nevertheless. An empty list ends it. Returns the number of pages overwritten since
        the last call.
        """
        if not hasattr(self, "_kvproof_suppression"):
            self._kvproof_suppression = _Suppression(self.model_runner)  # type: ignore[attr-defined]
        return self._kvproof_suppression.select(layers)


class _Suppression:
    """Takes the restored bytes away again at each of the three moments at which they can have arrived."""

    def __init__(self, runner: Any) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        self._config = runner.kv_cache_config
        self._runner = runner
        self._layers: frozenset[str] = frozenset()
        self._hits: dict[str, list[int]] = {}  # layer -> restored blocks of the requests of this step
        self._pages: set[tuple[str, int]] = set()  # (layer, block) overwritten since select()
        connector = get_kv_transfer_group()
        execute, start, wait = runner.execute_model, connector.start_load_kv, connector.wait_for_layer_load

        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            self._hits = self._restored_blocks(scheduler_output)
            self._take_away(self._layers)  # an asynchronous load arrived before this step
            try:
                return execute(scheduler_output, *args, **kwargs)
            finally:
                self._hits = {}

        def start_load_kv(*args: Any, **kwargs: Any) -> Any:
            result = start(*args, **kwargs)
            self._take_away(self._layers)  # a bulk load arrived now
            return result

        def wait_for_layer_load(layer_name: str) -> Any:
            result = wait(layer_name)
            self._take_away(self._layers & {layer_name})  # a layerwise load arrived now
            return result

        runner.execute_model = execute_model
        connector.start_load_kv = start_load_kv
        connector.wait_for_layer_load = wait_for_layer_load

    def select(self, layers: list[str]) -> int:
        pages, self._pages = len(self._pages), set()
        self._layers = frozenset(layers)
        return pages

    def _restored_blocks(self, scheduler_output: Any) -> dict[str, list[int]]:
        """Blocks before ``num_computed_tokens`` of new requests: the prefix cache was reset, so restored."""
        hits: dict[str, list[int]] = {}
        for request in scheduler_output.scheduled_new_reqs:
            for group, blocks in zip(self._config.kv_cache_groups, request.block_ids, strict=True):
                full = request.num_computed_tokens // group.kv_cache_spec.block_size
                for layer in group.layer_names:
                    hits.setdefault(layer, []).extend(b for b in blocks[:full] if b != 0)
        return hits

    def _take_away(self, layers: frozenset[str]) -> None:
        if not any(self._hits.get(layer) for layer in layers):
            return
        memory = next(iter(_memories(self._runner).values()))
        for tensor in self._config.kv_cache_tensors:
            for index, layer in enumerate(tensor.layers):
                if layer not in layers:
                    continue
                for block in self._hits.get(layer, ()):
                    start = tensor.offset + index * tensor.layer_stride + block * tensor.block_stride
                    _overwrite(memory, start, start + self._page_bytes(layer))
                    self._pages.add((layer, block))

    def _page_bytes(self, layer: str) -> int:
        group = next(g for g in self._config.kv_cache_groups if layer in g.layer_names)
        spec = getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(layer, group.kv_cache_spec)
        return int(spec.page_size_bytes)


def _memories(runner: Any) -> dict[int, Any]:
    """The backing allocations of all KV tensors as flat uint8 tensors, by address."""
    import torch

    memories: dict[int, Any] = {}
    for layer in runner.compilation_config.static_forward_context.values():
        cache = getattr(layer, "kv_cache", None)
        for tensor in cache if isinstance(cache, list | tuple) else [cache]:
            if isinstance(tensor, torch.Tensor) and tensor.numel():
                storage = tensor.untyped_storage()
                flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
                memories.setdefault(storage.data_ptr(), flat)
    return memories


@functools.cache
def _pattern(device: Any) -> Any:
    import torch

    draw = random.Random(OVERWRITE_PERIOD)
    return torch.tensor(draw.choices(OVERWRITE, k=OVERWRITE_PERIOD), dtype=torch.uint8, device=device)


def _overwrite(memory: Any, start: int, stop: int) -> None:
    """Write bytes ``start`` to ``stop`` of a flat tensor; the byte depends on the address alone."""
    pattern = _pattern(memory.device)
    while start < stop:
        phase = start % OVERWRITE_PERIOD
        length = min(OVERWRITE_PERIOD - phase, stop - start)
        memory[start : start + length] = pattern[phase : phase + length]
        start += length


# ---------------------------------------------------------------------------------------------------------
# reaching every process of the engine


def install_stand_ins() -> list[Substitution]:
    """The vLLM plugin: runs in each process of the engine before a connector is constructed there."""
    # vLLM's CPU worker replaces torch's streams and events when this module is imported, which it wants to be
    # first; imported now, it cannot undo the stand-ins later.
    import vllm.v1.worker.cpu.shm  # noqa: F401

    from kvproof.platforms import cpu

    return list(cpu.install())


def _write_companion(directory: Path, runner: str) -> None:
    """Write a throw-away distribution whose entry points vLLM and Triton find in every process.

    The CPU platform forces the spawn start method, so patches made here do not travel; entry points do,
    because the search path travels. It is vLLM's own plugin interface (and Triton's own backend interface),
    and installing kvproof changes no other vLLM on this machine.
    """
    points = f"[vllm.general_plugins]\n{PLUGIN} = kvproof.engine.running:install_stand_ins\n"
    if runner == "v2":
        points += "[triton.backends]\ncpu = kvproof_triton_cpu\n"
        package = directory / "kvproof_triton_cpu"
        package.mkdir()
        (package / "__init__.py").write_text("")
        for module, base in (("driver", "DriverBase"), ("compiler", "BaseBackend")):
            (package / f"{module}.py").write_text(_TRITON_MODULE.format(module=module, base=base))
    info = directory / "kvproof_companion-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvproof-companion\nVersion: 0\n")
    (info / "entry_points.txt").write_text(points)


_TRITON_MODULE = '''"""Tells vLLM that Triton runs on this CPU; its interpreter does."""
import triton.backends.{module} as base


class Interpreted(base.{base}):
    @staticmethod
    def is_active():
        return True


Interpreted.__abstractmethods__ = frozenset()
'''


@contextmanager
def _surroundings(case: EngineCase) -> Iterator[None]:
    """Environment and search path of the engine's processes; they only count before vLLM is imported."""
    if "vllm" in sys.modules:
        raise RuntimeError("run() must come before vLLM is imported here; ask() starts a fresh process")
    with tempfile.TemporaryDirectory(prefix="kvproof-engine-") as companion:
        _write_companion(Path(companion), case.runner)
        os.environ.update(
            VLLM_PLUGINS=PLUGIN,
            VLLM_ENABLE_V1_MULTIPROCESSING="1" if case.multiprocess else "0",
            VLLM_USE_V2_MODEL_RUNNER="1" if case.runner == "v2" else "0",
            VLLM_LOGGING_STREAM="ext://sys.stderr",
            VLLM_NO_USAGE_STATS="1",
            HF_HUB_OFFLINE="1",
            PYTHONHASHSEED="0",  # connectors hash with Python's hash(); their processes must agree
            PYTHONPATH=os.pathsep.join(filter(None, [companion, os.environ.get("PYTHONPATH", "")])),
        )
        # A tiny model gains nothing from threads, and threads that wait spinning cost minutes on a busy machine.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        if case.runner == "v2":
            os.environ["TRITON_INTERPRET"] = "1"
        sys.path.insert(0, companion)
        try:
            yield
        finally:
            sys.path.remove(companion)


# ---------------------------------------------------------------------------------------------------------
# one engine


class _Engine:
    """A running vLLM engine that is always shut down; every answer goes into the transcript."""

    def __init__(self, case: EngineCase, connector: dict[str, Any] | None, transcript: Transcript) -> None:
        self._case = case
        self._connector = connector
        self._transcript = transcript
        self._label = WITHOUT if connector is None else WITH
        self._filler = random.Random(case.seed + 1)

    def __enter__(self) -> _Engine:
        from vllm import LLM

        case = self._case
        extra = {} if self._connector is None else {"kv_transfer_config": self._connector}
        started = time.monotonic()
        total = case.prompt_tokens + case.max_tokens
        self._llm = LLM(
            model=case.model_dir,
            skip_tokenizer_init=True,
            enforce_eager=True,
            enable_prefix_caching=True,
            max_model_len=total,
            max_num_batched_tokens=max(2 * total, 2048),
            max_num_seqs=4,
            num_gpu_blocks_override=4 * -(-total // SMALLEST_BLOCK) + SMALLEST_BLOCK,
            kv_cache_memory_bytes=KV_CACHE_MEMORY,
            worker_extension_cls="kvproof.engine.running.WorkerProbe",  # __name__ may be __main__
            disable_log_stats=True,
            seed=case.seed,
            **extra,
        )
        self._transcript.seconds[f"start {self._label}"] = round(time.monotonic() - started, 2)
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._llm.llm_engine.engine_core.shutdown()
        finally:
            del self._llm
            if not self._case.multiprocess:
                from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

                cleanup_dist_env_and_memory()
            gc.collect()

    def call(self, method: str, *args: Any) -> Any:
        """Result of a ``WorkerProbe`` method in the (only) worker."""
        return self._llm.collective_rpc(method, args=args)[0]

    def serve(self, prompts: dict[str, tuple[str, list[int]]], attempt: int = 1) -> list[Step]:
        """Serve ``{step name: (prompt name, token ids)}`` together and record the answers."""
        outputs = self._generate([tokens for _, tokens in prompts.values()], self._case.max_tokens)
        steps = []
        for (name, (prompt, _)), output in zip(prompts.items(), outputs, strict=True):
            answer = tuple(output.outputs[0].token_ids)
            steps.append(Step(self._label, name, prompt, answer, output.num_cached_tokens or 0, attempt))
        self._transcript.steps += steps
        return steps

    def _generate(self, prompts: list[list[int]], max_tokens: int) -> list[Any]:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        return self._llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)

    def forget(self, where: str) -> bool:
        """Reset the prefix cache, and only if that succeeded overwrite all KV memory.

        A reset is refused while the connector still holds blocks it is storing. Small prompts keep the
        engine stepping, so it can finish; each is shorter than a block, so nothing of it is cached.
        """
        started = time.monotonic()
        served = 0
        while True:
            if served >= SETTLE_PROMPTS and self._llm.reset_prefix_cache():
                break
            waited = time.monotonic() - started
            if waited > SETTLE_SECONDS:
                self._transcript.resets.append(Reset(self._label, where, False, waited))
                return False
            self._generate([[self._filler.randrange(1, 100) for _ in range(3)]], 2)
            served += 1
        self._transcript.resets.append(Reset(self._label, where, True, time.monotonic() - started))
        self._transcript.overwritten_bytes += self.call("kvproof_overwrite")
        return True


# ---------------------------------------------------------------------------------------------------------
# the run


def run(case: EngineCase, progress: Progress) -> EngineAnswer:
    """Ask the question in this process (and the engine's own children); see the module's head.

    Raises ``RefusedError`` when the prompt has no full block or the store is not empty, ``RuntimeError`` when
    vLLM was imported before. An engine that does not start is an answer: ``unsupported``.
    """
    transcript = Transcript()
    store = Path(case.store_dir)
    store.mkdir(parents=True, exist_ok=True)
    if any(store.iterdir()):
        raise RefusedError(f"store_dir {store} is not empty: the KV of an earlier run would answer")
    progress("importing vLLM")
    with _surroundings(case):
        import vllm

        transcript.versions = {"vllm": vllm.__version__}
        transcript.substitutions = install_stand_ins()
        if case.runner == "v2":
            transcript.substitutions.append(RUNNER_V2_SUBSTITUTION)
        _engine_without(case, transcript, progress)
        if case.connector is not None and not transcript.unsupported:
            _engine_with(case, transcript, progress)
    return judge(case, transcript)


def _engine_without(case: EngineCase, transcript: Transcript, progress: Progress) -> None:
    """The expected tokens, A and C each with a cold and with a warm prefix cache of vLLM itself."""
    progress(f"starting the engine without a connector (runner {case.runner}); this takes 10 to 100 s")
    with _started(_Engine(case, None, transcript), transcript, "without a connector") as engine:
        if engine is None:
            return
        try:
            facts = engine.call("kvproof_describe")
            transcript.layers = tuple(facts["layers"])
            transcript.block_tokens = max(facts["block_tokens"])
            transcript.vocabulary = facts["vocabulary"]
            prompts = _prompts(case, transcript)
            progress(
                f"up after {transcript.seconds[f'start {WITHOUT}']:.0f} s: {len(transcript.layers)} layers, "
                f"blocks of {transcript.block_tokens} tokens; serving the prompts"
            )
            engine.serve({"A cold": ("A", prompts["A"])})
            engine.serve({"B1 cold": ("B1", prompts["B1"]), "B2 cold": ("B2", prompts["B2"])})
            [warm] = engine.serve({"A warm": ("A", prompts["A"])})
            if not warm.cached:
                # Seen with MLA on a CPU: the backend computes rows of a prefill that ignore a cached prefix.
                raise RuntimeError(
                    "vLLM's own prefix cache answers nothing for this model on this platform (it is "
                    f"{'on' if facts['prefix_caching'] else 'turned off by vLLM'}), so its attention is not "
                    "known to continue on a restored prefix and wrong tokens would not be the connector's"
                )
            engine.serve({"C warm": ("C", prompts["C"])})
            if not engine.forget("before C cold"):
                raise RuntimeError("reset_prefix_cache() stays False on an idle engine")
            engine.serve({"C cold": ("C", prompts["C"])})
        except RefusedError:
            raise
        except Exception as error:  # vLLM cannot serve this model here, with or without a connector
            transcript.unsupported = f"serving without a connector: {_one_line(error)}"


def _engine_with(case: EngineCase, transcript: Transcript, progress: Progress) -> None:
    assert case.connector is not None
    connector = json.loads(json.dumps(case.connector).replace("{store}", json.dumps(case.store_dir)[1:-1]))
    prompts = _prompts(case, transcript)
    progress(f"starting the engine with {case.connector_name}")
    with _started(_Engine(case, connector, transcript), transcript, f"with {case.connector_name}") as engine:
        if engine is None:
            return
        progress(f"up after {transcript.seconds[f'start {WITH}']:.0f} s; storing, forgetting, asking again")
        started = time.monotonic()
        where = ["A first"]
        try:
            _conversation(engine, prompts, transcript, progress, where)
        except Exception as error:  # whatever broke in the engine is the answer, not a crash of kvproof
            transcript.error = (where[0], _one_line(error))
        transcript.seconds["questions"] = round(time.monotonic() - started, 2)


def _conversation(
    engine: _Engine,
    prompts: dict[str, list[int]],
    transcript: Transcript,
    progress: Progress,
    where: list[str],
) -> None:
    """All questions to the engine with the connector. ``where[0]`` names the one being asked."""
    engine.serve({"A first": ("A", prompts["A"])})
    where[0] = "B1 and B2"
    engine.serve({"B1": ("B1", prompts["B1"]), "B2": ("B2", prompts["B2"])})
    for attempt in range(1, HIT_ATTEMPTS + 1):
        where[0] = "A second"
        if not engine.forget("before A second"):
            return
        [second] = engine.serve({"A second": ("A", prompts["A"])}, attempt)
        if second.cached:
            break
    where[0] = "C"
    if not engine.forget("before C"):
        return
    [third] = engine.serve({"C": ("C", prompts["C"])})
    progress(
        f"A again: {second.cached} of {len(prompts['A'])} prompt tokens from the connector, "
        f"C: {third.cached} of {transcript.shared_tokens} shared; now with the restore suppressed"
    )
    if not second.cached:
        return
    where[0] = SUPPRESSED
    _suppressed(engine, prompts, transcript, SUPPRESSED, list(transcript.layers))
    if second.tokens != transcript.expected("A"):
        return  # wrong already, so the loss of one layer more shows nothing
    full_blocks = (len(prompts["A"]) - REST_OF_PROMPT) // transcript.block_tokens * transcript.block_tokens
    if second.cached < full_blocks:
        return  # the suppressed run computed a full block from overwritten KV and may have stored it
    for index, layer in enumerate(transcript.layers):
        if index % LAYERS_PER_PROGRESS == 0 and index:
            progress(f"restore suppressed in {index} of {len(transcript.layers)} layers")
        where[0] = f"{SUPPRESSED} {layer}"
        _suppressed(engine, prompts, transcript, where[0], [layer])
    where[0] = "A control"
    if engine.forget("before A control"):
        engine.serve({"A control": ("A", prompts["A"])})


def _suppressed(
    engine: _Engine, prompts: dict[str, list[int]], transcript: Transcript, name: str, layers: list[str]
) -> None:
    if not engine.forget(f"before {name}"):
        return
    engine.call("kvproof_suppress", layers)
    engine.serve({name: ("A", prompts["A"])})
    pages = engine.call("kvproof_suppress", [])
    transcript.steps[-1] = dataclasses.replace(transcript.steps[-1], overwritten_pages=pages)


@contextmanager
def _started(engine: _Engine, transcript: Transcript, label: str) -> Iterator[_Engine | None]:
    """The running engine, or None with the reason in the transcript when it does not start."""
    try:
        engine.__enter__()
    except Exception as error:  # vLLM's own refusal, whatever its class, is the answer
        transcript.unsupported = f"engine start {label}: {_one_line(error)}"
        yield None
        return
    try:
        yield engine
    finally:
        engine.__exit__(None, None, None)


def _prompts(case: EngineCase, transcript: Transcript) -> dict[str, list[int]]:
    """Token ids of the prompts. C shares half of A's full blocks (at least one) and a third of a block."""
    block = transcript.block_tokens
    if case.prompt_tokens <= block:
        raise RefusedError(
            f"prompt_tokens {case.prompt_tokens} is too small: the smallest prompt with a reusable block has "
            f"{block + REST_OF_PROMPT} tokens (one block of {block} and one to compute)"
        )
    vocabulary = transcript.vocabulary
    draw = random.Random(case.seed)
    prompts = {
        name: [draw.randrange(1, vocabulary) for _ in range(case.prompt_tokens)]
        for name in ("A", "B1", "B2", "C")
    }
    blocks = max(1, (case.prompt_tokens - REST_OF_PROMPT) // block // 2)
    shared = min(blocks * block + block // 3, case.prompt_tokens - REST_OF_PROMPT)
    prompts["C"][:shared] = prompts["A"][:shared]
    # The draw may go on as A does; the first own token of C must not.
    prompts["C"][shared] = prompts["A"][shared] % (vocabulary - 1) + 1
    transcript.shared_tokens = shared
    return prompts


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:600]


# ---------------------------------------------------------------------------------------------------------
# the parent's side and the command


def ask(
    case: EngineCase, progress: Progress, log: Path | None = None, stage_seconds: float = STAGE_SECONDS
) -> EngineAnswer:
    """Run the case in a process of its own and return the answer; no process outlives the call.

    ``log`` receives everything the engine printed. Raises ``RefusedError`` with the child's line. A stage
    longer than ``stage_seconds`` [s] or a child that dies ends as ``unsupported``.
    """
    with tempfile.TemporaryDirectory(prefix="kvproof-case-") as directory:
        asked, answered = Path(directory, "case.json"), Path(directory, "answer.json")
        asked.write_text(json.dumps(case.to_json()))
        command = [sys.executable, "-m", "kvproof.engine.running", str(asked), str(answered), WATCH]
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,  # never written to: it closes when this process dies
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # the engine's processes die with this one's group
        )
        heard = _Listener(child, progress, log)
        try:
            overdue = heard.until_silent(stage_seconds)
        finally:
            _end_group(child)
        heard.finish()
        if answered.is_file():
            answer = EngineAnswer.from_json(json.loads(answered.read_text()))
            if answer.unsupported and heard.root_cause and "root cause" in answer.unsupported:
                answer.unsupported += f" [{heard.root_cause}]"
            return answer
    if child.returncode == 2 and not overdue:
        raise RefusedError(heard.stage)
    if overdue:
        reason = f"no progress for {stage_seconds:g} s after: {heard.stage}"
    else:
        reason = f"the engine's process ended with code {child.returncode} after: {heard.stage}"
    return EngineAnswer(case.to_json(), unsupported=" ".join(filter(None, [reason, heard.root_cause])))


class _Listener:
    """Reads the child's output: progress lines are relayed, everything goes to the log."""

    def __init__(self, child: subprocess.Popen[str], progress: Progress, log: Path | None) -> None:
        self._child, self._progress = child, progress
        self._log = log.open("w") if log else None
        self._spoke_at = time.monotonic()
        self.stage = "start"
        self.root_cause = ""
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            if self._log:
                self._log.write(line)
                self._log.flush()
            line = line.rstrip()
            if found := ROOT_CAUSE.search(line):
                # The first error is the cause; what follows are processes that noticed its death.
                self.root_cause = self.root_cause or found.group(0)[:600]
            if line.startswith(PROGRESS_PREFIX):
                self.stage = line.removeprefix(PROGRESS_PREFIX)
                self._spoke_at = time.monotonic()
                self._progress(self.stage)

    def until_silent(self, seconds: float) -> bool:
        """Wait for the child's end; True when it said nothing for that long [s] and still runs."""
        while time.monotonic() - self._spoke_at < seconds:
            try:
                self._child.wait(min(1.0, seconds))
                return False
            except subprocess.TimeoutExpired:
                continue
        return True

    def finish(self) -> None:
        """Read what is left; everything that could write is dead by now."""
        self._thread.join(timeout=10)
        if self._log:
            self._log.close()


def _end_group(child: subprocess.Popen[str]) -> None:
    """End the child and every engine process it left behind; all are in the session that ``ask`` opened."""
    for sign, seconds in ((signal.SIGTERM, 15), (signal.SIGKILL, 15)):
        if sign is signal.SIGTERM and child.poll() is not None:
            continue
        try:
            os.killpg(child.pid, sign)
        except ProcessLookupError:
            break
        try:
            child.wait(seconds)
        except subprocess.TimeoutExpired:
            continue
    child.wait(15)


def _die_with_parent() -> None:
    """End this session when the other end of stdin closes, which also happens when the parent is killed."""
    os.read(0, 1)  # not sys.stdin: a thread that waits in it blocks the end of the interpreter
    os.killpg(os.getpid(), signal.SIGKILL)  # ``ask`` made this process the leader of its own group


def main(argv: Sequence[str] | None = None) -> int:
    """``python -m kvproof.engine.running CASE.json ANSWER.json``; 0 answered, 2 the case was refused."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if WATCH in arguments:
        arguments.remove(WATCH)
        threading.Thread(target=_die_with_parent, daemon=True).start()
    if len(arguments) != 2:
        print("usage: python -m kvproof.engine.running CASE.json ANSWER.json", file=sys.stderr)
        return 2

    def progress(text: str) -> None:
        print(PROGRESS_PREFIX + text, file=sys.stderr, flush=True)

    try:
        case = EngineCase(**json.loads(Path(arguments[0]).read_text()))
        answer = run(case, progress)
    except RefusedError as error:
        progress(str(error))
        return 2
    Path(arguments[1]).write_text(json.dumps(answer.to_json(), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
