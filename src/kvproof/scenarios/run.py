"""Runs one case in this process: stage, scenarios, oracles, report."""

from __future__ import annotations

import sysconfig
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvproof.engine.kv_cache_config import snapshot
from kvproof.findings.case import BYTE_MODES, DEFAULT_TOKENS, Case
from kvproof.findings.model import (
    Finding,
    GroupPolicy,
    Report,
    ScenarioSummary,
    Verdict,
)
from kvproof.findings.verdict import decide
from kvproof.layout import Layout
from kvproof.oracles import registry
from kvproof.oracles.layout_sound import layout_sound
from kvproof.oracles.transcript import Transcript
from kvproof.scenarios.bytemaps import byte_maps
from kvproof.scenarios.modes import Prompts, scenarios

DECLARED = {
    "all": "every token of the hit",
    "window": "the last {window} tokens of the hit; older blocks are null",
    "state": "the state at the end of the hit; earlier states are null",
    "recomputed": "nothing: recomputed by the model, not restored",
}


class EngineRefusalError(RuntimeError):
    """vLLM staged the model but cannot execute a single step of it on this platform."""


_NOT_THE_PLACE = (str(Path(__file__).parents[1]), str(Path(sysconfig.get_paths()["platlib"], "torch")))


class CaseError(ValueError):
    """The case asks for what the staged model cannot do: one line naming value and limit. Exit code 2."""


@dataclass
class Result:
    """What the child hands back. ``usage`` is set instead of ``report`` when the case was refused."""

    report: Report | None
    records: list[dict[str, Any]]
    usage: str = ""


def run_case(case: Case, progress: Callable[[str], None]) -> Result:
    """Stage and judge ``case``. Never raises for what vLLM or the connector do; that becomes the verdict."""
    from kvproof.engine.staging import InputError, StagingError, stage

    try:
        staged = stage(case, progress)
    except InputError as error:
        return Result(None, [], str(error))
    except StagingError as error:
        return Result(Report(case.to_json(), Verdict.UNSUPPORTED, str(error)), [])
    try:
        return _judge_staged(case, staged, progress)
    except CaseError as error:
        return Result(None, [], str(error))
    except EngineRefusalError as error:
        report = Report(case.to_json(), Verdict.UNSUPPORTED, str(error), layout=staged.memory.layout.to_json())
        return Result(report, [])
    finally:
        staged.shutdown()


def _judge_staged(case: Case, staged: Any, progress: Callable[[str], None]) -> Result:
    layout: Layout = staged.memory.layout
    modes = [m for m in case.modes if m in BYTE_MODES]
    tokens = _tokens(case, staged, modes)
    sound, overlaps = layout_sound(layout)
    oracles = [sound]
    report = Report({**case.to_json(), "tokens": tokens}, Verdict.FAIL, "not judged")
    report.layout, report.versions = layout.to_json(), staged.versions
    report.kv_cache_config = snapshot(staged.kv_cache_config)
    report.substitutions = list(staged.substitutions)
    records: list[dict[str, Any]] = []
    expected = ["layout"]
    transcript = Transcript()
    if overlaps:
        # Bytes of two blocks at once cannot be judged; the layout itself is the finding.
        report.findings, modes = overlaps, []
    if modes:
        transcript, report.scenarios = _tell(case, staged, modes, tokens, progress)
        progress("judging")
        results, report.findings = registry.judge(layout, transcript)
        oracles += results
        expected += registry.ORACLES
        report.bytemaps = byte_maps(layout, transcript)
        report.counters = _counters(transcript)
        records = transcript.records
    report.groups = _policies(layout, transcript)
    report.oracles = oracles
    report.verdict, report.reason = decide(oracles, report.findings, expected)
    if modes and not staged.prefix_caching and _only_lacks_hits(report.findings, transcript):
        report.verdict, report.findings = Verdict.UNSUPPORTED, []
        report.reason = (
            "no hit is possible: vLLM switched prefix caching off for this model on this platform, and the connector "
            "finds nothing without it (log.txt has vLLM's own line)"
        )
    return Result(report, records)


def _tokens(case: Case, staged: Any, modes: list[str]) -> int:
    """Length of the longest prompt, checked against what was staged."""
    unit, limit = staged.hit_unit, staged.max_model_len
    beyond = unit + unit // 2 + 8  # the longest prompt of any scenario exceeds the tokens asked for by this much
    tokens = case.tokens or min(max(DEFAULT_TOKENS, 2 * unit), limit - beyond)
    if modes and tokens <= unit:
        raise CaseError(
            f"--tokens {tokens}: limit at least {unit + 1}, since vLLM restores this model here in units of {unit} "
            "tokens and a prompt needs one more"
        )
    if modes and tokens + beyond > limit:
        raise CaseError(f"--tokens {tokens}: scenarios need {tokens + beyond} tokens, limit --max-model-len {limit}")
    return tokens


def _tell(
    case: Case, staged: Any, modes: list[str], tokens: int, progress: Callable[[str], None]
) -> tuple[Transcript, list[ScenarioSummary]]:
    """Run the scenarios of ``modes``; an exception of the engine or the connector ends its scenario as an error."""
    from kvproof.engine.connectors import profile
    from kvproof.engine.harness import Harness

    harness = Harness(staged, case.seed, profile(case.connector))
    prompts = Prompts(case.seed)
    summaries = []
    for mode in modes:
        for name, tell in scenarios(harness, mode, tokens, staged.hit_unit, prompts):
            progress(f"scenario {name}")
            summaries.append(run_scenario(harness, name, mode, tell))
            if harness.transcript.errors:
                return harness.transcript, summaries
    return harness.transcript, summaries


def run_scenario(harness: Any, name: str, mode: str, tell: Callable[[], None]) -> ScenarioSummary:
    """One scenario, and what it added to the transcript."""
    done = harness.transcript
    loads, seen, steps, begin = len(done.loads), len(done.observations), harness.step_number, time.monotonic()
    harness.begin(name)
    try:
        tell()
    except Exception as error:
        traceback.print_exc()
        if not loads and not done.loads and not done.claims and _in_worker(error):
            # Not one request was served, the connector did nothing yet, and it is the worker that stops: vLLM cannot
            # run this model here.
            raise EngineRefusalError(f"first step: {_described(error)}") from error
        done.errors.append((name, _described(error)))
        harness.abandon()
    mine = done.loads[loads:]
    return ScenarioSummary(
        name, mode, len(mine), harness.step_number - steps, sum(load.prompt for load in mine),
        sum(load.local for load in mine), sum(load.external for load in mine), len(done.observations) - seen,
        round(time.monotonic() - begin, 3),
    )  # fmt: skip


def _in_worker(error: Exception) -> bool:
    """Whether the step got as far as the worker. What stops in the scheduler may be an answer of the connector's."""
    return any("worker" in Path(frame.filename).parts for frame in traceback.extract_tb(error.__traceback__))


def _described(error: Exception) -> str:
    """Type, first line and innermost place of an exception, torch's own frames and ours left out."""
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((f for f in reversed(frames) if not f.filename.startswith(_NOT_THE_PLACE)), frames[-1])
    text = str(error).splitlines()[0] if str(error) else "no message"
    return f"{type(error).__name__}: {text} ({Path(frame.filename).name}:{frame.lineno}, {frame.name})"


def _only_lacks_hits(findings: list[Finding], transcript: Transcript) -> bool:
    """No request was hit, and no finding says more than that."""
    return not any(r.external for r in transcript.loads) and {f.oracle for f in findings} <= {"hit_length", "inventory"}


def _policies(layout: Layout, transcript: Transcript) -> list[GroupPolicy]:
    policies = []
    for group in layout.groups:
        mine = layout.group_resources(group.id)
        policies.append(
            GroupPolicy(
                group.id, group.kind, group.block_size, len(group.layers), group.rule,
                DECLARED[group.rule].format(window=group.window),
                sum(transcript.restored_bytes.get(r.id, 0) for r in mine),
                sum(r.used_bytes for r in mine) if group.rule == "recomputed" else 0,
                sum(transcript.saved_bytes.get(r.id, 0) for r in mine),
            )
        )  # fmt: skip
    return policies


def _counters(transcript: Transcript) -> dict[str, int]:
    counters = {
        "requests": len(transcript.loads),
        "external_hit_tokens": sum(load.external for load in transcript.loads),
        "local_hit_tokens": sum(load.local for load in transcript.loads),
        "restored_bytes": sum(transcript.restored_bytes.values()),
        "computed_bytes": sum(transcript.saved_bytes.values()),
        "digests": len(transcript.digests),
        "claims": len(transcript.claims),
        "claimed_load_bytes": sum(c.nbytes for c in transcript.claims if c.direction == "load"),
        "claimed_save_bytes": sum(c.nbytes for c in transcript.claims if c.direction == "save"),
        "mismatches": len(transcript.observations),
    }
    for moment, judged in sorted(transcript.judged.items()):
        counters[f"judged_bytes_{moment}"] = judged.bytes
    return counters
