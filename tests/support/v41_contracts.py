"""Tries the vLLM side of ``kvproof.deepseek_v41`` in one process with vLLM: loading, specs, metadata, options, plugin.

    python v41_contracts.py PART DIRECTORY RESULT.json

PART is ``loading`` or ``vllm``; DIRECTORY is scratch space. Every function marked with a part is one experiment; what
it returns is its result, and one that ends otherwise leaves ``{"crash": traceback}``. No engine is started: the model
is built under an engine's configuration, on the one rank of a real process group.

``run`` is the pytest side and imports nothing of vLLM.
"""

from __future__ import annotations

import copy
import json
import os
import random
import re
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvproof.zoo import deepseek_v41 as zoo_v41

SEED = 41
TIMEOUT_S = 600
ARCHITECTURE = "DeepseekV41ForCausalLM"
PARTS: dict[str, dict[str, Callable[[], dict[str, Any]]]] = {"loading": {}, "vllm": {}}
HERE = Path()
"""Scratch space of the child."""


def run(part: str, directory: Path) -> Callable[[str], dict[str, Any]]:
    """Run one part in a child; the function returned gives an experiment's result by name."""
    result = directory / f"{part}.json"
    child = subprocess.run(
        [sys.executable, str(Path(__file__)), part, str(directory), str(result)],
        env={
            **{key: value for key, value in os.environ.items() if key != "KVPROOF_DEEPSEEK_V41"},
            "VLLM_PLUGINS": "kvproof_deepseek_v41",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if child.returncode:
        raise RuntimeError(f"the child ended with {child.returncode}: {child.stderr[-4000:]}")
    found = json.loads(result.read_text())

    def tried(name: str) -> dict[str, Any]:
        assert "crash" not in found[name], found[name]["crash"]
        return dict(found[name])

    return tried


def experiment(part: str) -> Callable[[Callable[[], dict[str, Any]]], Callable[[], dict[str, Any]]]:
    def enter(function: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
        PARTS[part][function.__name__] = function
        return function

    return enter


def refused(action: Callable[[], object]) -> dict[str, str]:
    """How an action ended: the type of its error, "" for none, and its text."""
    try:
        action()
    except Exception as error:
        return {"type": type(error).__name__, "text": str(error)}
    return {"type": "", "text": ""}


# --- the ground: checkpoints, configurations, models


@cache
def checkpoint(quantised: bool) -> Path:
    return zoo_v41.make("deepseek-v41-tiny", HERE / f"tiny-{quantised}", quantized=quantised, seed=SEED)


@cache
def text_config() -> dict[str, Any]:
    content: dict[str, Any] = json.loads((checkpoint(False) / "config.json").read_text())
    return dict(content["text_config"])


def variant(name: str, quantised: bool, **quantization: Any) -> Path:
    """The configuration of a checkpoint, without its weights, with other entries of ``quantization_config``."""
    directory = HERE / name
    directory.mkdir()
    content = json.loads((checkpoint(quantised) / "config.json").read_text())
    content["quantization_config"] |= quantization
    (directory / "config.json").write_text(json.dumps(content))
    return directory


def engine_config(directory: Path, **options: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    limits = {"block_size": 16, "max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    args = {"skip_tokenizer_init": True, "enforce_eager": True, **limits, **options}
    return EngineArgs(model=str(directory), **args).create_engine_config()


@cache
def plain_config() -> Any:
    return engine_config(checkpoint(False))


@cache
def quantised_config() -> Any:
    return engine_config(checkpoint(True))


def altered(config: Any, **changes: Any) -> Any:
    """A copy of a configuration with other values at ``parent__child`` paths, unchecked by vLLM."""
    changed = copy.copy(config)
    for path, value in changes.items():
        *parents, name = path.split("__")
        owner = changed
        for parent in parents:
            part = copy.deepcopy(getattr(owner, parent)) if parent == "hf_config" else copy.copy(getattr(owner, parent))
            object.__setattr__(owner, parent, part)
            owner = part
        object.__setattr__(owner, name, value)
    return changed


@cache
def distributed() -> None:
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    with set_current_vllm_config(plain_config()):
        init_distributed_environment(1, 0, f"file://{HERE}/rendezvous", 0, "gloo")
        initialize_model_parallel(1, 1)


@contextmanager
def pretended_rank(rank: int, ranks: int) -> Iterator[None]:
    """Every layer that asks is told that it is on this tensor-parallel rank. Nothing may be reduced meanwhile."""
    from vllm.distributed import get_tp_group

    group = get_tp_group()
    group.rank_in_group, group.world_size = rank, ranks
    try:
        yield
    finally:
        group.rank_in_group, group.world_size = 0, 1


def build(config: Any, *, keep_names: bool = False) -> Any:
    """The model of a configuration with every parameter NaN."""
    from vllm.config import set_current_vllm_config
    from vllm.utils.torch_utils import set_default_torch_dtype

    from kvproof.deepseek_v41.model import DeepseekV41ForCausalLM

    distributed()
    if not keep_names:
        config.compilation_config.static_forward_context.clear()
    with set_current_vllm_config(config), set_default_torch_dtype(config.model_config.dtype):
        model = DeepseekV41ForCausalLM(vllm_config=config)
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    return model


@cache
def plain_model() -> Any:
    return build(plain_config())


@cache
def quantised_model() -> Any:
    return build(quantised_config())


@cache
def tensors(quantised: bool) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    files = sorted(checkpoint(quantised).glob("*.safetensors"))
    assert len(files) > 1
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def loaded(model: Any, weights: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """The parameters after loading, NaN where nothing was loaded."""
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    names = model.load_weights(iter(list(weights)))
    assert names == {name for name, _ in model.named_parameters()}
    return {name: parameter.data.clone() for name, parameter in model.named_parameters()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """Names of parameters that are not bit for bit alike; a NaN is unlike everything."""
    return sorted(n for n in one.keys() | other.keys() if not torch.equal(one[n], other[n]))


def by_tensor_name(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """Parameters under the names of the checkpoint's tensors: stacks of experts taken apart."""
    found = {}
    for name, value in parameters.items():
        if match := re.fullmatch(r"(layers\.\d+\.ffn\.)(experts|shared_experts)\.(w13|w2)", name):
            prefix, kind, stack = match.groups()
            for number, expert in enumerate(value):
                owner = f"{prefix}experts.{number}" if kind == "experts" else f"{prefix}shared_experts"
                if stack == "w2":
                    found[f"{owner}.w2.weight"] = expert
                else:
                    half = len(expert) // 2
                    found[f"{owner}.w1.weight"], found[f"{owner}.w3.weight"] = expert[:half], expert[half:]
        else:
            found[name] = value
    return found


def naive_e4m3(code: int) -> float:
    sign, exponent, mantissa = -1.0 if code & 128 else 1.0, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


E4M3 = np.array([naive_e4m3(code) for code in range(256)])
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def naively_dequantised(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every weight with a scale as fp32, computed in float64 from its bytes (specification, 9.3)."""
    found = {}
    for name, tensor in weights.items():
        scale = weights.get(name.removesuffix(".weight") + ".scale")
        if name.endswith(".scale"):
            continue
        if scale is None:
            found[name] = tensor
            continue
        codes = tensor.view(torch.uint8).numpy()
        if scale.dtype == torch.float32:
            factors = scale.numpy().astype(np.float64)
        else:
            factors = 2.0 ** (scale.view(torch.uint8).numpy().astype(np.float64) - 127)
        if tensor.dtype == torch.float8_e4m3fn:
            rows, columns = codes.shape
            values = E4M3[codes] * factors.repeat(32, 0)[:rows].repeat(32, 1)[:, :columns]
        else:
            values = np.empty((len(codes), 2 * codes.shape[1]))
            values[:, 0::2], values[:, 1::2] = E2M1[codes & 15], E2M1[codes >> 4]
            values *= factors.repeat(32, 1)
        found[name] = torch.from_numpy(values).float()
    return found


# --- loading


@experiment("loading")
def names() -> dict[str, Any]:
    ours = set(by_tensor_name(dict(plain_model().named_parameters())))
    table = {tensor.name for tensor in zoo_v41.tensors(text_config())}
    return {"count": len(ours), "only_ours": sorted(ours - table), "only_table": sorted(table - ours)}


@experiment("loading")
def complete() -> dict[str, Any]:
    found = {}
    for key, model, weights in (
        ("plain", plain_model(), tensors(False)),
        ("quantised", quantised_model(), tensors(True)),
    ):
        parameters = loaded(model, weights.items())
        expected = naively_dequantised(weights)
        taken_apart = by_tensor_name(parameters)
        found[key] = {
            "wrong": [n for n, value in taken_apart.items() if not torch.equal(value, expected[n].to(value.dtype))],
            "count": len(taken_apart),
            "nan": [name for name, value in parameters.items() if value.isnan().any()],
            "dtypes": sorted({str(value.dtype) for value in parameters.values()}),
        }
    as_plain = loaded(plain_model(), naively_dequantised(tensors(True)).items())
    found["differ"] = same(loaded(quantised_model(), tensors(True).items()), as_plain)
    found["differ_from_unquantised"] = len(same(as_plain, loaded(plain_model(), tensors(False).items())))
    return found


@experiment("loading")
def shuffled() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, model, weights in (
        ("plain", plain_model(), tensors(False)),
        ("quantised", quantised_model(), tensors(True)),
    ):
        expected = loaded(model, weights.items())
        for seed in range(5):
            mixed = list(weights.items())
            random.Random(seed).shuffle(mixed)
            found[f"{key}, seed {seed}"] = same(loaded(model, mixed), expected)
        found[f"{key}, backwards"] = same(loaded(model, reversed(weights.items())), expected)
    return found


@experiment("loading")
def elsewhere() -> dict[str, Any]:
    more = {
        "mtp.0.attn.wq_a.weight": torch.zeros(1).to(torch.float8_e4m3fn),
        "mtp.2.markov_head.embed.weight": torch.zeros(3),
        "vision.patch_embed.weight": torch.zeros(2),
        "aligner.w1.bias": torch.zeros(2),
        "image_start": torch.zeros(2),
        "image_newline": torch.zeros(2),
        "image_end": torch.zeros(2),
    }
    expected = loaded(plain_model(), tensors(False).items())
    return {
        "differ": same(loaded(plain_model(), (more | tensors(False) | more).items()), expected),
        "skipped": len(more),
    }


EXPERT = re.compile(r"layers\.\d+\.ffn\.experts\.\d+\.w[123]\.weight")


def fp8_experts(scale_dtype: torch.dtype) -> dict[str, Tensor]:
    """The quantised checkpoint with its routed experts in FP8: values and scales drawn anew."""
    from kvproof.deepseek_v41.ops.formats import quantise_fp8_block

    generator = torch.Generator().manual_seed(SEED)
    found = dict(tensors(True))
    for name in [n for n in found if EXPERT.fullmatch(n)]:
        values = torch.randn(len(found[name]), 2 * found[name].shape[1], generator=generator)
        weight, scale = quantise_fp8_block(values)
        if scale_dtype == torch.float32:  # not a power of two
            scale = torch.rand(scale.shape, generator=generator) + 0.1
        found |= {name: weight, name.removesuffix("weight") + "scale": scale}
    return found


@experiment("loading")
def fp8() -> dict[str, Any]:
    config = engine_config(variant("fp8", True, expert_dtype="fp8"))
    model, found = build(config), {"expert_dtype": build(config).config.quantisation.expert_dtype}
    for dtype in (torch.float32, torch.uint8):
        weights = fp8_experts(dtype)
        expected = loaded(plain_model(), naively_dequantised(weights).items())
        found[str(dtype)] = same(loaded(model, weights.items()), expected)
    return found


IGNORED = ("layers.0.attn.wq_a", "layers.1.attn.indexer.wq_b", "layers.2.ffn.experts.3.w2", "layers.4.attn.wo_a")


@experiment("loading")
def ignored_layers() -> dict[str, Any]:
    """Linears that a quantised checkpoint stores plainly."""
    config = engine_config(variant("ignored", True, ignored_layers=list(IGNORED)))
    weights = dict(tensors(True))
    for name in IGNORED:
        del weights[f"{name}.scale"]
        weights[f"{name}.weight"] = tensors(False)[f"{name}.weight"]
    expected = loaded(plain_model(), naively_dequantised(weights).items())
    model = build(config)
    return {
        "known": list(model.config.quantisation.ignored_layers),
        "differ": same(loaded(model, weights.items()), expected),
    }


ATTN = "layers.1.attn"
FFN = "layers.0.ffn"
SHAPES = {
    f"{ATTN}.wq_a.weight": [(33, 64), (32, 65), (32, 1), (1, 64), (31, 64), (32,), (32, 64, 1)],
    f"{ATTN}.wq_b.weight": [(129, 32), (256, 32), (127, 32), (128, 1), (1, 32)],
    f"{ATTN}.wo_a.weight": [(33, 64), (64, 64), (31, 64), (32, 1), (1, 64)],
    f"{ATTN}.wo_b.weight": [(64, 33), (64, 64), (64, 31), (1, 32), (64, 1), (65, 32)],
    f"{ATTN}.attn_sink": [(5,), (3,), (1,), (8,), (4, 1), ()],
    f"{ATTN}.q_norm.weight": [(33,), (1,), ()],
    f"{ATTN}.compressor.wgate.weight": [(32, 63), (1, 64)],
    f"{ATTN}.indexer.wk.weight": [(17, 32), (16, 1)],
    f"{ATTN}.indexer.weights_proj.weight": [(3, 64), (1, 64)],
    "layers.0.hc_attn_fn": [(24, 255), (1, 256), (23, 256)],
    "layers.0.hc_ffn_scale": [(1,), (4,)],
    f"{FFN}.gate.weight": [(9, 64), (7, 64), (1, 64)],
    f"{FFN}.gate.bias": [(9,), (1,)],
    f"{FFN}.experts.7.w1.weight": [(33, 64), (1, 64), (32, 1), (64, 64), (32,), ()],
    f"{FFN}.experts.7.w2.weight": [(64, 33), (64, 1), (1, 32), (64,), (64, 32, 1)],
    f"{FFN}.shared_experts.w3.weight": [(33, 64), (32, 65)],
    "norm.weight": [(65,), (1,)],
    "embed.weight": [(321, 64), (319, 64), (320, 1), (1, 64), (384, 64)],
    "head.weight": [(321, 64), (319, 64), (320, 1), (320, 65)],
}
"""Tensors of each kind of parameter in shapes they do not have: too large, too small, and such that broadcast."""


@experiment("loading")
def shapes() -> dict[str, Any]:
    """Each wrong shape on one rank; and on two, where at least one of them has to refuse it."""
    plain, found = tensors(False), {}
    models = [plain_model()]
    for rank in range(2):
        with pretended_rank(rank, 2):
            models.append(build(altered(plain_config(), parallel_config__tensor_parallel_size=2)))
    for name, wrong in SHAPES.items():
        for shape in wrong:
            weights = plain | {name: torch.ones(shape)}
            found[f"{name} {list(shape)}"] = [refused(lambda m=m, w=weights: m.load_weights(w.items())) for m in models]
    return found


@experiment("loading")
def dtypes() -> dict[str, Any]:
    plain, found = tensors(False), {}
    for name in (
        f"{ATTN}.wq_a.weight",
        f"{ATTN}.attn_sink",
        f"{FFN}.gate.bias",
        f"{FFN}.experts.2.w3.weight",
        "embed.weight",
    ):
        for dtype in (
            torch.int32,
            torch.int64,
            torch.float64,
            torch.complex64,
            torch.uint8,
            torch.float8_e4m3fn,
            torch.bool,
        ):
            weights = plain | {name: torch.ones(plain[name].shape).to(dtype)}
            found[f"{name} {dtype}"] = refused(lambda weights=weights: plain_model().load_weights(weights.items()))
    return found


@experiment("loading")
def widened() -> dict[str, Any]:
    """fp32, bf16 and fp16 tensors fit every parameter."""
    found = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        weights = {name: tensor.to(dtype) for name, tensor in tensors(False).items()}
        apart = by_tensor_name(loaded(plain_model(), weights.items()))
        found[str(dtype)] = [
            name for name, value in apart.items() if not torch.equal(value, weights[name].to(value.dtype))
        ]
    return found


@experiment("loading")
def refusals() -> dict[str, Any]:
    plain, quantised = tensors(False), tensors(True)
    linear, expert = f"{ATTN}.wq_b", f"{FFN}.experts.5.w1"

    def without(weights: dict[str, Tensor], *gone: str) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in weights.items() if name not in gone}

    def nan_scale(name: str) -> dict[str, Tensor]:
        scale = quantised[f"{name}.scale"].view(torch.uint8).clone()
        scale[-1, -1] = 255
        return quantised | {f"{name}.scale": scale.view(torch.float8_e8m0fnu)}

    def scaled(name: str, scale: Tensor) -> dict[str, Tensor]:
        return quantised | {f"{name}.scale": scale}

    infinite = torch.ones(quantised[f"{linear}.scale"].shape)
    infinite[0, 0] = torch.inf
    cases = {
        "missing": (plain_model, without(plain, f"{ATTN}.attn_sink", f"{expert}.weight")),
        "missing many": (plain_model, without(plain, *[n for n in plain if n.startswith("layers.6.ffn.experts")])),
        "empty": (plain_model, {}),
        "unexpected": (plain_model, plain | {"layers.7.attn.wq_a.weight": torch.ones(32, 64), "stray": torch.ones(1)}),
        "both": (plain_model, without(plain, "norm.weight") | {"final_norm.weight": torch.ones(64)}),
        "key side of a query-only indexer": (
            plain_model,
            plain | {"layers.5.attn.indexer.wk.weight": torch.ones(16, 32)},
        ),
        "gate of a ratio-1 compressor": (
            plain_model,
            plain | {"layers.3.attn.compressor.wgate.weight": torch.ones(32, 64)},
        ),
        "bias of images": (plain_model, plain | {f"{FFN}.gate.bias_vl": torch.ones(8)}),
        "expert beyond": (plain_model, plain | {f"{FFN}.experts.8.w1.weight": torch.ones(32, 64)}),
        "expert spelled otherwise": (plain_model, plain | {f"{FFN}.experts.01.w1.weight": torch.ones(32, 64)}),
        "expert beyond, quantised": (
            quantised_model,
            quantised | {f"{FFN}.experts.8.{k}": quantised[f"{FFN}.experts.0.{k}"] for k in ("w2.weight", "w2.scale")},
        ),
        "quantised pair nobody takes": (
            quantised_model,
            quantised | {"stray.weight": quantised[f"{linear}.weight"], "stray.scale": quantised[f"{linear}.scale"]},
        ),
        "scale without matrix": (quantised_model, without(quantised, f"{linear}.weight")),
        "matrix without scale": (quantised_model, without(quantised, f"{linear}.scale")),
        "expert without scale": (quantised_model, without(quantised, f"{expert}.scale")),
        "scale beside a plain matrix": (quantised_model, quantised | {f"{linear}.weight": plain[f"{linear}.weight"]}),
        "scale in a plain checkpoint": (plain_model, plain | {f"{linear}.scale": quantised[f"{linear}.scale"]}),
        "quantised in a plain configuration": (plain_model, quantised),
        "fp4 in a plain configuration": (
            plain_model,
            plain | {f"{expert}.{k}": quantised[f"{expert}.{k}"] for k in ("weight", "scale")},
        ),
        "nan scale": (quantised_model, nan_scale(linear)),
        "nan scale of an expert": (quantised_model, nan_scale(expert)),
        "infinite fp32 scale": (quantised_model, scaled(linear, infinite)),
        "scale too wide": (quantised_model, scaled(linear, torch.full((4, 2), 127, dtype=torch.uint8))),
        "scale too short": (quantised_model, scaled(expert, torch.full((32, 1), 127, dtype=torch.uint8))),
        "scale of integers": (quantised_model, scaled(linear, torch.ones(4, 1, dtype=torch.int64))),
        "fp32 scale of fp4": (quantised_model, scaled(expert, torch.ones(32, 2))),
        "int8 scale of fp4": (quantised_model, scaled(expert, torch.ones(32, 2, dtype=torch.int8))),
        "e5m2 linear": (
            quantised_model,
            quantised | {f"{linear}.weight": quantised[f"{linear}.weight"].view(torch.float8_e5m2)},
        ),
        "e5m2 expert": (
            quantised_model,
            quantised | {f"{expert}.weight": quantised[f"{expert}.weight"].view(torch.float8_e5m2)},
        ),
        "quantised in another shape": (
            quantised_model,
            quantised
            | {f"{expert}.weight": torch.zeros(32, 64, dtype=torch.uint8)}
            | {f"{expert}.scale": torch.zeros(32, 4, dtype=torch.uint8)},
        ),
    }
    found = {case: refused(lambda m=m, w=w: m().load_weights(w.items())) for case, (m, w) in cases.items()}
    for case, model, weights, again in (
        ("plain twice", plain_model, plain, f"{linear}.weight"),
        ("matrix twice", quantised_model, quantised, f"{linear}.weight"),
        ("scale twice", quantised_model, quantised, f"{expert}.scale"),
    ):
        whole, more = list(weights.items()), [(again, weights[again])]
        found[f"{case}, before"] = refused(lambda m=model, w=more + whole: m().load_weights(w))
        found[f"{case}, after"] = refused(lambda m=model, w=whole + more: m().load_weights(w))
    return found


def split_dimension(name: str, expert_parallel: bool) -> int | None:
    """The dimension of a parameter that tensor-parallel ranks share (specification, 10.1); None: all hold it whole."""
    if re.search(r"attn\.(wq_b\.weight|wo_a\.weight|attn_sink)$", name) or name in ("embed.weight", "head.weight"):
        return 0
    if name.endswith("attn.wo_b.weight"):
        return 1
    if expert_parallel and re.search(r"ffn\.experts\.\d+\.", name):
        return None  # whole, on one rank
    if match := re.search(r"experts\..*(w[123])\.weight$", name):
        return 1 if match[1] == "w2" else 0
    return None


@experiment("loading")
def ranks() -> dict[str, Any]:
    """Two ranks of a model, loaded one after the other: their parts together are the whole."""
    found: dict[str, Any] = {}
    for quantised in (False, True):
        config, weights = (quantised_config(), tensors(True)) if quantised else (plain_config(), tensors(False))
        model = quantised_model() if quantised else plain_model()
        whole = by_tensor_name(loaded(model, weights.items()))
        for expert_parallel in (False, True):
            two = altered(
                config,
                parallel_config__tensor_parallel_size=2,
                parallel_config__enable_expert_parallel=expert_parallel,
            )
            parts, sizes = [], []
            for rank in range(2):
                with pretended_rank(rank, 2):
                    parameters = loaded(build(two), weights.items())
                    sizes.append(sum(value.numel() for value in parameters.values()))
                    apart = by_tensor_name(parameters)
                    if expert_parallel:
                        first = 4 * rank
                        apart = {
                            re.sub(r"(?<=ffn\.experts\.)\d+", lambda m, first=first: str(int(m[0]) + first), n): value
                            for n, value in apart.items()
                        }
                    parts.append(apart)
            wrong = []
            for name, value in whole.items():
                held = [part[name] for part in parts if name in part]
                dimension = split_dimension(name, expert_parallel)
                expert = expert_parallel and re.search(r"ffn\.experts\.\d+\.", name)
                if dimension is not None:
                    right = len(held) == 2 and torch.equal(torch.cat(held, dimension), value)
                else:
                    right = len(held) == (1 if expert else 2) and all(torch.equal(part, value) for part in held)
                if not right:
                    wrong.append(name)
            found[f"quantised {quantised}, experts {expert_parallel}"] = {
                "wrong": wrong,
                "sizes": sizes,
                "whole": sum(value.numel() for value in whole.values()),
                "strange": sorted({name for part in parts for name in part} - whole.keys()),
            }
    return found


@experiment("loading")
def parts() -> dict[str, Any]:
    """The layers that cut by themselves, on up to 8 ranks; and a tensor that does not divide."""
    from kvproof.deepseek_v41.attention import GroupedLinear
    from kvproof.deepseek_v41.moe import Experts
    from kvproof.deepseek_v41.parameters import Shard, parameter

    generator, found = torch.Generator().manual_seed(SEED), {}
    w = {n: torch.randn(16, 24, generator=generator) for n in ("w1", "w3")} | {
        "w2": torch.randn(24, 16, generator=generator)
    }
    grouped = torch.randn(8 * 3, 5, generator=generator)
    x = torch.randn(4, 8, 5, generator=generator)
    reference = torch.stack([x[:, g] @ grouped[3 * g : 3 * g + 3].T for g in range(8)], dim=1)
    for ranks in (1, 2, 4, 8):
        held, linears = [], []
        for rank in range(ranks):
            expert = Experts(2, 24, 16 // ranks, 5, rank, ranks)
            expert.w13.data.fill_(torch.nan), expert.w2.data.fill_(torch.nan)
            for matrix, value in w.items():
                expert.load(6, matrix, value)
                expert.load(4, matrix, value), expert.load(7, matrix, value)  # held elsewhere
            held.append(expert)
            linear = GroupedLinear(8 // ranks, 5, 3, rank, ranks)
            linear.weight.weight_loader(linear.weight, grouped)
            linears.append(linear)
        out = torch.cat([linear(x.chunk(ranks, dim=1)[r]) for r, linear in enumerate(linears)], dim=1)
        found[str(ranks)] = {
            "w1": torch.equal(torch.cat([e.w13[1].chunk(2)[0] for e in held]), w["w1"]),
            "w3": torch.equal(torch.cat([e.w13[1].chunk(2)[1] for e in held]), w["w3"]),
            "w2": torch.equal(torch.cat([e.w2[1] for e in held], dim=1), w["w2"]),
            "others untouched": all(bool(e.w13[0].isnan().all() and e.w2[0].isnan().all()) for e in held),
            "grouped": torch.equal(torch.cat([linear.weight for linear in linears]), grouped),
            "grouped product": bool(torch.allclose(out, reference, atol=1e-5)),
        }
    sink = parameter(2, dtype=torch.float32, shard=Shard(1, 2))
    expert = Experts(1, 24, 8, 0, 1, 2)
    found["refused"] = {
        "sink": refused(lambda: sink.weight_loader(sink, torch.ones(3))),
        "expert": refused(lambda: expert.load(0, "w1", torch.ones(15, 24))),
    }
    return found


# --- the plugin; first, while nothing has made vLLM load its plugins


@experiment("vllm")
def plugin() -> dict[str, Any]:
    from unittest.mock import patch

    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP
    from vllm.platforms import current_platform

    from kvproof.deepseek_v41.plugin import SWITCH, register

    def entries() -> list[str]:
        model = ModelRegistry.models[ARCHITECTURE]
        return [model.module_name, model.class_name, MODELS_CONFIG_MAP[ARCHITECTURE].__module__]

    original = ModelRegistry.models[ARCHITECTURE], MODELS_CONFIG_MAP[ARCHITECTURE]
    others = set(ModelRegistry.models) - {ARCHITECTURE}, set(MODELS_CONFIG_MAP) - {ARCHITECTURE}

    def reset() -> None:
        ModelRegistry.models[ARCHITECTURE], MODELS_CONFIG_MAP[ARCHITECTURE] = original

    found: dict[str, Any] = {"before": entries()}
    for case, cpu, switch in (
        ("cpu", True, None),
        ("cpu, switch empty", True, ""),
        ("cpu, force", True, "force"),
        ("cpu, nonsense", True, "nonsense"),
        ("cpu, Force", True, "Force"),
        ("other", False, None),
        ("other, switch empty", False, ""),
        ("other, force", False, "force"),
        ("other, nonsense", False, "nonsense"),
    ):
        os.environ.pop(SWITCH, None)
        if switch is not None:
            os.environ[SWITCH] = switch
        with patch.object(type(current_platform), "is_cpu", lambda self, cpu=cpu: cpu):
            found[case] = refused(register) | {"entries": entries()}
            found[case]["again"] = refused(register) | {"entries": entries()}
        reset()
    os.environ.pop(SWITCH, None)
    found["others kept"] = others == (
        set(ModelRegistry.models) - {ARCHITECTURE},
        set(MODELS_CONFIG_MAP) - {ARCHITECTURE},
    )
    plain_config()  # vLLM loads its plugins
    found["by vLLM"] = entries()
    return found


@experiment("vllm")
def settings() -> dict[str, Any]:
    from vllm.model_executor.models import ModelRegistry

    found = {}
    for name, config in (("plain", plain_config()), ("quantised", quantised_config())):
        model = config.model_config
        cls, _ = ModelRegistry.resolve_model_cls([ARCHITECTURE], model)
        found[name] = {
            "class": f"{cls.__module__}.{cls.__name__}",
            "prefix caching": config.cache_config.enable_prefix_caching,
            "chunked prefill": config.scheduler_config.enable_chunked_prefill,
            "head dtype": str(model.head_dtype),
            "dtype": str(model.dtype),
            "quant_config": config.quant_config is None,
            "mla": model.is_deepseek_mla,
            "quant_method": build(config).config.quantisation.quant_method,
            "head": str(next(p for n, p in build(config).named_parameters() if n == "head.weight").dtype),
        }
    return found


# --- specs


def specs() -> dict[str, Any]:
    from kvproof.deepseek_v41.specs import compressed_spec, ring_spec, window_spec

    bf16 = torch.bfloat16
    return {
        "window": window_spec(block_size=16, width=32, window=8, dtype=bf16),
        "long": compressed_spec(block_size=16, width=32, ratio=2, dtype=bf16),
        "key": compressed_spec(block_size=16, width=16, ratio=1, dtype=bf16),
        "ring": ring_spec(capacity=8, width=64),
    }


def other_value(spec: Any, name: str) -> Any:
    """A legal value that a field of a spec does not have."""
    from vllm.v1.kv_cache_interface import KVQuantMode, SparseCacheRole

    given = getattr(spec, name)
    match name:
        case "dtype":
            return torch.float16
        case "kv_quant_mode":
            return KVQuantMode.FP8_PER_TENSOR
        case "page_size_padded":
            return spec.page_size_bytes + 64
        case "alignment":
            return spec.page_size_bytes // 2 + 64
        case "model_version":
            return "deepseek_v4"
        case "cache_role":
            return next(role for role in SparseCacheRole if role != given)
        case "cache_dtype_str":
            return "fp8"
    if isinstance(given, bool):
        return not given
    return 64 if given is None else 2 * given if given else 4


@experiment("vllm")
def fields() -> dict[str, Any]:
    """Every field of a spec changed by itself, in either order: does it stay uniform, does it merge?"""
    from dataclasses import fields as fields_of
    from dataclasses import replace

    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    found: dict[str, Any] = {}
    for kind, spec in specs().items():
        uniform, merged, planned = [], [], []
        names = [field.name for field in fields_of(spec)]
        for name in names:
            changed = replace(spec, **{name: other_value(spec, name)})
            assert changed != spec, name
            pair = {"one": spec, "other": changed}
            if spec.is_uniform_with_collection(pair) or changed.is_uniform_with_collection(pair):
                uniform.append(name)
            if UniformTypeKVCacheSpecs.from_specs(pair) is not None:
                planned.append(name)
            if not refused(lambda spec=spec, changed=changed: spec.merge([spec, changed]))["type"]:
                merged.append(name)
        found[kind] = {
            "names": names,
            "uniform": uniform,
            "planned": planned,
            "merged": merged,
            "refusal": refused(lambda spec=spec, c=changed: spec.merge([spec, c])),
            "itself": spec.is_uniform_with_collection({"a": spec, "b": replace(spec)})
            and spec.merge([spec, replace(spec)]) == spec,
        }
    return found


@experiment("vllm")
def uniformity() -> dict[str, Any]:
    from vllm.v1.kv_cache_interface import MLAAttentionSpec, SlidingWindowMLASpec

    from kvproof.deepseek_v41.specs import compressed_spec, ring_spec, window_spec

    base = {"block_size": 16, "width": 32, "window": 8, "dtype": torch.bfloat16}
    long = {"block_size": 16, "width": 32, "ratio": 2, "dtype": torch.bfloat16}

    def uniform(*of: Any) -> bool:
        collection = {str(i): spec for i, spec in enumerate(of)}
        answers = {spec.is_uniform_with_collection(collection) for spec in of}
        assert len(answers) == 1, "all members agree"
        return answers.pop()

    foreign = SlidingWindowMLASpec(
        block_size=16, num_kv_heads=1, head_size=32, dtype=torch.bfloat16, sliding_window=8, max_tp_shards=1
    )
    foreign_long = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=32, dtype=torch.bfloat16, max_tp_shards=1)
    one = specs()
    return {
        "windows alike": uniform(*(window_spec(**base) for _ in range(3))),
        "windows of other dtype": uniform(window_spec(**base), window_spec(**{**base, "dtype": torch.float32})),
        "windows of other width": uniform(window_spec(**base), window_spec(**{**base, "width": 64})),
        "windows of one page size": uniform(
            window_spec(**base), window_spec(**{**base, "dtype": torch.float32, "width": 16})
        ),
        "windows of other block": uniform(window_spec(**base), window_spec(**{**base, "block_size": 32})),
        "windows of other window": uniform(window_spec(**base), window_spec(**{**base, "window": 16})),
        "third window differs": uniform(
            window_spec(**base), window_spec(**base), window_spec(**{**base, "dtype": torch.float32})
        ),
        "vLLM's own window": one["window"].is_uniform_with_collection({"a": one["window"], "b": foreign}),
        "vLLM's own MLA": one["key"].is_uniform_with_collection({"a": one["key"], "b": foreign_long}),
        "compressed, ratio and width": uniform(
            compressed_spec(**long), compressed_spec(**{**long, "ratio": 1}), compressed_spec(**{**long, "width": 16})
        ),
        "compressed of other dtype": uniform(
            compressed_spec(**long), compressed_spec(**{**long, "dtype": torch.float32})
        ),
        "compressed of other block": uniform(compressed_spec(**long), compressed_spec(**{**long, "block_size": 32})),
        "rings alike": uniform(ring_spec(capacity=8, width=64), ring_spec(capacity=8, width=64)),
        "rings of other width": uniform(ring_spec(capacity=8, width=64), ring_spec(capacity=8, width=128)),
        "rings of other capacity": uniform(ring_spec(capacity=8, width=64), ring_spec(capacity=16, width=64)),
        "window and long": uniform(one["window"], one["long"]),
        "window and ring": uniform(one["window"], one["ring"]),
        "long and ring": uniform(one["long"], one["ring"]),
    }


@experiment("vllm")
def pages() -> dict[str, Any]:
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    from kvproof.deepseek_v41.specs import compressed_spec, ring_spec, window_spec

    wrong, generator = [], random.Random(SEED)
    for _ in range(200):
        dtype = generator.choice([torch.bfloat16, torch.float32])
        size, width, ratio = 2 * generator.randrange(1, 65), generator.randrange(1, 600), generator.choice([1, 2])
        item = torch.empty(0, dtype=dtype).element_size()
        expected = {
            window_spec(block_size=size, width=width, window=8, dtype=dtype): size * width * item,
            compressed_spec(block_size=size, width=width, ratio=ratio, dtype=dtype): size // ratio * width * item,
            ring_spec(capacity=size, width=width): size * width * 4,
        }
        wrong += [str(spec) for spec, page in expected.items() if spec.page_size_bytes != page]
    return {
        "wrong": wrong,
        "managers": {name: KVCacheSpecRegistry.get_manager_class(spec).__name__ for name, spec in specs().items()},
        "cacheable": {name: spec.prefix_cacheable for name, spec in specs().items()},
        "slot mapping": {name: spec.uses_slot_mapping for name, spec in specs().items()},
        "odd": refused(lambda: compressed_spec(block_size=15, width=32, ratio=2, dtype=torch.bfloat16)),
        "odd at ratio 1": refused(lambda: compressed_spec(block_size=15, width=32, ratio=1, dtype=torch.bfloat16)),
    }


@experiment("vllm")
def groups() -> dict[str, Any]:
    """vLLM's planner over the caches of the model, in both layouts that the backend allows."""
    from vllm.v1.core.kv_cache_utils import get_kv_cache_groups

    from kvproof.deepseek_v41.caches import Cache
    from kvproof.deepseek_v41.metadata import CacheBackend

    found = {}
    for layout in CacheBackend.supported_kv_cache_layouts():
        config = copy.deepcopy(plain_config())
        build(config)
        layers = config.compilation_config.static_forward_context
        assert all(isinstance(layer, Cache) for layer in layers.values())
        of_layer = {name: layer.get_kv_cache_spec(config) for name, layer in layers.items()}
        config.cache_config.kv_cache_layout = layout.name
        planned = get_kv_cache_groups(config, of_layer)
        found[layout.name] = [
            {"layers": sorted(g.layer_names), "kinds": sorted({type(of_layer[n]).__name__ for n in g.layer_names})}
            for g in planned
        ]
    return found


# --- metadata


class Untouchable:
    """Common metadata of which only the counts may be looked at."""

    def __init__(self, requests: int, tokens: int) -> None:
        self.num_reqs = requests
        self.query_start_loc_cpu = torch.linspace(0, tokens, requests + 1).int()

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was looked at before the capacity was checked")


def builder(spec: Any, config: Any = None) -> Any:
    from kvproof.deepseek_v41.metadata import CacheMetadataBuilder

    return CacheMetadataBuilder(spec, ["layer"], config or plain_config(), torch.device("cpu"))


def common(
    lengths: list[int],
    starts: list[int],
    table: Tensor,
    mapping: Tensor,
    *,
    more_requests: int = 0,
    more_tokens: int = 0,
) -> Any:
    """vLLM's metadata of a step; ``more_requests`` and ``more_tokens`` pad it at the end."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    loc = torch.tensor([0, *lengths]).cumsum(0).int()
    loc = torch.cat([loc, loc[-1:].expand(more_requests)])
    seq_lens = torch.tensor([s + n for s, n in zip(starts, lengths, strict=True)] + [7] * more_requests).int()
    return CommonAttentionMetadata(
        query_start_loc=loc,
        query_start_loc_cpu=loc.clone(),
        seq_lens=seq_lens,
        num_reqs=len(lengths),
        num_actual_tokens=int(loc[-1]) + more_tokens,
        max_query_len=max(lengths, default=0),
        max_seq_len=int(seq_lens.max()),
        block_table_tensor=torch.cat([table, torch.full((more_requests, table.shape[1]), 99)]).int(),
        slot_mapping=torch.cat([mapping, torch.full((more_tokens,), -1)]),
    )


@experiment("vllm")
def capacity() -> dict[str, Any]:
    def graphs(size: int | None) -> Any:
        return altered(plain_config(), compilation_config__max_cudagraph_capture_size=size)

    def build_of(tokens: int, config: Any = None, spec: str = "long") -> Any:
        split = [tokens // 4, tokens // 4, tokens // 4, tokens - 3 * (tokens // 4)]
        table = torch.arange(1, 4 * 16 + 1).view(4, 16)
        step = builder(specs()[spec], config).build(0, common(split, [0] * 4, table, torch.zeros(tokens).long()))
        return step.tokens

    def too_many(requests: int, tokens: int, config: Any = None, spec: str = "long") -> dict[str, str]:
        return refused(lambda: builder(specs()[spec], config).build(0, Untouchable(requests, tokens)))

    return {
        "5 requests": {spec: too_many(5, 20, spec=spec) for spec in specs()},
        "65 tokens": {spec: too_many(4, 65, spec=spec) for spec in specs()},
        "65 tokens, small graphs": too_many(4, 65, graphs(32)),
        "129 tokens, graphs of 128": too_many(4, 129, graphs(128)),
        "at the capacity": [build_of(64, spec=spec) for spec in specs()],
        "at the capacity of graphs": build_of(128, graphs(128)),
        "above the batch, below the graphs": build_of(65, graphs(128)),
        "without graphs": build_of(64, graphs(None)),
        "no graphs at all": build_of(64, graphs(0)),
        "empty": builder(specs()["long"])
        .build(0, common([], [], torch.zeros(0, 4).long(), torch.zeros(0).long(), more_requests=1))
        .tokens,
    }


def naive_slot(blocks: list[int], position: int, block_size: int, ratio: int) -> int:
    block = blocks[position // block_size]
    return -1 if position < 0 or block == 0 else block * (block_size // ratio) + position % block_size // ratio


@experiment("vllm")
def slots() -> dict[str, Any]:
    """Random ragged batches against loops over tokens."""
    from kvproof.deepseek_v41.specs import compressed_spec, window_spec

    wrong, written, tokens_seen = [], 0, 0
    for seed in range(150):
        rng = random.Random(seed)
        block_size, ratio = rng.choice([2, 4, 16]), rng.choice([1, 1, 2, 2])
        if rng.random() < 0.3:
            ratio, spec = 1, window_spec(block_size=block_size, width=4, window=8, dtype=torch.float32)
        else:
            spec = compressed_spec(block_size=block_size, width=4, ratio=ratio, dtype=torch.float32)
        requests = rng.randrange(1, 5)
        lengths = [rng.choice([0, 1, 1, 2, rng.randrange(1, 17)]) for _ in range(requests)]
        starts = [rng.choice([0, 1, rng.randrange(0, 60)]) for _ in range(requests)]
        pages = -(-80 // block_size)
        numbers = rng.sample(range(1, 1 + requests * pages), requests * pages)
        table = [numbers[r * pages : (r + 1) * pages] for r in range(requests)]
        for row in table:
            if rng.random() < 0.2:  # a dummy request
                row[:] = [0] * pages
            elif rng.random() < 0.3:  # a block that a window has left behind
                row[0] = 0
        mapping = [-1 if rng.random() < 0.3 else 5 for _ in range(sum(lengths))]
        batch = common(
            lengths,
            starts,
            torch.tensor(table),
            torch.tensor(mapping, dtype=torch.int64),
            more_requests=rng.randrange(3),
            more_tokens=rng.randrange(9),
        )
        step = builder(spec).build(0, batch)
        expected: dict[str, list[Any]] = {"request": [], "position": [], "write_slots": []}
        for r, length in enumerate(lengths):
            for i in range(length):
                position = starts[r] + i
                writes = mapping[len(expected["position"])] >= 0 and (position + 1) % ratio == 0
                slot = naive_slot(table[r], position, block_size, ratio)
                expected["request"].append(r)
                expected["position"].append(position)
                expected["write_slots"].append(slot if writes else -1)
        expected["start"], expected["block_table"] = starts, table
        expected["query_start"] = [sum(lengths[:r]) for r in range(requests + 1)]
        bad = [name for name, value in expected.items() if getattr(step, name).tolist() != value]
        back = torch.tensor([[p, p - 1, p - 3, -1] for p in expected["position"]]).view(-1, 4)
        wanted = [
            [naive_slot(table[r], p, block_size, ratio) for p in row]
            for r, row in zip(expected["request"], back.tolist(), strict=True)
        ]
        if step.slots(back).tolist() != wanted:
            bad.append("slots")
        covered = [
            (int(q), t)
            for part in step.rectangles
            for q, row in zip(part.requests, part.tokens, strict=True)
            for t in row.tolist()
        ]
        if sorted(covered, key=lambda pair: pair[1]) != [(r, t) for t, r in enumerate(expected["request"])]:
            bad.append("rectangles")
        if bad:
            wrong.append({"seed": seed, "fields": bad})
        written += sum(slot >= 0 for slot in expected["write_slots"])
        tokens_seen += len(expected["position"])
    return {"wrong": wrong, "written": written, "tokens": tokens_seen}


@experiment("vllm")
def silent() -> dict[str, Any]:
    """What must not write: padded, dummy and replayed tokens, and the null block. Caches before and after, by bytes."""
    from kvproof.deepseek_v41.ops.paging import write_rows

    found = {}
    for kind in ("window", "long", "key"):
        spec = specs()[kind]
        rows = spec.block_size // int(spec.tokens_per_state)

        def changed(
            lengths: list[int], table: Any, mapping: Any, spec: Any = spec, rows: int = rows, **more: int
        ) -> list[int]:
            step = builder(spec).build(0, common(lengths, [0] * len(lengths), torch.tensor(table), mapping, **more))
            held = torch.full((5, rows, spec.head_size), 3.0)
            write_rows(held, step.write_slots, torch.ones(step.tokens, spec.head_size))
            return (held != 3.0).any(dim=2).sum(dim=1).tolist()

        real, none = torch.zeros(20).long(), torch.full((20,), -1)
        found[kind] = {
            "real": changed([16, 4], [[1, 2], [3, 4]], real),
            "replayed": changed([16, 4], [[1, 2], [3, 4]], none),
            "dummy": changed([16, 4], [[0, 0], [0, 0]], real),
            "dummy beside real": changed([16, 4], [[1, 2], [0, 0]], real),
            "half replayed": changed([20], [[1, 2]], torch.cat([none[:16], real[:4]])),
            "padded": changed([2], [[1, 2]], real[:2], more_requests=2, more_tokens=18),
        }
    ring = builder(specs()["ring"]).build(0, common([3, 1], [0, 5], torch.tensor([[2], [0]]), torch.zeros(4).long()))
    found["ring"] = {
        "write": ring.write_slots.tolist(),
        "table": ring.block_table.tolist(),
        "position": ring.position.tolist(),
        "block_size": ring.block_size,
    }
    return found


# --- rules that hold while layers are made and run (specification 2.4, rules 8 and 9)


@experiment("vllm")
def rules() -> dict[str, Any]:
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    from kvproof.deepseek_v41.shared import Rotation, Shared

    config = plain_config()
    model = build(config)
    model.load_weights(tensors(False).items())
    process_weights_after_loading(model, config.model_config, torch.device("cpu"))
    layers = config.compilation_config.static_forward_context
    twice = refused(lambda: build(config, keep_names=True))
    source, filtered = model.layers[3].attn.indexer, model.layers[5].attn.indexer
    keys = source.keys
    keys.bind_kv_cache(torch.randn(5, 1, 16, 16).bfloat16())
    step = builder(keys.spec).build(0, common([12], [20], torch.tensor([[1, 2]]), torch.zeros(12).long()))
    u, qr = torch.randn(12, 64).bfloat16(), torch.randn(12, 32).bfloat16()
    rotations = [Rotation.at(rope, step.position) for rope in model.ropes]
    shared = Shared(*rotations)
    with set_forward_context({keys.prefix: step}, config):
        before = refused(lambda: filtered(u, qr, shared))
        untouched = shared.selection is None
        source(u, qr, shared)
        own = shared.selection
        after = refused(lambda: filtered(u, qr, shared))
    return {
        "twice": twice,
        "names": sorted(layers),
        "filtered first": before,
        "nothing selected": untouched,
        "filtered after": after,
        "selected": int((shared.selection >= 0).sum()),
        "source selected": int((own >= 0).sum()),
        "same keys": filtered.keys is keys,
    }


# --- options of the engine


@experiment("vllm")
def options() -> dict[str, Any]:
    config = plain_config()
    drafting = engine_config(
        checkpoint(False), speculative_config={"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    )
    engram = {
        "engram_layer_ids": [1],
        "engram_max_ngram_size": 3,
        "engram_n_heads": 2,
        "engram_head_dim": 32,
        "engram_vocab_size": 61,
        "engram_num_embeddings": [272],
        "engram_compressed_vocab_size": 97,
        "engram_pad_token_id": 2,
    }
    vision = {"vision_n_layers": 2, "vision_dim": 32, "vision_n_heads": 2}

    def of_model(**changes: Any) -> Any:
        return altered(config, **{f"model_config__hf_config__{name}": value for name, value in changes.items()})

    cases = {
        "pipeline": altered(config, parallel_config__pipeline_parallel_size=2),
        "data parallel": altered(config, parallel_config__data_parallel_size=2),
        "prefill context parallel": altered(config, parallel_config__prefill_context_parallel_size=2),
        "decode context parallel": altered(config, parallel_config__decode_context_parallel_size=2),
        "microbatches": altered(config, parallel_config__ubatch_size=2),
        "kv cache fp8": altered(config, cache_config__cache_dtype="fp8"),
        "kv cache fp8_ds_mla": altered(config, cache_config__cache_dtype="fp8_ds_mla"),
        "speculation": drafting,
        "engram": of_model(**engram),
        "vision": of_model(**vision),
        "odd block": altered(config, cache_config__block_size=15),
        "no block": altered(config, cache_config__block_size=None),
        "heads": altered(config, parallel_config__tensor_parallel_size=3),
        "groups": altered(config, parallel_config__tensor_parallel_size=4),
        "experts": altered(
            of_model(n_routed_experts=7),
            parallel_config__tensor_parallel_size=2,
            parallel_config__enable_expert_parallel=True,
        ),
        "expert width": altered(of_model(moe_intermediate_size=31), parallel_config__tensor_parallel_size=2),
    }
    found = {}
    for case, changed in cases.items():
        names = changed.compilation_config.static_forward_context
        names.clear()
        found[case] = refused(lambda changed=changed: build(changed, keep_names=True)) | {"layers": sorted(names)}
    found["unchanged"] = refused(lambda: build(altered(config)))
    return found


def main(part: str, directory: str, result: str) -> None:
    global HERE
    HERE = Path(directory)
    print(f"seed {SEED}")
    found = {}
    for name, tried in PARTS[part].items():
        try:
            found[name] = tried()
        except Exception:
            found[name] = {"crash": traceback.format_exc()}
    Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
