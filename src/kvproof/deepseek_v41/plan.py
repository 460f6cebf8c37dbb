"""Which layer owns, reads and selects what: section 2 of the specification, and the limits of 10.1, 10.3, 10.5, 13.3.

Where the 19 rules of 2.4 are enforced:

- one field or one list at a time, in ``config`` (a ``TextConfig`` that exists obeys them): 1, 6, 10, 17, 18, 19;
- between layers, in ``Plan.of``: 2, 4, 5, 11, 12, 13, 15; of these follow 7 (a candidate source is an index source, so
  it selects by itself and is not filtered) and 14 (a kv source is an index source, so no selection is older);
- by deployment, in ``check_serving``: 3;
- a recommendation, in ``Plan.remarks``: 16;
- while a step runs, by the indexer: 8; when layers are registered: 9.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from kvproof.deepseek_v41.config import TextConfig, refusal


@dataclass(frozen=True)
class LayerRole:
    """What backbone layer ``layer`` is to the others.

    Attributes:
        ratio: tokens per row of the compressed cache it reads; 0 = sliding window only.
        kv_source: the layer whose compressed rows and index keys it reads (itself for a kv source); None at ratio 0.
        index_source: the layer whose selection of rows it attends to (itself for an index source); None at ratio 0.
        filtered: its selection is made among candidate blocks only.
        engram_slot: place of the layer in ``engram_layer_ids``, None without Engram.
    """

    layer: int
    ratio: int
    kv_source: int | None
    index_source: int | None
    is_kv_source: bool
    is_index_source: bool
    is_candidate_source: bool
    filtered: bool
    engram_slot: int | None

    @property
    def words(self) -> str:
        """The roles as a person would name them."""
        if self.ratio == 0:
            found = ["window only"]
        else:
            found = [
                word
                for word, holds in (
                    ("kv source", self.is_kv_source),
                    ("index source", self.is_index_source),
                    ("candidate source", self.is_candidate_source),
                    ("filtered", self.filtered),
                )
                if holds
            ] or ["reader"]
        return ", ".join(found if self.engram_slot is None else [*found, f"engram {self.engram_slot}"])


@dataclass(frozen=True)
class BackendLimits:
    """What an implementation of the operators accepts: the legal values of each configuration field it restricts.

    Kept apart from the model's own contracts: what a kernel cannot do is no fault of the model.
    """

    name: str
    legal: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def check(self, config: TextConfig) -> None:
        """ValueError for the first field outside its legal values; an absent count (0) is not looked at."""
        for name, legal in self.legal.items():
            value = getattr(config, name)
            if value and value not in legal:
                raise refusal(name, value, f"{_words(legal)} for the {self.name} backend")


def _words(legal: Sequence[int]) -> str:
    if isinstance(legal, range):
        step = f" in steps of {legal.step}" if legal.step > 1 else ""
        return f"in {legal[0]}..{legal[-1]}{step}"
    return " or ".join(map(str, legal))


REFERENCE = BackendLimits("reference")
"""Plain torch: anything the model's own contracts allow."""

FUSED = BackendLimits(
    "fused",
    {
        "hidden_size": (5120,),
        "hc_mult": (4,),
        "num_attention_heads": range(1, 129),  # padded to 64 or 128
        "head_dim": (512,),
        "qk_rope_head_dim": (64,),
        "index_n_heads": (32, 64),
        "index_head_dim": (128,),
        "index_topk": range(1, 2049),
        "candidate_topk_blocks": range(64, 2049, 64),
        "candidate_block_size": (8,),
        "engram_head_dim": range(128, 2**31, 128),
    },
)
"""The kernels of the public accelerator backends (13.3), as far as a field of the configuration decides."""


@dataclass(frozen=True)
class Plan:
    """One role per backbone layer, and what may be said of the whole without refusing it (``remarks``)."""

    layers: tuple[LayerRole, ...]
    remarks: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: TextConfig, limits: BackendLimits = REFERENCE) -> Plan:
        """The plan of a configuration; ValueError (rule's subject, value, limit) when it is none."""
        limits.check(config)
        _check_sources(config)
        layers = tuple(_role(config, layer) for layer in range(config.num_hidden_layers))
        _check_groups(config, layers)
        return cls(layers, _remarks(config))

    @property
    def cut_points(self) -> tuple[int, ...]:
        """Layers that may be the first of a pipeline stage: no layer from there on reads a source before it (10.3)."""
        oldest_read = len(self.layers)
        found = []
        for role in reversed(self.layers[1:]):
            # An index source is never older than the kv source, and candidates stay in one kv group.
            oldest_read = min(oldest_read, role.layer if role.kv_source is None else role.kv_source)
            if oldest_read == role.layer:
                found.append(role.layer)
        return tuple(reversed(found))

    def table(self) -> str:
        """One line per layer under one line of titles, columns aligned; – where a layer reads no source."""
        rows: list[tuple[str, ...]] = [("layer", "ratio", "kv source", "index source", "roles")]
        for role in self.layers:
            sources = ("–" if source is None else str(source) for source in (role.kv_source, role.index_source))
            rows.append((str(role.layer), str(role.ratio), *sources, role.words))
        return "\n".join(f"{a:>5}  {b:>5}  {c:>9}  {d:>12}  {e}" for a, b, c, d, e in rows)


def _latest(sources: Sequence[int], layer: int) -> int:
    return max(source for source in sources if source <= layer)


def _role(config: TextConfig, layer: int) -> LayerRole:
    ratio = config.compress_ratios[layer]
    engram = config.engram_layer_ids
    kv_source = index_source = None
    filtered = False
    if ratio:
        kv_source = _latest(config.kv_source_layer_ids, layer)
        index_source = _latest(config.index_source_layer_ids, layer)
        candidate_source = config.candidate_source_layer_id
        filtered = candidate_source is not None and candidate_source < index_source
    return LayerRole(
        layer,
        ratio,
        kv_source,
        index_source,
        is_kv_source=layer in config.kv_source_layer_ids,
        is_index_source=layer in config.index_source_layer_ids,
        is_candidate_source=layer == config.candidate_source_layer_id,
        filtered=filtered,
        engram_slot=engram.index(layer) if layer in engram else None,
    )


def _check_sources(config: TextConfig) -> None:
    """Rules 2, 11, 4, 12, 5: the lists themselves. After it every compressed layer has a source of either kind."""
    ratios = config.compress_ratios[: config.num_hidden_layers]
    first = next((layer for layer, ratio in enumerate(ratios) if ratio), None)
    for name in ("kv_source_layer_ids", "index_source_layer_ids"):
        sources = getattr(config, name)
        if first is not None and not sources:
            raise refusal(name, sources, f"not empty: layer {first} has ratio {ratios[first]}")
        for i, source in enumerate(sources):
            if ratios[source] == 0:
                raise refusal(f"{name}[{i}]", source, "a layer with ratio > 0, its ratio is 0")
    for i, source in enumerate(config.kv_source_layer_ids):
        if source not in config.index_source_layer_ids:
            limit = f"one of index_source_layer_ids={config.index_source_layer_ids}"
            raise refusal(f"kv_source_layer_ids[{i}]", source, limit)
    if first is not None and config.kv_source_layer_ids[0] != first:
        raise refusal(
            "kv_source_layer_ids[0]", config.kv_source_layer_ids[0], f"{first}, the first layer with ratio > 0"
        )
    candidate_source = config.candidate_source_layer_id
    if candidate_source is not None and candidate_source not in config.kv_source_layer_ids:
        limit = f"one of kv_source_layer_ids={config.kv_source_layer_ids}"
        raise refusal("candidate_source_layer_id", candidate_source, limit)


def _check_groups(config: TextConfig, layers: Sequence[LayerRole]) -> None:
    """Rules 13 and 15: rows, and numbers of blocks of rows, are coordinates of one cache at one ratio."""
    for role in layers:
        if role.kv_source is None:
            continue
        source = layers[role.kv_source]
        if role.ratio != source.ratio:
            limit = f"{source.ratio}, the ratio of its kv source {source.layer}"
            raise refusal(f"compress_ratios[{role.layer}]", role.ratio, limit)
        if role.is_index_source and role.filtered and role.kv_source != config.candidate_source_layer_id:
            limit = f"{role.kv_source}, the kv source of the index source {role.layer} after it"
            raise refusal("candidate_source_layer_id", config.candidate_source_layer_id, limit)


def _remarks(config: TextConfig) -> tuple[str, ...]:
    rows = config.candidate_topk_blocks * config.candidate_block_size
    if config.candidate_source_layer_id is None or rows >= config.index_topk:
        return ()
    return (
        f"candidate_topk_blocks={config.candidate_topk_blocks} times candidate_block_size="
        f"{config.candidate_block_size} is {rows} rows, fewer than index_topk={config.index_topk}: filtered layers "
        f"never fill their selection.",
    )


def _count(name: str, value: object, least: int) -> int:
    if type(value) is not int or value < least:
        raise refusal(name, value, f"an integer >= {least}")
    return value


def check_serving(
    config: TextConfig,
    plan: Plan,
    *,
    block_size: int,
    tensor_parallel: int = 1,
    expert_parallel: int = 1,
    pipeline_cuts: Sequence[int] = (),
    decode_context_parallel: int = 1,
    speculative_method: str | None = None,
) -> None:
    """Can this model be served so?

    Args:
        block_size: tokens per block of the compressed caches.
        tensor_parallel: ranks that share heads, output groups and the experts' intermediate width.
        expert_parallel: ranks that share the routed experts; 1 = they are split by width instead.
        pipeline_cuts: the first layer of every pipeline stage but the first.
        decode_context_parallel: ranks that share a request's cache; only 1.
        speculative_method: vLLM's name of the drafting method, None without.

    Raises:
        ValueError: a number that does not fit (setting, value, limit).
        NotImplementedError: a stage would read the cache of a source on an earlier stage (rule 3).
    """
    if _count("block_size", block_size, 1) % 2:
        raise refusal("block_size", block_size, "an even number of tokens: a pair must not straddle two blocks")
    tp = _count("tensor_parallel", tensor_parallel, 1)
    ep = _count("expert_parallel", expert_parallel, 1)
    splits = [("num_attention_heads", tp, "tensor_parallel"), ("o_groups", tp, "tensor_parallel")]
    splits.append(
        ("n_routed_experts", ep, "expert_parallel") if ep > 1 else ("moe_intermediate_size", tp, "tensor_parallel")
    )
    if ep > 1 and speculative_method == "dspark":
        splits.append(("dspark_n_routed_experts", ep, "expert_parallel"))
    for name, ranks, setting in splits:
        if getattr(config, name) % ranks:
            raise refusal(name, getattr(config, name), f"a multiple of {setting}={ranks}")
    shared = config.n_shared_experts * config.moe_intermediate_size
    if shared % tp:
        raise refusal("n_shared_experts * moe_intermediate_size", shared, f"a multiple of tensor_parallel={tp}")
    if _count("decode_context_parallel", decode_context_parallel, 1) > 1:
        raise refusal("decode_context_parallel", decode_context_parallel, "1: a selection spans the whole context")
    _check_pipeline(plan, pipeline_cuts)
    _check_speculation(config, speculative_method, last_stage=max(pipeline_cuts, default=0))


def _check_pipeline(plan: Plan, cuts: Sequence[int]) -> None:
    legal = plan.cut_points
    for cut in cuts:
        if _count("pipeline_cuts", cut, 1) >= len(plan.layers):
            raise refusal("pipeline_cuts", cut, f"< num_hidden_layers={len(plan.layers)}")
        if cut not in legal:
            raise NotImplementedError(
                f"pipeline_cuts={cut!r}: must be one of {legal}, a stage must hold every source that its layers read"
            )
    if not all(a < b for a, b in pairwise(cuts)):
        raise refusal("pipeline_cuts", tuple(cuts), "strictly increasing")


def _check_speculation(config: TextConfig, method: str | None, last_stage: int) -> None:
    if method == "mtp":
        raise refusal("speculative method", method, "dspark: this model has no weights of that kind of draft")
    if method != "dspark":
        return
    targets = config.dspark_target_layer_ids
    if not targets:
        raise refusal("dspark_target_layer_ids", targets, "given with speculative method dspark")
    if targets[0] < last_stage:
        raise refusal("dspark_target_layer_ids", targets, f">= {last_stage}, the first layer of the last stage")


def static_capacity(max_num_batched_tokens: int, max_cudagraph_capture_size: int | None) -> int:
    """Tokens that every buffer sized in advance has to hold: the larger of the two (1.8, findings H1 and H8).

    A captured graph may be padded beyond what the scheduler batches. None or 0: no graphs. ValueError for other values.
    """
    batched = _count("max_num_batched_tokens", max_num_batched_tokens, 1)
    captured = 0 if max_cudagraph_capture_size is None else max_cudagraph_capture_size
    return max(batched, _count("max_cudagraph_capture_size", captured, 0))
