"""The step a model runner is about to run, in both runners' own tensors, as a fault may change it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvproof.faults.trace.tap import Call


@dataclass
class NativePlan:
    """Views of the runner's tensors, group 0, in batch order. ``query_start`` has one entry more than ``ids``."""

    call: Call
    ids: list[str]
    num_tokens: int
    query_start: Any
    positions: Any
    seq_lens: Any
    slots: Any
    table: Any

    def first(self, row: int) -> int:
        """Index of the first token of a batch row."""
        return int(self.query_start[row])

    def last(self, row: int) -> int:
        """Index of the last token of a batch row."""
        return int(self.query_start[row + 1]) - 1

    def position(self, token: int) -> int:
        """Position of a token."""
        return int(self.positions[token])

    def put(self, tensor: Any, index: Any, value: Any) -> None:
        """Write into one of the tensors."""
        self.call.item(tensor, index, value)

    def leave_out_last(self) -> None:
        """Shorten the batch by its last request."""
        raise NotImplementedError

    def claim_tokens(self, count: int) -> None:
        """Say that the batch has ``count`` tokens."""
        raise NotImplementedError

    def pad_slots(self, slot: int) -> None:
        """Pad the slot mapping by one entry."""
        raise NotImplementedError

    def pad_rows(self, length: int) -> None:
        """Pad the batch by one row with a context of ``length`` tokens."""
        raise NotImplementedError

    def narrow_table(self, columns: int) -> None:
        """Cut the block table to ``columns`` columns."""
        raise NotImplementedError


class PlanV2(NativePlan):
    """An InputBatch and what prepare_attn returned for it."""

    @property
    def _batch(self) -> Any:
        return self.call.args[0]

    def leave_out_last(self) -> None:
        self.call.attr(self._batch, "num_reqs", len(self.ids) - 1)

    def claim_tokens(self, count: int) -> None:
        self.call.attr(self._batch, "num_tokens", count)

    def pad_slots(self, slot: int) -> None:
        tables, _ = self.call.result
        buffer = self.call.this.block_tables.slot_mappings
        self.call.item(buffer, (0, self.num_tokens), slot)
        self.call.show((tables, buffer[:, : self.num_tokens + 1]))

    def pad_rows(self, length: int) -> None:
        buffer, count = self.call.this.input_buffers.seq_lens, len(self.ids)
        self.call.item(buffer, count, length)
        self.call.attr(self._batch, "seq_lens", buffer[: count + 1])

    def narrow_table(self, columns: int) -> None:
        tables, slots = self.call.result
        self.call.show((tuple(table[:, :columns] for table in tables), slots))


class PlanV1(NativePlan):
    """The runner's persistent buffers as _build_attention_metadata is about to read them."""

    def leave_out_last(self) -> None:
        self.call.item(self.call.kwargs, "num_reqs", len(self.ids) - 1)

    def claim_tokens(self, count: int) -> None:
        self.call.item(self.call.kwargs, "num_tokens", count)

    def pad_slots(self, slot: int) -> None:
        buffer = self.call.this.input_batch.block_table[0].slot_mapping.gpu
        self.call.item(buffer, self.num_tokens, slot)
        self.call.item(self.call.kwargs, "slot_mappings", {0: buffer[: self.num_tokens + 1]})

    def pad_rows(self, length: int) -> None:
        count = len(self.ids)
        self.call.item(self.call.this.seq_lens, count, length)
        self.call.item(self.call.kwargs, "num_reqs_padded", count + 1)

    def narrow_table(self, columns: int) -> None:
        buffer = self.call.this.input_batch.block_table[0].block_table
        self.call.attr(buffer, "gpu", buffer.gpu[:, :columns])


def plan_v2(call: Call) -> NativePlan:
    """The plan of model runner V2, after prepare_attn."""
    batch, (tables, slots) = call.args[0], call.result
    return PlanV2(
        call, list(batch.req_ids), int(batch.num_tokens), batch.query_start_loc, batch.positions, batch.seq_lens,
        slots[0], tables[0],
    )  # fmt: skip


def plan_v1(call: Call) -> NativePlan:
    """The plan of model runner V1, before _build_attention_metadata."""
    runner, count, tokens = call.this, int(call.kwargs["num_reqs"]), int(call.kwargs["num_tokens"])
    return PlanV1(
        call, list(runner.input_batch.req_ids[:count]), tokens, runner.query_start_loc.gpu[: count + 1],
        runner.positions[:tokens], runner.seq_lens[:count], call.kwargs["slot_mappings"][0],
        runner.input_batch.block_table[0].get_device_tensor(count),
    )  # fmt: skip
