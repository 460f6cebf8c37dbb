from __future__ import annotations

import report_fakes as fakes

from kvproof.findings.model import Finding
from kvproof.findings.summary import case_details, describe, first_sentence, headline, next_step, totals


def test_the_headline_names_the_run():
    assert headline(fakes.passing()) == [
        ("model", "qwen3-8b"),
        ("platform", "cpu"),
        ("connector", "ExampleConnector"),
        ("runner", "v1"),
        ("modes", "bulk, layerwise"),
        ("tokens", "128"),
    ]
    assert dict(headline(fakes.hybrid())) | {"connector": "–", "tokens": "automatic"} == dict(headline(fakes.hybrid()))


def test_declared_hardware_belongs_to_the_platform():
    report = fakes.passing()
    report.case |= {"platform": "ascend-sim", "soc": "ascend910b", "cuda_capability": ""}
    assert dict(headline(report))["platform"] == "ascend-sim, SoC ascend910b"
    assert ("soc", "ascend910b") in case_details(report)


def test_details_are_the_rest_of_the_case():
    assert case_details(fakes.passing()) == [
        ("tensor_parallel_size", "1"),
        ("seed", "7"),
        ("connector module_path", "–"),
        ("connector extra_config", "shared_storage_path=/srv/kv"),
    ]


def test_the_first_sentence_is_the_finding_or_the_reason():
    assert first_sentence(fakes.failing()) == (
        "group 0 model.layers.9.self_attn.attn V block 14 byte 256: V holds bytes that were stored as K of the same "
        "layer. It holds model.layers.9.self_attn.attn K block 14 byte 0 (token 0 of A)."
    )
    assert first_sentence(fakes.unsupported()) == "staging failed at get_kv_cache_spec:"


def test_a_finding_without_a_place_is_still_a_sentence():
    assert describe(Finding("lifecycle", "leak", "never freed!", "async")) == "never freed!"


def test_the_next_step_is_the_findings_own_or_the_verdicts():
    assert next_step(fakes.failing()).startswith("Compare the order of K and V")
    report = fakes.failing()
    report.findings = [Finding("lifecycle", "leak", "never freed", "async")]
    assert next_step(report).startswith("Start with the first finding")
    assert "kvproof doctor" in next_step(fakes.unsupported())


def test_totals():
    assert totals(fakes.failing()) == "8 oracles, 4 scenarios, 1 group, 2 findings"
