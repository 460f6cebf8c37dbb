"""Where vllm-ascend's operators call the KV connector themselves, instead of under vLLM's decorator."""

from __future__ import annotations

from typing import Any

from kvproof.platforms.platform import TransferHooks

WAIT = "wait_for_kv_layer_from_connector"
"""The function of vllm_ascend.attention.utils whose callers are meant."""


def of(layer: str, module: Any) -> TransferHooks | None:
    """The hooks of ``module``, the cache layer called ``layer``; None where its operator has none of its own.

    Which operators have them is read off their code, so that a release that moves them is followed. Latent and sparse
    attention hand their cache to the connector, linear attention says only that a layer is done.
    """
    operator = getattr(module, "impl", module)
    if not _names(type(operator), WAIT):
        return None
    from vllm.model_executor.layers.mamba.abstract import MambaBase
    from vllm_ascend.attention import utils

    def after() -> None:
        if isinstance(module, MambaBase):
            utils.maybe_save_kv_layer_to_connector("", [])
        else:
            utils.maybe_save_kv_layer_to_connector(layer, list(module.kv_cache))

    return TransferHooks(lambda: utils.wait_for_kv_layer_from_connector(layer), after)


def _names(operator: type, function: str) -> bool:
    """Whether the code of a class's methods, its own or inherited, names ``function``."""
    methods = (getattr(method, "__func__", method) for base in operator.__mro__ for method in vars(base).values())
    return any(function in method.__code__.co_names for method in methods if hasattr(method, "__code__"))
