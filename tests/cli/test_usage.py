"""Bad input: one line on standard error that names value and limit, exit code 2, nothing written."""

import json

import pytest

from kvproof.cli import main
from kvproof.findings.case import Case
from kvproof.platforms import registry


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
        (["tiny-qwen3", "--mode", "engine", "--platform", "cuda-sim"], "--mode engine: the engine computes"),
        (["tiny-qwen3", "--mode", "engine", "--platform", "ascend-sim"], "--mode engine: the engine computes"),
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


TAKERS = {
    ("--cuda-capability", "9.0"): {"cuda", "cuda-sim"},
    ("--soc", "ascend910b"): {"ascend", "ascend-sim"},
    ("--declare-soc",): {"ascend-sim"},
}


@pytest.mark.parametrize("options", TAKERS, ids=lambda options: options[0])
@pytest.mark.parametrize("platform", registry.NAMES)
@pytest.mark.parametrize(
    "command",
    [["check", "tiny-qwen3"], ["layout", "tiny-qwen3"], ["layout", "--diff", "tiny-qwen3", "tiny-gemma3"],
     ["ablate", "tiny-qwen3"], ["faults", "--only", "bit-flipped"]],
    ids=lambda command: " ".join(command[:2]),
)  # fmt: skip
def test_an_option_is_refused_where_the_platform_would_ignore_it(command, platform, options, capsys):
    if platform in TAKERS[options]:
        registry.require_taken(Case("m", "d", platform=platform, **{_field(options[0]): options[-1]}))
        return
    assert main([*command, "--platform", platform, *options]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert f"{' '.join(options)}: not for --platform {platform}, only for {' and '.join(_named(options))}" in err


def test_inside_the_quotes_of_a_case_too(capsys):
    assert main(["layout", "--diff", "tiny-qwen3", "tiny-qwen3 --soc ascend910b"]) == 2
    assert capsys.readouterr().err.startswith("kvproof layout: B: --soc ascend910b: not for --platform cpu")


def _field(option):
    return option.removeprefix("--").replace("-", "_")


def _named(options):
    return [name for name in registry.NAMES if name in TAKERS[options]]


@pytest.mark.parametrize(
    ("options", "named"),
    [(["--platform", "cuda-sim"], "--platform"), (["--cuda-capability", "9.0"], "--cuda-capability"),
     (["--runner", "v2"], "--runner"), (["--connector", "MultiConnector"], "--connector")],
)  # fmt: skip
def test_faults_of_the_guard_have_engines_of_their_own(options, named, capsys):
    assert main(["faults", "--trace", *options]) == 2
    assert capsys.readouterr().err == (
        f"kvproof faults: --trace: has engines of its own on vLLM's CPU build, does not take {named}\n"
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["check", "tiny-qwen3", "--platform", "tpu"], "kvproof check: argument --platform: invalid choice: 'tpu'"),
        (["layout", "--diff", "tiny-qwen3"], "kvproof layout: argument --diff: expected 2 arguments"),
        (["check"], "kvproof check: the following arguments are required: MODEL"),
        (["check", "tiny-qwen3", "--tokens", "few"], "kvproof check: argument --tokens: invalid int value: 'few'"),
        (["trace", "summary"], "kvproof trace summary: the following arguments are required"),
        (["zoo", "lst"], "kvproof zoo: argument {list,show,write,make}: invalid choice: 'lst'"),
        (["chek"], "kvproof: argument COMMAND: invalid choice: 'chek'"),
        ([], "kvproof: the following arguments are required: COMMAND"),
        (["check", "tiny-qwen3", "--tokns", "3"], "kvproof: unrecognized arguments: --tokns 3"),
    ],
)
def test_arguments_that_do_not_parse_are_refused_in_one_line(arguments, said, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    out, err = capsys.readouterr()
    assert (stop.value.code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(said)


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


@pytest.mark.parametrize(
    ("option", "value"),
    [("--tokens", "64"), ("--max-model-len", "512"), ("--block-size", "32"), ("--cudagraph-mode", "FULL"),
     ("--engine-args", '{"block_size": 32}')],
)  # fmt: skip
def test_the_running_engine_is_not_asked_for_what_it_would_ignore(option, value, capsys):
    assert main(["check", "tiny-qwen3", "--mode", "engine", option, value]) == 2
    assert capsys.readouterr().err.startswith(f"kvproof check: {option}: not for --mode engine")


def test_too_large_for_random_weights(capsys, tmp_path):
    assert main(["check", "qwen3-8b", "--mode", "engine"]) == 2
    assert "limit 50,000,000" in capsys.readouterr().err


def test_zoo_list_is_json(capsys):
    assert main(["zoo", "list", "--json"]) == 0
    assert "qwen3-0.6b" in {model["name"] for model in json.loads(capsys.readouterr().out)}
