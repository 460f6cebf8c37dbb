"""The question to a running engine: the judgement alone (fast), and real engines (marker ``engine``)."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvproof.engine.running import ask, main
from kvproof.findings.model import Status
from kvproof.oracles.engine_answers import (
    WITH,
    WITHOUT,
    EngineAnswer,
    EngineCase,
    EngineTranscript,
    RefusedError,
    Reset,
    Step,
    judge,
)
from kvproof.zoo import checkpoint

QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
DROPPED = "model.layers.2.self_attn.attn"
THIRD_PARTY = f'''
import dataclasses

from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector


class DropsOneLayer(ExampleConnector):
    """Saves everything, restores every layer but one."""

    def start_load_kv(self, forward_context, **kwargs):
        layers = {{n: v for n, v in forward_context.no_compile_layers.items() if n != "{DROPPED}"}}
        super().start_load_kv(dataclasses.replace(forward_context, no_compile_layers=layers), **kwargs)
'''


def connector(name: str = "ExampleConnector", **more: Any) -> dict[str, Any]:
    extra = {"shared_storage_path": "{store}"}
    return {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra, **more}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint.make(tmp_path_factory.mktemp("qwen3"), QWEN3, seed=0)


# --- the judgement ---------------------------------------------------------------------------------------

RIGHT, OTHER = (7, 8, 9), (7, 1, 2)


@pytest.fixture
def case(tmp_path: Path) -> EngineCase:
    (tmp_path / "config.json").write_text("{}")
    return EngineCase(str(tmp_path), connector(), str(tmp_path / "store"), prompt_tokens=290, max_tokens=3)


def transcript(**changed: Step | None) -> EngineTranscript:
    """A flawless run of a one-layer model with blocks of 128 tokens; ``changed`` replaces or drops steps."""
    without = [Step(WITHOUT, f"{p} cold", p, RIGHT, 0) for p in ("A", "B1", "B2", "C")]
    steps = {
        "A_first": Step(WITH, "A first", "A", RIGHT, 0),
        "B1": Step(WITH, "B1", "B1", RIGHT, 0),
        "A_second": Step(WITH, "A second", "A", RIGHT, 256),
        "C": Step(WITH, "C", "C", RIGHT, 128),
        "suppressed": Step(WITH, "A suppressed", "A", OTHER, 256, overwritten_pages=2),
        "layer": Step(WITH, "A suppressed layer.0", "A", OTHER, 256, overwritten_pages=2),
    } | changed
    return EngineTranscript(
        block_tokens=128,
        layers=("layer.0",),
        shared_tokens=170,
        steps=without + [s for s in steps.values() if s is not None],
        resets=[Reset(WITH, "before A second", True, 0.1)],
    )


def oracle(answer: EngineAnswer, name: str) -> Status:
    return next(o.status for o in answer.oracles if o.oracle == name)


def test_a_flawless_run_passes_with_counts(case: EngineCase) -> None:
    answer = judge(case, transcript())
    assert answer.passed
    assert answer.findings == []
    counts = {o.oracle: (o.judged_items, o.judged_resources) for o in answer.oracles}
    assert counts == {"engine_tokens": (12, 0), "engine_hit": (4, 0), "engine_sensitivity": (3, 1)}


def test_a_wrong_token_is_named_by_step_and_index(case: EngineCase) -> None:
    answer = judge(case, transcript(A_second=Step(WITH, "A second", "A", OTHER, 256)))
    [finding] = answer.findings
    assert (finding.oracle, finding.kind) == ("engine_tokens", "wrong_tokens")
    assert "A second: output token 1 of 3 is 1, without ExampleConnector it is 8" in finding.message
    assert "256 of 290 prompt tokens came from the connector" in finding.message
    assert oracle(answer, "engine_tokens") is Status.FAILED


def test_no_hit_fails_and_makes_equal_tokens_vacuous(case: EngineCase) -> None:
    missed = Step(WITH, "A second", "A", RIGHT, 0, attempt=3)
    answer = judge(case, transcript(A_second=missed, suppressed=None, layer=None))
    assert [f.kind for f in answer.findings] == ["no_external_hit"]
    assert oracle(answer, "engine_hit") is Status.FAILED
    assert oracle(answer, "engine_tokens") is Status.VACUOUS
    assert oracle(answer, "engine_sensitivity") is Status.VACUOUS


@pytest.mark.parametrize(
    ("changed", "limit"),
    [
        ({"A_first": Step(WITH, "A first", "A", RIGHT, 128)}, "the limit is 0: nothing was stored yet"),
        ({"A_second": Step(WITH, "A second", "A", RIGHT, 290)}, "the limit is 289"),
        ({"C": Step(WITH, "C", "C", RIGHT, 256)}, "the limit is 170"),
    ],
)
def test_a_hit_longer_than_it_can_be_fails(case: EngineCase, changed: dict[str, Step], limit: str) -> None:
    [finding] = judge(case, transcript(**changed)).findings
    assert finding.kind == "hit_too_long"
    assert limit in finding.message


def test_whole_prompts_only_is_a_legal_policy(case: EngineCase) -> None:
    assert judge(case, transcript(C=Step(WITH, "C", "C", RIGHT, 0))).passed


def test_tokens_that_ignore_the_kv_make_the_run_vacuous(case: EngineCase) -> None:
    same = Step(WITH, "A suppressed", "A", RIGHT, 256, overwritten_pages=2)
    answer = judge(case, transcript(suppressed=same))
    assert oracle(answer, "engine_sensitivity") is Status.VACUOUS
    assert "tokens do not depend on the KV" in answer.findings[0].message
    assert not answer.passed


def test_a_suppression_that_reached_no_page_proves_nothing(case: EngineCase) -> None:
    nothing = Step(WITH, "A suppressed", "A", OTHER, 256, overwritten_pages=0)
    assert oracle(judge(case, transcript(suppressed=nothing)), "engine_sensitivity") is Status.VACUOUS


def test_a_layer_whose_loss_is_invisible_is_named(case: EngineCase) -> None:
    answer = judge(case, transcript(layer=Step(WITH, "A suppressed layer.0", "A", RIGHT, 256)))
    assert "layer.0" in answer.oracles[-1].reason
    assert answer.oracles[-1].judged_resources == 0


def test_a_baseline_that_disagrees_with_itself_judges_nothing(case: EngineCase) -> None:
    run = transcript()
    run.steps.append(Step(WITHOUT, "C warm", "C", OTHER, 128))
    answer = judge(case, run)
    assert oracle(answer, "engine_tokens") is Status.VACUOUS
    assert "prompt C is answered differently" in answer.oracles[0].reason


def test_blocks_that_are_never_given_back_fail(case: EngineCase) -> None:
    run = transcript(A_second=None, C=None, suppressed=None, layer=None)
    run.resets = [Reset(WITH, "before A second", False, 60.4)]
    answer = judge(case, run)
    assert [f.kind for f in answer.findings] == ["blocks_held"]


def test_an_engine_that_breaks_is_a_finding_of_the_question_it_broke_in(case: EngineCase) -> None:
    run = transcript()
    run.error = ("A second", "KeyError: 'x'")
    assert [(f.oracle, f.kind) for f in judge(case, run).findings] == [("engine_tokens", "engine_error")]
    run.error = ("A suppressed layer.0", "KeyError: 'x'")
    assert [f.oracle for f in judge(case, run).findings] == ["engine_sensitivity"]


def test_the_answer_survives_json(case: EngineCase) -> None:
    answer = judge(case, transcript(A_second=Step(WITH, "A second", "A", OTHER, 256)))
    text = json.dumps(answer.to_json())
    assert EngineAnswer.from_json(json.loads(text)).to_json() == answer.to_json()


def test_a_baseline_starts_another_run_of_the_same_question(case: EngineCase) -> None:
    first = transcript()
    first.vocabulary = 512
    first.complete_baseline(case)
    assert first.baseline is not None
    second = dataclasses.replace(case, multiprocess=True, store_dir="elsewhere", baseline=first.baseline)
    again = EngineCase.from_json(json.loads(json.dumps(second.to_json())))
    assert again == second
    run = EngineTranscript(shared_tokens=170, steps=[s for s in first.steps if s.engine == WITH])
    run.start_from(first.baseline)
    answer = judge(again, run)
    assert answer.passed
    assert answer.oracles[0].source.endswith("of an earlier run")
    assert EngineAnswer.from_json(json.loads(json.dumps(answer.to_json()))).baseline == first.baseline
    with pytest.raises(RefusedError, match="baseline: it answers"):
        dataclasses.replace(second, seed=1)


def test_a_case_without_model_or_with_no_tokens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=r"there is no config\.json"):
        EngineCase(str(tmp_path), None, str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(RefusedError, match="prompt_tokens 0 must be at least 1"):
        EngineCase(str(tmp_path), None, str(tmp_path), prompt_tokens=0)
    with pytest.raises(RefusedError, match="runner 'v3'"):
        EngineCase(str(tmp_path), None, str(tmp_path), runner="v3")


def test_the_command_wants_two_files(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["one.json"]) == 2
    assert "usage:" in capsys.readouterr().err


def test_a_used_store_is_refused_before_any_engine_starts(case: EngineCase) -> None:
    Path(case.store_dir).mkdir()
    (Path(case.store_dir) / "left-over").write_text("")
    with pytest.raises(RefusedError, match="is not empty"):
        ask(case, lambda text: None)


# --- small checkpoints -----------------------------------------------------------------------------------


@pytest.mark.engine
def test_the_same_seed_makes_the_same_checkpoint(model_dir: Path, tmp_path: Path) -> None:
    again = checkpoint.make(tmp_path / "again", QWEN3, seed=0)
    other = checkpoint.make(tmp_path / "other", QWEN3, seed=1)
    weights = [(d / "model.safetensors").read_bytes() for d in (model_dir, again, other)]
    assert weights[0] == weights[1] != weights[2]


@pytest.mark.engine
def test_a_model_nobody_can_construct_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="model_type 'nonesuch': transformers cannot construct it") as caught:
        checkpoint.make(tmp_path / "none", {"model_type": "nonesuch"})
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "none").exists()
    with pytest.raises(ValueError, match="dtype 'int3'"):
        checkpoint.make(tmp_path / "none", QWEN3 | {"dtype": "int3"})


# --- real engines ----------------------------------------------------------------------------------------


def members(session: int) -> list[int]:
    """Ids of the processes of a session (field 6 of /proc/PID/stat), zombies aside."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, _, _, sid = (entry / "stat").read_text().rsplit(")", 1)[1].split()[:4]
            except OSError:  # it ended meanwhile
                continue
            if int(sid) == session and state != "Z":
                found.append(int(entry.name))
    return found


@dataclass
class Asked:
    answer: EngineAnswer
    lines: list[str]  # progress
    survivors: list[int]  # processes of the run that it left behind


def asked(case: EngineCase, **options: Any) -> Asked:
    """Ask, and look afterwards for processes of the session that ``ask`` opened."""
    started: list[int] = []
    real = subprocess.Popen

    def popen(*args: Any, **kwargs: Any) -> subprocess.Popen[str]:
        child = real(*args, **kwargs)
        started.append(child.pid)
        return child

    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvproof.engine.running.subprocess.Popen", popen)
        answer = ask(case, lines.append, **options)
    [session] = started
    return Asked(answer, lines, members(session))


@pytest.fixture(scope="module")
def in_process(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Asked:
    """Both engines in the child's own process. Its engine without a connector serves the tests below too."""
    directory = tmp_path_factory.mktemp("in-process")
    return asked(EngineCase(str(model_dir), connector(), str(directory / "store")), log=directory / "log")


@pytest.mark.engine
def test_example_connector_in_process(in_process: Asked) -> None:
    answer = in_process.answer
    assert answer.unsupported == ""
    assert answer.findings == []
    assert answer.passed
    assert {o.oracle for o in answer.oracles} == {"engine_tokens", "engine_hit", "engine_sensitivity"}
    assert answer.block_tokens == 128
    cached = {s.name: s.cached for s in answer.steps if s.engine == WITH}
    assert (cached["A first"], cached["A second"], cached["C"]) == (0, 256, 0)  # it stores whole prompts only
    # With the restore suppressed the hit stays and the tokens change, for each of the four layers.
    assert cached["A suppressed"] == 256
    assert next(o for o in answer.oracles if o.oracle == "engine_sensitivity").judged_resources == 4
    assert any("starting the engine with ExampleConnector" in line for line in in_process.lines)
    assert in_process.survivors == []


@pytest.mark.engine
def test_a_third_party_connector_that_drops_a_layer_is_caught(
    in_process: Asked, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "third_party_connector.py").write_text(THIRD_PARTY)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    broken = connector("DropsOneLayer", kv_connector_module_path="third_party_connector")
    run = asked(EngineCase(str(model_dir), broken, str(tmp_path / "store"), baseline=in_process.answer.baseline))
    answer = run.answer
    assert answer.unsupported == ""
    assert [(f.oracle, f.kind) for f in answer.findings] == [("engine_tokens", "wrong_tokens")]
    assert answer.findings[0].message.startswith("A second: output token ")
    assert oracle(answer, "engine_hit") is Status.PASSED
    assert oracle(answer, "engine_sensitivity") is Status.PASSED
    assert run.survivors == []


@pytest.mark.engine
def test_example_connector_with_the_engine_in_processes_of_its_own(
    in_process: Asked, model_dir: Path, tmp_path: Path
) -> None:
    baseline = in_process.answer.baseline
    case = EngineCase(str(model_dir), connector(), str(tmp_path / "store"), multiprocess=True, baseline=baseline)
    run = asked(case)
    answer = run.answer
    assert answer.unsupported == ""
    assert answer.findings == []
    assert answer.passed
    assert len([c for c in answer.checks if c.name.startswith("tokens_equal")]) == 6
    assert not any("without a connector (" in line for line in run.lines)  # no second engine for the baseline
    assert answer.baseline == baseline
    assert run.survivors == []


@pytest.mark.engine
def test_a_silent_stage_is_ended_with_its_name(model_dir: Path, tmp_path: Path) -> None:
    run = asked(EngineCase(str(model_dir), connector(), str(tmp_path / "store")), stage_seconds=0.5)
    assert run.answer.unsupported.startswith("no progress for 0.5 s after: ")
    assert run.survivors == []
