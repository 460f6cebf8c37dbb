"""The vLLM plugin (entry point ``kvproof_deepseek_v41`` of ``vllm.general_plugins``)."""

from __future__ import annotations

import os

ARCHITECTURE = "DeepseekV41ForCausalLM"
SWITCH = "KVPROOF_DEEPSEEK_V41"


def register() -> None:
    """Make the architecture resolve to this package where vLLM has no implementation of its own.

    That is on the CPU: its CUDA and ROCm builds and the plugins of other accelerators bring their own, and those stay
    untouched unless ``KVPROOF_DEEPSEEK_V41=force`` is set. Runs in every process of an engine; safe to repeat.

    Raises:
        ValueError: the switch is set to something else than ``force``.
    """
    switch = os.environ.get(SWITCH, "")
    if switch not in ("", "force"):
        raise ValueError(f"{SWITCH} = {switch}: must be force, or unset")
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() and not switch:
        return
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    from kvproof.deepseek_v41.serving import ServingConfig

    ModelRegistry.register_model(ARCHITECTURE, "kvproof.deepseek_v41.model:DeepseekV41ForCausalLM")
    MODELS_CONFIG_MAP[ARCHITECTURE] = ServingConfig
