from __future__ import annotations

from dataclasses import replace

import report_fakes as fakes
from hypothesis import given, settings
from hypothesis import strategies as st

from kvproof.findings.alike import alike, leading
from kvproof.findings.model import Finding

OWNED, STRAY = fakes.failing().findings
LAYERS = [f"model.layers.{i}.self_attn.attn" for i in range(4)]


def at(finding: Finding, **place) -> Finding:
    return replace(finding, location=replace(finding.location, **place))


def unequal(**place) -> Finding:
    return replace(at(OWNED, **place), oracle="equality", kind="restored_differs", origin=None)


findings = st.lists(
    st.builds(
        lambda finding, block, oracle, message: replace(at(finding, block=block), oracle=oracle, message=message),
        st.sampled_from([OWNED, STRAY, unequal()]),
        st.integers(0, 3),
        st.sampled_from(["equality", "placement", "provenance", "legality"]),
        st.sampled_from(["7 bytes", "9 bytes", "a load writes block [1], allowed are [2, 3]"]),
    ),
    max_size=12,
)


@settings(max_examples=50)
@given(findings)
def test_every_finding_is_in_one_group(found):
    told = [f for group in alike(found) for f in (group.first, *group.more)]
    assert sorted(map(repr, told)) == sorted(map(repr, found))


@settings(max_examples=50)
@given(findings)
def test_each_sort_is_told_before_any_sort_is_told_again(found):
    sorts = [(g.first.oracle, g.first.kind) for g in alike(found)]
    assert len(set(sorts[: len(set(sorts))])) == len(set(sorts))


@settings(max_examples=50)
@given(findings.filter(bool))
def test_what_leads_is_told_first_and_names_an_owner_where_one_is_known(found):
    first = leading(found)
    assert first == alike(found)[0].first
    assert (first.origin is None) == all(f.origin is None for f in found)


def test_whose_bytes_stand_there_comes_before_that_they_differ():
    """As a run gives them: all of equality, then all of placement and provenance, then what was never restored."""
    blocks = range(20)
    found = [unequal(block=b) for b in blocks]
    found += [at(OWNED, block=b) for b in blocks]
    found += [replace(at(OWNED, block=b), oracle="provenance", kind="foreign_owner") for b in blocks]
    found.append(replace(STRAY, oracle="inventory", kind="never_restored"))
    told = [(g.first.oracle, len(g.more)) for g in alike(found)]
    assert told == [("placement", 19), ("provenance", 19), ("inventory", 0), ("equality", 19)]


def test_numbers_in_a_sentence_do_not_tell_findings_apart_words_do():
    blocks = [
        replace(STRAY, location=None, message=f"a load writes block [{i}], allowed are {list(range(i))}")
        for i in (1, 2, 30)
    ]
    assert len(alike(blocks)) == 1
    assert len(alike([*blocks, replace(blocks[0], message="a save reads block [1], allowed are [2]")])) == 2


def test_owners_in_other_layers_are_another_sort_than_owners_in_other_fields():
    elsewhere = replace(OWNED, origin=replace(OWNED.origin, layer=LAYERS[0]))
    groups = alike([OWNED, elsewhere, at(OWNED, block=3)])
    assert [g.first for g in groups] == [OWNED, elsewhere]
    assert groups[0].more == (at(OWNED, block=3),)


def test_what_is_alike_is_told_in_words():
    (one,) = alike([OWNED])
    assert one.words == ""
    (two,) = alike([OWNED, at(OWNED, block=3)])
    assert two.words == "and 1 more like it: model.layers.9.self_attn.attn V, block 3"
    layers = [at(unequal(), layer=layer, resource=name, block=b) for layer in LAYERS for name in "KV" for b in range(8)]
    (turned,) = alike([unequal(), unequal(resource="K"), unequal(block=3)])
    assert "V and K, blocks 3, 14" in turned.words  # in the order in which they were met, the first one included
    (many,) = alike(layers)
    assert many.words == (
        "and 63 more like it: 4 × model.layers.*.self_attn.attn (0 … 3) K and V, blocks 0, 1, 2, 3, 4, 5, … (8 blocks)"
    )
    (spread,) = alike([OWNED, *(replace(OWNED, scenario=f"s{i}") for i in range(4))])
    assert spread.words.endswith("block 14, in s0, s1, s2, … (4 scenarios)")


def test_a_finding_without_a_place_is_told_by_its_scenario():
    found = [Finding("lifecycle", "leak", "never freed", scenario) for scenario in ("a", "b", "c")]
    assert alike(found)[0].words == "and 2 more like it: in b, c"


def test_untrusted_names_are_one_plain_line():
    (group,) = alike([unequal(), unequal(layer="x\x1b[31m\ny", resource="\u202e")])
    assert not {"\x1b", "\n", "\u202e"} & set(group.words)
