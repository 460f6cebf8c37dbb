from __future__ import annotations

import argparse
import copy
import json
import shlex
from dataclasses import replace

import pytest
import report_fakes as fakes
from hypothesis import given, settings
from hypothesis import strategies as st

from kvproof.cli import compare as command
from kvproof.findings import evidence, html
from kvproof.findings.compare import DIFFERENT, EQUAL, MISSING, compare, first_difference
from kvproof.findings.evidence import Evidence

json_values = st.recursive(
    st.none() | st.integers(0, 3) | st.sampled_from("ab"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("xyz"), inner, max_size=3),
    max_leaves=8,
)


@pytest.fixture(autouse=True)
def _no_page(monkeypatch):
    """The comparison does not read the page; drawing it twice per test would be most of the time."""
    monkeypatch.setattr(html, "render", lambda report: "")


def write(path, report=None, log="INFO 11-29 16:06:32 pid=7 hello\nbye\n", step=0, case=None):
    report = report or fakes.passing()
    writer = Evidence(path)
    writer.write_case(case or fakes.CASE)
    writer.write_layout(report.layout)
    writer.append_transcript(fakes.STEP | {"step": step, "seconds": 0.25})
    writer.log_path.write_text(log, encoding="utf-8")
    writer.write_report(report)
    return path


def criteria(a, b):
    return {c.name: c for c in compare(a, b).criteria}


def changed(a, b):
    return {name: c.difference for name, c in criteria(a, b).items() if c.result == DIFFERENT}


def test_two_runs_of_one_case_agree(tmp_path):
    again = fakes.passing()
    again.scenarios = [replace(s, seconds=9.9) for s in again.scenarios]
    a = write(tmp_path / "a")
    b = write(tmp_path / "b", again, log="bye\nINFO 12-01 10:00:00 pid=99 hello\n")
    comparison = compare(a, b)
    assert comparison.agree
    assert {c.result for c in comparison.criteria} == {EQUAL}
    assert all(c.proves and c.does_not_prove for c in comparison.criteria)


def test_an_evidence_directory_agrees_with_itself(tmp_path):
    a = write(tmp_path / "a", fakes.failing())
    assert compare(a, a).agree


@pytest.mark.parametrize(
    ("criterion", "key", "value", "difference"),
    [
        ("layout strides", "block_stride", 65537, "resources[0].block_stride: 65536 | 65537"),
        ("layout padding", "page_bytes", 70000, "resources[0].page_bytes: 65536 | 70000"),
        ("layout resources", "dtype", "float16", 'resources[0].dtype: "bfloat16" | "float16"'),
    ],
)
def test_a_layout_difference_has_its_own_criterion(tmp_path, criterion, key, value, difference):
    other = fakes.passing()
    other.layout = copy.deepcopy(other.layout)
    other.layout["resources"][0][key] = value
    assert changed(write(tmp_path / "a"), write(tmp_path / "b", other)) == {criterion: difference}


def test_groups_and_sizes_of_the_layout(tmp_path):
    other = fakes.passing()
    other.layout = fakes.dense_layout(blocks=41).to_json()
    other.layout["groups"][0]["block_size"] = 32
    found = changed(write(tmp_path / "a"), write(tmp_path / "b", other))
    assert found == {"layout groups": "groups[0].block_size: 16 | 32", "layout size": "num_blocks: 40 | 41"}


def test_a_pass_and_a_failure_differ_where_they_should(tmp_path):
    found = changed(write(tmp_path / "a"), write(tmp_path / "b", fakes.failing()))
    assert found.keys() == {"verdict", "oracles", "scenarios", "findings"}
    assert found["verdict"] == 'verdict: "PASS" | "FAIL"'
    assert found["oracles"] == 'oracles[1].status: "passed" | "failed"'
    assert found["findings"].endswith(": absent | 1")


def test_order_of_findings_does_not_matter(tmp_path):
    turned = fakes.failing()
    turned.findings.reverse()
    assert compare(write(tmp_path / "a", fakes.failing()), write(tmp_path / "b", turned)).agree


def test_case_transcript_log_counters_and_versions(tmp_path):
    other = fakes.passing()
    other.counters = other.counters | {"connector_loads": 35}
    other.versions = other.versions | {"vllm": "0.33.0"}
    b = write(tmp_path / "b", other, log="INFO 11-29 16:06:32 pid=7 hello\n", step=1, case=fakes.CASE | {"seed": 8})
    assert changed(write(tmp_path / "a"), b) == {
        "case": "seed: 7 | 8",
        "versions": 'versions.vllm: "0.32.0" | "0.33.0"',
        "counters": "counters.connector_loads: 36 | 35",
        "transcript": "[0].step: 0 | 1",
        "log": "bye: 1 | absent",
    }


def test_missing_on_one_side_is_disagreement_on_both_it_is_not(tmp_path):
    a, b = write(tmp_path / "a"), write(tmp_path / "b")
    (a / evidence.TRANSCRIPT).unlink()
    found = criteria(a, b)["transcript"]
    assert (found.result, found.missing_in, compare(a, b).agree) == (MISSING, ("A",), False)
    (b / evidence.TRANSCRIPT).unlink()
    assert criteria(a, b)["transcript"].missing_in == ("A", "B")
    assert compare(a, b).agree


def test_two_runs_that_died_do_not_agree(tmp_path):
    for name in "ab":
        Evidence(tmp_path / name).write_case(fakes.CASE)
    assert not compare(tmp_path / "a", tmp_path / "b").agree


def test_a_normalised_log_alone_is_enough(tmp_path):
    a, b = write(tmp_path / "a"), write(tmp_path / "b")
    (b / evidence.LOG).unlink()
    assert criteria(a, b)["log"].result == EQUAL


@settings(max_examples=25)
@given(json_values, json_values)
def test_first_difference_is_empty_exactly_for_equal_values(a, b):
    assert (first_difference(a, b) == "") == (a == b)
    assert bool(first_difference(a, b)) == bool(first_difference(b, a))


def test_a_long_value_is_cut():
    assert len(first_difference("a" * 1000, "b")) < 200


def run(capsys, *arguments):
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    args = parser.parse_args(["compare", *map(str, arguments)])
    code = args.run(args)
    return code, *capsys.readouterr()


def test_command_says_in_words_what_differs(tmp_path, capsys):
    a, b = write(tmp_path / "a"), write(tmp_path / "b", fakes.failing())
    code, out, _ = run(capsys, a, b)
    assert code == 1
    assert 'verdict: "PASS" | "FAIL"' in out
    assert "DIFFER  14 of 19 criteria equal" in out
    assert run(capsys, a, a)[0] == 0


def test_command_gives_json(tmp_path, capsys):
    a = write(tmp_path / "a")
    code, out, _ = run(capsys, a, a, "--json")
    data = json.loads(out)
    assert (code, data["schema"], data["agree"], len(data["criteria"])) == (0, "kvproof.compare/1", True, 19)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (evidence.CASE, None, "is not a kvproof evidence directory"),
        (evidence.REPORT, "{", "report.json: broken JSON"),
        (evidence.LAYOUT, "[]", "layout.json: is not a JSON object"),
        (evidence.TRANSCRIPT, '{"step": 0}\n{', "transcript.jsonl line 2: broken JSON"),
    ],
)
def test_command_refuses_what_is_no_evidence_in_one_line(tmp_path, capsys, file, content, message):
    a, b = write(tmp_path / "a"), write(tmp_path / "b")
    (b / file).unlink() if content is None else (b / file).write_text(content, encoding="utf-8")
    code, out, err = run(capsys, a, b)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err
    assert str(b) in err


def test_every_criterion_says_whether_it_sees_the_platform(tmp_path):
    a = write(tmp_path / "a")
    found = criteria(a, a)
    assert {c.sees_platform.partition(":")[0] for c in found.values()} == {"yes", "partly", "no"}
    assert found["kv cache config"].sees_platform.startswith("no:")
    assert found["layout strides"].sees_platform.startswith("yes:")


def on(tmp_path, platform, **changes):
    report = fakes.passing()
    case = fakes.CASE | {"platform": platform}
    report.case = case
    for name, value in changes.items():
        setattr(report, name, value)
    return write(tmp_path / platform, report, log=f"INFO platform {platform}\n", case=case)


def test_a_stand_in_and_a_real_card_agree_where_they_can(tmp_path):
    a = on(tmp_path, "cuda-sim")
    b = on(tmp_path, "cuda", substitutions=[], versions=fakes.VERSIONS | {"torch": "2.12.0"})
    comparison = compare(a, b)
    differ = {c.name for c in comparison.criteria if c.result == DIFFERENT}
    assert differ == {"platform", "versions", "substitutions", "log"}
    assert differ == {c.name for c in comparison.criteria if not c.decides}
    assert comparison.agree


def test_a_real_card_with_other_strides_disagrees_though_the_plan_is_one(tmp_path):
    layout = copy.deepcopy(fakes.passing().layout)
    for resource in layout["resources"]:
        resource["row_axes"][0]["stride"] *= 2
    comparison = compare(on(tmp_path, "cuda-sim"), on(tmp_path, "cuda", layout=layout))
    found = {c.name: c for c in comparison.criteria}
    assert found["kv cache config"].result == EQUAL
    assert found["layout strides"].result == DIFFERENT
    assert not comparison.agree


def test_on_one_platform_everything_decides(tmp_path):
    b = write(tmp_path / "b", log="other\n")
    assert not compare(write(tmp_path / "a"), b).agree


@pytest.mark.parametrize(
    ("platform", "field", "one", "other"),
    [("cuda-sim", "cuda_capability", "9.0", "10.0"), ("ascend-sim", "soc", "ascend910b", "ascend950")],
)
def test_declared_hardware_is_a_part_of_the_case_on_one_platform(tmp_path, platform, field, one, other):
    case = fakes.CASE | {"platform": platform}
    a, b = (write(tmp_path / value, case=case | {field: value}) for value in (one, other))
    said = f'{field}: "{one}" | "{other}"'
    assert changed(a, b) == {"case": said, "platform": said}
    assert not compare(a, b).agree


def test_across_platforms_the_declared_hardware_names_the_platform(tmp_path):
    a = write(tmp_path / "a", case=fakes.CASE | {"platform": "cuda-sim", "cuda_capability": "9.0"})
    b = write(tmp_path / "b", case=fakes.CASE | {"platform": "ascend-sim", "soc": "ascend910b"})
    found = criteria(a, b)
    assert found["case"].result == EQUAL
    assert (found["platform"].result, found["platform"].decides) == (DIFFERENT, False)
    assert compare(a, b).agree


def test_two_runs_that_passed_have_one_verdict_however_much_they_judged(tmp_path):
    other = fakes.passing()
    other.reason = "8 oracles judged 7 bytes"
    assert changed(write(tmp_path / "a"), write(tmp_path / "b", other)) == {}


def test_the_reason_of_what_is_no_pass_is_compared_without_its_bytes(tmp_path):
    def failed(name, reason):
        report = fakes.failing()
        report.reason = reason
        return write(tmp_path / name, report)

    a = failed("a", "2 findings, first: placement: group 0 l.9 V block 14 byte 256: 7,724 bytes are foreign")
    b = failed("b", "2 findings, first: placement: group 0 l.9 V block 14 byte 256: 1 byte are foreign")
    c = failed("c", "2 findings, first: placement: group 0 l.9 V block 14 byte 257: 7,724 bytes are foreign")
    assert changed(a, b) == {}
    assert changed(a, c).keys() == {"verdict"}


def test_what_no_finding_on_either_side_proves(tmp_path):
    a, b = write(tmp_path / "a"), write(tmp_path / "b", fakes.failing())
    none, some = criteria(a, a)["findings"], criteria(b, b)["findings"]
    assert (none.proves, none.does_not_prove) == ("neither run found a fault", "that there is none")
    assert some.proves == "both runs found the same faults at the same bytes"


def test_a_log_that_repeats_another_case_neither_differs_by_its_words_nor_decides(tmp_path):
    case = fakes.CASE | {"seed": 8, "connector": fakes.CASE["connector"] | {"name": "ExampleConnectorV2"}}
    a = write(tmp_path / "a", log="Creating connector with name: ExampleConnector and\n")
    b = write(tmp_path / "b", log="Creating connector with name: ExampleConnectorV2 and\n", case=case)
    log = criteria(a, b)["log"]
    assert (log.result, log.decides) == (EQUAL, False)
    other = write(tmp_path / "c", log="Creating ExampleConnectorV3\n", case=case)
    assert criteria(a, other)["log"].result == DIFFERENT
    same = write(tmp_path / "d", log="other\n")
    assert criteria(a, same)["log"].decides


def test_another_plan_is_a_difference_of_its_own(tmp_path):
    other = fakes.passing()
    other.kv_cache_config = other.kv_cache_config | {"num_blocks": 41}
    assert changed(write(tmp_path / "a"), write(tmp_path / "b", other)) == {
        "kv cache config": "num_blocks: 40 | 41",
    }


def test_bytes_that_do_not_follow_from_layers_and_blocks_are_named(tmp_path):
    other = fakes.passing()
    other.groups = [replace(other.groups[0], computed_bytes=23_592_959)]
    a, b = write(tmp_path / "a"), write(tmp_path / "b", other)
    said = "B: computed bytes of group 0: counted 23,592,959, derived 23,592,960"
    assert criteria(a, b)["derived counters"].difference == said
    assert not compare(b, b).agree


def test_derived_counters_are_missing_for_a_run_that_failed(tmp_path):
    a = write(tmp_path / "a", fakes.failing())
    assert criteria(a, a)["derived counters"].missing_in == ("A", "B")


def test_a_transcript_of_another_layout_is_refused(tmp_path):
    a = write(tmp_path / "a")
    (a / evidence.TRANSCRIPT).write_text(json.dumps({"requests": [{"request": "A"}]}) + "\n")
    with pytest.raises(ValueError, match=r"transcript\.jsonl: does not fit the layout beside it"):
        compare(a, a)


PROOF = {
    "schema": "kvproof.faults/1",
    "faults": [
        {"name": "layer-skipped", "caught": True, "oracle": "placement", "applicable": True, "seconds": 1.5,
         "location": {"group": 0, "layer": "l.3", "resource": "K", "block": 7, "byte": 512}, "expected": None},
    ],
    "control": {"clean": True, "runs": [{"when": "before", "clean": True, "seconds": 0.5}]},
    "seconds": 2.0,
}  # fmt: skip


def test_two_proofs_of_faults(tmp_path, capsys):
    a, b = tmp_path / "a.json", tmp_path / "b"
    b.mkdir()
    other = copy.deepcopy(PROOF)
    a.write_text(json.dumps(PROOF))
    (b / evidence.FAULTS).write_text(json.dumps(other | {"seconds": 9.0}))
    assert compare(a, b).agree
    other["faults"][0]["location"]["byte"] = 513
    (b / evidence.FAULTS).write_text(json.dumps(other))
    assert changed(a, b) == {"fault localisation": "layer-skipped.location.byte: 512 | 513"}
    assert run(capsys, a, b)[0] == 1


def test_layouts_are_sent_to_the_command_that_compares_them(tmp_path, capsys):
    run_of = write(tmp_path / "run")
    file = tmp_path / "a layout.json"
    file.write_text(json.dumps({"schema": "kvproof.layout/1", **fakes.passing().layout}))
    for a, b in ((file, file), (file, run_of), (run_of, run_of / evidence.LAYOUT)):
        code, out, err = run(capsys, a, b)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert f"kvproof layout --diff {shlex.join((str(a), str(b)))}" in err


def test_a_file_that_is_no_proof_of_faults_is_refused(tmp_path):
    a = tmp_path / "a.json"
    a.write_text("{}")
    with pytest.raises(ValueError, match="is not the JSON of `kvproof faults --json`"):
        compare(a, a)
