"""An explanation rebuilds what was declared, and says it in words."""

import json
from pathlib import Path
from typing import Any

import logs
import pytest

from kvproof.trace.reader import explain_view
from kvproof.trace.reader.explain import Explanation, NotFoundError, explain
from kvproof.trace.reader.log import open_log
from kvproof.trace.reader.story import ADVICE
from kvproof.trace.rules.catalogue import FAMILIES


def of(directory: Path, **wanted: Any) -> Explanation:
    return explain(open_log(directory), **wanted)


@pytest.fixture(name="found")
def found_(tmp_path: Path) -> Explanation:
    return of(logs.violated(tmp_path))


def test_rule_and_place(found: Explanation) -> None:
    assert found.rule is not None
    assert found.rule["predicate"]
    assert (found.number, found.total, found.who) == (1, 1, "worker 0")
    assert (found.place.step, found.place.column, found.place.size) == (9, 1, 16)
    assert (found.block, found.block_from) == (3, "where slot 58 lies")


def test_step_and_row_as_declared_up_to_it(found: Explanation) -> None:
    assert [(s.request, s.state, s.start, s.tokens) for s in found.scheduled] == [
        ("req-a", "running", 46, 1), ("req-b", "running", 26, 1), ("req-c", "running", 40, 1),
    ]  # fmt: skip
    assert found.row is not None
    assert found.row.groups == {0: [4, 5]}
    assert found.holders == [("req-a", 0, 2)]


def test_plans_around_the_step(found: Explanation) -> None:
    assert [(w.step, w.slot, w.block) for w in found.writes] == [(7, 88, 5), (8, 89, 5), (9, 58, 3), (10, 91, 5)]
    assert [(r.step, r.seq_len) for r in found.reads] == [(7, 25), (8, 26), (9, 27), (10, 28)]


def test_history_of_the_block(found: Explanation) -> None:
    assert [(h.what, h.request, h.first_step, h.last_step, h.slots) for h in found.history] == [
        ("handed out", "req-a", 2, 2, None),
        ("declared", "req-a", 2, 2, None),
        ("written", "req-a", 2, 9, (48, 63)),
        ("written", "req-b", 9, 9, (58, 59)),
    ]


def test_what_was_said_of_a_request(tmp_path: Path) -> None:
    engine = logs.Engine()
    engine.step({"s": 1}, new=["s"])
    for request in ("r", "s"):
        engine.boundary("match", request=request, matched=16, is_async=True, local=0, total=20)
    engine.boundary("load_target", request="r", external=16, local=0, blocks=[[9]])
    engine.boundary("transfers", finished_sending=["s"], finished_recving=["r"], failed_recving=[], invalid_blocks=[])
    engine.step({"s": 1, "r": 4}, new=["r"])
    engine.violation("r", rule="connector_finish_twice", family="connector", group=None)
    engine.violation("s", rule="connector_finish_twice", family="connector", group=None)
    engine.error()
    found = of(engine.save(tmp_path))
    assert [(c.step, c.kind, c.detail) for c in found.crossings] == [
        (1, "match", "matched 16, is_async yes, local 0, total 20"),
        (1, "load_target", "local 0, external 16, blocks [[9]]"),
        (1, "transfers", "finished_recving"),
        (2, "result", "sampled 1"),
    ]
    assert found.story[-2:] == [
        "Violated in the same step too: connector_finish_twice 1.",
        "In the same step execute_model raised RuntimeError: out of memory",
    ]


def test_the_story_names_the_wrong_block_and_its_owner(found: Explanation) -> None:
    told = "\n".join(found.story)
    assert "Position 26 lies in column 1 (16 tokens a column), declared as block 5." in told
    assert "slot 58, in block 3, which is not in the declared row of req-b." in told
    assert "Block 3 is declared at this step for req-a (group 0, column 2)." in told
    assert "Slot 58 is the place of position 42 of req-a, which has 47 tokens by now." in told
    assert any("req-a uses block 3" in line for line in found.next)


def test_a_violation_without_a_block_finds_it_by_the_position(tmp_path: Path) -> None:
    engine = logs.Engine()
    engine.step({"r": 20}, new=["r"])
    engine.step({"s": 5, "r": 1}, new=["s"])
    engine.violation("r", slot=-1, position=17)
    found = of(engine.save(tmp_path))
    assert (found.block, found.block_from) == (2, "declared for position 17")
    assert [h.what for h in found.history] == ["handed out", "declared", "written"]
    assert "Block 2 is declared at this step for r alone." in found.story


def test_blocks_given_back_and_taken_again(tmp_path: Path) -> None:
    engine = logs.Engine()
    engine.step({"r": 16}, new=["r"])
    (block,) = engine.rows["r"]
    engine.finish("r")
    engine.free = [block, *engine.free[:-1]]
    engine.step({"s": 16}, new=["s"])
    engine.violation("r", block=block, role="scheduler", family="lifecycle")
    found = of(engine.save(tmp_path))
    assert [(h.what, h.request) for h in found.history] == [
        ("handed out", "r"), ("declared", "r"), ("written", "r"), ("freed", "r"),
        ("handed out", "s"), ("finished", "r"), ("declared", "s"), ("written", "s"),
    ]  # fmt: skip
    assert found.row is not None
    assert found.row.gone == "finished at step 2"
    assert "r was finished at step 2, and its row with it." in found.story
    assert "r was not scheduled in this step." in found.story
    assert "It was last handed out to s at step 2." in found.story


def test_later_steps_do_not_change_the_row(tmp_path: Path) -> None:
    """Under async scheduling the next step is bound before the worker finds this one wrong."""
    engine = logs.Engine()
    engine.step({"r": 16}, new=["r"])
    engine.step({"r": 1}, written=False)
    engine.number -= 1
    engine.violation("r", position=3)
    engine.number += 1
    found = of(engine.save(tmp_path))
    assert found.place.step == 1
    assert found.row is not None
    assert found.row.groups == {0: [1]}


def test_a_position_beyond_the_declaration(tmp_path: Path) -> None:
    engine = logs.Engine()
    engine.step({"r": 16}, new=["r"])
    engine.violation("r", position=40)
    found = of(engine.save(tmp_path))
    assert "Position 40 lies in column 2 (16 tokens a column), but the row has 1 column." in found.story


def test_null_block(tmp_path: Path) -> None:
    engine = logs.Engine()
    engine.step({"r": 16}, new=["r"])
    engine.violation("r", slot=5)
    assert any(line.startswith("Block 0 is the null block") for line in of(engine.save(tmp_path)).story)


def test_outside_a_step_and_about_the_whole_step(tmp_path: Path) -> None:
    engine = logs.Engine()
    engine.violation(rule="dummy_slot_not_pad", family="dummy")
    engine.lines["worker"][-1]["step"] = None
    engine.step({"r": 3}, new=["r"])
    engine.lines["scheduler"][-2]["total"] = 4
    engine.violation(rule="sched_total_mismatch", role="scheduler", family="schedule", group=None)
    log = engine.save(tmp_path)
    assert of(log).story == ["The violation stands outside a step, before any step was bound."]
    assert of(log, wanted=2).story == [
        "Step 1: the scheduler gave 1 request 3 tokens of at most 64.",
        "It declared a total of 4 tokens, which is not that sum.",
    ]


def test_lost_declaration(tmp_path: Path) -> None:
    logs.violated(tmp_path)
    (tmp_path / logs.SCHEDULER).unlink()
    found = of(tmp_path)
    assert found.story[0] == "Step 9: its kv.bind is not in the log, so what was declared is not known."
    assert [w.slot for w in found.writes] == [88, 89, 58, 91]


def test_which_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = logs.Engine()
    engine.step({"r": 3}, new=["r"])
    for rule in ("first_rule", "second_rule", "second_rule"):
        engine.violation("r", rule=rule)
    log = engine.save(tmp_path)
    assert of(log).violation["rule"] == "first_rule"
    assert of(log, wanted=3).number == 3
    assert of(log, rule="second_rule").number == 2
    assert of(log, wanted=2, rule="second_rule").number == 3
    assert of(log).rules == {"second_rule": 2, "first_rule": 1}
    assert of(log).rule is None  # not in this version's catalogue
    with pytest.raises(NotFoundError, match="--number 4: limit 3, the violations in this log"):
        of(log, wanted=4)
    with pytest.raises(NotFoundError, match="--number 0: limit at least 1"):
        of(log, wanted=0)
    with pytest.raises(NotFoundError, match="--rule nothing: not violated in this log; violated: first_rule, second_r"):
        of(log, rule="nothing")
    assert logs.command("explain", log) == 0
    out = capsys.readouterr().out
    assert "3 violations in this log: second_rule 2, first_rule 1" in out
    assert logs.command("explain", log, "--number", "9") == 2
    assert capsys.readouterr().err == "kvproof trace explain: --number 9: limit 3, the violations in this log\n"


def test_two_engines_in_one_directory_do_not_mix(tmp_path: Path) -> None:
    logs.violated(tmp_path)
    other = logs.Engine("deadbeef")
    other.step({"req-b": 60}, new=["req-b"])
    other.save(tmp_path / "other")
    for name in (logs.SCHEDULER, logs.WORKER):
        (tmp_path / "other" / name).rename(tmp_path / name.replace("node-1", "node-2"))
    found = of(tmp_path)
    assert found.row is not None
    assert found.row.groups == {0: [4, 5]}


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert logs.command("explain", logs.violated(tmp_path), "--json") == 0
    plain = json.loads(capsys.readouterr().out)
    assert plain["violation"]["rule"] == logs.RULE
    assert plain["row"]["groups"] == {"0": [4, 5]}
    assert plain["story"]


def test_every_family_has_its_advice() -> None:
    assert ADVICE.keys() == FAMILIES.keys()


def test_long_rows_show_their_ends_and_the_place() -> None:
    row: list[int | None] = list(range(100, 200))
    row[40] = None
    text = explain_view.row_text(row, 170, 42).plain
    assert text.startswith("0:100  1:101  2:102  3:103  …")
    assert "40:?  41:141  42:142" in text
    assert "70:170" in text
    assert text.endswith("99:199")
    assert "50:150" not in text
