"""What vLLM is told about this model before it is built, and what of vLLM's options the model cannot honour."""

from __future__ import annotations

import torch
from vllm.config import ModelConfig, VllmConfig
from vllm.model_executor.models.config import VerifyAndUpdateConfig

from kvproof.deepseek_v41.config import TextConfig, refusal
from kvproof.deepseek_v41.plan import Plan, check_serving


class ServingConfig(VerifyAndUpdateConfig):
    """vLLM's hook for a model's own defaults, run when the model's configuration is read."""

    @staticmethod
    def verify_and_update_model_config(model_config: ModelConfig) -> None:
        """Tell vLLM that this model is not its CPU's MLA, that its weights arrive dequantised, and its logits are fp32.

        - vLLM's CPU platform takes every model that keeps latents for one its MLA kernels run, and switches prefix
          caching and chunked prefill off, which those kernels lack. This model attends by itself and has both.
        - Quantised checkpoints are dequantised as they are loaded, so no layer asks vLLM for quantised kernels.
        """
        model_config.model_arch_config.is_deepseek_mla = False
        model_config.model_arch_config.quantization_config = None
        model_config.hf_config.head_dtype = "float32"


def check(config: TextConfig, plan: Plan, vllm_config: VllmConfig) -> None:
    """Refuse what the model cannot honour, before the first layer is built.

    Raises:
        ValueError: naming the option, its value and what is possible.
    """
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    for name, value, limit in (
        ("pipeline_parallel_size", parallel.pipeline_parallel_size, 1),
        ("data_parallel_size", parallel.data_parallel_size, 1),
        ("prefill_context_parallel_size", parallel.prefill_context_parallel_size, 1),
        ("use_ubatching (enable_dbo, ubatch_size)", parallel.use_ubatching, False),
        ("kv_cache_dtype", cache.cache_dtype, "auto"),
        ("speculative_config", vllm_config.speculative_config, None),
        ("engram_layer_ids", config.engram_layer_ids, ()),
        ("vision_n_layers", config.vision.vision_n_layers if config.vision else 0, 0),
    ):
        if value != limit:
            raise refusal(name, value, f"{limit!r}: the text model knows nothing else yet")
    dtype = vllm_config.model_config.dtype
    if dtype not in (torch.bfloat16, torch.float32):
        raise refusal("dtype", str(dtype), "bfloat16 or float32")
    check_serving(
        config,
        plan,
        block_size=cache.block_size,
        tensor_parallel=parallel.tensor_parallel_size,
        expert_parallel=parallel.tensor_parallel_size if parallel.enable_expert_parallel else 1,
        decode_context_parallel=parallel.decode_context_parallel_size,
    )
