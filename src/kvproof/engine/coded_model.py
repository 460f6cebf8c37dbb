"""The model without weights: constructed by vLLM on the meta device, its forward pass replaced by an observer.

Kernels are the substitution; everything around them is production: the runner prepares inputs and metadata, sets the
forward context and calls ``model(...)``. The observer then visits the cache layers in model order and calls the
per-layer connector hooks around each, exactly where the production operators call them: vLLM's own, or a platform's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any, Protocol

import torch
from torch import nn
from vllm.config import ModelConfig, VllmConfig
from vllm.model_executor.layers.attention.kv_transfer_utils import maybe_transfer_kv_layer
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

from kvproof.platforms.platform import Platform, TransferHooks

NEXT_TOKEN = 7
"""The token every request generates. Which one does not matter, that it is known does."""
VISIBLE_VOCABULARY = 32
"""Columns of the logits: samplers work on any width, and a real vocabulary only costs time here."""


class Observer(Protocol):
    """What the forward pass of the coded model is made of."""

    def begin_forward(self) -> None:
        """Loads of this step have been started, no layer ran yet."""

    def update_cache(self, layer: str) -> None:
        """Where the kernel writes the new tokens of ``layer``."""

    def attend(self, layer: str) -> None:
        """Where the kernel reads the cache of ``layer``."""


_observer: Observer | None = None
_platform = Platform()


def use(platform: Platform) -> None:
    """Say which platform the models of this process are constructed for."""
    global _platform
    _platform = platform
    register_model_loader(platform.load_format)(CodedModelLoader)


def observe(observer: Observer | None) -> None:
    """Set the observer of all forward passes of this process."""
    global _observer
    _observer = observer


class CodedModelLoader(BaseModelLoader):
    """Constructs the model on the meta device and replaces its forward pass."""

    def download_model(self, model_config: ModelConfig) -> None:
        del model_config

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        del model, model_config

    def load_model(self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = "") -> nn.Module:
        # The attention layers ask for torch's default dtype, as they do under vLLM's own loaders.
        with set_default_torch_dtype(model_config.dtype), _platform.constructing():
            model = initialize_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
        steps = _layer_steps(vllm_config)
        hidden_size = model_config.get_hidden_size()
        dtype = model_config.dtype

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
            del self
            positions = kwargs["positions"] if "positions" in kwargs else args[1]
            if _observer is not None:
                _observer.begin_forward()
                for step in steps:
                    step()
            return _platform.zeros(positions.shape[-1], hidden_size, dtype=dtype)

        def compute_logits(self: nn.Module, hidden_states: torch.Tensor, *args: Any) -> torch.Tensor:
            del self, args
            logits = _platform.zeros(hidden_states.shape[0], VISIBLE_VOCABULARY, dtype=torch.float32)
            logits[:, NEXT_TOKEN] = 1
            return logits

        model.forward = MethodType(forward, model)
        model.compute_logits = MethodType(compute_logits, model)  # type: ignore[assignment]
        return model.eval()


def _layer_steps(vllm_config: VllmConfig) -> list[Callable[[], None]]:
    """One callable per cache operator, in model order, with the connector hooks its production operator has."""
    from vllm.model_executor.layers.attention import Attention, MLAAttention
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    @maybe_transfer_kv_layer
    def hooked(layer_name: str, update_inside: bool) -> None:
        if _observer is not None:
            if update_inside:
                _observer.update_cache(layer_name)
            _observer.attend(layer_name)

    def attention(name: str, update_inside: bool) -> Callable[[], None]:
        def step() -> None:
            if _observer is not None and not update_inside:
                _observer.update_cache(name)
            hooked(name, update_inside)

        return step

    def plain(name: str) -> Callable[[], None]:
        def step() -> None:
            if _observer is not None:
                _observer.attend(name)
                _observer.update_cache(name)

        return step

    def between(hooks: TransferHooks, caches: list[Callable[[], None]]) -> Callable[[], None]:
        def step() -> None:
            hooks.before()
            for cache in caches:
                cache()
            hooks.after()

        return step

    context = vllm_config.compilation_config.static_forward_context
    layers = {name: module for name, module in context.items() if isinstance(module, AttentionLayerBase)}
    asked = {name: _platform.transfer_hooks(name, module) for name, module in layers.items()}
    own_hooks = {name: hooks for name, hooks in asked.items() if hooks is not None}
    operators = {name: _operator(name, own_hooks) for name in layers}
    steps: list[Callable[[], None]] = []
    for name, module in layers.items():
        if name in own_hooks:
            others = [other for other, operator in operators.items() if operator == name and other != name]
            steps.append(between(own_hooks[name], [plain(cache) for cache in (*others, name)]))
        elif operators[name] == name and isinstance(module, Attention | MLAAttention):
            backend = module.get_attn_backend()
            steps.append(attention(name, bool(backend.forward_includes_kv_cache_update)))
        elif operators[name] == name:
            steps.append(plain(name))
    return steps


def _operator(cache: str, own_hooks: Iterable[str]) -> str:
    """The operator that uses a cache: one with hooks of its own calls them around all caches beside it, an indexer's
    keys among them; any other is the cache's own layer."""
    return next((name for name in own_hooks if cache.startswith(f"{name.rpartition('.')[0]}.")), cache)
