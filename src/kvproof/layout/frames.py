"""Frames: the distinct byte intervals a block id owns.

Groups of a hybrid model overlay each other: pages of different groups may be the same bytes, which is sound because a
block id belongs to one group at a time. A *frame family* is one such interval for every block id::

    frame(block) = [offset + block * block_stride, offset + block * block_stride + nbytes)   bytes of one storage

Frames of different block ids must never overlap (public fault: distinct block ids that share memory).
"""

from __future__ import annotations

from dataclasses import dataclass

from kvproof.layout.model import Layout, Resource


@dataclass(frozen=True)
class FrameFamily:
    """One interval per block id, and the resources of every group whose page lies in it."""

    storage: int
    offset: int
    block_stride: int
    nbytes: int
    resources: tuple[Resource, ...]

    def of_group(self, group: int) -> tuple[Resource, ...]:
        return tuple(r for r in self.resources if r.group == group)


def frame_families(layout: Layout) -> tuple[FrameFamily, ...]:
    """Merge overlapping pages into frame families.

    ValueError when pages of one storage overlap with different block strides, or when two block ids share bytes.
    """
    families: list[FrameFamily] = []
    for r in sorted(layout.resources, key=lambda r: (r.storage, r.offset, -r.page_bytes)):
        touched = [i for i, family in enumerate(families) if _overlap(family, r, layout.num_blocks)]
        if not touched:
            families.append(FrameFamily(r.storage, r.offset, r.block_stride, r.page_bytes, (r,)))
            continue
        # Offsets are sorted: only the last family can share its own block's bytes with this page. Any earlier one is
        # touched in a later block; merged with that, the frame outgrows its stride and is refused below.
        family = families[touched[0]]
        if family.block_stride != r.block_stride:
            raise ValueError(
                f"resource {r.id} ({r.layer}) overlaps another page with block stride {r.block_stride} bytes, "
                f"limit {family.block_stride} bytes"
            )
        end = max(family.offset + family.nbytes, r.offset + r.page_bytes)
        families[touched[0]] = FrameFamily(
            family.storage, family.offset, family.block_stride, end - family.offset, (*family.resources, r)
        )
    for family in families:
        if family.nbytes > family.block_stride and layout.num_blocks > 1:
            raise ValueError(
                f"two block ids share bytes in storage {family.storage}: frame of {family.nbytes} bytes, "
                f"limit block stride {family.block_stride} bytes"
            )
    return tuple(families)


def _overlap(family: FrameFamily, r: Resource, num_blocks: int) -> bool:
    """Whether any block of ``r`` shares bytes with a block of ``family``; offsets are sorted."""
    if family.storage != r.storage:
        return False
    if num_blocks == 1:
        return r.offset < family.offset + family.nbytes
    if family.block_stride == r.block_stride:
        # Interleaved layers (block-outermost layouts) are disjoint although their spans overlap.
        block, inside = divmod(r.offset - family.offset, family.block_stride)
        reaches_next = inside + r.page_bytes > family.block_stride and block + 1 < num_blocks
        return (inside < family.nbytes and block < num_blocks) or reaches_next
    return r.offset < family.offset + (num_blocks - 1) * family.block_stride + family.nbytes
