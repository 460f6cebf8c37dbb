"""KV memory apart from what the harness sees, as on a real device: every pull and every push is in its place."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from kvproof import zoo
from kvproof.engine import connectors
from kvproof.findings.case import Case
from kvproof.findings.model import Verdict
from kvproof.scenarios.children import watch

pytestmark = pytest.mark.engine
SUPPORT = Path(__file__).parents[1] / "support"


def run(tmp_path, monkeypatch, model, modes, mirror=""):
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))
    monkeypatch.setenv("MIRROR", mirror)
    store = tmp_path / "store"
    store.mkdir()
    case = Case(
        model, str(zoo.resolve(model, tmp_path)), connectors.parse("OffloadingConnector", str(store)), modes=modes,
        store=str(store),
    )  # fmt: skip
    (tmp_path / "case.json").write_text(case.dumps())
    watched = watch("mirrored", [str(tmp_path / "case.json"), str(tmp_path / "result")], case, lambda text: None)
    assert watched.returncode == 0, "".join(watched.lines[-20:])
    return pickle.loads((tmp_path / "result").read_bytes()).report


def test_a_right_connector_passes(tmp_path, monkeypatch):
    report = run(tmp_path, monkeypatch, "tiny-qwen3-next", ("bulk", "layerwise", "async"))
    assert (report.verdict, report.findings) == (Verdict.PASS, [])
    assert all(group.restored_bytes for group in report.groups)


@pytest.mark.parametrize("mirror", ["deaf", "mute"])
def test_a_way_that_is_cut_is_seen(tmp_path, monkeypatch, mirror):
    assert run(tmp_path, monkeypatch, "tiny-qwen3", ("bulk",), mirror).verdict is Verdict.FAIL
