"""Content mode: the cache holds what the reading request itself would have written there."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvproof.trace.records import Content, Ints
from kvproof.trace.rules.model import Violation, rule
from kvproof.trace.rules.writes import fit


@rule(
    Content,
    family="content",
    boundary="content",
    predicate="the last token that is read of a block carries the stamp of the reader's own chain",
    fields=("kv_caches", "InputBatch.input_ids", "scheduled_new_reqs.prompt_token_ids"),
    skips="blocks whose stamp, there or in the reader's chain, is unknown",
    meaning="A request reads KV that was computed for a different prefix.",
)
def content_stale_reference(content: Content) -> Iterator[Violation]:
    """Compare the stamps; the chain covers everything before the token, so one value speaks for the whole prefix."""
    count = min(len(content.expected), len(content.found))
    expected, found = content.expected[:count], content.found[:count]
    place: dict[str, Ints] = {name: fit(getattr(content, name), count) for name in ("who", "group", "column", "block")}
    for i in np.flatnonzero((expected != 0) & (found != 0) & (expected != found)):
        who, group, column, block = (int(place[name][i]) for name in ("who", "group", "column", "block"))
        writer = content.writers.get(int(found[i]), "")
        yield Violation(
            "content_stale_reference",
            f"stamp {int(expected[i]):016x} in column {column}",
            f"stamp {int(found[i]):016x}, " + (f"written by request {writer}" if writer else "of an unknown writer"),
            request=content.ids[who] if 0 <= who < len(content.ids) else None,
            group=group if group >= 0 else None,
            block=block if block >= 0 else None,
        )


@rule(
    Content,
    family="content",
    boundary="content",
    predicate="a full block's bytes keep their checksum until it is freed",
    fields=("kv_caches",),
    skips="blocks that were not sampled",
    meaning="Bytes of a finished block changed although no step was to write there.",
)
def content_changed(content: Content) -> Iterator[Violation]:
    """Compare the checksums of the sampled blocks."""
    sums = zip(content.sum_blocks, content.sums_expected, content.sums_found, strict=False)
    for (group, block, layer), expected, found in sums:
        if expected != found:
            yield Violation(
                "content_changed",
                f"checksum {expected:08x} in layer {layer}",
                f"checksum {found:08x}",
                group=group,
                block=block,
            )
