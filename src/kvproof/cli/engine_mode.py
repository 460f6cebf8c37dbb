"""``--mode engine``: the same question asked of a real running engine, in process and multiprocess.

Both are judged against one engine without a connector, the one that the first of them started.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

from kvproof.engine.running import ask
from kvproof.findings.case import Case
from kvproof.findings.model import Report, ScenarioSummary, Verdict
from kvproof.findings.verdict import decide
from kvproof.oracles.engine_answers import ORACLES, WITH, EngineAnswer, EngineCase
from kvproof.platforms.platform import Platform
from kvproof.zoo import checkpoint, deepseek_v41

MAX_PARAMETERS = 50_000_000
"""Random weights are made for a configuration without weights up to this size; a real run takes real memory."""
STAGED_ONLY = ("tokens", "max_model_len", "block_size", "cudagraph_mode", "engine_args")
"""What decides a staged engine; the running one has its own prompts and vLLM's own choices."""
PROCESSES = ((False, "in process"), (True, "multiprocess"))


def require_taken(case: Case, host: Platform) -> None:
    """ValueError, one line, where ``case`` cannot be asked of a running engine, or asks for what it would ignore."""
    if not host.computes:
        raise ValueError(f"--mode engine: the engine computes, --platform {host.name} stands in for what would")
    for name in STAGED_ONLY:
        if getattr(case, name):
            raise ValueError(f"--{name.replace('_', '-')}: not for --mode engine, only for the modes that stage one")


def run_engine(case: Case, workdir: Path, progress: Callable[[str], None]) -> tuple[Report, str]:
    """Report of both process modes and the engines' full log. ValueError for a model without weights that is too
    large to be made."""
    model_dir = with_weights(Path(case.model_dir), workdir / "checkpoint", case.seed, progress)
    report = Report(case.to_json(), Verdict.FAIL, "not judged")
    logs, unsupported = [], []
    baseline = None
    for multiprocess, name in PROCESSES:
        store = workdir / f"store-{name.replace(' ', '-')}"
        store.mkdir()
        connector = case.connector.kv_transfer_config() if case.connector is not None else None
        if connector is not None:
            connector = json.loads(json.dumps(connector).replace(json.dumps(case.store)[1:-1], "{store}"))
        asked = EngineCase(
            str(model_dir), connector, str(store), case.runner, multiprocess, max_tokens=16, seed=case.seed,
            baseline=baseline,
        )  # fmt: skip
        log = workdir / f"engine-{multiprocess}.log"
        answer = ask(asked, lambda text, name=name: progress(f"{name}: {text}"), log)  # type: ignore[misc]
        baseline = answer.baseline
        logs.append(log.read_text(encoding="utf-8", errors="replace") if log.exists() else "")
        if answer.unsupported:
            unsupported.append(f"{name}: {answer.unsupported}")
        _add(report, answer, name)
    if unsupported:
        report.verdict, report.reason = Verdict.UNSUPPORTED, "; ".join(unsupported)
    else:
        expected = [f"{oracle} ({name})" for oracle in ORACLES for _, name in PROCESSES]
        report.verdict, report.reason = decide(report.oracles, report.findings, expected)
    return report, "\n".join(logs)


def with_weights(model_dir: Path, target: Path, seed: int, progress: Callable[[str], None]) -> Path:
    """``model_dir`` itself if it holds weights, else a random checkpoint of its configuration."""
    if any(model_dir.glob("*.safetensors")):
        return model_dir
    config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    size = _least_parameters(config)
    if size > MAX_PARAMETERS:
        raise ValueError(
            f"--mode engine: {model_dir.name} has no weights and about {size:,} parameters, limit {MAX_PARAMETERS:,} "
            "for random ones; name a directory with weights or a tiny bundled model"
        )
    progress("making a random checkpoint")
    if config.get("model_type") == deepseek_v41.MODEL_TYPE:
        return deepseek_v41.write(target, {"torch_dtype": "bfloat16", **config}, seed)
    return checkpoint.make(target, config, seed)


def _least_parameters(config: dict[str, object]) -> int:
    """A lower bound: embedding and the attention and MLP matrices of every layer."""
    text = config.get("text_config")
    values = text if isinstance(text, dict) else config

    def number(key: str) -> int:
        value = values.get(key)
        return value if isinstance(value, int) else 0

    hidden = number("hidden_size")
    return number("vocab_size") * hidden + number("num_hidden_layers") * hidden * (
        4 * hidden + 3 * number("intermediate_size")
    )


def _add(report: Report, answer: EngineAnswer, name: str) -> None:
    report.oracles += [dataclasses.replace(o, oracle=f"{o.oracle} ({name})") for o in answer.oracles]
    report.findings += [
        dataclasses.replace(f, oracle=f"{f.oracle} ({name})", scenario=f"{name}: {f.scenario}") for f in answer.findings
    ]
    report.substitutions += [s for s in answer.substitutions if s not in report.substitutions]
    report.versions |= answer.versions
    steps = [s for s in answer.steps if s.engine == WITH]
    report.scenarios.append(
        ScenarioSummary(
            f"engine, {name}", "engine", len(steps), len(steps), 0, 0, sum(s.cached for s in steps),
            len(answer.findings), round(sum(answer.seconds.values()), 3),
        )
    )  # fmt: skip
    report.counters[f"overwritten_bytes ({name})"] = answer.overwritten_bytes
