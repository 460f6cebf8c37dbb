"""The scheduler's numbers: each rule where it holds, where it breaks, and the legal steps that look broken."""

from __future__ import annotations

import pytest
from builders_a import MINE, Part, World, ints, judge, names

from kvproof.trace.records import Schedule
from kvproof.trace.rules import schedule


def two_steps(**changes: object) -> Schedule:
    """Request a decodes at 9 of its 9 tokens; request b is admitted with 6 tokens. ``changes`` replace fields."""
    world = World()
    world.step(new={"a": Part(0, 9, [[1, 2, 3]])})
    return world.step(new={"b": Part(0, 6, [[4, 5]])}, running={"a": Part(9, 1)}, counts={}, **changes)


def test_a_sound_step_breaks_nothing() -> None:
    assert judge(two_steps()) == []


def test_a_step_without_requests_breaks_nothing() -> None:
    assert judge(World().step(counts={})) == []


def test_every_rule_of_the_module_says_what_it_means() -> None:
    mine = [rule for rule in MINE if rule.check.__module__ == schedule.__name__]
    assert [rule.name for rule in mine] == [
        "sched_total_mismatch",
        "sched_budget_exceeded",
        "sched_nonpositive_tokens",
        "sched_duplicate_request",
        "sched_request_undeclared",
        "sched_finished_scheduled",
        "sched_computed_jump_forward",
        "sched_draft_exceeds_scheduled",
    ]
    for rule in MINE:
        assert rule.predicate
        assert rule.fields
        assert rule.meaning.endswith(".")
        judged = [other.name for other in MINE if other.record is rule.record]
        assert all(judged.index(other) < judged.index(rule.name) for other in rule.yields_to)


def test_total_mismatch() -> None:
    (found,) = judge(two_steps(total=8))
    assert (found.rule, found.expected, found.found) == ("sched_total_mismatch", "7 tokens in total", "8 tokens")
    assert found.where() == "the whole step"


def test_budget_exceeded() -> None:
    assert judge(two_steps(budget=7)) == []
    (found,) = judge(two_steps(budget=6))
    assert (found.rule, found.found) == ("sched_budget_exceeded", "7 tokens")


def test_an_unseen_budget_is_not_judged() -> None:
    assert judge(two_steps(budget=None)) == []


@pytest.mark.parametrize("tokens", [0, -3])
def test_nonpositive_tokens(tokens: int) -> None:
    found = judge(two_steps(tokens=ints([tokens, 1]), total=tokens + 1), "sched_nonpositive_tokens")
    assert [(v.request, v.found) for v in found] == [("b", f"{tokens} tokens")]


def test_duplicate_request() -> None:
    (found,) = judge(two_steps(declared=["b", "a", "b"]))
    assert (found.rule, found.request, found.found) == ("sched_duplicate_request", "b", "2 declarations")


def test_scheduled_without_a_declaration() -> None:
    (found,) = judge(two_steps(declared=["b"]))
    assert (found.rule, found.request, found.found) == ("sched_request_undeclared", "a", "no declaration")


def test_declared_with_a_negative_start() -> None:
    found = judge(two_steps(start=ints([0, -1])), "sched_request_undeclared")
    assert [(v.request, v.found) for v in found] == [("a", "-1 computed tokens")]


def test_a_declared_request_without_tokens_is_legal() -> None:
    """An asynchronous load owns its blocks first and is scheduled later."""
    assert judge(two_steps(declared=["b", "a", "loading"])) == []


def test_finished_and_scheduled() -> None:
    (found,) = judge(two_steps(finished=["a"], forget=False))
    assert (found.rule, found.request, found.found) == ("sched_finished_scheduled", "a", "1 tokens")


def test_an_aborted_id_may_come_back_as_new() -> None:
    world = World()
    world.step(new={"a": Part(0, 4, [[1]])})
    assert judge(world.step(new={"a": Part(0, 4, [[1]])}, finished=["a"], counts={})) == []


def test_preempted_and_scheduled_in_one_step_is_legal() -> None:
    """reset_prefix_cache preempts running requests and resumes them in the same step: as new (V2) or resumed (V1)."""
    for how in ("new", "resumed"):
        world = World()
        world.step(new={"a": Part(0, 9, [[1, 2, 3]])})
        step = world.step(**{how: {"a": Part(0, 10, [[4, 5, 6]])}}, preempted=["a"], counts={})
        assert judge(step) == []


def test_computed_jumps_forward() -> None:
    world = World()
    world.step(new={"a": Part(0, 6, [[1, 2]])})
    (found,) = judge(world.step(running={"a": Part(7, 1)}))
    assert (found.rule, found.request, found.position) == ("sched_computed_jump_forward", "a", 7)
    assert (found.expected, found.found) == ("at most 6 computed tokens", "7 computed tokens")


def test_rejected_drafts_may_lower_the_start() -> None:
    world = World()
    world.step(new={"a": Part(0, 4, [[1, 2, 3]])})
    world.step(running={"a": Part(4, 4, drafts=3)})
    assert judge(world.step(running={"a": Part(5, 4, drafts=3)}, counts={})) == []


def test_a_new_or_resumed_request_may_start_anywhere() -> None:
    """External loads appear later as new with computed tokens; a resumed request may hit more than it had."""
    world = World()
    assert judge(world.step(new={"a": Part(8, 1, [[1, 2, 3]])}, counts={})) == []
    assert judge(world.step(resumed={"a": Part(12, 1, [[1, 2, 3, 4]])}, preempted=["a"], counts={})) == []


def test_drafts_need_one_token_beside_them() -> None:
    world = World()
    world.step(new={"a": Part(0, 4, [[1, 2, 3]])})
    assert judge(world.step(running={"a": Part(4, 3, drafts=2)}, counts={})) == []
    (found,) = judge(world.step(running={"a": Part(7, 3, drafts=3)}, counts={}))
    assert (found.rule, found.request, found.found) == ("sched_draft_exceeds_scheduled", "a", "3 draft tokens")


def test_drafts_of_an_empty_share_are_reported_as_the_empty_share() -> None:
    step = two_steps(tokens=ints([6, 0]), total=6, drafts=ints([0, 2]))
    assert names(step) == ["sched_nonpositive_tokens"]
