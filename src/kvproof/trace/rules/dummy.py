"""Rules 47–50: a dummy run leaves the cache as it is."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvproof.trace.records import NULL_BLOCK, PAD_SLOT, Dummy, Ints
from kvproof.trace.rules.model import Violation, rule
from kvproof.trace.rules.writes import more


def _unmasked(arrays: list[Ints | None], name: str, where: str) -> Iterator[Violation]:
    for group, slots in enumerate(arrays):
        if slots is None:
            continue
        flat = slots.reshape(-1)
        bad = np.flatnonzero(flat != PAD_SLOT)
        if len(bad):
            yield Violation(
                name,
                f"slot -1 (writes nothing) in all {len(flat)} entries {where}",
                f"slot {flat[bad[0]]} in entry {bad[0]}" + more(len(bad), "entries"),
                group=group,
                slot=int(flat[bad[0]]),
            )


@rule(
    Dummy,
    family="dummy",
    boundary="dummy",
    predicate="every slot of a dummy run is −1",
    fields=("BlockTables.get_dummy_slot_mappings", "BlockTable.slot_mapping"),
    meaning="A warm-up, capture or idle-rank run writes into the cache of real requests.",
)
def dummy_slot_not_pad(dummy: Dummy) -> Iterator[Violation]:
    """Judge the slots of the run."""
    yield from _unmasked(dummy.slots, "dummy_slot_not_pad", "of the run")


@rule(
    Dummy,
    family="dummy",
    boundary="dummy",
    predicate="the whole persistent slot buffer is −1 during a dummy run",
    fields=("BlockTables.slot_mappings",),
    skips="runners without a persistent buffer",
    yields_to=("dummy_slot_not_pad",),
    meaning="A captured graph that is larger than the dummy run writes to slots of an earlier step.",
)
def dummy_persistent_slot_not_pad(dummy: Dummy) -> Iterator[Violation]:
    """Judge the buffer beyond the run's own tokens too: kernels may look there."""
    yield from _unmasked(dummy.buffers, "dummy_persistent_slot_not_pad", "of the buffer")


@rule(
    Dummy,
    family="dummy",
    boundary="dummy",
    predicate="every block-table row of a dummy run is the null block (with state slots: 1 to R in column 0)",
    fields=("BlockTables.get_dummy_block_tables", "BlockTables.input_block_tables"),
    meaning="A dummy run updates the recurrent state of blocks that belong to real requests.",
)
def dummy_block_row_not_null(dummy: Dummy) -> Iterator[Violation]:
    """Judge the rows, which state layers write through without any slot."""
    for group, table in enumerate(dummy.tables):
        if table is None or table.ndim != 2:
            continue
        expected = np.full(table.shape, NULL_BLOCK, np.int64)
        if dummy.state_rows:
            expected[:, :1] = np.arange(1, len(table) + 1)[:, None]
        rows, columns = np.nonzero(table != expected)
        if len(rows):
            row, column = int(rows[0]), int(columns[0])
            yield Violation(
                "dummy_block_row_not_null",
                f"block {expected[row, column]} in row {row}, column {column}",
                f"block {table[row, column]}" + more(len(rows), "cells"),
                group=group,
                block=int(table[row, column]),
            )


@rule(
    Dummy,
    family="dummy",
    boundary="dummy",
    predicate="the KV connector is disabled during a dummy run",
    fields=("GPUModelRunner.kv_connector", "KVConnector.set_disabled"),
    needs=("connector_disabled",),
    skips="engines without a connector",
    meaning="A dummy run's worthless KV would be saved, or a load started for requests that do not exist.",
)
def dummy_connector_enabled(dummy: Dummy) -> Iterator[Violation]:
    """Judge the switch."""
    if dummy.connector_disabled is False:
        yield Violation("dummy_connector_enabled", "a disabled connector", "an enabled one")
