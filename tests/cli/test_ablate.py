"""``kvproof ablate``, with layouts in place of engines."""

import json
from typing import ClassVar

import pytest
import staged_fakes as fakes

from kvproof.cli import ablate, main
from kvproof.platforms import registry
from kvproof.platforms.platform import Platform


class Declared(Platform):
    """Two quantities that must not matter, one input that does."""

    name = "declared"
    variations: ClassVar = {"cores": (1, 2), "name": ("X",)}
    inputs: ClassVar = {"--cuda-capability": "9.0"}


@pytest.fixture
def stage(monkeypatch):
    monkeypatch.setattr(ablate, "platform", lambda name: Declared())
    monkeypatch.setattr(registry.platform("cpu").__class__, "require", lambda self, case: None)
    monkeypatch.setattr(registry.platform("cpu").__class__, "inputs", Declared.inputs)

    def use(answer):
        stand_in, cases = fakes.staging(answer)
        monkeypatch.setattr(ablate, "stage", stand_in)
        return cases

    return use


def test_a_layout_that_does_not_move(stage, capsys):
    cases = stage(lambda case: fakes.layout())
    assert main(["ablate", "tiny-qwen3", "--cuda-capability", "9.0"]) == 0
    assert [case.varied for case in cases] == [{}, {"cores": 1}, {"cores": 2}, {"name": "X"}]
    out = capsys.readouterr().out
    assert "--cuda-capability 9.0" in out
    assert "NOT MOVED  3 of 3 variations changed nothing" in out


def test_a_layout_that_moves_is_named_with_the_quantity(stage, capsys):
    stage(lambda case: fakes.layout(block=32 if case.varied.get("cores") == 2 else 16))
    assert main(["ablate", "tiny-qwen3", "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert (data["schema"], data["moved"]) == ("kvproof.ablate/1", True)
    assert [(a["quantity"], a["value"], a["result"]) for a in data["ablations"]] == [
        ("cores", 1, "same"),
        ("cores", 2, "moved"),
        ("name", "X", "same"),
    ]
    assert "block 16 → 32 tokens" in [change["words"] for change in data["ablations"][1]["changes"]]
    assert data["inputs"]["--connector"] == "none"
    assert data["inputs"]["--cudagraph-mode"] == "eager"


def test_a_variation_vllm_refuses(stage, capsys):
    stage(lambda case: "KVCacheConfig: too small" if case.varied.get("cores") == 1 else fakes.layout())
    assert main(["ablate", "tiny-qwen3"]) == 3
    out = capsys.readouterr().out
    assert "KVCacheConfig: too small" in out
    assert "UNSUPPORTED  2 of 3 variations changed nothing" in out


def test_a_case_vllm_refuses(stage, capsys):
    cases = stage(lambda case: "no")
    assert main(["ablate", "tiny-qwen3"]) == 3
    assert capsys.readouterr().out == "UNSUPPORTED: no\n"
    assert len(cases) == 1


def test_a_platform_that_declares_nothing(stage, monkeypatch, capsys):
    monkeypatch.setattr(ablate, "platform", lambda name: registry.platform("cpu"))
    assert main(["ablate", "tiny-qwen3"]) == 2
    assert capsys.readouterr().err == "kvproof ablate: --platform cpu: declares no quantity that could be varied\n"


def test_every_quantity_is_one_its_platform_knows():
    from kvproof.platforms.cuda_sim.devices import device

    for quantity, values in registry.platform("cuda-sim").variations.items():
        for value in values:
            assert getattr(device("9.0", {quantity: value}), quantity) == value
            assert getattr(device("9.0", {}), quantity) != value
