"""Two block ids that share a byte are a finding of the layout oracle."""

from dataclasses import replace

import pytest

from kvproof.findings.model import Status
from kvproof.layout import Axis, Field, Group, Layout, Resource, Storage
from kvproof.oracles.layout_sound import layout_sound

PAGE = Resource(0, 0, "a", "uint8", 0, 0, 64, 64, (Axis(4, 16),), (Axis(16, 1),), 1, (Field("K", 0, 16),))
LAYOUT = Layout("LBNHC", 4, (Storage(0, 256),), (Group(0, "full_attention", 4, ("a",), "all"),), (PAGE,))


def test_disjoint_blocks_pass_with_their_counts():
    result, findings = layout_sound(LAYOUT)
    assert (result.status, findings) == (Status.PASSED, [])
    assert (result.judged_bytes, result.judged_blocks, result.judged_resources) == (256, 4, 1)


@pytest.mark.parametrize("stride", [1, 32, 63])
def test_overlapping_blocks_fail(stride):
    result, (finding,) = layout_sound(replace(LAYOUT, resources=(replace(PAGE, block_stride=stride),)))
    assert result.status is Status.FAILED
    assert (finding.oracle, finding.kind) == ("layout", "blocks_overlap")
    assert f"limit block stride {stride} bytes" in finding.message
