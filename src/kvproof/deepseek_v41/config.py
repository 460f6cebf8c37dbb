"""The model's configuration and every contract on it: section 1 of the specification (tables 1.2 to 1.7).

A field's own contract stands beside the field; contracts between fields stand in the tables below the classes. All are
checked when an object is made, so one that exists is valid. What the fields say together about layers is ``plan``'s.

What the specification leaves open is chosen here: a feature is off when the field that lists its layers is absent or
empty, and its numbers are then 0; JSON ``null`` is the same as absent; a rope type other than ``default`` or YaRN, a
rotated Engram checkpoint, NVFP4 experts, tied embeddings and weight blocks other than 32 x 32 are refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache
from itertools import pairwise
from typing import Annotated, Any, ClassVar, NamedTuple, get_args, get_type_hints

from kvproof.deepseek_v41.primes import primes

MAX_REAL = sys.float_info.max


def refusal(name: str, value: object, limit: str) -> ValueError:
    """The error of every broken contract: one line with name, value and limit."""
    return ValueError(f"{name}={value!r}: must be {limit}")


# --- contracts of one value


@dataclass(frozen=True)
class Rule:
    """What one value must be, in words and as a predicate. ``element``: the value is a list of such elements."""

    limit: str
    accepts: Callable[[Any], bool] = lambda value: isinstance(value, list | tuple)
    canonical: Callable[[Any], Any] = lambda value: value
    element: Rule | None = None

    def read(self, name: str, value: Any) -> Any:
        """``value`` in the type the field has (list → tuple, int → float where a real is meant), or ValueError."""
        if not self.accepts(value):
            raise refusal(name, value, self.limit)
        if self.element is not None:
            return tuple(self.element.read(f"{name}[{i}]", item) for i, item in enumerate(value))
        return self.canonical(value)


def _integer(least: int) -> Rule:
    return Rule(f"an integer >= {least}", lambda value: type(value) is int and value >= least)


def _real(limit: str, holds: Callable[[float], bool]) -> Rule:
    # A NaN fails every comparison, and an integer may be too large for a float.
    return Rule(
        f"a finite number {limit}",
        lambda value: type(value) in (int, float) and abs(value) <= MAX_REAL and holds(value),
        float,
    )


def _only(*values: object) -> Rule:
    return Rule(
        " or ".join(repr(value) for value in values),
        lambda value: any(type(value) is type(legal) and value == legal for legal in values),
    )


def _list(element: Rule) -> Rule:
    return Rule(f"a list, each entry {element.limit}", element=element)


def _absent(reason: str) -> Rule:
    return Rule(f"absent ({reason})", lambda value: False)


Natural = Annotated[int, _integer(0)]
Positive = Annotated[int, _integer(1)]
TokenId = Natural
PositiveReal = Annotated[float, _real("> 0", lambda value: value > 0)]
# theta <= 1 has no falling frequencies, and YaRN divides by its logarithm.
Theta = Annotated[float, _real("> 1", lambda value: value > 1)]
Flag = Annotated[bool, Rule("true or false", lambda value: type(value) is bool)]
Integers = Annotated[tuple[int, ...], _list(_integer(0))]


class Contract(NamedTuple):
    """A contract between fields: the one to blame, its limit (``{c.name}`` is filled in), and the predicate."""

    subject: str
    limit: str
    holds: Callable[[Any], bool]


@cache
def _rules(checked: Any) -> dict[str, tuple[Rule, bool]]:
    """Rule of every annotated field, and whether None is allowed."""
    found = {}
    for name, hint in get_type_hints(checked, include_extras=True).items():
        parts = (hint, *get_args(hint))
        rules = [extra for part in parts for extra in getattr(part, "__metadata__", ()) if isinstance(extra, Rule)]
        if rules:
            found[name] = (rules[0], type(None) in parts)
    return found


class Checked:
    """A frozen dataclass that holds to the rules in its annotations and to its ``contracts``, in this order."""

    prefix: ClassVar[str] = ""

    def __post_init__(self) -> None:
        checked: Any = type(self)
        for name, (rule, optional) in _rules(checked).items():
            value = getattr(self, name)
            if value is not None or not optional:
                object.__setattr__(self, name, rule.read(self.prefix + name, value))
        for subject, limit, holds in self.contracts():
            if not holds(self):
                raise refusal(self.prefix + subject, getattr(self, subject), limit.format(c=self))

    @classmethod
    def contracts(cls) -> Sequence[Contract]:
        return ()


def _given(checked: Any, read: Callable[[str], Any]) -> dict[str, Any]:
    """The annotated fields that ``read`` has a value for; a required one without is None, which its rule refuses."""
    values = {f.name: read(f.name) for f in fields(checked) if f.name in _rules(checked)}
    optional = {f.name for f in fields(checked) if f.default is not MISSING}
    return {name: value for name, value in values.items() if value is not None or name not in optional}


# --- 1.6: rope


@dataclass(frozen=True, kw_only=True)
class RopeScaling(Checked):
    """One set of ``rope_parameters`` as the file has it; the length in positions, betas in rotations over it."""

    prefix: ClassVar[str] = "rope_parameters."

    rope_type: Annotated[str, _only("default", "yarn", "deepseek_yarn")]
    original_max_position_embeddings: Positive | None = None
    factor: Annotated[float, _real(">= 1", lambda value: value >= 1)] = 1.0
    beta_fast: PositiveReal = 32.0
    beta_slow: PositiveReal = 1.0
    # Read and not used: cosines and sines of this model are never scaled.
    attention_factor: PositiveReal | None = None

    @classmethod
    def contracts(cls) -> Sequence[Contract]:
        return (Contract("beta_fast", "> beta_slow={c.beta_slow}", lambda c: c.beta_fast > c.beta_slow),)

    @classmethod
    def of(cls, parameters: object) -> RopeScaling:
        """Read one dict; keys without a meaning here (``rope_theta``, ``mscale``) are ignored."""
        if not isinstance(parameters, Mapping):
            raise refusal("rope_parameters", parameters, "a mapping with rope_type")
        return cls(**_given(cls, parameters.get))


@dataclass(frozen=True)
class RopeParameters:
    """What rotates the layers of one kind; the fields are those of ``ops.rope.Rope`` without its width."""

    theta: float
    factor: float
    original_max_position: int
    beta_fast: float
    beta_slow: float
    scaled: bool


# --- 1.7: quantisation

# The engine renames "fp8" for this model type; the file and a stand-alone reader have the old name.
_QUANT_METHOD = replace(
    _only("none", "fp8", "deepseek_v4_fp8"), canonical=lambda method: "none" if method == "none" else "deepseek_v4_fp8"
)


@dataclass(frozen=True, kw_only=True)
class Quantisation(Checked):
    """How the checkpoint's weights are stored; they are dequantised when loaded.

    ``expert_dtype`` counts only in a quantised checkpoint. ``ignored_layers`` are names of linears stored plainly.
    """

    prefix: ClassVar[str] = "quantization_config."

    quant_method: Annotated[str, _QUANT_METHOD] = "none"
    weight_block_size: Annotated[tuple[int, int], _list(_integer(1))] | None = None
    scale_fmt: Annotated[str, _only("ue8m0")] = "ue8m0"
    activation_scheme: Annotated[str, _only("dynamic")] = "dynamic"
    expert_dtype: Annotated[str, _only("fp4", "fp8")] = "fp4"
    ignored_layers: Annotated[tuple[str, ...], _list(Rule("a name", lambda value: type(value) is str))] = ()
    moe_quant_algo: Annotated[None, _absent("NVFP4 experts are not read")] = None

    @property
    def quantised(self) -> bool:
        return self.quant_method != "none"

    @classmethod
    def contracts(cls) -> Sequence[Contract]:
        return (
            Contract(
                "weight_block_size",
                "[32, 32] with quant_method={c.quant_method!r}",
                lambda c: c.weight_block_size == (32, 32) or not c.quantised,
            ),
        )

    @classmethod
    def of(cls, mapping: Mapping[str, Any] | None, expert_dtype: object = None) -> Quantisation:
        """Read a ``quantization_config``; None or empty: nothing is quantised. Keys without a contract are ignored.

        ``expert_dtype``: the value outside of the mapping, which comes first.
        """
        if not isinstance(mapping, Mapping | None):
            raise refusal("quantization_config", mapping, "a mapping")
        given = _given(cls, (mapping or {}).get)
        if expert_dtype is not None:
            given["expert_dtype"] = expert_dtype
        if mapping:
            given.setdefault("quant_method", None)
            if not given.get("ignored_layers") and mapping.get("modules_to_not_convert") is not None:
                given["ignored_layers"] = mapping["modules_to_not_convert"]
        return cls(**given)


# --- 1.5: vision


_VISION_NAMES = {
    "vision_n_layers": "num_hidden_layers",
    "vision_dim": "hidden_size",
    "vision_n_heads": "num_attention_heads",
    "vision_inter_dim": "intermediate_size",
    "vision_patch_size": "patch_size",
    "vision_rope_theta": "rope_theta",
    "vision_downsample_ratio": "downsample_ratio",
    "vision_max_n_token": "max_image_tokens",
    "vision_min_pixels": "min_pixels",
    "vision_max_wh_ratio": "max_wh_ratio",
}


@dataclass(frozen=True, kw_only=True)
class VisionConfig(Checked):
    """The image tower under its flat names. The text model needs only to know that there is one."""

    vision_n_layers: Positive
    vision_dim: Positive = 1024
    vision_n_heads: Positive = 16
    vision_inter_dim: Positive = 2816
    vision_patch_size: Positive = 14
    vision_rope_theta: Theta = 10000.0
    vision_downsample_ratio: Positive = 3
    # A span is at least START, one IMAGE, NEWLINE and END.
    vision_max_n_token: Annotated[int, _integer(4)] = 1024
    vision_min_pixels: Natural = 295936
    vision_max_wh_ratio: PositiveReal | None = None

    @classmethod
    def contracts(cls) -> Sequence[Contract]:
        return (
            Contract(
                "vision_dim",
                "a multiple of 4 * vision_n_heads={c.vision_n_heads} (two axes of rotated pairs)",
                lambda c: c.vision_dim % (4 * c.vision_n_heads) == 0,
            ),
        )


# --- 1.2 to 1.4: the text model


@dataclass(frozen=True, kw_only=True)
class TextConfig(Checked):
    """Every number of the text model, under the flat names of the released file; made by :meth:`from_hf`.

    Counts and widths are in the unit their name says; token ids are raw ids. A feature is off when ``engram_layer_ids``
    or ``dspark_target_layer_ids`` is empty, or ``candidate_source_layer_id`` or ``vision`` is None; the counts that
    belong to it are then whatever the file says, or 0.
    """

    num_hidden_layers: Positive
    hidden_size: Positive
    vocab_size: Positive
    num_attention_heads: Positive
    head_dim: Positive
    qk_rope_head_dim: Positive
    q_lora_rank: Positive
    o_groups: Positive
    o_lora_rank: Positive
    sliding_window: Positive
    compress_ratios: Annotated[tuple[int, ...], _list(_only(0, 1, 2))]
    index_n_heads: Positive
    index_head_dim: Positive
    index_topk: Positive
    rms_norm_eps: PositiveReal
    n_routed_experts: Positive
    num_experts_per_tok: Positive
    n_shared_experts: Natural
    moe_intermediate_size: Positive
    scoring_func: Annotated[str, _only("sqrtsoftplus")]
    norm_topk_prob: Flag
    topk_method: Annotated[str, _only("noaux_tc")]
    routed_scaling_factor: PositiveReal
    hc_mult: Positive
    hc_eps: PositiveReal
    hc_sinkhorn_iters: Positive
    max_position_embeddings: Positive
    rope_theta: Theta
    compress_rope_theta: Theta

    num_key_value_heads: Annotated[int, _only(1)] = 1
    hidden_act: Annotated[str, _only("silu")] = "silu"
    swiglu_limit: PositiveReal | None = None
    n_group: Annotated[int, _only(1)] = 1
    topk_group: Annotated[int, _only(1)] = 1
    num_hash_layers: Annotated[int, _only(0)] = 0
    tie_word_embeddings: Annotated[bool, _only(False)] = False

    kv_source_layer_ids: Integers = ()
    index_source_layer_ids: Integers = ()
    candidate_source_layer_id: Natural | None = None
    candidate_topk_blocks: Natural = 0
    candidate_block_size: Natural = 0

    bos_token_id: TokenId | None = None
    eos_token_id: Integers = ()
    pad_token_id: TokenId | None = None
    image_token_id: TokenId | None = None

    engram_layer_ids: Integers = ()
    engram_max_ngram_size: Natural = 0
    engram_n_heads: Natural = 0
    engram_head_dim: Natural = 0
    engram_vocab_size: Natural = 0
    engram_num_embeddings: Annotated[tuple[int, ...], _list(_integer(1))] = ()
    engram_compressed_vocab_size: Natural = 0
    engram_pad_token_id: TokenId | None = None
    engram_rotation_config: Annotated[None, _absent("rotated Engram checkpoints are not read")] = None

    num_nextn_predict_layers: Natural = 0
    dspark_block_size: Natural = 0
    dspark_target_layer_ids: Integers = ()
    dspark_n_routed_experts: Natural = 0
    dspark_num_experts_per_tok: Natural = 0
    dspark_markov_rank: Natural = 0
    dspark_noise_token_id: TokenId | None = None
    dspark_draft_topk: Positive | None = None
    draft_vocab_size: Positive | None = None
    enable_confidence_head: Flag = True
    sample_from_anchor: Flag = True

    rope_main: RopeScaling
    rope_compress: RopeScaling
    quantisation: Quantisation = Quantisation()
    vision: VisionConfig | None = None

    @classmethod
    def contracts(cls) -> Sequence[Contract]:
        return _TEXT_CONTRACTS

    @classmethod
    def from_hf(cls, hf: object) -> TextConfig:
        """Read a configuration; ValueError (field, value, limit) for the first contract it breaks.

        ``hf``: an object with flat attributes (vLLM's ``DeepseekV41Config``), a mapping with the same names, or the
        released file's mapping with ``text_config`` and ``vision_config``. Fields not named here are ignored.
        """
        read = _reader(hf)
        given = _given(cls, read)
        if _is_integer(given.get("candidate_source_layer_id"), -1):
            del given["candidate_source_layer_id"]
        if "eos_token_id" in given and not isinstance(given["eos_token_id"], list | tuple):
            given["eos_token_id"] = (given["eos_token_id"],)
        draft_layers = read("n_mtp_layers")
        if draft_layers is not None:
            given["num_nextn_predict_layers"] = draft_layers
        if given.get("dspark_target_layer_ids"):
            given.setdefault("num_nextn_predict_layers", 3)
            if _is_integer(given.get("dspark_n_routed_experts", 0), 0):
                given["dspark_n_routed_experts"] = given["n_routed_experts"]

        rope = read("rope_scaling")
        if rope is None:
            rope = read("rope_parameters")
        main = compress = rope
        if isinstance(rope, Mapping) and ("main" in rope or "compress" in rope):
            main, compress = rope.get("main"), rope.get("compress")

        vision = _given(VisionConfig, read)
        has_tower = vision["vision_n_layers"] is not None and not _is_integer(vision["vision_n_layers"], 0)
        return cls(
            **given,
            rope_main=RopeScaling.of(main),
            rope_compress=RopeScaling.of(compress),
            quantisation=Quantisation.of(read("quantization_config"), read("expert_dtype")),
            vision=VisionConfig(**vision) if has_tower else None,
        )

    @property
    def engram_columns(self) -> int:
        """Hash functions, so table rows per token, of one Engram layer: one per head and n-gram order from 2 up."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads

    @property
    def engram_table_rows(self) -> list[int]:
        """Rows of each Engram layer's table that its hashes reach: the sum of its primes (5.3)."""
        orders = self.engram_max_ngram_size - 1
        buckets = primes(self.engram_vocab_size, len(self.engram_layer_ids), orders, self.engram_n_heads)
        return [sum(map(sum, layer)) for layer in buckets]

    def rope(self, ratio: int) -> RopeParameters:
        """The rotation of layers of this compression ratio: plain for 0, YaRN (unless the type is default) above."""
        if ratio == 0:
            return RopeParameters(self.rope_theta, 1.0, self.max_position_embeddings, 32.0, 1.0, scaled=False)
        scaling = self.rope_compress
        return RopeParameters(
            self.compress_rope_theta,
            scaling.factor,
            scaling.original_max_position_embeddings or self.max_position_embeddings,
            scaling.beta_fast,
            scaling.beta_slow,
            scaled=scaling.rope_type != "default",
        )


def _is_integer(value: object, expected: int) -> bool:
    return type(value) is int and value == expected


def _reader(hf: object) -> Callable[[str], Any]:
    """``read(flat name)``: the value in an object, a flat mapping or the released nested one, None when absent."""
    if not isinstance(hf, Mapping):
        return lambda name: getattr(hf, name, None)
    flat = dict(hf)
    for part in ("text_config", "vision_config"):
        if flat.setdefault(part, {}) is None:
            flat[part] = {}
        if not isinstance(flat[part], Mapping):
            raise refusal(part, flat[part], "a mapping")
    text, vision = flat.pop("text_config"), flat.pop("vision_config")
    # As in vLLM's class: what stands outside overrides text_config, and rope_scaling overrides rope_parameters.
    return ({**text} | {flat_name: vision.get(name) for flat_name, name in _VISION_NAMES.items()} | flat).get


# --- contracts between fields of the text model


def _sorted_layers(name: str, past_the_last: int = 0) -> Contract:
    """A list of layers of the backbone; ``past_the_last`` 1: the end of the last layer counts as one."""

    def holds(c: TextConfig) -> bool:
        ids = getattr(c, name)
        ascends = all(a < b for a, b in pairwise(ids))
        return ascends and all(i < c.num_hidden_layers + past_the_last for i in ids)

    bound = "<=" if past_the_last else "<"
    return Contract(name, f"strictly increasing and {bound} num_hidden_layers={{c.num_hidden_layers}}", holds)


def _in_vocabulary(name: str) -> Contract:
    def holds(c: TextConfig) -> bool:
        ids = getattr(c, name)
        return ids is None or all(i < c.vocab_size for i in (ids if isinstance(ids, tuple) else (ids,)))

    return Contract(name, "< vocab_size={c.vocab_size}", holds)


def _needed(name: str, least: int, feature: str) -> Contract:
    """What a feature cannot do without: a count of at least ``least`` (an absent one reads 0), or with 0 any id."""

    def holds(c: TextConfig) -> bool:
        value = getattr(c, name)
        return getattr(c, feature) in (None, ()) or (value is not None and value >= least)

    return Contract(name, f"{f'>= {least} (0 = absent)' if least else 'given'} when {feature} is set", holds)


_TEXT_CONTRACTS = (
    Contract(
        "head_dim",
        "even and > qk_rope_head_dim={c.qk_rope_head_dim}",
        lambda c: c.head_dim % 2 == 0 and c.head_dim > c.qk_rope_head_dim,
    ),
    Contract(
        "qk_rope_head_dim",
        "even and <= index_head_dim={c.index_head_dim}",
        lambda c: c.qk_rope_head_dim % 2 == 0 and c.qk_rope_head_dim <= c.index_head_dim,
    ),
    Contract(
        "o_groups",
        "a divisor of num_attention_heads={c.num_attention_heads}",
        lambda c: c.num_attention_heads % c.o_groups == 0,
    ),
    Contract(
        "num_experts_per_tok",
        "<= n_routed_experts={c.n_routed_experts}",
        lambda c: c.num_experts_per_tok <= c.n_routed_experts,
    ),
    Contract(
        "hidden_size",
        "a multiple of 32 in a quantised checkpoint",
        lambda c: c.hidden_size % 32 == 0 or not c.quantisation.quantised,
    ),
    Contract(  # the scale of an MXFP4 weight covers 32 of w2's inputs
        "moe_intermediate_size",
        "a multiple of 32 with quantised fp4 experts",
        lambda c: (
            c.moe_intermediate_size % 32 == 0 or not c.quantisation.quantised or c.quantisation.expert_dtype != "fp4"
        ),
    ),
    # section 2.4, rules 18, 17, 10, 6
    Contract(
        "compress_ratios",
        "at least num_hidden_layers={c.num_hidden_layers} entries",
        lambda c: len(c.compress_ratios) >= c.num_hidden_layers,
    ),
    Contract(
        "compress_ratios",
        "0 from entry num_hidden_layers={c.num_hidden_layers} on (draft layers)",
        lambda c: not any(c.compress_ratios[c.num_hidden_layers :]),
    ),
    _sorted_layers("kv_source_layer_ids"),
    _sorted_layers("index_source_layer_ids"),
    _needed("candidate_topk_blocks", 1, "candidate_source_layer_id"),
    _needed("candidate_block_size", 1, "candidate_source_layer_id"),
    # token ids
    *map(_in_vocabulary, ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id")),
    _needed("image_token_id", 0, "vision"),
    # Engram; rules 19 and the table's size
    _sorted_layers("engram_layer_ids"),
    _needed("engram_max_ngram_size", 2, "engram_layer_ids"),
    _needed("engram_n_heads", 1, "engram_layer_ids"),
    _needed("engram_head_dim", 1, "engram_layer_ids"),
    Contract("engram_head_dim", "a multiple of 32", lambda c: c.engram_head_dim % 32 == 0),
    _needed("engram_vocab_size", 1, "engram_layer_ids"),
    _needed("engram_compressed_vocab_size", 1, "engram_layer_ids"),
    Contract(
        "engram_compressed_vocab_size",
        "<= vocab_size={c.vocab_size}",
        lambda c: c.engram_compressed_vocab_size <= c.vocab_size,
    ),
    _needed("engram_pad_token_id", 0, "engram_layer_ids"),
    _in_vocabulary("engram_pad_token_id"),
    Contract(
        "engram_pad_token_id",
        "another token than image_token_id={c.image_token_id}",
        lambda c: c.engram_pad_token_id is None or c.engram_pad_token_id != c.image_token_id,
    ),
    Contract(
        "engram_num_embeddings",
        "one entry for each of engram_layer_ids={c.engram_layer_ids}",
        lambda c: len(c.engram_num_embeddings) == len(c.engram_layer_ids),
    ),
    Contract(  # cheap, and keeps the search for primes short
        "engram_num_embeddings",
        "at least {c.engram_columns} columns of engram_vocab_size={c.engram_vocab_size} rows",
        lambda c: all(n >= c.engram_columns * c.engram_vocab_size for n in c.engram_num_embeddings),
    ),
    Contract(
        "engram_num_embeddings",
        "at least {c.engram_table_rows} rows (the sums of the layers' primes)",
        lambda c: (
            not c.engram_layer_ids
            or all(n >= rows for n, rows in zip(c.engram_num_embeddings, c.engram_table_rows, strict=True))
        ),
    ),
    # DSpark
    _sorted_layers("dspark_target_layer_ids", past_the_last=1),
    *(
        _needed(name, 1, "dspark_target_layer_ids")
        for name in (
            "num_nextn_predict_layers",
            "dspark_block_size",
            "dspark_num_experts_per_tok",
            "dspark_markov_rank",
        )
    ),
    Contract(
        "dspark_num_experts_per_tok",
        "<= dspark_n_routed_experts={c.dspark_n_routed_experts}",
        lambda c: not c.dspark_target_layer_ids or c.dspark_num_experts_per_tok <= c.dspark_n_routed_experts,
    ),
    _needed("dspark_noise_token_id", 0, "dspark_target_layer_ids"),
    _in_vocabulary("dspark_noise_token_id"),
    Contract(
        "draft_vocab_size",
        "absent or vocab_size={c.vocab_size}",
        lambda c: c.draft_vocab_size in (None, c.vocab_size),
    ),
)
