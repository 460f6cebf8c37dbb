"""The HTML page in a real browser: it draws, opens the failing page by itself, and logs no error."""

import shutil
import subprocess
from dataclasses import replace

import pytest
import report_fakes as fakes

from kvproof.findings import html

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--enable-logging=stderr",
)  # fmt: skip

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here; apt-get install chromium")


def drawn(report, tmp_path, then=""):
    """(DOM after the scripts ran, console lines) of a report's page; ``then`` is a script after the page's own."""
    page = tmp_path / "report.html"
    page.write_text(html.render(report) + then, encoding="utf-8")
    done = subprocess.run(
        [CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=5000", "--dump-dom",
         page.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.parametrize("make", [fakes.passing, fakes.failing, fakes.hybrid, fakes.unsupported])
def test_every_page_draws_without_an_error(make, tmp_path):
    report = make()
    dom, console = drawn(report, tmp_path)
    assert console == []
    assert report.verdict.value in dom
    assert dom.count("<canvas") >= bool(report.bytemaps)


def test_a_failing_page_opens_its_first_failing_byte(tmp_path):
    """What the script, not the template, must have done: the zoom panel names layer and block of the first finding."""
    report = fakes.failing()
    dom, _ = drawn(report, tmp_path)
    place = report.findings[0].location
    panel = dom[dom.index('id="zoom"') :].partition("</section>")[0]
    assert not panel.partition(">")[0].count("hidden")
    assert place.layer in panel
    assert f"block {place.block}" in panel
    assert "<dt>holds</dt>" in panel
    assert str(report.findings[0].origin) in panel


def test_a_wrong_byte_that_no_finding_names_shows_the_owner_known_in_its_page(tmp_path):
    report = fakes.failing()
    owned = report.findings[0]
    report.findings = [owned, replace(owned, origin=None, location=replace(owned.location, byte=768))]
    click = "<script>document.querySelector('[data-target=\"1\"]').click()</script>"
    dom, console = drawn(report, tmp_path, click)
    panel = dom[dom.index('id="zoom"') :].partition("</section>")[0]
    assert console == []
    assert "<dt>byte of the page</dt><dd>768</dd>" in panel
    assert f"named for byte 256 of this page: {owned.origin}" in panel
