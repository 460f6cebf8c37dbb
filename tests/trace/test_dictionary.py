"""The dictionary holds every event, field and rule of the code, and the committed file is the generated one."""

import json
from pathlib import Path

import logs
import pytest

from kvproof.trace.events import COMMON, EVENTS
from kvproof.trace.reader import dictionary
from kvproof.trace.rules.catalogue import RULES

ROOT = Path(__file__).parents[2]


def test_the_committed_file_is_the_generated_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert logs.command("dictionary") == 0
    generated = capsys.readouterr().out
    assert (ROOT / "docs" / "trace-dictionary.md").read_text() == generated


def test_everything_is_in_it() -> None:
    text = dictionary.markdown()
    for event in EVENTS.values():
        assert f"\n### {event.name}\n\n{dictionary._plain(event.meaning)}\n" in text
        for field in (*COMMON, *event.fields):
            assert f"\n| `{field.name}`" in text
    for rule in RULES.values():
        assert f"\n#### {rule.name}\n" in text
        assert f"\n- holds when: {dictionary._plain(rule.predicate)}\n" in text
    assert f"{len(RULES)} rules in " in text


def test_tables_are_tables() -> None:
    for line in dictionary.markdown().splitlines():
        if line.startswith("|"):
            assert line.replace("\\|", "").count("|") == 5, line


def test_every_rule_says_what_it_means() -> None:
    assert [rule.name for rule in RULES.values() if not rule.meaning] == []


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert logs.command("dictionary", "--json") == 0
    plain = json.loads(capsys.readouterr().out)
    assert plain["events"].keys() == EVENTS.keys()
    assert plain["rules"].keys() == RULES.keys()
    assert plain["events"]["kv.bind"]["view"] == "kv_bind"
    assert {"name": "drafts", "optional": True} .items() <= plain["events"]["kv.bind"]["fields"][3].items()
