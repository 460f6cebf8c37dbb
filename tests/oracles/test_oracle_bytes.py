"""equality, placement, provenance, footprint, source footprint, inventory: both answers of each."""

from __future__ import annotations

from dataclasses import replace

import pytest
from transcripts import (
    DIGEST,
    FOREIGN,
    LAYOUT,
    LOOSE,
    POISON,
    UNCOMPUTED,
    ZERO,
    clean,
    observed,
    with_observations,
)  # fmt: skip

from kvproof.bytecode import Decoded
from kvproof.bytecode.ledger import Judged
from kvproof.findings.model import Location, Origin, Status
from kvproof.findings.summary import describe
from kvproof.oracles.equality import equality
from kvproof.oracles.footprint import footprint
from kvproof.oracles.inventory import inventory
from kvproof.oracles.placement import placement
from kvproof.oracles.provenance import provenance
from kvproof.oracles.source_footprint import source_footprint
from kvproof.oracles.transcript import (
    CACHED,
    COMPUTED,
    FOREIGN_BLOCK,
    FREE,
    LOADED,
    NULL,
    OPTIONAL,
    PADDING,
    Transcript,
)  # fmt: skip

HERE = Location(0, "layers.0.attn", "V", 2, 88, row=1, request="b#2")
WHOSE = Origin("layers.0.attn", "V", "a#1", 9, 1, 88)
"""Content 9 is token 9 of request a#1: row 1 of its block 1; row byte 24 is head 1, V."""


def only(found):
    _, (finding,) = found
    return finding


# ---------------------------------------------------------------------- equality


def test_equality_counts_blocks_and_bytes():
    transcript = clean()
    transcript.digests += [replace(DIGEST, block=3), replace(DIGEST, layer="layers.1.mamba")]
    result, findings = equality(LAYOUT, transcript)
    assert findings == []
    assert (result.judged_bytes, result.judged_blocks, result.judged_resources, result.judged_items) == (384, 2, 2, 3)


def test_equality_names_an_unequal_digest():
    transcript = clean()
    transcript.digests.append(replace(DIGEST, block=3, equal=False))
    result, _ = equality(LAYOUT, transcript)
    finding = only(equality(LAYOUT, transcript))
    assert (result.status, finding.kind, finding.bytes_affected) == (Status.FAILED, "restored_differs", 128)
    assert finding.location == Location(0, "layers.0.attn", "page", 3, 0, request="b#2")
    assert "group 0 layers.0.attn page block 3" in describe(finding)


def test_equality_takes_a_block_the_code_found_wrong_for_unequal():
    finding = only(equality(LAYOUT, with_observations(observed("read", LOADED))))
    assert (finding.kind, finding.location, finding.bytes_affected) == ("restored_differs", HERE, 8)


def test_equality_has_no_opinion_on_other_moments_and_regions():
    elsewhere = [observed("at_rest", LOADED), observed("read", OPTIONAL), observed("read", CACHED)]
    assert equality(LAYOUT, with_observations(*elsewhere))[1] == []


def test_equality_without_digests_is_vacuous():
    transcript = clean()
    transcript.digests.clear()
    assert equality(LAYOUT, transcript)[0].status is Status.VACUOUS


# ---------------------------------------------------------------------- placement


@pytest.mark.parametrize("region", [LOADED, OPTIONAL])
@pytest.mark.parametrize(("mismatch", "kind"), [(FOREIGN, "foreign"), (POISON, "still_poison"), (ZERO, "zero")])
def test_placement_tells_foreign_poison_and_zero(region, mismatch, kind):
    result, (finding,) = placement(LAYOUT, with_observations(observed("read", region, mismatch)))
    assert (result.status, finding.kind, finding.location, finding.bytes_affected) == (Status.FAILED, kind, HERE, 8)
    assert describe(finding).startswith("group 0 layers.0.attn V block 2 byte 88: 8 bytes")


def test_placement_splits_a_page_of_two_states():
    mixed = replace(FOREIGN, counts={"poison_target": 3, "foreign": 4, "zero": 1, "poison_uncomputed": 7})
    _, findings = placement(LAYOUT, with_observations(observed("read", LOADED, mixed)))
    assert [(f.kind, f.bytes_affected) for f in findings] == [("still_poison", 3), ("foreign", 5)]


def test_placement_names_the_owner_of_a_foreign_byte():
    finding = only(placement(LAYOUT, with_observations(observed("read", LOADED))))
    assert finding.origin == WHOSE
    assert describe(finding).endswith("It holds layers.0.attn V block 1 byte 88 (token 9 of a#1).")


def test_placement_leaves_uncomputed_bytes_to_the_source_footprint():
    transcript = with_observations(observed("read", LOADED, UNCOMPUTED))
    assert placement(LAYOUT, transcript)[1] == []
    assert source_footprint(LAYOUT, transcript)[1] != []


def test_placement_reports_what_was_restored():
    result, _ = placement(LAYOUT, clean())
    assert (result.judged_bytes, result.judged_blocks, result.judged_resources, result.judged_items) == (352, 4, 2, 4)


def test_placement_without_restored_bytes_is_vacuous_however_much_was_read():
    transcript = clean()
    transcript.restored_bytes = {0: 0, 1: 0}
    assert placement(LAYOUT, transcript)[0].status is Status.VACUOUS


# ---------------------------------------------------------------------- provenance


@pytest.mark.parametrize("moment", ["read", "after_load", "at_rest"])
def test_provenance_names_the_owner_at_any_moment(moment):
    finding = only(provenance(LAYOUT, with_observations(observed(moment, CACHED))))
    assert (finding.kind, finding.location, finding.origin) == ("foreign_owner", HERE, WHOSE)


def test_provenance_of_a_state_counts_from_its_page():
    mismatch = replace(FOREIGN, decoded=Decoded(1, 9, 40))
    finding = only(provenance(LAYOUT, with_observations(observed("read", LOADED, mismatch))))
    assert finding.origin == Origin("layers.1.mamba", "ssm", "a#1", 9, 3, 40)


def test_provenance_says_when_the_owners_block_is_gone():
    transcript = with_observations(observed("read", LOADED))
    transcript.names[9] = replace(transcript.names[9], blocks={})
    assert "a block that is free by now byte 88" in describe(only(provenance(LAYOUT, transcript)))


def test_provenance_of_a_content_without_a_name_is_still_a_finding():
    transcript = with_observations(observed("read", LOADED))
    transcript.names.clear()
    finding = only(provenance(LAYOUT, transcript))
    assert (finding.kind, finding.origin) == ("foreign_owner", None)


@pytest.mark.parametrize("mismatch", [POISON, ZERO, LOOSE, replace(FOREIGN, decoded=None)])
def test_provenance_is_silent_where_nobody_is_named(mismatch):
    assert provenance(LAYOUT, with_observations(observed("read", LOADED, mismatch)))[1] == []


def test_provenance_distrusts_itself_when_a_restored_block_misnames_itself():
    transcript = clean()
    transcript.origins_wrong = 2
    result, (finding,) = provenance(LAYOUT, transcript)
    assert (result.status, finding.kind) == (Status.FAILED, "misnamed")
    assert "2 restored blocks do not name themselves" in describe(finding)


def test_provenance_without_a_name_read_is_vacuous():
    transcript = clean()
    transcript.origins_checked = 0
    assert provenance(LAYOUT, transcript)[0].status is Status.VACUOUS


def test_provenance_counts_names_read_and_foreign_places():
    transcript = with_observations(observed("read", LOADED), observed("read", LOADED, POISON))
    assert provenance(LAYOUT, transcript)[0].judged_items == 3 + 1


# ---------------------------------------------------------------------- footprint


@pytest.mark.parametrize(("region", "kind"), [
    (NULL, "null_block_written"), (PADDING, "padding_written"), (FREE, "free_block_written"),
    (CACHED, "cached_block_rewritten"), (COMPUTED, "computed_block_changed"), (FOREIGN_BLOCK, "other_block_written"),
    (LOADED, "loaded_block_changed"),
])  # fmt: skip
@pytest.mark.parametrize(("moment", "when"), [("after_load", "by a load"), ("at_rest", "by a save or a late load")])
def test_footprint_names_what_was_written_and_when(region, kind, moment, when):
    result, (finding,) = footprint(LAYOUT, with_observations(observed(moment, region)))
    assert (result.status, finding.kind, finding.location, finding.bytes_affected) == (Status.FAILED, kind, HERE, 8)
    assert f"({when}), 8 bytes" in describe(finding)


def test_footprint_names_padding_by_layer_and_byte():
    finding = only(footprint(LAYOUT, with_observations(observed("at_rest", PADDING, LOOSE, None))))
    assert finding.location == Location(1, "layers.1.mamba", "padding", 3, 100)
    assert describe(finding).startswith("group 1 layers.1.mamba padding block 3 byte 100: padding between pages")


def test_footprint_catches_a_load_over_a_cached_block_at_the_read():
    assert only(footprint(LAYOUT, with_observations(observed("read", CACHED)))).kind == "cached_block_rewritten"


@pytest.mark.parametrize("region", [LOADED, OPTIONAL])
def test_footprint_leaves_the_load_itself_to_placement(region):
    assert footprint(LAYOUT, with_observations(observed("read", region)))[1] == []


def test_footprint_counts_both_moments():
    result, _ = footprint(LAYOUT, clean())
    assert (result.judged_bytes, result.judged_blocks, result.judged_resources, result.judged_items) == (1024, 4, 2, 8)


@pytest.mark.parametrize(("judged", "status"), [
    ({}, Status.VACUOUS), ({"read": 9}, Status.VACUOUS), ({"at_rest": 0}, Status.VACUOUS),
    ({"after_load": 9}, Status.PASSED), ({"at_rest": 9}, Status.PASSED),
])  # fmt: skip
def test_footprint_is_vacuous_unless_memory_was_looked_at(judged, status):
    transcript = clean()
    transcript.judged = {moment: Judged(nbytes, 1, {0}, {1}) for moment, nbytes in judged.items()}
    assert footprint(LAYOUT, transcript)[0].status is status


# ---------------------------------------------------------------------- source footprint


def test_source_footprint_finds_restored_poison():
    result, (finding,) = source_footprint(LAYOUT, with_observations(observed("read", LOADED, UNCOMPUTED)))
    assert (result.status, finding.kind) == (Status.FAILED, "uncomputed_bytes_restored")
    assert (finding.location, finding.bytes_affected) == (HERE, 8)
    assert "8 bytes are from rows that were not computed" in describe(finding)


def test_source_footprint_counts_only_its_own_bytes():
    mixed = replace(FOREIGN, counts={"poison_uncomputed": 3, "foreign": 4})
    assert only(source_footprint(LAYOUT, with_observations(observed("read", LOADED, mixed)))).bytes_affected == 3


def test_source_footprint_is_about_reads():
    assert source_footprint(LAYOUT, with_observations(observed("at_rest", FREE, UNCOMPUTED)))[1] == []


@pytest.mark.parametrize(("uncomputed", "restored", "status"), [
    (64, 96, Status.PASSED), (0, 96, Status.VACUOUS), (64, 0, Status.VACUOUS),
])  # fmt: skip
def test_source_footprint_needs_poison_that_could_have_come_back(uncomputed, restored, status):
    transcript = clean()
    transcript.uncomputed_bytes, transcript.restored_bytes = uncomputed, {0: restored}
    result, _ = source_footprint(LAYOUT, transcript)
    assert (result.status, result.judged_bytes) == (status, uncomputed)


# ---------------------------------------------------------------------- inventory


@pytest.mark.parametrize("restored", [{1: 96}, {0: 0, 1: 96}])
def test_inventory_names_a_layer_left_behind(restored):
    transcript = clean()
    transcript.restored_bytes = restored
    result, (finding,) = inventory(LAYOUT, transcript)
    assert (result.status, finding.kind) == (Status.FAILED, "never_restored")
    assert (finding.location.group, finding.location.layer) == (0, "layers.0.attn")
    assert "group 0 layers.0.attn K block 0 byte 0: never restored right in any scenario (K, V)" in describe(finding)


def test_inventory_lets_recomputed_groups_be():
    groups = (LAYOUT.groups[0], replace(LAYOUT.groups[1], rule="recomputed"))
    transcript = clean()
    transcript.restored_bytes = {0: 1}
    result, findings = inventory(replace(LAYOUT, groups=groups), transcript)
    assert (result.status, findings, result.judged_resources) == (Status.PASSED, [], 2)


def test_inventory_of_nothing_is_vacuous():
    assert inventory(replace(LAYOUT, resources=()), Transcript())[0].status is Status.VACUOUS
