"""Faults of dummy runs: a run without requests touches what belongs to requests."""

from __future__ import annotations

from kvproof.faults.trace.model import OFFLOAD, V1, V2, Place, TraceFault
from kvproof.faults.trace.tap import Call


class _Dummy(TraceFault):
    """Base of the faults in a dummy run; the stranger's block is the first one of the request that waits."""

    story = "idle_rank"

    def block(self) -> int:
        """A block of a real request."""
        return self.stage.blocks(self.stage.running()[0])[0]


class DummyWrites(_Dummy):
    """A dummy token has a slot in a real request's block."""

    rule = "dummy_slot_not_pad"
    engines = (V2, V1)

    def dummy_planned(self, call: Call) -> None:
        slots = call.kwargs["slot_mappings"][0] if call.result is None else call.result[1][0]
        slot = self.block() * self.stage.block_size
        call.item(slots, 1, slot)
        self.expected = Place(group=0, slot=slot)


class StaleSlotBehindDummy(_Dummy):
    """Behind the dummy run's own tokens the persistent slot buffer keeps a slot of an earlier step."""

    rule = "dummy_persistent_slot_not_pad"

    def dummy_planned(self, call: Call) -> None:
        slot = self.block() * self.stage.block_size + 7
        call.item(call.this.block_tables.slot_mappings, (0, call.args[0].num_tokens + 5), slot)
        self.expected = Place(group=0, slot=slot)


class DummyReadsRealBlock(_Dummy):
    """A dummy request's block-table row names a real request's block."""

    rule = "dummy_block_row_not_null"

    def dummy_planned(self, call: Call) -> None:
        block = self.block()
        call.item(call.result[0][0], (1, 2), block)
        self.expected = Place(group=0, block=block)


class ConnectorStaysOn(_Dummy):
    """The KV connector is left switched on during a dummy run."""

    rule = "dummy_connector_enabled"
    engines = (OFFLOAD,)

    def dummy_planned(self, call: Call) -> None:
        call.attr(call.this.kv_connector, "_disabled", False)
        self.expected = Place()


FAULTS: tuple[type[TraceFault], ...] = (DummyWrites, StaleSlotBehindDummy, DummyReadsRealBlock, ConnectorStaysOn)
