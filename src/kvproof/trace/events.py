"""Every event of the log with its fields, types and units; the dictionary, the reader and the tests follow it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Field:
    """One JSON field. ``unit`` is "" for names and texts. ``optional`` fields may be absent."""

    name: str
    type: str
    unit: str
    meaning: str
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Event:
    """One kind of line in the log."""

    name: str
    meaning: str
    fields: tuple[Field, ...]


COMMON = (
    Field("event", "string", "", "name of the event"),
    Field("time", "number", "seconds since the Unix epoch", "when the guard saw it"),
    Field("role", "string", "", "scheduler | worker"),
    Field("pid", "integer", "", "process that wrote the line"),
    Field("rank", "integer", "", "global rank of the worker; 0 for the scheduler"),
    Field("engine", "string", "", "8 hex digits, one per scheduler; the same in all its workers' lines"),
    Field("step", "integer | null", "steps", "scheduler's sequence number, counted from 1; null outside a step"),
    Field("trace", "string | null", "", "<engine>-<step>: correlates the processes' lines of one step"),
)
"""Fields of every event."""

_REQUESTS = Field("requests", "[string]", "", "request ids in the order of the arrays beside it")
_ENCODED_BLOCKS = "[[request index, group, first column, [block ids]]]"

EVENTS: dict[str, Event] = {
    event.name: event
    for event in (
        Event(
            "kv.enabled",
            "The guard is in place in this process. First line of every file; after rotation it carries the counters.",
            (
                Field("kvproof", "string", "", "version of kvproof"),
                Field("vllm", "string", "", "version of vLLM"),
                Field("runner", "string | null", "", "class of the model runner; null for the scheduler"),
                Field("scheduler", "string | null", "", "class of the scheduler; null for a worker"),
                Field("action", "string", "", "log | raise"),
                Field("options", "object", "", "all options in force, defaults included"),
                Field("rules", "[string]", "", "rules that are judged in this process"),
                Field("skipped", "object", "", "rule -> why it can never be judged in this process"),
                Field(
                    "groups",
                    "[object]",
                    "",
                    "KV-cache groups: index, kind, block_size (tokens), num_blocks (blocks), window (tokens | null), "
                    "layers (count)",
                ),
                Field("parallel", "object", "", "dcp_size, dcp_rank, pcp_size, pcp_rank (ranks), interleave (tokens)"),
                Field("connector", "string | null", "", "class of the KV connector"),
                Field("async_scheduling", "boolean", "", "whether steps are scheduled before the last result"),
                Field(
                    "counters",
                    "object",
                    "",
                    "counts so far: judged and fast (records by type), skipped, failed and violations (by rule), "
                    "dropped (events), guard_failures (by place)",
                ),
            ),
        ),
        Event(
            "kv.bind",
            "Scheduler.schedule has returned: what the scheduler declares for one step.",
            (
                _REQUESTS,
                Field("tokens", "[integer]", "tokens", "scheduled per request, drafts included"),
                Field("start", "[integer]", "tokens", "declared computed tokens per request"),
                Field("drafts", "[integer]", "tokens", "draft tokens per request", optional=True),
                Field("total", "integer", "tokens", "declared sum"),
                Field("budget", "integer | null", "tokens", "largest sum the scheduler may declare"),
                Field("new", "[string]", "", "requests declared as new"),
                Field("resumed", "[string]", "", "requests whose block ids replace their row"),
                Field("finished", "[string]", "", "requests finished since the last step"),
                Field("preempted", "[string]", "", "requests preempted since the last step"),
                Field("blocks", _ENCODED_BLOCKS, "manager blocks", "block ids declared in this step"),
                Field("zero", "[integer]", "manager blocks", "blocks to be zeroed", optional=True),
                Field("copies", "[[from, to]]", "manager blocks", "copy-on-write copies", optional=True),
                Field("digest", "integer", "", "CRC-32 of token counts and block deltas, checked in the worker"),
                Field("prompt_token_ids", "object", "token ids", "new prompts; only with redact: none", optional=True),
            ),
        ),
        Event(
            "kv.write",
            "The worker's plan of this step's writes, before the forward pass (on a device: judged at the result).",
            (
                _REQUESTS,
                Field("tokens", "[integer]", "tokens", "planned per request, in batch order"),
                Field("positions", "[integer]", "tokens", "first position per request"),
                Field("num_tokens", "integer", "tokens", "planned tokens without padding"),
                Field("padded", "integer", "tokens", "planned tokens with padding"),
                Field(
                    "groups",
                    "[object]",
                    "",
                    "per group with token slots: group, runs = [[request index, first slot, length in slots]]; "
                    "slot −1 = writes nothing",
                ),
            ),
        ),
        Event(
            "kv.read",
            "The worker's plan of what attention reads in this step.",
            (
                _REQUESTS,
                Field("seq_lens", "[integer]", "tokens", "context per request, this step's tokens included"),
                Field(
                    "groups",
                    "[object]",
                    "",
                    "per group: group, blocks = [[request index, first column, [block ids]]] of rows that grew, "
                    "or whole rows on a full check",
                ),
                Field("whole", "boolean", "", "whether whole rows were compared and are listed"),
            ),
        ),
        Event(
            "boundary",
            "Something crossed between scheduler, connector, runner and pool.",
            (
                Field(
                    "kind",
                    "string",
                    "",
                    "match | load_target | metadata | transfers | finished | dummy | speculation | result | reset | "
                    "content | counters | log",
                ),
                Field("request", "string", "", "the one request it is about", optional=True),
                Field("requests", "[string]", "", "the requests it is about", optional=True),
                Field("matched", "integer | null", "tokens", "match: external tokens", optional=True),
                Field("is_async", "boolean", "", "match, load_target: loads beside the forward pass", optional=True),
                Field("local", "integer", "tokens", "match, load_target: local prefix hit", optional=True),
                Field("total", "integer", "tokens", "match: length of the request", optional=True),
                Field("external", "integer", "tokens", "load_target: tokens to be loaded", optional=True),
                Field("blocks", "[[integer]]", "manager blocks", "load_target: per group", optional=True),
                Field("sent", "string | null", "", "metadata: class that left the scheduler", optional=True),
                Field("received", "string | null", "", "metadata: class that reached the worker", optional=True),
                Field("finished_sending", "[string]", "", "transfers", optional=True),
                Field("finished_recving", "[string]", "", "transfers", optional=True),
                Field("failed_recving", "[string]", "", "transfers", optional=True),
                Field("invalid_blocks", "[integer]", "manager blocks", "transfers", optional=True),
                Field("delayed", "boolean", "", "finished: the connector keeps the blocks for now", optional=True),
                Field("tokens", "integer", "tokens", "dummy: tokens of the run", optional=True),
                Field("sampled", "[integer]", "tokens", "speculation, result: generated per request", optional=True),
                Field("rejected", "[integer]", "tokens", "speculation: rejected per request", optional=True),
                Field("token_ids", "[[integer]]", "token ids", "result; only with redact: none", optional=True),
                Field("checked", "integer", "manager blocks", "content: stamps and sums checked", optional=True),
                Field("counters", "object", "", "counters: see kv.enabled", optional=True),
                Field("dropped", "integer", "events", "log: lost so far in this process", optional=True),
            ),
        ),
        Event(
            "kv.alloc",
            "The block pool handed out blocks, or a cached block got one more user.",
            (
                Field("request", "string | null", "", "request being allocated for, when known"),
                Field("action", "string", "", "alloc | touch"),
                Field("blocks", "[integer]", "manager blocks", "the blocks"),
                Field("free", "integer", "manager blocks", "blocks left in the pool"),
            ),
        ),
        Event(
            "kv.release",
            "References to blocks were given back.",
            (
                Field("request", "string | null", "", "request being freed, when known"),
                Field("blocks", "[integer]", "manager blocks", "the blocks"),
                Field("freed", "[integer]", "manager blocks", "those of them nobody refers to any more"),
                Field("free", "integer", "manager blocks", "blocks left in the pool"),
            ),
        ),
        Event(
            "kv.violation",
            "A rule does not hold.",
            (
                Field("rule", "string", "", "name of the rule"),
                Field("family", "string", "", "family of the rule"),
                Field("boundary", "string", "", "where it was judged"),
                Field("message", "string", "", "rule, place, expected and found in one line"),
                Field("request", "string | null", "", "whose"),
                Field("group", "integer | null", "", "KV-cache group"),
                Field("block", "integer | null", "manager blocks", "block id"),
                Field("slot", "integer | null", "slots", "slot id"),
                Field("position", "integer | null", "tokens", "position in the request"),
                Field("expected", "string", "", "what holds when all is well"),
                Field("found", "string", "", "what stands there"),
                Field("action", "string", "", "log | raise: what the guard does about it"),
            ),
        ),
        Event(
            "kv.error",
            "A native exception passed a boundary (it propagates unchanged), or the guard failed and stood aside.",
            (
                Field("where", "string", "", "the call that raised"),
                Field("type", "string", "", "class of the exception"),
                Field("message", "string", "", "its text"),
                Field("guard", "boolean", "", "true when the guard's own code failed"),
                Field("traceback", "[string]", "", "innermost frames, file:line function"),
            ),
        ),
    )
}
"""Every event by name."""
