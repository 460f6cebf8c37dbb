"""What a connector does with torch is seen: which blocks, read or written, by whatever operator and in any thread.

The memory holds a number of its own in every cell, so a value read says where it comes from, and a write shows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import thread as pools
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvproof.engine.claims import Access, AddressMap, TorchRecorder, watch_threads
from kvproof.layout import Axis, Field, Group, Layout, Resource, Storage

BLOCKS, ROWS, CELL, ITEM = 7, 4, 6, 8
PAGE = ROWS * CELL * ITEM
FIELDS = (Field("latent", 0, CELL * ITEM),)


def resource(i: int, offset: int, block_stride: int) -> Resource:
    return Resource(
        i, 0, f"layer.{i}", "int64", 0, offset, block_stride, PAGE, (Axis(ROWS, CELL * ITEM),), (Axis(CELL * ITEM, 1),),
        1, FIELDS,
    )  # fmt: skip


@dataclass
class World:
    """Two layers in one storage; ``layers[i]`` is ``[blocks, rows, cells]`` of int64."""

    memory: torch.Tensor
    layers: list[torch.Tensor]
    map: AddressMap

    def block_of(self, element: int) -> int:
        _, block, _ = self.map.resolve(
            torch.tensor([self.memory.data_ptr() + element * ITEM]).numpy().astype("uint64"),
            torch.ones(1, dtype=torch.int64).numpy(),
        )
        return int(block[0])


def world(outermost: str) -> World:
    """``layer`` or ``block`` outermost."""
    memory = torch.arange(2 * BLOCKS * ROWS * CELL)
    offsets, stride = ((0, BLOCKS * PAGE), PAGE) if outermost == "layer" else ((0, PAGE), 2 * PAGE)
    layout = Layout(
        "LBNHC", BLOCKS, (Storage(0, memory.numel() * ITEM),),
        (Group(0, "full_attention", ROWS, ("layer.0", "layer.1"), "all"),),
        tuple(resource(i, offset, stride) for i, offset in enumerate(offsets)),
    )  # fmt: skip
    layers = [
        memory.as_strided((BLOCKS, ROWS, CELL), (stride // ITEM, CELL, 1), offset // ITEM) for offset in offsets
    ]
    return World(memory, layers, AddressMap(layout, [memory.data_ptr()]))


Tensor = torch.Tensor
READS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "clone": lambda t, i: t[i[0]].clone(),
    "to": lambda t, i: t[i[0]].to(torch.float64).long(),
    "slice": lambda t, i: t[int(i.min()) : int(i.max()) + 1].clone(),
    "index": lambda t, i: t[i],
    "negative index": lambda t, i: t[i - BLOCKS],
    "two indices": lambda t, i: t[i, i % ROWS],
    "outer indices": lambda t, i: t[i[:, None], torch.tensor([[0, 2]])],
    "index behind": lambda t, i: t[:, i % ROWS],
    "mask": lambda t, i: t[torch.zeros(BLOCKS, dtype=torch.bool).index_fill(0, i, True)],
    "index_select": lambda t, i: torch.index_select(t, 0, i),
    "index_select of rows": lambda t, i: torch.index_select(t[i[0]], 0, i % ROWS),
    "gather": lambda t, i: torch.gather(t, 0, i[:, None, None].expand(-1, ROWS, CELL)),
    "gather of rows": lambda t, i: torch.gather(t, 1, (i % ROWS)[None, :, None].expand(3, -1, CELL)),
    "take_along_dim": lambda t, i: torch.take_along_dim(t, i[:, None, None], 0),
    "cat": lambda t, i: torch.cat([t[int(n)] for n in i]),
    "stack": lambda t, i: torch.stack([t[int(n), :2] for n in i]),
    "transposed": lambda t, i: t.transpose(0, 2)[1:3, :, int(i[0])].contiguous(),
    "flat": lambda t, i: t[int(i[0])].reshape(-1)[3:17].clone(),
    "copied from": lambda t, i: torch.zeros(ROWS, CELL, dtype=torch.int64).copy_(t[i[0]]),
    "foreach": lambda t, i: torch.stack(torch._foreach_add([t[int(n)] for n in i], 0)),
}
WRITES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "assign": lambda t, i: t.__setitem__(int(i[0]), -1),
    "copy_": lambda t, i: t[i[0]].copy_(torch.full((ROWS, CELL), -1)),
    "zero_": lambda t, i: t[int(i[0]), 1:3].sub_(10**6),
    "index_put_": lambda t, i: t.index_put_((i,), torch.tensor(-1)),
    "two indices": lambda t, i: t.__setitem__((i, i % ROWS), -1),
    "mask": lambda t, i: t.__setitem__(torch.zeros(BLOCKS, dtype=torch.bool).index_fill(0, i, True), -1),
    "index_copy_": lambda t, i: t.index_copy_(0, i, torch.full((len(i), ROWS, CELL), -1)),
    "index_copy_ of rows": lambda t, i: t[int(i[0])].index_copy_(0, i[:1] % ROWS, torch.full((1, CELL), -1)),
    "index_fill_": lambda t, i: t.index_fill_(0, i, -1),
    "index_add_": lambda t, i: t.index_add_(0, i, torch.full((len(i), ROWS, CELL), -(10**6))),
    "scatter_": lambda t, i: t.scatter_(0, i[:, None, None].expand(-1, ROWS, CELL), -1),
    "masked_fill_": lambda t, i: t[int(i[0])].masked_fill_(torch.ones(ROWS, 1, dtype=torch.bool), -1),
    "foreach": lambda t, i: torch._foreach_copy_([t[int(n)] for n in i], [torch.full((ROWS, CELL), -1)] * len(i)),
    "transposed": lambda t, i: t.transpose(0, 1)[1:3, int(i[0])].fill_(-1),
    "slices": lambda t, i: t[int(i.min()) : int(i.max()) + 1, ::2, 1:3].fill_(-1),
    "out": lambda t, i: torch.add(torch.full((ROWS, CELL), -3), 1, out=t[int(i[0])]),
    "through a flat view": lambda t, i: t.as_strided((PAGE // ITEM,), (1,), t[int(i[0])].storage_offset()).fill_(-1),
}
NEITHER: dict[str, Callable[[Tensor], object]] = {
    "empty_like": lambda t: torch.empty_like(t[0]),
    "new_zeros": lambda t: t[0].new_zeros(3),
    "view": lambda t: t.view(BLOCKS, -1) if t.is_contiguous() else t[0].view(-1),
    "detach": lambda t: t.detach(),
    "transpose": lambda t: t.permute(2, 0, 1)[1:, 2],
    "unbind": lambda t: t.unbind(0),
    "shape": lambda t: (t.shape, t.stride(), t.data_ptr(), t.numel()),
}
indices = st.lists(st.integers(0, BLOCKS - 2), min_size=1, max_size=4, unique=True).map(torch.tensor)


def seen(place: World, run: Callable[[], object]) -> tuple[object, list[Access]]:
    found: list[Access] = []
    with TorchRecorder(place.map, found.append):
        answer = run()
    return answer, found


def blocks(found: list[Access], write: bool) -> set[int]:
    return {block for access in found if access.write == write for block in access.blocks}


@pytest.mark.parametrize("outermost", ["layer", "block"])
@pytest.mark.parametrize("name", READS)
@settings(max_examples=25, deadline=None)
@given(index=indices, layer=st.integers(0, 1))
def test_reads(name: str, outermost: str, index: Tensor, layer: int) -> None:
    place = world(outermost)
    answer, found = seen(place, lambda: READS[name](place.layers[layer], index))
    assert isinstance(answer, Tensor)
    assert blocks(found, write=True) == set()
    truth = {place.block_of(int(element)) for element in answer.reshape(-1)}
    # What reads from every block says nothing about those that are used, and is not reported.
    assert blocks(found, write=False) == truth or len(truth) >= BLOCKS - 1
    for access in found:
        assert access.outside == access.crossing == 0
        assert set(access.starts) == access.blocks
        assert all(place.block_of(byte // ITEM) == block for block, (_, byte) in access.starts.items())


@pytest.mark.parametrize("outermost", ["layer", "block"])
@pytest.mark.parametrize("name", WRITES)
@settings(max_examples=25, deadline=None)
@given(index=indices, layer=st.integers(0, 1))
def test_writes(name: str, outermost: str, index: Tensor, layer: int) -> None:
    place = world(outermost)
    before = place.memory.clone()
    _, found = seen(place, lambda: WRITES[name](place.layers[layer], index))
    changed = (place.memory != before).nonzero().reshape(-1)
    assert changed.numel()
    assert blocks(found, write=True) == {place.block_of(int(element)) for element in changed}
    assert sum(access.nbytes for access in found if access.write) == changed.numel() * ITEM


@pytest.mark.parametrize("name", NEITHER)
def test_what_looks_at_a_shape_is_no_access(name: str) -> None:
    place = world("layer")
    assert seen(place, lambda: NEITHER[name](place.layers[1]))[1] == []


def test_memory_of_others_is_no_access() -> None:
    place, other = world("layer"), torch.zeros(BLOCKS, ROWS, CELL, dtype=torch.int64)

    def run() -> None:
        other[2] = 5
        other.index_select(0, torch.tensor([1])).clone()

    assert seen(place, run)[1] == []


@pytest.fixture
def unwatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads run as they did before, afterwards."""
    monkeypatch.setattr(threading.Thread, "run", threading.Thread.run)
    monkeypatch.setattr(pools._WorkItem, "run", pools._WorkItem.run)


@pytest.mark.usefixtures("unwatched")
@pytest.mark.parametrize("pool_first", [True, False])
def test_threads_are_seen_once_each(pool_first: bool) -> None:
    place = world("layer")
    found: list[Access] = []
    with ThreadPoolExecutor(1) as pool:
        if pool_first:
            pool.submit(int).result()  # its thread runs before anybody watches
        watch_threads(lambda: TorchRecorder(place.map, found.append))
        pool.submit(place.layers[0][3].fill_, -1).result()
        thread = threading.Thread(target=place.layers[1][5].clone)
        thread.start()
        thread.join()
    assert [(access.write, access.blocks) for access in found] == [(True, {3}), (False, {5})]
