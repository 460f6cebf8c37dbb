"""``kvproof platforms``: the register is the code's, and the committed page is the generated one."""

import json
from pathlib import Path

import pytest

from kvproof.cli import main, platforms
from kvproof.engine.staging import MODEL_SUBSTITUTIONS
from kvproof.findings.model import CATEGORIES
from kvproof.platforms import registry
from kvproof.platforms.platform import Platform

ROOT = Path(__file__).parents[2]
EVERY = [registry.platform(name) for name in registry.NAMES]


class Elsewhere(Platform):
    name, summary = "elsewhere", "a platform that cannot run"

    def here(self):
        raise ValueError("--platform elsewhere: no card; buy one")


@pytest.fixture
def one_of_each(monkeypatch):
    """One platform that runs in every environment, and one that runs in none."""

    class Anywhere(Platform):
        name, summary, inputs, variations = "anywhere", "runs", {"--x": "1, 2"}, {"cores": (1, 2)}
        register = MODEL_SUBSTITUTIONS[:1]

    known = {"anywhere": Anywhere(), "elsewhere": Elsewhere()}

    def platform(name):
        if name not in known:
            raise ValueError(f"--platform {name}: expected one of {', '.join(known)}")
        return known[name]

    monkeypatch.setattr(platforms.registry, "NAMES", tuple(known))
    monkeypatch.setattr(platforms.registry, "platform", platform)


def test_the_committed_page_is_the_generated_one(capsys):
    assert main(["platforms", "--markdown"]) == 0
    assert (ROOT / "docs" / "platforms.md").read_text(encoding="utf-8") == capsys.readouterr().out


def test_every_substitution_is_in_the_page(capsys):
    main(["platforms", "--markdown"])
    page = capsys.readouterr().out
    for substitution in (*MODEL_SUBSTITUTIONS, *(s for p in EVERY for s in p.register)):
        assert f"| `{substitution.symbol}` | {CATEGORIES[substitution.category]} |" in page
    for line in page.splitlines():
        if line.startswith("|"):
            assert line.replace("\\|", "").count("|") in (4, 5), line


@pytest.mark.parametrize("platform", EVERY, ids=lambda platform: platform.name)
def test_every_substitution_says_why_the_layout_cannot_notice(platform):
    assert platform.summary
    symbols = [s.symbol for s in platform.register]
    assert len(symbols) == len(set(symbols))
    for substitution in platform.register:
        assert substitution.category in CATEGORIES
        assert all((substitution.symbol, substitution.reason, substitution.layout_neutral))


def test_an_unknown_name_is_refused_in_one_line(capsys):
    assert main(["platforms", "tpu"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("kvproof platforms: --platform tpu: expected one of cpu, ")


def test_exit_code_of_a_platform_that_cannot_run_here(one_of_each, capsys):
    assert main(["platforms"]) == 0
    out = capsys.readouterr().out
    assert "elsewhere does not run here: no card; buy one" in out
    assert main(["platforms", "elsewhere"]) == 3
    assert main(["platforms", "anywhere"]) == 0
    out = capsys.readouterr().out
    assert "kvproof ablate varies cores: 1, 2" in out
    assert "model loader" in out


def test_json(one_of_each, capsys):
    assert main(["platforms", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["schema"] == "kvproof.platforms/1"
    assert [(p["name"], p["runs_here"], p["obstacle"]) for p in data["platforms"]] == [
        ("anywhere", True, ""),
        ("elsewhere", False, "no card; buy one"),
    ]
    assert data["platforms"][0]["inputs"] == {"--x": "1, 2"}
    assert data["platforms"][0]["varied"] == {"cores": [1, 2]}
    assert data["platforms"][0]["substitutions"] == [MODEL_SUBSTITUTIONS[0].to_json()]
    assert len(data["everywhere"]) == len(MODEL_SUBSTITUTIONS)
