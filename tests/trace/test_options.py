"""Every option of ``additional_config.kv_trace``: default, values, and a message with name, value and limit."""

from __future__ import annotations

import json
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest

from kvproof.trace.options import DEFAULT_SUMS, MEANINGS, Options, parse
from kvproof.trace.rules.catalogue import FAMILIES, RULES


def options(**values: Any) -> Options:
    """The options an engine with these ends up with."""
    return parse({"kv_trace": values})


@pytest.mark.parametrize("config", [None, {}, {"other": 1}, [], "kv_trace", SimpleNamespace(kv_trace={})])
def test_no_entry_is_the_guard_off(config: Any) -> None:
    assert parse(config) == Options()
    assert not parse(config).enabled


def test_defaults() -> None:
    found = options(enabled=True)
    assert found == Options(enabled=True, rules={})
    assert (found.action, found.path, found.content) == ("log", None, 0)
    assert (found.max_queue, found.redact, found.max_log_mib) == (20_000, "tokens", 1024)
    assert found.enabled_rules() == tuple(RULES)


def test_an_empty_object_is_the_guard_off() -> None:
    assert not options().enabled


def test_every_option_has_a_meaning_and_every_meaning_an_option() -> None:
    assert set(MEANINGS) == {field.name for field in fields(Options)}
    assert all(MEANINGS.values())


@pytest.mark.parametrize(
    ("name", "given", "kept"),
    [
        ("enabled", True, True),
        ("enabled", False, False),
        ("action", "log", "log"),
        ("action", "raise", "raise"),
        ("path", "/tmp/somewhere", "/tmp/somewhere"),
        ("path", None, None),
        ("full_check_every", 1, 1),
        ("full_check_every", 1_000_000, 1_000_000),
        ("content", False, 0),
        ("content", True, DEFAULT_SUMS),
        ("content", 0, 0),
        ("content", 1_000_000, 1_000_000),
        ("max_queue", 16, 16),
        ("max_queue", 10_000_000, 10_000_000),
        ("redact", "none", "none"),
        ("redact", "tokens", "tokens"),
        ("redact", "all", "all"),
        ("redact", True, "all"),
        ("redact", False, "tokens"),
        ("max_log_mib", 8, 8),
        ("max_log_mib", 1_048_576, 1_048_576),
        ("rules", None, {}),
        ("rules", {"speculation": False}, {"speculation": False}),
    ],
)
def test_values_that_are_taken(name: str, given: Any, kept: Any) -> None:
    assert getattr(options(**{name: given}), name) == kept


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("enabled", 1, ["1", "neither true nor false"]),
        ("enabled", "yes", ["'yes'", "neither true nor false"]),
        ("action", "rasie", ["'rasie'", "log, raise", "did you mean raise"]),
        ("action", None, ["None", "log, raise"]),
        ("action", True, ["True", "log, raise"]),
        ("path", "", ["''", "directory"]),
        ("path", "  ", ["'  '", "directory"]),
        ("path", 7, ["7", "directory"]),
        ("full_check_every", 0, ["0", "from 1 to 1000000"]),
        ("full_check_every", 1_000_001, ["1000001", "from 1 to 1000000"]),
        ("full_check_every", True, ["True", "from 1 to 1000000"]),
        ("full_check_every", 2.0, ["2.0", "from 1 to 1000000"]),
        ("full_check_every", "64", ["'64'", "from 1 to 1000000"]),
        ("full_check_every", None, ["None", "from 1 to 1000000"]),
        ("content", -1, ["-1", "from 0 to 1000000"]),
        ("content", "true", ["'true'", "from 0 to 1000000"]),
        ("content", None, ["None", "from 0 to 1000000"]),
        ("max_queue", 15, ["15", "from 16 to 10000000"]),
        ("max_queue", 10_000_001, ["10000001", "from 16 to 10000000"]),
        ("redact", "token", ["'token'", "none, tokens, all", "did you mean tokens"]),
        ("redact", None, ["None", "none, tokens, all"]),
        ("redact", 1, ["1", "none, tokens, all"]),
        ("max_log_mib", 7, ["7", "from 8 to 1048576"]),
        ("max_log_mib", 1_048_577, ["1048577", "from 8 to 1048576"]),
        ("rules", [], ["[]", "rule or family to true or false"]),
        ("rules", "all", ["'all'", "rule or family to true or false"]),
        ("rules", {"write_slot_colision": False}, ["write_slot_colision", "did you mean write_slot_collision"]),
        ("rules", {"null_block_write": 0}, ["null_block_write", "0", "neither true nor false"]),
        ("rules", {"null_block_write": "off"}, ["null_block_write", "'off'", "neither true nor false"]),
        ("full_chek_every", 3, ["no such option", "did you mean full_check_every"]),
        ("zzz", 3, ["no such option", *MEANINGS]),
    ],
)  # fmt: skip
def test_values_that_are_refused(name: str, value: Any, words: list[str]) -> None:
    with pytest.raises(ValueError, match=f"kv_trace.{name}") as refusal:
        options(**{name: value})
    text = str(refusal.value)
    assert "\n" not in text
    for word in words:
        assert word in text


@pytest.mark.parametrize("value", [None, True, "on", ["enabled"], 1])
def test_the_entry_itself_must_be_an_object(value: Any) -> None:
    with pytest.raises(ValueError, match=r"additional_config\.kv_trace: .*object of options"):
        parse({"kv_trace": value})


def test_mistakes_count_even_when_the_guard_is_off() -> None:
    """Else the mistake shows on the day somebody turns the guard on, in production."""
    with pytest.raises(ValueError, match="action"):
        options(enabled=False, action="rasie")


def test_rules_by_name_beat_their_family_which_beats_all() -> None:
    family, names = next((f, n) for f, n in FAMILIES.items() if len(n) > 2)
    assert options(rules={family: False}).enabled_rules() == tuple(n for n in RULES if n not in names)
    kept = options(rules={family: False, names[1]: True}).enabled_rules()
    assert set(names) & set(kept) == {names[1]}
    assert options(rules={"all": False}).enabled_rules() == ()
    assert options(rules={"all": False, family: True, names[0]: False}).enabled_rules() == names[1:]
    assert options(rules={"all": True}).enabled_rules() == tuple(RULES)


def test_every_rule_and_family_can_be_switched_alone() -> None:
    for name in (*RULES, *FAMILIES):
        assert name not in options(rules={name: False}).enabled_rules()
    for name in RULES:
        assert options(rules={"all": False, name: True}).enabled_rules() == (name,)


def test_the_options_in_force_are_plain_json() -> None:
    found = options(enabled=True, rules={"dummy": False}, content=True).to_json()
    assert json.loads(json.dumps(found)) == found
    assert parse({"kv_trace": found}).to_json() == found


def test_the_caller_keeps_what_it_gave() -> None:
    rules = {"dummy": False}
    given = {"enabled": True, "rules": rules}
    found = options(**given)
    rules["dummy"] = True
    assert found.rules == {"dummy": False}
    assert given == {"enabled": True, "rules": {"dummy": True}}
