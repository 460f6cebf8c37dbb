"""``kvproof check`` on the real engine: every way of laying out a cache, every connector, every verdict."""

import itertools
import json
from pathlib import Path

import pytest

from kvproof.cli import main
from kvproof.findings.compare import compare

pytestmark = pytest.mark.engine
SUPPORT = Path(__file__).parents[1] / "support"
ORACLES = {
    "layout", "equality", "placement", "provenance", "legality", "footprint", "source_footprint", "hit_length",
    "inventory", "lifecycle",
}  # fmt: skip


@pytest.fixture
def check(tmp_path, monkeypatch):
    """Runs ``kvproof check`` and returns (exit code, report.json); the evidence stays in tmp_path/<name>."""
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))

    def run(model, *arguments, name="evidence"):
        code = main(["check", model, *arguments, "--evidence", str(tmp_path / name)])
        return code, json.loads((tmp_path / name / "report.json").read_text())

    return run


def oracle(report, name):
    return next(o for o in report["oracles"] if o["oracle"] == name)


@pytest.mark.parametrize(
    ("model", "connector", "runner"),
    [
        ("tiny-qwen3", "SimpleCPUOffloadConnector", "v1"),
        ("tiny-qwen3", "SimpleCPUOffloadConnector", "v2"),
        ("tiny-qwen3", "MultiConnector", "v1"),
        ("tiny-qwen3", "OffloadingConnector", "v2"),
        ("tiny-gemma3", "OffloadingConnector", "v1"),
        ("tiny-gemma3", "SimpleCPUOffloadConnector", "v1"),
        ("tiny-qwen3-next", "SimpleCPUOffloadConnector", "v1"),
        ("tiny-qwen3-next", "OffloadingConnector", "v1"),
        ("tiny-deepseek-v3", "OffloadingConnector", "v1"),
    ],
)
def test_vllms_own_connectors_pass(check, model, connector, runner):
    code, report = check(model, "--connector", connector, "--runner", runner)
    assert (code, report["verdict"], report["findings"]) == (0, "PASS", [])
    assert {o["oracle"] for o in report["oracles"]} == ORACLES
    assert {s["mode"] for s in report["scenarios"]} == {"bulk", "layerwise", "async"}
    assert all(g["restored_bytes"] > 0 for g in report["groups"]), "a group nobody judged"
    assert report["counters"]["external_hit_tokens"] > 0
    for name in ("equality", "placement", "footprint", "source_footprint"):
        assert oracle(report, name)["judged_bytes"] > 0
    assert report["substitutions"]


def test_example_connector_passes_whole_prompts_and_fails_chunked_prefill(check):
    """Public fault (vLLM pull request 53314): with chunked prefill only the first chunk is saved."""
    code, report = check("tiny-qwen3", "--connector", "ExampleConnector", "--mode", "bulk", name="bulk")
    assert (code, report["findings"]) == (0, [])
    code, report = check("tiny-qwen3", "--connector", "ExampleConnector", "--mode", "layerwise", name="layerwise")
    assert code == 1
    (finding,) = report["findings"]
    assert (finding["oracle"], finding["kind"]) == ("lifecycle", "engine_stopped")
    assert "example_connector.py" in finding["message"]


def test_a_broken_third_party_connector_is_located(check, tmp_path):
    arguments = ("--mode", "bulk", "--connector-config", json.dumps({"shared_storage_path": str(tmp_path / "store")}))
    code, report = check("tiny-qwen3", "--connector", "third_party:HeadsExchanged", *arguments)
    assert code == 1
    first = next(f for f in report["findings"] if f["oracle"] == "placement")
    assert first["location"]["layer"] == "model.layers.1.self_attn.attn"
    assert first["location"]["byte"] == 0
    assert first["origin"]["layer"] == "model.layers.1.self_attn.attn"
    assert first["origin"]["resource"] == "K"
    # Legality aside: without a profile nothing allows ExampleConnector's loads to write locally cached blocks.
    wrong = [f["location"]["layer"] for f in report["findings"] if f["oracle"] != "legality"]
    assert set(wrong) == {"model.layers.1.self_attn.attn"}


def test_a_connector_that_cannot_be_seen_is_partially_verified(check, tmp_path):
    arguments = ("--mode", "bulk", "--connector-config", json.dumps({"shared_storage_path": str(tmp_path / "store")}))
    code, report = check("tiny-qwen3", "--connector", "third_party:Unseen", *arguments)
    assert (code, report["verdict"], report["findings"]) == (4, "PARTIALLY VERIFIED", [])
    assert oracle(report, "legality")["status"] == "skipped"
    assert oracle(report, "placement")["judged_bytes"] > 0


@pytest.mark.parametrize("name", ["BlockStore", "ByIndex", "Threaded"])
def test_right_connectors_pass_however_they_copy(check, name):
    """In the step, by index, in threads that vLLM has to wait for: no reason for an alarm or a skipped oracle."""
    code, report = check("tiny-qwen3", "--connector", f"block_store:{name}", "--tokens", "272")
    assert (code, report["verdict"], report["findings"]) == (0, "PASS", [])
    assert oracle(report, "legality")["status"] == "passed"
    assert report["counters"]["claimed_load_bytes"] >= report["counters"]["restored_bytes"] > 0


@pytest.mark.parametrize(
    ("name", "kind", "scenario"),
    [("SavesLate", "foreign", "bulk/reuse"), ("KeysWithoutPrefix", "foreign", "bulk/reuse")],
)
def test_bytes_of_the_request_that_got_the_blocks_next_are_found(check, name, kind, scenario):
    code, report = check("tiny-qwen3", "--connector", f"block_store:{name}", "--tokens", "272", "--mode", "bulk")
    assert (code, report["verdict"]) == (1, "FAIL")
    found = [f for f in report["findings"] if f["oracle"] == "placement" and f["scenario"] == scenario]
    assert {f["kind"] for f in found} == {kind}
    assert {f["location"]["layer"] for f in found} == {f"model.layers.{n}.self_attn.attn" for n in range(4)}
    mine, other = found[0]["location"]["request"], found[0]["origin"]["request"]
    assert mine.split("/")[-1][0] != other.split("/")[-1][0], "a holds what b computed, or b what a did"


def test_a_neighbour_touched_by_index_is_illegal_though_its_bytes_stay(check):
    arguments = ("--tokens", "272", "--mode", "bulk")
    code, report = check("tiny-qwen3", "--connector", "block_store:TouchesNeighbours", *arguments)
    assert code == 1
    assert {f["oracle"] for f in report["findings"]} == {"legality"}
    assert {f["message"].split()[1] for f in report["findings"]} == {"load", "save"}
    assert all(f["location"] for f in report["findings"])


def test_a_load_that_is_never_reported_is_named(check):
    code, report = check("tiny-qwen3", "--connector", "block_store:NeverReports", "--tokens", "272", "--mode", "bulk")
    assert code == 1
    (finding,) = [f for f in report["findings"] if f["oracle"] == "lifecycle"]
    assert "bulk/256/again#2 (its load is not reported as finished)" in finding["message"]


def test_a_connector_that_ends_the_process_fails_where_it_did(check, tmp_path):
    arguments = ("--mode", "bulk", "--connector-config", json.dumps({"shared_storage_path": str(tmp_path / "store")}))
    code, report = check("tiny-qwen3", "--connector", "third_party:Dies", *arguments)
    assert code == 1
    (finding,) = report["findings"]
    assert (finding["oracle"], finding["kind"]) == ("lifecycle", "process_ended")
    assert finding["scenario"] == "bulk/1024"
    assert "signal 11" in finding["message"]


def test_two_runs_of_one_case_agree_and_another_seed_does_not(check, tmp_path):
    arguments = ("tiny-qwen3", "--mode", "bulk")
    check(*arguments, name="a")
    check(*arguments, name="b")
    check(*arguments, "--seed", "1", name="c")
    same = compare(tmp_path / "a", tmp_path / "b")
    assert same.agree, [c for c in same.criteria if c.outcome != "equal"]
    assert not compare(tmp_path / "a", tmp_path / "c").agree


def test_evidence_is_complete(check, tmp_path):
    _, report = check("tiny-qwen3", "--mode", "bulk")
    written = {p.name for p in (tmp_path / "evidence").iterdir()}
    assert written == {
        "case.json", "layout.json", "transcript.jsonl", "report.json", "findings.json", "counters.json", "junit.xml",
        "report.html", "log.txt", "log.normalised.txt",
    }  # fmt: skip
    tables = [
        blocks
        for line in (tmp_path / "evidence" / "transcript.jsonl").read_text().splitlines()
        for request in json.loads(line)["requests"]
        for blocks in request["tables"]
    ]
    longest = max(tables, key=len)
    neighbours = sum(abs(a - b) == 1 for a, b in itertools.pairwise(longest))
    assert len(longest) > 4
    assert neighbours == 0, f"blocks of a request are consecutive: {longest}"
    layout = json.loads((tmp_path / "evidence" / "layout.json").read_text())
    assert layout == {"schema": "kvproof.layout/1", **report["layout"]}


@pytest.fixture
def processor(monkeypatch):
    """Lets vLLM plan for a processor with these features: ``processor(amx_tile=False)``."""

    def declare(**features):
        monkeypatch.setenv("PYTHONPATH", f"{SUPPORT / 'processor'}:{SUPPORT}")
        monkeypatch.setenv("TEST_PROCESSOR", " ".join(f"{name}={value:d}" for name, value in features.items()))

    return declare


@pytest.mark.parametrize(
    ("model", "reason"),
    [("gpt-oss-20b", "MXFP4"), ("qwen2.5-vl-3b", "inspected"), ("tiny-deepseek-v3", "prefix caching off")],
)
def test_what_vllm_cannot_do_is_unsupported_with_its_reason(check, processor, model, reason):
    processor(amx_tile=False)
    code, report = check(model)
    assert (code, report["verdict"]) == (3, "UNSUPPORTED")
    assert reason in report["reason"]


@pytest.mark.parametrize("model", ["gpt-oss-20b", "tiny-deepseek-v3"])
def test_a_processor_with_amx_can_do_more(check, processor, model):
    processor(amx_tile=True, avx512_bf16=True)
    code, report = check(model, "--mode", "bulk")
    assert (code, report["verdict"], report["findings"]) == (0, "PASS", [])


@pytest.mark.parametrize(("avx512_bf16", "block"), [(False, 96), (True, 160)])
def test_the_processor_decides_the_blocks_of_gated_delta_nets(check, processor, avx512_bf16, block):
    processor(amx_tile=False, avx512_bf16=avx512_bf16)
    code, report = check("tiny-qwen3-next", "--block-size", "32", "--mode", "bulk")
    assert (code, report["verdict"], report["findings"]) == (0, "PASS", [])
    assert {group["block_size"] for group in report["layout"]["groups"]} == {block}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--connector", "NoSuchConnector"), "not registered; vLLM registers"),
        (("--connector", "no.such.module:Thing"), "no.such.module:Thing"),
        (("--tokens", "100"), "limit at least 129"),
        (("--tokens", "1000", "--max-model-len", "1024"), "limit --max-model-len 1024"),
        (("--engine-args", '{"nonsense": 1}'), "'nonsense' is no argument of vLLM's EngineArgs"),
        (("--engine-args", '{"blocksize": 16}'), "did you mean 'block_size'?"),
        (("--engine-args", '{"block_size": "many"}'), "--engine-args: block_size \"many\": "),
        (("--engine-args", '{"compilation_config": {"cudagraph_mode": "FOO"}}'), "--engine-args: KeyError: 'FOO'"),
        (("--cudagraph-mode", "FOO"), "--cudagraph-mode FOO: expected one of NONE, PIECEWISE"),
    ],
)
def test_refused_after_staging_leaves_no_evidence(arguments, said, tmp_path, capsys):
    assert main(["check", "tiny-qwen3", *arguments, "--evidence", str(tmp_path / "e")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    *progress, refusal = err.splitlines()
    assert refusal.startswith("kvproof check: --")
    assert said in refusal
    assert all(line.startswith("  tiny-qwen3 · ") for line in progress)
    assert not (tmp_path / "e").exists()


def test_layout_as_json(capsys):
    assert main(["layout", "tiny-qwen3-next", "--json"]) == 0
    layout = json.loads(capsys.readouterr().out)
    assert {g["rule"] for g in layout["groups"]} == {"all", "state"}
    assert {f["name"] for r in layout["resources"] for f in r["fields"]} == {"K", "V", "conv", "ssm"}
