"""Faults at the KV connector: what it reports or is given names unknown requests, wrong blocks, impossible numbers."""

from __future__ import annotations

import dataclasses
from typing import Any

from kvproof.faults.trace.model import CONTENT, OFFLOAD, Place, TraceFault
from kvproof.faults.trace.tap import Call


class _AtConnector(TraceFault):
    """Base of the faults at the connector."""

    engines = (OFFLOAD, CONTENT)
    story = "offloaded"


def report(call: Call, **fields: Any) -> None:
    """Let the guard see a worker's connector report with these fields instead of the native one."""
    from vllm.v1.outputs import KVConnectorOutput

    result = call.args[1]
    said = result.kv_connector_output or KVConnectorOutput()
    call.attr(result, "kv_connector_output", dataclasses.replace(said, **fields))


class _Report(_AtConnector):
    """Base of the faults in what the worker's connector reports; the scheduler itself gets the native report."""

    follows = ("updated",)
    _fields: dict[str, Any] | None = None
    _result: Any = None

    def fields(self, result: Any) -> dict[str, Any] | None:
        """What is reported instead, None to wait for another step."""
        raise NotImplementedError

    def place(self) -> Place:
        """Where the guard must see it, once the scheduler has taken the result in."""
        raise NotImplementedError

    def reported(self, call: Call) -> None:
        fields = self.fields(call.args[1])
        if fields is not None:
            self._fields, self._result = fields, call.args[1]
            report(call, **fields)

    def updated(self, call: Call) -> None:
        if self._fields is not None and call.args[1] is self._result:
            report(call, **self._fields)
            self.expected = self.place()


class UnknownRequestSent(_Report):
    """The worker's connector reports the end of a transfer of a request that does not exist."""

    rule = "connector_unknown_request"

    def fields(self, result: Any) -> dict[str, Any] | None:
        return {"finished_sending": {f"{self.stage.label}/ghost"}} if self.stage.running() else None

    def place(self) -> Place:
        return Place(request=f"{self.stage.label}/ghost")


class FinishedTwice(_Report):
    """The end of a load is reported a second time, a step later."""

    rule = "connector_finish_twice"
    _received: str | None = None

    def fields(self, result: Any) -> dict[str, Any] | None:
        said = result.kv_connector_output
        if self._received in self.stage.running():
            return {"finished_recving": {self._received}}
        if said is not None and said.finished_recving:
            self._received = next(iter(said.finished_recving))
        return None

    def place(self) -> Place:
        return Place(request=self._received)


class FailedLoadCounted(_Report):
    """A load is reported as failed, and its tokens stay counted as computed."""

    rule = "connector_recv_and_failed"

    def fields(self, result: Any) -> dict[str, Any] | None:
        return {"failed_recving": {self.stage.running()[0]}} if self.stage.running() else None

    def place(self) -> Place:
        name = self.stage.running()[0]
        return Place(request=name, position=self.stage.scheduler.requests[name].num_computed_tokens)


class InvalidBlockBehindCache(_Report):
    """A block that does not exist is reported as not loaded."""

    rule = "connector_invalid_block_unknown"

    def fields(self, result: Any) -> dict[str, Any] | None:
        return {"invalid_block_ids": {len(self.stage.pool.blocks) + 3}} if self.stage.running() else None

    def place(self) -> Place:
        return Place(block=len(self.stage.pool.blocks) + 3)


class _LoadTarget(_AtConnector):
    """Base of the faults that give the connector another block to load into: the first one it loads."""

    def wrong(self) -> int:
        """The block it is given instead."""
        raise NotImplementedError

    def place(self, request: str, block: int) -> Place:
        """Where the guard must see it."""
        raise NotImplementedError

    def load_targeted(self, call: Call) -> None:
        request, blocks, external = call.args[:3]
        if external:
            wrong = self.wrong()
            call.attr(blocks, "blocks", ([self.stage.pool.blocks[wrong], *blocks.blocks[0][1:]],))
            self.expected = self.place(request.request_id, wrong)


class LoadIntoFreeBlock(_LoadTarget):
    """The connector is to load into a block that does not belong to the request."""

    rule = "connector_load_block_not_bound"

    def wrong(self) -> int:
        return self.stage.free_block()

    def place(self, request: str, block: int) -> Place:
        return Place(request, 0, block)


class LoadIntoNullBlock(_LoadTarget):
    """The connector is to load into the null block."""

    rule = "connector_load_null_or_out_of_range"

    def wrong(self) -> int:
        return 0

    def place(self, request: str, block: int) -> Place:
        return Place(request, 0, block, position=0)


class MetadataLost(_AtConnector):
    """The connector's metadata does not reach the runner."""

    rule = "connector_metadata_mismatch"

    def handed_over(self, call: Call) -> None:
        if call.args[0].total_num_scheduled_tokens:
            call.attr(call.args[0], "kv_connector_metadata", None)
            self.expected = Place()


class NegativeMatch(_AtConnector):
    """The connector offers less than nothing."""

    rule = "connector_matched_tokens_invalid"

    def matched(self, call: Call) -> None:
        call.show((-1, False))
        self.expected = Place(request=call.args[0].request_id)


class MatchBehindPrompt(_AtConnector):
    """The connector offers one token more than the request has."""

    rule = "connector_matched_tokens_invalid"

    def matched(self, call: Call) -> None:
        request, local = call.args[:2]
        call.show((request.num_tokens - local + 1, False))
        self.expected = Place(request=request.request_id, position=local)


FAULTS: tuple[type[TraceFault], ...] = (
    UnknownRequestSent, FinishedTwice, FailedLoadCounted, InvalidBlockBehindCache, LoadIntoFreeBlock, LoadIntoNullBlock,
    MetadataLost, NegativeMatch, MatchBehindPrompt,
)  # fmt: skip
