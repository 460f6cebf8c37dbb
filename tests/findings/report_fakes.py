"""Reports as real runs give them, small enough to build in milliseconds."""

from __future__ import annotations

from functools import cache

from kvproof.findings.model import (
    ByteMap,
    Finding,
    GroupPolicy,
    Location,
    OracleResult,
    Origin,
    PageMap,
    Report,
    ScenarioSummary,
    Status,
    Substitution,
    Verdict,
)
from kvproof.layout import Axis, Field, Group, Layout, Resource, Storage

Runs = tuple[tuple[int, int, str], ...]

ORACLES = (
    "equality",
    "placement",
    "provenance",
    "legality",
    "footprint",
    "source footprint",
    "hit length",
    "inventory",
)
SOURCES = {
    "equality": "groups whose required set follows from vLLM's spec and the hit length",
    "placement": "the byte code",
    "provenance": "inverse of the byte code",
    "legality": "vLLM's block tables and tensors",
    "footprint": "snapshots",
    "source footprint": "poison in the part not computed yet",
    "hit length": "the scheduler's token counts",
    "inventory": "the layout",
}
CASE = {
    "model": "qwen3-8b",
    "platform": "cpu",
    "connector": {"name": "ExampleConnector", "module_path": None, "extra_config": {"shared_storage_path": "/srv/kv"}},
    "runner": "v1",
    "modes": ["bulk", "layerwise"],
    "tokens": 128,
    "tensor_parallel_size": 1,
    "seed": 7,
}
VERSIONS = {"kvproof": "0.1.0", "vllm": "0.32.0", "torch": "2.11.0", "python": "3.11.2"}
BLOCKS = [14, 3, 22, 9, 31, 5, 27, 18]
STEP = {
    "step": 0,
    "requests": [
        {"request": "A", "computed": 0, "scheduled": 128, "local": 0, "external": 0, "tables": [BLOCKS]},
        {"request": "B", "computed": 112, "scheduled": 16, "local": 0, "external": 112, "tables": [BLOCKS]},
        {"request": "C", "computed": 112, "scheduled": 16, "local": 0, "external": 112, "tables": [BLOCKS]},
    ],
}
"""One line of a transcript: A computes 8 blocks, B and C get 7 of them back and compute one each."""


@cache
def dense_layout(layers: int = 36, blocks: int = 40, tokens: int = 16, heads: int = 8, head_bytes: int = 256) -> Layout:
    """One full-attention group; page [head, token, K|V]."""
    cell = 2 * head_bytes
    page = heads * tokens * cell
    names = tuple(f"model.layers.{i}.self_attn.attn" for i in range(layers))
    resources = tuple(
        Resource(
            id=i,
            group=0,
            layer=name,
            dtype="bfloat16",
            storage=i,
            offset=0,
            block_stride=page,
            page_bytes=page,
            row_axes=(Axis(tokens, cell),),
            cell_axes=(Axis(heads, tokens * cell), Axis(cell, 1)),
            tokens_per_row=1,
            fields=(Field("K", 0, head_bytes), Field("V", head_bytes, cell)),
        )
        for i, name in enumerate(names)
    )
    storages = tuple(Storage(i, page * blocks) for i in range(layers))
    group = Group(0, "FullAttentionSpec", tokens, names, "all", spec="FullAttentionSpec(block_size=16)")
    return Layout("LBHNC", blocks, storages, (group,), resources)


def oracle(name: str, status: Status = Status.PASSED, **counts: int) -> OracleResult:
    base = {"judged_bytes": 37_748_736, "judged_blocks": 288, "judged_resources": 36, "judged_items": 4}
    reason = "the connector reports no addresses" if status is Status.SKIPPED else ""
    return OracleResult(name, status, SOURCES[name], **(base | counts), reason=reason)


def whole(nbytes: int, state: str = "restored") -> Runs:
    return ((0, nbytes, state),)


def scenario(name: str = "bulk/8 blocks", findings: int = 0) -> ScenarioSummary:
    return ScenarioSummary(name, name.split("/")[0], 2, 9, 128, 0, 112, findings, 0.41)


def passing() -> Report:
    """36 layers x 8 blocks, everything restored; the last block computed from its third row on."""
    layout = dense_layout()
    resource = layout.resources[0]
    last = row_interleaved(resource, restored_rows=0)
    pages = [
        PageMap(r.id, block, last if block == BLOCKS[-1] else whole(r.page_bytes))
        for r in layout.resources
        for block in BLOCKS
    ]
    return Report(
        case=dict(CASE),
        verdict=Verdict.PASS,
        reason="8 oracles judged 301,989,888 bytes",
        oracles=[oracle(name) for name in ORACLES],
        groups=[
            GroupPolicy(0, "FullAttentionSpec", 16, 36, "all", "every token of the hit", 33_030_144, 4_718_592,
                        computed_bytes=23_592_960),
        ],
        scenarios=[scenario(), scenario("layerwise/8 blocks"), scenario("bulk/chunked prefill"), scenario("bulk/k-1")],
        substitutions=[
            Substitution(
                "torch.cuda.Stream", "E", "no device on this machine", "orders copies, never moves or resizes a tensor"
            )
        ],
        bytemaps=[ByteMap("bulk/8 blocks", "B", {0: BLOCKS}, pages)],
        layout=layout.to_json(),
        kv_cache_config={"class": "KVCacheConfig", "num_blocks": 40, "kv_cache_groups": [{"layer_names": ["a"]}]},
        counters={"bytes_poisoned": 37_748_736, "connector_loads": 36, "connector_saves": 36},
        versions=VERSIONS,
    )


def row_interleaved(resource: Resource, restored_rows: int, odd: str = "computed") -> Runs:
    """In every head the first rows restored, the others ``odd``."""
    runs: list[tuple[int, int, str]] = []
    cell = resource.cell_axes[-1].count
    heads = resource.cell_axes[0].count
    for head in range(heads):
        start = head * resource.rows * cell
        if restored_rows:
            runs.append((start, restored_rows * cell, "restored"))
        runs.append((start + restored_rows * cell, (resource.rows - restored_rows) * cell, odd))
    return tuple(runs)


def failing() -> Report:
    """K and V exchanged in layer 9, and one stray byte written into a neighbour's block in layer 20."""
    report = passing()
    layout = dense_layout()
    resource = layout.resources[9]
    cell, half = 512, 256
    swapped = tuple((i * half, half, "foreign") for i in range(resource.page_bytes // half))
    assert cell == resource.cell_axes[-1].count
    pages = []
    for page in report.bytemaps[0].pages:
        runs = swapped if page.resource == 9 and page.block != BLOCKS[-1] else page.runs
        pages.append(PageMap(page.resource, page.block, runs))
    stray = ((0, 4097, "canary"), (4097, 1, "stray"), (4098, resource.page_bytes - 4098, "canary"))
    pages.append(PageMap(20, 11, stray))
    layer9, layer20 = layout.resources[9].layer, layout.resources[20].layer
    report.bytemaps = [ByteMap("layerwise/8 blocks", "B", {0: BLOCKS}, passing().bytemaps[0].pages),
                       ByteMap("bulk/8 blocks", "B", {0: BLOCKS}, pages)]  # fmt: skip
    report.findings = [
        Finding(
            "placement",
            "foreign",
            "V holds bytes that were stored as K of the same layer",
            "bulk/8 blocks",
            Location(0, layer9, "V", 14, 256, row=0, token=0, request="B"),
            Origin(layer9, "K", "A", 0, 14, 0),
            bytes_affected=7 * resource.page_bytes,
            next_step="Compare the order of K and V in the connector's save and load of this layer.",
        ),
        Finding(
            "footprint",
            "stray_write",
            "a load changed a byte outside its target ranges",
            "bulk/8 blocks",
            Location(0, layer20, "K", 11, 4097, row=8, request="B"),
            None,
            bytes_affected=1,
            next_step="Look for an off-by-one in the length of the copy.",
        ),
    ]
    report.verdict = Verdict.FAIL
    report.reason = "2 findings, first: placement: V holds bytes that were stored as K of the same layer"
    report.oracles = [
        oracle(name, Status.FAILED, findings=1) if name in {"placement", "footprint"} else oracle(name)
        for name in ORACLES
    ]
    report.scenarios[0] = scenario(findings=2)
    return report


def hybrid() -> Report:
    """A sliding-window group with null blocks, a state group with padding; one skipped oracle."""
    layers = [f"model.layers.{i}.self_attn.attn" for i in range(0, 20, 2)]
    states = [f"model.layers.{i}.mixer" for i in range(1, 20, 2)]
    cell, tokens, page = 1024, 16, 16384
    resources = [
        Resource(i, 0, name, "bfloat16", i, 0, page, page, (Axis(tokens, cell),), (Axis(cell, 1),), 1,
                 (Field("latent", 0, 896), Field("rope", 896, 1024)))
        for i, name in enumerate(layers)
    ]  # fmt: skip
    resources += [
        Resource(10 + i, 1, name, "float32", i, 0, page, page, (Axis(1, 15000),), (Axis(15000, 1),), 0,
                 (Field("conv", 0, 3000), Field("ssm", 3000, 15000)))
        for i, name in enumerate(states)
    ]  # fmt: skip
    groups = (
        Group(0, "SlidingWindowSpec", tokens, tuple(layers), "window", window=64),
        Group(1, "MambaSpec", 128, tuple(states), "state"),
    )
    layout = Layout("LBHNC", 40, tuple(Storage(i, 40 * page) for i in range(10)), groups, tuple(resources))
    window = [0, 0, 0, 0, 12, 7, 25, 4]
    padded = ((0, 15000, "restored"), (15000, page - 15000, "null"))
    pages = [PageMap(i, b, whole(page)) for i in range(10) for b in window if b]
    pages += [PageMap(i, 0, whole(page, "null")) for i in range(10)]
    pages += [PageMap(10 + i, 33, padded) for i in range(10)]
    report = passing()
    report.case = CASE | {"model": "bamba-9b", "connector": None, "tokens": 0}
    report.verdict = Verdict.PARTIAL
    report.reason = "skipped: legality (the connector reports no addresses)"
    report.layout = layout.to_json()
    report.groups = [
        GroupPolicy(0, "SlidingWindowSpec", 16, 10, "window", "the last 64 tokens; older blocks are null",
                    655_360, 655_360),
        GroupPolicy(1, "MambaSpec", 128, 10, "state", "the state after the hit", 150_000, 0),
    ]  # fmt: skip
    report.oracles[3] = oracle("legality", Status.SKIPPED)
    report.bytemaps = [ByteMap("bulk/8 blocks", "B", {0: window, 1: [33]}, pages)]
    return report


def unsupported() -> Report:
    return Report(
        case=CASE | {"model": "deepseek-v4"},
        verdict=Verdict.UNSUPPORTED,
        reason="staging failed at get_kv_cache_spec:\nNotImplementedError: sparse MLA needs <CUDA>",
        versions=VERSIONS,
    )


def heavy(layers: int = 61, columns: int = 40) -> Report:
    """Many pages of many runs each, all different: about 200,000 runs."""
    layout = dense_layout(layers, 200, heads=2, head_bytes=128)
    resource = layout.resources[0]
    blocks = [(17 * i) % 200 for i in range(1, columns + 1)]
    size = resource.page_bytes
    pages = []
    for r in layout.resources:
        for column, block in enumerate(blocks):
            starts = [0, *range(1 + (r.id * columns + column) % 4000, size, 100 + r.id % 7)]
            ends = [*starts[1:], size]
            states = ("restored", "computed")
            pages.append(
                PageMap(
                    r.id,
                    block,
                    tuple((s, e - s, states[k % 2]) for k, (s, e) in enumerate(zip(starts, ends, strict=True))),
                )
            )
    target = layers // 2 * columns + columns // 2
    victim = pages[target]
    runs = tuple((s, n, "foreign" if k == 40 else state) for k, (s, n, state) in enumerate(victim.runs))
    pages[target] = PageMap(victim.resource, victim.block, runs)
    report = failing()
    report.layout = layout.to_json()
    report.bytemaps = [ByteMap("bulk/8 blocks", "B", {0: blocks}, pages)]
    location = Location(0, layout.resources[victim.resource].layer, "K", victim.block, runs[40][0], request="B")
    report.findings = [Finding("placement", "foreign", "a foreign byte", "bulk/8 blocks", location)]
    return report
