"""Checkpoint tensors into parameters (specification, section 9): names as released, quantised ones dequantised.

A quantised matrix comes as ``X.weight`` and ``X.scale``, in any order and possibly from different files; it is
dequantised when both are there. Everything else is loaded as it comes. What is missing or unknown at the end is an
error that lists the names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import torch
from torch import nn
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from kvproof.deepseek_v41.config import Quantisation
from kvproof.deepseek_v41.ops.formats import dequantise_fp8_block, dequantise_mxfp4

ELSEWHERE = ("mtp.", "vision.", "aligner.", "image_start", "image_newline", "image_end")
"""Tensors of the draft model and of the vision tower: not the text model's."""

PLAIN = (torch.float32, torch.bfloat16, torch.float16)
"""What a tensor without a scale may be stored as."""

_EXPERT = re.compile(r"(.+\.ffn\.)(?:experts\.(\d+)|shared_experts)\.(w[123])\.weight")


def load_weights(model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]], quantisation: Quantisation) -> set[str]:
    """Load every parameter of ``model`` from checkpoint tensors, whatever their order.

    Returns:
        The names of the parameters that were loaded: all of them.

    Raises:
        ValueError: a tensor no parameter takes or one given twice, a parameter no tensor filled, a scale without its
            matrix, a shape or a format that does not fit; with the names.
    """
    parameters = dict(model.named_parameters())
    expected = set(_expected(model, parameters))
    unknown = []
    for name, tensor in _dequantised(weights, quantisation):
        if name not in expected:
            unknown.append(name)
            continue
        expected.discard(name)
        try:
            _load(model, parameters, name, tensor)
        except (ValueError, RuntimeError, IndexError) as error:
            raise ValueError(f"checkpoint tensor {name}: {error}") from error
    if unknown or expected:
        raise ValueError(f"checkpoint does not fit the model: missing {_some(expected)}; unexpected {_some(unknown)}")
    return set(parameters)


def _expected(model: nn.Module, parameters: dict[str, nn.Parameter]) -> Iterator[str]:
    """The tensors a complete checkpoint has, quantised ones under the name of their matrix."""
    for name in parameters:
        path, _, stack = name.rpartition(".")
        if stack not in ("w13", "w2"):
            yield name
            continue
        shared = path.endswith("shared_experts")
        total = 1 if shared else model.get_submodule(path.rpartition(".")[0]).gate.weight.shape[0]
        for expert in range(total):
            for matrix in ("w1", "w3") if stack == "w13" else ("w2",):
                yield f"{path}.{matrix}.weight" if shared else f"{path}.{expert}.{matrix}.weight"


def _load(model: nn.Module, parameters: dict[str, nn.Parameter], name: str, tensor: torch.Tensor) -> None:
    if tensor.dtype not in PLAIN:
        raise ValueError(f"{tensor.dtype}: must be one of {PLAIN}")
    if match := _EXPERT.fullmatch(name):
        layer, expert, matrix = match.groups()
        held = model.get_submodule(f"{layer}{'shared_experts' if expert is None else 'experts'}")
        held.load(int(expert or 0), matrix, tensor)
        return
    # vLLM's loaders cut this rank's part out of whatever is large enough, and broadcast what is too narrow.
    whole = _whole_shape(model.get_submodule(name.rpartition(".")[0]))
    if whole is not None and list(tensor.shape) != whole:
        raise ValueError(f"shape {list(tensor.shape)}: must be {whole}")
    param = parameters[name]
    param.weight_loader(param, tensor)  # type: ignore[attr-defined]


def _whole_shape(layer: nn.Module) -> list[int] | None:
    """Shape of the whole matrix of one of vLLM's layers, None of ours: those look for themselves."""
    if isinstance(layer, LinearBase):
        return [layer.output_size, layer.input_size]
    if isinstance(layer, VocabParallelEmbedding):
        return [layer.org_vocab_size, layer.embedding_dim]
    return None


def _dequantised(
    weights: Iterable[tuple[str, torch.Tensor]], quantisation: Quantisation
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of the text model; a quantised matrix once its scale is known, as fp32."""
    waiting: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in weights:
        if name.startswith(ELSEWHERE):
            continue
        matrix, _, kind = name.rpartition(".")
        if kind != "scale" and not (kind == "weight" and tensor.element_size() == 1):
            yield name, tensor
            continue
        if not quantisation.quantised:
            raise ValueError(f"checkpoint tensor {name}: quantised, but the configuration has no quantization_config")
        pair = waiting.setdefault(matrix, {})
        if kind in pair:
            raise ValueError(f"checkpoint tensor {name}: given twice")
        pair[kind] = tensor
        if len(pair) == 2:
            del waiting[matrix]
            yield f"{matrix}.weight", _dequantise(matrix, pair["weight"], pair["scale"], quantisation)
    if waiting:
        have = sorted(f"{matrix}.{kind}" for matrix, pair in waiting.items() for kind in pair)
        raise ValueError(f"checkpoint has {_some(have)} without the scale or matrix that belongs to it")


def _dequantise(matrix: str, weight: torch.Tensor, scale: torch.Tensor, quantisation: Quantisation) -> torch.Tensor:
    try:
        if weight.dtype == torch.float8_e4m3fn:
            # A quantised configuration has a block size: its contract.
            return dequantise_fp8_block(weight, scale, quantisation.weight_block_size)  # type: ignore[arg-type]
        return dequantise_mxfp4(weight, scale)
    except ValueError as error:
        raise ValueError(f"checkpoint tensor {matrix}.weight: {error}") from error


def _some(names: Iterable[str]) -> str:
    listed = sorted(names)
    more = f" and {len(listed) - 8} more" if len(listed) > 8 else ""
    return (", ".join(listed[:8]) or "nothing") + more
