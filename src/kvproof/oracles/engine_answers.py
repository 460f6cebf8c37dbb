"""The oracles of ``--mode engine``: are a running engine's answers the same with the connector as without it?

Each is a pure function of (case, transcript) like its neighbours, but what it reads is what an engine answered,
not what its memory held. ``engine/running.py`` asks the questions; :func:`judge` turns the answers into results.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvproof.findings.model import Finding, OracleResult, Status, Substitution

WITHOUT, WITH = "without connector", "with connector"
SUPPRESSED = "A suppressed"
REST_OF_PROMPT = 1  # token; vLLM computes at least the last prompt token itself
BYTES_NEXT = "run the byte modes (--mode bulk,layerwise,async): they name the layer, block and byte"


# --- what is asked ----------------------------------------------------------------------------------------


class RefusedError(ValueError):
    """The case makes no sense as it stands; the message is one line with the value and its limit."""


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

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Step:
        return cls(**data | {"tokens": tuple(data["tokens"])})


@dataclass(frozen=True)
class Baseline:
    """All that the engine without a connector said. Another run of the same question may start from it."""

    question: dict[str, Any]  # EngineCase.question of the run it is from
    block_tokens: int
    layers: tuple[str, ...]
    vocabulary: int
    steps: tuple[Step, ...]

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Baseline:
        steps = tuple(Step.from_json(s) for s in data["steps"])
        return cls(**data | {"layers": tuple(data["layers"]), "steps": steps})


@dataclass(frozen=True)
class EngineCase:
    """One engine run. ``connector`` is vLLM's ``kv_transfer_config`` as a dict, None for a run without one.

    The text ``{store}`` in a string of ``connector`` stands for ``store_dir``, an empty directory for
    whatever the connector writes. With a ``baseline`` the engine without a connector is not started.
    """

    model_dir: str
    connector: dict[str, Any] | None
    store_dir: str
    runner: str = "v1"  # v1 | v2
    multiprocess: bool = False
    prompt_tokens: int = 290
    max_tokens: int = 16
    seed: int = 0
    baseline: Baseline | None = None

    def __post_init__(self) -> None:
        if self.runner not in ("v1", "v2"):
            raise RefusedError(f"runner {self.runner!r} is neither 'v1' nor 'v2'")
        for name in ("prompt_tokens", "max_tokens"):
            if getattr(self, name) < 1:
                raise RefusedError(f"{name} {getattr(self, name)} must be at least 1")
        if not (Path(self.model_dir) / "config.json").is_file():
            raise RefusedError(f"model_dir {self.model_dir}: there is no config.json in it")
        if self.baseline is not None and self.baseline.question != self.question:
            raise RefusedError(f"baseline: it answers {self.baseline.question}, asked is {self.question}")

    @property
    def connector_name(self) -> str:
        return "none" if self.connector is None else str(self.connector.get("kv_connector", "?"))

    @property
    def question(self) -> dict[str, Any]:
        """What decides the tokens of an engine without a connector; where its processes run does not."""
        return {name: getattr(self, name) for name in ("model_dir", "runner", "prompt_tokens", "max_tokens", "seed")}

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> EngineCase:
        baseline = data["baseline"] and Baseline.from_json(data["baseline"])
        return cls(**data | {"baseline": baseline})


# --- what the engines said and what follows from it -------------------------------------------------------


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
class EngineTranscript:
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
    baseline: Baseline | None = None  # once it is complete

    def of(self, engine: str, name: str) -> Step | None:
        """The last step of that name, None when it was not reached."""
        return next((s for s in reversed(self.steps) if (s.engine, s.name) == (engine, name)), None)

    def expected(self, prompt: str) -> tuple[int, ...] | None:
        """Output tokens without a connector; None if a cold and a warm prefix cache do not agree on them."""
        answers = {s.tokens for s in self.steps if s.engine == WITHOUT and s.prompt == prompt}
        return answers.pop() if len(answers) == 1 else None

    def start_from(self, baseline: Baseline) -> None:
        """Take over what an earlier run's engine without a connector said."""
        self.block_tokens, self.layers = baseline.block_tokens, baseline.layers
        self.vocabulary = baseline.vocabulary
        self.steps += baseline.steps
        self.baseline = baseline

    def complete_baseline(self, case: EngineCase) -> None:
        """State that the engine without a connector has said everything."""
        said = tuple(s for s in self.steps if s.engine == WITHOUT)
        self.baseline = Baseline(case.question, self.block_tokens, self.layers, self.vocabulary, said)


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
    baseline: Baseline | None = None

    @property
    def passed(self) -> bool:
        return bool(self.oracles) and all(o.status is Status.PASSED for o in self.oracles)

    def to_json(self) -> dict[str, Any]:
        oracles = [o.to_json() for o in self.oracles]
        return {"schema": "kvproof.engine/1", **dataclasses.asdict(self), "oracles": oracles}

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
                "steps": [Step.from_json(s) for s in data["steps"]],
                "baseline": data["baseline"] and Baseline.from_json(data["baseline"]),
            }
        )


# --- the oracles ------------------------------------------------------------------------------------------

Judged = tuple[list[Check], OracleResult, list[Finding]]


def engine_tokens(case: EngineCase, transcript: EngineTranscript) -> Judged:
    """Are the output tokens those of the engine without a connector?"""
    checks: list[Check] = []
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
        checks.append(Check(f"tokens_equal[{label}]", same, _tokens(expected), _tokens(step.tokens)))
        if not same:
            findings.append(_wrong_tokens(case, step, label, expected))
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
    if case.baseline is not None:
        source += ", of an earlier run"
    result = OracleResult("engine_tokens", status, source, judged_items=compared, findings=len(findings), reason=reason)
    return checks, result, findings


def engine_hit(case: EngineCase, transcript: EngineTranscript) -> Judged:
    """Does the connector claim what it can have, no more and not nothing?"""
    checks: list[Check] = []
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
        checks.append(Check(f"external_hit[{name}]", passed, expected, f"{step.cached} (attempt {step.attempt})"))
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
        checks.append(Check(f"reset[{reset.where}]", reset.done, "True", found))
        if not reset.done:
            message = f"{reset.where}: reset_prefix_cache() is still False after {reset.seconds:.0f} s "
            message += "with no request running: the connector holds blocks of finished requests"
            next_step = "get_finished must report every request whose blocks request_finished kept back"
            where = f"engine: {reset.where}"
            findings.append(Finding("engine_hit", "blocks_held", message, where, next_step=next_step))
    status = Status.FAILED if findings else Status.PASSED if judged else Status.VACUOUS
    source = "the scheduler's block size and the prompts' own lengths"
    reason = "" if judged else "no prompt was served"
    result = OracleResult("engine_hit", status, source, judged_items=judged, findings=len(findings), reason=reason)
    return checks, result, findings


def engine_sensitivity(case: EngineCase, transcript: EngineTranscript) -> Judged:
    """Do the tokens depend on the restored bytes? Otherwise equal tokens prove nothing."""
    checks: list[Check] = []
    findings = _breakdown(case, transcript, "engine_sensitivity")
    expected = transcript.expected("A")
    suppressed = transcript.of(WITH, SUPPRESSED)
    seen: list[str] = []
    blind: list[str] = []
    items = 0
    if suppressed is None or expected is None:
        status, reason = Status.VACUOUS, "no restore took place that could have been suppressed"
    else:
        items = len(expected)
        differs = suppressed.tokens != expected and suppressed.overwritten_pages > 0
        found = f"{_tokens(suppressed.tokens)}, {suppressed.overwritten_pages} pages overwritten"
        checks.append(Check("sensitivity", differs, f"not {_tokens(expected)}", found))
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
    result = OracleResult(
        "engine_sensitivity", status, "the same hit, with the restored blocks overwritten again before they are read",
        judged_items=items, judged_resources=len(seen), findings=len(findings), reason=reason,
    )  # fmt: skip
    return checks, result, findings


ORACLES: dict[str, Callable[[EngineCase, EngineTranscript], Judged]] = {
    "engine_tokens": engine_tokens,
    "engine_hit": engine_hit,
    "engine_sensitivity": engine_sensitivity,
}


def judge(case: EngineCase, transcript: EngineTranscript) -> EngineAnswer:
    """Turn what the engines said into checks, oracle results and findings."""
    answer = EngineAnswer(
        case=case.to_json(),
        substitutions=transcript.substitutions,
        steps=transcript.steps,
        seconds=transcript.seconds,
        versions=transcript.versions,
        block_tokens=transcript.block_tokens,
        overwritten_bytes=transcript.overwritten_bytes,
        unsupported=transcript.unsupported,
        baseline=transcript.baseline,
    )
    if not transcript.unsupported and case.connector is not None:
        for oracle in ORACLES.values():
            checks, result, findings = oracle(case, transcript)
            answer.checks += checks
            answer.oracles.append(result)
            answer.findings += findings
    return answer


def _wrong_tokens(case: EngineCase, step: Step, label: str, expected: Sequence[int]) -> Finding:
    at = _first_difference(expected, step.tokens)
    message = (
        f"{label}: output token {at} of {case.max_tokens} is {_at(step.tokens, at)}, without "
        f"{case.connector_name} it is {_at(expected, at)} "
        f"({step.cached} of {case.prompt_tokens} prompt tokens came from the connector)"
    )
    kind, next_step = "wrong_tokens", BYTES_NEXT
    if not step.cached:
        kind = "wrong_tokens_without_hit"
        next_step = "nothing was loaded here: look for a save that writes into KV memory"
    return Finding("engine_tokens", kind, message, f"engine: {label}", next_step=next_step)


def _breakdown(case: EngineCase, transcript: EngineTranscript, oracle: str) -> list[Finding]:
    """The engine broke while it served: a finding of the oracle whose question it was."""
    if transcript.error is None:
        return []
    where, line = transcript.error
    if (oracle == "engine_sensitivity") != where.startswith(SUPPRESSED):
        return []
    message = f"{where}: the engine with {case.connector_name} broke: {line}"
    next_step = "the engine's log holds the whole traceback"
    return [Finding(oracle, "engine_error", message, f"engine: {where}", next_step=next_step)]


def _tokens(tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens))


def _at(tokens: Sequence[int], index: int) -> str:
    return str(tokens[index]) if index < len(tokens) else "missing"


def _first_difference(expected: Sequence[int], found: Sequence[int]) -> int:
    pairs = zip(expected, found, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(found)))
