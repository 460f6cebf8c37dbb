"""Connector names and the hit rules declared for them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvproof.engine import connectors

UNIT = 16
tokens = st.lists(st.integers(0, 1), max_size=80)


@pytest.mark.parametrize("text", ["", ":", "a b", "mod:", ":Name", "a..b:C", "1a:C", "a:b-c", "a:1"])
def test_malformed_names_are_refused(text):
    with pytest.raises(ValueError, match="--connector"):
        connectors.parse(text, "/store")


def test_module_path_and_preset():
    third = connectors.parse("pkg.mod:Conn", "/store", {"x": 1})
    assert (third.name, third.module_path, third.extra_config, third.display) == (
        "Conn", "pkg.mod", {"x": 1}, "pkg.mod:Conn",
    )  # fmt: skip
    assert connectors.profile(third) is None
    example = connectors.parse("ExampleConnector", "/store")
    assert example.extra_config == {"shared_storage_path": "/store"}
    assert connectors.profile(example).rewrites_local


@given(tokens, st.lists(tokens, max_size=4))
def test_full_blocks_is_aligned_known_and_leaves_a_token(prompt, earlier):
    hit = connectors.full_blocks(prompt, earlier, UNIT)
    assert hit % UNIT == 0
    assert hit == 0 or hit < len(prompt)
    assert hit == 0 or any(known[:hit] == prompt[:hit] and len(known) >= hit for known in earlier)
    longer = hit + UNIT
    assert longer >= len(prompt) or not any(k[:longer] == prompt[:longer] and len(k) >= longer for k in earlier)


@given(tokens.filter(lambda t: len(t) > 1))
def test_example_connector_finds_its_own_prompt_except_one_past_a_block(prompt):
    """Public fault, vLLM pull request 40684: k blocks and one token are stored and looked up under different keys."""
    hit = connectors.whole_prompts(prompt, [prompt], UNIT)
    assert hit == (0 if len(prompt) % UNIT == 1 else (len(prompt) - 2) // UNIT * UNIT)


@pytest.mark.parametrize(("text", "layerwise"), [("UCM", False), ("UCMLayerwise", True)])
def test_a_preset_may_name_a_class_elsewhere(text, layerwise):
    spec = connectors.parse(text, "/store")
    assert spec.display == "ucm.integration.vllm.ucm_connector:UCMConnector"
    assert spec.extra_config["use_layerwise"] is layerwise
    (store,) = spec.extra_config["ucm_connectors"]
    assert store["ucm_connector_config"]["storage_backends"] == "/store"
    assert connectors.profile(spec) is connectors.PROFILES[text]
    # Named by its class it is the same connector, with what is declared about it.
    named = connectors.parse(spec.display, "/store")
    assert named == connectors.parse("UCM", "/store")
    own = connectors.parse(spec.display, "/store", {"use_layerwise": layerwise})
    assert own.extra_config == {"use_layerwise": layerwise}
    assert connectors.profile(own) is connectors.PROFILES[text]


@given(tokens, st.lists(tokens, max_size=4), st.integers(1, 2))
def test_stored_blocks_is_every_full_block_but_the_tokens_computed_again(prompt, earlier, recomputed):
    hit = connectors.stored_blocks(recomputed)(prompt, earlier, UNIT)
    assert 0 <= hit <= max(0, len(prompt) - recomputed)
    assert hit == 0 or any(known[:hit] == prompt[:hit] for known in earlier)
    whole = connectors.stored_blocks(recomputed)(prompt, [prompt], UNIT)
    assert whole == max(0, min(len(prompt) // UNIT * UNIT, len(prompt) - recomputed))


def test_ucms_store_is_asked_for_files_that_are_complete(tmp_path):
    spec = connectors.parse("UCM", str(tmp_path))
    stored = connectors.profile(spec).has_stored
    assert stored(spec.extra_config, 0)
    for name in ("5e4/5e40", ".ucm_gc.members/mb", "dec/dec1.tmp.1.2.00000003"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    assert stored(spec.extra_config, 1)
    assert not stored(spec.extra_config, 2)
    assert stored({}, 0)
