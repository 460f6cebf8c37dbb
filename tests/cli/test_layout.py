"""``kvproof layout`` and ``layout --diff``, with layouts in place of engines."""

import json

import pytest
import staged_fakes as fakes

from kvproof.cli import layout as command
from kvproof.cli import layout_diff, main

FILE = "a file of a layout"


@pytest.fixture
def stage(monkeypatch):
    """Makes both commands stage what ``answer`` says; returns the cases they staged."""

    def use(answer):
        stand_in, cases = fakes.staging(answer)
        monkeypatch.setattr(command, "stage", stand_in)
        monkeypatch.setattr(layout_diff, "stage", stand_in)
        return cases

    return use


@pytest.fixture
def files(tmp_path):
    """Two layout files, the second an evidence directory."""
    a, b = tmp_path / "a.json", tmp_path / "b"
    b.mkdir()
    a.write_text(json.dumps({"schema": "kvproof.layout/1", **fakes.layout().to_json()}))
    (b / "layout.json").write_text(json.dumps({"schema": "kvproof.layout/1", **fakes.layout(True).to_json()}))
    return str(a), str(b)


def test_the_table(stage, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    stage(lambda case: fakes.layout())
    assert main(["layout", "tiny-qwen3"]) == 0
    out = capsys.readouterr().out
    assert "tiny-qwen3: layout LBNHC, 10 blocks, 512 B per block id, 1 storage" in out
    assert "group 0  2 × model.layers.*.attn (0, 1)" in out
    assert "16 × 2 × 8 (16 rows of 16)" in out
    assert "256 (0 padding), block stride 256" in out


def test_json_is_the_layout(stage, capsys):
    stage(lambda case: fakes.layout())
    assert main(["layout", "tiny-qwen3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kv_layout"] == "LBNHC"


def test_unsupported(stage, capsys):
    stage(lambda case: "KVCacheConfig: ValueError: no")
    assert main(["layout", "tiny-qwen3"]) == 3
    assert capsys.readouterr().out == "UNSUPPORTED: KVCacheConfig: ValueError: no\n"


def test_two_files(files, capsys):
    a, b = files
    assert main(["layout", "--diff", a, a]) == 0
    assert capsys.readouterr().out.rstrip().endswith("SAME  0 changes")
    assert main(["layout", "--diff", a, b]) == 1
    out = capsys.readouterr().out
    assert "axes H and N swapped: LBHNC instead of LBNHC" in out
    assert out.rstrip().endswith("DIFFER  2 changes")


def test_json_of_a_difference(files, capsys):
    a, b = files
    assert main(["layout", "--diff", a, b, "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert (data["schema"], data["a"], data["b"], data["same"]) == ("kvproof.layout-diff/1", a, b, False)
    assert [change["aspect"] for change in data["changes"]] == ["layout name", "strides"]


def test_two_cases_are_staged_one_after_the_other(stage, capsys):
    cases = stage(lambda case: fakes.layout(heads_outside=case.connector is not None))
    code = main(["layout", "--diff", "tiny-qwen3 --runner v2", "tiny-gemma3 --connector OffloadingConnector"])
    assert code == 1
    assert [(c.model, c.runner, c.connector and c.connector.name) for c in cases] == [
        ("tiny-qwen3", "v2", None),
        ("tiny-gemma3", "v1", "OffloadingConnector"),
    ]
    out = capsys.readouterr().out
    assert out.startswith("A  tiny-qwen3 --runner v2\nB  tiny-gemma3 --connector OffloadingConnector\n")


def test_options_outside_the_quotes_hold_for_both_sides(stage):
    cases = stage(lambda case: fakes.layout())
    assert main(["layout", "--diff", "tiny-qwen3", "tiny-qwen3 --runner v1", "--runner", "v2"]) == 0
    assert [case.runner for case in cases] == ["v2", "v1"]


def test_a_file_and_a_case(stage, files):
    cases = stage(lambda case: fakes.layout())
    assert main(["layout", "--diff", files[0], "tiny-qwen3"]) == 0
    assert len(cases) == 1


def test_a_side_vllm_does_not_stage(stage, capsys):
    stage(lambda case: "model construction: no" if case.runner == "v2" else fakes.layout())
    assert main(["layout", "--diff", "tiny-qwen3", "tiny-qwen3 --runner v2"]) == 3
    assert capsys.readouterr().out == "UNSUPPORTED: B: model construction: no\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "expected MODEL, or --diff A B"),
        (["tiny-qwen3", "--diff", "tiny-qwen3", "tiny-qwen3"], "expected MODEL, or --diff A B"),
        (["--diff", "tiny-qwen3", "no-such-model"], "B: model 'no-such-model'"),
        (["--diff", "tiny-qwen3 --no-such-option", "tiny-qwen3"], "A: unrecognized arguments: --no-such-option"),
        (["--diff", "tiny-qwen3", "tiny-qwen3 --runner v3"], "B: argument --runner: invalid choice: 'v3'"),
        (["--diff", "", "tiny-qwen3"], "A: "),
        (["--diff", __file__, "tiny-qwen3"], "holds no layout"),
        (["--diff", "tiny-qwen3 '", "tiny-qwen3"], "A: No closing quotation"),
        (["--diff", FILE, FILE, "--runner", "v2"], "--runner: both layouts are files"),
        (["--diff", FILE, FILE, "--platform", "cuda-sim", "--cuda-capability", "9.0"], "--platform: both layouts are"),
    ],
)
def test_refused_in_one_line_before_anything_is_staged(stage, files, arguments, said, capsys):
    arguments = [files[0] if argument == FILE else argument for argument in arguments]
    cases = stage(lambda case: fakes.layout())
    assert main(["layout", *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("kvproof layout: ")
    assert said in err
    assert not cases


def test_an_input_refused_by_vllm_names_its_side(monkeypatch, capsys):
    def refuse(case, quiet):
        raise ValueError(f"--engine-args: {case.runner}")

    monkeypatch.setattr(layout_diff, "stage", refuse)
    assert main(["layout", "--diff", "tiny-qwen3", "tiny-qwen3 --runner v2"]) == 2
    assert capsys.readouterr().err == "kvproof layout: A: --engine-args: v1\n"
