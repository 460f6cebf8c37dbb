"""Counters worked out from block tables by hand."""

from __future__ import annotations

from dataclasses import replace

import report_fakes as fakes

from kvproof.findings.derived import Derived, derived
from kvproof.layout import Layout

ROW, LAYERS = 8 * 512, 36


def found(layout: Layout, *requests: dict[str, object], computed: int = 0, restored: int = 0) -> dict[str, Derived]:
    groups = [{"group": 0, "computed_bytes": computed, "restored_bytes": restored}]
    return {d.name.partition(" ")[0]: d for d in derived(layout, groups, [{"step": 1, "requests": list(requests)}])}


def request(computed, scheduled, external=0, local=0, table=fakes.BLOCKS, name="A"):
    return {
        "request": name, "computed": computed, "scheduled": scheduled, "local": local, "external": external,
        "tables": [table],
    }  # fmt: skip


def grouped(**changes) -> Layout:
    layout = fakes.dense_layout()
    return replace(layout, groups=(replace(layout.groups[0], **changes),))


def test_tokens_times_layers_times_row():
    counters = found(fakes.dense_layout(), request(0, 20), computed=20 * ROW * LAYERS)
    assert counters["computed"].holds
    assert counters["computed"].derived == 20 * ROW * LAYERS
    assert counters["restored"].derived == 0


def test_steps_add_up_and_the_hit_is_counted_once():
    steps = (request(32, 8, external=32), request(40, 1, external=32))
    counters = found(fakes.dense_layout(), *steps)
    assert counters["computed"].derived == 9 * ROW * LAYERS
    assert counters["restored"].derived == 32 * ROW * LAYERS
    assert not counters["restored"].holds


def test_what_the_local_cache_held_was_not_restored():
    assert found(fakes.dense_layout(), request(48, 1, local=16, external=32))["restored"].derived == 32 * ROW * LAYERS


def test_null_blocks_hold_nothing():
    table = [0, 0, *fakes.BLOCKS[2:]]
    counters = found(fakes.dense_layout(), request(64, 8, external=64, table=table))
    assert counters["restored"].derived == 32 * ROW * LAYERS


def test_a_window_needs_its_last_tokens_only():
    layout = grouped(rule="window", window=20)
    assert found(layout, request(64, 1, external=64))["restored"].derived == 19 * ROW * LAYERS


def test_what_is_recomputed_is_not_restored():
    assert found(grouped(rule="recomputed"), request(64, 1, external=64))["restored"].derived == 0


def test_a_compressed_row_is_complete_with_its_last_token():
    layout = fakes.dense_layout()
    layout = replace(layout, resources=tuple(replace(r, tokens_per_row=4) for r in layout.resources))
    assert found(layout, request(2, 5))["computed"].derived == 1 * ROW * LAYERS


def test_states_are_not_derived():
    assert found(grouped(rule="state"), request(0, 20)) == {}
