"""``additional_config.kv_trace``: every option, its default, its meaning and its checks. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from kvproof.trace.rules.catalogue import FAMILIES, RULES

KEY = "kv_trace"
"""The key of ``additional_config`` that holds the options."""

ACTIONS = ("log", "raise")
REDACTIONS = ("none", "tokens", "all")
DEFAULT_SUMS = 8

MEANINGS: dict[str, str] = {
    "enabled": "true turns the guard on; omitted or false wraps nothing",
    "action": "log: report only, never change behaviour; raise: stop the step at the boundary where the rule broke",
    "path": "directory of the log, one file per process; omitted: vLLM's logger (steps at DEBUG, violations at ERROR)",
    "rules": "object of rule or family name to true or false; a rule's entry beats its family's, `all` is every rule",
    "full_check_every": "steps between full checks (whole block-table rows, the pool's own counts); 1: always all",
    "content": "false, true, or how many blocks per step get a checksum; also stamps every written slot",
    "max_queue": "events that may wait for the log's writer; more are dropped and counted",
    "redact": "tokens: token ids are not logged; all (or true): request ids are hashed too; none: token ids are logged",
    "max_log_mib": "MiB of log per process; eight rotating segments, the oldest is removed",
}
"""What each option does, for the README and the dictionary."""


@dataclass(frozen=True, slots=True)
class Options:
    """The options in force. full_check_every in steps, content in blocks per step, max_queue in events."""

    enabled: bool = False
    action: str = "log"
    path: str | None = None
    rules: Mapping[str, bool] | None = None
    full_check_every: int = 128
    content: int = 0
    max_queue: int = 20_000
    redact: str = "tokens"
    max_log_mib: int = 1024

    def enabled_rules(self) -> tuple[str, ...]:
        """Names of the rules to judge, in the catalogue's order."""
        chosen = self.rules or {}
        everything = chosen.get("all", True)
        return tuple(
            name for name, rule in RULES.items() if chosen.get(name, chosen.get(rule.family, everything))
        )

    def to_json(self) -> dict[str, Any]:
        """All options as plain JSON."""
        return {**asdict(self), "rules": dict(self.rules or {})}


def parse(additional_config: Any) -> Options:
    """Options from vLLM's ``additional_config`` (a mapping, or anything else: disabled).

    Raises ValueError with name, value and limit; an unknown key or rule is an error, not a silent default.
    """
    if not isinstance(additional_config, Mapping) or KEY not in additional_config:
        return Options()
    raw = additional_config[KEY]
    if not isinstance(raw, Mapping):
        raise ValueError(f"additional_config.{KEY}: {raw!r} is {type(raw).__name__}, not an object of options")
    known = {field.name for field in fields(Options)}
    for key in raw:
        if key not in known:
            raise ValueError(f"{KEY}.{key}: no such option{_hint(str(key), known)}; known: {', '.join(sorted(known))}")
    values = dict(raw)
    enabled = values.get("enabled", False)
    if not isinstance(enabled, bool):
        raise ValueError(f"{KEY}.enabled: {enabled!r} is neither true nor false")
    values["action"] = _one_of("action", values.get("action", "log"), ACTIONS)
    redact = values.get("redact", "tokens")
    redact = {True: "all", False: "tokens"}.get(redact, redact) if isinstance(redact, bool) else redact
    values["redact"] = _one_of("redact", redact, REDACTIONS)
    path = values.get("path")
    if path is not None and (not isinstance(path, str) or not path.strip() or "\0" in path):
        raise ValueError(f"{KEY}.path: {path!r} is not the name of a directory")
    content = values.get("content", 0)
    values["content"] = (
        DEFAULT_SUMS * content if isinstance(content, bool) else _integer("content", content, 0, 1_000_000)
    )
    for name, default, low, high in (
        ("full_check_every", 128, 1, 1_000_000),
        ("max_queue", 20_000, 16, 10_000_000),
        ("max_log_mib", 1024, 8, 1_048_576),
    ):
        values[name] = _integer(name, values.get(name, default), low, high)
    values["rules"] = _rules(values.get("rules"))
    return Options(**values)


def _one_of(name: str, value: Any, allowed: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{KEY}.{name}: {value!r} is none of {', '.join(allowed)}{_hint(str(value), allowed)}")
    return value


def _integer(name: str, value: Any, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{KEY}.{name}: {value!r} is no whole number from {low} to {high}")
    return value


def _rules(value: Any) -> Mapping[str, bool]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{KEY}.rules: {value!r} is no object of rule or family to true or false")
    names = {*RULES, *FAMILIES, "all"}
    for name, on in value.items():
        if name not in names:
            raise ValueError(
                f"{KEY}.rules.{name}: no such rule or family{_hint(str(name), names)}; families: {', '.join(FAMILIES)}"
            )
        if not isinstance(on, bool):
            raise ValueError(f"{KEY}.rules.{name}: {on!r} is neither true nor false")
    return dict(value)


def _hint(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, sorted(known), 1)
    return f", did you mean {close[0]}" if close else ""
