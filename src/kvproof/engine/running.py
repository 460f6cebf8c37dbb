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
imported vLLM. The judgement is ``oracles/engine_answers``; what happens inside vLLM's worker is ``engine/probe``.
"""

from __future__ import annotations

import dataclasses
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
from pathlib import Path
from typing import Any

from kvproof.engine import temporary
from kvproof.engine.companion import install_stand_ins, surroundings
from kvproof.oracles.engine_answers import (
    REST_OF_PROMPT,
    SUPPRESSED,
    WITH,
    WITHOUT,
    EngineAnswer,
    EngineCase,
    EngineTranscript,
    RefusedError,
    Reset,
    Step,
    judge,
)  # fmt: skip
from kvproof.platforms import ucm
from kvproof.platforms.triton_host import RUNNER_V2_SUBSTITUTION

Progress = Callable[[str], None]

STAGE_SECONDS = 300.0
"""Longest time between two progress lines [s]; an engine start on a loaded machine was seen at 115 s."""
SETTLE_SECONDS = 60.0
"""Longest wait for a connector to let go of the blocks it stores [s]."""
SETTLE_PAUSES = (0.05, 4.0)
"""First and longest pause between two tries [s], doubled in between: few prompts, so they cannot use up the
blocks of a connector that never gives any back."""
SETTLE_PROMPTS = 2
"""Small prompts served before the first reset: a connector may submit a store only in a later step."""
HIT_ATTEMPTS = 3
"""How often A is asked again until the connector answers: a store may become visible late."""
KV_CACHE_MEMORY = 1 << 30
"""Upper limit of KV memory [B] the engine is allowed; the block count below decides what it takes."""
SPARE_BLOCKS = 64  # for the small prompts, should a connector hold on to theirs
SMALLEST_BLOCK = 16  # tokens; the smallest block any CPU backend uses
LAYERS_PER_PROGRESS = 8
PROGRESS_PREFIX = "kvproof: "
WATCH = "--watch-stdin"
ROOT_CAUSE = re.compile(r"^(?:\([^)]*\) ERROR [^\]]*\] )?([\w.]*(?:Error|Exception): .+)$")
"""Last line of a traceback, as vLLM's processes log it or as Python prints it."""


class _Engine:
    """A running vLLM engine that is always shut down; every answer goes into the transcript."""

    def __init__(self, case: EngineCase, connector: dict[str, Any] | None, transcript: EngineTranscript) -> None:
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
            num_gpu_blocks_override=4 * -(-total // SMALLEST_BLOCK) + SPARE_BLOCKS,
            kv_cache_memory_bytes=KV_CACHE_MEMORY,
            worker_extension_cls="kvproof.engine.probe.WorkerProbe",
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
        pause, longest = SETTLE_PAUSES
        served = 0
        while served < SETTLE_PROMPTS or not self._llm.reset_prefix_cache():
            waited = time.monotonic() - started
            if waited > SETTLE_SECONDS:
                self._transcript.resets.append(Reset(self._label, where, False, waited))
                return False
            if served >= SETTLE_PROMPTS:
                time.sleep(pause)
                pause = min(2 * pause, longest)
            self._generate([[self._filler.randrange(1, 100) for _ in range(3)]], 2)
            served += 1
        self._transcript.resets.append(Reset(self._label, where, True, time.monotonic() - started))
        self._transcript.overwritten_bytes += self.call("kvproof_overwrite")
        return True


# --- the run ----------------------------------------------------------------------------------------------


def run(case: EngineCase, progress: Progress) -> EngineAnswer:
    """Ask the question in this process (and the engine's own children); see the module's head.

    Raises ``RefusedError`` when the prompt has no full block or the store is not empty, ``RuntimeError`` when
    vLLM was imported before. An engine that does not start is an answer: ``unsupported``.
    """
    transcript = EngineTranscript()
    store = Path(case.store_dir)
    store.mkdir(parents=True, exist_ok=True)
    if any(store.iterdir()):
        raise RefusedError(f"store_dir {store} is not empty: the KV of an earlier run would answer")
    progress("importing vLLM")
    with surroundings(case):
        import vllm

        transcript.versions = {"vllm": vllm.__version__}
        transcript.substitutions = install_stand_ins()
        if case.runner == "v2":
            transcript.substitutions.append(RUNNER_V2_SUBSTITUTION)
        if case.baseline is None:
            _engine_without(case, transcript, progress)
        else:
            progress("the expected tokens are those of an earlier run")
            transcript.start_from(case.baseline)
        if case.connector is not None and not transcript.unsupported:
            _engine_with(case, transcript, progress)
    return judge(case, transcript)


def _engine_without(case: EngineCase, transcript: EngineTranscript, progress: Progress) -> None:
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
            transcript.complete_baseline(case)
        except RefusedError:
            raise
        except Exception as error:  # vLLM cannot serve this model here, with or without a connector
            transcript.unsupported = f"serving without a connector: {_one_line(error)}"


def _engine_with(case: EngineCase, transcript: EngineTranscript, progress: Progress) -> None:
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
    transcript: EngineTranscript,
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
    engine: _Engine, prompts: dict[str, list[int]], transcript: EngineTranscript, name: str, layers: list[str]
) -> None:
    if not engine.forget(f"before {name}"):
        return
    engine.call("kvproof_suppress", layers)
    engine.serve({name: ("A", prompts["A"])})
    pages = engine.call("kvproof_suppress", [])
    transcript.steps[-1] = dataclasses.replace(transcript.steps[-1], overwritten_pages=pages)


@contextmanager
def _started(engine: _Engine, transcript: EngineTranscript, label: str) -> Iterator[_Engine | None]:
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


def _prompts(case: EngineCase, transcript: EngineTranscript) -> dict[str, list[int]]:
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
        name: [draw.randrange(1, vocabulary) for _ in range(case.prompt_tokens)] for name in ("A", "B1", "B2", "C")
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


# --- the parent's side and the command --------------------------------------------------------------------


def ask(
    case: EngineCase, progress: Progress, log: Path | None = None, stage_seconds: float = STAGE_SECONDS
) -> EngineAnswer:
    """Run the case in a process of its own and return the answer; no process outlives the call.

    ``log`` receives everything the engine printed. Raises ``RefusedError`` with the child's line. A stage
    longer than ``stage_seconds`` [s] or a child that dies ends as ``unsupported``.
    """
    with tempfile.TemporaryDirectory(prefix="kvproof-case-") as directory, temporary.own_directory() as own:
        asked, answered = Path(directory, "case.json"), Path(directory, "answer.json")
        asked.write_text(json.dumps(case.to_json()))
        command = [sys.executable, "-m", "kvproof.engine.running", str(asked), str(answered), WATCH]
        child = subprocess.Popen(
            command,
            env={**os.environ, **own},
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
            answer.unsupported = heard.explain(answer.unsupported)
            answer.findings = [dataclasses.replace(f, message=heard.explain(f.message)) for f in answer.findings]
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
                self.root_cause = self.root_cause or found.group(1)[:600]
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

    def explain(self, text: str) -> str:
        """vLLM's front process only says "see root cause above"; this puts the cause in."""
        return f"{text} [{self.root_cause}]" if "root cause" in text and self.root_cause else text

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
    ucm.release_signals()
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
        case = EngineCase.from_json(json.loads(Path(arguments[0]).read_text()))
        answer = run(case, progress)
    except RefusedError as error:
        progress(str(error))
        return 2
    Path(arguments[1]).write_text(json.dumps(answer.to_json(), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
