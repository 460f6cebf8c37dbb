"""Content mode: a stamp for every written slot, and checksums of sampled blocks between a write and the next read.

Plans can agree and still name a block whose bytes are another prefix's, and bytes can change with nobody writing. The
stamp of a slot is its chain: a rolling hash over the request's tokens up to there, so that equal prefixes (a legal
prefix-cache hit) have equal stamps and everything else differs.
"""

from __future__ import annotations

import random
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvproof.trace.copies import Copies, on_host
from kvproof.trace.records import Content, Ints, Plan

if TYPE_CHECKING:
    from kvproof.trace.worker_side import WorkerGuard

Chain = NDArray[np.uint64]

_BASE = np.uint64(0x9E3779B97F4A7C15)


def powers(count: int, start: int = 0) -> Chain:
    """Odd multipliers for the positions [start, start + count), a function of the position alone."""
    position = np.arange(start, start + count, dtype=np.uint64)
    with np.errstate(over="ignore"):
        mixed = (position + np.uint64(1)) * _BASE
        mixed ^= mixed >> np.uint64(29)
        return mixed * np.uint64(0xBF58476D1CE4E5B9) | np.uint64(1)


def chain(tokens: Ints, start: int = 0, before: int = 0) -> Chain:
    """Chain value at each position of ``tokens``, which begin at ``start`` after the value ``before``; never 0."""
    with np.errstate(over="ignore"):
        terms = (tokens.astype(np.int64).astype(np.uint64) + np.uint64(0x1D8E4E27C47D124F)) * powers(len(tokens), start)
        values = np.cumsum(terms, dtype=np.uint64) + np.uint64(before)
    return np.where(values == 0, np.uint64(1), values)


class ContentBook:
    """Stamps and checksums of one worker. Its cost is a loop over the step's requests; it is off by default."""

    def __init__(self, guard: WorkerGuard):
        self.guard = guard
        self.groups = [group for group in guard.groups if group.slotted and guard.parallel.dcp_size == 1]
        self.stamps = {g.index: np.zeros(g.num_blocks * g.block_size, np.uint64) for g in self.groups}
        self.writers: dict[int, dict[int, str]] = {g.index: {} for g in self.groups}
        self.chains: dict[str, Chain] = {}
        self.sums: dict[tuple[int, int, str], Any] = {}
        self._blocks_seen: dict[int, Ints] = {}
        # Which blocks are sampled must not depend on what else runs, and repeat from run to run.
        self._random = random.Random(0)
        self._layers = {g.index: self._readable(g.layers, g.num_blocks) for g in self.groups}

    def declare(self, output: Any, fresh: Any) -> None:
        """Take new prompts and newly allocated blocks: ``fresh`` is the scheduler's guard's [(group, [block ids])]."""
        for name in output.finished_req_ids or ():
            self.chains.pop(name, None)
        for new in output.scheduled_new_reqs:
            tokens = getattr(new, "prefill_token_ids", None) or new.prompt_token_ids
            if tokens is not None:
                self.chains[new.req_id] = chain(np.asarray(tokens, np.int64))
        for group, blocks in fresh or ():
            if group in self.stamps:
                self._forget(group, np.asarray(blocks, np.int64))
        for copy in output.kv_cache_block_copies or ():
            self._copy(getattr(copy, "src_block_id", 0), getattr(copy, "dst_block_id", 0))

    def _forget(self, group: int, blocks: Ints) -> None:
        size = self._size(group)
        blocks = blocks[(blocks > 0) & (blocks < len(self.stamps[group]) // size)]
        self.stamps[group].reshape(-1, size)[blocks] = 0
        for block in blocks.tolist():
            self._drop_sums(group, block)
            self.writers[group].pop(block, None)

    def _copy(self, source: int, target: int) -> None:
        for group in self.groups:
            if 0 < source < group.num_blocks and 0 < target < group.num_blocks:
                stamps = self.stamps[group.index].reshape(-1, group.block_size)
                stamps[target] = stamps[source]
                self._drop_sums(group.index, target)

    def _drop_sums(self, group: int, block: int) -> None:
        for layer, *_ in self._layers[group]:
            self.sums.pop((group, block, layer), None)

    def _size(self, group: int) -> int:
        return next(g.block_size for g in self.groups if g.index == group)

    def before_forward(self, plan: Plan, input_ids: Ints | None) -> None:
        """Check what this step reads, then stamp what it writes."""
        if not plan.sound or plan.positions is None:
            return
        self._check(plan)
        if input_ids is not None and len(input_ids) >= plan.num_tokens:
            self._stamp(plan, input_ids)

    def _check(self, plan: Plan) -> None:
        who, groups, columns, blocks, expected, found = [], [], [], [], [], []
        starts = plan.query_start[: plan.count]
        first = np.asarray(plan.positions)[np.minimum(starts, max(plan.num_tokens - 1, 0))]
        self._blocks_seen = {}
        for group in self.groups:
            size = group.block_size
            seen = []
            for i, name in enumerate(plan.ids):
                read = int(first[i])
                own = self.chains.get(name)
                if own is None or read <= 0 or read > len(own):
                    continue
                low = int(group.first_live_column(np.array([read]))[0])
                column = np.arange(low, (read - 1) // size + 1)
                block = plan.shadow.lookup(group.index, np.full(len(column), plan.rows[i]), column)
                last = np.minimum((column + 1) * size, read) - 1
                inside = (block > 0) & (block < group.num_blocks)
                column, block, last = column[inside], block[inside], last[inside]
                who.append(np.full(len(column), i))
                groups.append(np.full(len(column), group.index))
                columns.append(column)
                blocks.append(block)
                expected.append(own[last])
                found.append(self.stamps[group.index][block * size + last % size])
                seen.append(block)
            self._blocks_seen[group.index] = np.unique(np.concatenate(seen)) if seen else np.empty(0, np.int64)
        if not who:
            return
        record = Content(
            ids=plan.ids,
            who=np.concatenate(who),
            group=np.concatenate(groups),
            column=np.concatenate(columns),
            block=np.concatenate(blocks),
            expected=np.concatenate(expected),
            found=np.concatenate(found),
            writers={},
        )
        for n in np.flatnonzero(record.found != record.expected).tolist():
            owner = self.writers[int(record.group[n])].get(int(record.block[n]), "")
            record.writers[int(record.found[n])] = owner
        guard = self.guard
        known = [
            key for key in self.sums if np.any(self._blocks_seen.get(key[0], np.empty(0, np.int64)) == key[1])
        ][: guard.options.content * 4]
        guard.emit("boundary", kind="content", checked=len(record.block) + len(known))
        copies = Copies(guard.views)
        for n, key in enumerate(known):
            copies.take(f"then{n}", self.sums[key])
            copies.take(f"now{n}", self._sum(*key))
        copies.launch()

        def judge(here: Copies) -> None:
            record.sum_blocks = known
            record.sums_expected = [int(here.get(f"then{n}")[0]) for n in range(len(known))]  # type: ignore[index]
            record.sums_found = [int(here.get(f"now{n}")[0]) for n in range(len(known))]  # type: ignore[index]
            if (
                ((record.expected == record.found) | (record.found == 0) | (record.expected == 0)).all()
                and record.sums_expected == record.sums_found
            ):
                guard.judge.pass_fast(record)
            else:
                guard.examine(record)

        guard.now_or_later(copies, judge)

    def _stamp(self, plan: Plan, input_ids: Ints) -> None:
        positions = np.asarray(plan.positions)
        for i, name in enumerate(plan.ids):
            a, b = int(plan.query_start[i]), int(plan.query_start[i + 1])
            if a >= b:
                continue
            start = int(positions[a])
            own = self.chains.get(name, np.empty(0, np.uint64))
            if start > len(own):
                continue  # earlier tokens were never seen
            values = chain(input_ids[a:b], start, int(own[start - 1]) if start else 0)
            if len(own) < start + len(values):
                self.chains[name] = np.concatenate([own[:start], values])
            elif not np.array_equal(own[start : start + len(values)], values):
                # Speculated tokens are replaced by the accepted ones; a prompt is declared and never replaced.
                self.chains[name] = np.concatenate([own[:start], values])
            for group in self.groups:
                slots = plan.slots[group.index]
                if slots is None:
                    continue
                mine = slots[a:b]
                inside = (mine >= group.block_size) & (mine < len(self.stamps[group.index]))
                self.stamps[group.index][mine[inside]] = values[inside]
                for block in np.unique(mine[inside] // group.block_size).tolist():
                    self.writers[group.index][block] = name
                    self._drop_sums(group.index, block)

    def after_forward(self) -> None:
        """Take checksums of a sample of the blocks that were read, which nobody may change before the next read."""
        limit = self.guard.options.content
        for group, blocks in self._blocks_seen.items():
            layers = self._layers[group]
            if not layers or not len(blocks):
                continue
            for block in self._random.sample(blocks.tolist(), min(limit, len(blocks))):
                layer = self._random.choice(layers)[0]
                self.sums[group, block, layer] = self._sum(group, block, layer)
        while len(self.sums) > 64 * limit:
            self.sums.pop(next(iter(self.sums)))

    def _readable(self, names: tuple[str, ...], num_blocks: int) -> list[tuple[str, Any, int, int]]:
        """(layer, tensor, dimension that counts blocks, its entries per manager block) of layers that have just one."""
        context = getattr(self.guard.vllm_config.compilation_config, "static_forward_context", {})
        found = []
        for name in names:
            tensor = getattr(context.get(name), "kv_cache", None)
            tensor = tensor[0] if isinstance(tensor, list | tuple) and tensor else tensor
            shape = tuple(getattr(tensor, "shape", ()))
            dims = [d for d, n in enumerate(shape) if n >= num_blocks > 1 and n % num_blocks == 0]
            if len(dims) == 1:
                found.append((name, tensor, dims[0], shape[dims[0]] // num_blocks))
        return found

    def _sum(self, group: int, block: int, layer: str) -> Any:
        """Checksum of one block's bytes as an array or device tensor of one int64."""
        import torch

        _, tensor, dim, entries = next(one for one in self._layers[group] if one[0] == layer)
        part = tensor.detach().narrow(dim, block * entries, entries).contiguous().view(torch.uint8)
        if on_host(part):
            return np.array([zlib.crc32(part.numpy().data)], np.int64)
        # A position-weighted sum, so that a permutation of the bytes shows; it stays on the device's stream.
        flat = part.reshape(-1).to(torch.int64)
        weights = torch.arange(1, len(flat) + 1, device=flat.device, dtype=torch.int64)
        return (flat * weights).sum().reshape(1)
