"""All rules, in the order they are judged within a record: importing this module registers them."""

from __future__ import annotations

from kvproof.trace.rules import (
    binding,
    connector,
    content,
    dummy,
    handover,
    lifecycle,
    reads,
    results,
    schedule,
    speculation,
    writes,
)
from kvproof.trace.rules.model import REGISTERED, Rule

MODULES = (
    schedule,
    binding,
    handover,
    writes,
    reads,
    dummy,
    speculation,
    connector,
    results,
    lifecycle,
    content,
)

_ORDER = [module.__name__ for module in MODULES]
RULES: dict[str, Rule] = {
    rule.name: rule for rule in sorted(REGISTERED.values(), key=lambda rule: _ORDER.index(rule.check.__module__))
}
"""Every rule by name; within a record they are judged in this order, so a specific rule comes before a general one."""

FAMILIES: dict[str, tuple[str, ...]] = {}
for _rule in RULES.values():
    FAMILIES[_rule.family] = (*FAMILIES.get(_rule.family, ()), _rule.name)

__all__ = ["FAMILIES", "MODULES", "RULES", "Rule"]
