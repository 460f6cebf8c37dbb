"""Loading a checkpoint into the model under vLLM (specification, sections 1.7, 9): what is right, what is refused.

One child process (``v41_contracts.py``) builds the model, fills it with NaN and loads; nothing here imports vLLM.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from v41_contracts import SHAPES, run

pytestmark = pytest.mark.engine
Tried = Callable[[str], dict[str, Any]]
TENSORS = 333
"""Of the tiny model: 7 layers, 2 kv sources, 3 index sources, 8 experts and a shared one each."""


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> Tried:
    return run("loading", tmp_path_factory.mktemp("v41-loading"))


def is_refused(found: dict[str, str], *parts: str) -> None:
    assert found["type"] == "ValueError", found
    assert "\n" not in found["text"]
    assert [part for part in parts if part not in found["text"]] == [], found["text"]


def test_parameters_are_named_as_the_tensors_of_a_checkpoint(tried: Tried) -> None:
    assert tried("names") == {"count": TENSORS, "only_ours": [], "only_table": []}


@pytest.mark.parametrize("form", ["plain", "quantised"])
def test_every_parameter_is_the_tensor_of_its_name(tried: Tried, form: str) -> None:
    found = tried("complete")[form]
    assert found == {"wrong": [], "count": TENSORS, "nan": [], "dtypes": ["torch.bfloat16", "torch.float32"]}


def test_a_quantised_checkpoint_is_the_plain_one_of_its_dequantised_tensors(tried: Tried) -> None:
    assert tried("complete")["differ"] == []
    # Rounded are, in each of 7 layers, 5 linears of attention and 4 stacks of experts, and 3 linears of indexers.
    assert tried("complete")["differ_from_unquantised"] == 7 * (5 + 4) + 3


def test_the_order_of_tensors_does_not_matter(tried: Tried) -> None:
    found = tried("shuffled")
    assert len(found) == 12
    assert {case: names for case, names in found.items() if names} == {}


def test_tensors_of_the_draft_and_of_the_tower_are_skipped(tried: Tried) -> None:
    assert tried("elsewhere") == {"differ": [], "skipped": 7}


@pytest.mark.parametrize("scale", ["torch.float32", "torch.uint8"])
def test_experts_in_fp8(tried: Tried, scale: str) -> None:
    found = tried("fp8")
    assert found["expert_dtype"] == "fp8"
    assert found[scale] == []


def test_ignored_layers_are_plain_in_a_quantised_checkpoint(tried: Tried) -> None:
    found = tried("ignored_layers")
    assert len(found["known"]) == 4
    assert found["differ"] == []


def test_every_float_fits_every_parameter(tried: Tried) -> None:
    assert tried("widened") == {"torch.float32": [], "torch.bfloat16": [], "torch.float16": []}


@pytest.mark.parametrize("name", SHAPES)
def test_another_shape_is_refused(tried: Tried, name: str) -> None:
    """On one rank always; on two ranks by at least one, and by none in another way."""
    for shape in SHAPES[name]:
        alone, *pair = tried("shapes")[f"{name} {list(shape)}"]
        is_refused(alone, name)
        assert any(found["type"] for found in pair), shape
        for found in pair:
            if found["type"]:
                is_refused(found, name)


def test_another_dtype_is_refused(tried: Tried) -> None:
    cases = tried("dtypes")
    assert len(cases) == 35
    for case, found in cases.items():
        name, _ = case.split()
        is_refused(found, name)


MISSING = [f"layers.6.ffn.experts.{e}.w{m}.weight" for e in range(8) for m in (1, 2, 3)]


@pytest.mark.parametrize(
    ("case", "parts"),
    [
        ("missing", ("missing layers.0.ffn.experts.5.w1.weight, layers.1.attn.attn_sink;", "unexpected nothing")),
        ("missing many", (*MISSING[:8], "and 16 more")),
        ("empty", ("embed.weight", f"and {TENSORS - 8} more")),
        ("unexpected", ("missing nothing", "unexpected layers.7.attn.wq_a.weight, stray")),
        ("both", ("missing norm.weight;", "unexpected final_norm.weight")),
        ("key side of a query-only indexer", ("unexpected layers.5.attn.indexer.wk.weight",)),
        ("gate of a ratio-1 compressor", ("unexpected layers.3.attn.compressor.wgate.weight",)),
        ("bias of images", ("unexpected layers.0.ffn.gate.bias_vl",)),
        ("expert beyond", ("unexpected layers.0.ffn.experts.8.w1.weight",)),
        ("expert spelled otherwise", ("unexpected layers.0.ffn.experts.01.w1.weight",)),
        ("expert beyond, quantised", ("unexpected layers.0.ffn.experts.8.w2.weight",)),
        ("quantised pair nobody takes", ("unexpected stray.weight",)),
        ("scale without matrix", ("layers.1.attn.wq_b.scale", "without")),
        ("matrix without scale", ("layers.1.attn.wq_b.weight", "without")),
        ("expert without scale", ("layers.0.ffn.experts.5.w1.weight", "without")),
        ("scale beside a plain matrix", ("layers.1.attn.wq_b.scale", "without")),
        ("scale in a plain checkpoint", ("layers.1.attn.wq_b.scale", "quantization_config")),
        ("quantised in a plain configuration", ("quantised", "quantization_config")),
        ("fp4 in a plain configuration", ("layers.0.ffn.experts.5.w1.weight", "quantization_config")),
        ("nan scale", ("layers.1.attn.wq_b.weight", "255", "254")),
        ("nan scale of an expert", ("layers.0.ffn.experts.5.w1.weight", "255", "254")),
        ("infinite fp32 scale", ("layers.1.attn.wq_b.weight", "finite")),
        ("scale too wide", ("layers.1.attn.wq_b.weight", "(4, 2)", "(4, 1)")),
        ("scale too short", ("layers.0.ffn.experts.5.w1.weight", "(32, 1)", "32")),
        ("scale of integers", ("layers.1.attn.wq_b.weight", "torch.int64")),
        ("fp32 scale of fp4", ("layers.0.ffn.experts.5.w1.weight", "torch.float32")),
        ("int8 scale of fp4", ("layers.0.ffn.experts.5.w1.weight", "torch.int8")),
        ("e5m2 linear", ("layers.1.attn.wq_b.weight", "torch.float8_e5m2")),
        ("e5m2 expert", ("layers.0.ffn.experts.5.w1.weight", "torch.float8_e5m2")),
        ("quantised in another shape", ("layers.0.ffn.experts.5.w1.weight", "[32, 128]", "[32, 64]")),
        ("plain twice, before", ("layers.1.attn.wq_b.weight",)),
        ("plain twice, after", ("layers.1.attn.wq_b.weight",)),
        ("matrix twice, before", ("layers.1.attn.wq_b.weight",)),
        ("matrix twice, after", ("layers.1.attn.wq_b.weight",)),
        ("scale twice, before", ("layers.0.ffn.experts.5.w1.scale",)),
        ("scale twice, after", ("layers.0.ffn.experts.5.w1.scale",)),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(tried: Tried, case: str, parts: tuple[str, ...]) -> None:
    is_refused(tried("refusals")[case], *parts)


def test_no_refusal_goes_unread(tried: Tried) -> None:
    (mark,) = test_a_checkpoint_that_does_not_fit_is_refused.pytestmark  # type: ignore[attr-defined]
    assert tried("refusals").keys() == {case for case, _ in mark.args[1]}


@pytest.mark.parametrize("quantised", [False, True], ids=["plain", "quantised"])
@pytest.mark.parametrize("experts", [False, True], ids=["tensor parallel", "expert parallel"])
def test_the_parts_of_two_ranks_are_the_whole(tried: Tried, quantised: bool, experts: bool) -> None:
    found = tried("ranks")[f"quantised {quantised}, experts {experts}"]
    assert found["wrong"] == []
    assert found["strange"] == []
    assert max(found["sizes"]) < found["whole"]


@pytest.mark.parametrize("ranks", ["1", "2", "4", "8"])
def test_layers_that_cut_by_themselves(tried: Tried, ranks: str) -> None:
    found = tried("parts")[ranks]
    assert len(found) == 6
    assert [name for name, right in found.items() if not right] == []


def test_what_does_not_divide_is_refused(tried: Tried) -> None:
    found = tried("parts")["refused"]
    is_refused(found["sink"], "[4]")
    is_refused(found["expert"], "[15, 24]", "[16, 24]")
