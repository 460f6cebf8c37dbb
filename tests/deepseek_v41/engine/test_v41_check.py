"""`kvproof check` on the bundled DeepSeek V4.1: every group judged, what is recomputed declared, under both runners."""

from __future__ import annotations

import json

import pytest

from kvproof.cli import main

pytestmark = pytest.mark.engine
CASES = [
    ("deepseek-v41-tiny", "--connector", "OffloadingConnector"),
    ("deepseek-v41-tiny", "--runner", "v2"),
    ("deepseek-v41-small",),
    ("deepseek-v41-small", "--connector", "OffloadingConnector"),
]


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_every_byte_comes_back(case, capsys):
    code = main(["check", *case, "--json"])
    report = json.loads(capsys.readouterr().out)
    assert (code, report["verdict"], report["findings"]) == (0, "PASS", [])
    restored = {group["kind"]: group["restored_bytes"] for group in report["groups"]}
    assert restored["circular_buffer"] == 0
    assert restored["mla_attention"] > 0
    assert restored["sliding_window_mla"] > 0


def test_the_tokens_come_back(capsys):
    """A running engine, the model computing: in one process and in several, with and without what was restored."""
    code = main(["check", "deepseek-v41-tiny", "--mode", "engine", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert (code, report["verdict"], report["findings"]) == (0, "PASS", [])
    judged = {oracle["oracle"]: oracle["judged_items"] for oracle in report["oracles"]}
    assert all(items > 0 for items in judged.values()), judged
