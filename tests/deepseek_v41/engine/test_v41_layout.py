"""The caches that vLLM lays out for this package's model are those of the plan (specification, sections 4.1, 4.4)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from kvproof.cli import main

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))
from v41_resources import held, plan_of, planned

pytestmark = pytest.mark.engine
TEXT = {"hf_overrides": {"engram_layer_ids": [], "engram_num_embeddings": [], "vision_n_layers": 0}}
"""Turns the released configuration into its text part without Engram, widths untouched."""
MODELS = {
    # name: engine arguments, D and index width in values of bf16
    "deepseek-v41-tiny": ({}, 32, 16),
    "deepseek-v41-small": ({}, 32, 16),
    "deepseek-v4.1": (TEXT, 512, 128),
}


@pytest.mark.parametrize("model", MODELS)
def test_the_caches_are_those_of_the_plan(model, capsys):
    arguments, width, index = MODELS[model]
    code = main(["layout", model, "--json", "--engine-args", json.dumps(arguments)])
    found = json.loads(capsys.readouterr().out)
    assert code == 0
    rows, sizes = held(found)
    assert rows == planned(plan_of(model), ring=8)
    assert sizes == {"window": width * 2, "long": width * 2, "index key": index * 2, "ring": 2 * width * 4}
    assert len(found["resources"]) == sum(map(len, rows.values())), "one tensor per cache"
