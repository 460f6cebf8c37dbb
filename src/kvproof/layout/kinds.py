"""Layers and resources in words: those that are alike become one entry.

``model.layers.0.attn`` to ``model.layers.35.attn`` are one *pattern*, ``model.layers.*.attn``. A *kind* is a pattern
and everything about a resource but its place.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvproof.layout.model import Layout, Resource

LISTED = 6
"""Layer numbers without a rule that are listed one by one; of more, count and range are given."""


@dataclass(frozen=True)
class Kind:
    """Resources of one layout that differ only in their layer and place."""

    pattern: str
    resources: tuple[Resource, ...]

    @property
    def first(self) -> Resource:
        """Any of them; they are alike."""
        return self.resources[0]

    @property
    def groups(self) -> tuple[int, ...]:
        """Ids of the groups they belong to, in order."""
        return tuple(sorted({r.group for r in self.resources}))

    @property
    def layers(self) -> str:
        """Their layers in words."""
        return described([r.layer for r in self.resources])


def kinds(layout: Layout) -> tuple[Kind, ...]:
    """The kinds of a layout, in the order in which their first resources appear."""
    found: dict[tuple[object, ...], list[Resource]] = {}
    for r in layout.resources:
        alike = (r.fields, r.dtype, r.row_axes, r.cell_axes, r.page_bytes, r.block_stride, r.tokens_per_row)
        found.setdefault((pattern(r.layer), *alike), []).append(r)
    return tuple(Kind(pattern(same[0].layer), tuple(same)) for same in found.values())


def pattern(layer: str) -> str:
    """A layer's name with ``*`` for each part that is a number."""
    return ".".join("*" if part.isdigit() else part for part in layer.split("."))


def described(layers: Iterable[str]) -> str:
    """Layers in words: ``36 × model.layers.*.attn (0 … 35)``, the patterns one after the other."""
    by_pattern: dict[str, list[str]] = {}
    for layer in dict.fromkeys(layers):
        by_pattern.setdefault(pattern(layer), []).append(layer)
    return ", ".join(_of_pattern(name, same) for name, same in by_pattern.items())


def _of_pattern(name: str, layers: list[str]) -> str:
    if len(layers) == 1:
        return layers[0]
    numbers = [[part for part in layer.split(".") if part.isdigit()] for layer in layers]
    if len(numbers[0]) == 1:
        return f"{len(layers)} × {name} ({ranges(int(n) for (n,) in numbers)})"
    return f"{len(layers)} × {name}"


def ranges(numbers: Iterable[int]) -> str:
    """Numbers in words: ``0 … 35``, ``3, 7 … 47``, ``0, 1, 5``, ``36 of 0 … 46``."""
    found = sorted(set(numbers))
    steps = {b - a for a, b in itertools.pairwise(found)}
    if len(found) > 2 and len(steps) == 1:
        return f"{found[0]} … {found[-1]}" if steps == {1} else f"{found[0]}, {found[1]} … {found[-1]}"
    if len(found) <= LISTED:
        return ", ".join(map(str, found))
    return f"{len(found)} of {found[0]} … {found[-1]}"


def inner_axes(r: Resource) -> tuple[tuple[str, int, int], ...]:
    """(letter, count, stride in bytes) of the axes inside a page that have more than one step, as vLLM letters them.

    ``k`` is the kernel block inside a manager block, ``N`` the row, ``H`` the head, ``C`` the content, in that order.
    """
    rows = zip(("k", "N")[-len(r.row_axes) :], r.row_axes, strict=True)
    cells = zip([*"H" * (len(r.cell_axes) - 1), "C"], r.cell_axes, strict=True)
    return tuple((letter, a.count, a.stride) for letter, a in (*rows, *cells) if a.count > 1 or letter == "C")


def order(kind: Kind) -> str:
    """Axes from the outermost to the innermost, by what the strides say and not by what the layout is called.

    ``L`` is the layer and ``B`` the block. An axis of one step has no stride and is left out.
    """
    r = kind.first
    axes = [(letter, stride) for letter, _, stride in inner_axes(r)] + [("B", r.block_stride)]
    distance = layer_distance(kind.resources)
    if distance is not None:
        axes.append(("L", distance))
    # Python's sort is stable: where two strides are equal the order of the list stands.
    return "".join(letter for letter, _ in sorted(axes, key=lambda axis: -axis[1]))


def layer_distance(resources: Sequence[Resource]) -> int | None:
    """Bytes from one layer of a group to the next; None for a single layer or layers in storages of their own."""
    same = [r for r in resources if (r.group, r.storage) == (resources[0].group, resources[0].storage)]
    offsets = sorted({r.offset for r in same})
    return min((b - a for a, b in itertools.pairwise(offsets)), default=None)
