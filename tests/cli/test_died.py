"""A child that ended without a result: what the verdict says of it."""

from __future__ import annotations

import pytest

from kvproof.cli.check import died
from kvproof.cli.child import ChildRun
from kvproof.findings.case import Case
from kvproof.findings.model import Verdict
from kvproof.scenarios.children import Watched

SAID = "kvproof-hostrt: libcudart.so.12: cudaLaunchKernel is not implemented"


@pytest.mark.parametrize(
    ("last", "verdict"), [("starting the engine core", Verdict.UNSUPPORTED), ("scenario bulk/64", Verdict.FAIL)]
)
def test_the_entry_nobody_wrote_is_named(last, verdict):
    report = died(Case("m", "/m"), ChildRun(None, Watched(-6, last, ("noise\n", f"{SAID}\n", "more\n"))))
    assert report.verdict is verdict
    assert report.reason.endswith(f"ended with signal 6, {SAID}") or f"signal 6, {SAID} during {last}" in report.reason


def test_without_last_words_only_the_signal_is_named():
    report = died(Case("m", "/m"), ChildRun(None, Watched(-11, "importing vLLM", ("noise\n",))))
    assert report.reason == "importing vLLM: the staging process ended with signal 11"
