"""Bad input: one line on standard error that names value and limit, exit code 2, nothing written."""

import json

import pytest

from kvproof.cli import main


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["no-such-model"], "'no-such-model'"),
        (["tiny-qwen"], "did you mean"),
        (["tiny-qwen3", "--tokens", "0"], "--tokens 0: limit at least 1"),
        (["tiny-qwen3", "--tokens", "-5"], "--tokens -5: limit at least 1"),
        (["tiny-qwen3", "--tokens", "999999"], "--tokens 999999: limit"),
        (["tiny-qwen3", "--max-model-len", "0"], "--max-model-len 0: limit at least 1"),
        (["tiny-qwen3", "--max-model-len", "999999"], "--max-model-len 999999: limit"),
        (["tiny-qwen3", "--block-size", "-1"], "--block-size -1: limit at least 1"),
        (["tiny-qwen3", "--connector", ""], "--connector ''"),
        (["tiny-qwen3", "--connector", "not a name"], "--connector 'not a name'"),
        (["tiny-qwen3", "--connector", "a..b:C"], "--connector 'a..b:C'"),
        (["tiny-qwen3", "--connector-config", "{"], "--connector-config: not JSON"),
        (["tiny-qwen3", "--connector-config", "[1]"], "--connector-config: expected a JSON object"),
        (["tiny-qwen3", "--engine-args", "{"], "--engine-args: not JSON"),
        (["tiny-qwen3", "--engine-args", "3"], "--engine-args: expected a JSON object"),
        (["tiny-qwen3", "--evidence", "/dev/null/x"], "evidence directory /dev/null/x"),
    ],
)
def test_refused(arguments, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["check", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("kvproof check: ")
    assert err.count("\n") == 1
    assert said in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"model_type": 3}'])
def test_broken_config_is_refused(content, capsys, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(content)
    evidence = tmp_path / "evidence"
    assert main(["check", str(model), "--evidence", str(evidence)]) == 2
    assert str(model) in capsys.readouterr().err
    assert not evidence.exists()


def test_foreign_evidence_directory_is_refused_and_kept(capsys, tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    assert main(["check", "tiny-qwen3", "--evidence", str(tmp_path)]) == 2
    assert "holds no kvproof evidence" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_too_large_for_random_weights(capsys, tmp_path):
    assert main(["check", "qwen3-8b", "--mode", "engine"]) == 2
    assert "limit 50,000,000" in capsys.readouterr().err


def test_zoo_list_is_json(capsys):
    assert main(["zoo", "list", "--json"]) == 0
    assert "qwen3-0.6b" in {model["name"] for model in json.loads(capsys.readouterr().out)}
