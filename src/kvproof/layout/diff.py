"""What moved between two layouts, in words.

Layers are matched by name, the resources of a layer by their order. Two layouts without a change are equal field by
field; a difference no rule has words for is still reported, as ``other``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from kvproof.layout.kinds import Kind, described, inner_axes, kinds, layer_distance, order
from kvproof.layout.model import Group, Layout, Resource

NOTHING = "–"


@dataclass(frozen=True)
class Fact:
    """One line of the two layouts side by side; ``a`` and ``b`` in words, ``–`` where a side has nothing."""

    name: str
    a: str
    b: str

    @property
    def same(self) -> bool:
        return self.a == self.b


@dataclass(frozen=True)
class Change:
    """One thing that moved.

    ``aspect`` is its kind (``strides``, ``block size`` ...), ``where`` the layers concerned (empty: the whole layout),
    ``a`` and ``b`` both sides, ``words`` the sentence for a person.
    """

    aspect: str
    where: str
    a: str
    b: str
    words: str


@dataclass(frozen=True)
class Diff:
    """Two layouts side by side. Without a change they are the same."""

    facts: tuple[Fact, ...]
    changes: tuple[Change, ...]

    @property
    def same(self) -> bool:
        return not self.changes

    def to_json(self) -> dict[str, Any]:
        return {
            "same": self.same,
            "facts": [{**asdict(fact), "same": fact.same} for fact in self.facts],
            "changes": [asdict(change) for change in self.changes],
        }


def diff(a: Layout, b: Layout) -> Diff:
    """Everything that differs between two layouts."""
    parts = (_whole, _axes, _layers, _partition, _details, _places, _storages)
    changes = tuple(change for part in parts for change in part(a, b))
    if not changes and a != b:
        changes = (Change("other", "", "", "", "the same content is numbered or listed in another order"),)
    return Diff(tuple(_facts(a, b)), changes)


# ---------------------------------------------------------------------- side by side


def _facts(a: Layout, b: Layout) -> Iterator[Fact]:
    for name, read in _FACTS.items():
        yield Fact(name, read(a), read(b))
    groups = [{f"group {g.id}": _group(g) for g in side.groups} for side in (a, b)]
    pages = [_kinds(side) for side in (a, b)]
    for left, right in (groups, pages):
        for name in {**left, **right}:
            yield Fact(name, left.get(name, NOTHING), right.get(name, NOTHING))


def _sizes(layout: Layout) -> str:
    """``36 × 9,830,400 bytes``; the sizes in the order of first appearance."""
    sizes = Counter(s.nbytes for s in layout.storages)
    return ", ".join(f"{count} × {size:,} bytes" for size, count in sizes.items())


_FACTS: dict[str, Callable[[Layout], str]] = {
    "layout name": lambda layout: layout.kv_layout,
    "axes by stride": lambda layout: ", ".join(dict.fromkeys(order(kind) for kind in kinds(layout))),
    "blocks": lambda layout: f"{layout.num_blocks:,}",
    "bytes per block id": lambda layout: f"{layout.bytes_per_block:,}",
    "storages": _sizes,
    "groups": lambda layout: str(len(layout.groups)),
    "resources": lambda layout: str(len(layout.resources)),
}


def _group(g: Group) -> str:
    window = f", window {g.window:,} tokens" if g.window else ""
    return f"{g.kind}, {len(g.layers)} layers, {g.block_size:,} tokens per block{window}, restore {g.rule}"


def _kinds(layout: Layout) -> dict[str, str]:
    """Every kind in words, by its pattern and fields; a second one of the same name gets a number."""
    seen: Counter[str] = Counter()
    found = {}
    for kind in kinds(layout):
        name = f"{kind.pattern} {'/'.join(f.name for f in kind.first.fields)}"
        seen[name] += 1
        found[name if seen[name] == 1 else f"{name} ({seen[name]})"] = _kind(kind)
    return found


def _kind(kind: Kind) -> str:
    r = kind.first
    axes = f"{_shape(r)}; strides {_strides(r)}"
    pages = f"page {r.page_bytes:,} ({r.page_bytes - r.used_bytes:,} padding); block stride {r.block_stride:,}"
    return f"{len(kind.resources)} × {_fields(r)} {r.dtype}; {axes}; {pages}"


def _fields(r: Resource) -> str:
    return ", ".join(f"{f.name} {f.end - f.start:,}" for f in r.fields)


def _shape(r: Resource) -> str:
    return f"{r.rows:,} {'row' if r.rows == 1 else 'rows'} of {r.row_bytes:,}"


def _strides(r: Resource) -> str:
    return " ".join(f"{letter} {stride:,}" for letter, _, stride in inner_axes(r))


# ---------------------------------------------------------------------- changes


def _whole(a: Layout, b: Layout) -> Iterator[Change]:
    if a.kv_layout != b.kv_layout:
        yield Change("layout name", "", a.kv_layout, b.kv_layout, _reordered(a.kv_layout, b.kv_layout))
    if a.num_blocks != b.num_blocks:
        left, right = f"{a.num_blocks:,}", f"{b.num_blocks:,}"
        yield Change("blocks", "", left, right, f"{left} → {right} blocks; offsets and storage sizes follow")
    if len(a.groups) != len(b.groups):
        left, right = str(len(a.groups)), str(len(b.groups))
        yield Change("groups", "", left, right, f"{left} {'group' if left == '1' else 'groups'} → {right}")


def _reordered(a: str, b: str) -> str:
    """Two orders of axes in words: ``axes H and N swapped: LBHNC instead of LBNHC``."""
    if sorted(a) != sorted(b) or len(set(a)) < len(a):
        return f"{b} instead of {a}"
    moved = [x for x, y in zip(a, b, strict=True) if x != y]
    verb = "swapped" if len(moved) == 2 else "reordered"
    names = sorted(moved)
    return f"axes {', '.join(names[:-1])} and {names[-1]} {verb}: {b} instead of {a}"


def _axes(a: Layout, b: Layout) -> Iterator[Change]:
    """Layers and blocks that stand elsewhere in the order of axes; the order inside a page is told by ``strides``."""
    left, right = _orders(a), _orders(b)
    found: dict[tuple[str, str, str], list[str]] = {}
    for key, (x, before, apart_before) in left.items():
        y, after, apart_after = right.get(key, left[key])
        moved = (x.storage, x.offset, x.block_stride) != (y.storage, y.offset, y.block_stride)
        if not moved or _outer(before) == _outer(after):
            continue  # where only a neighbour moved, this one did not
        why = "; every layer has a storage of its own" if apart_after and not apart_before else ""
        why = "; the layers share a storage" if apart_before and not apart_after else why
        found.setdefault((before, after, why), []).append(x.layer)
    for (before, after, why), layers in found.items():
        words = f"{before} → {after} from the outermost to the innermost{why}"
        yield Change("axes by stride", described(layers), before, after, words)


def _orders(layout: Layout) -> dict[tuple[str, int], tuple[Resource, str, bool]]:
    """(layer, number within the layer) -> the resource, its kind's axes by stride, are its layers in storages apart."""
    axes = {}
    for kind in kinds(layout):
        apart = len({r.storage for r in kind.resources}) == len(kind.resources) > 1
        axes.update({r.id: (order(kind), apart) for r in kind.resources})
    return {key: (r, *axes[r.id]) for key, r in _matched(layout).items()}


def _outer(axes: str) -> str:
    """Layer and block among the axes of a page, which are one here: ``LBNHC`` -> ``LB.``."""
    return re.sub(r"[^LB]+", ".", axes)


def _layers(a: Layout, b: Layout) -> Iterator[Change]:
    """Resources that only one side has, by their fields: of layers it alone has, or apart in it and together there."""
    left, right = _matched(a), _matched(b)
    for side, mine, other, there in (("A", left, right, "B"), ("B", right, left, "A")):
        found: dict[tuple[tuple[str, ...], tuple[str, ...]], list[Resource]] = {}
        for key, r in mine.items():
            if key not in other:
                names = tuple(f.name for f in r.fields)
                found.setdefault((names, _beside(names, r.layer, other)), []).append(r)
        for (names, beside), alone in found.items():
            counts = (str(len(alone)), "0") if side == "A" else ("0", str(len(alone)))
            number = f"{len(alone)} {'resource' if len(alone) == 1 else 'resources'}"
            words = f"only in {side}: {number} ({_and(names)})"
            if beside:
                words = f"{_and(names)} apart from {_and(beside)} in {side} ({number}), in one page in {there}"
            yield Change("resources", described(r.layer for r in alone), *counts, words)


def _beside(names: tuple[str, ...], layer: str, other: dict[tuple[str, int], Resource]) -> tuple[str, ...]:
    """The other fields of the page in which the other side keeps these fields of a layer; empty where it has none."""
    for (its_layer, _), r in other.items():
        theirs = tuple(f.name for f in r.fields)
        if its_layer == layer and set(names) < set(theirs):
            return tuple(name for name in theirs if name not in names)
    return ()


def _and(names: tuple[str, ...]) -> str:
    """``K and V``; resources without fields are rows."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1]))) if names else "rows"


def _matched(layout: Layout) -> dict[tuple[str, int], Resource]:
    """(layer, number within the layer) -> resource."""
    seen: Counter[str] = Counter()
    found = {}
    for r in layout.resources:
        found[r.layer, seen[r.layer]] = r
        seen[r.layer] += 1
    return found


def _homes(layout: Layout) -> dict[str, Group]:
    return {layer: g for g in layout.groups for layer in g.layers}


def _partition(a: Layout, b: Layout) -> Iterator[Change]:
    """Layers that share a block table on one side and not on the other; and groups that only got another number."""
    home_a, home_b = _homes(a), _homes(b)
    both = [layer for layer in home_a if layer in home_b]
    pairs: dict[tuple[int, int], list[str]] = {}
    for layer in both:
        pairs.setdefault((home_a[layer].id, home_b[layer].id), []).append(layer)
    sources, targets = Counter(left for left, _ in pairs), Counter(right for _, right in pairs)
    for (left, right), layers in pairs.items():
        if sources[left] > 1 or targets[right] > 1:
            how = "split" if sources[left] > 1 else "merged"
            words = f"group {left} {how}: these layers are in group {right} of B"
            yield Change("group layers", described(layers), str(left), str(right), words)
        elif left != right:
            words = f"group {left} of A is group {right} of B"
            yield Change("group number", described(layers), str(left), str(right), words)


def _details(a: Layout, b: Layout) -> Iterator[Change]:
    """What differs between the two sides of one layer or one resource; layers that differ alike become one change."""
    found: dict[tuple[str, str, str, str], list[str]] = {}
    home_a, home_b = _homes(a), _homes(b)
    for layer, group in home_a.items():
        if layer in home_b:
            for difference in _group_details(group, home_b[layer]):
                found.setdefault(difference, []).append(layer)
    left, right = _matched(a), _matched(b)
    for key, r in left.items():
        if key in right:
            for difference in _resource_details(r, right[key]):
                found.setdefault(difference, []).append(r.layer)
    for (aspect, before, after, words), layers in found.items():
        yield Change(aspect, described(layers), before, after, words)


def _group_details(a: Group, b: Group) -> Iterator[tuple[str, str, str, str]]:
    """(aspect, A, B, words) of the groups one layer belongs to."""
    if a.block_size != b.block_size:
        before, after = f"{a.block_size:,}", f"{b.block_size:,}"
        yield "block size", before, after, f"block {before} → {after} tokens"
    if a.window != b.window:
        before, after = f"{a.window:,}", f"{b.window:,}"
        yield "window", before, after, f"window {before} → {after} tokens"
    for aspect, before, after in (("kind", a.kind, b.kind), ("restore", a.rule, b.rule), ("spec", a.spec, b.spec)):
        if before != after:
            yield aspect, before, after, f"{aspect} {before} → {after}"


def _resource_details(a: Resource, b: Resource) -> Iterator[tuple[str, str, str, str]]:
    """(aspect, A, B, words) of the two sides of one resource, its place aside."""
    padding_a, padding_b = a.page_bytes - a.used_bytes, b.page_bytes - b.used_bytes
    texts = (
        ("fields", _field_places(a), _field_places(b), ""),
        ("element type", a.dtype, b.dtype, ""),
        ("tokens per row", str(a.tokens_per_row), str(b.tokens_per_row), ""),
        ("shape", _full_shape(a), _full_shape(b), ""),
        ("page", f"{a.page_bytes:,}", f"{b.page_bytes:,}", " bytes"),
        ("padding", f"{padding_a:,}", f"{padding_b:,}", " bytes"),
        ("block stride", f"{a.block_stride:,}", f"{b.block_stride:,}", " bytes"),
    )
    for aspect, before, after, unit in texts:
        if before != after:
            yield aspect, before, after, f"{aspect} {before} → {after}{unit}"
    if _all_strides(a) != _all_strides(b):
        before, after = _inner_order(a), _inner_order(b)
        how = _reordered(before, after) if before != after else "another distance"
        yield "strides", _all_strides(a), _all_strides(b), f"{how}; strides {_strides(a)} → {_strides(b)} bytes"


def _field_places(r: Resource) -> str:
    return ", ".join(f"{f.name} [{f.start:,}, {f.end:,})" for f in r.fields)


def _full_shape(r: Resource) -> str:
    axes = " × ".join(f"{a.count:,}" for a in r.row_axes)
    return f"{_shape(r)} bytes ({axes} rows, {' × '.join(f'{a.count:,}' for a in r.cell_axes)} bytes)"


def _all_strides(r: Resource) -> str:
    return " ".join(f"{a.stride:,}" for a in (*r.row_axes, *r.cell_axes))


def _inner_order(r: Resource) -> str:
    """Axes inside a page from the outermost to the innermost."""
    return "".join(letter for letter, _, _ in sorted(inner_axes(r), key=lambda axis: -axis[2]))


def _places(a: Layout, b: Layout) -> Iterator[Change]:
    """Where pages begin; one change per pattern of layers."""
    left, right = _matched(a), _matched(b)
    by_pattern: dict[str, list[tuple[Resource, Resource]]] = {}
    for kind in kinds(a):
        pairs = [(r, right[key]) for key, r in left.items() if r in kind.resources and key in right]
        by_pattern.setdefault(kind.pattern, []).extend(pairs)
    for pairs in by_pattern.values():
        moved = [(x, y) for x, y in pairs if (x.storage, x.offset) != (y.storage, y.offset)]
        if not moved:
            continue
        mine, other = [x for x, _ in pairs], [y for _, y in pairs]
        before, after = _place(mine), _place(other)
        if before == after:
            x, y = moved[0]
            before, after = (f"{x.layer} at storage {r.storage} byte {r.offset:,}" for r in (x, y))
        yield Change("place", described(x.layer for x, _ in moved), before, after, f"{before} → {after}")


def _place(resources: list[Resource]) -> str:
    """The places of several layers in words."""
    storages = {r.storage for r in resources}
    distance = layer_distance(resources)
    begin = min(r.offset for r in resources)
    where = f"storage {min(storages)}" if len(storages) == 1 else f"{len(storages)} storages"
    apart = f", layers {distance:,} apart" if distance is not None else ""
    return f"{where} from byte {begin:,}{apart}"


def _storages(a: Layout, b: Layout) -> Iterator[Change]:
    if a.storages == b.storages:
        return
    before, after = _sizes(a), _sizes(b)
    follows = len(a.storages) == len(b.storages) and all(
        x.nbytes * b.num_blocks == y.nbytes * a.num_blocks for x, y in zip(a.storages, b.storages, strict=True)
    )
    why = "; follows from the number of blocks" if follows and a.num_blocks != b.num_blocks else ""
    yield Change("storages", "", before, after, f"{before} → {after}{why}")
