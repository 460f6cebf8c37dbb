"""The difference of two layouts: empty for one and the same, and every single change is named."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_layouts import layouts

from kvproof.layout import Axis, Field, Group, Layout, Resource, Storage
from kvproof.layout.diff import diff
from kvproof.layout.kinds import described, kinds, order, ranges


def dense(layers: int = 36, tokens: int = 16, heads: int = 8, cell: int = 512, blocks: int = 150, name: str = "LBNHC"):
    """All layers in one storage; inside a page rows outside heads (NHC) or heads outside rows (HNC)."""
    page = heads * tokens * cell
    row, head = (heads * cell, cell) if name.endswith("NHC") else (cell, tokens * cell)
    names = tuple(f"model.layers.{i}.attn" for i in range(layers))
    fields = (Field("K", 0, cell // 2), Field("V", cell // 2, cell))
    resources = tuple(
        Resource(i, 0, layer, "bfloat16", 0, i * blocks * page, page, page, (Axis(tokens, row),),
                 (Axis(heads, head), Axis(cell, 1)), 1, fields)
        for i, layer in enumerate(names)
    )  # fmt: skip
    group = Group(0, "full_attention", tokens, names, "all", spec="FullAttentionSpec")
    return Layout(name, blocks, (Storage(0, layers * blocks * page),), (group,), resources)


def two_groups(split: bool) -> Layout:
    """Even layers with a window, odd ones without, in two groups or in one."""
    layout = dense(4)
    names = layout.groups[0].layers
    if not split:
        return layout
    groups = (
        Group(0, "sliding_window", 16, names[::2], "window", 128, "SlidingWindowSpec"),
        replace(layout.groups[0], id=1, layers=names[1::2]),
    )
    return replace(layout, groups=groups, resources=tuple(replace(r, group=r.id % 2) for r in layout.resources))


def words(a: Layout, b: Layout) -> dict[str, str]:
    return {change.aspect: change.words for change in diff(a, b).changes}


@settings(max_examples=40)
@given(layouts())
def test_a_layout_does_not_differ_from_itself(layout):
    found = diff(layout, Layout.from_json(json.loads(json.dumps(layout.to_json()))))
    assert found.same
    assert all(fact.same for fact in found.facts)


@settings(max_examples=40)
@given(layouts(), layouts())
def test_two_layouts_without_a_change_are_equal(a, b):
    assert diff(a, b).same == (a == b)
    assert len(diff(a, b).changes) == len(set(diff(a, b).changes))


RESOURCE_CHANGES = {
    "element type": lambda r: {"dtype": r.dtype + "x"},
    "place": lambda r: {"offset": r.offset + 1},
    "block stride": lambda r: {"block_stride": r.block_stride + 1},
    "padding": lambda r: {"page_bytes": r.page_bytes + 1},
    "page": lambda r: {"page_bytes": r.page_bytes + 1},
    "tokens per row": lambda r: {"tokens_per_row": r.tokens_per_row + 3},
    "fields": lambda r: {"fields": (*r.fields, Field("extra", 0, 1))},
    "shape": lambda r: {"row_axes": (*r.row_axes[:-1], replace(r.row_axes[-1], count=r.row_axes[-1].count + 1))},
    "strides": lambda r: {"row_axes": (*r.row_axes[:-1], replace(r.row_axes[-1], stride=r.row_axes[-1].stride + 1))},
}
GROUP_CHANGES = {
    "block size": lambda g: {"block_size": g.block_size + 1},
    "window": lambda g: {"window": g.window + 1},
    "restore": lambda g: {"rule": g.rule + "x"},
    "kind": lambda g: {"kind": g.kind + "x"},
    "spec": lambda g: {"spec": g.spec + "x"},
}
LAYOUT_CHANGES = {
    "layout name": lambda x: {"kv_layout": x.kv_layout[::-1]},
    "blocks": lambda x: {"num_blocks": x.num_blocks + 1},
    "storages": lambda x: {"storages": (*x.storages, Storage(99, 1))},
    "resources": lambda x: {"resources": x.resources[:-1]},
    "other": lambda x: {"resources": tuple(replace(r, id=r.id + 1) for r in x.resources)},
}


@settings(max_examples=10)
@pytest.mark.parametrize("aspect", RESOURCE_CHANGES)
@given(layout=layouts(), at=st.integers(0, 100))
def test_a_changed_resource_is_named(aspect, layout, at):
    index = at % len(layout.resources)
    r = layout.resources[index]
    changed = replace(r, **RESOURCE_CHANGES[aspect](r))
    other = replace(layout, resources=(*layout.resources[:index], changed, *layout.resources[index + 1 :]))
    found = diff(layout, other)
    assert r.layer in [change.where for change in found.changes if change.aspect == aspect]
    assert all(change.where == r.layer for change in found.changes)


@settings(max_examples=10)
@pytest.mark.parametrize("aspect", GROUP_CHANGES)
@given(layout=layouts(), at=st.integers(0, 100))
def test_a_changed_group_is_named_with_its_layers(aspect, layout, at):
    index = at % len(layout.groups)
    g = layout.groups[index]
    changed = replace(g, **GROUP_CHANGES[aspect](g))
    other = replace(layout, groups=(*layout.groups[:index], changed, *layout.groups[index + 1 :]))
    (change,) = diff(layout, other).changes
    assert (change.aspect, change.where) == (aspect, described(g.layers))


@settings(max_examples=10)
@pytest.mark.parametrize("aspect", LAYOUT_CHANGES)
@given(layout=layouts())
def test_a_changed_layout_is_named(aspect, layout):
    (change,) = diff(layout, replace(layout, **LAYOUT_CHANGES[aspect](layout))).changes
    assert change.aspect == aspect


def test_one_swapped_letter_is_said_in_words_and_seen_in_the_strides():
    a, b = dense(), dense(name="LBHNC")
    found = words(a, b)
    assert found["layout name"] == "axes H and N swapped: LBHNC instead of LBNHC"
    assert found["strides"].startswith("axes H and N swapped: HNC instead of NHC; strides N 4,096 H 512 C 1 → N 512")
    assert found.keys() == {"layout name", "strides"}
    (fact,) = [fact for fact in diff(a, b).facts if fact.name == "axes by stride"]
    assert (fact.a, fact.b) == ("LBNHC", "LBHNC")


def test_a_name_that_lies_about_the_strides_is_seen():
    found = diff(dense(), replace(dense(name="LBHNC"), kv_layout="LBNHC"))
    assert [change.aspect for change in found.changes] == ["strides"]


def test_a_larger_block():
    found = words(dense(tokens=16, blocks=150), dense(tokens=32, blocks=75))
    assert found["block size"] == "block 16 → 32 tokens"
    assert found["blocks"] == "150 → 75 blocks; offsets and storage sizes follow"
    assert found["page"] == "page 65,536 → 131,072 bytes"
    assert "storages" not in found


def test_storage_sizes_that_follow_the_number_of_blocks_say_so():
    assert words(dense(blocks=150), dense(blocks=300))["storages"].endswith("follows from the number of blocks")


def test_a_connector_that_collapses_groups():
    found = diff(two_groups(split=True), two_groups(split=False)).changes
    assert found[0].words == "2 groups → 1"
    merged = [change for change in found if change.aspect == "group layers"]
    assert [(c.where, c.a, c.b) for c in merged] == [
        ("2 × model.layers.*.attn (0, 2)", "0", "0"),
        ("2 × model.layers.*.attn (1, 3)", "1", "0"),
    ]
    assert {"window 128 → 0 tokens", "restore window → all"} <= {change.words for change in found}


def test_layers_of_one_side_only():
    found = diff(dense(36), dense(40))
    (change,) = [change for change in found.changes if change.aspect == "resources"]
    assert (change.where, change.words) == ("4 × model.layers.*.attn (36 … 39)", "only in B: 4 resources (K and V)")


def apart(layers: int = 4, blocks: int = 26) -> Layout:
    """As vllm-ascend lays a cache out: K and V tensors of their own, every layer in a storage of its own."""
    whole = dense(layers, blocks=blocks, name="BNHC")
    half = whole.resources[0].page_bytes // 2
    resources = tuple(
        Resource(2 * r.id + v, 0, r.layer, r.dtype, r.id, v * half * blocks, half, half, (Axis(16, 8 * 256),),
                 (Axis(8, 256), Axis(256, 1)), 1, (Field("KV"[v], 0, 256),))
        for r in whole.resources for v in (0, 1)
    )  # fmt: skip
    return replace(whole, storages=tuple(Storage(i, 2 * half * blocks) for i in range(layers)), resources=resources)


@pytest.mark.parametrize(
    ("turned", "axes", "resources"),
    [
        (
            False,
            "LBNHC → BNHC from the outermost to the innermost; every layer has a storage of its own",
            "V apart from K in B (4 resources), in one page in A",
        ),
        (
            True,
            "BNHC → LBNHC from the outermost to the innermost; the layers share a storage",
            "V apart from K in A (4 resources), in one page in B",
        ),
    ],
)
def test_layers_in_storages_of_their_own_and_fields_in_tensors_of_their_own(turned, axes, resources):
    sides = dense(4), apart()
    changes = {change.aspect: change for change in diff(*(sides[::-1] if turned else sides)).changes}
    assert changes["axes by stride"].words == axes
    assert changes["resources"].words == resources
    everywhere = "4 × model.layers.*.attn (0 … 3)"
    assert changes["resources"].where == everywhere
    assert changes["axes by stride"].where == everywhere


def test_axes_that_only_moved_inside_the_page_are_told_by_the_strides():
    assert "axes by stride" not in words(dense(), dense(name="LBHNC"))
    assert "axes by stride" not in words(dense(4, heads=8), dense(4, heads=1))
    assert "axes by stride" not in words(dense(4), dense(6))


def test_groups_that_only_changed_their_numbers():
    a = two_groups(split=True)
    swapped = {0: 1, 1: 0}
    b = replace(
        a,
        groups=tuple(replace(g, id=swapped[g.id]) for g in reversed(a.groups)),
        resources=tuple(replace(r, group=swapped[r.group]) for r in a.resources),
    )
    assert [change.aspect for change in diff(a, b).changes] == ["group number", "group number"]


def test_json_says_the_same():
    data = diff(dense(), dense(name="LBHNC")).to_json()
    assert json.loads(json.dumps(data)) == data
    assert data["same"] is False
    assert data["changes"][0].keys() == {"aspect", "where", "a", "b", "words"}
    assert data["facts"][0] == {"name": "layout name", "a": "LBNHC", "b": "LBHNC", "same": False}


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        (range(36), "0 … 35"),
        (range(3, 48, 4), "3, 7 … 47"),
        ([5, 0, 1], "0, 1, 5"),
        ([4], "4"),
        ([i for i in range(47) if i % 4 != 3], "36 of 0 … 46"),
    ],
)
def test_numbers_in_words(numbers, said):
    assert ranges(numbers) == said


def test_layers_in_words():
    assert described(["a.0.b"]) == "a.0.b"
    assert described(["a.0.b", "a.0.c", "a.1.b"]) == "2 × a.*.b (0, 1), a.0.c"
    assert described(["a.0.1", "a.1.1"]) == "2 × a.*.*"


def test_order_is_read_off_the_strides():
    (kind,) = kinds(dense(2))
    assert order(kind) == "LBNHC"
    (latent,) = kinds(dense(2, heads=1))
    assert order(latent) == "LBNC"
    (alone,) = kinds(dense(1))
    assert order(alone) == "BNHC"
